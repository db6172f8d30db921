"""What live rebalancing brings on two ranks, each on a core of its own, while the text changes.

    bench_rebalance.py [steps]

The training of record_trace.py, from start to end, once without and once with automatic
rebalancing (one spare slot a rank): mean over steps of the imbalance of ranks, time, what moved
and what it stopped. A planner of others for each window cannot be applied to a job; its part is
in bench_balance's row 4, in virtual time. Needs that script's texts, and two cores.
"""
import os
import statistics
import sys

from record_trace import PARTS, TraceCluster

MODES = (("none", "auto: false, spare_slots_per_rank: 1"),
         ("automatic", "auto: true, spare_slots_per_rank: 1, horizon_steps: 100"))
BORN = 5  # steps in which a process finds its pace


def train(mode, rebalance, steps):
    total = {"imbalance": [], "seconds": [], "moves": 0, "bytes": 0, "pause": 0.0, "plans": 0}
    model = "model"
    with TraceCluster(n_workers=2) as c:
        for i in range(2):
            os.sched_setaffinity(c.processes[f"worker-{i}"].pid, {i})
        for part, (text, share) in enumerate(PARTS):
            n = steps * share // sum(s for _, s in PARTS)
            job = c.train(part, text, model, n, f"weights-{part}", rebalance)
            model = c.weights(part)
            rows = c.steps(job)[BORN:]
            total["imbalance"] += [r["imbalance"] for r in rows]
            total["seconds"] += [16 * 128 / r["tokens_per_second"] for r in rows]
            for plan in c.json("rebalance", "history", job)["items"]:
                if plan["state"] == "DONE":
                    total["plans"] += 1
                    total["moves"] += plan["moves"]
                    total["bytes"] += plan["bytes"]
                    total["pause"] += plan["pause_seconds"]
    uneven = sum(x - 1 for x in total["imbalance"])
    print(f"{mode:10} imbalance {statistics.mean(total['imbalance']):.3f} (over all steps "
          f"{uneven:.1f} even steps), step {statistics.median(total['seconds']) * 1e3:.1f} ms, "
          f"plans {total['plans']}, moves {total['moves']}, {total['bytes'] / 1e6:.2f} MB, "
          f"paused {total['pause'] * 1e3:.1f} ms", flush=True)


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for mode, rebalance in MODES:
        train(mode, rebalance, steps)


main()
