/* coll_host.c - collectives of the ranks of one machine, through shared memory
 *
 * Every operation has the same shape: show the others where my input lies, wait for all, read
 * theirs in place, wait for all again (then my input is mine once more). Input that does not lie
 * in memory that travels is copied there first. A sum is cut over the members; each adds its part
 * of all inputs in rank order and, in an all_reduce, writes it into everybody's array at once, so
 * that no second round of copies is needed. */
#include "worker/coll.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/coll_meet.h"
#include "worker/coll_shm.h"

#define BLOCK_BYTES 16384u /* summed at once; stays in the first cache */

struct host {
    struct coll coll;
    struct shm  shm;
    uint32_t *world_ranks;
    uint32_t  numbers[COLL_GROUPS_MAX]; /* calls of each group so far */
    uint8_t  *stage; /* in my arena: input that was not there */
    size_t    stage_bytes;
};

static struct host *host_of(struct coll *c)
{
    return (struct host *)c;
}

/* ---- one call ------------------------------------------------------------------------------- */

struct call {
    struct host *h;
    const struct coll_group *g;
    struct shm_rank   *mine;
    struct shm_record *record;
};

/* My input as the others see it: where it is, or a copy. */
static int publish(struct host *h, const void *in, size_t n_bytes, uint64_t *out_at,
                   struct err *err)
{
    const uint8_t *arena = shm_arena_of(&h->shm, h->shm.rank), *p = in;
    if (p >= arena && p < arena + h->shm.arena_bytes) {
        *out_at = (uint64_t)(p - arena);
        return 0;
    }
    if (n_bytes > h->stage_bytes) {
        size_t wanted = n_bytes > 2 * h->stage_bytes ? n_bytes : 2 * h->stage_bytes;
        uint8_t *stage = shm_alloc(&h->shm, wanted);
        if (!stage)
            return err_set(err, -ENOMEM, "no memory left for a message of %zu bytes", n_bytes);
        h->stage = stage;
        h->stage_bytes = wanted;
    }
    if (n_bytes > 0)
        memcpy(h->stage, in, n_bytes);
    *out_at = h->stage ? (uint64_t)(h->stage - arena) : 0;
    return 0;
}

/* A call that does not fit what another member does would read wrong memory. */
static int agree(const struct call *c, struct err *err)
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

static void record(struct call *c, enum shm_op op, uint64_t n)
{
    struct shm_rank *r = c->mine;
    uint32_t i = atomic_load_explicit(&r->n_calls, memory_order_relaxed);
    struct shm_record *rec = &r->ring[i % SHM_RING];
    atomic_store_explicit(&rec->left_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&rec->op, op, memory_order_relaxed);
    atomic_store_explicit(&rec->group, c->g->id, memory_order_relaxed);
    atomic_store_explicit(&rec->number, c->h->numbers[c->g->id], memory_order_relaxed);
    atomic_store_explicit(&rec->layer, c->h->coll.layer, memory_order_relaxed);
    atomic_store_explicit(&rec->n, n, memory_order_relaxed);
    atomic_store_explicit(&rec->entered_ns, clock_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&r->n_calls, i + 1, memory_order_release);
    c->record = rec;
}

/* After it every member's input may be read, until leave. */
static int enter(struct host *h, const struct coll_group *g, enum shm_op op, uint32_t op_word,
                 const void *in, size_t in_bytes, size_t n, size_t n_blocks, struct call *out,
                 struct err *err)
{
    int rc;
    struct call c = {.h = h, .g = g, .mine = shm_rank_of(&h->shm, h->coll.rank)};
    assert(g->id < COLL_GROUPS_MAX && g->ranks[g->me] == h->coll.rank);
    if ((rc = shm_check(&h->shm, err)) < 0)
        return rc;
    h->numbers[g->id]++;
    record(&c, op, n);
    c.mine->op = op;
    c.mine->op_word = op_word;
    c.mine->number = h->numbers[g->id];
    c.mine->n = n;
    c.mine->n_blocks = n_blocks;
    if ((rc = publish(h, in, in_bytes, &c.mine->in_at, err)) < 0)
        return rc;
    if ((rc = shm_wait_all(&h->shm, g, err)) < 0 || (rc = agree(&c, err)) < 0)
        return rc;
    *out = c;
    return 0;
}

static int leave(struct call *c, struct err *err)
{
    int rc = shm_wait_all(&c->h->shm, c->g, err);
    if (rc == 0)
        atomic_store_explicit(&c->record->left_ns, clock_now_ns(), memory_order_relaxed);
    return rc;
}

/* Member i's input. */
static uint8_t *input_of(const struct call *c, uint32_t i)
{
    uint32_t rank = c->g->ranks[i];
    return shm_arena_of(&c->h->shm, rank) + shm_rank_of(&c->h->shm, rank)->in_at;
}

/* ---- sums ----------------------------------------------------------------------------------- */

typedef void (*fold_fn)(void *acc, const void *x, size_t n);

#define DEFINE_FOLD(name, type, expression)                                                        \
    static void name(void *acc, const void *x, size_t n)                                           \
    {                                                                                              \
        type *restrict a = acc;                                                                    \
        const type *restrict b = x;                                                                \
        for (size_t i = 0; i < n; i++)                                                             \
            a[i] = expression;                                                                     \
    }
