"""Records expert loads of our own training while its text changes: tests/data/text-change.csv.

    record_trace.py OUT.csv [steps]

One model with real routers (64 experts, 4 a token, no router-side balancing) trains on the King
James Bible, goes on with the Jargon File, and returns. Each part starts from the weights of the
one before. What is kept is expert_load: tokens per window, layer and expert. The texts are the
distribution's: bible-kjv-text, which must be installed, and dict-jargon, which is only unpacked.
"""
import csv
import glob
import gzip
import io
import json
import os
import subprocess
import sys

from cluster import TINY_MODEL, Cluster, until

WINDOW = 10
PARTS = (("bible", 2), ("jargon", 2), ("bible", 1))  # text, share of the steps


def jargon(folder):
    """The entries of the Jargon File, without their markup."""
    subprocess.run(["apt-get", "-q", "download", "dict-jargon"], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    package = glob.glob(os.path.join(folder, "dict-jargon_*.deb"))[0]
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    with gzip.open(os.path.join(folder, "usr/share/dictd/jargon.dict.dz")) as f:
        return f.read()


def bible():
    done = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], stdin=subprocess.DEVNULL, check=True,
                          capture_output=True)
    lines = [line.split(b" ", 1) for line in done.stdout.splitlines()]
    return b"".join(line[1] + b"\n" for line in lines if len(line) == 2)


class TraceCluster(Cluster):
    def _write_model(self):
        model = json.loads(json.dumps(TINY_MODEL))
        model["text_config"].update(
            hidden_size=64, intermediate_size=128, num_experts=64, num_experts_per_token=4,
            moe_intermediate_size=16, routed_expert_hidden_size=32)
        os.makedirs(os.path.join(self.folder, "model"))
        with open(os.path.join(self.folder, "model", "config.json"), "w") as f:
            json.dump(model, f, indent=1)

    def _write_text(self):
        os.makedirs(os.path.join(self.folder, "text"))
        for name, text in (("bible", bible()), ("jargon", jargon(self.folder))):
            with open(os.path.join(self.folder, "text", name + ".txt"), "wb") as f:
                f.write(text)

    def while_training(self, job):
        """Whatever else is to be done to a job, again and again until it ends."""

    def train(self, part, text, model, steps, checkpoint, rebalance="auto: false"):
        path = os.path.join(self.folder, f"part-{part}.yaml")
        with open(path, "w") as f:
            f.write(f"""name: part-{part}
model: {{path: {model}, init_seed: 1}}
data: {{train: [text/{text}.txt], format: bytes, sequence_length: 128}}
train:
  steps: {steps}
  global_batch: 16
  micro_batch: {min(4, 16 // self.n_workers)}
  seed: {part}
  optimizer: {{lr: 2e-3}}
  schedule: {{name: constant, warmup_steps: 5}}
parallel:
  workers: {self.n_workers}
  fsdp_shard_degree: {self.n_workers}
  expert_parallel_degree: {self.n_workers}
checkpoint: {{path: {checkpoint}, every_steps: {steps}, keep: 1}}
moe: {{bias_update: off}}
rebalance: {{{rebalance}, window_steps: {WINDOW}}}
""")
        job = self.submit(path)

        def is_over():
            self.while_training(job)
            return self.show(job)["state"] in ("DONE", "FAILED")
        until(is_over, 600, f"part {part} ends")
        self.wait(job, "DONE")
        return job

    def weights(self, part):
        """Of a part that is done, to go on from."""
        return next(os.path.dirname(p) for p in sorted(glob.glob(
            os.path.join(self.folder, f"weights-{part}", "**", "config.json"), recursive=True)))


def main():
    out, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 400
    rows, window, model = [], 0, "model"
    with TraceCluster(n_workers=2) as c:
        for part, (text, share) in enumerate(PARTS):
            n = steps * share // sum(s for _, s in PARTS)
            job = c.train(part, text, model, n, f"weights-{part}")
            model = c.weights(part)
            query = ("select window_start_step, layer, expert, sum(tokens) from expert_load where "
                     f"job = {job} group by 1, 2, 3 order by 1, 2, 3")
            answer = c.ok("db", "query", query, "--csv", "--no-header", "-c", "100000")
            found = list(csv.reader(io.StringIO(answer)))
            starts = sorted({int(r[0]) for r in found})
            rows += [(window + starts.index(int(r[0])), *map(int, r[1:])) for r in found]
            window += len(starts)
            print(f"part {part}, {text}: {n} steps, {len(starts)} windows, loss "
                 f"{c.steps(job)[-1]['loss']:.3f}", flush=True)
    with open(out, "w") as f:
        f.write("window,layer,expert,load\n")
        f.writelines(",".join(map(str, row)) + "\n" for row in rows)


if __name__ == "__main__":
    main()
