/* coll_gpu.c - collectives of ranks that have a GPU each: tensors through NCCL, words as the host's
 *
 * What the host has to know at once (words) goes through its memory: it is faster there, and
 * whoever waits learns of an abort.
 *
 * What is started is a launch on the stream of the collectives; the ops that need it wait for it on
 * theirs, so that the host waits for neither. What it may write meanwhile is as free as what it
 * reads: ops that come after finish come after both.
 *
 * NCCL chooses the order of sums, the same on all members and in all runs. A deterministic device
 * gets the order of ranks instead: parts travel as they are and are added by the device. */
#include "worker/coll_gpu.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "common/mem.h"
#include "worker/coll_call.h"
#include "worker/coll_nccl.h"
#include "worker/coll_span.h"

#define SCRATCH_BYTES ((size_t)64 << 20) /* of an ordered sum, about */

#ifdef BALLAST_CHECKS
#define CHECKS true
#else
#define CHECKS false
#endif

struct gpu_coll {
    struct coll  coll;
    struct host *host; /* owned */
    struct nccl *nccl;
    struct nccl_part *parts; /* (world) of one call */
    void  *scratch; /* from the device */
    size_t scratch_bytes;
};

static struct gpu_coll *gpu_of(struct coll *c)
{
    return (struct gpu_coll *)c;
}

/* ---- one call -------------------------------------------------------------------------------- */

struct rows {
    const int64_t *send, *recv;
};

/* Shows that a call begins. Builds that check stop here for each other, and compare. */
static int enter(struct gpu_coll *x, const struct coll_group *g, enum shm_op op, uint32_t word,
                 size_t n, size_t n_blocks, const struct rows *rows, uint32_t *out_note,
                 struct err *err)
{
    struct host *h = x->host;
    const struct call_what what = {.op = op, .word = word, .n = n, .n_blocks = n_blocks,
                                   .send_rows = rows ? rows->send : NULL};
    struct call c;
    int64_t before;
    int rc = shm_check(&h->shm, err);
    h->coll.layer = x->coll.layer;
    if (rc < 0)
        return rc;
    if (!CHECKS) {
        *out_note = call_note(h, g, op, n);
        return 0;
    }
    if (span_crosses(h, g)) {
        rc = span_agree(h, g, &what, rows ? rows->recv : NULL, err);
        *out_note = shm_rank_of(&h->shm, h->coll.rank)->at - 1;
        return rc;
    }
    if ((rc = call_start(h, g, &what, &c, err)) < 0 || (rc = call_wait(&c, err)) < 0)
        return rc;
    for (uint32_t i = 0; rows && i < g->n_ranks && rc == 0; i++)
        rc = call_rows_before(&c, i, rows->recv[i], &before, err);
    call_met(&c);
    *out_note = c.note;
    return rc;
}

static size_t width_of(enum elem_type type)
{
    return type == ELEM_F32 ? sizeof(float) : sizeof(uint16_t);
}

static bool is_alone(const struct gpu_coll *x, const struct coll_group *g)
{
    return g->n_ranks == 1 && x->coll.world > 1;
}

static void copy(struct gpu_coll *x, void *to, const void *from, size_t n_bytes)
{
    if (to != from && n_bytes > 0)
        x->coll.dev->ops->copy(x->coll.dev, to, from, n_bytes);
}

/* ---- sums in the order of ranks -------------------------------------------------------------- */

static void *take_scratch(struct gpu_coll *x, size_t n_bytes, struct err *err)
{
    struct device *dev = x->coll.dev;
    if (n_bytes <= x->scratch_bytes)
        return x->scratch;
    if (x->scratch)
        dev->ops->free(dev, x->scratch);
    x->scratch_bytes = 0;
    x->scratch = dev->ops->alloc(dev, n_bytes);
    if (!x->scratch)
        err_set(err, -ENOMEM, "no memory for %zu MiB of parts of a sum", n_bytes >> 20);
    else
        x->scratch_bytes = n_bytes;
    return x->scratch;
}

/* out (n) = the sum of parts (n_parts, n), with two more of floats after them where elements are no
 * floats; those are rounded once. */
