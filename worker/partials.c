/* partials.c - blocks of weight gradients by source, sent home and added in rank order */
#include "worker/partials.h"

#include <errno.h>
#include <stdlib.h>

#include "common/mem.h"
#include "worker/shard_state.h"

struct partials {
    struct shard *s;
    const struct slots *slots;
    const struct slots_layer *l;
    struct dispatch_piece piece;
    struct shard_experts x;
    float  *single; /* (n_devices, stride): the blocks of the slot at hand */
    float  *send, *recv; /* blocks of experts with copies; NULL: none */
    int64_t *send_rows, *recv_rows; /* per member */
    int64_t *send_at; /* (n_copied, n_devices) which block of send; -1: served elsewhere */
    float  **of_slot; /* (n_devices) */
};

/* ---- what travels --------------------------------------------------------------------------- */

static int32_t server_of(const struct partials *p, uint32_t k, uint32_t source)
{
    return p->piece.servers[(size_t)k * p->slots->n_devices + source];
}

static uint32_t home_of(const struct partials *p, uint32_t k)
{
    return p->l->map.home[p->l->copied[k]] / p->slots->n_slots;
}

/* Blocks in the order (home, expert, source); what each member gets and sends. */
static void count_blocks(struct partials *p)
{
    int64_t at = 0;
    uint32_t n = p->slots->n_devices, me = p->slots->me;
    for (uint32_t home = 0; home < n; home++)
        for (uint32_t k = 0; k < p->l->n_copied; k++)
            for (uint32_t m = 0; m < n && home_of(p, k) == home; m++) {
                int32_t slot = server_of(p, k, m);
                uint32_t server = slot >= 0 ? (uint32_t)slot / p->slots->n_slots : n;
                bool is_mine = server == me;
                p->send_at[(size_t)k * n + m] = is_mine ? at++ : -1;
                p->send_rows[home] += is_mine;
                if (home == me && server < n)
                    p->recv_rows[server]++;
            }
}

static int take_blocks(struct partials *p, size_t n, float **out, struct err *err)
{
    void *blocks;
    int rc = shard_buffer_take(p->s, n * p->x.stride * sizeof(float), &blocks, err);
    if (rc == 0)
        *out = blocks;
    return rc;
}

static int take_buffers(struct partials *p, struct err *err)
{
    size_t n_send = 0, n_recv = 0;
    for (uint32_t i = 0; i < p->slots->n_devices; i++) {
        n_send += (size_t)p->send_rows[i];
        n_recv += (size_t)p->recv_rows[i];
    }
    int rc = take_blocks(p, p->slots->n_devices, &p->single, err);
    if (rc == 0 && n_send > 0)
        rc = take_blocks(p, n_send, &p->send, err);
    if (rc == 0 && n_recv > 0)
        rc = take_blocks(p, n_recv, &p->recv, err);
    if (rc == 0 && n_send > 0)
        p->s->dev->ops->zero(p->s->dev, p->send, n_send * p->x.stride * sizeof(float));
    return rc;
}

static void partials_free(struct partials *p)
{
    float *const buffers[] = {p->single, p->send, p->recv};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if (buffers[i])
            shard_buffer_return(p->s, buffers[i]);
    free(p->send_rows);
    free(p->recv_rows);
    free(p->send_at);
    free(p->of_slot);
    free(p);
}

int partials_open(struct shard *s, uint32_t layer, const struct dispatch_piece *piece,
                  const struct shard_experts *x, struct partials **out, struct err *err)
{
    struct partials *p = xcalloc(1, sizeof *p);
    uint32_t n = s->slots->n_devices;
    *p = (struct partials){.s = s, .slots = s->slots, .l = &s->slots->layers[layer],
                           .piece = *piece, .x = *x};
    p->send_rows = xcalloc(n, sizeof *p->send_rows);
    p->recv_rows = xcalloc(n, sizeof *p->recv_rows);
    p->send_at = xcalloc((size_t)p->l->n_copied * n, sizeof *p->send_at);
    p->of_slot = xcalloc(n, sizeof *p->of_slot);
    count_blocks(p);
    int rc = take_buffers(p, err);
    if (rc < 0) {
        partials_free(p);
        return rc;
    }
    *out = p;
    return 0;
}

/* ---- sums ----------------------------------------------------------------------------------- */

static int32_t copied_at(const struct partials *p, uint32_t slot)
{
    int32_t e = p->x.experts[slot];
    return e >= 0 ? p->l->copied_at[e] : -1;
}

static bool serves(const struct partials *p, uint32_t slot, uint32_t source)
{
    const int64_t *blocks = p->piece.blocks + (size_t)slot * p->slots->n_devices;
    return blocks[source + 1] > blocks[source];
}

float *const *partials_of_slot(struct partials *p, uint32_t slot)
{
    uint32_t n = p->slots->n_devices;
    int32_t k = copied_at(p, slot);
    for (uint32_t m = 0; m < n; m++) {
        p->of_slot[m] = NULL;
        if (!serves(p, slot, m))
            continue;
        if (k >= 0) {
            p->of_slot[m] = p->send + (size_t)p->send_at[(size_t)k * n + m] * p->x.stride;
            continue;
        }
        p->of_slot[m] = p->single + (size_t)m * p->x.stride;
        p->s->dev->ops->zero(p->s->dev, p->of_slot[m], p->x.stride * sizeof(float));
    }
    return p->of_slot;
}

static void add(struct partials *p, uint32_t slot, const float *block)
{
    p->s->dev->ops->axpy(p->s->dev, p->x.gradients[slot], 1, block, (int64_t)p->x.stride);
}

void partials_add_single(struct partials *p, uint32_t slot)
{
    for (uint32_t m = 0; m < p->slots->n_devices && copied_at(p, slot) < 0; m++)
        if (serves(p, slot, m))
            add(p, slot, p->of_slot[m]);
}

/* They have come by (server, expert, source); each expert's are added by source. */
static void add_arrived(struct partials *p)
{
    uint32_t n = p->slots->n_devices, me = p->slots->me;
    int64_t *next = xcalloc(n, sizeof *next), at = 0;
    for (uint32_t i = 0; i < n; i++) {
        next[i] = at;
        at += p->recv_rows[i];
    }
    for (uint32_t k = 0; k < p->l->n_copied; k++)
        for (uint32_t m = 0; m < n && home_of(p, k) == me; m++) {
            int32_t slot = server_of(p, k, m);
            if (slot < 0)
                continue;
            int64_t block = next[(uint32_t)slot / p->slots->n_slots]++;
            add(p, p->l->map.home[p->l->copied[k]] % p->slots->n_slots,
                p->recv + (size_t)block * p->x.stride);
        }
    free(next);
}

int partials_close(struct partials *p, struct err *err)
{
    struct coll *c = p->s->coll;
    int rc = 0;
    if (p->l->n_copied > 0)
        rc = coll_all_to_all_rows(c, &p->s->ep, p->send, p->send_rows, p->recv, p->recv_rows,
                                  p->x.stride * sizeof(float), err);
    if (rc == 0 && p->l->n_copied > 0)
        add_arrived(p);
    partials_free(p);
    return rc;
}
