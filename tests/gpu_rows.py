"""The rows of performance's table for one H200: what is timed for each, its floor, peer and goal.

gpu_ops.py runs the units and hands what came out to the tables.
"""
import json
import re

FLOOR_TBS, FLOOR_TFLOPS = 4.27, 804  # what one card copies and multiplies at most
LARGE_GB = 0.2  # smaller shapes tell how long a launch takes
OF_COPY = 0.85  # what ops that only move bytes should reach

# Peers and ops that one process after the other runs on a GPU of its own, and about how many
# seconds they take. Ops in no unit are spread over units of their own.
UNITS = [  # name, peers, ops, seconds
    ("kda forward", ["kda_forward"], ["kda_forward"], 90),
    ("kda backward", ["kda_backward"], ["kda_backward"], 120),
    ("experts forward", ["ceilings", "grouped_fwd"], ["grouped_linear"], 40),
    ("experts dx", ["grouped_dx"], ["grouped_linear_dx"], 40),
    ("experts dw", ["grouped_dw"], ["grouped_linear_dw"], 50),
    ("routed layer", ["routed_layer"], ["routed_layer"], 60),
    ("indexer", ["select"], ["index_scores", "index_select"], 40),
    ("attention", ["attention"], ["attention", "attention_backward"], 30),
    ("sparse forward", [], ["sparse_attention"], 50),
    ("sparse backward", [], ["sparse_attention_backward", "index_loss", "index_loss_dense"], 50),
    ("adamw", ["adamw"], ["adamw"], 40),
    ("head", ["cross_entropy"], ["linear_cross_entropy"], 40),
]
N_OTHER_UNITS = 4
OTHER_SECONDS = 50


def units(ops):
    """UNITS, with all the other ops of the list in units of their own beside the copy."""
    named = {op for _, _, its, _ in UNITS for op in its}
    rest = [op for op in ops if op not in named]
    others = [(f"others {i + 1}", ["ceilings"], rest[i::N_OTHER_UNITS], OTHER_SECONDS)
              for i in range(N_OTHER_UNITS) if rest[i::N_OTHER_UNITS]]
    return [(name, peers, [op for op in its if op in ops], s) for name, peers, its, s in UNITS
            if any(op in ops for op in its)] + others


class Row:
    """Times are milliseconds; rates, where unit says so, TFLOP/s of the op's own count."""

    def __init__(self, what, op, shape, floor=None, peer=None, known="-", goal=None, unit="ms",
                 less=None, dense=None, share=None):
        self.what, self.op, self.shape, self.floor, self.peer = what, op, shape, floor, peer
        self.known, self.goal, self.unit = known, goal, unit
        self.less = less  # another op, whose time is taken off
        self.dense, self.share = dense, share  # the goal is this share of that peer's rate


def expert_rows():
    known = {"14": (672, 667, 678, "DeepGEMM 704"), "112": (608, 632, 615, "DeepGEMM 672"),
             "64": (559, 612, 581, "DeepGEMM 666")}
    shapes = {"14": "131072, 14, 3584, 3072", "112": "131072, 112, 3584, 3072",
              "64": "65536, 64, 2048, 1024"}
    kinds = (("fwd", "up forward", "grouped_linear"), ("dx", "dgrad", "grouped_linear_dx"),
             ("dw", "wgrad", "grouped_linear_dw"))
    for name, shape in shapes.items():
        n_rows, n_groups, n_in, n_out = shape.split(", ")
        for i, (kind, said, op) in enumerate(kinds):
            yield Row(f"expert products, {n_rows} rows, {n_in} x {n_out}, {n_groups} experts: "
                      f"{said}", op, shape, unit="TFLOP/s", peer=f"grouped {name} {kind}",
                      known=f"torch {known[name][i]}; {known[name][3]}",
                      dense=f"dense {name} {kind}", share=0.95 if name == "14" else 0.92)


