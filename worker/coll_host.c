/* coll_host.c - collectives through shared memory; those between machines are coll_span's
 *
 * Every operation has the same shape: show the others where my input lies, wait for all, read
 * theirs in place, and wait until all have read (then my input is mine once more). Input that does
 * not lie in memory that travels is copied there first, and words always are, so that few wait
 * for who reads them; what the host cannot reach goes another way, see coll_stage. What is started
 * is shown at once; whoever needs the result reads it for itself, when it finishes. A sum is cut
 * over the members; each adds its part of all inputs in rank order and, in an all_reduce, writes it
 * into everybody's array at once, so that no second round of copies is needed. */
#include "worker/coll.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/coll_copy.h"
#include "worker/coll_fold.h"
#include "worker/coll_meet.h"
#include "worker/coll_span.h"
#include "worker/coll_stage.h"
#include "worker/phases.h"

/* ---- what is started, and finished later ---------------------------------------------------- */

static struct open_call *open_of(struct host *h, coll_ticket ticket)
{
    uint32_t at = (uint32_t)(ticket >> 8), group = ticket & 0xff;
    assert(group < COLL_GROUPS_MAX);
    return &h->open[group][(at - 1) % COLL_OPEN_MAX];
}

/* Takes what is called for o, but for the call itself. */
static int start(struct host *h, const struct coll_group *g, const struct call_what *what,
                 const struct open_call *o, coll_ticket *out_ticket, struct err *err)
{
    struct open_call *mine = &h->open[g->id][h->met[g->id] % COLL_OPEN_MAX];
    assert(mine->call.at == 0 || mine->is_over);
    *mine = *o;
    int rc = call_start(h, g, what, &mine->call, err);
    if (rc < 0)
        return rc;
    *out_ticket = (coll_ticket)mine->call.at << 8 | g->id;
    return 0;
}

static int host_finish(struct coll *c, coll_ticket ticket, struct err *err)
{
    struct host *h = host_of(c);
    if (ticket == 0)
        return 0;
    if (span_has(ticket))
        return span_finish(h, ticket, err);
    struct open_call *o = open_of(h, ticket);
    assert(o->call.at == ticket >> 8 && !o->is_over);
    uint64_t began_ns = clock_now_ns();
    int rc = call_wait(&o->call, err);
    if (rc < 0)
        return rc;
    call_note_hidden(h, o->hidden, o->call.layer, o->call.started_ns, call_arrived_ns(&o->call),
                     began_ns);
    rc = o->take(o, err);
    o->is_over = true;
    call_done(&o->call);
    return rc;
}

/* Where another call has its place, all were done with it. */
static int host_reclaim(struct coll *c, coll_ticket ticket, struct err *err)
{
    struct host *h = host_of(c);
    if (span_has(ticket))
        return span_reclaim(h, ticket, err);
    struct open_call *o = ticket == 0 ? NULL : open_of(h, ticket);
    if (!o || o->call.at != ticket >> 8)
        return 0;
    assert(o->is_over);
    return call_reclaim(&o->call, err);
}

/* n elements from byte at on of all inputs, into the first n_out of h->outputs. */
static void fold_inputs(const struct call *c, const struct fold *fold, size_t at, size_t n,
                        uint32_t n_out)
{
    struct host *h = c->h;
    for (uint32_t i = 0; i < c->g.n_ranks; i++)
        h->inputs[i] = call_input_of(c, i);
    fold_run(fold, h->inputs, c->g.n_ranks, at, n, h->outputs, n_out);
}

static int take_scattered(struct open_call *o, struct err *err)
{
    const struct call *c = &o->call;
    size_t part = o->n * o->width, block = part * c->g.n_ranks;
    (void)err;
    for (size_t b = 0; b < o->n_blocks; b++) {
        c->h->outputs[0] = o->out + b * part;
        fold_inputs(c, o->fold, b * block + c->g.me * part, o->n, 1);
    }
    return 0;
}

