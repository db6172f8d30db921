/* dispatch_cut.c - who serves how many pairs of a plan, and in how many pieces they go
 *
 * From counts that all ranks have, so that all cut alike. A piece has the same part of what every
 * source has for every slot: the tokens of a chunk may be few for all ranks but one, and a cut by
 * tokens would need to know which. What a piece brings is then bounded by what the chunk does. */
#include "worker/dispatch_state.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

/* ---- who serves what ------------------------------------------------------------------------ */

static int by_size(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}

/* Of a chunk what would meet on a rank that had the most wanted experts: the same whoever has
 * them. */
static int64_t hottest_rows(const struct dispatch_plan *p, const struct shares_counts *counts)
{
    struct dispatch *d = p->d;
    int64_t n = 0;
    for (uint32_t e = 0; e < d->n_experts; e++) {
        d->loads[e] = 0;
        for (uint32_t m = 0; m < d->ep.n_ranks; m++)
            d->loads[e] += shares_count(counts, m, e);
    }
    qsort(d->loads, d->n_experts, sizeof *d->loads, by_size);
    for (int64_t i = 0; i < dispatch_cut_slots(d); i++)
        n += d->loads[i];
    return n;
}

/* Who serves how many pairs of each chunk; returns how many of one come to any rank at most. */
static int64_t share_pairs(struct dispatch_plan *p, uint32_t layer)
{
    struct dispatch *d = p->d;
    const struct slots *slots = d->config.slots;
    bool is_deterministic = d->config.dev->deterministic;
    bool whole = is_deterministic && slots->layers[layer].n_copied > 0;
    size_t n_servers = (size_t)d->ep.n_ranks * d->n_experts;
    int64_t most = 0;
    if (whole && !p->servers)
        p->servers = xcalloc(DISPATCH_CHUNKS_MAX * n_servers, sizeof *p->servers);
    memset(d->device_rows, 0, d->ep.n_ranks * sizeof *d->device_rows);
    for (uint32_t c = 0; c < p->n_chunks; c++) {
        struct shares_counts counts = {d->counts + (size_t)c * d->n_experts,
                                       (size_t)p->n_chunks * d->n_experts};
        int64_t n = shares_rows(d->shares, slots, layer, &counts, whole,
                                d->chunk_slots + (size_t)c * d->n_total,
                                d->chunk_arrived + (size_t)c * d->n_total, d->device_rows,
                                whole ? p->servers + c * n_servers : NULL);
        if (is_deterministic)
            n = hottest_rows(p, &counts);
        most = n > most ? n : most;
    }
    p->most_rows = 0;
    for (uint32_t m = 0; m < d->ep.n_ranks; m++)
        p->most_rows = d->device_rows[m] > p->most_rows ? d->device_rows[m] : p->most_rows;
    return most;
}

/* ---- pieces --------------------------------------------------------------------------------- */

/* In how many pieces a chunk goes, and how many of them are told of at once. Of each block's rows a
 * piece has the n_cuts-th part, rounded, so that a piece may have one more for each block. */
static void count_pieces(struct dispatch_plan *p, int64_t most)
{
    const struct dispatch *d = p->d;
    int64_t n_blocks = dispatch_n_blocks(d), room = d->piece_rows - n_blocks, n_cuts = 1;
    if (room < (d->piece_rows + 1) / 2) /* more tokens than were planned for */
        room = (d->piece_rows + 1) / 2;
    if (dispatch_travels(d) && d->piece_rows > 0 && most > d->piece_rows)
        n_cuts = (most + room - 1) / room;
    p->n_cuts = (uint32_t)n_cuts;
    p->n_pieces = p->n_told = p->n_chunks * p->n_cuts;
    if (d->rows_max == 0 || p->most_rows <= d->rows_max)
        return;
    int64_t n_told = d->rows_max / (most / n_cuts + n_blocks);
    if (n_told < p->n_told)
        p->n_told = n_told > 0 ? (uint32_t)n_told : 1;
}

void dispatch_count_pieces(struct dispatch_plan *p, uint32_t layer)
{
    count_pieces(p, share_pairs(p, layer));
}

static int64_t cut(int64_t n, uint32_t i, uint32_t n_cuts)
{
    return n * (i + 1) / n_cuts - n * i / n_cuts;
}

void dispatch_cut_pairs(struct dispatch_plan *p)
{
    const struct dispatch *d = p->d;
    for (uint32_t i = 0; i < p->n_pieces; i++) {
        size_t at = (size_t)i * d->n_total, of = (size_t)(i / p->n_cuts) * d->n_total;
        for (uint32_t k = 0; k < d->n_total; k++) {
            p->to_slot[at + k] = cut(d->chunk_slots[of + k], i % p->n_cuts, p->n_cuts);
            p->arrived[at + k] = cut(d->chunk_arrived[of + k], i % p->n_cuts, p->n_cuts);
        }
    }
}
