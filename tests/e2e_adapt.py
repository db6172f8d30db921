"""Folders of models, real and hostile, through `ballast adapt`: counts, plans, files that are fit
for use, and one clear line for what is wrong. Needs no daemon."""
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time

from cluster import held_port

BIN = os.environ.get("BALLAST_BIN") or os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "build", "bin")
SOURCE = os.environ.get("BALLAST_SOURCE") or os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..")
SHARED = os.environ.get("BALLAST_SHARED") or os.path.join(SOURCE, "..", "shared")
CONFIGS = os.path.join(SHARED, "data", "configs")
PATIENCE = 240  # with programs that compute
SECONDS = 150  # what no folder may take, however busy the machine is

SMALL = {
    "model_type": "deepseek_v3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3,
    "intermediate_size": 64, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "n_group": 1, "topk_group": 1,
}


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def run(*args):
    return subprocess.run([os.path.join(BIN, "ballast"), *map(str, args)], capture_output=True,
                          text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)


def adapt(folder, *args):
    done = run("adapt", folder, "--json", *args)
    expect(done.returncode == 0, f"{folder}: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def write(folder, name, what):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "wb") as f:
        f.write(what if isinstance(what, bytes) else json.dumps(what).encode()
                if isinstance(what, dict) else what.encode())


# ---- real configurations

def counts_are_exact():
    path = os.path.join(CONFIGS, "expected.tsv")
    if not os.path.exists(path):
        print("SKIPPED: no reference data at", CONFIGS)
        return
    with open(path) as f:
        rows = [line.rstrip("\n").split("\t") for line in f][1:]
    for model, _, _, text, mtp, vision, active, tensors, _, n_bytes, _ in rows:
        d = adapt(os.path.join(CONFIGS, model))
        m = d["model"]
        has_list = tensors != "-"
        expect(not d["keys_not_read"], f"{model}: not read: {d['keys_not_read']}")
        for key, wanted, got in (
                ("total", text, m["parameters_total"]), ("active", active, m["parameters_active"]),
                ("MTP", mtp if has_list else "-", m["parameters_mtp"]),
                ("vision", vision if has_list else "-", m["parameters_vision"]),
                ("tensors", tensors, m["tensors"]), ("bytes", n_bytes, m["bytes"])):
            expect(wanted == "-" or int(wanted) == got, f"{model}: {key} {got}, expected {wanted}")
        expect(sum(m["parameters_by_part"].values()) == m["parameters_total"], f"{model}: parts")
        expect(d["operators"], f"{model}: no operators")
        expect(d["plans"] or d["least_memory_per_gpu"]["total"], f"{model}: no plan, no reason")
        missing = [o for o in d["operators"] if o["status"] == "missing"]
        expect(bool(missing) != d["today"]["model_runs"] or d["today"]["reason"],
               f"{model}: runs {d['today']['model_runs']} with {missing}")


def kimi_k3_is_planned(folder):
    model = os.path.join(CONFIGS, "kimi-k3")
    if not os.path.exists(model):
        return
    d = adapt(model, "--train", "lora", "--out", folder)
    m = d["model"]
    expect(m["parameters_live"] == 2779484476000, m)
    expect(round(m["parameters_active_without_embedding"] / 1e9, 2) == 104.19, m)
    expect(d["checkpoint"]["unknown"] == 0 and not d["checkpoint"]["disagreements"],
           d["checkpoint"])
    for base in ("bf16", "mxfp4"):
        expect(any((p["world"], p["fsdp_shard_degree"], p["expert_parallel_degree"],
                    p["expert_shard_degree"], p["base_precision"]) == (128, 2, 64, 2, base)
                   for p in d["plans"]), f"no plan of fsdp 2, EP64, expert_shard 2 with {base}")
    for p in d["plans"]:
        parts = p["memory_per_gpu"]
        expect(parts["total"] == sum(v for k, v in parts.items() if k != "total"), p)
    files_are_fit_for_use(folder)


# ---- files

def files_are_fit_for_use(folder):
    done = run("submit", os.path.join(folder, "job.yaml"), "--dry-run")
    expect(done.returncode == 0, f"job.yaml is refused: {done.stderr}")
    for script in ("launch-local.sh", "launch-ssh.sh", "launch-slurm.sbatch"):
        path = os.path.join(folder, script)
        expect(subprocess.run(["bash", "-n", path]).returncode == 0, script)
        if shutil.which("shellcheck"):
            checked = subprocess.run(["shellcheck", path], capture_output=True, text=True)
            expect(checked.returncode == 0, checked.stdout)
        else:
            print("SKIPPED: shellcheck is not installed, so", script, "was only parsed")
    local = subprocess.run([os.path.join(folder, "launch-local.sh")], capture_output=True,
                           text=True, env=dict(os.environ, PATH="/usr/bin:/bin", DEVICE="cpu"))
    too_few = re.search(r"has (\d+) workers, room for (\d+) is on cpu", local.stderr)
    if too_few:  # else this machine is as large as the plan, and lacks but the programs
        expect(local.returncode == 1 and int(too_few[1]) > int(too_few[2]), local.stderr)
    try:
        import yaml
    except ImportError:
        yaml = None
        print("SKIPPED: no module yaml, so YAML files were not read")
    for name in ("job.yaml", "cluster.yaml", "launch-k8s.yaml"):
        with open(os.path.join(folder, name)) as f:
            expect(not yaml or list(yaml.safe_load_all(f)), name)
    if yaml:
        with open(os.path.join(folder, "launch-k8s.yaml")) as f:
            pods_are_accepted(list(yaml.safe_load_all(f)), folder)
    for name in ("REPORT.md", "operators-missing.md"):
        expect(os.path.getsize(os.path.join(folder, name)) > 40, name)


def pods_are_accepted(objects, folder):
    """Names as Kubernetes wants them, services for both sets, and a script that passes on TERM."""
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    for _, name in names:
        expect(re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name), name)
    for o in objects:
        if o["kind"] == "StatefulSet":
            expect(("Service", o["spec"]["serviceName"]) in names, names)
    script = objects[-1]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    if not script.count("seq 0 0)"):  # else each worker would want a line of its own below
        script = re.sub(r"seq 0 \d+", "seq 0 1", script)
    script = script.replace("/tmp/", folder + "/pod-").replace("cp /keys/", f"cp {folder}/secret/")
    write(os.path.join(folder, "secret"), "workers.key", "a key")
    os.chmod(os.path.join(folder, "secret", "workers.key"), 0o440)  # as Kubernetes has it
    programs = os.path.join(folder, "pod")
    os.makedirs(programs, exist_ok=True)
    write(programs, "ballast-worker", "#!/bin/sh\ntrap 'echo saved $2; exit' TERM\necho up $2\n"
          "while :; do sleep 0.1; done\n")
    os.chmod(os.path.join(programs, "ballast-worker"), 0o755)
    env = dict(os.environ, PATH=f"{programs}:{os.environ['PATH']}", HOSTNAME="pod",
               BALLAST_ADDRESS="tcp://c:7070", POD_IP="10.0.0.1")
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE,
                          text=True) as pod:
        n = 2 if "seq 0 1)" in script else 1
        up = [pod.stdout.readline() for _ in range(n)]
        pod.terminate()
        saved = pod.stdout.read()
    for i in range(n):
        path = f"{folder}/pod-worker-{i}.yaml"
        expect(f"up {path}\n" in up and f"saved {path}\n" in saved, f"{up} {saved}")
        with open(path) as f:
            expect(f"name: pod-{i}\n" in f.read(), path)
        os.remove(path)
    key = os.path.join(folder, "pod-keys", "workers.key")
    expect(os.stat(key).st_mode & 0o077 == 0, "others may read a pod's key")
    shutil.rmtree(os.path.dirname(key))


