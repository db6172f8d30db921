"""Experts move while a job trains, and whoever is killed in whatever phase of it, nothing is lost.

Rank 1 sleeps at one named point of a migration; there a trainer, its daemon or the coordinator is
killed with -9. The losses must be those of a run whose experts never move, bit by bit.

    e2e_migrate.py          each point once, with one victim after the other
    e2e_migrate.py --all    every point with every victim
"""
import os
import re
import signal
import sys
import time

from cluster import Cluster, expect, tell, until

POINTS = ("prepare-received", "prepared", "before-move", "in-move", "after-move",
          "before-migrated-sent")
VICTIMS = ("trainer", "worker", "coordinator")
STEPS = 30
WINDOW = 5


class SleepyCluster(Cluster):
    """Its worker 1 was told to sleep at a point, in the first process that comes by."""

    def __init__(self, point=None):
        super().__init__(n_workers=4, hold_before=2 * WINDOW + 2)
        self.point = point

    def start_worker(self, i):
        env = self.env
        if i == 1 and self.point:
            self.env = dict(env, BALLAST_FAILPOINT=f"{self.point}:sleep_4000")
        try:
            return super().start_worker(i)
        finally:
            self.env = env

    def submit_experts(self, auto):
        rules = (f"auto: {str(auto).lower()}, window_steps: {WINDOW}, horizon_steps: 1000, "
                 "layer_moves: 1")
        path = self.job(steps=STEPS, checkpoint_every=10, deterministic=True,
                        more=f"moe: {{bias_update: off}}\nrebalance: {{{rules}, "
                             "min_gain: 0.001}\n")
        if not auto:
            return self.submit(path)
        self.hold()
        job = self.submit(path)
        self.let_go_once_planned(job)
        return job


def losses(c, job):
    return [step["loss"] for step in c.steps(job)]


def check_placements(c, job):
    """Every plan came into force or ended, and what is recorded is what the ranks had."""
    fate = {}
    in_force = 0
    for event in c.events(job):
        found = re.match(r"placement (\d+)", event["text"])
        if event["kind"] == "PLAN_PROPOSED":
            fate[int(found.group(1))] = "open"
        elif event["kind"] == "PLAN_ENDED":
            fate[int(found.group(1))] = "ended"
        elif event["kind"] == "PLACEMENT":
            in_force = int(found.group(1))
            fate[in_force] = "in force"
    expect("open" not in fate.values(), f"plans that are left open: {fate}")
    expect(list(fate) == sorted(fate), f"epochs do not grow: {list(fate)}")
    shown = c.json("placement", job)
    shown = shown.get("placement", shown)
    expect(int(shown.get("epoch", 0)) == in_force, f"shown is {shown.get('epoch')}, the events "
           f"say {in_force}")
    last_attempt = c.ok("logs", job).rsplit("parameters,", 1)[-1]
    had = [int(n) for n in re.findall(r" placement=(\d+) ", last_attempt)]
    expect(not had or had[-1] == in_force, f"rank 0 had placements {had}, recorded: {in_force}")
    return in_force


def run_still():
    with SleepyCluster() as c:
        job = c.submit_experts(auto=False)
        c.wait(job, "DONE")
        expect(check_placements(c, job) == 0, "experts moved without being told to")
        return losses(c, job)


def run_moving(expected):
    with SleepyCluster() as c:
        job = c.submit_experts(auto=True)
        c.wait(job, "DONE")
        in_force = check_placements(c, job)
        expect(in_force > 0, "no expert has moved")
        expect(losses(c, job) == expected, "moving experts changed the losses")
        print(f"placement {in_force} after {STEPS} steps, losses as without moves")


def kill(c, job, victim):
    if victim == "trainer":
        os.kill(c.trainers(job)[1], signal.SIGKILL)
        return
    c.point = None
    c.kill("worker-1" if victim == "worker" else "coordinator")
    time.sleep(0.5)
    if victim == "worker":
        c.start_worker(1)
    else:
        c.start_coordinator()


def run_killed(point, victim, expected):
    began = time.monotonic()
    with SleepyCluster(point) as c:
        job = c.submit_experts(auto=True)
        until(lambda: f"failpoint {point}" in c.run("logs", job, "--rank", 1).stdout, 30,
              f"rank 1 comes by {point}")
        kill(c, job, victim)
        c.wait(job, "DONE", 60)
        attempts = c.show(job)["attempt"]
        expect(attempts == (1 if victim == "coordinator" else 2), f"{attempts} attempts")
        in_force = check_placements(c, job)
        expect(losses(c, job) == expected, f"{victim} killed at {point}: other losses")
        words = " ".join(e["kind"] for e in c.events(job))
        expect("PLAN_PROPOSED" in words, f"the events do not tell of the plan: {words}")
        print(f"{victim} killed at {point}: placement {in_force}, {attempts} attempt(s), "
              f"{time.monotonic() - began:.1f} s", flush=True)


def story():
    """experts move under kill -9 of anybody: losses bit by bit as without moves"""
    expected = run_still()
    expect(len(expected) == STEPS, "a step is missing")
    run_moving(expected)
    for i, point in enumerate(POINTS):
        for k, victim in enumerate(VICTIMS):
            if "--all" in sys.argv or k == i % len(VICTIMS):
                run_killed(point, victim, expected)


tell(story)
