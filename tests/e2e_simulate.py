"""Virtual workers: a fleet that computes nothing takes jobs, is paused, drained and ends."""
import os
import subprocess

from cluster import BIN, Cluster, expect, tell, until


def start_fleet(c, n):
    path = os.path.join(c.folder, "fleet.yaml")
    with open(path, "w") as f:
        f.write(f"name: v\nnode: rack\ncoordinator: {c.address}\nstate_dir: {c.folder}/fleet\n"
                f"allowed_roots: [{c.folder}]\n")
    with open(os.path.join(c.folder, "fleet.log"), "w") as log:
        c.processes["fleet"] = subprocess.Popen(
            [os.path.join(BIN, "ballast-worker"), "--config", path, "--simulate", str(n)],
            env=c.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def story():
    """24 virtual workers: a job of 8 on one node, paused and resumed, and a goodbye"""
    with Cluster(n_workers=0) as c:
        start_fleet(c, 24)
        until(lambda: c.n_idle() == 24, 20, "every virtual worker idle")
        fleet = c.workers()
        expect(fleet["v-9"]["node"] == "rack-1" and fleet["v-9"]["device"] == "virtual",
               f"{fleet['v-9']}")
        job = c.submit(c.job(steps=15, workers=8, fsdp=2, ep=8, checkpoint_every=100))
        c.wait_step(job, 3)
        nodes = {fleet[w]["node"] for w in c.show(job)["worker_names"]}
        expect(len(nodes) == 1, f"its experts lie on several nodes: {nodes}")
        c.ok("job", "pause", job)
        c.wait(job, "PAUSED")
        c.ok("job", "resume", job)
        ended = c.wait(job, "DONE")
        expect(ended["attempt"] == 2 and len(c.steps(job)) == 15, f"{ended}")
        fleet = c.processes.pop("fleet")
        fleet.terminate()
        until(lambda: all(w["state"] == "GONE" for w in c.workers().values()), 20,
              "all have said goodbye")
        expect(fleet.wait(30) == 0, f"it ended with {fleet.returncode}")


tell(story)
