"""A job is held from the start; later it leaves a node that is drained, under the same id. What all
its ranks printed meanwhile is told in order."""
import getpass
import json
import os
import subprocess

from cluster import BIN, PATIENCE, Cluster, expect, tell, until

STEPS = 60


def held_from_the_start(c):
    job = c.submit(c.job(steps=STEPS, checkpoint_every=100000, max_restarts=0), "--hold")
    c.kill("coordinator")
    c.start_coordinator()
    until(lambda: c.n_idle() == 5, 20, "every worker is back")
    shown = c.show(job)
    expect(shown["state"] == "QUEUED" and shown["held"], f"it is not held any more: {shown}")
    expect(shown["reason"] == f"held by {getpass.getuser()}; ballast job release {job} lets it "
           "start", f"who holds it, and what to type: {shown['reason']}")
    done = c.run("job", "resume", job)
    expect(done.returncode == 5 and "ballast job release" in done.stderr,
           f"resume of what is held: exit {done.returncode}, {done.stderr}")
    c.ok("job", "release", job)
    return job


def off_a_node(c, job):
    """Mid-job a worker is drained; what it did is saved, and another one takes its place."""
    left = c.wait_step(job, 1)["worker_names"][0]
    c.ok("worker", "drain", left)
    c.wait_step(job, 20)
    c.ok("job", "requeue", job, "--reason", "a loud fan")
    c.let_go()
    c.ok("job", "requeue", job)  # twice is fine
    c.kill("coordinator")  # whatever it has acknowledged, it has kept
    c.start_coordinator()
    c.ok("wait", job, "--timeout", "200")
    ended = c.show(job)
    expect(ended["attempt"] == 2 and ended["restarts"] == 0, f"one requeue, no failure: {ended}")
    expect(left not in ended["worker_names"], f"it is still on {left}: {ended['worker_names']}")
    steps = c.steps(job)
    place = [s["step"] for s in steps if s["attempt"] == 2][0] - 1
    expect(len(steps) == STEPS and 20 <= place < STEPS, f"{len(steps)} steps, cut after {place}")
    ran = [(e["step"], e["text"]) for e in c.events(job) if e["kind"] == "JOB_RUNNING"]
    expect(ran == [(0, "attempt 1 from the beginning"),
                   (place, f"attempt 2 goes on from the checkpoint of step {place}")],
           f"where its attempts began: {ran}")
    why = [e["text"] for e in c.events(job) if e["kind"] == "JOB_QUEUED"]
    expect(len(why) == 1 and "a loud fan" in why[0], f"why it was queued again: {why}")


def logs_of_all_ranks(c, job):
    def at(lines, text):
        return [i for i, x in enumerate(lines) if x["line"].endswith(text)]

    def whole():  # output may come after the job's end is known
        lines = c.ok("logs", job, "--rank", "all", "--json").splitlines()
        lines = [json.loads(line) for line in lines]
        return lines if len(at(lines, f"finished at step {STEPS}")) == 4 else None
    lines = until(whole, 20, "the ends of four logs")
    for rank in range(4):
        expect([x["line"] for x in lines if x["rank"] == rank] ==
               c.ok("logs", job, "--rank", rank).splitlines(),
               f"what rank {rank} printed is not what is in that of all")
    began, ended = at(lines, "starts at step 0"), at(lines, f"finished at step {STEPS}")
    expect(len(began) == 4 and max(began) < min(ended), f"in order of time: {began}, {ended}")
    text = c.ok("logs", job, "--rank", "all", "--follow")
    expect(text == "".join(f"{x['rank']}: {x['line']}\n" for x in lines), f"followed: {text}")
    tail = c.ok("logs", job, "--rank", "all", "--tail", 5)
    expect(tail.splitlines() == text.splitlines()[-5:], f"the last five: {tail}")


def follow_all(c, job):
    return subprocess.Popen([os.path.join(BIN, "ballast"), "logs", job, "--rank", "all", "-f"],
                            env=c.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def was_followed(c, job, follower):
    """Through both lives of the coordinator, no line twice; the last ones may come too late."""
    text = follower.communicate(timeout=60 * PATIENCE)[0]
    expect(follower.returncode == 0, f"logs -f: exit {follower.returncode}")
    for rank in range(4):
        seen = [line[3:] for line in text.splitlines() if line.startswith(f"{rank}: ")]
        own = c.ok("logs", job, "--rank", rank).splitlines()
        expect(seen and seen == own[:len(seen)], f"of rank {rank} was followed: {seen}")


def what_was_cancelled_goes_on(c):
    job = c.submit(c.job(steps=100000, checkpoint_every=5))
    c.wait_step(job, 7)
    c.ok("job", "cancel", job)
    at = c.wait(job, "CANCELLED", 20)["checkpoint_step"]
    c.ok("job", "requeue", job)
    shown = c.wait(job, "RUNNING")
    expect(shown["attempt"] == 2, f"the same job: {shown}")
    again = until(lambda: [s["step"] for s in c.steps(job) if s["attempt"] == 2], 20, "a step")
    expect(again[0] > at >= 5 and again[0] % 5 == 1,  # one may have been written meanwhile
           f"from the checkpoint of step {at} it went on with {again[0]}")
    c.ok("job", "cancel", job)
    c.wait(job, "CANCELLED", 20)


def story():
    """submit --hold and release; requeue of a running and of a cancelled job"""
    with Cluster(n_workers=5, hold_before=21) as c:
        c.hold()
        job = held_from_the_start(c)
        follower = follow_all(c, job)
        off_a_node(c, job)
        logs_of_all_ranks(c, job)
        was_followed(c, job, follower)
        what_was_cancelled_goes_on(c)


tell(story)
