"""Fine-tuning with adapters: a job that is cut resumes, and what it leaves is an adapter in PEFT's
layout, which starts another job and merges into its base."""
import array
import bisect
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess

from cluster import BIN, Cluster, expect, tell, until

STEPS = 40
R, ALPHA = 4, 12.0
TARGETS = "[q_proj, o_proj, kv_b_proj, gate, lm_head, experts]"
PREFIX = "base_model.model."


def read_tensors(path):
    """name: (shape, bytes); the whole layout of the file is checked on the way."""
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + n]), data[8 + n:]
    found, at = {}, 0
    for name, t in sorted(((k, v) for k, v in header.items() if k != "__metadata__"),
                          key=lambda item: item[1]["data_offsets"]):
        begin, end = t["data_offsets"]
        size = 4
        for d in t["shape"]:
            size *= d
        expect(t["dtype"] == "F32" and begin == at and end == begin + size, f"{name}: {t}")
        found[name], at = (t["shape"], body[begin:end]), end
    expect(at == len(body), f"{path}: {len(body) - at} bytes behind the last tensor")
    return found


def floats(raw):
    x = array.array("f")
    x.frombytes(raw)
    return x


def digest_of(folder):
    h = hashlib.sha256()
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            with open(os.path.join(at, name), "rb") as f:
                h.update(name.encode() + b"\0" + f.read())
    return h.hexdigest()


def lora(c, name, *more, steps=STEPS, workers=2, fsdp=2, ep=2, checkpoint=None):
    path = c.job(name=name, steps=steps, workers=workers, fsdp=fsdp, ep=ep, deterministic=True,
                 checkpoint=checkpoint or name)
    sets = ["model.path=base", "train.mode=lora", "train.optimizer.lr=0.03",
            f"train.lora.r={R}", f"train.lora.alpha={ALPHA}",
            f"train.lora.targets={TARGETS}", *more]
    return [path] + [x for s in sets for x in ("--set", s)]


def losses(c, job):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in c.steps(job)]


def a_base_to_tune(c):
    job = c.submit(c.job(name="base", steps=20, workers=2, ep=2, checkpoint="pretrained"))
    c.wait(job, "DONE")
    shutil.copytree(f"{c.folder}/pretrained/step-20", f"{c.folder}/base")
    shutil.rmtree(f"{c.folder}/base/ballast")


def the_unbroken_run(c):
    job = c.submit(*lora(c, "whole"))
    c.wait(job, "DONE")
    rows = losses(c, job)
    expect(rows[-1][1] < rows[0][1] - 0.05, f"nothing learnt: {rows[0]} {rows[-1]}")
    return rows


def experts_move(c, whole):
    """Their frozen weights go ahead, some at each boundary; the losses are the same bit by bit."""
    c.hold()
    job = c.submit(*lora(c, "moved", "rebalance.window_steps=4", "rebalance.horizon_steps=1000",
                         "rebalance.min_gain=0.001"))
    c.let_go_once_planned(job)
    c.wait(job, "DONE")
    expect(losses(c, job) == whole, "moving experts changed the losses")
    done = [e for e in c.json("rebalance", "history", job)["items"] if e["state"] == "DONE"]
    expect(done and sum(e["bytes"] for e in done) > 0, "no expert has moved")
    expect(f"plan={done[0]['epoch']} ahead_s=" in c.ok("logs", job, "--rank", 0),
           "the frozen weights did not go ahead")


