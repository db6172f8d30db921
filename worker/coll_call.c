/* coll_call.c - shows the others what I call and where my input lies, and waits for them */
#include "worker/coll_call.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/progress.h"
#include "kernels/spans.h"

/* ---- the recorder --------------------------------------------------------------------------- */

static uint32_t record(struct host *h, const struct coll_group *g, enum shm_op op, uint32_t number,
                       int32_t layer, uint64_t n)
{
    struct shm_rank *r = shm_rank_of(&h->shm, h->coll.rank);
    uint32_t i = atomic_load_explicit(&r->n_calls, memory_order_relaxed);
    struct shm_record *rec = &r->ring[i % SHM_RING];
    atomic_store_explicit(&rec->left_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&rec->is_ahead, 0, memory_order_relaxed);
    atomic_store_explicit(&rec->op, op, memory_order_relaxed);
    atomic_store_explicit(&rec->group, g->id, memory_order_relaxed);
    atomic_store_explicit(&rec->number, number, memory_order_relaxed);
    atomic_store_explicit(&rec->layer, layer, memory_order_relaxed);
    atomic_store_explicit(&rec->n, n, memory_order_relaxed);
    atomic_store_explicit(&rec->entered_ns, clock_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&r->n_calls, i + 1, memory_order_release);
    atomic_store_explicit(&r->at, i + 1, memory_order_release);
    progress_made();
    return i;
}

uint32_t call_note(struct host *h, const struct coll_group *g, enum shm_op op, uint64_t n)
{
    return record(h, g, op, ++h->numbers[g->id], h->coll.layer, n);
}

/* NULL: forgotten. */
static struct shm_record *record_of(struct host *h, uint32_t note)
{
    struct shm_rank *r = shm_rank_of(&h->shm, h->coll.rank);
    uint32_t n_calls = atomic_load_explicit(&r->n_calls, memory_order_acquire);
    return n_calls - note <= SHM_RING ? &r->ring[note % SHM_RING] : NULL;
}

void call_note_left(struct host *h, uint32_t note)
{
    struct shm_record *rec = record_of(h, note);
    if (rec)
        atomic_store_explicit(&rec->left_ns, clock_now_ns(), memory_order_relaxed);
}

bool call_note_back(struct host *h, uint32_t note)
{
    struct shm_record *rec = record_of(h, note);
    if (!rec)
        return false;
    atomic_store_explicit(&rec->is_ahead, 0, memory_order_relaxed);
    atomic_store_explicit(&rec->left_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&shm_rank_of(&h->shm, h->coll.rank)->at, note + 1, memory_order_release);
    return true;
}

/* The rank waits in a call that it has started before. */
static void note_return(struct call *c)
{
    struct shm_call *mine = &shm_rank_of(&c->h->shm, c->h->coll.rank)->calls[c->g.id][c->meeting];
    if (!call_note_back(c->h, c->note))
        c->note = record(c->h, &c->g, mine->op, c->number, c->layer, mine->n);
}

void call_note_ahead(struct host *h, uint32_t note)
{
    struct shm_record *rec = record_of(h, note);
    if (rec)
        atomic_store_explicit(&rec->is_ahead, 1, memory_order_relaxed);
}

void call_note_hidden(struct host *h, uint32_t phase, int32_t layer, uint64_t begin_ns,
                      uint64_t arrived_ns, uint64_t finish_ns)
{
    uint64_t end = arrived_ns < finish_ns ? arrived_ns : finish_ns;
    uint64_t begin = begin_ns > h->hidden_until_ns ? begin_ns : h->hidden_until_ns;
    if (end <= begin || h->coll.is_at_once || h->coll.is_blocking)
        return;
    h->hidden_until_ns = end;
    if (h->coll.dev)
        spans_beside(h->coll.dev, phase, layer, begin, end);
}

/* ---- inputs --------------------------------------------------------------------------------- */

static bool is_free(const struct call_copy *copy)
{
    return !copy->done || shm_has_reached(copy->done, copy->target);
}

/* The smallest free one that is large enough; else the largest free one, which is to grow; else a
 * new one. */
