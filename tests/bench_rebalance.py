"""What live rebalancing brings on ranks with a core each, while the text changes.

    bench_rebalance.py [--ranks N] [--texts BIBLE JARGON] [--modes MODE...] [--set KEY:VALUE]
                       [steps]

The training of record_trace.py, from start to end, in three ways: without rebalancing; with what a
peer's planner (EPLB) makes of each window's loads, carried out at once; with automatic rebalancing.
One spare slot a rank for all. Per way the imbalance of ranks, mean over steps; plans, moves, bytes,
pauses; and what it cost in even steps: waiting for the busiest rank, pauses, both. In virtual time
the same is bench_balance's row 4. Needs that script's texts, or files of them, and a core for each
rank (2); what else runs here goes to others where there are some. --set: of the job's rebalance
section.
"""
import argparse
import os
import shutil
import statistics
import subprocess
import time

from record_trace import PARTS, TraceCluster

MODES = {"none": "auto: false", "EPLB": "auto: false", "automatic": "auto: true"}
BORN = 5  # steps in which a process finds its pace
LOADS = ("select window_start_step as window, layer, expert, sum(tokens) as load from expert_load "
         "where job = {0} and window_start_step = (select max(window_start_step) from expert_load "
         "where job = {0}) group by 1, 2, 3 order by 1, 2, 3")
PLACE = os.path.join(os.environ.get("BALLAST_TESTS") or os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "build", "tests"), "bench_eplb")


class RebalanceCluster(TraceCluster):
    def __init__(self, mode, n_ranks, texts):
        super().__init__(n_workers=n_ranks)
        self.mode = mode
        self.texts = texts
        self.planned = None  # the loads of the newest window that was planned for

    def _write_text(self):
        if not self.texts:
            super()._write_text()
            return
        os.makedirs(os.path.join(self.folder, "text"))
        for name, path in zip(("bible", "jargon"), self.texts):
            shutil.copy(path, os.path.join(self.folder, "text", name + ".txt"))

    def pin(self):
        """A core for each rank, and what is left for all else."""
        n, cores = self.n_workers, sorted(os.sched_getaffinity(0))
        for i in range(n):
            os.sched_setaffinity(self.processes[f"worker-{i}"].pid, {cores[i % len(cores)]})
        if len(cores) > n:
            os.sched_setaffinity(self.processes["coordinator"].pid, set(cores[n:]))
            os.sched_setaffinity(0, set(cores[n:]))

    def while_training(self, job):
        """The peer's planner knows the newest window and nothing else."""
        time.sleep(0.2)
        if self.mode != "EPLB":
            return
        loads = self.run("db", "query", LOADS.format(job), "--csv", "-c", "100000").stdout
        n_experts = len({line.split(",")[2] for line in loads.splitlines()[1:]})
        if loads == self.planned or not n_experts:
            return
        paths = [os.path.join(self.folder, name) for name in ("loads.csv", "placement.csv")]
        with open(paths[0], "w") as f:
            f.write(loads)
        subprocess.run([PLACE, paths[0], str(self.n_workers),
                        str(n_experts // self.n_workers + 1), paths[1]], check=True)
        if self.run("rebalance", "apply", job, "--placement", paths[1]).returncode == 0:
            self.planned = loads


def train(mode, args):
    total = {"imbalance": [], "seconds": [], "moves": 0, "bytes": 0, "pauses": [], "plans": 0}
    rules = f"{MODES[mode]}, spare_slots_per_rank: 1, horizon_steps: 100"
    model = "model"
    cores = os.sched_getaffinity(0)
    with RebalanceCluster(mode, args.ranks, args.texts) as c:
        c.pin()
        for part, (text, share) in enumerate(PARTS):
            n = args.steps * share // sum(s for _, s in PARTS)
            job = c.train(part, text, model, n, f"weights-{part}", ", ".join([rules] + args.set))
            model = c.weights(part)
            rows = c.steps(job)[BORN:]
            total["imbalance"] += [r["imbalance"] for r in rows]
            total["seconds"] += [16 * 128 / r["tokens_per_second"] for r in rows]
            for plan in c.json("rebalance", "history", job)["items"]:
                if plan["state"] == "DONE":
                    total["plans"] += 1
                    total["moves"] += plan["moves"]
                    total["bytes"] += plan["bytes"]
                    total["pauses"].append(plan["pause_seconds"])
    os.sched_setaffinity(0, cores)
    return total


def show(mode, total):
    step = statistics.median(total["seconds"])
    waiting = sum(x - 1 for x in total["imbalance"])
    paused = sum(total["pauses"]) / step
    print(f"{mode:10} {statistics.mean(total['imbalance']):9.3f} {step * 1e3:8.1f} "
          f"{total['plans']:6} {total['moves']:6} {total['bytes'] / 1e6:8.2f} "
          f"{sum(total['pauses']) * 1e3:9.1f} {max(total['pauses'], default=0) * 1e3:8.1f} "
          f"{waiting:8.1f} {paused:7.2f} {waiting + paused:7.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="?", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--texts", nargs=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--set", nargs="+", default=[])
    args = parser.parse_args()
    print(f"{'':10} {'imbalance':>9} {'step ms':>8} {'plans':>6} {'moves':>6} {'MB':>8} "
          f"{'paused ms':>9} {'longest':>8} {'waiting':>8} {'paused':>7} {'cost':>7}   (the last "
          f"three in even steps)", flush=True)
    for mode in args.modes:
        show(mode, train(mode, args))


if __name__ == "__main__":
    main()
