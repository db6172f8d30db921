/* coll_call.c - shows the others what I call and where my input lies, and waits for them */
#include "worker/coll_call.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "common/clock.h"

/* My input as the others see it: where it is, or a copy. */
static int publish(struct host *h, const void *in, size_t n_bytes, uint64_t *out_at,
                   struct err *err)
{
    const uint8_t *arena = shm_arena_of(&h->shm, h->shm.rank), *p = in;
    if (p >= arena && p < arena + h->shm.arena_bytes) {
        *out_at = (uint64_t)(p - arena);
        return 0;
    }
    if (n_bytes > h->copy_bytes) {
        size_t wanted = n_bytes > 2 * h->copy_bytes ? n_bytes : 2 * h->copy_bytes;
        uint8_t *copy = shm_alloc(&h->shm, wanted);
        if (!copy)
            return err_set(err, -ENOMEM, "no memory left for a message of %zu bytes", n_bytes);
        h->copy = copy;
        h->copy_bytes = wanted;
    }
    if (n_bytes > 0)
        memcpy(h->copy, in, n_bytes);
    *out_at = h->copy ? (uint64_t)(h->copy - arena) : 0;
    return 0;
}

/* A call that does not fit what another member does would read wrong memory. */
static int agree_on(const struct call *c, struct err *err)
{
    for (uint32_t i = 0; i < c->g->n_ranks; i++) {
        const struct shm_rank *r = shm_rank_of(&c->h->shm, c->g->ranks[i]);
        if (r->op == c->mine->op && r->number == c->mine->number && r->n == c->mine->n &&
            r->n_blocks == c->mine->n_blocks && r->op_word == c->mine->op_word)
            continue;
        shm_abort(&c->h->shm,
                  "ranks disagree in group %u: rank %u calls %s %u of %zu x %zu, rank %u %s %u of "
                  "%zu x %zu", c->g->id, c->h->coll.rank, shm_op_name(c->mine->op),
                  c->mine->number, (size_t)c->mine->n_blocks, (size_t)c->mine->n, c->g->ranks[i],
                  shm_op_name(r->op), r->number, (size_t)r->n_blocks, (size_t)r->n);
        shm_check(&c->h->shm, err);
        if (err)
            err->code = -EPROTO;
        return -EPROTO;
    }
    return 0;
}

static uint32_t record(struct host *h, const struct coll_group *g, enum shm_op op, uint64_t n)
{
    struct shm_rank *r = shm_rank_of(&h->shm, h->coll.rank);
    uint32_t i = atomic_load_explicit(&r->n_calls, memory_order_relaxed);
    struct shm_record *rec = &r->ring[i % SHM_RING];
    atomic_store_explicit(&rec->left_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&rec->op, op, memory_order_relaxed);
    atomic_store_explicit(&rec->group, g->id, memory_order_relaxed);
    atomic_store_explicit(&rec->number, h->numbers[g->id], memory_order_relaxed);
    atomic_store_explicit(&rec->layer, h->coll.layer, memory_order_relaxed);
    atomic_store_explicit(&rec->n, n, memory_order_relaxed);
    atomic_store_explicit(&rec->entered_ns, clock_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&r->n_calls, i + 1, memory_order_release);
    return i;
}

uint32_t call_note(struct host *h, const struct coll_group *g, enum shm_op op, uint64_t n)
{
    h->numbers[g->id]++;
    return record(h, g, op, n);
}

void call_note_left(struct host *h, uint32_t note)
{
    struct shm_rank *r = shm_rank_of(&h->shm, h->coll.rank);
    if (atomic_load_explicit(&r->n_calls, memory_order_acquire) - note <= SHM_RING)
        atomic_store_explicit(&r->ring[note % SHM_RING].left_ns, clock_now_ns(),
                              memory_order_relaxed);
}

int call_enter(struct host *h, const struct coll_group *g, enum shm_op op, uint32_t op_word,
               const void *in, size_t in_bytes, size_t n, size_t n_blocks, struct call *out,
               struct err *err)
{
    int rc;
    struct call c = {.h = h, .g = g, .mine = shm_rank_of(&h->shm, h->coll.rank)};
    assert(g->id < COLL_GROUPS_MAX && g->ranks[g->me] == h->coll.rank);
    if ((rc = shm_check(&h->shm, err)) < 0)
        return rc;
    c.note = call_note(h, g, op, n);
    c.mine->op = op;
    c.mine->op_word = op_word;
    c.mine->number = h->numbers[g->id];
    c.mine->n = n;
    c.mine->n_blocks = n_blocks;
    c.mine->in_arena = h->coll.rank;
    if ((rc = publish(h, in, in_bytes, &c.mine->in_at, err)) < 0)
        return rc;
    if ((rc = shm_wait_all(&h->shm, g, err)) < 0 || (rc = agree_on(&c, err)) < 0)
        return rc;
    *out = c;
    return 0;
}

int call_leave(struct call *c, struct err *err)
{
    int rc = shm_wait_all(&c->h->shm, c->g, err);
    if (rc == 0)
        call_note_left(c->h, c->note);
    return rc;
}

uint8_t *call_input_of(const struct call *c, uint32_t i)
{
    const struct shm_rank *r = shm_rank_of(&c->h->shm, c->g->ranks[i]);
    return shm_arena_of(&c->h->shm, r->in_arena) + r->in_at;
}

/* ---- rows ----------------------------------------------------------------------------------- */

void call_show_rows(struct host *h, const struct coll_group *g, const int64_t *send_rows)
{
    int64_t *counts = shm_counts_of(&h->shm, h->coll.rank);
    for (uint32_t i = 0; i < g->n_ranks; i++)
        counts[i] = send_rows[i];
}

int call_rows_before(const struct call *c, uint32_t i, int64_t n_rows, int64_t *out_before,
                     struct err *err)
{
    const struct coll_group *g = c->g;
    const int64_t *sent = shm_counts_of(&c->h->shm, g->ranks[i]);
    int64_t before = 0;
    if (sent[g->me] != n_rows) {
        shm_abort(&c->h->shm, "all_to_all %u: rank %u sends %lld rows to rank %u, which expects "
                  "%lld", c->mine->number, g->ranks[i], (long long)sent[g->me],
                  c->h->coll.rank, (long long)n_rows);
        shm_check(&c->h->shm, err);
        return -EPROTO;
    }
    for (uint32_t j = 0; j < g->me; j++)
        before += sent[j];
    *out_before = before;
    return 0;
}
