#!/usr/bin/env python3
"""The stories of whole jobs on a machine with GPUs, from programs that are already built.

    gpu_stories.py [--gpus N] [--trainers-per-gpu K] [--minutes M] [--only NAME,...] [--list]

BALLAST_BIN names the folder of the programs (build/bin), BALLAST_TESTS that of bench_coll (beside
it: ../tests), BALLAST_SHARED the reference models (../shared). Output of all daemons and jobs goes
to gpu_stories.log in $OUT, or in a folder that is named at the start. Ends with one table; the
status is 1 if a step failed. A step that fails or takes too long does not keep the next from
running; where time runs out the rest is left out, and the table says so.
"""
import argparse
import glob
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

import cluster
from cluster import Cluster, Story, expect, is_alive, until

HERE = os.path.dirname(os.path.abspath(__file__))
SHARED = os.environ.get("BALLAST_SHARED") or os.path.join(HERE, "..", "..", "shared")
TESTS = os.environ.get("BALLAST_TESTS") or os.path.join(cluster.BIN, "..", "tests")

# 921 million parameters: (KDA x 3, latent attention) twice, every layer with 64 experts.
MODEL_921M = {
    "model_type": "kimi_linear", "vocab_size": 32768, "hidden_size": 1024, "num_hidden_layers": 8,
    "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "mla_use_nope": True, "first_k_dense_replace": 0, "moe_layer_freq": 1,
    "num_experts": 64, "num_experts_per_token": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 512, "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8],
                           "head_dim": 128, "num_heads": 8, "short_conv_kernel_size": 4},
}
JOB_921M = """name: whole-step
model: {{path: big, init_seed: 1}}
data: {{train: [tokens.bin], format: u16, sequence_length: {sequence}}}
train:
  steps: 100000
  global_batch: {batch}
  micro_batch: 4
  precision: {precision}
  optimizer: {{lr: 1e-4}}
parallel: {{workers: {n}, fsdp_shard_degree: {n}, expert_parallel_degree: {n},
  activation_checkpointing: off}}
rebalance: {{auto: false, window_steps: 5, horizon_steps: 1000, min_gain: 0.001}}
checkpoint: {{path: checkpoint-big, every_steps: 100000}}
"""


class GpuCluster(Cluster):
    """Worker i computes on GPU i modulo the GPUs; in a rehearsal on the CPU."""

    def __init__(self, o, n_workers=None, nodes=None):
        super().__init__(n_workers=n_workers or o.ranks, nodes=nodes)
        self.n_gpus = 0 if o.rehearse else o.gpus
        self.cores = max(1, len(os.sched_getaffinity(0)) // self.n_workers)

    def start_worker(self, i):
        return self._start(f"worker-{i}", "ballast-worker",
                           f"name: w{i}\nnode: {self.nodes[i]}\n"
                           f"coordinator: {self.address}\n"
                           f"state_dir: {self.folder}/worker-{i}.state\n"
                           f"allowed_roots: [{self.folder}]\ncores: {self.cores}\n"
                           f"device: {self.device(i)}\n")

    def device(self, i):
        return f"cuda:{i % self.n_gpus}" if self.n_gpus else "cpu"

    def _write_text(self):
        if shutil.which("bible"):
            super()._write_text()
            return
        folder = os.path.join(self.folder, "text")
        os.makedirs(folder)
        words = b"".join(open(p, "rb").read() for p in sorted(
            glob.glob(os.path.join(HERE, "*.py")) + glob.glob(os.path.join(HERE, "..", "docs", "*"))
            + glob.glob(os.path.join(HERE, "..", "*", "*.[ch]"))) if os.path.isfile(p))
        expect(len(words) > 100000, f"no text to train on around {HERE}")
        cut = len(words) * 9 // 10
        for name, part in (("train", words[:cut]), ("held-out", words[cut:cut + 60000])):
            with open(os.path.join(folder, name + ".txt"), "wb") as f:
                f.write(part)

    def __exit__(self, kind, value, trace):
        if kind:  # while there is somebody to ask
            for job in range(1, 20):
                said = self.run("logs", job, "--rank", 0)
                if said.returncode != 0:
                    break
                print(f"---- job {job}\n{said.stdout[-3000:]}\n"
                      + self.run("events", "--job", job).stdout)
        return super().__exit__(kind, value, trace)

    def wait_step(self, job, step, seconds=40):
        def there():
            j = self.show(job)
            expect(j["state"] not in ("FAILED", "CANCELLED"), f"job {job}: {j['reason']}")
            return j["step"] >= step and j
        return until(there, seconds, f"job {job} at step {step}")

    def travel(self, job):
        """How the tensors of a job travel, in its own words."""
        found = re.findall(r"tensors travel through (.*)", self.ok("logs", job, "--rank", 0))
        expect(found, f"the log of job {job} does not say how tensors travel")
        return found[-1]

    def losses(self, job):
        return [s["loss"] for s in self.metrics(job)]

    def metrics(self, job):
        rows = self.json("metrics", job)
        return rows["items"] if isinstance(rows, dict) else rows


def degrees(n):
    """fsdp and ep of n ranks: the largest powers of two that divide it."""
    fsdp = n & -n
    return {"workers": n, "fsdp": fsdp, "ep": min(fsdp, 8)}


def worst(a, b):
    expect(len(a) == len(b) and a, f"{len(a)} and {len(b)} steps")
    return max(abs(x - y) / max(abs(x), 1e-6) for x, y in zip(a, b))


# ---- the steps ----------------------------------------------------------------------------------


def programs(o):
    """what is here: GPUs, programs, libraries"""
    said = [f"{o.gpus} GPUs are used"]
    for program in ("ballast-worker", "ballast-coordinator", "ballast"):
        done = subprocess.run([os.path.join(cluster.BIN, program), "--version"],
                              capture_output=True, text=True, timeout=30)
        expect(done.returncode == 0, f"{program} does not run: {done.stderr.strip()}")
        said.append(done.stdout)
    print("\n".join(said))
    if not o.rehearse:
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout)
    return said[1].split("\n")[0]


