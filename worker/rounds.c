/* rounds.c - moves are the edges of a bipartite graph of senders and receivers; rounds colour them
 *
 * One move after the other takes a round that its sender has free. Where its receiver has not, the
 * moves of the path that alternates between that round and one that the receiver has free change
 * places; the path never comes back to the sender, because it reaches senders by rounds that this
 * one has free. */
#include "worker/rounds.h"

#include <assert.h>
#include <stdlib.h>

#include "common/mem.h"

struct rounds {
    uint32_t n_devices, n_rounds;
    const uint32_t *end[2]; /* from, to */
    uint32_t *round;        /* (n_moves) */
    uint32_t *move;         /* (2, n_devices, n_rounds): what a device sends, receives; or none */
};

#define NO_MOVE UINT32_MAX

static uint32_t *move_at(struct rounds *r, int side, uint32_t device, uint32_t round)
{
    return &r->move[((size_t)side * r->n_devices + device) * r->n_rounds + round];
}

static uint32_t first_free(struct rounds *r, int side, uint32_t device)
{
    uint32_t round = 0;
    while (*move_at(r, side, device, round) != NO_MOVE)
        round++;
    assert(round < r->n_rounds);
    return round;
}

static void set(struct rounds *r, uint32_t i, uint32_t value)
{
    for (int side = 0; side < 2; side++)
        *move_at(r, side, r->end[side][i], r->round[i]) = value;
}

/* Frees round a of a receiver that has b free. The path is first taken out, then put back the
 * other way round. */
static void swap_path(struct rounds *r, uint32_t receiver, uint32_t a, uint32_t b)
{
    uint32_t *path = xcalloc(2 * (size_t)r->n_devices, sizeof *path);
    uint32_t n = 0, at = receiver, round = a;
    int side = 1;
    for (uint32_t i; (i = *move_at(r, side, at, round)) != NO_MOVE; side = !side) {
        path[n++] = i;
        at = r->end[!side][i];
        round = round == a ? b : a;
    }
    for (uint32_t k = 0; k < n; k++)
        set(r, path[k], NO_MOVE);
    for (uint32_t k = 0; k < n; k++) {
        r->round[path[k]] = r->round[path[k]] == a ? b : a;
        set(r, path[k], path[k]);
    }
    free(path);
}

static uint32_t busiest(uint32_t n_devices, uint32_t n_moves, const uint32_t *from,
                        const uint32_t *to)
{
    uint32_t most = 0, *n = xcalloc(2 * (size_t)n_devices, sizeof *n);
    for (uint32_t i = 0; i < n_moves; i++) {
        if (from[i] == to[i])
            continue;
        uint32_t out = ++n[from[i]], in = ++n[n_devices + to[i]];
        most = out > most ? out : most;
        most = in > most ? in : most;
    }
    free(n);
    return most;
}

uint32_t rounds_plan(uint32_t n_devices, uint32_t n_moves, const uint32_t *from,
                     const uint32_t *to, uint32_t *out_round)
{
    struct rounds r = {.n_devices = n_devices, .end = {from, to}, .round = out_round,
                       .n_rounds = busiest(n_devices, n_moves, from, to)};
    size_t n = 2 * (size_t)n_devices * r.n_rounds;
    r.move = xcalloc(n, sizeof *r.move);
    for (size_t i = 0; i < n; i++)
        r.move[i] = NO_MOVE;
    for (uint32_t i = 0; i < n_moves; i++) {
        out_round[i] = ROUND_NONE;
        if (from[i] == to[i])
            continue;
        out_round[i] = first_free(&r, 0, from[i]);
        if (*move_at(&r, 1, to[i], out_round[i]) != NO_MOVE)
            swap_path(&r, to[i], out_round[i], first_free(&r, 1, to[i]));
        set(&r, i, i);
    }
    free(r.move);
    return r.n_rounds;
}
