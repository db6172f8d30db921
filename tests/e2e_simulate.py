"""Virtual workers: a fleet that computes nothing takes jobs, is paused, balances and ends."""
import copy
import json
import os
import subprocess

from cluster import BIN, PATIENCE, TINY_MODEL, Cluster, expect, tell, until


def start_fleet(c, n, *options):
    path = os.path.join(c.folder, "fleet.yaml")
    with open(path, "w") as f:
        f.write(f"name: v\nnode: rack\ncoordinator: {c.address}\nstate_dir: {c.folder}/fleet\n"
                f"allowed_roots: [{c.folder}]\n")
    with open(os.path.join(c.folder, "fleet.log"), "w") as log:
        c.processes["fleet"] = subprocess.Popen(
            [os.path.join(BIN, "ballast-worker"), "--config", path, "--simulate", str(n), *options],
            env=c.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def write_large_model(c):
    """K3's 896 experts, 16 of them a token, in three layers"""
    model = copy.deepcopy(TINY_MODEL)
    model["text_config"].update(num_experts=896, num_experts_per_token=16)
    os.makedirs(f"{c.folder}/large")
    with open(f"{c.folder}/large/config.json", "w") as f:
        json.dump(model, f)


def story():
    """24 virtual workers: a job of 8 on one node, paused and resumed, and a goodbye"""
    with Cluster(n_workers=0) as c:
        write_large_model(c)
        with open(f"{c.folder}/loads.csv", "w") as f:
            f.write("layer,expert,load\n" + "".join(f"1,{e},{8 if e == 3 else 1}\n"
                                                    for e in range(8)))
        start_fleet(c, 24, "--simulate-loads", f"{c.folder}/loads.csv")
        until(lambda: c.n_idle() == 24, 20, "every virtual worker idle")
        fleet = c.workers()
        expect(fleet["v-9"]["node"] == "rack-1" and fleet["v-9"]["device"] == "virtual",
               f"{fleet['v-9']}")
        job = c.submit(c.job(steps=25, workers=8, fsdp=2, ep=8, checkpoint_every=100,
                             more="rebalance: {window_steps: 2, auto: false}"))
        c.wait_step(job, 3)
        nodes = {fleet[w]["node"] for w in c.show(job)["worker_names"]}
        expect(len(nodes) == 1, f"its experts lie on several nodes: {nodes}")
        c.ok("job", "pause", job)
        c.wait(job, "PAUSED")
        c.ok("job", "resume", job)
        ended = c.wait(job, "DONE")
        expect(ended["attempt"] == 2 and len(c.steps(job)) == 25, f"{ended}")
        for layer in c.json("experts", job, "--window", "last")["items"]:
            tokens = layer["tokens"]
            expect(sum(tokens) == 2 * 8 * 64 * 2 and all(7.5 < tokens[3] / n < 8.5 for e, n in
                                                         enumerate(tokens) if e != 3),
                   f"the file's loads are not in the report: {layer}")
        other = c.submit(c.job(workers=8, fsdp=2, ep=8), "--set", "model.path=large")
        failed = c.wait(other, "FAILED")
        expect("loads of 8 experts a layer, the job's model has 896" in failed["reason"],
               f"{failed}")
        fleet = c.processes.pop("fleet")
        fleet.terminate()
        until(lambda: all(w["state"] == "GONE" for w in c.workers().values()), 20,
              "all have said goodbye")
        expect(fleet.wait(30 * PATIENCE) == 0, f"it ended with {fleet.returncode}")


def rebalancing():
    """16 virtual workers with 896 experts: imbalance falls by plans, and steps get shorter"""
    with Cluster(n_workers=0) as c:
        write_large_model(c)
        start_fleet(c, 16)
        until(lambda: c.n_idle() == 16, 20, "every virtual worker idle")
        job = c.submit(c.job(steps=10000, workers=16, fsdp=2, ep=16, checkpoint_every=5000,
                             more="rebalance: {window_steps: 3, auto: true}"),
                       "--set", "model.path=large", "--set", "train.global_batch=1024")

        def done():
            return [p for p in c.json("rebalance", "history", job)["items"]
                    if p["state"] == "DONE" and p["imbalance"]["after"]]
        plan = until(done, 20, "a plan is carried out and what it brought is seen")[0]
        expect(plan["automatic"] and plan["moves"] > 0 and plan["bytes"] > 0 and
               0 < plan["pause_seconds"] < 0.1 and plan["realised_gain_seconds"] > 0, f"{plan}")
        expect(plan["imbalance"]["before"] > 1.2 and plan["imbalance"]["after"] < 1.1, f"{plan}")
        steps = c.steps(job)
        before, after = steps[0], steps[-1]
        expect(before["tokens_per_second"] < 0.9 * after["tokens_per_second"] and
               after["imbalance"] < 1.1 < before["imbalance"], f"{before}, then {after}")
        expect(any(s["phases"]["migration"] > 0 for s in steps), "no step was held up by moves")
        c.ok("job", "cancel", job)
        c.wait(job, "CANCELLED")


tell(story)
tell(rebalancing)
