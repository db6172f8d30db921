/* plan.c - the difference of two placements as moves in rounds, and renaming that keeps it small
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
            .expert = e, .from = source, .to = s, .with_state = home_comes, .round = NONE,
            .n_bytes = (comes ? costs->weight_bytes : 0) +
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

/* Bigger moves first, of equals the lower slot, as they are listed. There are few sizes. */
static void sort_by_size(struct plan *p)
{
    struct plan_move *sorted = xcalloc(p->n_moves + 1, sizeof *sorted);
    uint64_t size = UINT64_MAX;
    for (uint32_t n = 0; n < p->n_moves;) {
        uint64_t next = 0;
        for (uint32_t i = 0; i < p->n_moves; i++)
            if (p->move[i].n_bytes < size && p->move[i].n_bytes > next)
                next = p->move[i].n_bytes;
        for (uint32_t i = 0; i < p->n_moves; i++)
            if (p->move[i].n_bytes == next)
                sorted[n++] = p->move[i];
        size = next;
    }
    free(p->move);
    p->move = sorted;
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
    sort_by_size(p);
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

static double seconds_of(const struct plan_move *m, uint32_t per_node, uint32_t n_slots,
                         const struct plan_costs *costs)
{
    bool near = m->from / n_slots / per_node == m->to / n_slots / per_node;
    return (double)m->n_bytes / (near ? costs->link_bytes_s : costs->node_link_bytes_s);
}

static double time_rounds(const struct plan *p, uint32_t per_node, uint32_t n_slots,
                          const struct plan_costs *costs)
{
    double *longest = xcalloc(p->n_rounds, sizeof *longest), sum = 0;
    for (uint32_t i = 0; i < p->n_moves; i++) {
        double *s = &longest[p->move[i].round];
        *s = fmax(*s, seconds_of(&p->move[i], per_node, n_slots, costs));
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

/* Moves as long as that or longer need as many rounds as their busiest device has of them. */
static double least_seconds(const struct plan *p, const double *move_s, uint32_t n_devices,
                            uint32_t n_slots, uint32_t *out_n_rounds)
{
    uint32_t *n = xcalloc(2 * (size_t)n_devices, sizeof *n), n_rounds = 0;
    double sum = 0, longer = INFINITY;
    for (uint32_t left = p->n_moves; left;) { /* one length after the other; there are few */
        double length = 0;
        uint32_t before = n_rounds, left_before = left;
        for (uint32_t i = 0; i < p->n_moves; i++)
            length = move_s[i] < longer && move_s[i] > length ? move_s[i] : length;
        for (uint32_t i = 0; i < p->n_moves; i++) {
            if (move_s[i] < length || move_s[i] >= longer)
                continue;
            uint32_t sends = ++n[p->move[i].from / n_slots];
            uint32_t receives = ++n[n_devices + p->move[i].to / n_slots];
            n_rounds = sends > n_rounds ? sends : n_rounds;
            n_rounds = receives > n_rounds ? receives : n_rounds;
            left--;
        }
        sum += length * (n_rounds - before);
        longer = length;
        if (left == left_before)
            break; /* a length that is no number */
    }
    free(n);
    *out_n_rounds = n_rounds;
    return sum;
}

void plan_price(struct plan *p, const struct placement *from, const struct placement *to,
                uint32_t n_nodes, const struct plan_costs *costs)
{
    uint32_t per_node = from->n_devices / n_nodes;
    *p = (struct plan){ 0 };
    list_moves(p, from, to, per_node, costs);
    double *move_s = xcalloc(p->n_moves + 1, sizeof *move_s);
    for (uint32_t i = 0; i < p->n_moves; i++) {
        p->n_bytes += p->move[i].n_bytes;
        move_s[i] = seconds_of(&p->move[i], per_node, from->n_slots, costs);
    }
    p->seconds = least_seconds(p, move_s, from->n_devices, from->n_slots, &p->n_rounds);
    free(move_s);
    free(p->move);
    p->move = NULL;
}

void plan_fini(struct plan *p)
{
    free(p->move);
    *p = (struct plan){ 0 };
}

/* ---- renaming -------------------------------------------------------------------------------- */

/* A search for the cheapest path from a row to a free column. Numbers of 32 bits side by side, and
 * masks of them, because these loops are most of the time of a small plan. */
struct path {
    uint32_t n;
    int32_t *u, *v;    /* potentials of rows and columns */
    int32_t *least;    /* (columns) of the way there, as far as it is known */
    int32_t *is_open;  /* (columns) all bits: it may still become shorter; else 0 */
    uint32_t *way;     /* (columns) the column before, NONE: the start */
    uint32_t *row;     /* (columns) assigned, or NONE */
};

/* Each column takes the row that is cheapest for it, if that is not taken: the start from which
 * the others need a path. */
static void start_columns(struct path *p, const int32_t *cost, bool *placed)
{
    uint32_t n = p->n;
    for (uint32_t j = 0; j < n; j++) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < n; i++) {
            int32_t less = cost[(size_t)i * n + j] - cost[(size_t)best * n + j];
            if (less < 0 || (less == 0 && placed[best] && !placed[i]))
                best = i;
        }
        p->v[j] = cost[(size_t)best * n + j];
        p->row[j] = placed[best] ? NONE : best;
        placed[best] = true;
    }
}

/* What the columns cost if reached by this row, which is so far from the start, where that is less
 * than before. Returns the least of all that are open. */
static int32_t relax(struct path *p, const int32_t *cost, int32_t beyond, uint32_t from)
{
    int32_t *least = p->least, nearest = INT32_MAX;
    const int32_t *v = p->v, *is_open = p->is_open;
    for (uint32_t j = 0; j < p->n; j++) {
        int32_t c = cost[j] + beyond - v[j], is_less = is_open[j] & -(c < least[j]);
        int32_t now = (c & is_less) | (least[j] & ~is_less), open = now | (INT32_MAX & ~is_open[j]);
        least[j] = now;
        p->way[j] = (from & (uint32_t)is_less) | (p->way[j] & ~(uint32_t)is_less);
        nearest = open < nearest ? open : nearest;
    }
    return nearest;
}

static void place_row(struct path *p, const int32_t *cost, uint32_t row)
{
    uint32_t from = NONE, at = row;
    int32_t so_far = 0;
    for (uint32_t j = 0; j < p->n; j++) {
        p->least[j] = INT32_MAX;
        p->is_open[j] = -1;
    }
    do {
        int32_t beyond = so_far - p->u[at];
        so_far = relax(p, cost + (size_t)at * p->n, beyond, from);
        for (from = 0; !p->is_open[from] || p->least[from] != so_far;)
            from++;
        p->is_open[from] = 0;
        at = p->row[from];
    } while (at != NONE);
    p->u[row] += so_far;
    for (uint32_t j = 0; j < p->n; j++)
        if (!p->is_open[j] && j != from) {
            p->u[p->row[j]] += so_far - p->least[j];
            p->v[j] -= so_far - p->least[j];
        }
    for (uint32_t j = from; j != NONE; j = p->way[j])
        p->row[j] = p->way[j] == NONE ? row : p->row[p->way[j]];
}

/* The assignment of rows to columns with the least cost, (n, n), by shortest augmenting paths with
 * potentials. out_row[column] */
static void assign(uint32_t n, const int32_t *cost, uint32_t *out_row)
{
    int32_t *numbers = xcalloc(4 * (size_t)n, sizeof *numbers);
    uint32_t *way = xcalloc(n, sizeof *way);
    bool *placed = xcalloc(n, sizeof *placed);
    struct path p = {.n = n, .u = numbers, .v = numbers + n, .least = numbers + 2 * (size_t)n,
                     .is_open = numbers + 3 * (size_t)n, .way = way, .row = out_row};
    start_columns(&p, cost, placed);
    for (uint32_t i = 0; i < n; i++)
        if (!placed[i])
            place_row(&p, cost, i);
    free(placed);
    free(way);
    free(numbers);
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
