"""A job is submitted, runs to its end, and says so by its exit code; bad jobs are refused."""
import os

from cluster import Cluster, expect, tell


def a_job_runs_to_its_end(c):
    path = c.job(steps=20, checkpoint_every=10)
    done = c.run("submit", path, "--wait", timeout=50)
    expect(done.returncode == 0, f"--wait ended with {done.returncode}: {done.stderr}")
    job = c.show(1)
    expect(job["state"] == "DONE" and job["step"] == 20, f"not done: {job}")
    steps = c.steps(1)
    expect(len(steps) == 20, f"{len(steps)} steps are stored")
    expect(steps[-1]["loss"] < steps[0]["loss"] - 0.3, f"nothing learnt: {steps[-1]}")
    checkpoint = os.path.join(c.folder, "checkpoint-1")
    expect(os.path.isdir(checkpoint) and os.listdir(checkpoint), "no checkpoint was written")
    expect(c.ok("logs", 1), "the trainers' output is empty")
    kinds = [e["kind"] for e in c.events(1)]
    expect(kinds[0] == "JOB_SUBMITTED", f"the first event is {kinds[0]}")


def memory_was_planned(c):
    """Real daemons, a tiny model: what a process has beside its tensors counts most here."""
    lines = c.ok("logs", 1)
    expect("memory planned for each rank" in lines, "no plan in the log")
    total = [line.split() for line in lines.splitlines() if line.strip().startswith("total")]
    ratios = [float(words[-1]) for words in total if len(words) == 4]
    expect(ratios, "no comparison in the log")
    print("planned over taken:", ratios)
    expect(all(0.4 < ratio < 1.3 for ratio in ratios), f"planned over taken: {ratios}")


def a_job_without_enough_memory_is_refused(c):
    n_before = len(c.json("jobs", "-a")["items"])
    done = c.run("submit", c.job(name="large"), "--set", "data.sequence_length=1048576",
                 "--set", "train.micro_batch=16", "--set", "train.global_batch=64")
    expect(done.returncode == 6, f"exit {done.returncode}: {done.stderr}")
    expect("a rank needs" in done.stderr and "fits" in done.stderr, done.stderr)
    expect(len(c.json("jobs", "-a")["items"]) == n_before, "something was submitted")


def a_job_that_cannot_run_fails_at_once(c):
    """Retrying would not help, so no attempt is wasted, and the reason is one line."""
    outside = c.job(name="outside", checkpoint="/tmp/ballast-not-allowed")
    done = c.run("submit", outside, "--wait")
    expect(done.returncode == 1, f"--wait ended with {done.returncode}: {done.stderr}")
    job = c.show(2)
    expect(job["state"] == "FAILED" and job["attempt"] == 1, f"it was tried again: {job}")
    expect("allowed_roots" in job["reason"] and "\n" not in job["reason"], f"reason: {job}")
    expect(not os.path.exists("/tmp/ballast-not-allowed"), "it wrote outside its roots")


def links_in_a_circle_fail_at_once(c):
    os.symlink("circle.txt", os.path.join(c.folder, "text", "circle.txt"))
    done = c.run("submit", c.job(), "--set", "data.train=text/circle.txt", "--wait")
    expect(done.returncode == 1, f"--wait ended with {done.returncode}: {done.stderr}")
    job = c.show(3)
    expect(job["state"] == "FAILED" and job["attempt"] == 1, f"it was tried again: {job}")
    expect("symbolic links" in job["reason"], f"reason: {job}")


def a_bad_file_submits_nothing(c):
    n_before = len(c.json("jobs", "-a")["items"])
    path = c.job(name="typo")
    with open(path) as f:
        text = f.read()
    with open(path, "w") as f:
        f.write(text.replace("steps:", "stepz:", 1))
    done = c.run("submit", path)
    expect(done.returncode not in (0, 1), f"exit {done.returncode}")
    expect("stepz" in done.stderr and "did you mean" in done.stderr, done.stderr)
    expect(len(c.json("jobs", "-a")["items"]) == n_before, "something was submitted")


def story():
    """submit, run, finish; refuse what cannot run"""
    with Cluster(n_workers=4) as c:
        a_job_runs_to_its_end(c)
        memory_was_planned(c)
        a_job_without_enough_memory_is_refused(c)
        a_job_that_cannot_run_fails_at_once(c)
        links_in_a_circle_fail_at_once(c)
        a_bad_file_submits_nothing(c)


tell(story)
