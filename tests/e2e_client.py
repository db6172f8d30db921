"""The client beside real daemons: every command in JSON, live progress, outages, Ctrl-C."""
import json
import os
import pty
import re
import signal
import subprocess
import time

from cluster import BIN, PATIENCE, Cluster, expect, tell, until


def start(c, *args, **kwargs):
    return subprocess.Popen([os.path.join(BIN, "ballast"), *map(str, args)], env=c.env,
                            stdin=subprocess.DEVNULL, text=True, **kwargs)


def every_command_in_json(c, job):
    lists = {("jobs", "-a"): "JobList", ("workers",): "WorkerList", ("events",): "EventList",
             ("metrics", job): "StepList"}
    for args, kind in lists.items():
        shown = c.json(*args)
        expect(shown["kind"] == kind and shown["items"], f"{args}: {shown}")
        expect(set(shown["meta"]) == {"seq", "truncated"}, f"{args}: {shown['meta']}")
        c.ok(*args, "-o", "yaml")
        expect("\x1b" not in c.ok(*args), f"{args}: colours in a pipe")
    shown = c.json("job", "show", job)
    expect(shown["spec"]["train"]["steps"] == 20 and shown["events"], f"job show: {shown}")
    ping = c.json("ping")
    expect(ping["kind"] == "Ping" and ping["workers_alive"] == 2, f"ping: {ping}")
    expect("All is well" in c.ok("doctor"), "doctor finds something")
    lines = c.ok("logs", job, "--rank", 1, "--json").splitlines()
    expect(lines and all(json.loads(line)["rank"] == 1 for line in lines), f"logs: {lines}")
    whole = c.ok("logs", job).splitlines()
    expect(c.ok("logs", job, "--tail", 2).splitlines() == whole[-2:], "the last lines")
    expect(c.ok("wait", "--any", job, job) == f"{job}\n" and not c.ok("wait", job, job), "wait")
    widest = max(map(len, c.ok("metrics", job, "--phases").splitlines()))
    expect(widest <= 100, f"phases take {widest} columns")
    rows = c.ok("metrics", job, "--csv").splitlines()
    expect(len(rows) == 21 and rows[0].startswith("step,loss,"), f"csv: {rows[:2]}")
    last = c.json("metrics", job, "-c", 3)["items"]
    expect([s["step"] for s in last] == [18, 19, 20], f"the newest three: {last}")
    lost = c.run("logs", job, "--rank", 7)
    expect(lost.returncode == 3 and "2 ranks" in lost.stderr, f"rank 7: {lost.stderr}")
    lost = c.run("job", "show", 99, "--json")
    expect(json.loads(lost.stderr)["code"] == "NOT_FOUND", f"an error in JSON: {lost.stderr}")


def lists_as_asked(c, job):
    """Conditions, orders and counts, which the coordinator's databases know."""
    def names(*args):
        return c.ok(*args, "-o", "name").split()
    expect(names("jobs") == [] and names("jobs", "-a") == [job], "jobs, live and all")
    expect(names("jobs", "-a", "-f", "state=DONE,FAILED", "--sort", "-end", "--me") == [job],
           "by state and user")
    expect(names("jobs", "-a", "-f", "state=FAILED") == [], "no job has failed")
    expect(names("jobs", "--since", "1h") == [job] and names("jobs", "--since", "0.01s") == [],
           "since a time")
    expect(names("workers", "--sort", "-name", "-f", "state=IDLE") == ["w1", "w0"], "workers")
    expect(c.ok("nodes", "-s", "--no-header").split() == ["IDLE", "1", "0/2/0/2", "here"],
           f"nodes: {c.ok('nodes', '-s')}")
    kinds = [e["kind"] for e in c.json("events", "--filter", "kind=JOB_DONE,JOB_ASSIGNED")["items"]]
    expect(kinds == ["JOB_ASSIGNED", "JOB_DONE"], f"events by kind: {kinds}")
    last = c.json("events", "--job", job, "-c", 1, "--since", "1h")
    expect(last["items"][0]["kind"] == "JOB_DONE" and last["meta"]["truncated"], f"events: {last}")
    expect(names("metrics", job, "--sort", "-step", "-c", 2) == ["20", "19"], "steps in order")
    expect(names("metrics", job, "--since", "0.01s") == [], "no step is that new")
    expect(names("metrics", job, "--filter", "step<=2") == ["1", "2"], "the first steps")
    expect(names("rebalance", "history", job, "-f", "state=ENDED,DONE", "-q") is not None, "plans")
    until(lambda: c.ok("__complete", "job", "show", "").splitlines() == [f"{job}\ttiny, DONE"], 2,
          "the job is offered in time for one who types")