def collectives(o):
    """every collective, 1 to 256 MiB, beside NCCL's plain calls"""
    how = [str(o.gpus)] if o.rehearse else ["--gpus", str(o.gpus)]
    done = subprocess.run([os.path.join(TESTS, "bench_coll"), *how],
                          capture_output=True, text=True, timeout=90)
    o.tables.append(done.stdout)
    print(done.stdout)
    expect(done.returncode == 0, f"bench_coll ends with {done.returncode}: {done.stderr[-500:]}")
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith(("#", "op"))]
    if o.rehearse:
        return f"{len(rows)} sizes"
    largest = {r[0]: r for r in rows if r[1] == "256"}
    return ", ".join(f"{r[0]} {r[4]} GB/s ({r[6]} of plain)" for r in largest.values())


def example(o):
    """quickstart's job, end to end"""
    with GpuCluster(o) as c:
        for name in ("model", "job.yaml"):
            source = os.path.join(HERE, "..", "deploy", "example", name)
            target = os.path.join(c.folder, "example", name)
            (shutil.copytree if os.path.isdir(source) else copy_file)(source, target)
        os.symlink(os.path.join(c.folder, "text"), os.path.join(c.folder, "example", "text"))
        d, n_steps = degrees(o.ranks), 40 if o.rehearse else 120
        job = c.submit(os.path.join(c.folder, "example", "job.yaml"),
                       "--set", f"train.steps={n_steps}",
                       "--set", f"parallel.workers={d['workers']}",
                       "--set", f"parallel.fsdp_shard_degree={d['fsdp']}",
                       "--set", f"parallel.expert_parallel_degree={d['ep']}",
                       "--set", f"train.micro_batch={max(1, 16 // o.ranks // 2)}",
                       "--set", "train.schedule.warmup_steps=10")
        c.wait(job, "DONE", 80)
        steps = c.metrics(job)
        expect(len(steps) == n_steps, f"{len(steps)} steps are stored")
        expect(steps[-1]["loss"] < steps[0]["loss"] - 1, f"nothing learnt: {steps[-1]}")
        print(c.run("rebalance", "history", job).stdout)
        return (f"{c.travel(job)}: loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}, "
                f"{speed(steps[20:]):.0f} tokens/s, {len(moves(c, job))} placements")


def copy_file(source, target):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copy(source, target)


def moves(c, job):
    return [e for e in c.events(job) if e["kind"] == "PLACEMENT"]


