/* moves.c - what must travel between two placements, stage by stage, round by round */
#include "worker/moves.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "worker/rounds.h"

static void push_move(struct moves *m, struct move x)
{
    m->move = xgrow(m->move, m->n, &m->n_alloc, sizeof *m->move);
    m->move[m->n++] = x;
}

/* What travels frozen is a move of its own, from where the expert is before all stages. */
static void add_move(struct moves *m, struct move x, uint32_t first_home)
{
    bool has_rest = false;
    if (moves_travels(m, &x) && moves_has_part(m, &x, SLOT_FROZEN)) {
        struct move frozen = x;
        frozen.parts = MOVES_FROZEN;
        frozen.from = first_home;
        push_move(m, frozen);
        x.parts &= ~MOVES_FROZEN;
    }
    for (int part = 0; part < SLOT_PARTS; part++)
        has_rest = has_rest || moves_has_part(m, &x, part);
    if (has_rest)
        push_move(m, x);
}

/* What a slot lacks of the next stage: weights come from the device itself if it has them, else
 * from the home, and so does the state. first: what is in force before all stages. */
static void list_slot(struct moves *m, uint32_t layer, uint32_t stage, uint32_t slot,
                      const struct placement *first, const struct placement *old,
                      const struct placement *new)
{
    int32_t e = new->expert[slot];
    if (e < 0)
        return;
    int32_t here = placement_find(old, moves_device(m, slot), (uint32_t)e);
    uint32_t old_home = old->home[e], weights_from = here >= 0 ? (uint32_t)here : old_home;
    bool wants_weights = weights_from != slot;
    bool wants_state = new->home[e] == slot && old_home != slot;
    struct move x = {.layer = layer, .expert = (uint32_t)e, .to = slot, .stage = stage};
    if (wants_weights && wants_state && weights_from == old_home) {
        x.from = old_home;
        x.parts = MOVES_WITH_WEIGHTS | MOVES_WITH_STATE;
        add_move(m, x, first->home[e]);
        return;
    }
    if (wants_weights) {
        x.from = weights_from;
        x.parts = MOVES_WITH_WEIGHTS;
        add_move(m, x, first->home[e]);
    }
    if (wants_state) {
        x.from = old_home;
        x.parts = MOVES_WITH_STATE;
        add_move(m, x, first->home[e]);
    }
}

static void list_layer(struct moves *m, uint32_t layer, const struct placement *from,
                       const struct placement *to, const uint32_t *stage)
{
    struct placement old, new;
    uint32_t n_total = placement_n_total(to);
    placement_init_like(&old, from);
    placement_init_like(&new, to);
    for (uint32_t k = 0; k < (stage ? m->n_stages : 1); k++) {
        if (stage)
            placement_at_stage(from, to, stage, k, &new);
        for (uint32_t slot = 0; slot < n_total; slot++)
            list_slot(m, layer, k, slot, from, &old, &new);
        placement_copy(&old, &new);
    }
    placement_fini(&old);
    placement_fini(&new);
}

/* Rounds from `first` on for the moves that go ahead, or for the others of a stage; returns the
 * round after them. */
static uint32_t plan_rounds(struct moves *m, bool ahead, uint32_t stage, uint32_t first)
{
    uint32_t *ends = xcalloc(4 * (size_t)m->n + 1, sizeof *ends), n = 0;
    uint32_t *from = ends, *to = from + m->n, *round = to + m->n, *which = round + m->n;
    for (uint32_t i = 0; i < m->n; i++)
        if (moves_goes_ahead(m, &m->move[i]) == ahead && (ahead || m->move[i].stage == stage)) {
            from[n] = moves_device(m, m->move[i].from);
            to[n] = moves_device(m, m->move[i].to);
            which[n++] = i;
        }
    uint32_t n_rounds = rounds_plan(m->n_devices, n, from, to, round);
    for (uint32_t i = 0; i < n; i++)
        m->move[which[i]].round = round[i] == ROUND_NONE ? ROUND_NONE : first + round[i];
    free(ends);
    return first + n_rounds;
}

/* Returns the number of stages. */
static uint32_t copy_stages(struct moves *m, const struct slots *to, uint32_t *const *stage)
{
    uint32_t last = 0;
    for (uint32_t l = 0; stage && l < m->n_layers; l++) {
        uint32_t n_total = placement_n_total(&to->layers[l].map);
        if (!stage[l] || !slots_is_sparse(to, l))
            continue;
        m->stage[l] = xmemdup(stage[l], n_total * sizeof *m->stage[l]);
        for (uint32_t s = 0; s < n_total; s++)
            last = stage[l][s] > last ? stage[l][s] : last;
    }
    return last + 1;
}

void moves_init(struct moves *m, const struct slots *from, const struct slots *to,
                uint32_t *const *stage, const size_t *part_bytes)
{
    *m = (struct moves){.n_devices = from->n_devices, .n_slots = from->n_slots,
                        .n_layers = from->n_layers,
                        .stage = xcalloc(from->n_layers, sizeof *m->stage)};
    memcpy(m->part_bytes, part_bytes, sizeof m->part_bytes);
    m->n_stages = copy_stages(m, to, stage);
    m->first_round = xcalloc(m->n_stages + 1, sizeof *m->first_round);
    for (uint32_t l = 0; l < m->n_layers; l++)
        if (slots_is_sparse(from, l))
            list_layer(m, l, &from->layers[l].map, &to->layers[l].map, m->stage[l]);
    m->first_round[0] = plan_rounds(m, true, 0, 0);
    for (uint32_t k = 0; k < m->n_stages; k++)
        m->first_round[k + 1] = plan_rounds(m, false, k, m->first_round[k]);
}

void moves_fini(struct moves *m)
{
    for (uint32_t l = 0; l < m->n_layers; l++)
        free(m->stage[l]);
    free(m->stage);
    free(m->move);
    free(m->first_round);
    *m = (struct moves){0};
}
