#!/usr/bin/env python3
"""What public kernels take on this GPU, for gpu_ops.py to set beside ours.

    gpu_peers.py [--rehearse] NAME...

An object a line: {"peer": what, "ms": median} with "tflops" or "tbs" where one is meant, or with
"missing": why. PyTorch must be there, flash-linear-attention and Liger may be. Inputs are random
bfloat16 unless said; between calls the caches are filled with something else, and the GPU is kept
busy until a call has been asked for as a whole, so that no time of the host counts.
"""
import json
import statistics
import sys

REPEATS, WARM_UPS = 15, 3
FLUSH_BYTES = 256 << 20
BUSY_CYCLES = 6_000_000  # about 3 ms, for those calls that are many launches

try:
    import torch
    import torch.nn.functional as F
except ImportError as e:
    torch, why_no_torch = None, str(e)

rehearses = False


def less(n, by=64):
    """The size n, or in a rehearsal a small one."""
    return max(8, n // by // 8 * 8) if rehearses else n


def device():
    return "cpu" if rehearses else "cuda"


def random(*shape, dtype=None, width=1.0):
    kind = dtype or (torch.float32 if rehearses else torch.bfloat16)
    return torch.randn(*shape, device=device(), dtype=kind).mul_(width)


def tell(what, ms, flops=0, n_bytes=0):
    line = {"peer": what, "ms": ms}
    if flops:
        line["tflops"] = flops / ms / 1e9
    if n_bytes:
        line["tbs"] = n_bytes / ms / 1e9
    print(json.dumps(line), flush=True)


def once(call, flush):
    if rehearses:
        call()
        return 1.0
    flush.zero_()
    torch.cuda._sleep(BUSY_CYCLES)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)


def median_ms(call, repeats=REPEATS):
    flush = torch.empty(8 if rehearses else FLUSH_BYTES, device=device(), dtype=torch.int8)
    times = [once(call, flush) for _ in range(WARM_UPS + (1 if rehearses else repeats))]
    return statistics.median(times[WARM_UPS:])


# ---- ceilings -----------------------------------------------------------------------------------


def ceilings():
    """how fast this GPU copies and multiplies"""
    n = less(2 << 30, 1 << 16)
    x = random(n)
    y = torch.empty_like(x)
    tell("copy", median_ms(lambda: y.copy_(x)), n_bytes=2 * x.element_size() * n)
    del x, y
    n = less(8192)
    a, b = random(n, n), random(n, n)
    tell("dense 8192", median_ms(lambda: a @ b), flops=2 * n ** 3)


# ---- experts ------------------------------------------------------------------------------------

EXPERT_SHAPES = [  # name, rows, groups, in, out
    ("14", 131072, 14, 3584, 3072), ("112", 131072, 112, 3584, 3072), ("64", 65536, 64, 2048, 1024),
]


def grouped_product(a, b, offsets):
    call = getattr(torch, "_grouped_mm", None) or getattr(F, "grouped_mm")
    return call(a, b, offs=offsets)


