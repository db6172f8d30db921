/* transfer.c - the moves of one plan, in rounds, sealed, and taken all at once
 *
 * All ranks of an expert group work out the same list of moves from the two placements. In a round
 * a rank sends to at most one other and receives from at most one, so that each link is used once.
 * What arrives stays in staging memory, each part of an expert with a seal behind it: a checksum and
 * what it is. When all ranks agree that everything they have is sound, each copies its staging into
 * its slots. All of it lies in the device's memory, and the host waits for it once: to look at the
 * seals, and at the checksums that the device makes of what has arrived. */
#include "worker/transfer.h"

#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/failpoint.h"
#include "common/mem.h"
#include "worker/agree.h"
#include "worker/rounds.h"
#include "worker/shard_state.h"

/* What travels is counted in cache lines, so that everything stays aligned whatever it is. */
#define LINE_BYTES 64u

/* Of frozen weights from a rank at one boundary: a few milliseconds of most networks. */
#define AHEAD_BYTES ((size_t)256 << 20)

#define FROZEN       (1u << SLOT_FROZEN)
#define WITH_WEIGHTS (1u << SLOT_WEIGHTS | FROZEN)
#define WITH_STATE   (1u << SLOT_MASTER | 1u << SLOT_M | 1u << SLOT_V)

struct seal {
    uint64_t checksum;
    uint32_t epoch, layer, expert, part;
};
_Static_assert(sizeof(struct seal) <= LINE_BYTES, "fits behind a part");
_Static_assert(offsetof(struct seal, checksum) == 0, "an op adds to it");

/* Of a part that has arrived: the seal behind it, and the checksum that it has. */
struct proof {
    struct seal seal;
    uint64_t checksum;
};

struct move {
    uint32_t layer, expert, from, to; /* slots through all devices */
    uint32_t parts;  /* which, a bit for each slot_part */
    uint32_t round;  /* ROUND_NONE: stays on its device */
    size_t   at;     /* in the staging memory, where it comes here; bytes */
    uint32_t proof;  /* the first of its parts' places among the proofs, where it comes here */
};

struct transfer {
    struct shard *s;
    struct slots *slots, to; /* in force; planned */
    struct move  *moves;
    uint32_t n_moves, n_alloc, n_rounds, n_ahead; /* the first n_ahead rounds may go ahead */
    uint32_t next_round;
    struct transfer_result so_far;
    size_t   part_bytes[SLOT_PARTS]; /* 0: there is no such part */
    uint32_t n_proofs;
    char    *staging;     /* the device's, of all that comes here */
    struct proof *proofs; /* the device's (n_proofs) */
    void    *send;        /* of one move; while the moves run */
    int64_t *send_rows, *recv_rows; /* lines, per device */
};

static uint32_t device_of(const struct transfer *t, uint32_t slot)
{
    return slot / t->slots->n_slots;
}

static bool has_part(const struct transfer *t, const struct move *m, int part)
{
    return m->parts & 1u << part && t->part_bytes[part] > 0;
}