def kill_worker(o):
    """kill -9 of a worker in mid-step: the others abort, the job resumes on the rest"""
    with GpuCluster(o) as c:
        job = c.submit(c.job(steps=20000, checkpoint_every=50, **degrees(o.ranks)))
        c.wait_step(job, 60, 60)
        how = c.travel(job)
        trainers = c.trainers(job)
        expect(sorted(trainers) == list(range(o.ranks)), f"trainers: {trainers}")
        c.n_workers += 1
        c.nodes.append("here")
        c.start_worker(o.ranks)  # which shares the first GPU
        until(lambda: c.n_idle() == 1, 30, "a worker to spare")
        c.kill(c.daemon_of(trainers[o.ranks - 1]))
        began = time.monotonic()
        until(lambda: not any(is_alive(p) for p in trainers.values()), 30,
              "every trainer of the attempt is gone")
        aborted = time.monotonic() - began
        until(lambda: c.show(job)["attempt"] == 2 and c.show(job)["state"] == "RUNNING", 60,
              "the second attempt runs")
        resumed = time.monotonic() - began
        n_before = len(c.steps(job))
        c.wait_step(job, n_before + 60, 60)
        expect(len(c.steps(job)) >= n_before + 60, "a step is missing")
        c.ok("job", "cancel", job)
        return (f"{how}: survivors ended {aborted:.1f} s after the kill, training again "
                f"after {resumed:.1f} s through {c.travel(job)}")


def migrate(o):
    """experts move with their optimizer state while training goes on: the same losses"""
    if o.ranks < 2:
        return "left out: one rank moves nothing"
    found = {}
    for auto in ("false", "true"):
        with GpuCluster(o) as c:
            path = c.job(steps=60, deterministic=True, **degrees(o.ranks), more=(
                f"moe: {{bias_update: off}}\nrebalance: {{auto: {auto}, window_steps: 5, "
                "horizon_steps: 1000, min_gain: 0.001}\n"))
            job = c.submit(path)
            c.wait(job, "DONE", 60)
            found[auto] = c.losses(job)
            n_moved = len(moves(c, job))
            history = c.run("rebalance", "history", job).stdout
            print(history)
    expect(n_moved > 0, "no expert has moved")
    apart = worst(found["false"], found["true"])
    expect(apart == 0, f"moving experts changed the losses: {apart:.1e} apart at worst")
    return f"{n_moved} placements in 60 steps, losses bit by bit as without"


# An update does not jump where a gradient changes its sign, so that rounding stays what it is.
GENTLE = ("--set", "train.optimizer.lr=5e-4", "--set", "train.schedule.min_lr=5e-5", "--set",
          "train.optimizer.eps=1e-4")


def invariance(o):
    """losses on all ranks are those of one rank: kimi-k3-tiny and the example's model"""
    said = []
    example_model = os.path.join(HERE, "..", "deploy", "example", "model")
    models = [("example", example_model)]
    if os.path.isdir(os.path.join(SHARED, "oracle", "kimi-k3-tiny")):
        models.insert(0, ("kimi-k3-tiny", os.path.join(SHARED, "oracle", "kimi-k3-tiny")))
    else:
        said.append(f"no kimi-k3-tiny in {SHARED}")
    with GpuCluster(o) as c:
        for name, source in models:
            target = os.path.join(c.folder, name)
            os.makedirs(target)
            for file in ("config.json", "model.safetensors"):
                if os.path.exists(os.path.join(source, file)):
                    shutil.copy(os.path.join(source, file), target)
            found, wanted = [], []
            for n, overlap in ((1, "true"), (o.ranks, "true"), (o.ranks, "false")):
                path = c.job(name=f"{name}-{n}-{overlap}", steps=20, **degrees(n),
                             more="moe: {bias_update: off}\n"
                                  "rebalance: {auto: false, window_steps: 1}\n")
                job = c.submit(path, "--set", f"model.path={name}", *GENTLE, "--set",
                               f"parallel.overlap={overlap}")
                c.wait(job, "DONE", 60)
                found.append(c.losses(job))
                wanted.append(loads(c, job))
                print(name, n, "ranks, overlap", overlap, found[-1])
            same = same_choices(wanted[0], wanted[1])
            apart = worst(found[0][:same], found[1][:same])
            rest = "" if same == 20 else f" over {same} steps, then a token chose another expert"
            said.append(f"{name} {apart:.1e}{rest}")
            expect(apart <= 1e-5 and same >= 5, f"losses of {o.ranks} ranks from one's: {said[-1]}")
            expect(found[1] == found[2], f"{name}: overlap changed the losses: {found[1:]}")
    return f"apart at worst in 20 steps: {'; '.join(said)}; the same bits without overlap"


