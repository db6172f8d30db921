"""Workers of several nodes on one machine: how tokens travel between them changes no bit."""
from cluster import Cluster, expect, tell

WAYS = (", hierarchical_all_to_all: off, overlap: false", ", hierarchical_all_to_all: off",
        ", hierarchical_all_to_all: on, overlap: false", "")


def losses(c, way, **job):
    """Of a whole run."""
    i = c.submit(c.job(steps=6, checkpoint_every=6, parallel=way, **job))
    c.wait(i, "DONE")
    return [(step["loss"], step["grad_norm"]) for step in c.steps(i)]


def alike(c, **job):
    first = losses(c, WAYS[0], **job)
    expect(len(first) == 6, f"{len(first)} steps of 6")
    for way in WAYS[1:]:
        other = losses(c, way, **job)
        expect(other == first, f"with '{way[2:]}' {other}, with '{WAYS[0][2:]}' {first}")


def story():
    """nodes of two workers each: tokens that go by way of one rank of a node train the same"""
    with Cluster(n_workers=4, nodes=["a", "a", "b", "b"]) as c:
        alike(c)
        alike(c, deterministic=True, fsdp=4)


tell(story)