static int host_start_reduce_scatter(struct coll *coll, const struct coll_group *g,
                                     enum elem_type type, const void *in, size_t n,
                                     size_t n_blocks, void *out, coll_ticket *out_ticket,
                                     struct err *err)
{
    struct host *h = host_of(coll);
    *out_ticket = 0;
    const struct fold *fold = fold_of(type, COLL_SUM);
    if (span_crosses(h, g) && host_reaches_tensors(h))
        return span_start_scatter(h, g, call_word(type, COLL_SUM), fold, in, n, n_blocks, out,
                                  out_ticket, err);
    if (span_crosses(h, g))
        return span_down_scatter(h, g, call_word(type, COLL_SUM), fold, in, n, n_blocks, out, err);
    if (!host_reaches_tensors(h))
        return stage_reduce_scatter(h, g, type, in, n, n_blocks, out, err);
    const struct call_what what = {
        .op = SHM_REDUCE_SCATTER, .word = call_word(type, COLL_SUM), .n = n, .n_blocks = n_blocks,
        .in = in, .in_bytes = n_blocks * n * fold->width * g->n_ranks,
    };
    const struct open_call o = {.out = out, .n = n, .n_blocks = n_blocks, .width = fold->width,
                                .fold = fold, .take = take_scattered,
                                .hidden = PHASE_REDUCE_HIDDEN};
    return start(h, g, &what, &o, out_ticket, err);
}

static int take_gathered(struct open_call *o, struct err *err)
{
    const struct coll_group *g = &o->call.g;
    size_t part = o->n * o->width, all = part * o->n_blocks * g->n_ranks;
    (void)err;
    for (uint32_t k = 0; k < g->n_ranks && part > 0; k++) {
        uint32_t i = (g->me + k) % g->n_ranks; /* not all from the same member at once */
        const uint8_t *from = call_input_of(&o->call, i);
        for (size_t b = 0; b < o->n_blocks; b++) {
            uint8_t *to = o->out + (b * g->n_ranks + i) * part;
            if (to != from + b * part)
                copy_piece(to, from + b * part, part, all);
        }
    }
    return 0;
}

static int host_start_all_gather(struct coll *c, const struct coll_group *g, enum elem_type type,
                                 const void *in, size_t n, size_t n_blocks, void *out,
                                 coll_ticket *out_ticket, struct err *err)
{
    struct host *h = host_of(c);
    *out_ticket = 0;
    size_t width = fold_of(type, COLL_SUM)->width;
    if (span_crosses(h, g) && host_reaches_tensors(h))
        return span_start_gather(h, g, width, in, n, n_blocks, out, out_ticket, err);
    if (span_crosses(h, g))
        return span_down_gather(h, g, SHM_ALL_GATHER, width, in, n, n_blocks, out, err);
    if (!host_reaches_tensors(h))
        return stage_all_gather(h, g, type, in, n, n_blocks, out, err);
    const struct call_what what = {
        .op = SHM_ALL_GATHER, .word = call_word(type, COLL_SUM), .n = n, .n_blocks = n_blocks,
        .in = in, .in_bytes = n * n_blocks * width,
    };
    const struct open_call o = {.out = out, .n = n, .n_blocks = n_blocks, .width = width,
                                .take = take_gathered, .hidden = PHASE_GATHER_HIDDEN};
    return start(h, g, &what, &o, out_ticket, err);
}

static size_t count_rows(const int64_t *rows, uint32_t n_members)
{
    size_t n = 0;
    for (uint32_t i = 0; i < n_members; i++)
        n += (size_t)rows[i];
    return n;
}

static int take_rows(struct open_call *o, struct err *err)
{
    const struct coll_group *g = &o->call.g;
    size_t all = count_rows(o->recv_rows, g->n_ranks) * o->width;
    size_t at = count_rows(o->recv_rows, g->me) * o->width;
    for (uint32_t k = 0; k < g->n_ranks; k++) {
        uint32_t i = (g->me + k) % g->n_ranks; /* not all from the same member at once */
        int64_t before;
        size_t n = (size_t)o->recv_rows[i] * o->width;
        int rc = call_rows_before(&o->call, i, o->recv_rows[i], &before, err);
        if (rc < 0)
            return rc;
        at = i == 0 ? 0 : at;
        copy_piece(o->out + at, call_input_of(&o->call, i) + (size_t)before * o->width, n, all);
        at += n;
    }
    return 0;
}

