#!/usr/bin/env python3
"""Whether every operator is right on this machine's GPUs, and how fast, from built programs.

    gpu_ops.py [--gpus N] [--slots K] [--minutes M] [--only STEP,...] [--op NAME,...] [--list]

BALLAST_BIN names the folder of the programs (build/bin), BALLAST_TESTS that of cuda_ops,
bench_coll and bench_train (beside it: ../tests), BALLAST_SHARED the reference models (../shared).
compute-sanitizer is looked for on the path and under /usr/local/cuda; for the figures of others
python3 needs PyTorch, and flash-linear-attention and Liger for theirs.

Each GPU is a lane. First come the checks, K at once on each GPU with a share of its cores, then
the benches, each with a GPU for itself, then the sanitizers, K at once again. What all of them
print goes to gpu_ops.log in $OUT, or in a folder that is named at the start; the tables at the end
to gpu_ops.txt, too. A part that fails or takes too long does not keep the next from running; where
time runs out the rest is left out, and the table says so. The status is 1 unless all has passed.
"""
import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import cluster
import gpu_rows
from gpu_stories import SHARED, TESTS, library_path

HERE = os.path.dirname(os.path.abspath(__file__))
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 99  # a sanitizer's exit code
PASSED, FAILED, LEFT_OUT = "passed", "FAILED", "LEFT OUT"


class Task:
    """Commands that run one after another on one GPU, the first failure last unless goes_on."""

    def __init__(self, name, commands, seconds, limit=120, goes_on=False, env=None):
        self.name, self.commands, self.seconds = name, commands, seconds
        self.limit, self.goes_on, self.env = limit, goes_on, env or {}
        self.result, self.said, self.text, self.codes = LEFT_OUT, "no time was left", "", []
        self.began = self.ended = 0.0


class Step:
    """Tasks of one kind. judge(task) is why the task failed, or None."""

    def __init__(self, name, what, tasks, judge, summary=None):
        self.name, self.what, self.tasks, self.judge = name, what, tasks, judge
        self.summary = summary or (lambda tasks: "")

    def seconds(self):
        return sum(t.seconds for t in self.tasks)

    def row(self):
        done = [t for t in self.tasks if t.result != LEFT_OUT]
        failed = [t for t in done if t.result == FAILED]
        result = FAILED if failed else PASSED if done and len(done) == len(self.tasks) else LEFT_OUT
        took = max(t.ended for t in done) - min(t.began for t in done) if done else 0.0
        said = f"{len(done) - len(failed)} of {len(self.tasks)} passed"
        if len(done) < len(self.tasks):
            said += f", {len(self.tasks) - len(done)} left out"
        if failed:
            said += "; failed: " + ", ".join(t.name for t in failed)
        more = self.summary([t for t in done if t.result == PASSED])
        return result, took, said + (f"; {more}" if more else "")


# ---- the steps ----------------------------------------------------------------------------------


def cuda_ops(o, *words):
    return [os.path.join(TESTS, "cuda_ops"), *(("--device", "cpu") if o.rehearse else ()), *words]


def exit_code(task):
    bad = [c for c in task.codes if c != 0]
    lines = [line.strip() for line in task.text.splitlines() if line.strip()]
    return f"ends with {bad[0]}: {lines[-1][:200] if lines else ''}" if bad else None


def judge_ops(task):
    """The first comparison that differs."""
    said = exit_code(task)
    differs = [line.strip() for line in task.text.splitlines()
               if line.startswith("    ") or line.rstrip().endswith("FAIL")]
    return said and (differs[0] if differs else said)


def worst_of(tasks):
    """The error that is closest to its tolerance."""
    found = re.findall(r"^(\S+) +(\S+) +\d+ cases  worst (\S+) of (\S+)",
                       "\n".join(t.text for t in tasks), re.M)
    if not found:
        return ""
    op, elem, error, tolerance = max(found, key=lambda f: float(f[2]) / float(f[3]))
    return f"closest to its tolerance: {op} {elem} {error} of {tolerance}"