static void add_parts(struct gpu_coll *x, enum elem_type type, void *out, uint8_t *parts,
                      uint32_t n_parts, size_t n)
{
    struct device *dev = x->coll.dev;
    size_t part = n * width_of(type);
    float *sum = (float *)(parts + (n_parts * part + 255) / 256 * 256), *one = sum + n;
    if (type == ELEM_F32) {
        copy(x, out, parts, part);
        for (uint32_t i = 1; i < n_parts; i++)
            dev->ops->axpy(dev, out, 1.0f, (const float *)(parts + i * part), (int64_t)n);
        return;
    }
    assert(dev->elem == type);
    dev->ops->to_f32(dev, sum, (const elem *)parts, (int64_t)n);
    for (uint32_t i = 1; i < n_parts; i++) {
        dev->ops->to_f32(dev, one, (const elem *)(parts + i * part), (int64_t)n);
        dev->ops->axpy(dev, sum, 1.0f, one, (int64_t)n);
    }
    dev->ops->to_elem(dev, (elem *)out, sum, (int64_t)n);
}

/* Elements of each part that are summed at a time, and the scratch for them. */
static size_t sum_piece(const struct coll_group *g, enum elem_type type, size_t n_max)
{
    size_t room = SCRATCH_BYTES / width_of(type) / g->n_ranks / 64 * 64;
    assert(room > 0);
    return n_max < room ? n_max : room;
}

static size_t sum_scratch(const struct coll_group *g, enum elem_type type, size_t piece)
{
    size_t floats = type == ELEM_F32 ? 0 : 2 * piece * sizeof(float) + 256;
    return g->n_ranks * piece * width_of(type) + floats;
}

/* out (n) = the sum of member i's in at my part, where parts of members are stride bytes apart;
 * stride 0: the whole of it is everybody's part. */
static int ordered_sum(struct gpu_coll *x, const struct coll_group *g, enum elem_type type,
                       const uint8_t *in, size_t n, size_t stride, uint8_t *out, uint32_t note,
                       struct err *err)
{
    size_t width = width_of(type), piece = sum_piece(g, type, n);
    uint8_t *scratch = take_scratch(x, sum_scratch(g, type, piece), err);
    uint32_t launch;
    int rc = scratch ? 0 : -ENOMEM;
    for (size_t at = 0; at < n && rc == 0; at += piece) {
        size_t n_now = n - at < piece ? n - at : piece, n_bytes = n_now * width;
        for (uint32_t i = 0; i < g->n_ranks; i++)
            x->parts[i] = (struct nccl_part){in + at * width + i * stride, scratch + i * n_bytes,
                                             n_bytes, n_bytes};
        rc = nccl_exchange(x->nccl, g, x->parts, note, &launch, err);
        nccl_finish(x->nccl, rc == 0 ? launch : 0);
        if (rc == 0)
            add_parts(x, type, out + at * width, scratch, g->n_ranks, n_now);
    }
    return rc;
}

/* ---- the operations -------------------------------------------------------------------------- */

/* A ticket is the number of a launch. */
static int gpu_finish(struct coll *c, coll_ticket ticket, struct err *err)
{
    (void)err;
    nccl_finish(gpu_of(c)->nccl, (uint32_t)ticket);
    return 0;
}

static int gpu_reclaim(struct coll *c, coll_ticket ticket, struct err *err)
{
    (void)c, (void)ticket, (void)err;
    return 0;
}

/* What nobody else takes part in, or nothing of. */
static int alone(struct gpu_coll *x, void *out, const void *in, size_t n_bytes, uint32_t note)
{
    copy(x, out, in, n_bytes);
    call_note_left(x->host, note);
    return 0;
}

static int gpu_start_all_gather(struct coll *c, const struct coll_group *g, enum elem_type type,
                                const void *in, size_t n, size_t n_blocks, void *out,
                                coll_ticket *out_ticket, struct err *err)
{
    struct gpu_coll *x = gpu_of(c);
    size_t part = n * width_of(type);
    struct nccl_blocks b = {.in = in, .out = out, .n = n, .n_blocks = n_blocks, .in_stride = part,
                            .out_stride = part * g->n_ranks, .type = type};
    uint32_t note = 0, launch = 0;
    *out_ticket = 0;
    int rc = enter(x, g, SHM_ALL_GATHER, call_word(type, COLL_SUM), n, n_blocks, NULL, &note, err);
    if (rc < 0)
        return rc;
    if (is_alone(x, g) || n * n_blocks == 0)
        return alone(x, out, in, part * n_blocks, note);
    rc = nccl_gather(x->nccl, g, &b, note, &launch, err);
    *out_ticket = rc == 0 ? launch : 0;
    return rc;
}