static int host_start_all_to_all_rows(struct coll *coll, const struct coll_group *g,
                                      const void *send, const int64_t *send_rows, void *recv,
                                      const int64_t *recv_rows, size_t row_bytes,
                                      coll_ticket *out_ticket, struct err *err)
{
    struct host *h = host_of(coll);
    *out_ticket = 0;
    if (span_crosses(h, g) && host_reaches_tensors(h))
        return span_start_rows(h, g, send, send_rows, recv, recv_rows, row_bytes, out_ticket, err);
    if (span_crosses(h, g))
        return span_down_rows(h, g, send, send_rows, recv, recv_rows, row_bytes, err);
    if (!host_reaches_tensors(h))
        return stage_all_to_all_rows(h, g, send, send_rows, recv, recv_rows, row_bytes, err);
    const struct call_what what = {
        .op = SHM_ALL_TO_ALL_ROWS, .n = row_bytes, .n_blocks = 1, .in = send,
        .in_bytes = count_rows(send_rows, g->n_ranks) * row_bytes, .send_rows = send_rows,
    };
    const struct open_call o = {.out = recv, .width = row_bytes, .recv_rows = recv_rows,
                                .take = take_rows, .hidden = PHASE_DISPATCH_HIDDEN};
    return start(h, g, &what, &o, out_ticket, err);
}

/* ---- what blocks ---------------------------------------------------------------------------- */

/* Shows it, and waits for all. */
static int enter(struct host *h, const struct coll_group *g, const struct call_what *what,
                 struct call *out, struct err *err)
{
    int rc = call_start(h, g, what, out, err);
    return rc < 0 ? rc : call_wait(out, err);
}

static int host_all_reduce(struct coll *coll, const struct coll_group *g, enum coll_op op,
                           enum elem_type type, void *x, size_t n, struct err *err)
{
    struct host *h = host_of(coll);
    struct call c;
    int rc;
    if (g->n_ranks == 1)
        return shm_check(&h->shm, err);
    const struct fold *fold = fold_of(type, op);
    if (span_crosses(h, g))
        return (host_reaches_tensors(h) ? span_reduce : span_down_reduce)(
            h, g, SHM_ALL_REDUCE, call_word(type, op), fold, x, n, err);
    if (!host_reaches_tensors(h))
        return stage_all_reduce(h, g, op, type, x, n, err);
    size_t width = fold->width;
    const struct call_what what = {.op = SHM_ALL_REDUCE, .word = call_word(type, op), .n = n,
                                   .n_blocks = 1, .in = x, .in_bytes = n * width};
    if ((rc = enter(h, g, &what, &c, err)) < 0)
        return rc;
    /* Parts are whole cache lines, so that no line has two writers. */
    size_t line = 64 / width, per = (n / g->n_ranks + line) / line * line;
    size_t first = g->me * per < n ? g->me * per : n;
    size_t count = first + per < n ? per : n - first;
    for (uint32_t i = 0; i < g->n_ranks; i++)
        h->outputs[i] = call_input_of(&c, i) + first * width;
    fold_inputs(&c, fold, first * width, count, g->n_ranks);
    c.is_read = true; /* others write the sum there */
    rc = call_end(&c, err);
    const uint8_t *mine = call_input_of(&c, g->me);
    if (rc == 0 && mine != x)
        memcpy(x, mine, n * width);
    return rc;
}

static int host_barrier(struct coll *coll, const struct coll_group *g, struct err *err)
{
    const struct call_what what = {.op = SHM_BARRIER};
    struct call c;
    if (span_crosses(host_of(coll), g))
        return span_barrier(host_of(coll), g, err);
    int rc = enter(host_of(coll), g, &what, &c, err);
    return rc < 0 ? rc : call_end(&c, err);
}

