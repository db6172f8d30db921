"""A cluster of real daemons in a folder of its own, for the stories in e2e_*.py.

    with Cluster(n_workers=4) as c:
        job = c.submit(c.job(steps=20))
        c.wait(job, "DONE")

Everything lives in one temporary folder: sockets, state, logs, models, texts. Leaving the block
stops all daemons and fails if any process of this cluster is left. When a story fails, the end of
every log is printed and the folder is kept.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

BIN = os.environ.get("BALLAST_BIN") or os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "build", "bin")
MARK = "BALLAST_TEST_CLUSTER"  # in the environment of every process of a cluster

# The structure of Kimi K3 with few and small layers: dense first layer, KDA, latent attention.
TINY_MODEL = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "float32",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "mla_use_nope": True, "mla_use_output_gate": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16, "num_heads": 2,
            "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True},
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 8,
        "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 16,
        "routed_expert_hidden_size": 16, "latent_moe_use_norm": True,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "use_grouped_topk": True,
        "attn_res_block_size": 2, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "initializer_range": 0.02, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}


class Story(Exception):
    """What a story expected and did not see."""


def expect(condition, text):
    if not condition:
        raise Story(text)


PATIENCE = 5  # machines are shared: how much longer than on an idle one nothing is said


def until(condition, seconds, what):
    """Waits for condition() to be true, for `seconds` on an idle machine, and returns its value."""
    end = time.monotonic() + seconds * PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Story(f"not within {seconds * PATIENCE} s: {what}")
        time.sleep(0.05)


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def held_port():
    """A socket whose port nobody else is given; who listens with SO_REUSEADDR, as ZeroMQ, may."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", 0))
    return s