HEAVY = {"kda_backward": 20, "kda_forward": 12, "linear_cross_entropy": 12,
         "grouped_linear_mxfp4": 12, "grouped_linear_fp8": 12, "index_select": 10,
         "routed_layer": 10}  # others 5


def ops_step(o):
    tasks = [Task(op, [cuda_ops(o, "--op", op, "--elem", elem) for elem in ("f32", "bf16")
                       if not o.rehearse or elem == "f32"], HEAVY.get(op, 5), 240, True)
             for op in o.ops]
    return Step("ops", "every op against its definition, f32 and bf16", tasks, judge_ops, worst_of)


def deterministic_step(o):
    tasks = [Task(op, [cuda_ops(o, "--op", op, "--deterministic")], HEAVY.get(op, 5), 240)
             for op in o.ops]
    return Step("deterministic", "the same with sums in one order", tasks, judge_ops, worst_of)


def fixtures_step(o):
    folder = os.path.join(SHARED, "oracle")
    models = sorted(m for m in (os.listdir(folder) if os.path.isdir(folder) else ())
                    if os.path.exists(os.path.join(folder, m, "expected.json")))
    tasks = []
    for model in models:
        path = os.path.join(folder, model)
        for dtype in ("f32",) if o.rehearse else ("f32", "bf16"):
            seconds = 12 if dtype == "bf16" else 7  # with six runs on the CPU
            tasks.append(Task(f"{model} {dtype}", [[
                os.path.join(cluster.BIN, "ballast-worker"), "validate", path, "--expect", path,
                "--device", "cpu" if o.rehearse else "cuda:0", "--dtype", dtype]], seconds, 240))

    def judge(task):
        said = exit_code(task)
        return None if said and "needs what is not built" in said else said

    def summary(tasks):
        not_built = [t.name.split()[0] for t in tasks if any(t.codes)]
        return f"not built: {', '.join(sorted(set(not_built)))}" if not_built else ""
    return Step("fixtures", "reference models, to their tolerances", tasks, judge, summary)


def nccl_step(o):
    ways = [["--gpus", "1", way] for way in ("nccl", "host")]
    if o.rehearse:
        ways = [["--ms", "5", "1"]]
    tasks = [Task(" ".join(way), [[os.path.join(TESTS, "bench_coll"), *way]], 8) for way in ways]
    return Step("nccl", "all collectives of one rank", tasks, exit_code)


def bench_step(o):
    tasks, small = [], ("--small",) if o.rehearse else ("--elem", "bf16")
    units = gpu_rows.units(o.ops)
    if o.rehearse:  # what is quick on a CPU
        units = [(name, peers, ops[:1], s) for name, peers, ops, s in units
                 if name in ("experts forward", "routed layer", "others 1")]
    for name, peers, ops, seconds in units:
        commands = [[sys.executable, os.path.join(HERE, "gpu_peers.py"),
                     *(["--rehearse"] if o.rehearse else []), *peers]] if peers else []
        commands += [cuda_ops(o, "--bench", "--op", op, *small) for op in ops]
        tasks.append(Task(name, commands, seconds, 300, True))

    def summary(tasks):
        return f"{len(gpu_rows.read_ours(joined(tasks)))} shapes, " + \
            f"{len([p for p in gpu_rows.read_peers(joined(tasks)).values() if 'ms' in p])} peers"
    return Step("bench", "every op's time, with others' beside it", tasks, exit_code, summary)


def joined(tasks):
    return "\n".join(t.text for t in tasks)


