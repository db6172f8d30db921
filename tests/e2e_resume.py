"""A run that is cut resumes exactly; the same run may go on with another number of workers."""
import filecmp
import os
import signal

from cluster import Cluster, expect, tell, until

STEPS = 60


def files_of(folder):
    found = {}
    for at, _, names in os.walk(folder):
        for name in names:
            found[os.path.relpath(os.path.join(at, name), folder)] = os.path.join(at, name)
    return found


def losses(rows):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in rows]


def unbroken(c):
    job = c.submit(c.job(name="unbroken", steps=STEPS, checkpoint="unbroken", deterministic=True))
    c.wait(job, "DONE")
    return losses(c.steps(job))


def cut(c, whole):
    """kill -9 in mid-step: the second attempt resumes from a checkpoint."""
    c.hold()
    job = c.submit(c.job(name="cut", steps=STEPS, checkpoint="cut", deterministic=True))
    c.wait_step(job, 25)
    os.kill(c.trainers(job)[3], signal.SIGKILL)
    c.let_go()
    c.wait(job, "DONE")
    expect(c.show(job)["attempt"] == 2, "it was not cut")
    expect(losses(c.steps(job)) == whole, "another curve after the cut")


def cancelled_in_mid_job(c, **job):
    c.hold()
    job = c.submit(c.job(steps=STEPS, **job))
    c.wait_step(job, 25)
    c.ok("job", "cancel", job)
    until(lambda: len(c.trainers(job)) < 4, 5, "the one that waits for the others hears of it")
    c.let_go()
    return c.wait(job, "CANCELLED")


def stopped_and_submitted_again(c, whole):
    shown = cancelled_in_mid_job(c, name="stopped", checkpoint="again", deterministic=True)
    again = c.submit(c.job(name="again", steps=STEPS, checkpoint="again", deterministic=True))
    c.wait(again, "DONE")
    rows = c.json("metrics", again)
    rows = rows["items"] if isinstance(rows, dict) else rows
    first = rows[0]["step"]
    expect(10 < first <= shown["step"] + 1, f"it began at {first}, the first run at {shown}")
    expect(losses(c.steps(again, first)) == whole[first - 1:], "another curve after the stop")


def same_checkpoints(c, a, b):
    files_a, files_b = files_of(f"{c.folder}/{a}"), files_of(f"{c.folder}/{b}")
    last = [n for n in files_a if f"{STEPS}" in n.split(os.sep)[0]] or list(files_a)
    expect(any(n.endswith(".safetensors") for n in last), f"no tensors: {sorted(files_a)}")
    for name in last:
        expect(name in files_b, f"{b} lacks {name}: {sorted(files_b)}")
        expect(filecmp.cmp(files_a[name], files_b[name], shallow=False), f"{name} differs in {b}")


def fewer_workers_go_on(c):
    """Another layout adds in another order, so the curve agrees within rounding."""
    cancelled_in_mid_job(c, name="four", checkpoint="resized")
    until(lambda: c.n_idle() == 4, 10, "workers are free")
    b = c.submit(c.job(name="two", steps=STEPS, checkpoint="resized", workers=2, ep=2))
    c.wait(b, "DONE")
    rows = c.json("metrics", b)
    rows = rows["items"] if isinstance(rows, dict) else rows
    first = rows[0]["step"]
    expect(first > 10, f"it began anew at step {first}")
    return first, losses(c.steps(b, first))


def story():
    """run-stop-resume equals the unbroken run bit for bit; other workers go on, too"""
    with Cluster(n_workers=4, hold_before=26) as c:
        whole = unbroken(c)
        expect(len(whole) == STEPS, f"{len(whole)} steps")
        cut(c, whole)
        same_checkpoints(c, "unbroken", "cut")
        stopped_and_submitted_again(c, whole)
        same_checkpoints(c, "unbroken", "again")
        first, resized = fewer_workers_go_on(c)
        worst = max(abs(x[1] - y[1]) for x, y in zip(resized, whole[first - 1:]))
        print(f"two workers instead of four from step {first}: loss differs by at most {worst:.1e}")
        expect(worst < 5e-3, "the resized run is another run")


tell(story)
