"""What people do to jobs and workers: cancel, hold, release, set, drain, resume."""
from cluster import Cluster, expect, tell, until


def cancel(c):
    job = c.submit(c.job(name="cancelled", steps=100000))
    c.wait_step(job, 5)
    c.ok("job", "cancel", job)
    shown = c.wait(job, "CANCELLED", 20)
    expect(shown["step"] >= 5, f"its steps are forgotten: {shown}")
    until(lambda: not c.trainers(job), 5, "its trainers are gone")
    c.ok("job", "cancel", job)  # twice is fine
    done = c.run("job", "cancel", 999)
    expect(done.returncode == 3, f"cancel of no job: exit {done.returncode}")
    expect(c.run("wait", job).returncode != 0, "wait mirrors a cancelled job as success")


def hold_and_release(c):
    until(lambda: c.n_idle() == 4, 10, "workers are free")
    blocker = c.submit(c.job(name="blocker", steps=100000))
    c.wait_step(blocker, 1)
    job = c.submit(c.job(name="held", steps=5))
    c.ok("job", "hold", job)
    c.ok("job", "cancel", blocker)
    c.wait(blocker, "CANCELLED", 20)
    until(lambda: c.n_idle() == 4, 10, "workers are free")
    shown = c.show(job)
    expect(shown["state"] == "QUEUED" and shown["held"], f"held: {shown}")
    expect(f"; ballast job release {job}" in shown["reason"], f"what to type: {shown}")
    c.ok("job", "release", job)
    c.wait(job, "DONE")


def change_settings(c):
    until(lambda: c.n_idle() == 4, 10, "workers are free")
    job = c.submit(c.job(name="changed", steps=100000, checkpoint_every=50000))
    c.wait_step(job, 3)
    c.ok("job", "set", job, "checkpoint.every_steps=7", "scheduling.max_restarts=5")
    done = c.run("job", "set", job, "train.steps=5")
    expect(done.returncode == 2 and "checkpoint.every_steps" in done.stderr,
           f"train.steps of a running job: exit {done.returncode}, {done.stderr}")
    kept = until(lambda: c.show(job)["checkpoint_step"], 30, "a checkpoint by the new setting")
    expect(kept % 7 == 0, f"a checkpoint that no setting explains: step {kept}")
    told = [e["text"] for e in c.events(job) if e["kind"] == "JOB_SETTINGS"]
    expect(len(told) == 1 and told[0].startswith("checkpoint.every_steps 50000 -> 7, "),
           f"the change as an event: {told}")
    expect("every_steps: 7" in c.ok("job", "show", job), "job show has the old settings")
    c.ok("job", "cancel", job)
    c.wait(job, "CANCELLED", 20)
    done = c.run("job", "set", job, "checkpoint.keep=2")
    expect(done.returncode == 5, f"settings of an ended job: exit {done.returncode}")


def drain_and_resume(c):
    until(lambda: c.n_idle() == 4, 10, "workers are free")
    c.ok("worker", "drain", "w3", "--reason", "a new fan")
    w = c.workers()["w3"]
    expect(w["state"] == "DRAINED" and "a new fan" in w["reason"], f"drained: {w}")
    job = c.submit(c.job(name="waits", steps=5))
    shown = c.show(job)
    expect(shown["state"] == "QUEUED" and shown["reason"], f"it runs on a drained worker: {shown}")
    c.ok("worker", "resume", "w3")
    c.wait(job, "DONE")
    done = c.run("worker", "drain", "nobody", "--reason", "x")
    expect(done.returncode == 3, f"drain of no worker: exit {done.returncode}")


def story():
    """cancel, hold, release, set, drain, resume"""
    with Cluster(n_workers=4) as c:
        cancel(c)
        hold_and_release(c)
        change_settings(c)
        drain_and_resume(c)


tell(story)