class Cluster:
    """hold_before: a step before which jobs wait between hold() and let_go(), for some seconds at
    most, as longer ones are taken for a hang: what happens meanwhile happens in mid-job, however
    fast the machine is and however late the story comes."""

    def __init__(self, n_workers=4, nodes=None, domains=None, hold_before=None):
        self.folder = tempfile.mkdtemp(prefix="ballast-e2e-")
        self.mark = os.path.basename(self.folder)
        self.address = f"ipc://{self.folder}/coordinator.sock"
        self.port = held_port()
        self.tcp = f"tcp://127.0.0.1:{self.port.getsockname()[1]}"
        self.hold_before = hold_before
        self.env = dict(os.environ, **{MARK: self.mark, "BALLAST_ADDRESS": self.address})
        self.processes = {}  # name: Popen, the daemons that should be alive
        self.n_workers = n_workers
        self.nodes = nodes or ["here"] * n_workers
        self.domains = domains or [""] * n_workers  # workers of different ones share no memory
        self.n_jobs = 0
        self.worker_address = self.address
        self.coordinator_keys = self.worker_keys = ""  # more lines of their files

    # ---- life --------------------------------------------------------------------------------

    def __enter__(self):
        try:
            self._write_model()
            self._write_text()
            self.start_coordinator()
            for i in range(self.n_workers):
                self.start_worker(i)
            until(lambda: self.n_idle() == self.n_workers, 20, "every worker idle")
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind, value, trace):
        problem = None
        try:
            self._stop_all()
        except Story as e:
            problem = e
        self.port.close()
        if kind or problem:
            if kind:
                traceback.print_exception(kind, value, trace)
            self._print_logs()
            print(f"left for a look: {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder)
        if problem and not kind:
            raise problem
        return False

    def _stop_all(self):
        for name in sorted(self.processes, reverse=True):  # workers before the coordinator
            process = self.processes[name]
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        late = []
        end = time.monotonic() + 30 * PATIENCE
        for name, process in self.processes.items():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(name)
                process.kill()
        left = self.pids()
        end = time.monotonic() + 3 * PATIENCE
        while left and time.monotonic() < end:
            time.sleep(0.05)
            left = self.pids()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        expect(not late, f"did not end within {30 * PATIENCE} s of SIGTERM: {late}")
        expect(not left, f"processes left behind: {left}")
        for name, process in self.processes.items():
            expect(process.returncode == 0, f"{name} ended with {process.returncode}")

    def _print_logs(self):
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(".log"):
                with open(os.path.join(self.folder, name), errors="replace") as f:
                    lines = f.readlines()[-25:]
                print(f"---- {name}\n{''.join(lines)}", file=sys.stderr)

    def pids(self, needle=""):
        return sorted(self.lines(needle))

    def lines(self, needle=""):
        """Command lines by pid, of living processes of this cluster, that hold needle."""
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            try:
                with open(f"/proc/{entry}/environ", "rb") as f:
                    environ = f.read()
                with open(f"/proc/{entry}/cmdline", "rb") as f:
                    line = f.read().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if f"{MARK}={self.mark}".encode() in environ and needle in line:
                if is_alive(int(entry)):
                    found[int(entry)] = line
        return found

    def trainers(self, job):
        """pid by rank of a job's living trainers."""
        return {int(re.search(r"rank=(\d+)", line).group(1)): pid
                for pid, line in self.lines(f"--trainer job={job},").items()}

    # ---- daemons -----------------------------------------------------------------------------

    def _start(self, name, program, config, **env):
        path = os.path.join(self.folder, name + ".yaml")
        with open(path, "w") as f:
            f.write(config)
        with open(os.path.join(self.folder, name + ".log"), "a") as log:
            self.processes[name] = subprocess.Popen(
                [os.path.join(BIN, program), "--config", path], env=dict(env, **self.env),
                stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        return self.processes[name]

    def start_coordinator(self):
        process = self._start("coordinator", "ballast-coordinator",
                              f"listen: [{self.address}, \"{self.tcp}\"]\n"
                              f"{self.coordinator_keys}"
                              f"state_dir: {self.folder}/state\n")
        until(lambda: self.run("ping", "--timeout", "2").returncode == 0, 20,
              "the coordinator answers a ping")
        return process

    def hold(self):
        """All trainers wait, but the last worker's, which waits for them."""
        with open(f"{self.folder}/hold", "w"):
            pass

    def let_go(self):
        os.remove(f"{self.folder}/hold")

    def let_go_once_planned(self, job, n_before=0):
        """A plan for its experts, beyond the n_before, comes in time for it to be carried out."""
        self.wait_step(job, self.hold_before - 1)
        end = time.monotonic() + 3
        while self.n_plans(job) <= n_before and time.monotonic() < end:
            time.sleep(0.05)
        self.let_go()

    def n_plans(self, job):
        return sum(e["kind"] == "PLAN_PROPOSED" for e in self.events(job))

    def start_worker(self, i):
        holds = self.hold_before and i < self.n_workers - 1
        failpoint = f"before-step:{self.hold_before}:while_{self.folder}/hold"
        return self._start(f"worker-{i}", "ballast-worker",
                           f"name: w{i}\nnode: {self.nodes[i]}\n"
                           f"coordinator: {self.worker_address}\n"
                           f"{self.worker_keys}"
                           f"memory_domain: '{self.domains[i]}'\n"
                           f"state_dir: {self.folder}/worker-{i}.state\n"
                           f"allowed_roots: [{self.folder}]\n",
                           **{"BALLAST_FAILPOINT": failpoint} if holds else {})

    def kill(self, name):
        """kill -9, and the daemon no longer counts as one that should be alive."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    # ---- the client ---------------------------------------------------------------------------

    def run(self, *args, timeout=60):
        """timeout: in seconds, on an idle machine."""
        return subprocess.run([os.path.join(BIN, "ballast"), *map(str, args)], env=self.env,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=timeout * PATIENCE)

    def ok(self, *args, timeout=60):
        done = self.run(*args, timeout=timeout)
        expect(done.returncode == 0, f"ballast {' '.join(map(str, args))}: exit "
               f"{done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def json(self, *args):
        return json.loads(self.ok(*args, "--json"))

    def submit(self, job_file, *args):
        return re.search(r"\d+", self.ok("submit", job_file, *args)).group(0)

    def show(self, job):
        """The job as cli.md's JSON says."""
        return next(j for j in self.json("jobs", "-a")["items"] if j["id"] == str(job))

    def wait(self, job, state, seconds=50):
        def there():
            j = self.show(job)
            ended = j["state"] in ("DONE", "FAILED", "CANCELLED")
            expect(not ended or j["state"] == state,
                   f"job {job} is {j['state']} instead of {state}: {j['reason']}\n"
                   + self.run("events", "--job", job).stdout + self.run("logs", job).stdout)
            return j if j["state"] == state else None
        return until(there, seconds, f"job {job} is {state}; it is {self.show(job)}")

    def wait_step(self, job, step, seconds=40):
        return until(lambda: self.show(job)["step"] >= step and self.show(job), seconds,
                     f"job {job} at step {step}; it is {self.show(job)}")

    def workers(self):
        return {w["name"]: w for w in self.json("workers")["items"]}

    def n_idle(self):
        """Living daemons that are known as idle; one that was killed may be so for a while too."""
        done = self.run("workers", "--json")
        if done.returncode != 0:
            return 0
        alive = {p.pid for p in self.processes.values()}
        return sum(w["state"] == "IDLE" and w["pid"] in alive
                   for w in json.loads(done.stdout)["items"])

    def events(self, job):
        return self.json("events", "--job", job)["items"]

    def steps(self, job, first=1):
        """Metrics, one object a step from first; fails on a gap or a duplicate."""
        done = json.loads(self.ok("metrics", job, "--json"))
        rows = done["items"] if isinstance(done, dict) else done
        numbers = [r["step"] for r in rows]
        expect(numbers == list(range(first, first + len(numbers))),
               f"steps with gaps or twice, or not from {first}: {numbers}")
        return rows

    def daemon_of(self, trainer):
        """The name of the daemon that is the parent of a trainer's pid."""
        with open(f"/proc/{trainer}/stat") as f:
            parent = int(f.read().rsplit(")", 1)[1].split()[1])
        return next(n for n, p in self.processes.items() if p.pid == parent)

    # ---- what is trained -----------------------------------------------------------------------

    def _write_model(self):
        os.makedirs(os.path.join(self.folder, "model"))
        with open(os.path.join(self.folder, "model", "config.json"), "w") as f:
            json.dump(TINY_MODEL, f, indent=1)

    def _write_text(self):
        os.makedirs(os.path.join(self.folder, "text"))
        for name, verses in (("train", "gen1:1-gen25:34"), ("held-out", "ruth1:1-ruth4:22")):
            lines = subprocess.run(["bible", "-f", verses], stdin=subprocess.DEVNULL, check=True,
                                   capture_output=True, text=True).stdout.splitlines()
            with open(os.path.join(self.folder, "text", name + ".txt"), "w") as f:
                f.writelines(line.split(" ", 1)[1] + "\n" for line in lines)

    def job(self, name="tiny", steps=40, workers=4, checkpoint_every=10, fsdp=2, ep=4,
            deterministic=False, max_restarts=3, checkpoint=None, parallel="", more=""):
        """Writes a job file and returns its path."""
        self.n_jobs += 1
        path = os.path.join(self.folder, f"job-{self.n_jobs}.yaml")
        with open(path, "w") as f:
            f.write(f"""name: {name}
model: {{path: model, init_seed: 1}}
data:
  train: [text/train.txt]
  validation: [text/held-out.txt]
  format: bytes
  sequence_length: 64
train:
  steps: {steps}
  global_batch: 8
  micro_batch: 1
  seed: 1
  deterministic: {str(deterministic).lower()}
  optimizer: {{lr: 3e-3}}
  schedule: {{warmup_steps: 2, min_lr: 3e-4}}
parallel: {{workers: {workers}, fsdp_shard_degree: {fsdp}, expert_parallel_degree: {ep}{parallel}}}
checkpoint:
  path: {checkpoint or f'checkpoint-{self.n_jobs}'}
  every_steps: {checkpoint_every}
  keep: 3
scheduling: {{max_restarts: {max_restarts}}}
{more}""")
        return path


def tell(story):
    """Runs a story, with a line for the log, and ends the program."""
    start = time.monotonic()
    try:
        story()
    except Story as e:
        print(f"FAILED: {e}", file=sys.stderr)
        sys.exit(1)
    print(f"{(story.__doc__ or story.__name__).strip()}: passed in "
          f"{time.monotonic() - start:.1f} s")