def whole_step(o):
    command = [os.path.join(TESTS, "bench_train"), "--shape", "tiny" if o.rehearse else "921m",
               "--steps", "3" if o.rehearse else "20"]
    command += [] if o.rehearse else ["--device", "cuda:0", "--dtype", "bf16", "--threads",
                                      str(len(os.sched_getaffinity(0)) // len(o.gpu_ids))]
    tasks = [Task("alone", [command], 30, 120),
             Task("with times of ops", [command], 30, 120, env={"BALLAST_OP_TIMES": "1"})]

    def summary(tasks):
        speed = speed_of(tasks)
        return f"{speed:.0f} tokens/s" if speed else ""
    return Step("whole_step", "a step of 921 M parameters", tasks, exit_code, summary)


def speed_of(tasks):
    found = [m for t in tasks if t.name == "alone"
             for m in re.findall(r"tokens_per_s=(\d+)", t.text)]
    return float(found[-1]) if found else None


def find_sanitizer():
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer")


# Findings that are not ours: cuBLAS's kernels race with themselves, and what they write through the
# copy engine initcheck does not see (the op's results are compared all the same).
OF_CUBLAS = re.compile(r"(Read|Write) access at nvjet_\w+")
WRITTEN_BY_CUBLAS = {"initcheck": ("muon", "newton_schulz", "linear_cross_entropy")}
# Shapes that are over in time, where all the small ones are not.
NARROW = {
    ("racecheck", "index_loss"): (
        "12, 2, 32, 128, 20, 16, 512, 64", "33, 1, 3, 16, 8, 2, 16, 4",
        "120, 1, 64, 128, 64, 96, 512, 64, 50"),
    ("racecheck", "kda_backward"): (
        "17, 0, 1, 64, 3, 1", "65, 0, 2, 32, 3, 1", "64, 0, 2, 128, 1, 1", "218, 1, 3, 16, 2, 1",
        "135, 2, 2, 64, 2, 1", "300, 5, 2, 32, 2, 1"),
    ("racecheck", "sparse_attention"): (
        "33, 1, 2, 16, 4, 8", "150, 4, 3, 24, 8, 16, 3", "70, 1, 16, 512, 64, 33",
        "101, 3, 64, 512, 64, 64"),
    ("initcheck", "sparse_attention_backward"): (
        "12, 2, 64, 512, 64, 20", "33, 1, 2, 16, 4, 8"),
    ("initcheck", "linear_cross_entropy"): ("33, 40, 257", "33, 40, 264, 1, 8"),
}


def judge_sanitizer(task):
    """What the tool found first, or what went wrong without it."""
    if len(re.findall(r" [1-9]\d* cases ", task.text)) < len(task.commands):
        return judge_ops(task) or "nothing was compared"
    lines = [re.sub(r"^=+ ?", "", line).strip() for line in task.text.splitlines()
             if line.startswith("=====")]
    findings = [line for line in lines if line and not re.match(
        r"COMPUTE-SANITIZER|\w+ SUMMARY|Target|and (Read|Write) access at nvjet_", line)]
    findings = [line for line in findings if not OF_CUBLAS.search(line)]
    n_found = sum(int(n) for line in lines for n in re.findall(r"SUMMARY: (\d+)", line))
    if findings:
        return findings[0]
    if n_found and not any(OF_CUBLAS.search(line) for line in lines):
        return f"{n_found} findings"
    return None if FOUND in task.codes else judge_ops(task)


def sanitizer_step(o, tool):
    program = find_sanitizer()
    how = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    ops = [op for op in o.ops if op in o.ops[:3] or (tool, op) in NARROW] if o.rehearse else o.ops
    f32 = WRITTEN_BY_CUBLAS.get(tool, ())
    tasks = []
    for op in ops:
        words = ["--small", "--op", op, *(("--elem", "f32") if op in f32 else ())]
        shapes = NARROW.get((tool, op))
        tasks.append(Task(op, [(how if program else []) + cuda_ops(o, *words, *shape)
                               for shape in ([("--shape", s) for s in shapes] if shapes else [()])],
                          3 * HEAVY.get(op, 5), 240, True))
    judge = judge_sanitizer
    if not program and not o.rehearse:
        def judge(task):
            return "there is no compute-sanitizer"
    return Step(tool, f"small shapes under compute-sanitizer's {tool}", tasks, judge)


PHASES = [  # their steps, and whether tasks share a GPU
    ([fixtures_step, ops_step, deterministic_step, nccl_step], True),
    ([bench_step, whole_step], False),
    ([lambda o, tool=tool: sanitizer_step(o, tool) for tool in SANITIZERS], True),
]


# ---- running them -------------------------------------------------------------------------------


class Run:
    """Lanes, their clock and the log."""

    def __init__(self, o, log):
        self.o, self.log, self.lock = o, log, threading.Lock()
        self.end = time.monotonic() + o.minutes * 60
        self.cores = sorted(os.sched_getaffinity(0))

    def left(self):
        return self.end - time.monotonic()

    def share(self, i, n, cores):
        """The i-th of n parts of the cores, one at least."""
        return cores[i * len(cores) // n:(i + 1) * len(cores) // n] or [cores[i % len(cores)]]

    def environment(self, gpu, command, task):
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu, PYTHONUNBUFFERED="1", **task.env)
        if command[0] == sys.executable:  # which brings its own libraries, all but the driver's
            old = env.get("LD_LIBRARY_PATH", "").split(":")
            env["LD_LIBRARY_PATH"] = ":".join(f for f in old if "/usr/local/nvidia" in f)
        else:
            env["LD_LIBRARY_PATH"] = library_path()
        return env

    def command(self, task, gpu, command):
        """Its exit code; what it says is added to the task's text."""
        seconds = min(task.limit, self.left())
        with tempfile.TemporaryFile() as said:
            try:
                process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT,
                                           stdin=subprocess.DEVNULL, start_new_session=True,
                                           env=self.environment(gpu, command, task))
                code = process.wait(max(seconds, 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # a sanitizer's program runs on without it
                process.wait()
                code = 124
            except OSError as e:
                task.text += str(e)
                return 127
            said.seek(0)
            task.text += said.read().decode(errors="replace")
        if code == 124:
            task.text += f"\ntook longer than {seconds:.0f} s\n"
        return code

    def task(self, step, task, gpu):
        task.began = time.monotonic()
        for command in task.commands:
            if self.left() < 5:
                task.codes.append(124)
                task.text += "\nno time was left\n"
                break
            task.codes.append(self.command(task, gpu, command))
            if task.codes[-1] != 0 and not task.goes_on:
                break
        task.ended = time.monotonic()
        why = step.judge(task)
        task.result, task.said = (FAILED, why) if why else (PASSED, "")
        if why and self.left() < 5:
            task.result = LEFT_OUT
        with self.lock:
            took = task.ended - task.began
            print(f"\n======== {step.name}: {task.name}, GPU {gpu}, {took:.1f} s: "
                  f"{task.result} {task.said}\n{task.text}", file=self.log, flush=True)
            if why:
                print(f"{step.name}: {task.name}: {task.result}: {why}"[:400], flush=True)

    def drain(self, queue, gpu, cores):
        os.sched_setaffinity(0, cores)  # of this thread, and of what it starts
        while self.left() > 10:
            with self.lock:
                if not queue:
                    return
                step, task = queue.pop(0)
            self.task(step, task, gpu)

    def lane(self, i, phases):
        n = len(self.o.gpu_ids)
        cores = self.share(i, n, self.cores)
        for queue, shares in phases:
            slots = self.o.slots if shares else 1
            parts = [threading.Thread(target=self.drain, args=(
                queue, self.o.gpu_ids[i], self.share(k, slots, cores))) for k in range(slots)]
            for p in parts:
                p.start()
            for p in parts:
                p.join()

    def all(self, phases):
        lanes = [threading.Thread(target=self.lane, args=(i, phases))
                 for i in range(len(self.o.gpu_ids))]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()


def queue_of(steps):
    """The longest tasks of each step first, one step after the other."""
    return [(s, t) for s in steps for t in sorted(s.tasks, key=lambda t: -t.seconds)]


def list_steps(phases, o):
    for steps, shares in phases:
        lanes = len(o.gpu_ids) * (o.slots if shares else 1)
        for s in steps:
            print(f"{s.name:14} {len(s.tasks):4} parts, about {s.seconds() / lanes:4.0f} s on "
                  f"{lanes:2} lanes  {s.what}")


def missing_shapes(o):
    """Rows of the table that cuda_ops times no shape for."""
    done = subprocess.run(cuda_ops(o, "--list", "--bench"), capture_output=True, text=True,
                          timeout=30, env=dict(os.environ, LD_LIBRARY_PATH=library_path()))
    timed = {tuple(line.split(None, 1)) for line in done.stdout.splitlines()}
    return [f"{r.op} ({r.shape})" for r in gpu_rows.ROWS if (r.op, r.shape) not in timed]


def gpu_ids(o):
    """What CUDA_VISIBLE_DEVICES may name: those that it names already, or all."""
    if o.rehearse:
        return ["0", "1"][:o.gpus]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")[:o.gpus]
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return [str(i) for i in range(max(1, len(done.stdout.splitlines())))][:o.gpus]


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--gpus", type=int, help="use so many; all unless said")
    p.add_argument("--slots", type=int, help="checks at once on a GPU; by its cores unless said")
    p.add_argument("--minutes", type=float, default=8, help="for everything")
    p.add_argument("--only", default="", help="names of steps, with commas")
    p.add_argument("--op", default="", help="names of ops, with commas; all unless said")
    p.add_argument("--rehearse", action="store_true", help="on the CPU, to try the script")
    p.add_argument("--list", action="store_true", help="names the steps and ends")
    o = p.parse_args()
    done = subprocess.run(cuda_ops(o, "--list"), capture_output=True, text=True, timeout=60,
                          env=dict(os.environ, LD_LIBRARY_PATH=library_path()))
    there = done.stdout.split()
    if not there:
        p.error(f"cuda_ops does not run: {done.stderr}")
    wanted = set(filter(None, o.op.split(","))) or set(there)
    if wanted - set(there):
        p.error(f"no such op: {', '.join(sorted(wanted - set(there)))}")
    o.ops = [op for op in there if op in wanted]
    o.gpu_ids = gpu_ids(o)
    cores = len(os.sched_getaffinity(0)) // len(o.gpu_ids)
    o.slots = o.slots or max(1, min(8, cores // 2))
    return o, p


def main():
    o, p = parse()
    phases = [([make(o) for make in makers], shares) for makers, shares in PHASES]
    names = {s.name for steps, _ in phases for s in steps}
    wanted = set(filter(None, o.only.split(","))) or names
    if wanted - names:
        p.error(f"no such step: {', '.join(sorted(wanted - names))}; there are {sorted(names)}")
    phases = [([s for s in steps if s.name in wanted], shares) for steps, shares in phases]
    list_steps(phases, o)
    if o.list:
        return 0
    folder = os.environ.get("OUT") or tempfile.mkdtemp(prefix="ballast-gpu-")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    print(f"{len(o.gpu_ids)} GPUs, {o.slots} checks at once on each; log: {folder}/gpu_ops.log",
          flush=True)
    with open(os.path.join(folder, "gpu_ops.log"), "w") as log:
        Run(o, log).all([(queue_of(steps), shares) for steps, shares in phases])
    steps = [s for its, _ in phases for s in its]
    text = "\n".join(report(steps, o))
    print(text)
    with open(os.path.join(folder, "gpu_ops.txt"), "w") as f:
        f.write(text + "\n")
    return 0 if all(s.row()[0] == PASSED for s in steps) and not missing_shapes(o) else 1


def report(steps, o):
    lines = []
    by_name = {s.name: s for s in steps}
    if "bench" in by_name:
        done = joined(by_name["bench"].tasks)
        step = speed_of(by_name["whole_step"].tasks) if "whole_step" in by_name else None
        lines += [gpu_rows.tables(gpu_rows.read_ours(done), gpu_rows.read_peers(done), step), ""]
        missing = missing_shapes(o)
        if missing:
            lines += ["FAILED: cuda_ops times no such shapes: " + "; ".join(missing), ""]
    lines += [f"{s.name}: {t.name}: {t.said}"[:300] for s in steps for t in s.tasks
              if t.result == FAILED]
    lines += [f"{'STEP':14} {'RESULT':8} {'TIME':>8}  WHAT"]
    for s in steps:
        result, took, said = s.row()
        lines.append(f"{s.name:14} {result:8} {took:6.1f} s  {said}"[:300])
    return lines


if __name__ == "__main__":
    sys.exit(main())
