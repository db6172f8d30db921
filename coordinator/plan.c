/* plan - the difference of two placements as moves in rounds, and renaming that keeps it small
 *
 * Moves are the edges of a graph from senders to receivers; rounds are its edge colours. Such a
 * graph needs as many colours as its busiest end has edges, and an alternating path finds them.
 * Renaming devices is an assignment problem on how many experts two devices have in common. */
#include "coordinator/plan.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define NONE UINT32_MAX
#define ASSIGN_MAX 256 /* devices; above, renaming is greedy */

/* ---- moves ----------------------------------------------------------------------------------- */

/* Where to get weights: a device of the same node if one has them, the one that sends least. */
static uint32_t choose_source(const struct placement *from, const uint32_t *n_sends,
                              uint32_t per_node, uint32_t expert, uint32_t to_device,
                              const uint32_t *copy_first, const uint32_t *copy)
{
    uint32_t best = from->home[expert];
    for (uint32_t i = copy_first[expert]; i < copy_first[expert + 1]; i++) {
        uint32_t g = copy[i] / from->n_slots, b = best / from->n_slots;
        bool near = g / per_node == to_device / per_node;
        bool best_near = b / per_node == to_device / per_node;
        if (near > best_near || (near == best_near && n_sends[g] < n_sends[b]))
            best = copy[i];
    }
    return best;
}

static void index_copies(const struct placement *p, uint32_t *first, uint32_t *copy)
{
    for (uint32_t s = 0; s < placement_n_total(p); s++)
        if (p->expert[s] != PLACEMENT_EMPTY)
            first[p->expert[s] + 1]++;
    for (uint32_t e = 0; e < p->n_experts; e++)
        first[e + 1] += first[e];
    uint32_t *next = xmemdup(first, p->n_experts * sizeof *next);
    for (uint32_t s = 0; s < placement_n_total(p); s++)
        if (p->expert[s] != PLACEMENT_EMPTY)
            copy[next[p->expert[s]]++] = s;
    free(next);
}

static void list_moves(struct plan *p, const struct placement *from, const struct placement *to,
                       uint32_t per_node, const struct plan_costs *costs)
{
    uint32_t *first = xcalloc(from->n_experts + 1, sizeof *first);
    uint32_t *copy = xcalloc(placement_n_total(from), sizeof *copy);
    uint32_t *n_sends = xcalloc(from->n_devices, sizeof *n_sends);
    index_copies(from, first, copy);
    p->move = xcalloc(placement_n_total(to), sizeof *p->move);
    for (uint32_t s = 0; s < placement_n_total(to); s++) {
        if (to->expert[s] == PLACEMENT_EMPTY)
            continue;
        uint32_t e = (uint32_t)to->expert[s], g = s / to->n_slots;
        bool comes = placement_find(from, g, e) < 0;
        bool home_comes = to->home[e] == s && from->home[e] / from->n_slots != g;
        if (!comes && !home_comes)
            continue;
        uint32_t source = home_comes ? from->home[e]
                                     : choose_source(from, n_sends, per_node, e, g, first, copy);
        n_sends[source / from->n_slots]++;
        p->move[p->n_moves++] = (struct plan_move){
            .expert = e, .from = source, .to = s, .with_weights = comes, .with_state = home_comes,
            .round = NONE, .n_bytes = (comes ? costs->weight_bytes : 0) +
                                      (home_comes ? costs->state_bytes : 0) };
    }
    free(n_sends);
    free(copy);
    free(first);
}

/* ---- rounds ---------------------------------------------------------------------------------- */

struct rounds {
    uint32_t  n;    /* colours */
    uint32_t *send; /* (n_devices, n) the move a device sends in a round, or NONE */
    uint32_t *receive;
};

static uint32_t free_round(const uint32_t *row, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++)
        if (row[r] == NONE)
            return r;
    assert(!"a device has more moves than rounds");
    return 0;
}

static uint32_t *at_sender(const struct rounds *r, const struct plan_move *m, uint32_t n_slots,
                           uint32_t round)
{
    return &r->send[(size_t)(m->from / n_slots) * r->n + round];
}

static uint32_t *at_receiver(const struct rounds *r, const struct plan_move *m, uint32_t n_slots,
                             uint32_t round)
{
    return &r->receive[(size_t)(m->to / n_slots) * r->n + round];
}

/* Frees round a at the receiver of `first`: the moves on the path that alternates between rounds a
 * and b from there change places. The path cannot end at a sender that is free in a. */
static void swap_path(struct plan *p, const struct rounds *r, uint32_t n_slots, uint32_t first,
                      uint32_t a, uint32_t b, uint32_t *path)
{
    uint32_t n = 0, now = a, other = b;
    for (uint32_t m = first; m != NONE;) {
        path[n] = m;
        m = n++ % 2 == 0 ? *at_sender(r, &p->move[m], n_slots, other)
                         : *at_receiver(r, &p->move[m], n_slots, other);
        uint32_t t = now;
        now = other;
        other = t;
    }
    for (uint32_t i = 0; i < n; i++) {
        *at_sender(r, &p->move[path[i]], n_slots, p->move[path[i]].round) = NONE;
        *at_receiver(r, &p->move[path[i]], n_slots, p->move[path[i]].round) = NONE;
    }
    for (uint32_t i = 0; i < n; i++) {
        struct plan_move *m = &p->move[path[i]];
        m->round = m->round == a ? b : a;
        *at_sender(r, m, n_slots, m->round) = path[i];
        *at_receiver(r, m, n_slots, m->round) = path[i];
    }
}

