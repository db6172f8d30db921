"""A cluster with nothing to do does nothing."""
import time

from cluster import PATIENCE, Cluster, cpu_seconds, expect, tell

SECONDS = 5


def story():
    """an idle cluster uses less than 1 % of a core per daemon, before and after a job"""
    with Cluster(n_workers=4) as c:
        for what in ("new", "after a job"):
            rounds = 0
            while True:  # what is still at work on a busy machine, and its cold caches, pass
                time.sleep(1)
                before = {n: cpu_seconds(p.pid) for n, p in c.processes.items()}
                time.sleep(SECONDS)
                used = {n: cpu_seconds(p.pid) - before[n] for n, p in c.processes.items()}
                print(f"{what}: seconds of {SECONDS} that each used: {used}")
                rounds += 1
                if max(used.values()) <= 0.01 * SECONDS:
                    break
                expect(rounds < PATIENCE, f"seconds used in {SECONDS} s of idling: {used}")
            if what == "new":
                c.wait(c.submit(c.job(steps=5)), "DONE")


tell(story)
