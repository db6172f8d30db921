"""Over TCP a key lets in, and its role says what it may do; a coordinator changes its key."""
import os
import signal
import subprocess

from cluster import PATIENCE, Cluster, expect, tell, until


def own_ip():
    """An address of this machine that is not the loopback, where there is one."""
    words = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return next((w for w in words if "." in w), "127.0.0.1")


class Keys:
    def __init__(self, cluster):
        self.c = cluster
        self.folder = os.path.join(cluster.folder, "keys")
        os.mkdir(self.folder)
        self.listed = {}
        self.make("coordinator", "coordinator")
        for name, role in (("fleet", "worker"), ("ada", "user"), ("bob", "user"),
                           ("eve", "viewer"), ("ops", "admin")):
            self.listed[name] = self.make(name, role)
        self.make("stranger", "admin")
        self.write_list()
        self.trusted = self.path("coordinator.pub")

    def path(self, name):
        return os.path.join(self.folder, name)

    def make(self, name, role):
        return self.c.ok("keygen", name, "--role", role, "--out", self.folder)

    def write_list(self):
        with open(self.path("authorized"), "w") as f:
            f.writelines(self.listed.values())

    def run(self, name, *args):
        keys = ["--key", self.path(name + ".key"), "--coordinator-key", self.trusted]
        args = [*args, "--timeout", 30 * PATIENCE]  # what is refused comes late on busy cores
        if not name:
            port = self.c.tcp.rsplit(":", 1)[1]
            return self.c.run(*args, "--address", f"tcp://127.0.0.1:{port}")
        return self.c.run(*args, "--address", self.c.worker_address, *keys)

    def ok(self, name, *args):
        done = self.run(name, *args)
        expect(done.returncode == 0, f"{name}: ballast {args}: {done.returncode} {done.stderr}")
        return done.stdout

    def denied(self, name, text, *args):
        done = self.run(name, *args)
        expect(done.returncode == 4 and text in done.stderr,
               f"{name or 'nobody'}: ballast {args}: exit {done.returncode}, {done.stderr}")


def configure(c):
    port = c.tcp.rsplit(":", 1)[1]
    c.tcp = f"tcp://0.0.0.0:{port}"
    c.worker_address = f"tcp://{own_ip()}:{port}"
    k = Keys(c)
    c.coordinator_keys = (f"key: {k.path('coordinator.key')}\n"
                          f"authorized_keys: {k.path('authorized')}\n")
    c.worker_keys = f"key: {k.path('fleet.key')}\ncoordinator_key: {k.trusted}\n"
    return k


def roles(c, k, job):
    k.denied("stranger", "does not know the key of stranger", "jobs")
    expect("Next: ballast keygen" in k.run("stranger", "doctor").stdout, "what to type next")
    k.denied("", "wants a key", "jobs")
    k.denied("eve", "has the role viewer", "job", "cancel", job)
    k.denied("bob", "belongs to ada; bob may change no jobs but his own", "job", "cancel", job)
    k.denied("ada", "has the role user", "worker", "drain", "w0")
    k.denied("fleet", "has the role worker", "jobs")
    expect(f'"id": "{job}"' in k.ok("eve", "jobs", "--json"), "a viewer sees the job")
    k.ok("ops", "job", "set", job, "scheduling.max_restarts=1")
    told = {e["kind"]: e["text"] for e in c.events(job)}
    expect("by ada" in told["JOB_SUBMITTED"] and "by ops" in told["JOB_SETTINGS"],
           f"the log says who: {told}")


def new_coordinator_key(c, k):
    """Both keys are trusted, then the coordinator has the new one, then the old one goes."""
    with open(k.trusted, "a") as f:
        f.write(k.make("successor", "coordinator"))
    c.kill("coordinator")
    c.coordinator_keys = c.coordinator_keys.replace("coordinator.key", "successor.key")
    c.start_coordinator()
    until(lambda: c.n_idle() + sum(w["state"] == "BUSY" for w in c.workers().values()) == 2, 20,
          "the workers are back")
    k.ok("ada", "jobs")
    k.make("third", "coordinator")
    k.trusted = k.path("third.pub")
    k.denied("ada", "has another key than", "jobs")
    k.trusted = k.path("coordinator.pub")


def take_key_away(c, k):
    del k.listed["bob"]
    k.write_list()
    c.processes["coordinator"].send_signal(signal.SIGHUP)
    until(lambda: k.run("bob", "jobs").returncode == 4, 10, "the key of bob is worth nothing")
    k.ok("ada", "jobs")


def story():
    """keys: roles, strangers, whose job, a new key of the coordinator, a key that is taken away"""
    c = Cluster(n_workers=2)
    k = configure(c)
    with c:
        path = c.job(steps=100000, workers=2, fsdp=1, ep=2, checkpoint_every=100000)
        job = k.ok("ada", "submit", path).strip()
        c.wait_step(job, 3)
        roles(c, k, job)
        new_coordinator_key(c, k)
        take_key_away(c, k)
        k.ok("ada", "job", "pause", job)
        c.wait(job, "PAUSED")
        expect(c.show(job)["attempt"] == 1, f"the job noticed: {c.show(job)}")
        k.ok("ada", "job", "cancel", job)
        c.wait(job, "CANCELLED")


tell(story)