def nothing_is_written_over(model, out):
    command = ("adapt", model, "--cluster", os.path.join(out, "cluster.yaml"), "--train", "lora",
               "--sequence-length", 512, "--out", out)
    path = os.path.join(out, "job.yaml")
    with open(path) as f:
        own = f.read()
    done = run(*command)
    expect(done.returncode == 0, f"the same once more: {done.stderr}")
    with open(path, "a") as f:
        f.write("# mine\n")
    done = run(*command)
    expect(done.returncode == 5 and done.stderr.startswith(f"ballast: {path} is there already"),
           f"exit {done.returncode}: {done.stderr}")
    with open(path) as f:
        expect(f.read() == own + "# mine\n", "the work of a person is gone")
    done = run(*command, "--force")
    with open(path) as f:
        expect(done.returncode == 0 and f.read() == own, f"--force: {done.stderr}")


# Slurm's part of a batch job: a process for each task, which end when srun is told to.
SRUN = '''#!/bin/bash
for arg; do last=$arg; done
pids=()
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$last" 2>"$RUN/worker-$i.log" & pids+=($!); done
trap 'kill "${pids[@]}" 2>/dev/null; wait' TERM
wait
'''


def two_machines_meet_with_keys(folder):
    """The batch job of two nodes, on one machine."""
    model, out = os.path.join(folder, "Small_v1.5"), os.path.join(folder, "nodes")
    with open(os.path.join(folder, "nodes.yaml"), "w") as f:
        f.write("name: two\nnodes: 2\ngpus_per_node: 1\ngpu_memory: 8GB\ngpu_reserve: 100MB\n")
    d = adapt(model, "--cluster", os.path.join(folder, "nodes.yaml"), "--sequence-length", 64,
              "--out", out)
    expect(d["plans"][0]["world"] == 2, d["plans"][0])
    os.mkdir(os.path.join(out, "data"))
    with open(os.path.join(out, "data", "train.bin"), "wb") as f:
        f.write(b"\x01\0\0\0\x02\0\0\0" * 4096)
    os.mkdir(os.path.join(folder, "programs"))
    write(os.path.join(folder, "programs"), "srun", SRUN)
    os.chmod(os.path.join(folder, "programs", "srun"), 0o755)
    path = os.path.join(out, "job.yaml")
    with open(path) as f:
        text = f.read()
    for key, value in (("steps", 2), ("global_batch", 2), ("micro_batch", 1),
                       ("warmup_steps", 0), ("precision", "f32")):
        text = re.sub(rf"(?m)^( +{key}): .*", rf"\1: {value}", text, count=1)
    with open(path, "w") as f:
        f.write(text)
    held = held_port()
    port = held.getsockname()[1]
    env = dict(os.environ, PORT=str(port), SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="7",
               SLURM_SUBMIT_DIR=out,
               DEVICE="cpu", TMPDIR=folder,
               PATH=f"{os.path.join(folder, 'programs')}:{BIN}:{os.environ['PATH']}")
    os.mkdir(os.path.join(folder, "ballast-7"))  # as an earlier run of the same batch job left it
    write(os.path.join(folder, "ballast-7"), "state.db", "of another job")
    script = [os.path.join(out, "launch-slurm.sbatch")]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300)
    logs = "".join(open(os.path.join(out, "run-7", n)).read()
                   for n in os.listdir(os.path.join(out, "run-7")) if n.endswith(".log"))
    expect(done.returncode == 0, f"the batch job: {done.stdout}{done.stderr}{logs}{text}")
    expect(f"tcp://0.0.0.0:{port}" in logs, f"it listens elsewhere: {logs}")
    write(os.path.join(folder, "programs"), "srun", "#!/bin/sh\n")
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300)
    expect(done.returncode == 1 and "workers have ended before the job" in done.stderr,
           f"without workers: {done.returncode} {done.stdout}{done.stderr}")
    held.close()


