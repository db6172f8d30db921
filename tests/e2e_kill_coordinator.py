"""kill -9 of the coordinator in mid-job: training never notices, nothing is lost or doubled."""
import os

from cluster import Cluster, expect, tell, until


def story():
    """kill -9 the coordinator: same trainers, same id, attempt 1, every step once"""
    with Cluster(n_workers=4) as c:
        job = c.submit(c.job(steps=800, checkpoint_every=200))
        c.wait_step(job, 10)
        before = c.trainers(job)
        c.kill("coordinator")
        until(lambda: os.path.exists(f"{c.folder}/checkpoint-1/step-200"), 60,
              "training goes on without it")
        expect(c.trainers(job) == before, "training stopped with the coordinator")
        c.start_coordinator()
        shown = c.show(job)
        expect(shown["attempt"] == 1, f"attempt: {shown}")
        expect(c.trainers(job) == before or shown["state"] == "DONE", "other trainers")
        c.wait(job, "DONE")
        final = c.show(job)
        expect(final["attempt"] == 1, f"it was restarted: {final}")
        expect(len(c.steps(job)) == 800, "a step is missing")
        other = c.submit(c.job(name="after", steps=5))
        expect(int(other) == int(job) + 1, f"the next id is {other}")
        c.wait(other, "DONE")


tell(story)
