"""A rank that is slower than the others holds up all of them: the job says which one it is."""
import re

from cluster import Cluster, expect, tell, until

SLOW = 2       # a worker, and the rank that it gets
BEHIND = 0.15  # seconds for each pass


def story():
    """The reason of a running job names a slow rank, and a line of its log has the numbers"""
    with Cluster(n_workers=4) as c:
        c.kill(f"worker-{SLOW}")
        env = c.env
        c.env = dict(env, BALLAST_FAILPOINT=f"in-batch:slow_{int(BEHIND * 1000)}")
        c.start_worker(SLOW)
        c.env = env
        until(lambda: c.n_idle() == c.n_workers, 40, "every worker idle")
        job = c.submit(c.job(steps=100000, checkpoint_every=100000))
        c.wait_step(job, 1)
        pid = c.trainers(job)
        rank = next(r for r, p in pid.items() if c.daemon_of(p) == f"worker-{SLOW}")
        def reason():  # a busy machine may hold another rank up for a while
            said = c.show(job)["reason"]
            return said if f"rank {rank} is slow" in said else None
        text = until(reason, 90, "the reason names the slow rank")
        said = re.fullmatch(r"rank (\d) is slow: busy itself for (\S+) s of a step, the least busy "
                            r"rank for (\S+) s, for 20 steps", text)
        expect(said and int(said[1]) == rank, f"rank {rank} is slow: {text}")
        expect(float(said[2]) >= BEHIND and float(said[2]) > 1.5 * float(said[3]), text)
        until(lambda: f"busiest={rank}:" in c.run("logs", job).stdout, 20, "a line of the log")
        c.ok("job", "cancel", job)
        c.wait(job, "CANCELLED")


tell(story)