def fp8_of(code):
    exponent, fraction = code >> 3, code & 7
    return (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0 ** -9


FP8 = [fp8_of(code) for code in range(127)]  # ascending; the negative ones are 128 further


def as_fp8(shape, raw):
    """Codes and a scale for each block of 128 x 128."""
    x, (rows, cols), scales = floats(raw), shape, array.array("f")
    codes = bytearray(len(x))
    for top in range(0, rows, 128):
        for left in range(0, cols, 128):
            at = [i * cols + j for i in range(top, min(top + 128, rows))
                  for j in range(left, min(left + 128, cols))]
            scale = max(max(abs(x[i]) for i in at) / FP8[-1], 1e-30)
            scales.append(scale)
            for i in at:
                code = min(bisect.bisect(FP8, abs(x[i]) / scale), 126)
                codes[i] = code | (128 if x[i] < 0 else 0)
    return bytes(codes), scales.tobytes()


def a_base_in_fp8(c):
    shutil.copytree(f"{c.folder}/base", f"{c.folder}/base-fp8")
    header, body = {}, b""
    for name, (shape, raw) in read_tensors(f"{c.folder}/base/model.safetensors").items():
        tensors = [(name, "F32", shape, raw)]
        if len(shape) == 2 and shape[0] > 1 and "proj" in name or ".experts." in name:
            codes, scales = as_fp8(shape, raw)
            grid = [(n + 127) // 128 for n in shape]
            tensors = [(name, "F8_E4M3", shape, codes), (name + "_scale_inv", "F32", grid, scales)]
        for name, dtype, shape, raw in tensors:
            header[name] = {"dtype": dtype, "shape": shape,
                            "data_offsets": [len(body), len(body) + len(raw)]}
            body += raw
    text = json.dumps(header).encode()
    with open(f"{c.folder}/base-fp8/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + body)


def a_base_stays_packed(c):
    """Over bytes as they are stored, with experts that move, as over the floats they stand for."""
    a_base_in_fp8(c)
    curves, sizes = [], []
    for base in ("bf16", "fp8"):  # which leaves what is FP8 as it is
        args = lora(c, base, "model.path=base-fp8", f"model.base_precision={base}",
                    *["rebalance.window_steps=4", "rebalance.horizon_steps=1000",
                      "rebalance.min_gain=0.001"] * (base == "fp8"), steps=24)
        sizes.append(c.json("submit", *args, "--dry-run")["memory_per_rank"]["weights"])
        c.hold()
        job = c.submit(*args)
        c.let_go_once_planned(job, n_before=-1 if base == "bf16" else 0)
        c.wait(job, "DONE")
        curves.append(losses(c, job))
    expect(curves[0] == curves[1], f"packed, the losses differ: {curves}")
    expect(sizes[1] < 0.6 * sizes[0], f"packed, the weights take {sizes}")
    done = [e for e in c.json("rebalance", "history", job)["items"] if e["state"] == "DONE"]
    expect(done and sum(e["bytes"] for e in done) > 0, "no packed expert has moved")


def a_worker_is_killed(c, whole):
    c.hold()
    job = c.submit(*lora(c, "cut"))
    c.wait_step(job, 13)
    victim = c.daemon_of(c.trainers(job)[1])
    c.kill(victim)
    c.let_go()
    c.start_worker(int(victim.rsplit("-", 1)[1]))
    c.wait(job, "DONE", 90)
    expect(c.show(job)["attempt"] >= 2, "it was not cut")
    expect(losses(c, job) == whole, "another curve after the cut")
    ours, other = (read_tensors(f"{c.folder}/{x}/step-{STEPS}/adapter_model.safetensors")
                   for x in ("cut", "whole"))
    expect(ours == other, "another adapter after the cut")


def the_adapter_is_pefts(c):
    folder = f"{c.folder}/whole/step-{STEPS}"
    with open(f"{folder}/adapter_config.json") as f:
        config = json.load(f)
    expect(config["peft_type"] == "LORA" and config["r"] == R and config["lora_alpha"] == ALPHA and
           config["lora_dropout"] == 0 and config["bias"] == "none", str(config))
    tensors = read_tensors(f"{folder}/adapter_model.safetensors")
    base = read_tensors(f"{c.folder}/base/model.safetensors")
    modules = {n[len(PREFIX):].rsplit(".lora_", 1)[0] for n in tensors}
    expect(len(tensors) == 2 * len(modules), "A without B")
    for name in base:
        module = name[:-len(".weight")] if name.endswith(".weight") else None
        chosen = module is not None and len(base[name][0]) == 2 and re.search(
            r"\.(q_proj|o_proj|kv_b_proj|gate|lm_head|experts\.\d+\.w[123])$", module) is not None
        expect(chosen == (module in modules), f"{name}: adapter {module in modules}")
        if not chosen:
            continue
        out, inward = base[name][0]
        a, b = (tensors[f"{PREFIX}{module}.lora_{x}.weight"] for x in "AB")
        expect(a[0] == [R, inward] and b[0] == [out, R], f"{name}: {a[0]} {b[0]}")
        expect(re.fullmatch(config["target_modules"], module), f"{module} is no target")
    for name in (n for n in tensors if ".lora_B." in n and ".experts." not in n):
        expect(any(floats(tensors[name][1])), f"{name} is still zero")
    for name in ("norm.weight", "embed_tokens"):
        expect(not any(name in n for n in tensors), name)
    state = sorted(os.listdir(f"{folder}/ballast"))
    expect(state == ["checksums.json", "m", "state.json", "v"], str(state))
    moments = read_tensors(f"{folder}/ballast/m/model.safetensors")
    expect(set(moments) == set(tensors), "moments of other tensors than the adapters'")


def another_job_goes_on_from_it(c, whole):
    """Its first loss is what the adapter has learnt; on other workers, too."""
    adapter = f"train.lora.adapter=whole/step-{STEPS}"
    job = c.submit(*lora(c, "further", adapter, steps=3, workers=4, ep=4))
    c.wait(job, "DONE")
    rows = losses(c, job)
    expect(rows[0][1] < whole[0][1] - 0.03, f"it began at {rows[0]}, the first run at {whole[0]}")
    return rows[0][1]


def merged_it_is_a_model(c, first):
    def export(base, out):
        return subprocess.run([os.path.join(BIN, "ballast-worker"), "export", f"{c.folder}/{base}",
                               "--lora", f"{c.folder}/whole/step-{STEPS}",
                               "--out", f"{c.folder}/{out}"], capture_output=True, text=True)
    done = export("base", "merged")
    expect(done.returncode == 0 and not done.stderr, done.stderr)
    done = export("merged", "merged-twice")
    expect(done.returncode == 0 and "trained beside another base" in done.stderr, done.stderr)
    base, merged = (read_tensors(f"{c.folder}/{x}/model.safetensors") for x in ("base", "merged"))
    expect(list(base) == list(merged), "other tensors")
    adapter = read_tensors(f"{c.folder}/whole/step-{STEPS}/adapter_model.safetensors")
    for name, (shape, raw) in base.items():
        module = PREFIX + name[:-len(".weight")]
        if module + ".lora_A.weight" not in adapter:
            expect(merged[name] == (shape, raw), f"{name} changed")
    path = c.job(name="merged", steps=3, workers=2, ep=2, deterministic=True)
    job = c.submit(path, "--set", "model.path=merged", "--set", "moe.bias_update=off")
    c.wait(job, "DONE")
    loss = losses(c, job)[0][1]
    expect(abs(loss - first) < 3e-3, f"merged, the loss is {loss}, beside its base {first}")


def refused(c, name, says, *more, checkpoint=None):
    """The job fails before its first step, with one line that says why."""
    job = c.submit(*lora(c, name, *more, checkpoint=checkpoint))
    shown = until(lambda: c.show(job)["state"] == "FAILED" and c.show(job), 40,
                  f"{name} is refused")
    expect(says in shown["reason"], f"{name}: {shown['reason']}")
    expect("\n" not in shown["reason"] and shown["step"] in (0, None, STEPS), str(shown))


def what_does_not_fit_is_refused(c):
    whole = f"{c.folder}/whole/step-{STEPS}"
    for name in ("torn", "less"):
        shutil.copytree(whole, f"{c.folder}/{name}")
    with open(f"{c.folder}/torn/adapter_model.safetensors", "r+b") as f:
        f.truncate(os.path.getsize(f.name) - 5)
    with open(f"{c.folder}/less/adapter_config.json") as f:
        config = json.load(f)
    with open(f"{c.folder}/less/adapter_config.json", "w") as f:
        json.dump(dict(config, lora_dropout=0.1), f)
    more = "train.lora.adapter="
    refused(c, "torn-adapter", "torn/adapter_model.safetensors", more + "torn")
    refused(c, "dropout", "lora_dropout is 0.1", more + "less")
    refused(c, "other-rank", "r is 4, the job's train.lora.r is 8", more + whole, "train.lora.r=8")
    refused(c, "other-alpha", "lora_alpha is 12", more + whole, "train.lora.alpha=16")
    refused(c, "fewer-targets", "does not train", more + whole, "train.lora.targets=[q_proj]")
    refused(c, "more-targets", "v_proj.lora_A.weight' is missing", more + whole,
            f"train.lora.targets={TARGETS[:-1]}, v_proj]")
    refused(c, "no-base", "holds no weights", "model.path=model")
    refused(c, "other-base", "belong to a base with the hash", "model.path=merged",
            checkpoint="whole")
    done = c.run("submit", *lora(c, "no-target", "train.lora.targets=[q_proj, query]"))
    expect(done.returncode not in (0, 1) and "train.lora.targets" in done.stderr and
           "'query' is no matrix of this model; use some of" in done.stderr, done.stderr)
    done = c.run("submit", *lora(c, "narrow", "model.base_precision=mxfp4"))
    expect(done.returncode not in (0, 1) and "model.base_precision" in done.stderr and
           "in groups of 32 numbers" in done.stderr, done.stderr)


def story():
    """adapters are trained, resumed, exported, merged, and refused where they do not fit"""
    with Cluster(n_workers=4, hold_before=14) as c:
        a_base_to_tune(c)
        before = digest_of(f"{c.folder}/base")
        whole = the_unbroken_run(c)
        experts_move(c, whole)
        a_base_stays_packed(c)
        a_worker_is_killed(c, whole)
        the_adapter_is_pefts(c)
        first = another_job_goes_on_from_it(c, whole)
        merged_it_is_a_model(c, first)
        what_does_not_fit_is_refused(c)
        expect(digest_of(f"{c.folder}/base") == before, "the base has changed")


tell(story)
