"""What is said of a step's time is true: phases add up to it, and a strict reader takes the trace."""
import json
import os

from cluster import Cluster, Story, expect, tell

STEPS, FIRST, TRACED = 12, 4, 3
HIDDEN = "_hidden"


def is_of_the_step(name):
    """Of the phases in metrics: those that make up a step from its batch to the last word."""
    return not name.endswith(HIDDEN) and name not in ("migration", "validation", "checkpoint")


def phases_add_up(c, job):
    """To what tokens per second are taken over."""
    left = []
    for s in c.steps(job):
        step_s = 8 * 64 / s["tokens_per_second"]
        told = sum(x for name, x in s["phases"].items() if is_of_the_step(name))
        expect(told <= step_s * 1.001, f"step {s['step']}: phases of {told} s in {step_s} s")
        left.append(1 - told / step_s)
        expect(0 < s["mfu"] < 1, f"step {s['step']}: MFU {s['mfu']}")
    typical = sorted(left)[len(left) // 2]  # a busy machine may hold a step up between phases
    expect(typical < 0.05, f"phases leave parts of the steps' time out: {left}")
    return typical


def read_strictly(path):
    """Events of a trace: an array of objects, each with what the format asks of its kind."""
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    with open(path) as f:
        events = json.load(f, parse_constant=refuse)
    expect(isinstance(events, list) and events, f"{path}: no events")
    for e in events:
        expect(isinstance(e.get("name"), str) and isinstance(e.get("pid"), int) and
               isinstance(e.get("tid"), int) and e.get("ph") in ("X", "M"), f"{path}: {e}")
        if e["ph"] == "M":
            expect(isinstance(e["args"]["name"], str), f"{path}: {e}")
        else:
            expect(e["ts"] >= 0 and e["dur"] >= 0, f"{path}: {e}")
    return events


def check_nesting(path, events):
    """Of the slices of a line one is within another, or behind it: a reader drops others."""
    lines = {}
    for e in events:
        if e["ph"] == "X":
            lines.setdefault((e["pid"], e["tid"]), []).append(e)
    for line, slices in lines.items():
        ends = []
        for e in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= e["ts"]:
                ends.pop()
            if ends and e["ts"] + e["dur"] > ends[-1]:
                raise Story(f"{path}: line {line}: {e} is half within what ends at {ends[-1]:.3f}")
            ends.append(e["ts"] + e["dur"])


def traces_are_read(c, job, folder):
    n = 0
    begins = []
    for rank in range(4):
        path = os.path.join(folder, "trace", f"rank-{rank}.json")
        events = read_strictly(path)
        check_nesting(path, events)
        spans = [e for e in events if e["ph"] == "X"]
        steps = {e["args"]["step"] for e in spans}
        expect(steps == set(range(FIRST, FIRST + TRACED)), f"{path}: of steps {steps}")
        layers = {e["args"]["layer"] for e in spans if e["name"] in ("kda", "mla")}
        expect(layers == set(range(4)), f"{path}: attention of layers {layers}")
        names = {e["name"] for e in spans}
        expect({"dispatch", "gather", "experts", "optimizer", "head"} <= names, f"{path}: {names}")
        n += len(events)
        begins.append(min(e["ts"] for e in spans))
    expect(max(begins) - min(begins) < 60e6, f"ranks' clocks are apart: {begins}")
    return n


def story():
    """phases add up to a step, traces are read strictly"""
    with Cluster(n_workers=4) as c:
        job = c.submit(c.job(steps=STEPS), "--set", f"trace.steps={TRACED}",
                       "--set", f"trace.first_step={FIRST}")
        c.wait(job, "DONE")
        left = phases_add_up(c, job)
        n = traces_are_read(c, job, os.path.join(c.folder, "checkpoint-1"))
        print(f"phases leave {left:.2%} of a step out; {n} events in the traces")


tell(story)