static int gpu_start_reduce_scatter(struct coll *c, const struct coll_group *g, enum elem_type type,
                                    const void *in, size_t n, size_t n_blocks, void *out,
                                    coll_ticket *out_ticket, struct err *err)
{
    struct gpu_coll *x = gpu_of(c);
    size_t part = n * width_of(type);
    struct nccl_blocks b = {.in = in, .out = out, .n = n, .n_blocks = n_blocks,
                            .in_stride = part * g->n_ranks, .out_stride = part, .type = type};
    uint32_t note = 0, launch = 0;
    *out_ticket = 0;
    int rc = enter(x, g, SHM_REDUCE_SCATTER, call_word(type, COLL_SUM), n, n_blocks, NULL, &note,
                   err);
    if (rc < 0)
        return rc;
    if (is_alone(x, g) || n * n_blocks == 0)
        return alone(x, out, in, part * n_blocks, note);
    if (!c->dev->deterministic) {
        rc = nccl_scatter(x->nccl, g, &b, note, &launch, err);
        *out_ticket = rc == 0 ? launch : 0;
        return rc;
    }
    for (size_t i = 0; i < n_blocks && rc == 0; i++)
        rc = ordered_sum(x, g, type, b.in + i * b.in_stride, n, part, b.out + i * part, note, err);
    return rc;
}

static int gpu_all_reduce(struct coll *c, const struct coll_group *g, enum coll_op op,
                          enum elem_type type, void *tensor, size_t n, struct err *err)
{
    struct gpu_coll *x = gpu_of(c);
    struct nccl_blocks b = {.in = tensor, .out = tensor, .n = n, .n_blocks = 1, .type = type,
                            .op = op};
    uint32_t note = 0, launch;
    int rc = enter(x, g, SHM_ALL_REDUCE, call_word(type, op), n, 1, NULL, &note, err);
    if (rc < 0)
        return rc;
    if (is_alone(x, g) || n == 0)
        return alone(x, tensor, tensor, 0, note);
    if (c->dev->deterministic && op == COLL_SUM)
        return ordered_sum(x, g, type, tensor, n, 0, tensor, note, err);
    rc = nccl_reduce(x->nccl, g, &b, note, &launch, err);
    nccl_finish(x->nccl, rc == 0 ? launch : 0);
    return rc;
}

static int gpu_start_all_to_all_rows(struct coll *c, const struct coll_group *g, const void *send,
                                     const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                                     size_t row_bytes, coll_ticket *out_ticket, struct err *err)
{
    struct gpu_coll *x = gpu_of(c);
    const struct rows rows = {send_rows, recv_rows};
    const uint8_t *from = send;
    uint8_t *to = recv;
    uint32_t note = 0, launch = 0;
    *out_ticket = 0;
    int rc = enter(x, g, SHM_ALL_TO_ALL_ROWS, 0, row_bytes, 1, &rows, &note, err);
    if (rc < 0)
        return rc;
    if (send_rows[g->me] != recv_rows[g->me])
        return err_set(err, -EPROTO, "all_to_all: rank %u sends %lld rows to itself and expects "
                       "%lld", c->rank, (long long)send_rows[g->me],
                       (long long)recv_rows[g->me]);
    for (uint32_t i = 0; i < g->n_ranks; i++) {
        size_t n_out = (size_t)send_rows[i] * row_bytes, n_in = (size_t)recv_rows[i] * row_bytes;
        x->parts[i] = (struct nccl_part){from, to, n_out, n_in};
        from += n_out;
        to += n_in;
    }
    rc = nccl_exchange(x->nccl, g, x->parts, note, &launch, err);
    *out_ticket = rc == 0 ? launch : 0;
    return rc;
}

/* ---- what the host collectives do ------------------------------------------------------------ */

static struct coll *host_coll(struct coll *c)
{
    struct coll *host = &gpu_of(c)->host->coll;
    host->layer = c->layer;
    return host;
}

static void *gpu_alloc(struct coll *c, size_t n_bytes)
{
    struct coll *host = host_coll(c);
    void *p = host->ops->alloc(host, n_bytes);
    if (p && c->registers_memory)
        nccl_know(gpu_of(c)->nccl, p, n_bytes);
    return p;
}