def a_small_model_becomes_a_job(folder):
    model, out = os.path.join(folder, "Small_v1.5"), os.path.join(folder, "out")
    write(model, "config.json", SMALL)
    with open(os.path.join(folder, "cluster.yaml"), "w") as f:
        f.write("name: two\nnodes: 2\ngpus_per_node: 4\ngpu_memory: 8GB\ngpu_reserve: 100MB\n")
    for mode in ("full", "lora"):
        d = adapt(model, "--cluster", os.path.join(folder, "cluster.yaml"), "--train", mode,
                  "--sequence-length", 512, "--out", out, "--force")
        expect(d["today"]["model_runs"] and d["today"]["plan_fits"], d["today"])
        expect(d["plans"][0]["world"] == 8 and d["plans"][0]["nodes"] == 2, d["plans"][0])
        expect(d["plans"][0]["rejected_neighbours"], "no neighbour is told")
        files_are_fit_for_use(out)
    again = adapt(model, "--cluster", os.path.join(out, "cluster.yaml"), "--train", "lora",
                  "--sequence-length", 512)
    nothing_is_written_over(model, out)
    expect(again["plans"] == d["plans"], "cluster.yaml does not read back as it was")
    text = run("adapt", model, "--cluster", os.path.join(out, "cluster.yaml"))
    expect("latent_attention" in text.stdout and "TOKENS/S" in text.stdout, text.stdout)