def loads(c, job):
    """For each step two sums that change with what its tokens choose."""
    rows = c.json("db", "query", "SELECT sum(tokens * expert * (layer + 1)) AS first, "
                  "sum(tokens * expert * expert * (layer + 1)) AS second FROM expert_load "
                  f"WHERE job = {job} GROUP BY window_start_step ORDER BY window_start_step")
    return rows["items"] if isinstance(rows, dict) else rows


def same_choices(a, b):
    """The steps before the first in which a near tie was decided the other way."""
    expect(len(a) == len(b) == 20, f"loads of {len(a)} and {len(b)} steps")
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def write_big(c, o):
    """The 921 M model, or in a rehearsal one of its shape, and tokens; returns their sequence."""
    model = MODEL_921M
    if o.rehearse:
        small = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                     num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=32,
                     qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_experts=16,
                     num_experts_per_token=4, moe_intermediate_size=32)
        kda = dict(model["linear_attn_config"], kda_layers=[1, 2, 3], full_attn_layers=[4],
                   head_dim=16, num_heads=2)
        model = dict(model, **small, linear_attn_config=kda)
    os.makedirs(os.path.join(c.folder, "big"))
    with open(os.path.join(c.folder, "big", "config.json"), "w") as f:
        json.dump(model, f)
    tokens = bytearray(os.urandom((1 if o.rehearse else 32) << 20))
    high = bytes(0 if o.rehearse else i & 0x7f for i in range(256))  # below the vocabulary
    tokens[1::2] = bytes(tokens[1::2]).translate(high)
    with open(os.path.join(c.folder, "tokens.bin"), "wb") as f:
        f.write(tokens)
    return 128 if o.rehearse else 4096


def submit_big(c, o, sequence, n, *settings):
    path = os.path.join(c.folder, f"big-{n}.yaml")
    with open(path, "w") as f:
        f.write(JOB_921M.format(n=n, batch=4 * n, sequence=sequence,
                                precision="f32" if o.rehearse else "bf16"))
    return c.submit(path, *(word for s in settings for word in ("--set", s)))


def run_big(c, o, sequence, n, *settings, last=16):
    """The metrics of its last twelve steps, with what it said where it failed."""
    job = submit_big(c, o, sequence, n, *settings)
    try:
        c.wait_step(job, last, 75)
        print(c.travel(job))
        print(c.run("rebalance", "history", job).stdout)
        return c.metrics(job)[last - 12:last]
    except Story:
        print(c.run("logs", job).stdout, c.run("events", "--job", job).stdout)
        raise
    finally:
        c.run("job", "cancel", job)
        until(lambda: c.n_idle() == c.n_workers, 60, "the workers are free again")


def speed(rows):
    return statistics.median(r["tokens_per_second"] for r in rows)


def phases(rows):
    """Median milliseconds of a step by phase."""
    return {p: statistics.median(r["phases"].get(p, 0) * 1e3 for r in rows)
            for p in rows[0]["phases"]}


def whole_step(o):
    """step time and tokens/s of the 921 M model on 1 .. N ranks, bf16, and on N in other ways"""
    said, counts = [], [n for n in (1, 2, 4, 8) if n <= o.ranks]
    one, many = ("GPU", "GPUs") if o.trainers_per_gpu == 1 else ("rank", "ranks")
    ways = [("", ()), (" without overlap", ("parallel.overlap=false",))]
    if o.trainers_per_gpu == 1:  # through NCCL
        ways.append((" with registered buffers", ("parallel.register_buffers=true",)))
    with GpuCluster(o) as c:
        sequence = write_big(c, o)
        cases = [(n, *ways[0]) for n in counts]
        cases += [(counts[-1], *way) for way in ways[1:] if o.ranks > 1]
        for n, way, settings in cases:
            rows = run_big(c, o, sequence, n, *settings)
            said.append(f"{n} {many if n > 1 else one}{way}: "
                        f"{4 * n * sequence / speed(rows) * 1e3:.1f} ms, "
                        f"{speed(rows):.0f} tokens/s, {taken(rows)} GiB a rank")
            o.tables.append(said[-1] + "; " + spent(rows))
    return "; ".join(said)


def taken(rows):
    """GiB: what the largest rank took at most, and its plan."""
    most, plan = (max(r[k] for r in rows) / 2**30
                  for k in ("memory_bytes", "memory_planned_bytes"))
    return f"{most:.2f} of {plan:.2f}"


def spent(rows):
    return "ms by phase: " + ", ".join(f"{k} {v:.1f}" for k, v in phases(rows).items() if v >= 0.05)


