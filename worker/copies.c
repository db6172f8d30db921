/* copies.c - what goes between an expert's home and its other copies after every step
 *
 * Weights go out, gradients come home: slices of all layers' copies, packed in one exchange inside
 * the expert group. Both ends walk the maps in the same order (layer, slot), so that nothing but
 * the slices travels. */
#include <errno.h>
#include <stdlib.h>

#include "common/mem.h"
#include "worker/shard_state.h"

/* Slices of one part of slots that go from each member to each other, as seen from here. */
struct exchange {
    struct shard *s;
    enum slot_part part;
    int64_t *send_rows, *recv_rows; /* per member */
    size_t   row_bytes;
};

typedef void (*visit_fn)(struct exchange *x, void *slice, uint32_t peer, void *arg);

/* Visits, for peers ascending and then (layer, slot), what this rank shares with each peer:
 * homes_here: my experts' copies there; else my copies of experts that have their home there.
 * slice is mine. */
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
                visit(x, shard_slot(s, l, mine % slots->n_slots, x->part), peer, arg);
            }
        }
}

static void count_one(struct exchange *x, void *slice, uint32_t peer, void *arg)
{
    int64_t *rows = arg;
    (void)x;
    (void)slice;
    rows[peer]++;
}

/* arg: where the next packed slice lies. */
static void *next_packed(struct exchange *x, void *arg)
{
    char **at = arg, *packed = *at;
    *at += x->row_bytes;
    return packed;
}

static void pack_one(struct exchange *x, void *slice, uint32_t peer, void *arg)
{
    (void)peer;
    x->s->dev->ops->copy(x->s->dev, next_packed(x, arg), slice, x->row_bytes);
}

static void assign_one(struct exchange *x, void *slice, uint32_t peer, void *arg)
{
    (void)peer;
    x->s->dev->ops->copy(x->s->dev, slice, next_packed(x, arg), x->row_bytes);
}

static void add_one(struct exchange *x, void *slice, uint32_t peer, void *arg)
{
    (void)peer;
    x->s->dev->ops->axpy(x->s->dev, slice, 1, next_packed(x, arg),
                         (int64_t)(x->row_bytes / sizeof(float)));
}

static int full(size_t n_bytes, struct err *err)
{
    return err_set(err, -ENOMEM, "no memory for %zu MiB of experts' copies", n_bytes >> 20);
}

static int reserve(struct shard *s, size_t n_send, size_t n_recv, struct err *err)
{
    if (n_send > s->n_copy_send) {
        void *send = shard_alloc(s, n_send);
        if (!send)
            return full(n_send, err);
        shard_free(s, s->copy_send);
        s->copy_send = send;
        s->n_copy_send = n_send;
    }
    if (n_recv > s->n_copy_recv) {
        void *recv = s->dev->ops->alloc(s->dev, n_recv);
        if (!recv)
            return full(n_recv, err);
        if (s->copy_recv)
            s->dev->ops->free(s->dev, s->copy_recv);
        s->copy_recv = recv;
        s->n_copy_recv = n_recv;
    }
    return 0;
}

/* 0 where there is nothing to send. */
static size_t row_bytes_of(const struct shard *s, enum slot_part part)
{
    for (uint32_t l = 0; s->slots->n_copies > 0 && l < s->slots->n_layers; l++)
        if (slots_is_sparse(s->slots, l))
            return shard_slot_bytes(s, l, part);
    return 0;
}

/* From homes to copies or back; take says what the receiver does with a slice. */
static int exchange(struct shard *s, enum slot_part part, bool from_homes, visit_fn take,
                    struct err *err)
{
    uint32_t n = s->slots->n_devices;
    struct exchange x = {.s = s, .part = part, .row_bytes = row_bytes_of(s, part),
                         .send_rows = xcalloc(n, sizeof *x.send_rows),
                         .recv_rows = xcalloc(n, sizeof *x.recv_rows)};
    int64_t n_send = 0, n_recv = 0;
    walk(&x, from_homes, count_one, x.send_rows);
    walk(&x, !from_homes, count_one, x.recv_rows);
    for (uint32_t i = 0; i < n; i++) {
        n_send += x.send_rows[i];
        n_recv += x.recv_rows[i];
    }
    s->coll->layer = -1;
    int rc = reserve(s, (size_t)n_send * x.row_bytes, (size_t)n_recv * x.row_bytes, err);
    char *packed = s->copy_send, *arrived = s->copy_recv;
    if (rc == 0) {
        walk(&x, from_homes, pack_one, &packed);
        rc = coll_all_to_all_rows(s->coll, &s->ep, s->copy_send, x.send_rows, s->copy_recv,
                                  x.recv_rows, x.row_bytes, err);
    }
    if (rc == 0)
        walk(&x, !from_homes, take, &arrived);
    free(x.send_rows);
    free(x.recv_rows);
    return rc;
}

int copies_send_part(struct shard *s, enum slot_part part, struct err *err)
{
    return row_bytes_of(s, part) > 0 ? exchange(s, part, true, assign_one, err) : 0;
}

int copies_send_gradients(struct shard *s, struct err *err)
{
    return row_bytes_of(s, SLOT_GRADIENT) > 0 ? exchange(s, SLOT_GRADIENT, false, add_one, err) : 0;
}