def what_would_go_wrong_is_said(folder):
    """A key that nobody knows, tensors of another shape, and a last word that is true."""
    write(folder, "config.json", dict(SMALL, attention_sinks=True, use_cache=False))
    d = adapt(folder)
    expect(d["keys_not_read"] == ["attention_sinks"] and d["today"]["model_runs"], d["today"])
    expect(not d["today"]["tensors_refused"], d["today"])
    expect("not read     attention_sinks:" in run("adapt", folder).stdout, "the key is not told")
    header = {"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    write(folder, "model.safetensors", shard(header, 4))
    expect(adapt(folder)["today"]["tensors_refused"], "a job would not take these tensors")
    last = run("adapt", folder).stdout.split("today")[1]
    expect("a job is refused" in last, last)
    os.remove(os.path.join(folder, "model.safetensors"))
    write(folder, "config.json", dict(SMALL, hidden_act="gelu"))
    out = os.path.join(folder, "out")
    done = run("adapt", folder, "--out", out)
    expect("today        nothing: the engine does not train" in done.stdout, done.stdout)
    expect("submit" not in done.stderr and "operators-missing.md" in done.stderr, done.stderr)
    expect(adapt(folder)["keys_not_read"] is None, "its reader stopped early")
    with open(os.path.join(folder, "little.yaml"), "w") as f:
        f.write("gpu_memory: 4GB\n")
    done = run("adapt", folder, "--cluster", os.path.join(folder, "little.yaml"))
    expect(done.returncode == 2 and "gpu_reserve" in done.stderr, done.stderr)


def what_does_not_fit_ends_with_6(folder):
    """Of the cluster that was named; without one a model is only told of."""
    model, few = os.path.join(CONFIGS, "deepseek-v3"), os.path.join(folder, "few.yaml")
    if not os.path.exists(CONFIGS):
        print("SKIPPED: no reference data at", CONFIGS)
        return
    write(folder, "few.yaml", "name: few\nnodes: 1\ngpus_per_node: 8\ngpu_memory: 80GB\n")
    for options in (("--train", "full"), ("--train", "lora", "--json")):
        done = run("adapt", model, "--cluster", few, *options)
        said = re.fullmatch(
            r".*no plan fits 8 GPUs of 80 GB \(few\): the least is [0-9.]+ GB a GPU, [0-9.]+ GB "
            r"more than it has; (\d+) GPUs of 80 GB would hold it.*\n", done.stderr)
        expect(done.returncode == 6 and said, done.stderr)
        expect(len(done.stdout) > 500, "what the model is, is told all the same")
        write(folder, "enough.yaml", f"nodes: {int(said[1]) // 8}\ngpu_memory: 80GB\n")
        done = run("adapt", model, "--cluster", os.path.join(folder, "enough.yaml"), *options)
        expect(done.returncode == 0, f"on {said[1]} GPUs: {done.stderr}")
    # Plans that the engine does not run yet are no use to a job of it.
    linear = os.path.join(CONFIGS, "kimi-linear-48b-a3b")
    done = run("adapt", linear, "--cluster", few, "--sequence-length", 262144,
               "--out", os.path.join(folder, "out"))
    expect(done.returncode == 6 and "no plan that the engine runs fits" in done.stderr and
           "more than it has beside gpu_reserve; " in done.stderr, done.stderr)
    expect(os.path.exists(os.path.join(folder, "out/REPORT.md")), "no report says why")
    done = run("adapt", linear, "--sequence-length", 10000000)
    expect(done.returncode == 0 and "that the engine runs fits" in done.stdout, done.stderr)


# ---- checks and measurements by the worker's program

def worker(*args):
    return subprocess.run([os.path.join(BIN, "ballast-worker"), *map(str, args)],
                          capture_output=True, text=True, timeout=PATIENCE,
                          stdin=subprocess.DEVNULL)


def a_shrunk_model_is_checked(folder):
    deep = dict(SMALL, num_hidden_layers=40, first_k_dense_replace=3, n_routed_experts=64,
                hidden_size=512, n_group=4, topk_group=2)
    write(folder, "config.json", deep)
    done = subprocess.run([os.path.join(BIN, "ballast"), "adapt", folder, "--validate", "--json"],
                          capture_output=True, text=True, timeout=PATIENCE)
    expect(done.returncode in (0, 1), done.stderr)
    v = json.loads(done.stdout)["validation"]
    checks = {c["check"]: c for c in v["checks"]}
    clock = "time of a step beside its prediction"  # a busy machine may fail this one
    for name in ("gradients, finite differences", "logits, 4 ranks, fsdp 2, experts 4",
                 "gradients, 4 ranks, fsdp 4, experts 2 x 2", "the loss falls",
                 "loss curve, recomputing all"):
        expect(checks[name]["passed"], checks)
    expect(checks[clock]["measured"] < 1, checks[clock])
    expect(v["passed"] == all(c["passed"] for c in v["checks"]), v)
    expect((done.returncode == 0) == v["passed"] and len(v["not_checked"]) > 2, v)
    # What the engine does not train is not checked, and said.
    write(folder, "config.json", {"model_type": "mixtral", "hidden_size": 64, "vocab_size": 256,
                                  "num_hidden_layers": 2, "num_attention_heads": 4,
                                  "intermediate_size": 64, "num_local_experts": 4,
                                  "num_experts_per_tok": 2})
    done = run("adapt", folder, "--validate", "--json")
    v = json.loads(done.stdout)["validation"]
    expect(done.returncode == 1 and not v["checks"] and "does not train" in v["not_checked"][0], v)


def a_measured_cluster_is_planned_for(folder):
    os.makedirs(folder)
    file = os.path.join(folder, "measured.yaml")
    done = worker("bench", "--cluster", "--ranks", 2, "--threads", 1, "--out", file)
    expect(done.returncode == 0, done.stderr)
    write(os.path.join(folder, "model"), "config.json", SMALL)
    d = adapt(os.path.join(folder, "model"), "--cluster", file, "--sequence-length", 128)
    expect(d["plans"] and d["plans"][0]["world"] == 2, d["plans"][:1])
    expect(all(p["precision"] == "f32" for p in d["plans"]), "a cpu computes in f32")
    expect(d["today"]["plan_fits"] and d["today"]["plan"]["precision"] == "f32", d["today"])
    refused = worker("bench", "--ranks", 2)
    expect(refused.returncode == 2 and "--cluster" in refused.stderr, refused.stderr)
    refused = worker("bench", "--cluster", "--ranks", 0)
    expect(refused.returncode == 2 and "--ranks" in refused.stderr, refused.stderr)


# ---- tensors of a family that nobody registered

def an_unknown_family_is_counted_by_its_tensors(folder):
    config = {"model_type": "novel_moe", "hidden_size": 64, "num_hidden_layers": 2,
              "vocab_size": 100, "num_attention_heads": 4, "num_experts": 4,
              "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    rows = ["model.embed_tokens.weight\t-\t-\tBF16\t100,64", "lm_head.weight\t-\t-\tBF16\t100,64",
            "model.norm.weight\t-\t-\tBF16\t64",
            "model.layers.{L}.self_attn.extra_proj.weight\t0-1\t-\tBF16\t8,64"]
    for name in ("q", "k", "v", "o"):
        rows.append(f"model.layers.{{L}}.self_attn.{name}_proj.weight\t0-1\t-\tBF16\t64,64")
    for name in ("gate", "up", "down"):
        shape = "64,32" if name == "down" else "32,64"
        rows.append(f"model.layers.{{L}}.mlp.experts.{{E}}.{name}_proj.weight\t0-1\t0-3\tBF16\t"
                    + shape)
    rows += ["model.layers.{L}.mlp.gate.weight\t0-1\t-\tBF16\t4,64",
             "model.layers.{L}.input_layernorm.weight\t0-1\t-\tBF16\t64",
             "model.layers.{L}.post_attention_layernorm.weight\t0-1\t-\tBF16\t64"]
    write(folder, "config.json", config)
    write(folder, "tensors.tsv", "name\tlayers\texperts\tdtype\tshape\n" + "\n".join(rows) + "\n")
    d = adapt(folder)
    wanted = 2 * 100 * 64 + 64 + 2 * (8 * 64 + 4 * 64 * 64 + 4 * 3 * 32 * 64 + 4 * 64 + 2 * 64)
    expect(d["model"]["parameters_total"] == wanted, (d["model"], wanted))
    expect(d["model"]["parameters_active"] == wanted - 2 * 3 * 3 * 32 * 64, d["model"])
    expect(d["checkpoint"]["unknown"] == 2, d["checkpoint"])
    expect(any("extra_proj" in line for line in d["checkpoint"]["disagreements"]), d["checkpoint"])
    expect(any("novel_moe" in line for line in d["model"]["inferred"]), d["model"])
    expect(not d["today"]["model_runs"] and "novel_moe" in d["today"]["reason"], d["today"])
    # Keys that tell nothing but the type and how many experts a token uses.
    write(folder, "config.json", {"model_type": "odd_moe", "router": {"experts_per_tok": 1}})
    d = adapt(folder)
    m = d["model"]
    expect((m["parameters_total"], m["parameters_active"]) ==
           (wanted, wanted - 2 * 3 * 3 * 32 * 64), m)
    expect(m["layers"] == [{"kind": "mixer+moe", "count": 2}], m["layers"])
    expect(d["checkpoint"]["unknown"] == 0 and d["plans"], d["checkpoint"])
    expect(any("layers are those of the tensors" in line for line in m["inferred"]), m)
    # Layers under another word, with fused projections and experts in one tensor, in safetensors.
    shapes = {"transformer.wte.weight": [100, 64], "transformer.ln_f.weight": [64],
              "lm_head.weight": [100, 64]}
    for l in range(3):
        shapes.update({f"transformer.h.{l}.attn.qkv.weight": [192, 64],
                       f"transformer.h.{l}.attn.out.weight": [64, 64],
                       f"transformer.h.{l}.norm_1.weight": [64],
                       f"transformer.h.{l}.moe.router.weight": [4, 64],
                       f"transformer.h.{l}.moe.experts.up": [4, 32, 64],
                       f"transformer.h.{l}.moe.experts.down": [4, 64, 32]})
    header, at = {}, 0
    for name, shape in shapes.items():
        n = 2
        for x in shape:
            n *= x
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
        at += n
    other = folder + "-h"
    write(other, "config.json", {"model_type": "odder_moe", "num_experts_per_tok": 2})
    write(other, "model.safetensors", shard(header, at))
    d = adapt(other)
    m = d["model"]
    experts = 3 * 4 * 2 * 32 * 64
    expect((m["parameters_total"], m["parameters_active"]) == (at // 2, at // 2 - experts // 2), m)
    expect(m["layers"] == [{"kind": "mixer+moe", "count": 3}] and m["bytes"] == at, m)
    # Of a known family the keys must be right, whatever the tensors show.
    write(folder, "config.json", {"model_type": "mixtral"})
    refused("a known family without keys", folder, "'hidden_size' is missing")


# ---- hostile folders

def shard(header, size):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * size


def hostile(folder):
    good = json.dumps(SMALL)
    deep = good[:-1] + ', "x": ' + "[" * 100000 + "]" * 100000 + "}"
    whole = {"a.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    cases = [
        ("no folder", None, "nowhere"), ("no configuration", {}, "config.json"),
        ("not JSON", {"config.json": "hello"}, "config.json"),
        ("no layers", {"config.json": dict(SMALL, num_hidden_layers=0)}, "num_hidden_layers"),
        ("experts", {"config.json": dict(SMALL, n_routed_experts=10**9)}, "n_routed_experts"),
        ("negative", {"config.json": dict(SMALL, hidden_size=-1)}, "hidden_size"),
        ("NaN", {"config.json": good.replace('"hidden_size": 32', '"hidden_size": NaN')},
         "hidden_size"),
        ("a long text", {"config.json": dict(SMALL, model_type="x" * 2000000)}, "model_type"),
        ("deep", {"config.json": deep}, "config.json"),
        ("large", {"config.json": good + " " * (100 << 20)}, "config.json"),
        ("a list", {"config.json": "[1, 2]"}, "config.json"),
        ("a wrong type", {"config.json": dict(SMALL, kv_lora_rank={"a": 1})}, "kv_lora_rank"),
        ("a truncated shard", {"config.json": good,
                               "model.safetensors": shard(whole, 16)[:-8]}, "model.safetensors"),
        ("a short header", {"config.json": good, "model.safetensors": b"\xff" * 12},
         "model.safetensors"),
        ("a pointer of Git LFS", {"config.json": good, "model.safetensors":
                                  b"version https://git-lfs.github.com/spec/v1\noid sha256:0"},
         "git lfs pull"),
        ("a missing shard", {"config.json": good, "b.safetensors": shard(whole, 16),
                             "model.safetensors.index.json": {"weight_map": {
                                 "a.weight": "b.safetensors", "c": "d.safetensors"}}},
         "d.safetensors"),
        ("a shard elsewhere", {"config.json": good, "model.safetensors.index.json": {
            "weight_map": {"a": "/etc/passwd"}}}, "index.json"),
        ("a wrong list", {"config.json": good, "tensors.tsv": "a\tb\n"}, "line 1"),
    ]
    for n, (shows, files, says) in enumerate(cases):
        path = os.path.join(folder, f"hostile-{n}" if files is not None else "nowhere")
        if files is not None:
            os.makedirs(path)
        for name, what in (files or {}).items():
            write(path, name, what)
        refused(shows, path, says)
    links(folder, good)
    pipes(folder, good)


def refused(shows, path, says):
    began = time.time()
    done = run("adapt", path)
    lines = done.stderr.strip().split("\n")
    expect(done.returncode == 2 and len(lines) == 1 and says in lines[0] and len(lines[0]) < 1200,
           f"{shows}: exit {done.returncode}: {done.stderr[:500]}")
    print(f"  {time.time() - began:.2f} s  {shows}: {lines[0][:150]}")


def pipes(folder, good):
    for name in ("config.json", "tensors.tsv", "model.safetensors"):
        path = os.path.join(folder, "pipe-" + name)
        write(path, "other", "")
        if name != "config.json":
            write(path, "config.json", good)
        os.mkfifo(os.path.join(path, name))
        refused("a pipe for " + name, path, name)


def links(folder, good):
    cyclic, outside, hub = (os.path.join(folder, n) for n in ("cyclic", "outside", "hub"))
    os.makedirs(cyclic)
    os.symlink("config.json", os.path.join(cyclic, "config.json"))
    refused("a link to itself", cyclic, "config.json")
    os.makedirs(outside)
    write(folder, "elsewhere.json", good)
    os.symlink("../elsewhere.json", os.path.join(outside, "config.json"))
    refused("a link out of the folder", outside, "outside")
    write(os.path.join(hub, "blobs"), "1234", good)
    snapshot = os.path.join(hub, "snapshots", "main")
    os.makedirs(snapshot)
    os.symlink("../../blobs/1234", os.path.join(snapshot, "config.json"))
    expect(adapt(snapshot)["model"]["family"] == "deepseek_v3", "a hub's folder of links")


def limits(folder):
    """What a process may not have is told in a line, not by a signal."""
    def limited(kind, to):
        return lambda: resource.setrlimit(kind, (to, to))

    out = os.path.join(folder, "limited")
    done = subprocess.run([os.path.join(BIN, "ballast"), "adapt", os.path.join(folder, "Small_v1.5"),
                           "--out", out], capture_output=True, text=True, timeout=SECONDS,
                          preexec_fn=limited(resource.RLIMIT_FSIZE, 700))
    expect(done.returncode == 1 and "File too large" in done.stderr, done)
    config = os.path.join(folder, "limited.yaml")
    with open(config, "w") as f:
        f.write(f"coordinator: ipc://{folder}/nobody.sock\nstate_dir: {folder}/limited-state\n"
                f"allowed_roots: [{folder}]\n")
    done = subprocess.run([os.path.join(BIN, "ballast-worker"), "--config", config],
                          capture_output=True, text=True, timeout=SECONDS,
                          preexec_fn=limited(resource.RLIMIT_STACK, 256 << 10))
    expect(done.returncode == 1 and "256 KiB of stack (ulimit -s)" in done.stderr, done)


def main():
    folder = tempfile.mkdtemp(prefix="ballast-adapt-")
    try:
        counts_are_exact()
        kimi_k3_is_planned(os.path.join(folder, "k3"))
        a_small_model_becomes_a_job(folder)
        two_machines_meet_with_keys(folder)
        what_does_not_fit_ends_with_6(os.path.join(folder, "unfit"))
        what_would_go_wrong_is_said(os.path.join(folder, "warned"))
        a_shrunk_model_is_checked(os.path.join(folder, "shrunk"))
        a_measured_cluster_is_planned_for(os.path.join(folder, "cluster"))
        an_unknown_family_is_counted_by_its_tensors(os.path.join(folder, "novel"))
        hostile(folder)
        limits(folder)
    finally:
        shutil.rmtree(folder)
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
