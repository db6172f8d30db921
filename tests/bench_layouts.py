"""Every way to cut a model trains the same: a table of jobs, and how far each is off.

    bench_layouts.py [--sample] [--only MODEL]... [--ranks N] [--thin N] [--clusters N]

Jobs of real daemons: eight workers on four nodes of two; and some of them on two machines of four
that share no memory. Every layout (fsdp, expert parallel, expert shards, replicas of both) of 1, 2,
4 and 8 ranks is trained three times, by settings that differ in all that must not matter: overlap,
the way that tokens take between nodes, what is computed again, accumulation, experts that move.
Loss and gradient norm of each of 20 steps, and a validation, are held to those of one rank that
does one thing after another, losses within 1e-4; and two runs in deterministic mode, which differ
in all but layout and accumulation, to each other: no bit of a loss or norm, of the weights or of
the optimizer's state at the end may differ.

Where only some tokens have labels, passes and ranks have unequal numbers of them: that a loss is
the mean over the labels of the whole batch shows in numbers that are the same however it is cut.

Learning rate and epsilon are those at which runs stay together, as long as tokens choose the same
experts. The gradients of kimi-k3-tiny's random weights are so large that one token that chooses
otherwise, because two experts' scores were equal to the last bits, moves the loss of its step by
1e-4 and that of the tenth step after it by 1e-2, on whatever layout, and on one rank by other
accumulation alone. So it trains on few tokens, drawn so that no choice is that near; and once more
on more of them with all experts chosen, where there is nothing to choose.

--sample: few layouts and steps, as a test. Else it needs the reference models (BALLAST_SHARED).
--thin: every Nth layout of 8 ranks. --clusters: that run beside each other, where there is a core
for each of their eight workers.
"""
import argparse
import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
import threading

from cluster import Cluster, expect, tell

HERE = os.path.dirname(os.path.abspath(__file__))
SHARED = os.environ.get("BALLAST_SHARED") or os.path.join(HERE, "..", "..", "shared")
TOLERANCE = 1e-4
STEPS = 20
SEQUENCES = 16  # a step, on however many ranks


class Model:
    def __init__(self, path, length, lr="5e-4", segments=False, top_k=None, seed=1,
                 tasks=False):
        self.path, self.length, self.lr, self.segments = path, length, lr, segments
        self.seed = seed
        self.data = "jsonl" if tasks else "bytes"
        self.is_again = tasks or top_k  # as another model, but for one thing
        self.top_k = top_k  # in place of the config's


MODELS = {
    "example": Model(os.path.join(HERE, "..", "deploy", "example", "model"), 32),
    "example, some labels": Model(os.path.join(HERE, "..", "deploy", "example", "model"), 32,
                                  tasks=True),
    "deepseek-v32-tiny": Model(os.path.join(SHARED, "oracle", "deepseek-v32-tiny"), 96,
                               segments=True),
    "kimi-k3-tiny": Model(os.path.join(SHARED, "oracle", "kimi-k3-tiny"), 8, lr="1e-4"),
    "kimi-k3-tiny, all experts": Model(os.path.join(SHARED, "oracle", "kimi-k3-tiny"), 32,
                                       top_k=16),
}

JOB = """name: {name}
model: {{path: {model}, init_seed: 3}}
data: {{train: [text/train.{ending}], validation: [text/held-out.{ending}], format: {format},
  sequence_length: {length}}}
train:
  steps: {steps}
  seed: {seed}
  global_batch: {sequences}
  micro_batch: {micro_batch}
  validation_sequences: 8
  deterministic: {deterministic}
  optimizer: {{lr: {lr}, eps: 1e-4, decay: all}}
  schedule: {{name: constant}}
moe: {{bias_update: off}}
parallel: {{workers: {ranks}, fsdp_shard_degree: {fsdp}, expert_parallel_degree: {ep},
  expert_shard_degree: {shard}, overlap: {overlap}, hierarchical_all_to_all: {nodes},
  activation_checkpointing: {recompute}, segment_tokens: {segment}}}
rebalance: {{auto: {moves}, window_steps: 4, horizon_steps: 100000, min_gain: 0}}
checkpoint: {{path: checkpoint-{name}, every_steps: 100000}}
"""

PLAIN = {"deterministic": "false", "overlap": "false", "nodes": "off", "recompute": "off",
         "segment": "off", "moves": "false", "accumulate": False}


