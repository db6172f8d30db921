/* coll_span_down.c - the same calls over memory of a device that the host cannot reach
 *
 * Whole tensors pass through host memory of the collectives. That is not bounded by a stage, but a
 * job whose ranks have GPUs on several hosts travels through NCCL unless somebody wishes else. */
#include <errno.h>

#include "worker/coll_span.h"

/* Host memory for what goes down and what comes up. */
static uint8_t *room_of(struct host *h, size_t in_bytes, size_t out_bytes, uint8_t **out_up,
                        struct err *err)
{
    size_t first = (in_bytes + 63) & ~(size_t)63;
    uint8_t *room = span_room(h, &h->span->down, &h->span->down_bytes, first + out_bytes + 64,
                              err);
    *out_up = room ? room + first : NULL;
    return room;
}

static void bring_down(struct host *h, uint8_t *room, const void *in, size_t n_bytes)
{
    if (n_bytes > 0)
        h->coll.dev->ops->to_host(h->coll.dev, room, in, n_bytes);
}

static int take_up(struct host *h, void *out, const uint8_t *room, size_t n_bytes, int rc)
{
    if (rc == 0 && n_bytes > 0)
        h->coll.dev->ops->to_device(h->coll.dev, out, room, n_bytes);
    return rc;
}

int span_down_gather(struct host *h, const struct coll_group *g, enum shm_op op, size_t width,
                     const void *in, size_t n, size_t n_blocks, void *out, struct err *err)
{
    size_t in_bytes = n * n_blocks * width, out_bytes = in_bytes * g->n_ranks;
    uint8_t *up, *down = room_of(h, in_bytes, out_bytes, &up, err);
    if (!down)
        return -ENOMEM;
    bring_down(h, down, in, in_bytes);
    int rc = span_gather(h, g, op, width, down, n, n_blocks, up, err);
    return take_up(h, out, up, out_bytes, rc);
}

static size_t count_rows(const struct coll_group *g, const int64_t *rows)
{
    size_t n = 0;
    for (uint32_t i = 0; i < g->n_ranks; i++)
        n += (size_t)rows[i];
    return n;
}

int span_down_rows(struct host *h, const struct coll_group *g, const void *send,
                   const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                   size_t row_bytes, struct err *err)
{
    size_t in_bytes = count_rows(g, send_rows) * row_bytes;
    size_t out_bytes = count_rows(g, recv_rows) * row_bytes;
    uint8_t *up, *down = room_of(h, in_bytes, out_bytes, &up, err);
    if (!down)
        return -ENOMEM;
    bring_down(h, down, send, in_bytes);
    coll_ticket ticket = 0;
    int rc = span_start_rows(h, g, down, send_rows, up, recv_rows, row_bytes, &ticket, err);
    if (rc == 0 && ticket != 0 && (rc = span_finish(h, ticket, err)) == 0)
        rc = span_reclaim(h, ticket, err);
    return take_up(h, recv, up, out_bytes, rc);
}

int span_down_reduce(struct host *h, const struct coll_group *g, enum shm_op op, uint32_t op_word,
                     const struct fold *fold, void *x, size_t n, struct err *err)
{
    size_t n_bytes = n * fold->width;
    uint8_t *up, *down = room_of(h, n_bytes, 0, &up, err);
    if (!down)
        return -ENOMEM;
    bring_down(h, down, x, n_bytes);
    int rc = span_reduce(h, g, op, op_word, fold, down, n, err);
    return take_up(h, x, down, n_bytes, rc);
}

int span_down_scatter(struct host *h, const struct coll_group *g, uint32_t op_word,
                      const struct fold *fold, const void *in, size_t n, size_t n_blocks,
                      void *out, struct err *err)
{
    size_t out_bytes = n * n_blocks * fold->width, in_bytes = out_bytes * g->n_ranks;
    uint8_t *up, *down = room_of(h, in_bytes, out_bytes, &up, err);
    if (!down)
        return -ENOMEM;
    bring_down(h, down, in, in_bytes);
    int rc = span_scatter(h, g, op_word, fold, down, n, n_blocks, up, err);
    return take_up(h, out, up, out_bytes, rc);
}