def even_offsets(n, n_groups):
    return torch.tensor([n * (i + 1) // n_groups for i in range(n_groups)], dtype=torch.int32,
                        device=device())


def products(kind):
    """Grouped products of all shapes, and dense ones of the same size; kind: fwd, dx or dw."""
    for name, n, n_groups, n_in, n_out in EXPERT_SHAPES:
        n, n_in, n_out = less(n), less(n_in), less(n_out)
        flops = 2 * n * n_in * n_out
        x, dy = random(n, n_in), random(n, n_out)
        w = random(n_groups, n_out, n_in, width=0.1)
        offsets = even_offsets(n, n_groups)
        dense, grouped = {
            "fwd": (lambda: x @ w[0].t(),
                    lambda: grouped_product(x, w.transpose(1, 2), offsets)),
            "dx": (lambda: dy @ w[0], lambda: grouped_product(dy, w, offsets)),
            "dw": (lambda: dy.t() @ x, lambda: grouped_product(dy.t(), x, offsets)),
        }[kind]
        attempt(f"dense {name} {kind}", lambda what: tell(what, median_ms(dense), flops))
        attempt(f"grouped {name} {kind}", lambda what: tell(what, median_ms(grouped), flops))
        del x, dy, w


def grouped_fwd():
    """experts' products forward"""
    products("fwd")


def grouped_dx():
    """gradients of their inputs"""
    products("dx")


def grouped_dw():
    """gradients of their weights"""
    products("dw")


def one_layer(what, n, top_k, n_experts, width, inter):
    x, dy = random(n, width).requires_grad_(), random(n, width)
    gate, up = (random(n_experts, inter, width, width=width ** -0.5).requires_grad_()
                for _ in range(2))
    down = random(n_experts, width, inter, width=inter ** -0.5).requires_grad_()
    weights = random(n, top_k, 1).requires_grad_()
    expert = torch.randint(n_experts, (n * top_k,), device=device())
    choice_at = torch.argsort(expert, stable=True)
    row_of = torch.argsort(choice_at)
    offsets = torch.bincount(expert, minlength=n_experts).cumsum(0).to(torch.int32)
    leaves = (x, gate, up, down, weights)

    def layer():
        rows = torch.index_select(x, 0, choice_at // top_k)
        hidden = (F.silu(grouped_product(rows, gate.transpose(1, 2), offsets))
                  * grouped_product(rows, up.transpose(1, 2), offsets))
        y = grouped_product(hidden, down.transpose(1, 2), offsets)
        y = torch.index_select(y, 0, row_of).view(n, top_k, width)
        y = (y * weights).sum(1)
        torch.autograd.grad(y, leaves, dy)

    tell(what, median_ms(layer, 7), flops=18 * n * top_k * width * inter)


def routed_layer():
    """a layer of experts, there and back, of small operators"""
    for name, n, top_k, n_experts, width, inter in (
            ("14", 8192, 16, 14, 3584, 3072), ("112", 8192, 16, 112, 3584, 3072),
            ("64", 8192, 8, 64, 2048, 1024)):
        attempt(f"layer {name}", lambda what: one_layer(
            what, less(n), top_k, n_experts, less(width), less(inter)))


# ---- attention ----------------------------------------------------------------------------------


def attention():
    """cuDNN's causal attention"""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    n, heads, d = less(8192), less(64, 8), less(128, 8)
    q, k, v = (random(1, heads, n, d).requires_grad_() for _ in range(3))
    dy = random(1, heads, n, d)
    flops = 4 * heads * d * n * (n + 1) / 2
    backend = SDPBackend.MATH if rehearses else SDPBackend.CUDNN_ATTENTION
    with sdpa_kernel(backend):
        def forward():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.no_grad():
            tell("attention", median_ms(forward), flops)
        y = forward()
        tell("attention backward", median_ms(lambda: torch.autograd.grad(
            y, (q, k, v), dy, retain_graph=True)), 2.5 * flops)


def select():
    """torch.topk of the indexer's scores, and the indexer of small operators"""
    heads, d = less(64, 8), less(128, 8)
    for name in (8192, 65536):
        n = less(name)
        chunk, top_k = min(n, less(8192)), min(n, 2048)
        scores = random(chunk, n, dtype=torch.float32)
        attempt(f"topk {name}", lambda what: tell(
            what, n // chunk * median_ms(lambda: torch.topk(scores, top_k, dim=1), 5)))
        q, k, w = random(n, heads, d), random(n, d), random(n, heads)
        rows = min(n, 256 if n > 8192 else 1024)

        def part(first):
            dots = torch.relu(torch.einsum("chd,nd->chn", q[first:first + rows], k))
            sums = torch.einsum("chn,ch->cn", dots, w[first:first + rows]).float()
            at = torch.arange(first, first + rows, device=device())
            sums.masked_fill_(torch.arange(n, device=device()) > at[:, None], float("-inf"))
            return torch.topk(sums, top_k, dim=1)

        if n <= 8192:
            attempt(f"eager select {name}", lambda what: tell(what, median_ms(
                lambda: [part(i) for i in range(0, n, rows)], 3)))
        else:  # each part takes as long
            attempt(f"eager select {name}", lambda what: tell(
                what, n // rows * median_ms(lambda: part(0), 3)))
        del scores, q, k, w


# ---- KDA ----------------------------------------------------------------------------------------


def kda_inputs(n_rows, n, heads=32, d=128):
    unit = [F.normalize(random(n_rows, n, heads, d), dim=-1) for _ in range(2)]
    g = -torch.rand(n_rows, n, heads, d, device=device())
    beta = torch.rand(n_rows, n, heads, device=device()).to(unit[0].dtype)
    return [*unit, random(n_rows, n, heads, d), g, beta]


def kda_call(inputs):
    """FLA's chunk_kda, with the gate's range that its fastest kernels want."""
    sys.modules.setdefault("fla.models", None)  # no model of theirs is wanted, nor what it needs
    from fla.ops.kda import chunk_kda
    q, k, v, g, beta = inputs
    return chunk_kda(q, k, v, g, beta, safe_gate=True, lower_bound=-5.0)[0]


KDA_SHAPES = [(1, 65536), (1, 8192), (8, 1024)]  # the longest one first, which tunes


def kda_forward():
    """FLA's KDA"""
    for n_rows, n in KDA_SHAPES:
        inputs = kda_inputs(n_rows, less(n))
        with torch.no_grad():
            attempt(f"kda {n_rows}x{n}",
                    lambda what: tell(what, median_ms(lambda: kda_call(inputs))))


def kda_backward():
    """its backward, which makes the forward's chunks again"""
    for n_rows, n in KDA_SHAPES:
        def backward(what):
            inputs = [x.requires_grad_() for x in kda_inputs(n_rows, less(n))]
            y = kda_call(inputs)
            dy = random(*y.shape).to(y.dtype)
            tell(what, median_ms(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)))
        attempt(f"kda backward {n_rows}x{n}", backward)


# ---- the ends -----------------------------------------------------------------------------------


def adamw():
    """torch's fused AdamW in float32 of 1e9 parameters, alone and with a cast after it"""
    n = less(1_000_000_000, 1 << 16)
    p = torch.nn.Parameter(random(n, dtype=torch.float32))
    p.grad = random(n, dtype=torch.float32)
    cast = torch.empty(n, device=device(), dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1,
                                  **({} if rehearses else {"fused": True}))
    tell("adamw", median_ms(optimizer.step, 7))

    def both():
        optimizer.step()
        cast.copy_(p.detach())
    tell("adamw and cast", median_ms(both, 7))


def cross_entropy():
    """Liger's linear and cross entropy, there and back"""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    n, d, vocab = less(8192), less(4096), less(131072)
    x, w = random(n, d).requires_grad_(), random(vocab, d, width=0.1).requires_grad_()
    labels = torch.randint(vocab, (n,), device=device())

    def both():
        loss = LigerFusedLinearCrossEntropyFunction.apply(x, w, labels)
        loss = loss[0] if isinstance(loss, tuple) else loss
        torch.autograd.grad(loss, (x, w))
    tell("liger", median_ms(both, 5), flops=6 * n * d * vocab)


PEERS = {call.__name__: call for call in (
    ceilings, grouped_fwd, grouped_dx, grouped_dw, routed_layer, attention, select, kda_forward,
    kda_backward, adamw, cross_entropy)}


def attempt(what, call):
    """call(what), or why there is none."""
    try:
        call(what)
    except Exception as e:  # of whatever library: it is the others' failure
        said = f"{type(e).__name__}: {e}".splitlines()
        print(json.dumps({"peer": what, "missing": said[0][:300] if said else "?"}), flush=True)
    if torch and torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(words):
    global rehearses
    rehearses = "--rehearse" in words
    names = [w for w in words if not w.startswith("--")]
    if not names or set(names) - set(PEERS):
        print(__doc__ + "".join(f"    {n}: {c.__doc__}\n" for n, c in PEERS.items()),
              file=sys.stderr)
        return 2
    for name in names:
        if torch is None:
            print(json.dumps({"peer": name, "missing": why_no_torch}), flush=True)
        else:
            attempt(name, lambda what: PEERS[what]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
