/* transfer.c - the moves of one plan, in rounds, sealed, and taken all at once
 *
 * All ranks of an expert group work out the same list of moves from the two placements. In a round
 * a rank sends to at most one other and receives from at most one, so that each link is used once.
 * What arrives stays in staging memory, each part of an expert with a seal behind it: a checksum
 * and what it is. When all ranks agree that everything
 * they have is sound, each copies its staging into its slots. */
#include "worker/transfer.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/failpoint.h"
#include "common/mem.h"
#include "worker/agree.h"
#include "worker/rounds.h"
#include "worker/shard_state.h"

#define SEAL_FLOATS 16u /* a cache line, so that rows stay aligned */

enum { PART_WEIGHTS, PART_M, PART_V, PARTS };
#define WITH_WEIGHTS (1u << PART_WEIGHTS)
#define WITH_STATE   (1u << PART_M | 1u << PART_V)

struct seal {
    uint64_t checksum;
    uint32_t epoch, layer, expert, part;
};
_Static_assert(sizeof(struct seal) <= SEAL_FLOATS * sizeof(float), "fits behind a part");

struct move {
    uint32_t layer, expert, from, to; /* slots through all devices */
    uint32_t parts;  /* which, a bit each */
    uint32_t round;  /* ROUND_NONE: stays on its device */
    size_t   at;     /* in the staging memory, where it comes here */
};

struct transfer {
    struct shard *s;
    struct slots *slots, to; /* in force; planned */
    struct move  *moves;
    uint32_t n_moves, n_alloc, n_rounds;
    size_t   slice, row; /* floats of a part, and with its seal */
    float   *staging;
    int64_t *send_rows, *recv_rows; /* per device */
};

static uint32_t device_of(const struct transfer *t, uint32_t slot)
{
    return slot / t->slots->n_slots;
}

static uint32_t n_parts(const struct move *m)
{
    return (uint32_t)__builtin_popcount(m->parts);
}

static bool travels(const struct transfer *t, const struct move *m)
{
    return device_of(t, m->from) != device_of(t, m->to);
}

/* ---- the list ------------------------------------------------------------------------------- */

static void add_move(struct transfer *t, struct move m)
{
    if (t->n_moves == t->n_alloc) {
        t->n_alloc = t->n_alloc ? 2 * t->n_alloc : 64;
        t->moves = xrealloc(t->moves, t->n_alloc * sizeof *t->moves);
    }
    t->moves[t->n_moves++] = m;
}

/* What slot of the new placement lacks: weights come from the device itself if it has them, else
 * from the old home, and so does the state. */
static void list_slot(struct transfer *t, uint32_t layer, uint32_t slot)
{
    const struct placement *old = &t->slots->layers[layer].map, *new = &t->to.layers[layer].map;
    int32_t e = new->expert[slot];
    if (e < 0)
        return;
    int32_t here = placement_find(old, device_of(t, slot), (uint32_t)e);
    uint32_t old_home = old->home[e], weights_from = here >= 0 ? (uint32_t)here : old_home;
    bool wants_weights = weights_from != slot;
    bool wants_state = new->home[e] == slot && old_home != slot;
    struct move m = {.layer = layer, .expert = (uint32_t)e, .to = slot};
    if (wants_weights && wants_state && weights_from == old_home) {
        m.from = old_home;
        m.parts = WITH_WEIGHTS | WITH_STATE;
        add_move(t, m);
        return;
    }
    if (wants_weights) {
        m.from = weights_from;
        m.parts = WITH_WEIGHTS;
        add_move(t, m);
    }
    if (wants_state) {
        m.from = old_home;
        m.parts = WITH_STATE;
        add_move(t, m);
    }
}

static void list_moves(struct transfer *t)
{
    for (uint32_t l = 0; l < t->slots->n_layers; l++)
        for (uint32_t i = 0; slots_is_sparse(t->slots, l) && i < placement_n_total(
                                 &t->slots->layers[l].map); i++)
            list_slot(t, l, i);
}

static void plan_rounds(struct transfer *t)
{
    uint32_t *ends = xcalloc(3 * (size_t)t->n_moves, sizeof *ends);
    uint32_t *from = ends, *to = ends + t->n_moves, *round = to + t->n_moves;
    for (uint32_t i = 0; i < t->n_moves; i++) {
        from[i] = device_of(t, t->moves[i].from);
        to[i] = device_of(t, t->moves[i].to);
    }
    t->n_rounds = rounds_plan(t->slots->n_devices, t->n_moves, from, to, round);
    for (uint32_t i = 0; i < t->n_moves; i++)
        t->moves[i].round = round[i];
    free(ends);
}