def memory(o):
    """what a rank takes of a GPU, and its plan, by model, ranks and what is made again"""
    ratios = []

    def row(name, rows):
        ratios.append(max(r["memory_bytes"] for r in rows)
                      / max(r["memory_planned_bytes"] for r in rows))
        o.tables.append(f"memory, {name:20} {taken(rows)} GiB taken of planned: {ratios[-1]:.3f}")

    with GpuCluster(o) as c:
        sequence = write_big(c, o)
        for n in sorted({1, o.ranks}):
            for how in ("off", "selective", "full"):
                row(f"921m {n} {how}", run_big(
                    c, o, sequence, n, f"parallel.activation_checkpointing={how}", last=12))
        for name in ("kimi-k3-tiny", "kimi-linear-tiny", "deepseek-v3-tiny", "deepseek-v32-tiny"):
            for n in sorted({1, o.ranks}):
                row(f"{name} {n}", run_small(c, name, n))
    return f"taken of planned: {min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} runs"


def run_small(c, name, n):
    """The metrics of a few steps of a reference model."""
    target = os.path.join(c.folder, name)
    if not os.path.isdir(target):
        os.makedirs(target)
        for file in ("config.json", "model.safetensors"):
            source = os.path.join(SHARED, "oracle", name, file)
            if os.path.exists(source):
                shutil.copy(source, target)
    with open(os.path.join(target, "tokens.bin"), "wb") as f:  # in any vocabulary
        f.write(b"".join(bytes((b & 0x7f, 0)) for b in os.urandom(60000)))
    job = c.submit(c.job(name=f"{name}-{n}", steps=8, **degrees(n)), "--set",
                   f"model.path={name}", "--set", "moe.bias_update=off", "--set",
                   f"data.train=[{name}/tokens.bin]", "--set",
                   f"data.validation=[{name}/tokens.bin]", "--set", "data.format=u16", *GENTLE)
    c.wait(job, "DONE", 60)
    return c.metrics(job)


def routing(o):
    """throughput under real routing, placements moving, over that under forced balance"""
    if o.ranks < 2:
        return "left out: one rank serves all experts"
    cases = (("forced balance", 16, ("moe.force_balance=true",)),
             ("real routing", 48, ("rebalance.auto=true",)), ("without moves", 16, ()))
    found = {}
    with GpuCluster(o) as c:
        sequence = write_big(c, o)
        for name, last, settings in cases:
            rows = run_big(c, o, sequence, o.ranks, *settings, last=last)
            found[name] = speed(rows)
            o.tables.append(f"{name}: {found[name]:.0f} tokens/s; {spent(rows)}")
    return ", ".join(f"{name} {found[name] / found['forced balance']:.3f}"
                     for name in ("real routing", "without moves"))


def hierarchy(o):
    """all-to-all between nodes once, then inside, against flat: the same losses, and the time"""
    if o.ranks < 4:
        return "left out: two nodes of two ranks are the least"
    found = {}
    with GpuCluster(o, nodes=[f"node-{2 * i // o.ranks}" for i in range(o.ranks)]) as c:
        sequence = write_big(c, o)
        for mode in ("false", "true"):
            found[mode] = run_big(c, o, sequence, o.ranks,
                                  f"parallel.hierarchical_all_to_all={mode}")
            o.tables.append(f"hierarchical {mode}: {speed(found[mode]):.0f} tokens/s; "
                            + spent(found[mode]))
    apart = worst(*([r["loss"] for r in found[m]] for m in ("false", "true")))
    expect(apart <= 1e-4, f"losses are {apart:.1e} apart")
    return (f"{speed(found['true']) / speed(found['false']):.3f} of flat's tokens/s as 2 nodes, "
            f"losses {apart:.1e} apart")


def pause(o):
    """how long the step that migrates is held, beside a step"""
    if o.ranks < 2:
        return "left out: one rank moves nothing"
    with GpuCluster(o) as c:
        job = submit_big(c, o, write_big(c, o), o.ranks, "rebalance.auto=true")
        until(lambda: len(moves(c, job)) >= 3 or c.show(job)["step"] > 200, 80, "three placements")
        done = [e for e in c.json("rebalance", "history", job)["items"] if e["state"] == "DONE"]
        steps = [r["tokens_per_second"] for r in c.metrics(job)[4:]]
        c.ok("job", "cancel", job)
    expect(done, "no expert has moved")
    step_s = 4 * o.ranks * (128 if o.rehearse else 4096) / statistics.median(steps)
    each = ", ".join(f"{e['moves']} moves of {e['bytes'] / 2**20:.0f} MiB in "
                     f"{e['pause_seconds'] * 1e3:.1f} ms" for e in done)
    longest = max(e["pause_seconds"] for e in done)
    return f"{longest / step_s:.1%} of a step of {step_s * 1e3:.0f} ms at worst: {each}"


