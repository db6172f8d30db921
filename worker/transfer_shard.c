/* transfer_shard.c - a shard's experts move: in rounds, sealed, and taken all at once
 *
 * What arrives stays in staging memory, each part of an expert with a seal behind it: a checksum
 * and what it is. When all ranks agree that everything they have of a stage is sound, each copies
 * its staging into its slots. Stages share that memory, but for what has gone ahead. All of it lies
 * in the device's memory, and the host waits for it once: to look at the seals, and at the
 * checksums that the device makes of what has arrived. */
#include "worker/transfer_parts.h"

#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/failpoint.h"
#include "common/mem.h"
#include "worker/agree.h"
#include "worker/shard_state.h"

/* What travels is counted in cache lines, so that everything stays aligned whatever it is. */
#define LINE_BYTES 64u

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

struct shard_transfer {
    struct transfer base;
    struct shard *s;
    uint32_t n_proofs;
    char    *staging;     /* the device's, of what comes here */
    struct proof *proofs; /* the device's (n_proofs) */
    void    *send;        /* of one move; while the moves run */
    int64_t *send_rows, *recv_rows; /* lines, per device */
};

static uint32_t device_of(const struct shard_transfer *t, uint32_t slot)
{
    return moves_device(&t->base.moves, slot);
}

/* Of a part with its seal. */
static size_t row_bytes(const struct shard_transfer *t, int part)
{
    size_t n_lines = (t->base.moves.part_bytes[part] + LINE_BYTES - 1) / LINE_BYTES;
    return (n_lines + 1) * LINE_BYTES;
}

/* Of all parts of a move, with their seals or without. */
static size_t move_bytes(const struct shard_transfer *t, const struct move *m, bool sealed)
{
    size_t n = 0;
    for (int part = 0; part < SLOT_PARTS; part++)
        if (moves_has_part(&t->base.moves, m, part))
            n += sealed ? row_bytes(t, part) : t->base.moves.part_bytes[part];
    return n;
}

/* ---- parts ---------------------------------------------------------------------------------- */

static void *part_of(const struct shard_transfer *t, uint32_t layer, uint32_t slot, int part)
{
    return shard_slot(t->s, layer, slot % t->base.slots->n_slots, (enum slot_part)part);
}

static void checksum(const struct shard_transfer *t, uint64_t *acc_sum, const char *row, int part)
{
    size_t n_bytes = t->base.moves.part_bytes[part];
    assert(n_bytes % sizeof(uint64_t) == 0); /* slices are whole half lines */
    t->s->dev->ops->checksum(t->s->dev, acc_sum, (const uint64_t *)(const void *)row,
                             (int64_t)(n_bytes / sizeof(uint64_t)), 0);
}

/* But for its checksum, which is 0. */
static struct seal seal_of(const struct shard_transfer *t, const struct move *m, int part)
{
    return (struct seal){.epoch = t->base.to.epoch, .layer = m->layer, .expert = m->expert,
                         .part = (uint32_t)part};
}

/* Where the seal of a part is. */
static void *seal_at(const struct shard_transfer *t, char *row, int part)
{
    return row + row_bytes(t, part) - LINE_BYTES;
}

/* A bit that the network or the memory turned. */
static void turn_bit(const struct shard_transfer *t, char *row)
{
    struct device *dev = t->s->dev;
    char byte;
    dev->ops->to_host(dev, &byte, row, 1);
    byte ^= 1;
    dev->ops->to_device(dev, row, &byte, 1);
}

/* The parts of a move from their slot to packed rows, sealed. */
static void pack(const struct shard_transfer *t, const struct move *m, char *row)
{
    struct device *dev = t->s->dev;
    for (int part = 0; part < SLOT_PARTS; part++) {
        if (!moves_has_part(&t->base.moves, m, part))
            continue;
        const struct seal seal = seal_of(t, m, part);
        dev->ops->copy(dev, row, part_of(t, m->layer, m->from, part),
                       t->base.moves.part_bytes[part]);
        dev->ops->to_device(dev, seal_at(t, row, part), &seal, sizeof seal);
        checksum(t, seal_at(t, row, part), row, part);
        if (failpoint("move-checksum") < 0)
            turn_bit(t, row);
        row += row_bytes(t, part);
    }
}

/* What shows whether the parts of a move arrived whole. */
static void prove(const struct shard_transfer *t, const struct move *m)
{
    struct device *dev = t->s->dev;
    char *row = t->staging + m->at;
    struct proof *proof = t->proofs + m->proof;
    for (int part = 0; part < SLOT_PARTS; part++) {
        if (!moves_has_part(&t->base.moves, m, part))
            continue;
        dev->ops->copy(dev, &proof->seal, seal_at(t, row, part), sizeof proof->seal);
        checksum(t, &proof->checksum, row, part);
        proof++;
        row += row_bytes(t, part);
    }
}

