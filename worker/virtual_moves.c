/* virtual_moves.c - bytes over the link between two devices, round by round */
#include "worker/virtual_moves.h"

#include <stdlib.h>

#include "common/mem.h"
#include "worker/rounds.h"

static size_t move_bytes(const struct moves *m, const struct move *x)
{
    size_t n = 0;
    for (int part = 0; part < SLOT_PARTS; part++)
        n += moves_has_part(m, x, part) ? m->part_bytes[part] : 0;
    return n;
}

static double move_seconds(const struct virtual_links *l, uint32_t from, uint32_t to,
                           size_t n_bytes)
{
    const struct cluster *c = l->rates;
    if (l->node[from] == l->node[to])
        return (double)n_bytes / (c->node_gb_per_s * 1e9) + c->call_us * 1e-6;
    return (double)n_bytes / (c->network_gb_per_s * 1e9) + (c->call_us + c->latency_us) * 1e-6;
}

double virtual_rounds(const struct moves *m, const struct virtual_links *links, uint32_t first,
                      uint32_t last, uint64_t *sent, struct transfer_result *moved)
{
    double *slowest = xcalloc(last - first + 1, sizeof *slowest), sum = 0;
    for (uint32_t i = 0; i < m->n; i++) {
        const struct move *x = &m->move[i];
        if (x->round == ROUND_NONE || x->round < first || x->round >= last)
            continue;
        uint32_t from = moves_device(m, x->from);
        size_t n_bytes = move_bytes(m, x);
        double s = move_seconds(links, from, moves_device(m, x->to), n_bytes);
        double *most = &slowest[x->round - first];
        *most = s > *most ? s : *most;
        sent[from] += n_bytes;
        moved->sent_bytes += n_bytes;
        moved->link_seconds += s;
    }
    for (uint32_t r = 0; r < last - first; r++)
        sum += slowest[r];
    free(slowest);
    return sum;
}