static void gpu_free(struct coll *c, void *p)
{
    struct coll *host = host_coll(c);
    nccl_forget(gpu_of(c)->nccl, p);
    host->ops->free(host, p);
}

static void gpu_shared(struct coll *c, uint64_t *out_bytes, uint64_t *out_n_allocs)
{
    struct coll *host = host_coll(c);
    host->ops->shared(host, out_bytes, out_n_allocs);
}

static int gpu_barrier(struct coll *c, const struct coll_group *g, struct err *err)
{
    struct coll *host = host_coll(c);
    return host->ops->barrier(host, g, err);
}

static int gpu_all_reduce_f64(struct coll *c, const struct coll_group *g, enum coll_op op,
                               double *words, size_t n, struct err *err)
{
    struct coll *host = host_coll(c);
    return host->ops->all_reduce_f64(host, g, op, words, n, err);
}

static int gpu_all_gather_i32(struct coll *c, const struct coll_group *g, const int32_t *in,
                               size_t n, int32_t *out, struct err *err)
{
    struct coll *host = host_coll(c);
    return host->ops->all_gather_i32(host, g, in, n, out, err);
}

static void gpu_set_patience(struct coll *c, uint64_t timeout_ns, uint64_t idle_ns)
{
    struct coll *host = &gpu_of(c)->host->coll;
    host->ops->set_patience(host, timeout_ns, idle_ns);
}

static _Atomic uint64_t *gpu_progress(struct coll *c)
{
    struct coll *host = &gpu_of(c)->host->coll;
    return host->ops->progress(host);
}

static void gpu_trace(struct coll *c, FILE *out)
{
    struct coll *host = &gpu_of(c)->host->coll;
    host->ops->trace(host, out);
}

/* The watcher sees it within a moment and aborts what the device waits for. */
static void gpu_abort(struct coll *c)
{
    struct coll *host = &gpu_of(c)->host->coll;
    host->ops->abort(host);
}

/* ---- open and close -------------------------------------------------------------------------- */

static void fini(struct gpu_coll *x)
{
    if (x->nccl)
        nccl_close(x->nccl);
    if (x->scratch)
        x->coll.dev->ops->free(x->coll.dev, x->scratch);
    free(x->parts);
    free(x);
}

/* Nobody's memory goes while another rank may still read it, and nobody leaves, which to those who
 * watch looks like an end, before all have told their communicators that it goes. */
static void gpu_close(struct coll *c)
{
    struct coll *host = host_coll(c);
    if (shm_check(&gpu_of(c)->host->shm, NULL) == 0) {
        c->dev->ops->synchronize(c->dev);
        if (host->ops->barrier(host, &host->world_group, NULL) == 0) {
            nccl_forget_all(gpu_of(c)->nccl);
            host->ops->barrier(host, &host->world_group, NULL); /* one that fails is no obstacle */
        }
    }
    fini(gpu_of(c));
    host->ops->close(host);
}

static const struct coll_ops gpu_ops = {
    .name                  = "nccl",
    .close                 = gpu_close,
    .alloc                 = gpu_alloc,
    .free                  = gpu_free,
    .shared                = gpu_shared,
    .start_all_gather      = gpu_start_all_gather,
    .start_reduce_scatter  = gpu_start_reduce_scatter,
    .start_all_to_all_rows = gpu_start_all_to_all_rows,
    .finish                = gpu_finish,
    .reclaim               = gpu_reclaim,
    .all_reduce            = gpu_all_reduce,
    .barrier               = gpu_barrier,
    .all_reduce_f64        = gpu_all_reduce_f64,
    .all_gather_i32        = gpu_all_gather_i32,
    .set_patience          = gpu_set_patience,
    .progress              = gpu_progress,
    .trace                 = gpu_trace,
    .abort                 = gpu_abort,
};

int coll_gpu_open(struct coll *host, struct device *dev, const struct coll_group *groups,
                  uint32_t n_groups, struct coll **out_coll, struct err *err)
{
    struct gpu_coll *x = xcalloc(1, sizeof *x);
    x->coll = *host;
    x->coll.ops = &gpu_ops;
    x->coll.dev = host->dev = dev;
    x->host = host_of(host);
    x->parts = xcalloc(host->world, sizeof *x->parts);
    int rc = nccl_open(x->host, dev, groups, n_groups, &x->nccl, err);
    if (rc < 0) {
        fini(x);
        return rc;
    }
    *out_coll = &x->coll;
    return 0;
}