static struct call_copy *find_copy(struct host *h, size_t n_bytes)
{
    struct call_copy *best = NULL;
    for (size_t i = 0; i < h->n_copies; i++) {
        struct call_copy *a = &h->copies[i];
        if (!is_free(a))
            continue;
        bool fits = a->n_bytes >= n_bytes, best_fits = best && best->n_bytes >= n_bytes;
        if (!best || (fits && !best_fits) ||
            (fits == best_fits && (a->n_bytes < best->n_bytes) == fits))
            best = a;
    }
    if (best)
        return best;
    h->copies = xrealloc(h->copies, (h->n_copies + 1) * sizeof *h->copies);
    best = &h->copies[h->n_copies++];
    *best = (struct call_copy){0};
    return best;
}

/* A copy that is large is waited for, so that there need not be many. */
static int copy_large(struct call *c, size_t n_bytes, uint8_t **out, struct err *err)
{
    struct host *h = c->h;
    struct call_copy *copy = find_copy(h, n_bytes);
    if (n_bytes > copy->n_bytes) {
        size_t wanted = n_bytes > 2 * copy->n_bytes ? n_bytes : 2 * copy->n_bytes;
        uint8_t *p = shm_alloc(&h->shm, wanted);
        if (!p)
            return err_set(err, -ENOMEM, "no memory left for a message of %zu bytes", n_bytes);
        *copy = (struct call_copy){.p = p, .n_bytes = wanted};
    }
    copy->done = &c->counts->done;
    copy->target = c->target;
    c->is_read = true;
    *out = copy->p;
    return 0;
}

/* My input as the others see it: where it is, or a copy. */
static int show_input(struct call *c, const struct call_what *w, uint64_t *out_at, struct err *err)
{
    const struct shm *s = &c->h->shm;
    const uint8_t *arena = shm_arena_of(s, s->rank), *p = w->in;
    *out_at = 0;
    if (w->in_bytes == 0)
        return 0;
    uint8_t *copy = shm_small_of(s, c->g.id, c->meeting);
    bool is_inside = p >= arena && p < arena + s->arena_bytes;
    if (is_inside && !w->copies) {
        c->is_read = true;
        *out_at = (uint64_t)(p - s->base);
        return 0;
    }
    if (w->in_bytes > SHM_SMALL_BYTES) {
        int rc = copy_large(c, w->in_bytes, &copy, err);
        if (rc < 0)
            return rc;
    }
    memcpy(copy, w->in, w->in_bytes);
    *out_at = (uint64_t)(copy - s->base);
    return 0;
}

/* ---- calls ---------------------------------------------------------------------------------- */

static const struct shm_call *shown_by(const struct call *c, uint32_t i)
{
    return &shm_rank_of(&c->h->shm, c->g.ranks[i])->calls[c->g.id][c->meeting];
}

static int show(struct call *c, const struct call_what *w, struct err *err)
{
    struct host *h = c->h;
    struct shm_call *mine = &shm_rank_of(&h->shm, h->coll.rank)->calls[c->g.id][c->meeting];
    uint64_t in_at;
    int rc = show_input(c, w, &in_at, err);
    if (rc < 0)
        return rc;
    if (w->send_rows)
        memcpy(shm_rows_of(&h->shm, h->coll.rank, c->g.id, c->meeting), w->send_rows,
               c->g.n_ranks * sizeof *w->send_rows);
    c->started_ns = clock_now_ns();
    *mine = (struct shm_call){.op = w->op, .op_word = w->word, .number = c->number, .n = w->n,
                              .n_blocks = w->n_blocks, .in_at = in_at,
                              .arrived_ns = c->started_ns};
    return 0;
}