DEFINE_FOLD(sum_f32, float, a[i] + b[i])
DEFINE_FOLD(max_f32, float, a[i] > b[i] ? a[i] : b[i])
DEFINE_FOLD(sum_f64, double, a[i] + b[i])
DEFINE_FOLD(max_f64, double, a[i] > b[i] ? a[i] : b[i])

/* Adds bytes at .. at + n_bytes of all inputs, in rank order, into the first n_outs of outs. */
static void fold_range(const struct call *c, fold_fn fold, size_t width, size_t at, size_t n_bytes,
                       uint8_t *const *outs, uint32_t n_outs)
{
    _Alignas(64) uint8_t acc[BLOCK_BYTES];
    for (size_t done = 0; done < n_bytes; done += BLOCK_BYTES) {
        size_t n = n_bytes - done < BLOCK_BYTES ? n_bytes - done : BLOCK_BYTES;
        memcpy(acc, input_of(c, 0) + at + done, n);
        for (uint32_t i = 1; i < c->g->n_ranks; i++)
            fold(acc, input_of(c, i) + at + done, n / width);
        for (uint32_t i = 0; i < n_outs; i++)
            memcpy(outs[i] + done, acc, n);
    }
}

static int reduce_all(struct coll *coll, const struct coll_group *g, enum shm_op op,
                      uint32_t op_word, fold_fn fold, size_t width, void *x, size_t n,
                      struct err *err)
{
    struct host *h = host_of(coll);
    struct call c;
    int rc;
    if (g->n_ranks == 1)
        return shm_check(&h->shm, err);
    if ((rc = enter(h, g, op, op_word, x, n * width, n, 1, &c, err)) < 0)
        return rc;
    /* Parts are whole cache lines, so that no line has two writers. */
    size_t line = 64 / width, per = (n / g->n_ranks + line) / line * line;
    size_t first = g->me * per < n ? g->me * per : n;
    size_t count = first + per < n ? per : n - first;
    if (count > 0) {
        uint8_t **outs = xcalloc(g->n_ranks, sizeof *outs);
        for (uint32_t i = 0; i < g->n_ranks; i++)
            outs[i] = input_of(&c, i) + first * width;
        fold_range(&c, fold, width, first * width, count * width, outs, g->n_ranks);
        free(outs);
    }
    rc = leave(&c, err);
    const uint8_t *mine = input_of(&c, g->me);
    if (rc == 0 && mine != x)
        memcpy(x, mine, n * width);
    return rc;
}

static int host_all_reduce(struct coll *c, const struct coll_group *g, enum coll_op op, float *x,
                           size_t n, struct err *err)
{
    return reduce_all(c, g, SHM_ALL_REDUCE, op, op == COLL_SUM ? sum_f32 : max_f32, sizeof *x, x,
                      n, err);
}

static int host_all_reduce_f64(struct coll *c, const struct coll_group *g, enum coll_op op,
                               double *x, size_t n, struct err *err)
{
    return reduce_all(c, g, SHM_ALL_REDUCE_F64, op, op == COLL_SUM ? sum_f64 : max_f64, sizeof *x,
                      x, n, err);
}

static int host_reduce_scatter(struct coll *coll, const struct coll_group *g, const float *in,
                               size_t n, size_t n_blocks, float *out, struct err *err)
{
    struct call c;
    int rc;
    size_t block = n * g->n_ranks;
    if ((rc = enter(host_of(coll), g, SHM_REDUCE_SCATTER, 0, in, n_blocks * block * sizeof *in, n,
                    n_blocks, &c, err)) < 0)
        return rc;
    for (size_t b = 0; b < n_blocks; b++) {
        uint8_t *to = (uint8_t *)(out + b * n);
        fold_range(&c, sum_f32, sizeof *in, (b * block + g->me * n) * sizeof *in, n * sizeof *in,
                   &to, 1);
    }
    return leave(&c, err);
}

/* ---- moves ---------------------------------------------------------------------------------- */

static int host_barrier(struct coll *coll, const struct coll_group *g, struct err *err)
{
    struct call c;
    int rc;
    if ((rc = enter(host_of(coll), g, SHM_BARRIER, 0, NULL, 0, 0, 0, &c, err)) < 0)
        return rc;
    return leave(&c, err);
}

static int host_all_gather(struct coll *coll, const struct coll_group *g, const float *in,
                           size_t n, size_t n_blocks, float *out, struct err *err)
{
    struct call c;
    int rc;
    if ((rc = enter(host_of(coll), g, SHM_ALL_GATHER, 0, in, n * n_blocks * sizeof *in, n,
                    n_blocks, &c, err)) < 0)
        return rc;
    for (uint32_t k = 0; k < g->n_ranks; k++) {
        uint32_t i = (g->me + k) % g->n_ranks; /* not all from the same member at once */
        const float *from = (const float *)(void *)input_of(&c, i);
        for (size_t b = 0; b < n_blocks; b++) {
            float *to = out + (b * g->n_ranks + i) * n;
            if (to != from + b * n && n > 0)
                memcpy(to, from + b * n, n * sizeof *to);
        }
    }
    return leave(&c, err);
}