/* They are few: each member adds all for itself. */
static int host_all_reduce_f64(struct coll *coll, const struct coll_group *g, enum coll_op op,
                               double *x, size_t n, struct err *err)
{
    struct host *h = host_of(coll);
    struct call c;
    if (g->n_ranks == 1)
        return shm_check(&h->shm, err);
    if (span_crosses(h, g))
        return span_reduce(h, g, SHM_ALL_REDUCE_F64, op, fold_of_f64(op), x, n, err);
    const struct call_what what = {.op = SHM_ALL_REDUCE_F64, .word = op, .n = n, .n_blocks = 1,
                                   .in = x, .in_bytes = n * sizeof *x, .copies = true};
    int rc = enter(h, g, &what, &c, err);
    if (rc < 0)
        return rc;
    h->outputs[0] = (uint8_t *)x;
    fold_inputs(&c, fold_of_f64(op), 0, n, 1);
    return call_end(&c, err);
}

static int host_all_gather_i32(struct coll *coll, const struct coll_group *g, const int32_t *in,
                               size_t n, int32_t *out, struct err *err)
{
    const struct call_what what = {.op = SHM_ALL_GATHER_I32, .n = n, .n_blocks = 1, .in = in,
                                   .in_bytes = n * sizeof *in, .copies = true};
    struct call c;
    if (span_crosses(host_of(coll), g))
        return span_gather(host_of(coll), g, SHM_ALL_GATHER_I32, sizeof *in, in, n, 1, out, err);
    int rc = enter(host_of(coll), g, &what, &c, err);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < g->n_ranks && n > 0; i++)
        memcpy(out + i * n, call_input_of(&c, i), n * sizeof *out);
    return call_end(&c, err);
}

/* ---- memory --------------------------------------------------------------------------------- */

static void *host_alloc(struct coll *c, size_t n_bytes)
{
    struct host *h = host_of(c);
    if (host_reaches_tensors(h))
        return shm_alloc(&h->shm, n_bytes);
    void *p = c->dev->ops->alloc(c->dev, n_bytes);
    if (p) {
        h->allocs = xrealloc(h->allocs, (h->n_allocs + 1) * sizeof *h->allocs);
        h->allocs[h->n_allocs++] = p;
    }
    return p;
}

/* An arena, which is as large as memory, is used up from one end: what is freed stays taken. */
static void host_free(struct coll *c, void *p)
{
    struct host *h = host_of(c);
    for (size_t i = 0; i < h->n_allocs; i++)
        if (h->allocs[i] == p) {
            h->allocs[i] = h->allocs[--h->n_allocs];
            c->dev->ops->free(c->dev, p);
            return;
        }
}

static void host_shared(struct coll *c, uint64_t *out_bytes, uint64_t *out_n_allocs)
{
    const struct shm *s = &host_of(c)->shm;
    struct host *h = host_of(c);
    /* The stage is touched only where tensors pass through it. */
    *out_bytes = s->arena_used - (host_reaches_tensors(h) ? h->stage_bytes : 0);
    *out_n_allocs = s->n_allocs;
}

/* ---- the rest ------------------------------------------------------------------------------- */

static void host_trace(struct coll *c, FILE *out)
{
    const struct shm *s = &host_of(c)->shm;
    uint64_t now = clock_now_ns();
    for (uint32_t rank = 0; rank < s->world; rank++) {
        struct shm_rank *r = shm_rank_of(s, rank);
        uint32_t n_calls = atomic_load(&r->n_calls);
        for (uint32_t i = n_calls > SHM_RING ? n_calls - SHM_RING : 0; i < n_calls; i++) {
            struct shm_record *rec = &r->ring[i % SHM_RING];
            uint64_t entered = atomic_load(&rec->entered_ns), left = atomic_load(&rec->left_ns);
            fprintf(out, "rank=%u op=%s number=%u group=%u layer=%d n=%llu ago_ms=%.1f %s=%.3f\n",
                    rank, shm_op_name(atomic_load(&rec->op)), atomic_load(&rec->number),
                    atomic_load(&rec->group), atomic_load(&rec->layer),
                    (unsigned long long)atomic_load(&rec->n), (double)(now - entered) / 1e6,
                    left ? "took_ms" : "inside_ms",
                    (double)((left ? left : now) - entered) / 1e6);
        }
    }
}

