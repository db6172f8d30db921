#!/usr/bin/env python3
"""Figures of the control plane as a person meets them, with the client and real workers, then
those of bench_control (single calls, a thousand clients, kill -9, restart). One table."""

import os
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cluster import BIN, Cluster  # noqa: E402


def row(what, seconds):
    ms = sorted(1000 * s for s in seconds)
    print(f"{what:<58} p50 {statistics.median(ms):8.2f} ms  p99 {ms[len(ms) * 99 // 100]:8.2f} ms",
          flush=True)


def timed(command):
    start = time.perf_counter()
    command()
    return time.perf_counter() - start


def main():
    with Cluster(n_workers=1) as c:
        row("start of a program: ballast --version", [timed(lambda: c.ok("--version"))
                                                      for _ in range(50)])
        spans = []
        for _ in range(10):
            one = c.job(name="one", steps=4, workers=1, fsdp=1, ep=1, checkpoint_every=1000)
            start = time.perf_counter()
            job = c.submit(one)
            c.ok("wait", job, "--for=state=RUNNING", "--timeout", "60")
            spans.append(time.perf_counter() - start)
            c.ok("wait", job, "--timeout", "60")
        row("ballast submit to RUNNING (first step done), idle worker", spans)
    with Cluster(n_workers=0) as c:
        wait = c.job(name="waits", steps=4, workers=4)
        row("ballast submit, the command", [timed(lambda: c.submit(wait)) for _ in range(200)])
        row("ballast jobs, 200 live", [timed(lambda: c.ok("jobs")) for _ in range(50)])
    program = os.path.join(BIN, "..", "tests", "bench_control")
    return subprocess.call([program, *sys.argv[1:]], env=dict(os.environ, BALLAST_BIN=BIN))


if __name__ == "__main__":
    sys.exit(main())
