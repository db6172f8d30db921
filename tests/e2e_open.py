"""What is exported opens in a reader of its own: every family, sharded, fused, MXFP4, merged.

The reader is written from the published format and takes nothing that the format does not allow.
Where the distribution's PyTorch is installed, every merged matrix is computed with it as well."""
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    torch = None
    probe = ["/usr/bin/python3", "-c", "import torch"]
    if not os.environ.get("BALLAST_OPEN_AGAIN") and os.path.exists(probe[0]) and subprocess.run(
            probe, capture_output=True).returncode == 0:
        os.environ["BALLAST_OPEN_AGAIN"] = "1"
        os.execv(probe[0], [probe[0], *sys.argv])

from cluster import BIN, expect, tell

BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I16": 16, "F16": 16, "BF16": 16,
        "I32": 32, "F32": 32, "I64": 64, "F64": 64}
HEADER_MAX = 100_000_000
R, ALPHA = 3, 4.5
PREFIX = "base_model.model."
SHARED = os.environ.get("BALLAST_SHARED") or os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "..", "shared")
FIXTURES = ["kimi-k3-tiny", "kimi-k3-tiny-mxfp4", "kimi-linear-tiny", "deepseek-v3-tiny",
            "deepseek-v32-tiny"]
MATRIX = re.compile(r"(_proj|_proj_with_mqa|experts\.\d+\.w[123]|\.gate|indexer\.w[qk](_b)?|"
                    r"weights_proj|^(.*\.)?lm_head)$")


# ---- the format ----------------------------------------------------------------------------------

def no_key_twice(pairs):
    expect(len({k for k, _ in pairs}) == len(pairs), "a key stands twice")
    return dict(pairs)


def read_file(path):
    """name: (dtype, shape, bytes)"""
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    expect(n <= HEADER_MAX and 8 + n <= len(data) and data[8:9] == b"{", f"{path}: header of {n}")
    header = json.loads(data[8:8 + n].decode("utf-8"), object_pairs_hook=no_key_twice)
    about = header.pop("__metadata__", {})
    expect(all(isinstance(v, str) for v in about.values()), f"{path}: metadata {about}")
    body, at, found = data[8 + n:], 0, {}
    for name, t in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = t["data_offsets"]
        size = BITS[t["dtype"]]
        for d in t["shape"]:
            size *= d
        expect(set(t) == {"dtype", "shape", "data_offsets"} and begin == at and
               (end - begin) * 8 == size, f"{path}: {name}: {t}")
        found[name], at = (t["dtype"], t["shape"], body[begin:end]), end
    expect(at == len(body), f"{path}: {len(body) - at} bytes behind the last tensor")
    return found


def read_folder(folder):
    index = f"{folder}/model.safetensors.index.json"
    if not os.path.exists(index):
        return read_file(f"{folder}/model.safetensors")
    with open(index) as f:
        places = json.load(f, object_pairs_hook=no_key_twice)["weight_map"]
    files = {name: read_file(f"{folder}/{name}") for name in set(places.values())}
    expect(sum(len(t) for t in files.values()) == len(places), f"{index}: not all, or others")
    return {name: files[file][name] for name, file in places.items()}


def write_file(path, tensors):
    header, at = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


# ---- models --------------------------------------------------------------------------------------