STEPS = [  # name, what is called, seconds at most
    ("programs", programs, 40), ("collectives", collectives, 100), ("example", example, 110),
    ("kill_worker", kill_worker, 150), ("migrate", migrate, 130), ("invariance", invariance, 130),
    ("whole_step", whole_step, 270), ("routing", routing, 110), ("hierarchy", hierarchy, 90),
    ("pause", pause, 90), ("memory", memory, 200),
]


# ---- running them -------------------------------------------------------------------------------


def library_path():
    """CUDA's libraries where the programs look for them: beside them, or in Python's packages."""
    folders = [cluster.BIN, os.path.join(cluster.BIN, "lib"), os.path.join(cluster.BIN, "../lib")]
    for root in sys.path:
        folders += sorted(glob.glob(os.path.join(root, "nvidia", "*", "lib")))
    old = os.environ.get("LD_LIBRARY_PATH")
    return ":".join(([old] if old else []) + [f for f in folders if os.path.isdir(f)])


def on_alarm(number, frame):
    raise Story("took too long")


def run_step(call, o, seconds, log):
    """(result, what it said); what it prints goes to the log."""
    began = time.monotonic()
    print(f"\n======== {call.__name__}: {call.__doc__}", file=log, flush=True)
    sys.stdout = sys.stderr = log
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        said, result = call(o), "passed"
    except BaseException as e:  # a step must not end the others, whatever it meets
        if isinstance(e, KeyboardInterrupt):
            raise
        traceback.print_exc(file=log)
        said, result = f"{type(e).__name__}: {e}".strip(), "FAILED"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        log.flush()
    return result, said, time.monotonic() - began


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--gpus", type=int, help="use so many; all unless said")
    p.add_argument("--trainers-per-gpu", type=int, default=1)
    p.add_argument("--minutes", type=float, default=7.5, help="for everything")
    p.add_argument("--only", default="", help="names of steps, with commas")
    p.add_argument("--rehearse", action="store_true", help="on the CPU, to try the script")
    p.add_argument("--list", action="store_true", help="names the steps and ends")
    o = p.parse_args()
    if not o.gpus:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        o.gpus = max(1, len(done.stdout.splitlines()))
    o.ranks = o.gpus * o.trainers_per_gpu
    o.tables = []
    unknown = set(filter(None, o.only.split(","))) - {name for name, _, _ in STEPS}
    if unknown:
        p.error(f"no such step: {', '.join(unknown)}")
    return o


def main():
    o = parse()
    if o.list:
        print("\n".join(f"{name:12} {call.__doc__}" for name, call, _ in STEPS))
        return 0
    end = time.monotonic() + o.minutes * 60
    folder = os.environ.get("OUT") or tempfile.mkdtemp(prefix="ballast-gpu-")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ["LD_LIBRARY_PATH"] = library_path()
    cluster.PATIENCE = 1
    signal.signal(signal.SIGALRM, on_alarm)
    name = f"gpu_stories-{o.gpus}x{o.trainers_per_gpu}"
    print(f"{o.gpus} GPUs, {o.trainers_per_gpu} trainers each; log: {folder}/{name}.log",
          flush=True)
    lines = []
    with open(os.path.join(folder, name + ".log"), "w") as log:
        for step, call, seconds in STEPS:
            left = end - time.monotonic()
            if o.only and step not in o.only.split(","):
                continue
            if left < 15:
                result, said, took = "LEFT OUT", "no time was left", 0.0
            else:
                result, said, took = run_step(call, o, min(seconds, left), log)
            first = " | ".join(filter(None, map(str.strip, said.splitlines())))[:500]
            lines.append((step, result, took, first))
            print(f"{step:12} {result:8} {took:6.1f} s  {first}", flush=True)
        table = [f"{'STEP':12} {'RESULT':8} {'TIME':>8}  WHAT"]
        table += [f"{s:12} {r:8} {t:6.1f} s  {w}" for s, r, t, w in lines]
        text = "\n".join(["", *o.tables, *table])
        print(text, file=log)
    print(text)
    with open(os.path.join(folder, name + ".txt"), "w") as f:
        f.write(text + "\n")
    return 0 if all(r == "passed" for _, r, _, _ in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