static uint32_t busiest(const struct plan *p, uint32_t n_devices, uint32_t n_slots)
{
    uint32_t *n = xcalloc(2 * (size_t)n_devices, sizeof *n), max = 0;
    for (uint32_t i = 0; i < p->n_moves; i++) {
        uint32_t sends = ++n[p->move[i].from / n_slots];
        uint32_t receives = ++n[n_devices + p->move[i].to / n_slots];
        max = sends > max ? sends : max;
        max = receives > max ? receives : max;
    }
    free(n);
    return max;
}

static int bigger_first(const void *a, const void *b)
{
    const struct plan_move *x = a, *y = b;
    if (x->n_bytes != y->n_bytes)
        return x->n_bytes > y->n_bytes ? -1 : 1;
    return x->to < y->to ? -1 : x->to > y->to;
}

static void assign_rounds(struct plan *p, uint32_t n_devices, uint32_t n_slots)
{
    struct rounds r = { .n = busiest(p, n_devices, n_slots) };
    uint32_t *path = xcalloc(p->n_moves, sizeof *path);
    size_t n_cells = (size_t)n_devices * r.n;
    r.send = xcalloc(n_cells, sizeof *r.send);
    r.receive = xcalloc(n_cells, sizeof *r.receive);
    for (size_t i = 0; i < n_cells; i++)
        r.send[i] = r.receive[i] = NONE;
    qsort(p->move, p->n_moves, sizeof *p->move, bigger_first);
    for (uint32_t i = 0; i < p->n_moves; i++) {
        struct plan_move *m = &p->move[i];
        uint32_t a = free_round(at_sender(&r, m, n_slots, 0), r.n);
        uint32_t b = free_round(at_receiver(&r, m, n_slots, 0), r.n);
        uint32_t blocker = *at_receiver(&r, m, n_slots, a);
        if (blocker != NONE)
            swap_path(p, &r, n_slots, blocker, a, b, path);
        m->round = a;
        *at_sender(&r, m, n_slots, a) = *at_receiver(&r, m, n_slots, a) = i;
    }
    p->n_rounds = r.n;
    free(r.receive);
    free(r.send);
    free(path);
}

static double time_rounds(const struct plan *p, uint32_t per_node, uint32_t n_slots,
                          const struct plan_costs *costs)
{
    double *longest = xcalloc(p->n_rounds, sizeof *longest), sum = 0;
    for (uint32_t i = 0; i < p->n_moves; i++) {
        const struct plan_move *m = &p->move[i];
        bool near = m->from / n_slots / per_node == m->to / n_slots / per_node;
        double s = (double)m->n_bytes / (near ? costs->link_bytes_s : costs->node_link_bytes_s);
        longest[m->round] = fmax(longest[m->round], s);
    }
    for (uint32_t r = 0; r < p->n_rounds; r++)
        sum += longest[r];
    free(longest);
    return sum;
}

void plan_init(struct plan *p, const struct placement *from, const struct placement *to,
               uint32_t n_nodes, const struct plan_costs *costs)
{
    uint32_t per_node = from->n_devices / n_nodes;
    *p = (struct plan){ 0 };
    list_moves(p, from, to, per_node, costs);
    assign_rounds(p, from->n_devices, from->n_slots);
    for (uint32_t i = 0; i < p->n_moves; i++)
        p->n_bytes += p->move[i].n_bytes;
    p->seconds = time_rounds(p, per_node, from->n_slots, costs);
}

void plan_fini(struct plan *p)
{
    free(p->move);
    *p = (struct plan){ 0 };
}

/* ---- renaming -------------------------------------------------------------------------------- */

/* Each column takes the row that is cheapest for it, if that is not taken: the start from which
 * the others need a path. */
static void start_columns(uint32_t n, const int32_t *cost, uint32_t *row, bool *placed, int32_t *v)
{
    for (uint32_t j = 1; j <= n; j++) {
        uint32_t best = 1;
        for (uint32_t i = 2; i <= n; i++) {
            int32_t less = cost[(size_t)(i - 1) * n + j - 1] - cost[(size_t)(best - 1) * n + j - 1];
            if (less < 0 || (less == 0 && placed[best] && !placed[i]))
                best = i;
        }
        v[j] = cost[(size_t)(best - 1) * n + j - 1];
        if (!placed[best]) {
            placed[best] = true;
            row[j] = best;
        }
    }
}

