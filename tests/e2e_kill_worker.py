"""kill -9 of a worker in mid-step: its trainer goes with it, the job resumes by itself."""
import time

from cluster import Cluster, expect, is_alive, tell, until


def story():
    """kill -9 a worker: the job resumes from its checkpoint on another and finishes"""
    with Cluster(n_workers=5, hold_before=26) as c:
        c.hold()
        job = c.submit(c.job(steps=120, checkpoint_every=10))
        c.wait_step(job, 25)
        trainers = c.trainers(job)
        expect(sorted(trainers) == [0, 1, 2, 3], f"trainers: {trainers}")
        victim = c.daemon_of(trainers[2])
        c.kill(victim)
        c.let_go()
        began = time.monotonic()
        until(lambda: not is_alive(trainers[2]), 3, "the dead daemon's trainer is gone")
        c.wait(job, "DONE", 50)
        print(f"from the kill to the job's end: {time.monotonic() - began:.1f} s")

        expect(len(c.steps(job)) == 120, "a step is missing")
        final = c.show(job)
        expect(final["attempt"] == 2, f"attempts: {final}")
        events = c.events(job)
        words = " ".join(f"{e['kind']} {e['text']}" for e in events)
        for word in ("JOB_SUBMITTED", "JOB_ASSIGNED", "RECOVERING", "DONE"):
            expect(word in words, f"the events do not say {word}: {words}")
        expect(words.count("JOB_ASSIGNED") == 2, f"assigned once per attempt: {words}")
        c.start_worker(int(victim[7:]))  # the machine comes back
        until(lambda: c.n_idle() == 5, 20, "all five workers are idle again")


tell(story)
