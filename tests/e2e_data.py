"""What a job reads is told: how much before it starts, and of each step which documents."""
import collections
import json
import os
import shutil

from cluster import Cluster, expect, tell

TASKS, LENGTH, BATCH = 37, 48, 8  # a task is one sequence


def write_tasks(folder):
    """Two files, with an empty line in each; task i has 6 + i tokens, of which the last i + 1 are
    learned."""
    os.makedirs(folder)
    lines, labels, places = [[], []], 0, []
    for i in range(TASKS):
        ids = [(7 * i + k) % 250 for k in range(6 + i)]
        file = i % 2
        if len(lines[file]) == 3:
            lines[file].append("")
        lines[file].append(json.dumps({"input_ids": ids, "labels": [-100] * 5 + ids[5:]}))
        places.append((os.path.join(folder, f"tasks-{file}.jsonl"), len(lines[file])))
        labels += i + 1
    for file in (0, 1):
        with open(os.path.join(folder, f"tasks-{file}.jsonl"), "w") as f:
            f.write("\n".join(lines[file]) + "\n")
    return places, labels


def tasks(c, name, steps, *more, batch=BATCH, checkpoint=None):
    path = c.job(name=name, steps=steps, workers=2, fsdp=2, ep=2, checkpoint=checkpoint or name,
                 checkpoint_every=5)
    sets = ["data.train=[tasks/*.jsonl]", "data.validation=[]", "data.format=jsonl",
            f"data.sequence_length={LENGTH}", "data.pack=false", f"train.global_batch={batch}",
            "train.micro_batch=2", *more]
    return [path] + [w for s in sets for w in ("--set", s)]


def counted_before(c, args, labels):
    tokens = sum(6 + i for i in range(TASKS))
    text = c.ok("submit", *args, "--dry-run")
    expect(f"data.train       2 files, {TASKS} documents, {tokens} tokens, {labels} of them learned\n"
           f"                 {TASKS} sequences an epoch; 20 steps are 4.32 epochs\n" in text, text)
    told = c.json("submit", *args, "--dry-run")["data"]
    expect(told["train"]["labels"] == labels and told["train"]["sequences"] == TASKS and
           not told["warnings"] and told["validation"] is None, told)
    done = c.run("submit", *args, "--dry-run", "--set", "train.global_batch=40")
    expect(done.returncode == 0 and
           f"data.train: {TASKS} sequences do not fill one step of train.global_batch 40" in
           done.stderr, done.stderr)


def steps_are_told(c, job, places):
    """Every line once an epoch, dealt out to the ranks two at a time."""
    rows = c.json("data", job, "--step", "1..20")["items"]
    expect([r["sample"] for r in rows] == list(range(20 * BATCH)), "sequences in their order")
    expect(len({(r["file"], r["line"]) for r in rows}) == TASKS, "some line was never read")
    laps = collections.Counter((r["epoch"], r["file"], r["line"]) for r in rows)
    expect(set(laps.values()) == {1}, "a line twice in an epoch")
    for r in rows:
        i = places.index((r["file"], r["line"]))
        expect((r["tokens"], r["labels"], r["first_token"]) == (5 + i, i + 1, 0), r)
        with open(r["file"], "rb") as f:
            f.seek(r["byte"])
            expect(json.loads(f.readline())["input_ids"][0] == 7 * i % 250, r)
        expect((r["rank"], r["pass"], r["step"]) ==
               (r["sequence"] // 2 % 2, r["sequence"] // 4, r["sample"] // BATCH + 1), r)
    one = c.json("data", job, "--step", "7")["items"]
    expect(one == [r for r in rows if r["step"] == 7], "step 7 alone is another")
    text = c.ok("data", job, "--step", "7", "-f", "rank=1", "--sort", "-labels", "-c", "1",
                "-o", "labels,line", "--no-header").split()
    best = max((r for r in one if r["rank"] == 1), key=lambda r: r["labels"])
    expect(text == [str(best["labels"]), str(best["line"])], text)
    expect(c.json("data", job)["train"]["documents"] == TASKS, "what it reads in all")


def samples_are_counted(c, job):
    for r in c.steps(job):
        expect(r["samples"] == r["step"] * BATCH and
               abs(r["epoch"] - r["samples"] / TASKS) < 1e-9, r)


def another_job_goes_on(c):
    """With twice the batch, from where the first has stopped reading."""
    job = c.submit(*tasks(c, "wider", 25, batch=2 * BATCH, checkpoint="narrow"))
    c.wait(job, "DONE")
    rows = c.json("data", job, "--step", "21")["items"]
    first = 20 * BATCH
    expect([r["sample"] for r in rows] == list(range(first, first + 2 * BATCH)), rows[0])
    done = c.run("data", job, "--step", "20")
    expect(done.returncode == 3 and "another job made it" in done.stderr, done.stderr)
    done = c.run("data", job, "--step", "26")
    expect(done.returncode == 3 and "train.steps is 25" in done.stderr, done.stderr)


def other_files_are_noticed(c, job):
    tasks_0, away = os.path.join(c.folder, "tasks", "tasks-0.jsonl"), os.path.join(c.folder, "away")
    os.utime(tasks_0)
    done = c.run("data", job, "--step", "20")
    expect(done.returncode == 0 and f"{tasks_0} was changed after" in done.stderr, done.stderr)
    with open(tasks_0, "a") as f:
        f.write('{"input_ids": [1, 2], "labels": [1, 2]}\n')
    done = c.run("data", job, "--step", "20")
    expect(done.returncode == 5 and f"make {TASKS + 1} sequences on this machine" in done.stderr,
           done.stderr)
    shutil.move(os.path.join(c.folder, "tasks"), away)
    done = c.run("data", job, "--step", "20")
    expect(done.returncode == 1 and "on this machine data.train: no file matches" in done.stderr,
           done.stderr)
    shutil.move(away, os.path.join(c.folder, "tasks"))


def a_rollback_leaves_samples_out():
    """The loss of step 8 is none: back to step 5, and on with the batch after the bad one."""
    c = Cluster(n_workers=2)
    c.env["BALLAST_FAILPOINT"] = f"bad-loss:{8 * BATCH // 4}:error"
    with c:
        write_tasks(os.path.join(c.folder, "tasks"))
        for i in range(5):
            job = c.submit(*tasks(c, f"rolled-{i}", 12, "train.on_nan=rollback"))
            c.wait(job, "DONE")
            if c.show(job)["attempt"] == 1:  # a second one, beside load, counts its losses anew
                break
        samples = [r["samples"] for r in c.steps(job)]
        expect(samples == [BATCH * (s if s <= 5 else s + 3) for s in range(1, 13)], samples)
        first = [c.json("data", job, "--step", str(s))["items"][0]["sample"] for s in (5, 6)]
        expect(first == [4 * BATCH, 8 * BATCH], first)


def story():
    """what a job reads: counted before, told step by step, also of resumed and rolled back jobs"""
    with Cluster(n_workers=2) as c:
        places, labels = write_tasks(os.path.join(c.folder, "tasks"))
        args = tasks(c, "narrow", 20)
        counted_before(c, args, labels)
        job = c.submit(*args)
        c.wait(job, "DONE")
        samples_are_counted(c, job)
        steps_are_told(c, job, places)
        another_job_goes_on(c)
        other_files_are_noticed(c, job)
    a_rollback_leaves_samples_out()


tell(story)
