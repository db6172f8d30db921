"""Workers of several nodes on one machine: how tokens travel between them changes no bit."""
import re

from cluster import Cluster, expect, tell

WAYS = (", hierarchical_all_to_all: off, overlap: false", ", hierarchical_all_to_all: off",
        ", hierarchical_all_to_all: on, overlap: false", "")


def run(c, way, **job):
    """Losses of a whole run, and the rows that rank 0 sent to other nodes."""
    i = c.submit(c.job(steps=6, checkpoint_every=6, parallel=way, **job))
    c.wait(i, "DONE")
    sent = re.search(r"rank 0 sent \d+ rows .* (\d+) of them to other nodes, and",
                     c.ok("logs", i, "--rank", 0))
    expect(sent, "no line about rows that were sent")
    return [(step["loss"], step["grad_norm"]) for step in c.steps(i)], int(sent.group(1))


def alike(c, **job):
    first, n_straight = run(c, WAYS[0], **job)
    expect(len(first) == 6, f"{len(first)} steps of 6")
    for way in WAYS[1:]:
        other, n = run(c, way, **job)
        expect(other == first, f"with '{way[2:]}' {other}, with '{WAYS[0][2:]}' {first}")
        fewer = "off" not in way
        expect(0 < n < n_straight if fewer else n == n_straight,
               f"{n} rows to other nodes with '{way[2:]}', {n_straight} straight")
    print(f"rows to other nodes: {n_straight} straight, {n} by way of one rank")


def story():
    """nodes of two workers each: tokens that go by way of one rank of a node train the same"""
    with Cluster(n_workers=4, nodes=["a", "a", "b", "b"]) as c:
        alike(c)
        alike(c, deterministic=True, fsdp=4)


tell(story)
