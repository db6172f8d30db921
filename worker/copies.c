/* copies.c - what goes between an expert's home and its other copies after every step
 *
 * Weights go out, gradients come home: slices of all layers' copies, packed in one exchange inside
 * the expert group. Both ends walk the maps in the same order (layer, slot), so that nothing but
 * the slices travels. */
#include <errno.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/shard_state.h"

/* The slices of one kind of block that go from each member to each other, as seen from here. */
struct exchange {
    struct shard *s;
    int64_t *send_rows, *recv_rows; /* per member */
    uint64_t slice;
};

typedef void (*visit_fn)(struct exchange *x, uint64_t at, uint32_t peer, void *arg);

/* Visits, for peers ascending and then (layer, slot), what this rank shares with each peer:
 * homes_here: my experts' copies there; else my copies of experts that have their home there. at
 * is where my slice lies. */
static void walk(struct exchange *x, bool homes_here, visit_fn visit, void *arg)
{
    struct shard *s = x->s;
    const struct slots *slots = s->slots;
    for (uint32_t peer = 0; peer < slots->n_devices; peer++)
        for (uint32_t l = 0; l < slots->n_layers; l++) {
            const struct placement *map = &slots->layers[l].map;
            uint32_t holder = homes_here ? peer : slots->me, owner = homes_here ? slots->me : peer;
            if (slots->layers[l].n_copied == 0)
                continue;
            for (uint32_t i = holder * slots->n_slots; i < (holder + 1) * slots->n_slots; i++) {
                int32_t e = map->expert[i];
                if (e < 0 || map->home[e] == i || slots_home(slots, l, (uint32_t)e) != owner)
                    continue;
                uint32_t mine = homes_here ? map->home[e] : i;
                visit(x, shard_slot_at(s, l, mine % slots->n_slots), peer, arg);
            }
        }
}

static void count_one(struct exchange *x, uint64_t at, uint32_t peer, void *arg)
{
    int64_t *rows = arg;
    (void)x;
    (void)at;
    rows[peer]++;
}

struct cursor {
    float *block, *packed; /* packed: the next slice */
};

static void pack_one(struct exchange *x, uint64_t at, uint32_t peer, void *arg)
{
    struct cursor *c = arg;
    (void)peer;
    x->s->dev->ops->copy(x->s->dev, c->packed, c->block + at, x->slice * sizeof(float));
    c->packed += x->slice;
}

static void assign_one(struct exchange *x, uint64_t at, uint32_t peer, void *arg)
{
    struct cursor *c = arg;
    (void)peer;
    x->s->dev->ops->copy(x->s->dev, c->block + at, c->packed, x->slice * sizeof(float));
    c->packed += x->slice;
}

static void add_one(struct exchange *x, uint64_t at, uint32_t peer, void *arg)
{
    struct cursor *c = arg;
    (void)peer;
    x->s->dev->ops->axpy(x->s->dev, c->block + at, 1, c->packed, (int64_t)x->slice);
    c->packed += x->slice;
}

static int reserve(struct shard *s, size_t n_send, size_t n_recv, struct err *err)
{
    if (n_send > s->n_copy_send) {
        float *floats = shard_alloc(s, n_send);
        if (!floats)
            return err_set(err, -ENOMEM, "no memory for %zu MiB of experts' copies",
                           n_send * sizeof(float) >> 20);
        s->copy_send = floats;
        s->n_copy_send = n_send;
    }
    if (n_recv > s->n_copy_recv) {
        float *floats = s->dev->ops->alloc(s->dev, n_recv * sizeof(float));
        if (!floats)
            return err_set(err, -ENOMEM, "no memory for %zu MiB of experts' copies",
                           n_recv * sizeof(float) >> 20);
        if (s->copy_recv)
            s->dev->ops->free(s->dev, s->copy_recv);
        s->copy_recv = floats;
        s->n_copy_recv = n_recv;
    }
    return 0;
}

/* block's slices, from homes to copies or back; take says what the receiver does with them. */
static int exchange(struct shard *s, float *block, bool from_homes, visit_fn take, struct err *err)
{
    uint32_t n = s->slots->n_devices;
    struct exchange x = {.s = s, .send_rows = xcalloc(n, sizeof *x.send_rows),
                         .recv_rows = xcalloc(n, sizeof *x.recv_rows),
                         .slice = shard_slice(s->map->expert_count, s->expert_shard.n_ranks)};
    int64_t n_send = 0, n_recv = 0;
    walk(&x, from_homes, count_one, x.send_rows);
    walk(&x, !from_homes, count_one, x.recv_rows);
    for (uint32_t i = 0; i < n; i++) {
        n_send += x.send_rows[i];
        n_recv += x.recv_rows[i];
    }
    s->coll->layer = -1;
    int rc = reserve(s, (size_t)n_send * x.slice, (size_t)n_recv * x.slice, err);
    if (rc == 0) {
        walk(&x, from_homes, pack_one, &(struct cursor){block, s->copy_send});
        rc = s->coll->ops->all_to_all_rows(s->coll, &s->ep, s->copy_send, x.send_rows,
                                           s->copy_recv, x.recv_rows, x.slice * sizeof(float), err);
    }
    if (rc == 0)
        walk(&x, !from_homes, take, &(struct cursor){block, s->copy_recv});
    free(x.send_rows);
    free(x.recv_rows);
    return rc;
}

int copies_send_gradients(struct shard *s, struct err *err)
{
    return s->slots->n_copies > 0 ? exchange(s, s->gradients, false, add_one, err) : 0;
}

int shard_refresh_copies(struct shard *s, struct err *err)
{
    uint64_t began = clock_now_ns();
    int rc = s->slots->n_copies > 0 ? exchange(s, s->weights, true, assign_one, err) : 0;
    s->gather_ns += clock_now_ns() - began;
    return rc;
}
