"""A submit whose answer is lost is retried by the client and makes one job."""
import os
import socket
import subprocess
import threading

from cluster import BIN, PATIENCE, Cluster, expect, tell, until

NAME = b"lost-answer"


class Proxy(threading.Thread):
    """Between client and coordinator. Of the first connection that carries the job's name the
    answers are held back; cut() ends it. Later connections pass."""

    def __init__(self, path, to):
        super().__init__(daemon=True)
        self.to = to
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.held = threading.Event()
        self.victim = None
        self.n_connections = 0

    def run(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(self.to)
            self.n_connections += 1
            pair = (client, server)
            threading.Thread(target=self.pass_on, args=(*pair, pair), daemon=True).start()
            threading.Thread(target=self.pass_on, args=(*pair[::-1], pair), daemon=True).start()

    def pass_on(self, source, to, pair):
        seen = b""
        try:
            while data := source.recv(65536):
                if source is pair[0] and not self.victim:
                    seen += data
                    if NAME in seen:
                        self.victim = pair
                        self.held.set()
                if source is pair[1] and self.victim is pair:
                    continue  # the answer is lost
                to.sendall(data)
        except OSError:
            pass
        for s in pair:
            s.close()

    def cut(self):
        self.victim[0].shutdown(socket.SHUT_RDWR)  # pass_on then closes both ends


def story():
    """a submit whose answer is lost and that is retried makes one job"""
    with Cluster(n_workers=1) as c:
        path = os.path.join(c.folder, "proxy.sock")
        proxy = Proxy(path, c.folder + "/coordinator.sock")
        proxy.start()
        job = c.job(name=NAME.decode(), steps=5, workers=1, fsdp=1, ep=1)
        env = dict(c.env, BALLAST_ADDRESS=f"ipc://{path}")
        submit = subprocess.Popen([os.path.join(BIN, "ballast"), "submit", job], env=env,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True)
        expect(proxy.held.wait(10 * PATIENCE), "the submit never came")
        until(lambda: len(c.json("jobs", "-a")["items"]) == 1, 10, "the job is stored")
        expect(submit.poll() is None, "the client believes something without an answer")
        proxy.cut()
        out, err = submit.communicate(timeout=40 * PATIENCE)
        expect(submit.returncode == 0, f"exit {submit.returncode}: {err}")
        expect("1" in out, f"not the job's id: {out}")
        expect(proxy.n_connections >= 2, "it was not sent twice")
        expect(len(c.json("jobs", "-a")["items"]) == 1, "the retry made a second job")
        c.wait(1, "DONE")


tell(story)
