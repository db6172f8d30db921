"""A paused job lets others use its workers, daemons come and go; it goes on, no step is lost."""
from cluster import Cluster, expect, tell, until

STEPS = 240


def a_job(c, name):
    return c.job(name=name, steps=STEPS, checkpoint_every=100000, deterministic=True,
                 max_restarts=0)


def pause(c):
    c.hold()
    job = c.submit(a_job(c, "paused"))
    c.wait_step(job, 20)
    c.ok("job", "pause", job, "--reason", "lunch")
    c.let_go()
    c.kill("coordinator")  # whatever it has acknowledged, it has kept
    c.start_coordinator()
    c.ok("wait", job, "--for=state=PAUSED", "--timeout", "60")
    shown = c.show(job)
    place = int(c.json("job", "show", job)["checkpoint_step"])
    expect(20 <= place < STEPS and shown["step"] == place, f"where it paused: {shown}, {place}")
    expect("lunch; ballast job resume" in shown["reason"], f"what to type: {shown['reason']}")
    until(lambda: c.n_idle() == 4 and not c.trainers(job), 20, "its workers are free")
    return job, place


def meanwhile(c, job):
    for verb in ("hold", "requeue"):
        done = c.run("job", verb, job)
        expect(done.returncode == 5 and "is PAUSED" in done.stderr,
               f"{verb}: exit {done.returncode}, {done.stderr}")
    c.ok("job", "pause", job)  # twice is fine
    c.wait(c.submit(c.job(name="between", steps=3)), "DONE")
    c.processes.pop("worker-3").terminate()
    until(lambda: c.workers()["w3"]["state"] == "GONE", 20, "a worker has left")
    c.start_worker(3)
    until(lambda: c.n_idle() == 4, 20, "every worker idle")
    expect(c.show(job)["state"] == "PAUSED", f"it is not paused any more: {c.show(job)}")


def story():
    """pause, kill -9 of the coordinator, another job, resume: every step once, the same losses"""
    with Cluster(n_workers=4, hold_before=21) as c:
        job, place = pause(c)
        meanwhile(c, job)
        c.ok("job", "resume", job)
        ended = c.wait(job, "DONE")
        expect(ended["attempt"] == 2, f"attempts: {ended}")
        expect(ended["restarts"] == 0, f"a resume counts as a restart: {ended}")
        steps = c.steps(job)
        expect(len(steps) == STEPS, f"{len(steps)} steps")
        expect([s["step"] for s in steps if s["attempt"] == 2][0] == place + 1,
               "a step was taken twice")
        done = c.run("job", "resume", job)
        expect(done.returncode == 5, f"resume of what is done: exit {done.returncode}")
        whole = c.submit(a_job(c, "unbroken"))
        c.wait(whole, "DONE")
        expect([s["loss"] for s in steps] == [s["loss"] for s in c.steps(whole)],
               "the losses are not those of an unbroken run")


tell(story)
