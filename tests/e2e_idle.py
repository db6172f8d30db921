"""A cluster with nothing to do does nothing."""
import time

from cluster import Cluster, cpu_seconds, expect, tell

SECONDS = 5


def story():
    """an idle cluster uses less than 1 % of a core per daemon, before and after a job"""
    with Cluster(n_workers=4) as c:
        for what in ("new", "after a job"):
            time.sleep(1)
            before = {n: cpu_seconds(p.pid) for n, p in c.processes.items()}
            time.sleep(SECONDS)
            for name, process in c.processes.items():
                used = cpu_seconds(process.pid) - before[name]
                print(f"{what}: {name} used {used:.2f} s of {SECONDS}")
                expect(used <= 0.01 * SECONDS, f"{name} used {used:.2f} s in {SECONDS} s of idling")
            if what == "new":
                c.wait(c.submit(c.job(steps=5)), "DONE")


tell(story)
