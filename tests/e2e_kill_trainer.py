"""kill -9 of one trainer: the attempt ends, the same workers run the next one."""
import os
import signal

from cluster import Cluster, expect, tell, until


def story():
    """kill -9 a trainer: the same workers resume the job, whose output tells of both attempts"""
    with Cluster(n_workers=4, hold_before=16) as c:
        c.hold()
        job = c.submit(c.job(steps=80, checkpoint_every=10))
        c.wait_step(job, 15)
        before = c.trainers(job)
        os.kill(before[1], signal.SIGKILL)
        c.let_go()
        until(lambda: c.show(job)["attempt"] == 2, 20, "a second attempt")
        c.wait(job, "DONE")
        expect(len(c.steps(job)) == 80, "a step is missing")
        words = " ".join(f"{e['kind']} {e['text']}" for e in c.events(job))
        expect("signal 9" in words or "killed" in words.lower(), f"the events hide why: {words}")
        expect(all(p.poll() is None for p in c.processes.values()), "a daemon died with it")


tell(story)