static void host_set_patience(struct coll *c, uint64_t timeout_ns, uint64_t idle_ns)
{
    atomic_store(&host_of(c)->shm.call_timeout_ns, timeout_ns);
    atomic_store(&host_of(c)->shm.idle_timeout_ns, idle_ns);
}

static _Atomic uint64_t *host_progress(struct coll *c)
{
    return &shm_rank_of(&host_of(c)->shm, c->rank)->progress;
}

static void host_abort(struct coll *c)
{
    shm_abort(&host_of(c)->shm, "rank %u was stopped", c->rank);
    if (host_of(c)->span)
        wire_wake(host_of(c)->span->wire);
}

static void host_close(struct coll *c)
{
    struct host *h = host_of(c);
    while (h->n_allocs > 0)
        host_free(c, h->allocs[h->n_allocs - 1]);
    stage_fini(h);
    span_close(h);
    shm_close(&h->shm);
    free(h->allocs);
    free(h->open);
    free(h->copies);
    free(h->inputs);
    free(h->outputs);
    free(h->world_ranks);
    free(h);
}

static const struct coll_ops host_ops = {
    .name                  = "host",
    .close                 = host_close,
    .alloc                 = host_alloc,
    .free                  = host_free,
    .shared                = host_shared,
    .start_all_gather      = host_start_all_gather,
    .start_reduce_scatter  = host_start_reduce_scatter,
    .start_all_to_all_rows = host_start_all_to_all_rows,
    .finish                = host_finish,
    .reclaim               = host_reclaim,
    .all_reduce            = host_all_reduce,
    .barrier               = host_barrier,
    .all_reduce_f64        = host_all_reduce_f64,
    .all_gather_i32        = host_all_gather_i32,
    .set_patience          = host_set_patience,
    .progress              = host_progress,
    .trace                 = host_trace,
    .abort                 = host_abort,
};

/* All ranks of each host are together: a call of all shows that the hosts reach each other. */
static int meet_hosts(struct host *h, const struct coll_host_config *c, struct err *err)
{
    span_open(h, c->hosts->wire, c->hosts->hosts, c->hosts->peers);
    h->shm.call_timeout_ns = c->open_timeout_ns;
    int rc = host_barrier(&h->coll, &h->coll.world_group, err);
    h->shm.call_timeout_ns = c->call_timeout_ns;
    return rc < 0 ? err_prefix(err, "while the hosts gathered") : 0;
}

int coll_host_open(const struct coll_host_config *config, struct coll **out_coll, struct err *err)
{
    assert(config->world > 0 && config->world <= RANKS_MAX && config->rank < config->world);
    struct host *h = xcalloc(1, sizeof *h);
    h->shm.rank = config->rank;
    h->shm.world = config->world;
    h->shm.call_timeout_ns = config->call_timeout_ns;
    h->shm.stopped_timeout_ns = config->stopped_timeout_ns;
    h->open = xcalloc(COLL_GROUPS_MAX, sizeof *h->open);
    h->inputs = xcalloc(config->world, sizeof *h->inputs);
    h->outputs = xcalloc(config->world, sizeof *h->outputs);
    h->world_ranks = xcalloc(config->world, sizeof *h->world_ranks);
    for (uint32_t r = 0; r < config->world; r++)
        h->world_ranks[r] = r;
    h->coll = (struct coll){
        .ops = &host_ops, .rank = config->rank, .world = config->world, .layer = -1,
        .world_group = {.ranks = h->world_ranks, .n_ranks = config->world, .me = config->rank,
                        .id = COLL_WORLD},
    };
    h->shm.cancelled = config->cancelled;
    shm_place(&h->shm, config->hosts ? config->hosts->hosts : NULL);
    int rc = config->rank == h->shm.first ? coll_meet_first(config, &h->shm, err)
                                          : coll_meet_other(config, &h->shm, err);
    if (rc == 0)
        rc = stage_init(h, config->stage_bytes, err);
    if (rc == 0 && config->hosts)
        rc = meet_hosts(h, config, err);
    else if (config->hosts)
        wire_close(config->hosts->wire);
    h->shm.cancelled = NULL;
    if (rc < 0) {
        host_close(&h->coll);
        return rc;
    }
    *out_coll = &h->coll;
    return 0;
}