int call_start(struct host *h, const struct coll_group *g, const struct call_what *what,
               struct call *out, struct err *err)
{
    int rc = shm_check(&h->shm, err);
    assert(g->id < COLL_GROUPS_MAX && g->ranks[g->me] == h->coll.rank);
    if (rc < 0)
        return rc;
    uint32_t at = ++h->met[g->id], turn = (at - 1) / COLL_OPEN_MAX, first;
    uint32_t n_here = shm_count_here(&h->shm, g, &first);
    struct call c = {.h = h, .g = *g, .at = at, .meeting = (at - 1) % COLL_OPEN_MAX,
                     .target = (turn + 1) * n_here, .layer = h->coll.layer,
                     .note = call_note(h, g, what->op, what->n), .number = h->numbers[g->id]};
    c.counts = &shm_rank_of(&h->shm, first)->groups[g->id].meetings[c.meeting];
    if ((rc = shm_wait_for(&h->shm, g, &c.counts->done, turn * n_here, err)) < 0 ||
        (rc = show(&c, what, err)) < 0)
        return rc;
    shm_count_up(&c.counts->arrived, c.target);
    call_note_ahead(h, c.note);
    *out = c;
    return 0;
}

/* A call that does not fit what another member does would read wrong memory. */
static int agree_on(const struct call *c, struct err *err)
{
    const struct shm_call *mine = shown_by(c, c->g.me);
    for (uint32_t i = 0; i < c->g.n_ranks; i++) {
        const struct shm_call *r = shown_by(c, i);
        if (r->op == mine->op && r->number == mine->number && r->n == mine->n &&
            r->n_blocks == mine->n_blocks && r->op_word == mine->op_word)
            continue;
        shm_abort(&c->h->shm,
                  "ranks disagree in group %u: rank %u calls %s %u of %zu x %zu, rank %u %s %u of "
                  "%zu x %zu", c->g.id, c->h->coll.rank, shm_op_name(mine->op), mine->number,
                  (size_t)mine->n_blocks, (size_t)mine->n, c->g.ranks[i], shm_op_name(r->op),
                  r->number, (size_t)r->n_blocks, (size_t)r->n);
        shm_check(&c->h->shm, err);
        if (err)
            err->code = -EPROTO;
        return -EPROTO;
    }
    return 0;
}

int call_wait(struct call *c, struct err *err)
{
    note_return(c);
    int rc = shm_wait_for(&c->h->shm, &c->g, &c->counts->arrived, c->target, err);
    return rc < 0 ? rc : agree_on(c, err);
}

void call_met(struct call *c)
{
    shm_count_up(&c->counts->done, c->target);
}

void call_done(struct call *c)
{
    call_met(c);
    call_note_left(c->h, c->note);
}

int call_reclaim(struct call *c, struct err *err)
{
    struct shm_count *done = &c->counts->done;
    if (!c->is_read || shm_has_reached(done, c->target))
        return 0;
    note_return(c);
    int rc = shm_wait_for(&c->h->shm, &c->g, done, c->target, err);
    if (rc == 0)
        call_note_left(c->h, c->note);
    return rc;
}

int call_end(struct call *c, struct err *err)
{
    call_done(c);
    return call_reclaim(c, err);
}

uint64_t call_arrived_ns(const struct call *c)
{
    uint64_t last = 0;
    for (uint32_t i = 0; i < c->g.n_ranks; i++)
        last = shown_by(c, i)->arrived_ns > last ? shown_by(c, i)->arrived_ns : last;
    return last;
}

uint8_t *call_input_of(const struct call *c, uint32_t i)
{
    return c->h->shm.base + shown_by(c, i)->in_at;
}

/* ---- rows ----------------------------------------------------------------------------------- */

const int64_t *call_rows_of(const struct call *c, uint32_t i)
{
    return shm_rows_of(&c->h->shm, c->g.ranks[i], c->g.id, c->meeting);
}

int call_rows_before(const struct call *c, uint32_t i, int64_t n_rows, int64_t *out_before,
                     struct err *err)
{
    const struct coll_group *g = &c->g;
    const int64_t *sent = call_rows_of(c, i);
    int64_t before = 0;
    if (sent[g->me] != n_rows) {
        shm_abort(&c->h->shm, "all_to_all %u: rank %u sends %lld rows to rank %u, which expects "
                  "%lld", c->number, g->ranks[i], (long long)sent[g->me], c->h->coll.rank,
                  (long long)n_rows);
        shm_check(&c->h->shm, err);
        return -EPROTO;
    }
    for (uint32_t j = 0; j < g->me; j++)
        before += sent[j];
    *out_before = before;
    return 0;
}