/* What column j costs if reached by this row, where that is less than before. */
static void relax(uint32_t n, const int32_t *cost, int32_t u, const int32_t *v, const bool *done,
                  uint32_t from, int32_t *least, uint32_t *way)
{
    for (uint32_t j = 0; j < n; j++) {
        int32_t c = cost[j] - u - v[j];
        bool is_less = !done[j] & (c < least[j]);
        least[j] = is_less ? c : least[j];
        way[j] = is_less ? from : way[j];
    }
}

/* The assignment of rows to columns with the least cost, (n, n), by shortest augmenting paths with
 * potentials. out_row[column] */
static void assign(uint32_t n, const int32_t *cost, uint32_t *out_row)
{
    int32_t *u = xcalloc(n + 1, sizeof *u), *v = xcalloc(n + 1, sizeof *v);
    int32_t *least = xcalloc(n + 1, sizeof *least);
    uint32_t *row = xcalloc(n + 1, sizeof *row), *way = xcalloc(n + 1, sizeof *way);
    bool *done = xcalloc(n + 1, sizeof *done), *placed = xcalloc(n + 1, sizeof *placed);
    start_columns(n, cost, row, placed, v);
    for (uint32_t i = 1; i <= n; i++) { /* columns and rows from 1; column 0 is the start */
        uint32_t j0 = 0;
        if (placed[i])
            continue;
        row[0] = i;
        for (uint32_t j = 0; j <= n; j++) {
            least[j] = INT32_MAX;
            done[j] = false;
        }
        do {
            uint32_t i0 = row[j0], j1 = 1;
            int32_t delta = INT32_MAX;
            done[j0] = true;
            relax(n, cost + (size_t)(i0 - 1) * n, u[i0], v + 1, done + 1, j0, least + 1, way + 1);
            for (uint32_t j = 1; j <= n; j++)
                if (!done[j] && least[j] < delta) {
                    delta = least[j];
                    j1 = j;
                }
            for (uint32_t j = 0; j <= n; j++) {
                if (done[j]) {
                    u[row[j]] += delta;
                    v[j] -= delta;
                } else {
                    least[j] -= delta;
                }
            }
            j0 = j1;
        } while (row[j0]);
        for (; j0; j0 = way[j0])
            row[j0] = row[way[j0]];
    }
    for (uint32_t j = 1; j <= n; j++)
        out_row[j - 1] = row[j] - 1;
    free(placed);
    free(done);
    free(way);
    free(row);
    free(least);
    free(v);
    free(u);
}

/* For nodes too large for the exact way: each name takes the device that has most in common. */
static void assign_greedily(uint32_t n, const int32_t *cost, uint32_t *out_row)
{
    bool *taken = xcalloc(n, sizeof *taken);
    for (uint32_t j = 0; j < n; j++) {
        uint32_t best = NONE;
        for (uint32_t i = 0; i < n; i++)
            if (!taken[i] && (best == NONE ||
                              cost[(size_t)i * n + j] < cost[(size_t)best * n + j]))
                best = i;
        out_row[j] = best;
        taken[best] = true;
    }
    free(taken);
}

/* cost[i][j]: minus what device i of p has in common with device j of before, a home twice. */
static void count_common(const struct placement *p, const struct placement *before,
                         uint32_t first, uint32_t n, int32_t *cost)
{
    uint32_t *copy_first = xcalloc(before->n_experts + 1, sizeof *copy_first);
    uint32_t *copy = xcalloc(placement_n_total(before), sizeof *copy);
    index_copies(before, copy_first, copy);
    memset(cost, 0, (size_t)n * n * sizeof *cost);
    for (uint32_t s = first * p->n_slots; s < (first + n) * p->n_slots; s++) {
        if (p->expert[s] == PLACEMENT_EMPTY)
            continue;
        uint32_t e = (uint32_t)p->expert[s], i = s / p->n_slots - first;
        for (uint32_t c = copy_first[e]; c < copy_first[e + 1]; c++) {
            uint32_t j = copy[c] / before->n_slots - first;
            if (copy[c] / before->n_slots >= first && j < n)
                cost[(size_t)i * n + j] -= before->home[e] == copy[c] ? 2 : 1;
        }
    }
    free(copy);
    free(copy_first);
}

void plan_align(struct placement *p, const struct placement *before, uint32_t n_nodes)
{
    uint32_t n = p->n_devices / n_nodes, n_total = placement_n_total(p);
    int32_t *expert = xmemdup(p->expert, n_total * sizeof *expert);
    int32_t *cost = xcalloc((size_t)n * n, sizeof *cost);
    uint32_t *row = xcalloc(n, sizeof *row);
    for (uint32_t node = 0; node < n_nodes; node++) {
        uint32_t first = node * n;
        count_common(p, before, first, n, cost);
        (n <= ASSIGN_MAX ? assign : assign_greedily)(n, cost, row);
        for (uint32_t j = 0; j < n; j++)
            memcpy(p->expert + (size_t)(first + j) * p->n_slots,
                   expert + (size_t)(first + row[j]) * p->n_slots, p->n_slots * sizeof *expert);
    }
    placement_keep_slots(p, before);
    placement_share_evenly(p);
    placement_keep_homes(p, before);
    free(row);
    free(cost);
    free(expert);
}
