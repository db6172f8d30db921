"""A worker that is told to end lets its trainer write a checkpoint; the job goes on elsewhere."""
import os
import signal
import time

from cluster import PATIENCE, Cluster, expect, is_alive, tell, until


def told_once(c):
    """Nothing has failed, so the budget of restarts is not touched."""
    c.hold()
    job = c.submit(c.job(steps=500, checkpoint_every=1000, max_restarts=0))
    c.wait_step(job, 20)
    trainer = c.trainers(job)[1]
    victim = c.daemon_of(trainer)
    process = c.processes.pop(victim)
    os.kill(trainer, signal.SIGTERM)  # as a batch system does, which tells every process of a task
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as where a script passes on what its whole group got
    c.let_go()
    expect(process.wait(20 * PATIENCE) == 0, f"{victim} ended with {process.returncode}")
    gone = "w" + victim[7:]
    expect(c.workers()[gone]["state"] == "GONE", f"{gone}: {c.workers()[gone]}")
    shown = until(lambda: c.show(job)["attempt"] == 2 and c.show(job), 20, "a second attempt")
    ended = c.wait(job, "DONE")
    expect(ended["restarts"] == 0, f"the stop counts as a failure: {ended}")
    expect(len(c.steps(job)) == 500, "a step is missing")
    print(f"checkpoint of the stop: step {shown['checkpoint_step']}")
    expect(shown["checkpoint_step"] >= 20, "the stop cost all progress: no checkpoint")
    c.start_worker(int(victim[7:]))


def told_twice(c):
    """Its trainer hangs, so the first word would take its full grace."""
    until(lambda: c.n_idle() == 5, 20, "every worker idle")
    job = c.submit(c.job(steps=100000))
    c.wait_step(job, 5)
    trainer = c.trainers(job)[1]
    victim = c.daemon_of(trainer)
    os.kill(trainer, signal.SIGSTOP)
    process = c.processes.pop(victim)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    expect(process.poll() is None, "it did not wait for its trainer")
    # One that comes within a second of the first is taken for its echo.
    until(lambda: process.send_signal(signal.SIGTERM) or process.poll() is not None, 5, "its end")
    expect(process.wait() == 0, f"{victim} ended with {process.returncode}")
    until(lambda: not is_alive(trainer), 2, "its trainer is killed")
    c.ok("job", "cancel", job)
    c.wait(job, "CANCELLED")


def story():
    """SIGTERM to a worker in mid-job: a checkpoint and goodbye; a second SIGTERM ends it at once"""
    with Cluster(n_workers=5, hold_before=21) as c:
        told_once(c)
        told_twice(c)


tell(story)
