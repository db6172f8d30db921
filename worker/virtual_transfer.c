/* virtual_transfer.c - bytes over the link between two devices, round by round */
#include "worker/virtual_transfer.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "worker/rounds.h"
#include "worker/transfer_parts.h"

struct virtual_transfer {
    struct transfer base;
    struct virtual_place *place;
    uint64_t *sent_bytes; /* (n_devices) */
};

static size_t move_bytes(const struct moves *m, const struct move *x)
{
    size_t n = 0;
    for (int part = 0; part < SLOT_PARTS; part++)
        n += moves_has_part(m, x, part) ? m->part_bytes[part] : 0;
    return n;
}

static double move_seconds(const struct virtual_place *p, uint32_t from, uint32_t to,
                           size_t n_bytes)
{
    const struct cluster *c = p->rates;
    if (p->node[from] == p->node[to])
        return (double)n_bytes / (c->node_gb_per_s * 1e9) + c->call_us * 1e-6;
    return (double)n_bytes / (c->network_gb_per_s * 1e9) + (c->call_us + c->latency_us) * 1e-6;
}

/* Each round takes as long as its slowest move. */
static double run_rounds(struct virtual_transfer *t, uint32_t end, struct transfer_result *r)
{
    const struct moves *m = &t->base.moves;
    uint32_t first = t->base.next_round;
    double *slowest = xcalloc(end - first + 1, sizeof *slowest), sum = 0;
    for (uint32_t i = 0; i < m->n; i++) {
        const struct move *x = &m->move[i];
        if (x->round == ROUND_NONE || x->round < first || x->round >= end)
            continue;
        uint32_t from = moves_device(m, x->from);
        size_t n_bytes = move_bytes(m, x);
        double s = move_seconds(t->place, from, moves_device(m, x->to), n_bytes);
        double *most = &slowest[x->round - first];
        *most = s > *most ? s : *most;
        t->sent_bytes[from] += n_bytes;
        r->sent_bytes += n_bytes;
        r->link_seconds += s;
    }
    for (uint32_t i = 0; i < end - first; i++)
        sum += slowest[i];
    free(slowest);
    return sum;
}

static int ahead(struct transfer *base, uint32_t end, double *out_seconds, struct err *err)
{
    (void)err;
    *out_seconds = run_rounds((struct virtual_transfer *)base, end, &base->ahead);
    return 0;
}

static int run(struct transfer *base, uint32_t end, struct transfer_result *r, struct err *err)
{
    struct virtual_transfer *t = (struct virtual_transfer *)base;
    (void)err;
    r->seconds = run_rounds(t, end, r);
    transfer_put_in_force(base);
    if (r->is_last)
        memcpy(t->place->sent_bytes, t->sent_bytes,
               base->slots->n_devices * sizeof *t->sent_bytes);
    return 0;
}

static void destroy(struct transfer *base)
{
    struct virtual_transfer *t = (struct virtual_transfer *)base;
    transfer_fini(base);
    free(t->sent_bytes);
    free(t);
}

static const struct transfer_ops ops = {.ahead = ahead, .run = run, .destroy = destroy};

int virtual_transfer_create(struct virtual_place *place, struct slots *slots, struct slots *to,
                            uint32_t *const *stage, struct transfer **out)
{
    struct virtual_transfer *t = xcalloc(1, sizeof *t);
    transfer_init(&t->base, &ops, slots, to, stage, place->part_bytes);
    t->place = place;
    t->sent_bytes = xcalloc(slots->n_devices, sizeof *t->sent_bytes);
    *out = &t->base;
    return 0;
}