static int host_all_to_all_i64(struct coll *coll, const struct coll_group *g, const int64_t *in,
                               size_t n, int64_t *out, struct err *err)
{
    struct call c;
    int rc;
    if ((rc = enter(host_of(coll), g, SHM_ALL_TO_ALL_I64, 0, in, n * g->n_ranks * sizeof *in, n, 1,
                    &c, err)) < 0)
        return rc;
    for (uint32_t i = 0; i < g->n_ranks && n > 0; i++)
        memcpy(out + i * n, (const int64_t *)(void *)input_of(&c, i) + g->me * n,
               n * sizeof *out);
    return leave(&c, err);
}

static int copy_rows(const struct call *c, float *recv, const int64_t *recv_rows,
                     size_t row_floats, struct err *err)
{
    const struct coll_group *g = c->g;
    int64_t n_received = 0;
    for (uint32_t i = 0; i < g->n_ranks; i++) {
        const int64_t *sent = shm_counts_of(&c->h->shm, g->ranks[i]);
        int64_t before = 0;
        for (uint32_t j = 0; j < g->me; j++)
            before += sent[j];
        if (sent[g->me] != recv_rows[i]) {
            shm_abort(&c->h->shm, "all_to_all %u: rank %u sends %lld rows to rank %u, which "
                      "expects %lld", c->mine->number, g->ranks[i], (long long)sent[g->me],
                      c->h->coll.rank, (long long)recv_rows[i]);
            shm_check(&c->h->shm, err);
            return -EPROTO;
        }
        if (recv_rows[i] > 0)
            memcpy(recv + (size_t)n_received * row_floats,
                   (const float *)(void *)input_of(c, i) + (size_t)before * row_floats,
                   (size_t)recv_rows[i] * row_floats * sizeof *recv);
        n_received += recv_rows[i];
    }
    return 0;
}

static int host_all_to_all_rows(struct coll *coll, const struct coll_group *g, const float *send,
                                const int64_t *send_rows, float *recv, const int64_t *recv_rows,
                                size_t row_floats, struct err *err)
{
    struct host *h = host_of(coll);
    struct call c;
    int rc;
    int64_t n_rows = 0, *counts = shm_counts_of(&h->shm, coll->rank);
    for (uint32_t i = 0; i < g->n_ranks; i++) {
        counts[i] = send_rows[i];
        n_rows += send_rows[i];
    }
    if ((rc = enter(h, g, SHM_ALL_TO_ALL_ROWS, 0, send, (size_t)n_rows * row_floats * sizeof *send,
                    row_floats, 1, &c, err)) < 0)
        return rc;
    if ((rc = copy_rows(&c, recv, recv_rows, row_floats, err)) < 0)
        return rc;
    return leave(&c, err);
}

/* ---- the rest ------------------------------------------------------------------------------- */

static void *host_alloc(struct coll *c, size_t n_bytes)
{
    return shm_alloc(&host_of(c)->shm, n_bytes);
}

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

static void host_abort(struct coll *c)
{
    shm_abort(&host_of(c)->shm, "rank %u was stopped", c->rank);
}

static void host_close(struct coll *c)
{
    struct host *h = host_of(c);
    shm_close(&h->shm);
    free(h->world_ranks);
    free(h);
}

static const struct coll_ops host_ops = {
    .name            = "host",
    .close           = host_close,
    .alloc           = host_alloc,
    .barrier         = host_barrier,
    .all_gather      = host_all_gather,
    .reduce_scatter  = host_reduce_scatter,
    .all_reduce      = host_all_reduce,
    .all_reduce_f64  = host_all_reduce_f64,
    .all_to_all_i64  = host_all_to_all_i64,
    .all_to_all_rows = host_all_to_all_rows,
    .trace           = host_trace,
    .abort           = host_abort,
};

int coll_host_open(const struct coll_host_config *config, struct coll **out_coll, struct err *err)
{
    assert(config->world > 0 && config->world <= RANKS_MAX && config->rank < config->world);
    struct host *h = xcalloc(1, sizeof *h);
    h->shm.rank = config->rank;
    h->shm.world = config->world;
    h->shm.call_timeout_ns = config->call_timeout_ns;
    h->shm.stopped_timeout_ns = config->stopped_timeout_ns;
    h->world_ranks = xcalloc(config->world, sizeof *h->world_ranks);
    for (uint32_t r = 0; r < config->world; r++)
        h->world_ranks[r] = r;
    h->coll = (struct coll){
        .ops = &host_ops, .rank = config->rank, .world = config->world, .layer = -1,
        .world_group = {.ranks = h->world_ranks, .n_ranks = config->world, .me = config->rank,
                        .id = COLL_WORLD},
    };
    int rc = config->rank == 0 ? coll_meet_first(config, &h->shm, err)
                               : coll_meet_other(config, &h->shm, err);
    if (rc < 0) {
        host_close(&h->coll);
        return rc;
    }
    *out_coll = &h->coll;
    return 0;
}
