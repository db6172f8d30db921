/* nccl_plain.c - one blocking communicator, and each operation as one plain call */
#include "tests/nccl_plain.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <nccl.h>

#include "kernels/cuda.h"

struct plain {
    ncclComm_t comm;
    cudaStream_t stream;
    int rank, world;
};

static void must(ncclResult_t r, const char *what)
{
    if (r == ncclSuccess)
        return;
    fprintf(stderr, "plain NCCL: %s: %s\n", what, ncclGetErrorString(r));
    exit(1);
}

struct plain *plain_open(struct coll *host, struct device *dev)
{
    struct plain *p = calloc(1, sizeof *p);
    ncclUniqueId id;
    int32_t mine[sizeof id / 4] = {0}, *all = calloc(host->world, sizeof mine);
    if (!p || !all)
        abort();
    *p = (struct plain){.stream = cuda_stream(dev), .rank = (int)host->rank,
                        .world = (int)host->world};
    if (p->rank == 0) {
        must(ncclGetUniqueId(&id), "making an id");
        memcpy(mine, &id, sizeof id);
    }
    if (host->ops->all_gather_i32(host, &host->world_group, mine, sizeof id / 4, all, NULL) < 0)
        exit(1);
    memcpy(&id, all, sizeof id);
    free(all);
    must(ncclCommInitRank(&p->comm, p->world, id, p->rank), "opening");
    return p;
}

void plain_close(struct plain *p)
{
    ncclCommDestroy(p->comm);
    free(p);
}

static void exchange(struct plain *p, const float *in, float *out, size_t n)
{
    must(ncclGroupStart(), "a group");
    for (int i = 0; i < p->world; i++) {
        must(ncclSend(in + (size_t)i * n, n, ncclFloat32, i, p->comm, p->stream), "send");
        must(ncclRecv(out + (size_t)i * n, n, ncclFloat32, i, p->comm, p->stream), "receive");
    }
    must(ncclGroupEnd(), "a group");
}

static void move(struct plain *p, const float *in, float *out, size_t n)
{
    int next = (p->rank + 1) % p->world, last = (p->rank + p->world - 1) % p->world;
    must(ncclGroupStart(), "a group");
    must(ncclSend(in, n, ncclFloat32, next, p->comm, p->stream), "send");
    must(ncclRecv(out, n, ncclFloat32, last, p->comm, p->stream), "receive");
    must(ncclGroupEnd(), "a group");
}

void plain_call(struct plain *p, enum plain_op op, const float *in, float *out, size_t n)
{
    switch (op) {
    case PLAIN_ALL_GATHER:
        must(ncclAllGather(in, out, n, ncclFloat32, p->comm, p->stream), "all_gather");
        break;
    case PLAIN_REDUCE_SCATTER:
        must(ncclReduceScatter(in, out, n, ncclFloat32, ncclSum, p->comm, p->stream),
             "reduce_scatter");
        break;
    case PLAIN_ALL_REDUCE:
        must(ncclAllReduce(out, out, n, ncclFloat32, ncclSum, p->comm, p->stream), "all_reduce");
        break;
    case PLAIN_ALL_TO_ALL:
        exchange(p, in, out, n);
        break;
    case PLAIN_MOVE:
        move(p, in, out, n);
        break;
    }
}