/* ---- parts ---------------------------------------------------------------------------------- */

static float *part_of(const struct transfer *t, uint32_t layer, uint32_t slot, int part)
{
    float *const blocks[PARTS] = {t->s->weights, t->s->m, t->s->v};
    return blocks[part] + shard_slot_at(t->s, layer, slot % t->slots->n_slots);
}

static uint64_t checksum_of(const float *x, size_t n)
{
    uint64_t sum = 0x9e3779b97f4a7c15u, word;
    for (size_t i = 0; i < n; i += 2) {
        memcpy(&word, x + i, sizeof word);
        sum = (sum ^ word) * 0x94d049bb133111ebu;
        sum ^= sum >> 29;
    }
    return sum;
}

static struct seal seal_of(const struct transfer *t, const struct move *m, int part,
                           const float *x)
{
    return (struct seal){.checksum = checksum_of(x, t->slice), .epoch = t->to.epoch,
                         .layer = m->layer, .expert = m->expert, .part = (uint32_t)part};
}

/* The parts of a move from their slot to packed rows, sealed. */
static void pack(const struct transfer *t, const struct move *m, float *rows)
{
    for (int part = 0; part < PARTS; part++) {
        if (!(m->parts & 1u << part))
            continue;
        t->s->dev->ops->to_host(t->s->dev, rows, part_of(t, m->layer, m->from, part),
                                t->slice * sizeof *rows);
        struct seal seal = seal_of(t, m, part, rows);
        memcpy(rows + t->slice, &seal, sizeof seal);
        if (failpoint("move-checksum") < 0) /* a bit that the network or the memory turned */
            rows[0] = rows[0] == 1 ? 2 : 1;
        rows += t->row;
    }
}

static int check(const struct transfer *t, const struct move *m, struct err *err)
{
    const float *rows = t->staging + m->at;
    for (int part = 0; part < PARTS; part++) {
        if (!(m->parts & 1u << part))
            continue;
        struct seal expected = seal_of(t, m, part, rows), seal;
        memcpy(&seal, rows + t->slice, sizeof seal);
        if (memcmp(&seal, &expected, sizeof seal) != 0)
            return err_set(err, -EBADMSG, "placement %u: expert %u of layer %u arrived damaged at "
                           "rank %u from rank %u", t->to.epoch, m->expert, m->layer,
                           t->s->coll->rank, t->s->ep.ranks[device_of(t, m->from)]);
        rows += t->row;
    }
    return 0;
}

/* From staging to where it belongs. */
static void take(const struct transfer *t, const struct move *m)
{
    const float *rows = t->staging + m->at;
    for (int part = 0; part < PARTS; part++) {
        if (!(m->parts & 1u << part))
            continue;
        t->s->dev->ops->to_device(t->s->dev, part_of(t, m->layer, m->to, part), rows,
                                  t->slice * sizeof *rows);
        rows += t->row;
    }
}

/* ---- create --------------------------------------------------------------------------------- */

static size_t place_arrivals(struct transfer *t)
{
    size_t at = 0;
    for (uint32_t i = 0; i < t->n_moves; i++)
        if (device_of(t, t->moves[i].to) == t->slots->me) {
            t->moves[i].at = at;
            at += n_parts(&t->moves[i]) * t->row;
        }
    return at;
}

int transfer_create(struct shard *s, struct slots *slots, struct slots *to, struct transfer **out,
                    struct err *err)
{
    struct transfer *t = xcalloc(1, sizeof *t);
    *t = (struct transfer){
        .s = s, .slots = slots, .to = *to,
        .slice = shard_slice(s->map->expert_count, s->expert_shard.n_ranks),
        .send_rows = xcalloc(slots->n_devices, sizeof *t->send_rows),
        .recv_rows = xcalloc(slots->n_devices, sizeof *t->recv_rows),
    };
    *to = (struct slots){0};
    t->row = t->slice + SEAL_FLOATS;
    list_moves(t);
    plan_rounds(t);
    size_t n = place_arrivals(t);
    if (n > 0 && !(t->staging = s->dev->ops->alloc(s->dev, n * sizeof *t->staging))) {
        transfer_destroy(t);
        return err_set(err, -ENOMEM, "no memory for %zu MiB of experts that are to move here",
                       n * sizeof(float) >> 20);
    }
    *out = t;
    return 0;
}