ROWS = [
    Row("KDA forward, T 8192, 32 heads of 128", "kda_forward", "8192, 0, 32, 128, 2", 0.08,
        "kda 1x8192", "FLA 0.99; FlashKDA 1.04", 0.45),
    Row("KDA forward, T 65536", "kda_forward", "65536, 0, 32, 128, 2", 0.63, "kda 1x65536",
        "FLA 7.33; FlashKDA 8.14", 3.6),
    Row("KDA forward, B 8, T 1024", "kda_forward", "8192, 4, 32, 128, 2", 0.08, "kda 8x1024",
        "FLA 1.32; FlashKDA 0.40", 0.40),
    Row("KDA backward, T 8192", "kda_backward", "8192, 0, 32, 128, 2", 0.14,
        "kda backward 1x8192", "FLA 3.44", 1.7),
    Row("KDA backward, T 65536", "kda_backward", "65536, 0, 32, 128, 2", 1.13,
        "kda backward 1x65536", "FLA 26.7", 13),
    Row("indexer logits, 64 x 128, causal, T 8192", "index_scores",
        "8192, 1, 64, 128, 8, 0, 8192", 0.70, None, "DeepGEMM fp8 0.51", 0.87),
    Row("indexer logits, T 65536", "index_scores", "65536, 1, 64, 128, 8, 0, 65536", 44.5, None,
        "DeepGEMM fp8 34.7", 55),
    Row("top-2048 of them, T 8192 (indexer with it, less logits)", "index_select",
        "8192, 1, 64, 128, 2048", 0.05, "topk 8192", "torch 1.2", 0.125,
        less=("index_scores", "8192, 1, 64, 128, 8, 0, 8192")),
    Row("top-2048 of them, T 65536", "index_select", "65536, 1, 64, 128, 2048", 2.1, "topk 65536",
        "torch 56", 5.25, less=("index_scores", "65536, 1, 64, 128, 8, 0, 65536")),
    Row("indexer and top-2048, T 8192", "index_select", "8192, 1, 64, 128, 2048", 0.75,
        "eager select 8192", "16.6 eager", 1.66),
    Row("indexer and top-2048, T 65536", "index_select", "65536, 1, 64, 128, 2048", 46.6,
        "eager select 65536", "850 eager", 85),
    Row("sparse attention forward, 576/512, top-2048, T 8192, 64 heads", "sparse_attention",
        "8192, 1, 64, 512, 64, 2048", 2.96, None, "FlashMLA 3.64", 3.64),
    Row("sparse attention forward, T 8192, 128 heads", "sparse_attention",
        "8192, 1, 128, 512, 64, 2048", 5.92, None, "FlashMLA 7.74", 7.74),
    Row("sparse attention forward, T 65536, 64 heads", "sparse_attention",
        "65536, 1, 64, 512, 64, 2048", 23.7, None, "FlashMLA 33.7", 33.7),
    Row("sparse attention forward, T 65536, 128 heads", "sparse_attention",
        "65536, 1, 128, 512, 64, 2048", 47.3, None, "FlashMLA 65.2", 65.2),
    Row("sparse attention backward, T 8192, 64 heads", "sparse_attention_backward",
        "8192, 1, 64, 512, 64, 2048", 7.5, None, "118 compiled; TileLang 51", 24),
    Row("sparse attention backward, T 8192, 128 heads", "sparse_attention_backward",
        "8192, 1, 128, 512, 64, 2048", 15.0, None, "241 eager; TileLang 103", 39),
    Row("causal attention forward, T 8192, 64 heads of 128", "attention",
        "8192, 1, 64, 128, 0, 128", 1.37, "attention", "cuDNN 641 TFLOP/s"),
    Row("causal attention backward, same", "attention_backward", "8192, 1, 64, 128, 0, 128", 3.42,
        "attention backward", "cuDNN 537 TFLOP/s"),
    *expert_rows(),
    Row("routed layer, both ways, 14 experts", "routed_layer", "8192, 16, 14, 3584, 3072", 32.9,
        "layer 14", "torch 49.9", 43),
    Row("routed layer, 112 experts", "routed_layer", "8192, 16, 112, 3584, 3072", 32.9,
        "layer 112", "torch 51.5", 45),
    Row("routed layer, small, 64 experts", "routed_layer", "8192, 8, 64, 2048, 1024", 3.1,
        "layer 64", "torch 6.87", 4.3),
    Row("AdamW with cast, 1e9 parameters", "adamw", "1000000000, 1", 6.5, "adamw and cast",
        "torch 11.7; fp32 alone 8.07", 7.6),
    Row("linear and cross entropy, 8192 x 4096 x 131072, both ways", "linear_cross_entropy",
        "8192, 4096, 131072", 33.4, "liger", "Liger on H100 50.4", 50),
]