/* proofs: the host's. */
static int check(const struct shard_transfer *t, const struct move *m, const struct proof *proofs,
                 struct err *err)
{
    const struct proof *proof = proofs + m->proof;
    for (int part = 0; part < SLOT_PARTS; part++) {
        if (!moves_has_part(&t->base.moves, m, part))
            continue;
        struct seal expected = seal_of(t, m, part);
        expected.checksum = proof->checksum;
        if (memcmp(&proof->seal, &expected, sizeof expected) != 0)
            return err_set(err, -EBADMSG, "placement %u: expert %u of layer %u arrived damaged at "
                           "rank %u from rank %u", t->base.to.epoch, m->expert, m->layer,
                           t->s->coll->rank, t->s->ep.ranks[device_of(t, m->from)]);
        proof++;
    }
    return 0;
}

/* From staging to where it belongs. */
static void take(const struct shard_transfer *t, const struct move *m)
{
    const char *row = t->staging + m->at;
    for (int part = 0; part < SLOT_PARTS; part++) {
        if (!moves_has_part(&t->base.moves, m, part))
            continue;
        t->s->dev->ops->copy(t->s->dev, part_of(t, m->layer, m->to, part), row,
                             t->base.moves.part_bytes[part]);
        row += row_bytes(t, part);
    }
}

/* ---- create --------------------------------------------------------------------------------- */

/* The same in every layer that has experts. */
static void measure_parts(const struct shard *s, const struct slots *slots,
                          size_t bytes[SLOT_PARTS])
{
    for (uint32_t l = 0; l < slots->n_layers; l++)
        for (int part = 0; slots_is_sparse(slots, l) && part < SLOT_PARTS; part++)
            bytes[part] = shard_slot_bytes(s, l, (enum slot_part)part);
}

static size_t largest_move_bytes(const struct shard_transfer *t)
{
    return move_bytes(t, &(struct move){.parts = MOVES_WITH_WEIGHTS | MOVES_WITH_STATE}, true);
}

static bool comes_here(const struct shard_transfer *t, const struct move *m)
{
    return device_of(t, m->to) == t->base.slots->me;
}

static bool comes_now(const struct shard_transfer *t, const struct move *m)
{
    return m->stage == t->base.next_stage && comes_here(t, m);
}

/* Where the moves of a stage that come here go, from `at` on, or those that go ahead; returns the
 * end. */
static size_t place_arrivals(struct shard_transfer *t, bool ahead, uint32_t stage, size_t at)
{
    for (uint32_t i = 0; i < t->base.moves.n; i++) {
        struct move *m = &t->base.moves.move[i];
        if (!comes_here(t, m) || moves_goes_ahead(&t->base.moves, m) != ahead ||
            (!ahead && m->stage != stage))
            continue;
        m->at = at;
        m->proof = t->n_proofs;
        at += move_bytes(t, m, true);
        for (int part = 0; part < SLOT_PARTS; part++)
            t->n_proofs += moves_has_part(&t->base.moves, m, part);
    }
    return at;
}

static size_t place_all_arrivals(struct shard_transfer *t)
{
    size_t ahead = place_arrivals(t, true, 0, 0), most = ahead;
    for (uint32_t k = 0; k < t->base.moves.n_stages; k++) {
        size_t end = place_arrivals(t, false, k, ahead);
        most = end > most ? end : most;
    }
    return most;
}

static int take_staging(struct shard_transfer *t, struct err *err)
{
    struct device *dev = t->s->dev;
    size_t n = place_all_arrivals(t);
    if (n == 0)
        return 0;
    t->staging = dev->ops->alloc(dev, n);
    t->proofs = dev->ops->alloc(dev, t->n_proofs * sizeof *t->proofs);
    return t->staging && t->proofs
               ? 0 : err_set(err, -ENOMEM, "no memory for %zu MiB of experts that are to move here",
                             n >> 20);
}

static void destroy(struct transfer *base)
{
    struct shard_transfer *t = (struct shard_transfer *)base;
    if (t->staging)
        t->s->dev->ops->free(t->s->dev, t->staging);
    if (t->proofs)
        t->s->dev->ops->free(t->s->dev, t->proofs);
    transfer_fini(base);
    free(t->send_rows);
    free(t->recv_rows);
    free(t);
}

/* ---- run ------------------------------------------------------------------------------------ */

/* My move of a round that goes out (outward) or comes in, or NULL. */
static const struct move *find(const struct shard_transfer *t, uint32_t round, bool outward)
{
    for (uint32_t i = 0; i < t->base.moves.n; i++) {
        const struct move *m = &t->base.moves.move[i];
        if (m->round == round && moves_travels(&t->base.moves, m) &&
            device_of(t, outward ? m->from : m->to) == t->base.slots->me)
            return m;
    }
    return NULL;
}