void transfer_destroy(struct transfer *t)
{
    if (!t)
        return;
    if (t->staging)
        t->s->dev->ops->free(t->s->dev, t->staging);
    slots_fini(&t->to);
    free(t->moves);
    free(t->send_rows);
    free(t->recv_rows);
    free(t);
}

/* ---- run ------------------------------------------------------------------------------------ */

/* My move of a round that goes out (outward) or comes in, or NULL. */
static const struct move *find(const struct transfer *t, uint32_t round, bool outward)
{
    for (uint32_t i = 0; i < t->n_moves; i++) {
        const struct move *m = &t->moves[i];
        if (m->round == round && travels(t, m) &&
            device_of(t, outward ? m->from : m->to) == t->slots->me)
            return m;
    }
    return NULL;
}

static int run_round(struct transfer *t, uint32_t round, float *packed, struct transfer_result *r,
                     struct err *err)
{
    const struct move *out = find(t, round, true), *in = find(t, round, false);
    uint64_t began = clock_now_ns();
    memset(t->send_rows, 0, t->slots->n_devices * sizeof *t->send_rows);
    memset(t->recv_rows, 0, t->slots->n_devices * sizeof *t->recv_rows);
    if (out) {
        pack(t, out, packed);
        t->send_rows[device_of(t, out->to)] = n_parts(out);
        r->sent_bytes += n_parts(out) * t->slice * sizeof(float);
    }
    if (in)
        t->recv_rows[device_of(t, in->from)] = n_parts(in);
    int rc = t->s->coll->ops->all_to_all_rows(t->s->coll, &t->s->ep, packed, t->send_rows,
                                              in ? t->staging + in->at : NULL, t->recv_rows,
                                              t->row * sizeof(float), err);
    if (out)
        r->link_seconds += (double)(clock_now_ns() - began) / NS_PER_S;
    return rc;
}

/* Everything that comes here into staging. *out_mine: what this rank found wrong with it. */
static int run_rounds(struct transfer *t, struct transfer_result *r, int *out_mine,
                      struct err *mine_err, struct err *err)
{
    float *packed = NULL;
    int rc = shard_buffer_take(t->s, PARTS * t->row, &packed, err), mine = failpoint("before-move");
    if (mine < 0)
        err_set(mine_err, mine, "rank %u failed before the moves", t->s->coll->rank);
    t->s->coll->layer = -1;
    for (uint32_t round = 0; round < t->n_rounds && rc == 0; round++) {
        rc = run_round(t, round, packed, r, err);
        int failed = round == 0 ? failpoint("in-move") : 0;
        if (failed < 0 && mine == 0)
            mine = err_set(mine_err, failed, "rank %u failed amid the moves", t->s->coll->rank);
    }
    for (uint32_t i = 0; i < t->n_moves && rc == 0; i++) {
        const struct move *m = &t->moves[i];
        if (device_of(t, m->to) != t->slots->me)
            continue;
        if (!travels(t, m))
            pack(t, m, t->staging + m->at);
        if (mine == 0)
            mine = check(t, m, mine_err);
    }
    if (packed)
        shard_buffer_return(t->s, packed);
    *out_mine = mine;
    return rc;
}

int transfer_run(struct transfer *t, struct transfer_result *out, struct err *err)
{
    struct transfer_result r = {0};
    struct err mine_err = {0};
    uint64_t began = clock_now_ns();
    int mine = 0, rc = run_rounds(t, &r, &mine, &mine_err, err);
    if (rc < 0)
        return rc;
    if (mine < 0 && err)
        *err = mine_err;
    if ((rc = agree(t->s->coll, mine, err)) < 0)
        return rc;
    for (uint32_t i = 0; i < t->n_moves; i++)
        if (device_of(t, t->moves[i].to) == t->slots->me)
            take(t, &t->moves[i]);
    struct slots old = *t->slots;
    *t->slots = t->to;
    t->to = old;
    failpoint("after-move");
    r.seconds = (double)(clock_now_ns() - began) / NS_PER_S;
    *out = r;
    return 0;
}
