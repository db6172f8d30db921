"""Two jobs share six workers; a third waits and says for what."""
from cluster import Cluster, expect, tell, until


def story():
    """two jobs share six workers, a third waits with a reason and runs later"""
    with Cluster(n_workers=6, hold_before=2) as c:
        c.hold()
        first = c.submit(c.job(name="first", steps=100, workers=4))
        second = c.submit(c.job(name="second", steps=80, workers=2, ep=2))
        third = c.submit(c.job(name="third", steps=10, workers=4))
        until(lambda: len(c.trainers(first)) == 4 and len(c.trainers(second)) == 2, 20,
              "both jobs have their trainers")
        shown = c.show(third)
        expect(shown["state"] == "QUEUED" and "4" in shown["reason"], f"third: {shown}")
        daemons = [c.daemon_of(p) for job in (first, second) for p in c.trainers(job).values()]
        expect(len(set(daemons)) == 6, f"a worker runs two trainers: {daemons}")
        c.let_go()
        for job, n in ((first, 100), (second, 80), (third, 10)):
            c.wait(job, "DONE")
            expect(len(c.steps(job)) == n, f"job {job}: a step is missing")


tell(story)
