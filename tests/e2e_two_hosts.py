"""A job over two hosts trains as on one, bit by bit, also when a worker is killed and experts move.

Workers that share no memory reach each other through the loopback as if they were on two machines.
"""
import os
import re
import socket

from cluster import Cluster, expect, tell, until

STEPS = 30
HOSTS = {"nodes": ["n0", "n0", "n1", "n1"], "domains": ["a", "a", "b", "b"]}


def submit(c, moves):
    return c.submit(c.job(steps=STEPS, checkpoint_every=10, deterministic=True,
                          more="moe: {bias_update: off}\n"
                               f"rebalance: {{auto: {str(moves).lower()}, window_steps: 5, "
                               "horizon_steps: 1000, min_gain: 0.001}\n"))


def losses(c, job):
    return [step["loss"] for step in c.steps(job)]


def on_one_host():
    with Cluster() as c:
        job = submit(c, moves=False)
        c.wait(job, "DONE")
        expect("hosts" not in c.ok("logs", job), "ranks of one machine see several")
        return losses(c, job)


def listening_ports(pid):
    """Ports on which that process listens."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
        if found:
            inodes.add(found.group(1))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as f:
            for line in f.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def annoy(pid):
    """Strangers talk to a trainer's port: no ZeroMQ at all, some of its greeting, then silence."""
    held = []
    for port in listening_ports(pid):
        greeting = b"\xff" + bytes(8) + b"\x7f\x03"
        for words in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), greeting,
                      greeting + b"\x01NULL" + bytes(48) + b"\x04\x19\x05READY"):
            s = socket.create_connection(("127.0.0.1", port), timeout=5)
            s.sendall(words)
            held.append(s)
    return held


def on_two_hosts(expected):
    with Cluster(**HOSTS, hold_before=14) as c:
        c.hold()
        job = submit(c, moves=True)
        c.wait_step(job, 3)
        trainers = c.trainers(job)
        held = [s for pid in trainers.values() for s in annoy(pid)]
        expect(len(held) >= 4, f"the trainers listen nowhere: {trainers}")
        c.wait_step(job, 13)
        c.kill("worker-2")
        c.let_go()
        until(lambda: not c.trainers(job), 20, "the first attempt has ended")
        n_plans = c.n_plans(job)
        c.hold()
        c.start_worker(2)
        c.let_go_once_planned(job, n_plans)
        c.wait(job, "DONE", 80)
        for s in held:
            s.close()
        expect(c.show(job)["attempt"] == 2, f"{c.show(job)['attempt']} attempts instead of 2")
        expect("the ranks are on 2 hosts" in c.ok("logs", job), "the ranks share memory")
        kinds = [e["kind"] for e in c.events(job)]
        expect("PLACEMENT" in kinds, f"no expert has moved: {kinds}")
        expect(losses(c, job) == expected, "two hosts give other losses than one")
        print(f"{STEPS} steps on two hosts, {kinds.count('PLACEMENT')} migrations, one death, "
              "losses as on one")


def story():
    """two hosts train as one"""
    on_two_hosts(on_one_host())


if __name__ == "__main__":
    tell(story)