def follow_on_a_terminal(c):
    """A line that is redrawn, and the exit code of the job."""
    mine, theirs = pty.openpty()
    process = start(c, "submit", c.job(name="seen", steps=20, workers=2, fsdp=2, ep=2),
                    "--follow", stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while data := os.read(mine, 65536):
            seen += data
    except OSError:  # the other end is closed
        pass
    job = process.stdout.read().strip()
    expect(process.wait(30 * PATIENCE) == 0 and job.isdigit(), f"exit {process.returncode}, '{job}'")
    expect(b"\r\x1b[K" in seen, f"no line was redrawn: {seen}")
    expect(b"step 20/20" in seen and b"DONE" in seen, f"the end is missing: {seen}")
    os.close(mine)
    return job


def ctrl_c_detaches(c):
    process = start(c, "submit", c.job(name="left", steps=100000, workers=2, fsdp=2, ep=2),
                    "--follow", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    job = process.stdout.readline().strip()
    c.wait_step(job, 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20 * PATIENCE)
    expect(process.returncode == 0 and "goes on" in err, f"exit {process.returncode}: {err}")
    expect(c.show(job)["state"] == "RUNNING", f"the job went with the terminal: {c.show(job)}")
    return job


def outages_are_waited_out(c, job):
    """A stream and a wait live through a restart of the coordinator; no step is missing."""
    stream = start(c, "metrics", job, "-f", "--json", stdout=subprocess.PIPE,
                   stderr=subprocess.PIPE)
    waiting = start(c, "wait", job, "--timeout", 60 * PATIENCE, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE)
    events = start(c, "events", "-f", "--filter", "kind=JOB_CANCELLED", "--json",
                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    steps = [json.loads(stream.stdout.readline())["step"] for _ in range(5)]
    c.kill("coordinator")
    time.sleep(1)
    down = c.run("jobs", "--timeout", "0.5")
    expect(down.returncode == 7, f"jobs without a coordinator: exit {down.returncode}")
    began = time.monotonic()
    down = c.run("logs", job, "--timeout", "0.5")
    expect(down.returncode == 7 and time.monotonic() - began < 3 * PATIENCE,
           f"logs, told to give up soon: exit {down.returncode} after {time.monotonic() - began} s")
    c.start_coordinator()
    at = c.wait_step(job, steps[-1] + 50)["step"]
    while steps[-1] < at:
        steps.append(json.loads(stream.stdout.readline())["step"])
    expect(steps == list(range(1, len(steps) + 1)), f"steps with gaps: {steps}")
    c.ok("job", "cancel", job)
    _, err = stream.communicate(timeout=30 * PATIENCE)
    expect("reconnecting" in err, f"the outage was not told: {err}")
    waiting.communicate(timeout=30 * PATIENCE)
    expect(waiting.returncode == 1, f"wait for a cancelled job: exit {waiting.returncode}")
    seen = json.loads(events.stdout.readline())
    expect((seen["job"], seen["kind"]) == (job, "JOB_CANCELLED"), f"of what comes: {seen}")
    events.send_signal(signal.SIGINT)
    _, err = events.communicate(timeout=30 * PATIENCE)
    expect(events.returncode == 130 and "detached" in err, f"{events.returncode}: {err}")


def a_full_disk_is_told(c):
    """More than stdio's buffer holds, so that not only the last write fails."""
    with open("/dev/full", "w") as full:
        code = start(c, "submit", "--explain", stdout=full).wait(10 * PATIENCE)
    expect(code == 1, f"output was lost, and the exit code is {code}")


def closed_descriptors_do_no_harm(c):
    """As cron or a daemon may start it; a socket must not take the place of stdout."""
    for closed, code in (("<&-", 0), ("2>&-", 0), (">&-", 1), ("<&- >&- 2>&-", 1)):
        done = subprocess.run(f"'{os.path.join(BIN, 'ballast')}' jobs -a --json {closed}",
                              shell=True, env=c.env, capture_output=True, text=True)
        expect(done.returncode == code, f"jobs {closed}: exit {done.returncode} {done.stderr}")
        expect(code or "JobList" in done.stdout, f"jobs {closed}: {done.stdout}")


def a_line_without_end_is_refused(c):
    zeros = os.path.join(c.folder, "zeros")
    with open(zeros, "wb") as f:
        f.write(bytes(1 << 20))
    for file, says in (("/dev/zero", "not a regular file"), (zeros, "zero byte")):
        done = c.run("balance", "--loads", file, "--devices", 4)
        expect(done.returncode == 2 and says in done.stderr, f"{file}: {done.stderr}")
    pipe = os.path.join(c.folder, "pipe.yaml")
    os.mkfifo(pipe)
    done = c.run("submit", pipe)
    expect(done.returncode == 2 and done.stderr.count("\n") == 1 and
           "not a regular file" in done.stderr, f"a pipe: {done.stderr}")


def a_plan_is_near_the_truth(c, job):
    """What --dry-run says of memory beside the peak that the ranks report."""
    plan = c.json("submit", os.path.join(c.folder, "job-1.yaml"), "--dry-run")
    peak = max(s["memory_bytes"] for s in c.json("metrics", job)["items"])
    print(f"memory per rank: planned {plan['memory_per_rank']['total'] / 2**20:.1f} MiB, "
          f"peak of a rank's process {peak / 2**20:.1f} MiB")
    expect(plan["memory_per_rank"]["total"] < 2 * peak, f"planned {plan}, used {peak}")


def story():
    """the client: JSON everywhere, progress, Ctrl-C, outages"""
    with Cluster(n_workers=2) as c:
        job = re.search(r"\d+", c.ok("submit", c.job(steps=20, workers=2, fsdp=2, ep=2),
                                     "--wait")).group(0)
        every_command_in_json(c, job)
        lists_as_asked(c, job)
        a_plan_is_near_the_truth(c, job)
        a_line_without_end_is_refused(c)
        a_full_disk_is_told(c)
        closed_descriptors_do_no_harm(c)
        follow_on_a_terminal(c)
        outages_are_waited_out(c, ctrl_c_detaches(c))
        until(lambda: c.n_idle() == 2, 20, "the workers are free again")


tell(story)
