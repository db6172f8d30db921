"""What hangs is found within the lease: a collective that a rank skips, a step without end."""
import re
import time

from cluster import PATIENCE, Cluster, expect, tell, until

LEASE = 10.0  # lost_after


def start_all(c, failpoint, on):
    """The workers anew; those in on hang as failpoint says."""
    until(lambda: c.n_idle() == c.n_workers, 20, "every worker idle")
    env = c.env
    for i in on:
        c.kill(f"worker-{i}")
        c.env = dict(env, BALLAST_FAILPOINT=failpoint)
        c.start_worker(i)
        c.env = env
    until(lambda: c.n_idle() == c.n_workers, 40, "every worker idle")


def reason(c, job):
    """Of the first attempt's end."""
    event = until(lambda: [e for e in c.events(job) if e["kind"] == "JOB_RECOVERING"], 120,
                  "the end of the first attempt")[0]
    return event["text"]


def hangs(c, job, failpoint):
    """Waits for the hang and returns how long it took to be told, and what was told."""
    until(lambda: any(f"failpoint {failpoint}" in c.run("logs", job, "--rank", r).stdout
                      for r in range(4)), 60, f"failpoint {failpoint}")
    began = time.monotonic()
    text = reason(c, job)
    took = time.monotonic() - began
    print(f"told after {took:.1f} s: {text}")
    expect(took < LEASE * PATIENCE, f"a hang was told after {took:.0f} s: {text}")
    return text


def is_placed(text):
    """Whether rank, operation and number are told of a collective that went wrong."""
    return (re.search(r"rank \d waited [0-9.]+ s at \w+ \d+ .*for: rank \d at \w+ \d+ ", text) or
            re.search(r"ranks disagree in group \d+: rank \d calls \w+ \d+", text) or
            re.search(r"\w+ \d+: rank \d sends \d+ rows to rank \d, which expects \d", text))


def skipped_collective(c):
    """One rank of four skips an all-to-all: rank, operation and number are told."""
    start_all(c, "skip-all-to-all:1000:error", [1])
    job = c.submit(c.job(steps=100000, checkpoint_every=1000))
    text = hangs(c, job, "skip-all-to-all")
    expect(is_placed(text), f"rank, operation and number are missing: {text}")
    c.ok("job", "cancel", job)
    c.wait(job, "CANCELLED")


def first_collective(c):
    """The same in the first step, when nobody knows how long one takes."""
    start_all(c, "skip-all-to-all:2:error", [2])
    job = c.submit(c.job(steps=100000, checkpoint_every=1000))
    text = hangs(c, job, "skip-all-to-all")
    expect(is_placed(text), f"rank, operation and number are missing: {text}")
    c.ok("job", "cancel", job)
    c.wait(job, "CANCELLED")


def endless_step(c, step):
    """All ranks hang outside of collectives, where none of them waits for another."""
    start_all(c, f"before-step:{step}:sleep_3600000", range(4))
    job = c.submit(c.job(steps=100000, checkpoint_every=1000))
    text = hangs(c, job, "before-step")
    expect(re.search(rf"the trainer has come no further for [0-9.]+ s after step {step - 1}", text),
           text)
    c.ok("job", "cancel", job)
    c.wait(job, "CANCELLED")


def story():
    """a skipped collective and an endless step are told within the lease, with rank and place"""
    with Cluster(n_workers=4) as c:
        skipped_collective(c)
        first_collective(c)
        endless_step(c, 30)
        endless_step(c, 1)


tell(story)