/* Of a part with its seal. */
static size_t row_bytes(const struct transfer *t, int part)
{
    return (t->part_bytes[part] + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES + LINE_BYTES;
}

/* Of all parts of a move, with their seals or without. */
static size_t move_bytes(const struct transfer *t, const struct move *m, bool sealed)
{
    size_t n = 0;
    for (int part = 0; part < SLOT_PARTS; part++)
        if (has_part(t, m, part))
            n += sealed ? row_bytes(t, part) : t->part_bytes[part];
    return n;
}

static bool travels(const struct transfer *t, const struct move *m)
{
    return device_of(t, m->from) != device_of(t, m->to);
}

/* ---- the list ------------------------------------------------------------------------------- */

static void push_move(struct transfer *t, struct move m)
{
    if (t->n_moves == t->n_alloc) {
        t->n_alloc = t->n_alloc ? 2 * t->n_alloc : 64;
        t->moves = xrealloc(t->moves, t->n_alloc * sizeof *t->moves);
    }
    t->moves[t->n_moves++] = m;
}

static bool goes_ahead(const struct transfer *t, const struct move *m)
{
    return m->parts == FROZEN && travels(t, m);
}

/* What travels frozen is a move of its own. */
static void add_move(struct transfer *t, struct move m)
{
    if (travels(t, &m) && has_part(t, &m, SLOT_FROZEN)) {
        struct move frozen = m;
        frozen.parts = FROZEN;
        push_move(t, frozen);
        m.parts &= ~FROZEN;
    }
    if (move_bytes(t, &m, false) > 0)
        push_move(t, m);
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

/* Rounds from first on for the moves that go ahead, or for the others; returns how many. */
static uint32_t plan_rounds(struct transfer *t, bool ahead, uint32_t first)
{
    uint32_t *ends = xcalloc(3 * (size_t)t->n_moves + 1, sizeof *ends), n = 0;
    uint32_t *from = ends, *to = ends + t->n_moves, *round = to + t->n_moves;
    for (uint32_t i = 0; i < t->n_moves; i++)
        if (goes_ahead(t, &t->moves[i]) == ahead) {
            from[n] = device_of(t, t->moves[i].from);
            to[n++] = device_of(t, t->moves[i].to);
        }
    uint32_t n_rounds = rounds_plan(t->slots->n_devices, n, from, to, round);
    n = 0;
    for (uint32_t i = 0; i < t->n_moves; i++)
        if (goes_ahead(t, &t->moves[i]) == ahead) {
            t->moves[i].round = round[n] == ROUND_NONE ? ROUND_NONE : first + round[n];
            n++;
        }
    free(ends);
    return n_rounds;
}

/* ---- parts ---------------------------------------------------------------------------------- */

static void *part_of(const struct transfer *t, uint32_t layer, uint32_t slot, int part)
{
    return shard_slot(t->s, layer, slot % t->slots->n_slots, (enum slot_part)part);
}

static void checksum(const struct transfer *t, uint64_t *acc_sum, const char *row, int part)
{
    assert(t->part_bytes[part] % sizeof(uint64_t) == 0); /* slices are whole half lines */
    t->s->dev->ops->checksum(t->s->dev, acc_sum, (const uint64_t *)(const void *)row,
                             (int64_t)(t->part_bytes[part] / sizeof(uint64_t)), 0);
}

/* But for its checksum, which is 0. */
static struct seal seal_of(const struct transfer *t, const struct move *m, int part)
{
    return (struct seal){.epoch = t->to.epoch, .layer = m->layer, .expert = m->expert,
                         .part = (uint32_t)part};
}

/* Where the seal of a part is. */
static void *seal_at(const struct transfer *t, char *row, int part)
{
    return row + row_bytes(t, part) - LINE_BYTES;
}

/* A bit that the network or the memory turned. */
static void turn_bit(const struct transfer *t, char *row)
{
    struct device *dev = t->s->dev;
    char byte;
    dev->ops->to_host(dev, &byte, row, 1);
    byte ^= 1;
    dev->ops->to_device(dev, row, &byte, 1);
}

/* The parts of a move from their slot to packed rows, sealed. */
static void pack(const struct transfer *t, const struct move *m, char *row)
{
    struct device *dev = t->s->dev;
    for (int part = 0; part < SLOT_PARTS; part++) {
        if (!has_part(t, m, part))
            continue;
        const struct seal seal = seal_of(t, m, part);
        dev->ops->copy(dev, row, part_of(t, m->layer, m->from, part), t->part_bytes[part]);
        dev->ops->to_device(dev, seal_at(t, row, part), &seal, sizeof seal);
        checksum(t, seal_at(t, row, part), row, part);
        if (failpoint("move-checksum") < 0)
            turn_bit(t, row);
        row += row_bytes(t, part);
    }
}

/* What shows whether the parts of a move arrived whole. */
static void prove(const struct transfer *t, const struct move *m)
{
    struct device *dev = t->s->dev;
    char *row = t->staging + m->at;
    struct proof *proof = t->proofs + m->proof;
    for (int part = 0; part < SLOT_PARTS; part++) {
        if (!has_part(t, m, part))
            continue;
        dev->ops->copy(dev, &proof->seal, seal_at(t, row, part), sizeof proof->seal);
        checksum(t, &proof->checksum, row, part);
        proof++;
        row += row_bytes(t, part);
    }
}

/* proofs: the host's. */
static int check(const struct transfer *t, const struct move *m, const struct proof *proofs,
                 struct err *err)
{
    const struct proof *proof = proofs + m->proof;
    for (int part = 0; part < SLOT_PARTS; part++) {
        if (!has_part(t, m, part))
            continue;
        struct seal expected = seal_of(t, m, part);
        expected.checksum = proof->checksum;
        if (memcmp(&proof->seal, &expected, sizeof expected) != 0)
            return err_set(err, -EBADMSG, "placement %u: expert %u of layer %u arrived damaged at "
                           "rank %u from rank %u", t->to.epoch, m->expert, m->layer,
                           t->s->coll->rank, t->s->ep.ranks[device_of(t, m->from)]);
        proof++;
    }
    return 0;
}

/* From staging to where it belongs. */
static void take(const struct transfer *t, const struct move *m)
{
    const char *row = t->staging + m->at;
    for (int part = 0; part < SLOT_PARTS; part++) {
        if (!has_part(t, m, part))
            continue;
        t->s->dev->ops->copy(t->s->dev, part_of(t, m->layer, m->to, part), row,
                             t->part_bytes[part]);
        row += row_bytes(t, part);
    }
}

/* ---- create --------------------------------------------------------------------------------- */

/* The same in every layer that has experts. */
static void measure_parts(struct transfer *t)
{
    for (uint32_t l = 0; l < t->slots->n_layers; l++)
        for (int part = 0; slots_is_sparse(t->slots, l) && part < SLOT_PARTS; part++)
            t->part_bytes[part] = shard_slot_bytes(t->s, l, (enum slot_part)part);
}

static size_t largest_move_bytes(const struct transfer *t)
{
    return move_bytes(t, &(struct move){.parts = WITH_WEIGHTS | WITH_STATE}, true);
}

static bool comes_here(const struct transfer *t, const struct move *m)
{
    return device_of(t, m->to) == t->slots->me;
}

static size_t place_arrivals(struct transfer *t)
{
    size_t at = 0;
    for (uint32_t i = 0; i < t->n_moves; i++) {
        struct move *m = &t->moves[i];
        if (!comes_here(t, m))
            continue;
        m->at = at;
        m->proof = t->n_proofs;
        at += move_bytes(t, m, true);
        for (int part = 0; part < SLOT_PARTS; part++)
            t->n_proofs += has_part(t, m, part);
    }
    return at;
}

static int take_staging(struct transfer *t, struct err *err)
{
    struct device *dev = t->s->dev;
    size_t n = place_arrivals(t);
    if (n == 0)
        return 0;
    t->staging = dev->ops->alloc(dev, n);
    t->proofs = dev->ops->alloc(dev, t->n_proofs * sizeof *t->proofs);
    return t->staging && t->proofs
               ? 0 : err_set(err, -ENOMEM, "no memory for %zu MiB of experts that are to move here",
                             n >> 20);
}

int transfer_create(struct shard *s, struct slots *slots, struct slots *to, struct transfer **out,
                    struct err *err)
{
    struct transfer *t = xcalloc(1, sizeof *t);
    *t = (struct transfer){
        .s = s, .slots = slots, .to = *to,
        .send_rows = xcalloc(slots->n_devices, sizeof *t->send_rows),
        .recv_rows = xcalloc(slots->n_devices, sizeof *t->recv_rows),
    };
    *to = (struct slots){0};
    measure_parts(t);
    list_moves(t);
    t->n_ahead = plan_rounds(t, true, 0);
    t->n_rounds = t->n_ahead + plan_rounds(t, false, t->n_ahead);
    int rc = take_staging(t, err);
    if (rc < 0) {
        transfer_destroy(t);
        return rc;
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
    if (t->proofs)
        t->s->dev->ops->free(t->s->dev, t->proofs);
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

/* From a slot over the network into staging. */
static int run_round(struct transfer *t, uint32_t round, struct transfer_result *r,
                     struct err *err)
{
    const struct move *out = find(t, round, true), *in = find(t, round, false);
    memset(t->send_rows, 0, t->slots->n_devices * sizeof *t->send_rows);
    memset(t->recv_rows, 0, t->slots->n_devices * sizeof *t->recv_rows);
    if (out) {
        pack(t, out, t->send);
        t->send_rows[device_of(t, out->to)] = (int64_t)(move_bytes(t, out, true) / LINE_BYTES);
        r->sent_bytes += move_bytes(t, out, false);
    }
    if (in)
        t->recv_rows[device_of(t, in->from)] = (int64_t)(move_bytes(t, in, true) / LINE_BYTES);
    return coll_all_to_all_rows(t->s->coll, &t->s->ep, t->send, t->send_rows,
                                in ? t->staging + in->at : NULL, t->recv_rows, LINE_BYTES, err);
}

static int take_buffer(struct transfer *t, struct err *err)
{
    return shard_buffer_take(t->s, largest_move_bytes(t), &t->send, err);
}

static void return_buffer(struct transfer *t)
{
    if (t->send)
        shard_buffer_return(t->s, t->send);
    t->send = NULL;
}

/* What was sent since has arrived, or is on its way no more. */
static void note_link(struct transfer_result *r, uint64_t sent_before, uint64_t began_ns)
{
    if (r->sent_bytes > sent_before)
        r->link_seconds += (double)(clock_now_ns() - began_ns) / NS_PER_S;
}

bool transfer_is_ahead(const struct transfer *t)
{
    return t->next_round >= t->n_ahead;
}

/* How many rounds follows from sizes alone, so it is the same on all ranks of the group. */
int transfer_ahead(struct transfer *t, double *out_seconds, struct err *err)
{
    *out_seconds = 0;
    if (transfer_is_ahead(t))
        return 0;
    uint64_t began = clock_now_ns(), sent = t->so_far.sent_bytes;
    size_t n = AHEAD_BYTES / row_bytes(t, SLOT_FROZEN);
    uint32_t end = n > 0 ? t->next_round + (uint32_t)n : t->next_round + 1;
    int rc = take_buffer(t, err);
    t->s->coll->layer = -1;
    for (; t->next_round < end && t->next_round < t->n_ahead && rc == 0; t->next_round++)
        rc = run_round(t, t->next_round, &t->so_far, err);
    return_buffer(t);
    t->s->dev->ops->synchronize(t->s->dev);
    note_link(&t->so_far, sent, began);
    *out_seconds = (double)(clock_now_ns() - began) / NS_PER_S;
    if (*out_seconds > t->so_far.seconds)
        t->so_far.seconds = *out_seconds;
    return rc;
}

/* Waits for the device. */
static int check_arrivals(const struct transfer *t, struct err *err)
{
    struct device *dev = t->s->dev;
    struct proof *proofs = xcalloc(t->n_proofs + 1, sizeof *proofs);
    int rc = 0;
    for (uint32_t i = 0; i < t->n_moves; i++) {
        const struct move *m = &t->moves[i];
        if (!comes_here(t, m))
            continue;
        if (!travels(t, m))
            pack(t, m, t->staging + m->at);
        prove(t, m);
    }
    dev->ops->to_host(dev, proofs, t->proofs, t->n_proofs * sizeof *proofs);
    for (uint32_t i = 0; i < t->n_moves && rc == 0; i++)
        if (comes_here(t, &t->moves[i]))
            rc = check(t, &t->moves[i], proofs, err);
    free(proofs);
    return rc;
}

/* Everything that comes here into staging. *out_mine: what this rank found wrong with it. */
static int run_rounds(struct transfer *t, struct transfer_result *r, int *out_mine,
                      struct err *mine_err, struct err *err)
{
    int rc = take_buffer(t, err), mine = failpoint("before-move");
    uint32_t first = t->next_round;
    uint64_t began = clock_now_ns(), sent = r->sent_bytes;
    if (mine < 0)
        err_set(mine_err, mine, "rank %u failed before the moves", t->s->coll->rank);
    t->s->coll->layer = -1;
    for (uint32_t round = first; round < t->n_rounds && rc == 0; round++) {
        rc = run_round(t, round, r, err);
        int failed = round == first ? failpoint("in-move") : 0;
        if (failed < 0 && mine == 0)
            mine = err_set(mine_err, failed, "rank %u failed amid the moves", t->s->coll->rank);
    }
    return_buffer(t);
    if (rc == 0 && mine == 0)
        mine = check_arrivals(t, mine_err);
    note_link(r, sent, began);
    *out_mine = mine;
    return rc;
}

int transfer_run(struct transfer *t, struct transfer_result *out, struct err *err)
{
    struct transfer_result r = t->so_far;
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
        if (comes_here(t, &t->moves[i]))
            take(t, &t->moves[i]);
    slots_set_speed(&t->to, t->slots->speed); /* what was measured since it was prepared */
    struct slots old = *t->slots;
    *t->slots = t->to;
    t->to = old;
    failpoint("after-move");
    double seconds = (double)(clock_now_ns() - began) / NS_PER_S;
    r.seconds = seconds > r.seconds ? seconds : r.seconds;
    *out = r;
    return 0;
}