def fused(tensors):
    """The same with the experts of a layer in two tensors."""
    out, layers = {}, {}
    for name, t in tensors.items():
        m = re.match(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight$", name)
        if m:
            word = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(m[3], m[3])
            layers.setdefault(m[1], {})[(int(m[2]), word)] = t
        else:
            out[name] = t
    for layer, parts in layers.items():
        n = len(parts) // 3
        dtype, (rows, cols), _ = parts[0, "gate_proj"]
        out[layer + ".gate_up_proj"] = (dtype, [n, 2 * rows, cols], b"".join(
            parts[e, word][2] for e in range(n) for word in ("gate_proj", "up_proj")))
        out[layer + ".down_proj"] = (dtype, [n, cols, rows], b"".join(
            parts[e, "down_proj"][2] for e in range(n)))
    return out


def write_shards(folder, tensors, n):
    names = sorted(tensors)
    places = {}
    for i in range(n):
        file = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
        write_file(f"{folder}/{file}", {k: tensors[k] for k in names[i::n]})
        places.update({k: file for k in names[i::n]})
    with open(f"{folder}/model.safetensors.index.json", "w") as f:
        json.dump({"metadata": {}, "weight_map": places}, f)


def matrices(tensors):
    """module: its shape; of packed ones that of what they stand for."""
    found = {}
    for name, (_, shape, _) in tensors.items():
        module = name[:-len("_packed")] if name.endswith("_packed") else name
        if module.endswith(".weight") and len(shape) == 2 and MATRIX.search(module[:-7]):
            wide = [shape[0], 2 * shape[1]] if name.endswith("_packed") else shape
            if wide[0] > 1:
                found[module[:-7]] = wide
    return found


def write_adapter(folder, tensors, seed):
    random.seed(seed)
    os.makedirs(folder)
    adapter = {}
    for module, (out, inward) in matrices(tensors).items():
        for part, shape in (("A", [R, inward]), ("B", [out, R])):
            n = shape[0] * shape[1]
            adapter[f"{PREFIX}{module}.lora_{part}.weight"] = (
                "F32", shape, struct.pack(f"<{n}f", *(random.uniform(-.1, .1) for _ in range(n))))
    write_file(f"{folder}/adapter_model.safetensors", adapter)
    with open(f"{folder}/adapter_config.json", "w") as f:
        json.dump({"peft_type": "LORA", "r": R, "lora_alpha": ALPHA}, f)
    return adapter


def export(base, adapter, out):
    done = subprocess.run([os.path.join(BIN, "ballast-worker"), "export", base, "--lora", adapter,
                           "--out", out], capture_output=True, text=True)
    expect(done.returncode == 0, done.stderr)
    return read_folder(out)


# ---- what must hold ------------------------------------------------------------------------------

def floats(t):
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return torch.frombuffer(bytearray(t[2]), dtype=kinds[t[0]]).reshape(t[1]).double()


def is_merged(base, adapter, merged, module):
    name = module + ".weight"
    a, b = (floats(adapter[f"{PREFIX}{module}.lora_{x}.weight"]) for x in "AB")
    want = floats(base[name]) + ALPHA / R * b @ a
    step = {"F32": 2 ** -23, "BF16": 2 ** -8, "F16": 2 ** -10}[base[name][0]]
    off = (floats(merged[name]) - want).abs() / want.abs().clamp(min=1e-3)
    expect(off.max() <= step, f"{name}: off by {off.max()}")


def a_merged_model_is_read(folder, fixture):
    base_folder = f"{SHARED}/oracle/{fixture}"
    base = read_folder(base_folder)
    adapter = write_adapter(f"{folder}/{fixture}-adapter", base, 1)
    merged = export(base_folder, f"{folder}/{fixture}-adapter", f"{folder}/{fixture}-merged")
    modules = matrices(base)
    expect(len(modules) > 50 and merged.keys() == base.keys(), f"{fixture}: {len(modules)}")
    for name, (dtype, shape, raw) in base.items():
        module = re.sub(r"(_packed|_scale)?$", "", name)[:-len(".weight")]
        expect(merged[name][:2] == (dtype, shape), f"{name}: another form")
        if module not in modules:
            expect(merged[name][2] == raw, f"{name} changed")
        elif not name.endswith("_scale"):
            expect(merged[name][2] != raw, f"{name} has not changed")
        if torch and module in modules and name == module + ".weight":
            is_merged(base, adapter, merged, module)
    return base, merged


def other_forms_are_the_same(folder, fixture, base, merged):
    """In shards, and with fused experts: what comes out is what comes out of one plain file."""
    for form in ("shards", "fused"):
        there = f"{folder}/{fixture}-{form}"
        os.makedirs(there)
        shutil.copy(f"{SHARED}/oracle/{fixture}/config.json", there)
        if form == "shards":
            write_shards(there, base, 3)
        else:
            write_file(f"{there}/model.safetensors", fused(base))
        out = export(there, f"{folder}/{fixture}-adapter", there + "-merged")
        want = merged if form == "shards" else fused(merged)
        expect(out == want, f"{fixture}: {form}")
        expect(len([f for f in os.listdir(there + "-merged") if f.endswith(".safetensors")]) ==
               (3 if form == "shards" else 1), f"{fixture}: other files")


def story():
    """what is exported opens in a reader that is not ours"""
    if not os.path.isdir(f"{SHARED}/oracle"):
        print("skipped: no checkpoints in", SHARED)
        return
    if not torch:
        print("without PyTorch: forms are checked, values are not")
    with tempfile.TemporaryDirectory() as folder:
        for fixture in FIXTURES:
            base, merged = a_merged_model_is_read(folder, fixture)
            if "mxfp4" not in fixture:
                other_forms_are_the_same(folder, fixture, base, merged)


tell(story)