class Run:
    """A job: what it is of, and what came of it."""

    def __init__(self, model, layout, kind, **settings):
        self.model, self.layout, self.kind = model, layout, kind
        self.settings = dict(PLAIN, **settings)

    def name(self):
        s = self.settings
        words = [f"{k}={s[k]}" for k in PLAIN if s[k] != PLAIN[k]]
        return "{}: ranks={} fsdp={} ep={} expert_shard={} {}".format(
            self.model, *self.layout, " ".join(words) or "plain")


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(ranks):
    return [(ranks, fsdp, ep, shard) for fsdp in divisors(ranks) for ep in divisors(ranks)
            for shard in divisors(ranks // ep)]


def on_off(x):
    return "true" if x else "false"


def runs_of(model, layout, i):
    """Two with the same bits, and one with whatever comes in turn."""
    again = ("selective", "full")[i % 2]
    accumulate = bool(i >> 1 & 1)
    yield Run(model, layout, "one after another", deterministic="true", accumulate=accumulate)
    yield Run(model, layout, "all at once", deterministic="true", accumulate=accumulate,
              overlap="true", nodes="on", recompute=again, moves="true")
    yield Run(model, layout, "as it comes", accumulate=not accumulate, overlap=on_off(i & 1),
              nodes=("auto", "off", "on")[i % 3], moves=on_off(i >> 2 & 1),
              recompute=("full", "off", "selective")[i // 2 % 3])
    if MODELS[model].segments:
        yield Run(model, layout, "in segments", accumulate=not accumulate, overlap="true",
                  recompute="full", segment="64")


# ---- running ------------------------------------------------------------------------------------


def write_job(c, run, number, steps):
    ranks, fsdp, ep, shard = run.layout
    model, s = MODELS[run.model], dict(run.settings)
    most = SEQUENCES // ranks
    s["micro_batch"] = max(1, most // 2) if s.pop("accumulate") else most
    path = os.path.join(c.folder, f"bench-{number}.yaml")
    with open(path, "w") as f:
        f.write(JOB.format(
            name=f"b{number}", model=c.models[run.model], length=model.length, format=model.data,
            ending={"bytes": "txt"}.get(model.data, "jsonl"), lr=model.lr, seed=model.seed,
            steps=steps, sequences=SEQUENCES, ranks=ranks, fsdp=fsdp, ep=ep, shard=shard, **s))
    return path


def digest(folder):
    """Of all tensors of a checkpoint, by name: who wrote which of them does not matter."""
    parts = {}
    for top, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".safetensors"):
                continue
            kind = os.path.relpath(top, folder)
            with open(os.path.join(top, name), "rb") as f:
                header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
                begin = f.tell()
                for tensor, about in header.items():
                    if tensor == "__metadata__":
                        continue
                    f.seek(begin + about["data_offsets"][0])
                    data = f.read(about["data_offsets"][1] - about["data_offsets"][0])
                    parts[kind, tensor] = hashlib.sha256(data).hexdigest()
    expect(parts, f"no tensors in {folder}")
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def collect(c, run, number):
    c.wait(run.job, "DONE", 240)
    steps = c.steps(run.job)
    run.losses = [r["loss"] for r in steps] + [steps[-1]["validation_loss"]]
    run.norms = [r["grad_norm"] for r in steps]
    folder = os.path.join(c.folder, f"checkpoint-b{number}")
    newest = [n for n in os.listdir(folder) if n.startswith("step-")]
    expect(len(newest) == 1, f"checkpoints of {run.name()}: {newest}")
    run.digest = digest(os.path.join(folder, newest[0]))
    run.n_moves = sum(e["kind"] == "PLACEMENT" for e in c.events(run.job))
    shutil.rmtree(folder)


def run_all(clusters, runs, steps, failures):
    """Each cluster takes the next job when it has done one. Gives those that came to their end."""
    waiting, done = iter(list(enumerate(runs))), []
    lock = threading.Lock()

    def work(c):
        while True:
            with lock:
                i, run = next(waiting, (0, None))
            if not run:
                return
            try:
                run.job = c.submit(write_job(c, run, i, steps))
                collect(c, run, i)
                done.append(run)
            except Exception as e:
                failures.append(f"{run.name()}: {e}")
            if i % 20 == 0:
                print(f"{i} of {len(runs)} jobs", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=work, args=(c,)) for c in clusters]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return [run for run in runs if run in done]


def task(word, draw):
    """A line of data of which all, half or few of the tokens are labels."""
    tokens = list(word.encode())[:32]
    n_labels = max(2, len(tokens) * (4, 2, 1, 1)[draw % 4] // 4)
    labels = [-100] * (len(tokens) - n_labels) + tokens[-n_labels:]
    return json.dumps({"input_ids": tokens, "labels": labels}) + "\n"


class LayoutCluster(Cluster):
    """Its nodes are of two workers each; or it is two machines of four workers."""

    def __init__(self, apart=False):
        names = [f"n{i // (4 if apart else 2)}" for i in range(8)]
        self.models = {}
        super().__init__(n_workers=8, nodes=names, domains=names if apart else None)
        self.worker_keys = "cores: 1\n"

    def _write_text(self):
        """Words in an order that looks like chance and is the same everywhere."""
        words = ("a in the river stone under light who carries old water home and sings "
                 "again").split()
        os.makedirs(os.path.join(self.folder, "text"))
        state = 7
        for name, n in (("train", 40000), ("held-out", 4000)):
            path = os.path.join(self.folder, "text", name)
            with open(path + ".txt", "w") as text, open(path + ".jsonl", "w") as tasks:
                for i in range(n):
                    state = (state * 1103515245 + 12345) % 2**31
                    word = words[(state >> 16) % len(words)]
                    text.write(word + (".\n" if i % 12 == 11 else " "))
                    if i % 3 == 0:
                        tasks.write(task(word * (1 + i % 7), state >> 8))

    def _write_model(self):
        for i, (name, model) in enumerate(MODELS.items()):
            self.models[name] = f"model-{i}"
            target = os.path.join(self.folder, f"model-{i}")
            os.makedirs(target)
            if not os.path.exists(model.path):
                continue
            with open(os.path.join(model.path, "config.json")) as f:
                config = json.load(f)
            if model.top_k:
                config["text_config"]["num_experts_per_token"] = model.top_k
            with open(os.path.join(target, "config.json"), "w") as f:
                json.dump(config, f)
            weights = os.path.join(model.path, "model.safetensors")
            if os.path.exists(weights):
                shutil.copy(weights, target)


# ---- the table ----------------------------------------------------------------------------------


def off(a, b):
    expect(len(a) == len(b) and a, f"{len(a)} and {len(b)} numbers")
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def judge(runs, reference, failures):
    """How far each is off, and whether the two of a layout have the same bits."""
    pairs = {}
    for run in runs:
        run.off = off(run.losses, reference.losses)
        run.norm_off = off(run.norms, reference.norms)
        if not run.off <= TOLERANCE:
            failures.append(f"{run.name()}: losses off by {run.off:.1e}")
        if run.settings["deterministic"] == "true":
            pairs.setdefault(run.layout, []).append(run)
    for pair in pairs.values():
        bits = [(r.losses, r.norms, r.digest) for r in pair]
        if len(pair) < 2:
            continue
        pair[-1].has_the_bits = all(b == bits[0] for b in bits)
        if not pair[-1].has_the_bits:
            failures.append(f"{pair[-1].name()}: other bits than {pair[0].name()}")


def print_rows(place, model, runs):
    for ranks in sorted({r.layout[0] for r in runs}):
        for kind in dict.fromkeys(r.kind for r in runs):
            row = [r for r in runs if r.layout[0] == ranks and r.kind == kind]
            if not row:
                continue
            same = [r.has_the_bits for r in row if hasattr(r, "has_the_bits")]
            words = f"{sum(same)} of {len(same)}" if same else ""
            print("| {} | {} | {} | {} | {} | {:.1e} | {:.1e} | {} | {} |".format(
                model, place, ranks, kind, len(row), max(r.off for r in row),
                max(r.norm_off for r in row), words, sum(r.n_moves for r in row)), flush=True)


def cases(model, args, apart):
    """Runs of a model, the first of them the reference."""
    if args.sample:
        chosen = [(8, 4, 4, 2)]
    else:
        chosen = [x for n in (1, 2, 4, 8) for x in layouts(n) if args.ranks in (0, n)]
        chosen = [x for i, x in enumerate(chosen) if x[0] < 8 or i % args.thin == 0]
        if apart or MODELS[model].is_again:
            chosen = [x for i, x in enumerate(chosen) if x[0] > 2 and i % 5 == 2]
    runs = [Run(model, (1, 1, 1, 1), "reference")]
    for i, layout in enumerate(chosen):
        runs += runs_of(model, layout, i)
    return runs[:1] + runs[3:] if args.sample and MODELS[model].is_again else runs


def measure(args, apart, failures):
    few = list(MODELS)[:2 if args.sample else 1]
    names = args.only or (few if args.sample or apart else list(MODELS))
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(LayoutCluster(apart)) for _ in range(args.clusters)]
        for model in names:
            runs = cases(model, args, apart)
            done = run_all(clusters, runs, 6 if args.sample else STEPS, failures)
            if done and done[0] is runs[0]:
                judge(done[1:], runs[0], failures)
                print_rows("two machines" if apart else "nodes of two", model, done[1:])


def story():
    """every way to cut a model trains the same"""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--only", action="append", choices=list(MODELS))
    parser.add_argument("--thin", type=int, default=1)
    parser.add_argument("--clusters", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=0, choices=(0, 1, 2, 4, 8))
    args, failures = parser.parse_args(), []
    print("| model | where | ranks | settings | jobs | loss off | norm off | same bits "
          "| placements |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    measure(args, False, failures)
    if not args.sample:
        measure(args, True, failures)
    expect(not failures, "\n".join(failures))


if __name__ == "__main__":
    tell(story)