/* From a slot over the network into staging. */
static int run_round(struct shard_transfer *t, uint32_t round, struct transfer_result *r,
                     struct err *err)
{
    const struct move *out = find(t, round, true), *in = find(t, round, false);
    memset(t->send_rows, 0, t->base.slots->n_devices * sizeof *t->send_rows);
    memset(t->recv_rows, 0, t->base.slots->n_devices * sizeof *t->recv_rows);
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

static int take_buffer(struct shard_transfer *t, struct err *err)
{
    return shard_buffer_take(t->s, largest_move_bytes(t), &t->send, err);
}

static void return_buffer(struct shard_transfer *t)
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

static int ahead(struct transfer *base, uint32_t end, double *out_seconds, struct err *err)
{
    struct shard_transfer *t = (struct shard_transfer *)base;
    uint64_t began = clock_now_ns(), sent = base->ahead.sent_bytes;
    int rc = take_buffer(t, err);
    t->s->coll->layer = -1;
    for (uint32_t round = base->next_round; round < end && rc == 0; round++)
        rc = run_round(t, round, &base->ahead, err);
    return_buffer(t);
    t->s->dev->ops->synchronize(t->s->dev);
    note_link(&base->ahead, sent, began);
    *out_seconds = (double)(clock_now_ns() - began) / NS_PER_S;
    return rc;
}

/* Waits for the device. */
static int check_arrivals(const struct shard_transfer *t, struct err *err)
{
    struct device *dev = t->s->dev;
    struct proof *proofs = xcalloc(t->n_proofs + 1, sizeof *proofs);
    int rc = 0;
    for (uint32_t i = 0; i < t->base.moves.n; i++) {
        const struct move *m = &t->base.moves.move[i];
        if (!comes_now(t, m))
            continue;
        if (!moves_travels(&t->base.moves, m))
            pack(t, m, t->staging + m->at);
        prove(t, m);
    }
    dev->ops->to_host(dev, proofs, t->proofs, t->n_proofs * sizeof *proofs);
    for (uint32_t i = 0; i < t->base.moves.n && rc == 0; i++)
        if (comes_now(t, &t->base.moves.move[i]))
            rc = check(t, &t->base.moves.move[i], proofs, err);
    free(proofs);
    return rc;
}

/* Everything of this stage that comes here into staging. *out_mine: what this rank found wrong with
 * it. */
static int run_rounds(struct shard_transfer *t, uint32_t end, struct transfer_result *r,
                      int *out_mine, struct err *mine_err, struct err *err)
{
    int rc = take_buffer(t, err), mine = failpoint("before-move");
    uint32_t first = t->base.next_round;
    uint64_t began = clock_now_ns(), sent = r->sent_bytes;
    if (mine < 0)
        err_set(mine_err, mine, "rank %u failed before the moves", t->s->coll->rank);
    t->s->coll->layer = -1;
    for (uint32_t round = first; round < end && rc == 0; round++) {
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

static int run(struct transfer *base, uint32_t end, struct transfer_result *r, struct err *err)
{
    struct shard_transfer *t = (struct shard_transfer *)base;
    struct err mine_err = {0};
    uint64_t began = clock_now_ns();
    int mine = 0, rc = run_rounds(t, end, r, &mine, &mine_err, err);
    if (rc < 0)
        return rc;
    if (mine < 0 && err)
        *err = mine_err;
    if ((rc = agree(t->s->coll, mine, err)) < 0)
        return rc;
    for (uint32_t i = 0; i < base->moves.n; i++)
        if (comes_now(t, &base->moves.move[i]))
            take(t, &base->moves.move[i]);
    transfer_put_in_force(base);
    failpoint("after-move");
    r->seconds = (double)(clock_now_ns() - began) / NS_PER_S;
    return 0;
}

static const struct transfer_ops ops = {.ahead = ahead, .run = run, .destroy = destroy};

int transfer_create(struct shard *s, struct slots *slots, struct slots *to,
                    uint32_t *const *stage, struct transfer **out, struct err *err)
{
    struct shard_transfer *t = xcalloc(1, sizeof *t);
    size_t part_bytes[SLOT_PARTS] = {0};
    measure_parts(s, slots, part_bytes);
    transfer_init(&t->base, &ops, slots, to, stage, part_bytes);
    t->s = s;
    t->send_rows = xcalloc(slots->n_devices, sizeof *t->send_rows);
    t->recv_rows = xcalloc(slots->n_devices, sizeof *t->recv_rows);
    int rc = take_staging(t, err);
    if (rc < 0) {
        transfer_destroy(&t->base);
        return rc;
    }
    *out = &t->base;
    return 0;
}
