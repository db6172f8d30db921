"""A worker that is told to end lets its trainer write a checkpoint; the job goes on elsewhere."""
import signal

from cluster import Cluster, expect, tell, until


def story():
    """SIGTERM to a worker in mid-job: a checkpoint, goodbye, and no step is done twice for long"""
    with Cluster(n_workers=5) as c:
        job = c.submit(c.job(steps=200, checkpoint_every=1000))
        c.wait_step(job, 20)
        victim = c.daemon_of(c.trainers(job)[1])
        process = c.processes.pop(victim)
        process.send_signal(signal.SIGTERM)
        expect(process.wait(20) == 0, f"{victim} ended with {process.returncode}")
        gone = "w" + victim[7:]
        expect(c.workers()[gone]["state"] == "GONE", f"{gone}: {c.workers()[gone]}")
        shown = until(lambda: c.show(job)["attempt"] == 2 and c.show(job), 20, "a second attempt")
        c.wait(job, "DONE")
        expect(len(c.steps(job)) == 200, "a step is missing")
        print(f"checkpoint of the stop: step {shown['checkpoint_step']}")
        expect(shown["checkpoint_step"] >= 20, "the stop cost all progress: no checkpoint")


tell(story)
