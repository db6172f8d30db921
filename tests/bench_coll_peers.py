#!/usr/bin/env python3
"""The calls of bench_coll through a peer, timed alike and printed in the same lines

    bench_coll_peers.py gloo WORLD MS [pin]                     starts WORLD processes itself
    mpirun -n WORLD bench_coll_peers.py mpi WORLD MS [pin]"""
import os
import socket
import sys
import time

SIZES = [64, 64000, 500000, 1000000, 2000000, 8000000, 32000000, 64000000]


def pin(rank):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def measure(name, size, call, refresh, barrier, over_max, over_sum, budget, rank, world):
    def once():
        refresh()
        barrier()
        cpu, began = time.process_time(), time.perf_counter()
        call()
        took = (time.perf_counter() - began) * 1e3, (time.process_time() - cpu) * 1e3
        barrier()
        return took
    once()
    first = over_max([once()[0]])[0]
    n = max(5, min(400, int(budget / first)))
    both = [once() for _ in range(n)]
    ms, cpu = over_max([b[0] for b in both]), over_sum([b[1] for b in both])
    if rank == 0:
        print("%s ranks=%d hosts=1 MB=%.3f median_ms=%.3f best_ms=%.3f cpu_ms=%.3f" % (
            name, world, size / 1e6, sorted(ms)[n // 2], min(ms), sorted(cpu)[n // 2]), flush=True)


def gloo(rank, world, budget, port, pinned):
    if pinned:
        pin(rank)
    import torch, torch.distributed as d
    torch.set_num_threads(1)
    d.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank,
                         world_size=world)
    values = torch.arange(SIZES[-1] // 4, dtype=torch.float32) % 1000 * 1e-3 + rank
    x, y = torch.zeros_like(values), torch.zeros_like(values)

    def over(op):
        def f(v):
            t = torch.tensor(v, dtype=torch.float64)
            d.all_reduce(t, op=op)
            return t.tolist()
        return f
    for name in ("all_reduce", "all_to_all", "all_gather", "reduce_scatter"):
        for size in SIZES:
            n = size // 4
            m = n // world
            a, b = x[:n], y[:n]
            part, whole = a[:m], y[:m * world]
            split_a, split_b = list(a[:m * world].chunk(world)), list(whole.chunk(world))
            call = {
                "all_reduce": lambda: d.all_reduce(a),
                "all_to_all": lambda: d.all_to_all_single(whole, a[:m * world]),
                "all_gather": lambda: d.all_gather(split_b, part),
                "reduce_scatter": lambda: d.reduce_scatter(y[:m], split_a),
            }[name]
            try:
                measure(name, size, call, lambda: a.copy_(values[:n]), d.barrier,
                        over(d.ReduceOp.MAX), over(d.ReduceOp.SUM), budget, rank, world)
            except RuntimeError as e:
                if rank == 0:
                    print("# gloo has no", name, str(e)[:60], flush=True)
                break
    d.barrier()
    os._exit(0)


def mpi(budget, pinned):
    from mpi4py import MPI
    import numpy as np
    c = MPI.COMM_WORLD
    rank, world = c.rank, c.size
    if pinned:
        pin(rank)
    values = (np.arange(SIZES[-1] // 4) % 1000 * 1e-3 + rank).astype(np.float32)
    x, y = np.zeros_like(values), np.zeros_like(values)

    def over(op):
        def f(v):
            t = np.array(v)
            c.Allreduce(MPI.IN_PLACE, t, op=op)
            return t.tolist()
        return f
    for name in ("all_reduce", "all_to_all", "all_gather", "reduce_scatter"):
        for size in SIZES:
            n = size // 4
            m = n // world
            a, whole = x[:n], y[:m * world]
            call = {
                "all_reduce": lambda: c.Allreduce(MPI.IN_PLACE, a, op=MPI.SUM),
                "all_to_all": lambda: c.Alltoall(a[:m * world], whole),
                "all_gather": lambda: c.Allgather(a[:m], whole),
                "reduce_scatter": lambda: c.Reduce_scatter_block(a[:m * world], y[:m], op=MPI.SUM),
            }[name]
            measure(name, size, call, lambda: np.copyto(a, values[:n]), c.Barrier, over(MPI.MAX),
                    over(MPI.SUM), budget, rank, world)


def main():
    what, world, budget = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    pinned = "pin" in sys.argv[4:]
    if what == "mpi":
        return mpi(budget, pinned)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = []
    for r in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                gloo(r, world, budget, port, pinned)
            finally:
                os._exit(1)
        children.append(pid)
    bad = 0
    for pid in children:
        bad |= os.waitpid(pid, 0)[1]
    return 1 if bad else 0


sys.exit(main())
