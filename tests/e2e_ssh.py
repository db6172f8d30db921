"""launch-ssh.sh with an `ssh` that runs what it is told on this machine, each host with a folder of
its own for temporary files: a worker is killed, Ctrl-C, the same again to the end, what is wrong."""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from cluster import PATIENCE, held_port
from e2e_adapt import BIN, SMALL, SOURCE, adapt, expect, write

SSH = """#!/bin/bash
# ssh [OPTION]... HOST bash -s
host=${*: -3:1}
[ "$host" != away ] || { echo "ssh: connect to host away port 22: No route to host" >&2; exit 255; }
export TMPDIR=$FOLDER/${host#*@} SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
cd / && exec bash -s
"""
HOSTS = "# two machines\none gpus=1 address=127.0.0.1\n\nme@two   address=127.0.0.1 # as planned\n"


class Launch:
    """One run of the script in a session of its own, as a terminal's."""

    def __init__(self, story, *args, **env):
        self.path = os.path.join(story.folder, "out.txt")
        with open(self.path, "w") as f:
            self.process = subprocess.Popen(
                [story.script, *args], env=dict(story.env, **env), stdin=subprocess.DEVNULL,
                stdout=f, stderr=f, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def text(self):
        with open(self.path) as f:
            return f.read()

    def until(self, pattern, seconds=30):
        end = time.monotonic() + seconds * PATIENCE
        while not re.search(pattern, self.text()):
            expect(self.process.poll() is None, f"ended before /{pattern}/: {self.text()}")
            expect(time.monotonic() < end, f"no /{pattern}/: {self.text()}")
            time.sleep(0.05)

    def end(self, seconds=60):
        try:
            return self.process.wait(seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            raise AssertionError(f"does not end: {self.text()}") from None


class Story:
    def __init__(self, folder, port):
        self.folder = folder
        self.out = os.path.join(folder, "run")
        self.script = os.path.join(self.out, "launch-ssh.sh")
        write(folder, "ssh", SSH)
        os.chmod(os.path.join(folder, "ssh"), 0o755)
        for host in ("one", "two", "here"):
            os.mkdir(os.path.join(folder, host))
        self.env = dict(os.environ, FOLDER=folder, TMPDIR=os.path.join(folder, "here"),
                        PATH=f"{BIN}:{os.environ['PATH']}", PORT=str(port),
                        SSH=os.path.join(folder, "ssh"))
        write(os.path.join(folder, "model"), "config.json", SMALL)
        write(folder, "cluster.yaml", "name: two\nnodes: 2\ngpus_per_node: 1\ngpu_memory: 8GB\n"
              "gpu_reserve: 100MB\ndevice: cpu\n")
        adapt(os.path.join(folder, "model"), "--cluster", os.path.join(folder, "cluster.yaml"),
              "--sequence-length", 64, "--out", self.out)
        write(os.path.join(self.out, "data"), "train.bin", b"\x01\0\0\0\x02\0\0\0" * 4096)
        write(self.out, "hosts", HOSTS)
        self.set(global_batch=2, micro_batch=1, warmup_steps=0, every_steps=50)

    def set(self, **values):
        path = os.path.join(self.out, "job.yaml")
        with open(path) as f:
            text = f.read()
        for key, value in values.items():
            text = re.sub(rf"(?m)^( +{key}): .*", rf"\1: {value}", text, count=1)
        write(self.out, "job.yaml", text)

    def daemons(self):
        """Command lines by pid of what runs with a file of this story."""
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/cmdline") as f:
                    line = f.read().split("\0")
            except OSError:
                continue
            if line[0].startswith("ballast-") and self.folder in " ".join(line):
                found[int(entry)] = " ".join(line)
        return found

    def nothing_is_left(self):
        expect(not self.daemons(), f"left behind: {self.daemons()}")
        for host in ("one", "two"):
            there = os.listdir(os.path.join(self.folder, host))
            expect(not there, f"left on host {host}: {there}")

    def newest(self):
        return max(int(n[5:]) for n in os.listdir(os.path.join(self.out, "checkpoints"))
                   if re.fullmatch(r"step-\d+", n))


def a_killed_worker_comes_back(story):
    story.set(steps=1000000)
    run = Launch(story)
    run.until(r"job 1 RUNNING")
    pid = next(p for p, line in story.daemons().items() if "/two/" in line)
    os.kill(pid, signal.SIGKILL)
    run.until(r"two: two-0 ended with exit code 137 and is started again")
    run.until(r"RECOVERING(.*\n)*job 1 RUNNING")
    again = subprocess.run([story.script], env=story.env, capture_output=True, text=True)
    expect(again.returncode == 1 and "runs already" in again.stderr, again)
    status = subprocess.run([story.script, "status"], env=story.env, capture_output=True, text=True)
    expect(status.returncode == 0 and "one-0" in status.stdout, status)
    key = os.path.join(story.folder, "one")
    key = os.path.join(key, os.listdir(key)[0], "worker.key")
    expect(os.stat(key).st_mode & 0o777 == 0o600, "others may read a key")
    os.killpg(run.process.pid, signal.SIGINT)
    expect(run.end() == 130 and "Told to end" in run.text(), run.text())
    story.nothing_is_left()


def the_same_again_goes_on(story):
    done = story.newest()
    story.set(steps=done + 3)
    run = Launch(story)
    expect(run.end() == 0 and f"step {done + 3}/{done + 3}" in run.text(), run.text())
    story.nothing_is_left()


def what_goes_wrong_is_one_line(story):
    write(story.folder, "hosts", "two gpus=1\n" + "away\n")
    programs = os.path.join(story.folder, "programs")
    write(programs, "ballast-worker", "#!/bin/sh\necho ballast-worker 0.0.1\n")
    os.chmod(os.path.join(programs, "ballast-worker"), 0o755)
    hosts = os.path.join(story.folder, "hosts")
    for says, args, env in (
            ("away cannot be used: ssh ended with 255: ssh: connect to host away", [hosts], {}),
            ("is another build: 'ballast-worker 0.0.1', here", [], {"PROGRAMS": programs}),
            ("where the coordinator is, is closed", [], {"ADDRESS": "255.255.255.255"}),
            ("has 0 GPUs, 1 are wanted", [], {"DEVICE": "cuda"})):
        if "GPUs" in says and shutil.which("nvidia-smi"):
            continue
        run = Launch(story, *args, **env)
        expect(run.end() == 1 and says in run.text(), f"{says}: {run.text()}")
        story.nothing_is_left()
    for says, text in (("room for 1 workers on 1 hosts, the job has 2", "one\n"),
                       (":1: 'gpu=2' is neither", "one gpu=2\n"), (":2: one is there twice",
                                                                   "one\none\n")):
        write(story.folder, "hosts", text)
        run = Launch(story, hosts)
        expect(run.end() == 1 and says in run.text() and run.text().count("\n") == 1, run.text())


def a_daemon_is_not_started_for_ever():
    """The part that launch files share, without its pauses."""
    keep = os.path.join(SOURCE, "coordinator", "launch", "keep.sh")
    head = 'tell() { echo "$*"; }; sleep() { :; }; . "$0"; '
    done = subprocess.run(["bash", "-c", head + 'keep w bash -c "exit 3" || echo "gave up"', keep],
                          capture_output=True, text=True, timeout=10 * PATIENCE)
    lines = done.stdout.splitlines()
    expect(len(lines) == 7 and all("w ended with exit code 3" in n for n in lines[:6])
           and "not started again" in lines[5] and lines[6] == "gave up", done)
    daemon = "trap 'echo told; exit' TERM; echo up; while :; do sleep 0.05; done"
    kept = ["bash", "-c", head + 'keep w bash -c "$1"; echo "kept $?"', keep, daemon]
    with subprocess.Popen(kept, stdout=subprocess.PIPE, text=True) as kept:
        expect(kept.stdout.readline() == "up\n", "nothing was started")
        kept.terminate()
        expect(kept.stdout.read() == "told\nkept 0\n", "told to end it does not pass that on")


def main():
    began = time.monotonic()
    folder = tempfile.mkdtemp(prefix="ballast-ssh-", dir="/tmp")  # short, as a socket lies in it
    try:
        a_daemon_is_not_started_for_ever()
        with held_port() as held:
            story = Story(folder, held.getsockname()[1])
            a_killed_worker_comes_back(story)
            the_same_again_goes_on(story)
            what_goes_wrong_is_one_line(story)
    except BaseException:
        logs = os.path.join(folder, "run", "run-ssh")
        for name in sorted(os.listdir(logs)) if os.path.isdir(logs) else []:
            if name.endswith(".log"):
                with open(os.path.join(logs, name), errors="replace") as f:
                    print(f"---- {name}\n{''.join(f.readlines()[-15:])}", file=sys.stderr)
        raise
    shutil.rmtree(folder)
    print(f"passed in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