# ---- what programs print ------------------------------------------------------------------------

LINE = re.compile(r"^(\S+) +(?:f32|bf16) +((?:-?\d+, )*-?\d+) +([\d.]+) ms +([\d.]+) TFLOP/s +"
                  r"([\d.]+) TB/s")


def read_ours(text):
    """{(op, shape): {ms, tflops, tbs}} of what cuda_ops --bench has printed."""
    found = {}
    for line in text.splitlines():
        m = LINE.match(line)
        if m:
            ms, tflops, tbs = (float(x) for x in m.groups()[2:])
            found[m.group(1), m.group(2)] = {"ms": ms, "tflops": tflops, "tbs": tbs}
    return found


def read_peers(text):
    """{peer: its object} of what gpu_peers.py has printed."""
    objects = (json.loads(line) for line in text.splitlines()
               if line.startswith('{"peer"') and line.endswith("}"))
    return {o["peer"]: o for o in objects}


# ---- tables -------------------------------------------------------------------------------------


def number(x):
    return "-" if x is None else f"{x:.0f}" if x >= 200 else f"{x:.3g}"


def figure(found, row, op_and_shape=None):
    of = found.get(op_and_shape or (row.op, row.shape))
    return of and of["ms" if row.unit == "ms" else "tflops"]


def row_cells(row, ours, peers):
    mine = figure(ours, row)
    if mine is not None and row.less:
        taken = figure(ours, row, row.less)
        mine = None if taken is None else mine - taken
    peer = peers.get(row.peer, {}).get("ms" if row.unit == "ms" else "tflops")
    goal, said = row.goal, number(row.goal)
    if row.dense:
        rate = peers.get(row.dense, {}).get("tflops")
        goal = rate and row.share * rate
        said = f"{row.share} of dense" + (f" {rate:.0f}: {goal:.0f}" if rate else "")
    reached = "-"
    if mine is not None and goal is not None:
        reached = "yes" if (mine <= goal if row.unit == "ms" else mine >= goal) else "no"
    return [row.what, row.unit, number(mine), number(row.floor), number(peer), row.known, said,
            reached]


def markdown(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(c) for c in r) + " |" for r in rows])


def rate_table(ours, peers):
    """Ops of which bytes are counted, of shapes beyond any cache, beside the copy."""
    copy = peers.get("copy", {}).get("tbs") or FLOOR_TBS
    head = ["op", "shape", "ms", "TB/s", f"of copy, {copy:.2f} TB/s", f"{OF_COPY:.0%}"]
    rows = [[op, shape, number(f["ms"]), f"{f['tbs']:.2f}", f"{f['tbs'] / copy:.0%}",
             "yes" if f["tbs"] >= OF_COPY * copy else "no"]
            for (op, shape), f in sorted(ours.items())
            if f["tbs"] * f["ms"] > LARGE_GB and f["tflops"] < 1]
    return markdown(head, rows)


def step_row(step):
    """step: tokens a second of bench_train, None: not run."""
    mine = None if step is None else step / 1e3
    return ["whole step, 921 M parameters, 4 x 4096 tokens", "k tokens/s", number(mine), "-", "-",
            "PyTorch with FLA 158", "260", "-" if mine is None else "yes" if mine >= 260 else "no"]


def tables(ours, peers, step):
    head = ["op, shape (bf16)", "unit", "ours", "floor", "peer, this call", "peer, before", "goal",
            "reached"]
    copy, dense = peers.get("copy", {}), peers.get("dense 8192", {})
    said = (f"copy {number(copy.get('tbs'))} TB/s, dense 8192 x 8192 x 8192 "
            f"{number(dense.get('tflops'))} TFLOP/s; floors at {FLOOR_TBS} and {FLOOR_TFLOPS}")
    missing = [f"{p}: {o['missing']}" for p, o in peers.items() if "missing" in o]
    rows = [row_cells(r, ours, peers) for r in ROWS] + [step_row(step)]
    parts = [said, markdown(head, rows), rate_table(ours, peers)]
    if missing:
        parts.append("no figure of these peers:\n" + "\n".join(missing))
    return "\n\n".join(parts)
