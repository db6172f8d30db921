/* coll_stage.c - tensors of a device pass through shared host memory, a piece at a time
 *
 * Every rank has a stage, at the same place of its arena. In a round each fills its stage with the
 * next piece of its input, all wait, each takes what it needs from all stages straight into its
 * device, and all wait again. How many rounds there are follows from what all members know. */
#include "worker/coll_stage.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "worker/coll_fold.h"

#define STAGE_BYTES ((size_t)8 << 20)
#define LINE_BYTES  64u

struct staged {
    struct host *h;
    struct device *dev;
    const struct coll_group *g;
    struct call call;
    const struct fold *fold;
    const uint8_t *in;
    uint8_t *out;
    size_t width, n, n_blocks; /* bytes of an element or a row; as the operation counts */
    uint32_t word;             /* what all must agree on besides */
    const int64_t *send_rows, *recv_rows;
};

/* What is done in a round; take may not return before stages need no longer be read. */
struct staged_op {
    enum shm_op op;
    size_t (*n_rounds)(const struct staged *s);
    void (*fill)(struct staged *s, size_t round);
    int (*take)(struct staged *s, size_t round, struct err *err);
};

static uint8_t *stage_of(const struct staged *s, uint32_t member)
{
    return shm_arena_of(&s->h->shm, s->g->ranks[member]);
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t n_pieces(size_t n, size_t piece)
{
    return (n + piece - 1) / piece;
}

int stage_init(struct host *h, size_t n_bytes, struct err *err)
{
    h->stage_bytes = n_bytes ? n_bytes : STAGE_BYTES;
    assert(h->stage_bytes % LINE_BYTES == 0 && h->shm.arena_used == 0);
    if (!shm_alloc(&h->shm, h->stage_bytes))
        return err_set(err, -ENOMEM, "no memory for a stage of %zu bytes", h->stage_bytes);
    return 0;
}

static void pin_all(struct host *h)
{
    struct device *dev = h->coll.dev;
    for (uint32_t r = 0; r < h->coll.world && !h->is_pinned; r++)
        dev->ops->pin(dev, shm_arena_of(&h->shm, r), h->stage_bytes);
    h->is_pinned = true;
}

void stage_fini(struct host *h)
{
    struct device *dev = h->coll.dev;
    for (uint32_t r = 0; r < h->coll.world && h->is_pinned; r++)
        dev->ops->unpin(dev, shm_arena_of(&h->shm, r));
    h->is_pinned = false;
}

static int run(struct staged *s, const struct staged_op *op, struct err *err)
{
    int rc;
    s->dev = s->h->coll.dev;
    pin_all(s->h);
    /* How many rounds of rows there are is known once all have come; one is filled without. */
    op->fill(s, 0);
    struct call_what what = {.op = op->op, .word = s->word, .n = s->n, .n_blocks = s->n_blocks,
                             .send_rows = s->send_rows};
    if ((rc = call_start(s->h, s->g, &what, &s->call, err)) < 0 ||
        (rc = call_wait(&s->call, err)) < 0)
        return rc;
    s->call.is_read = true; /* the stage is */
    size_t n_rounds = op->n_rounds(s);
    for (size_t round = 0; round < n_rounds && rc == 0; round++) {
        if (round > 0) {
            if ((rc = shm_wait_all(&s->h->shm, s->g, err)) < 0)
                return rc;
            op->fill(s, round);
            if ((rc = shm_wait_all(&s->h->shm, s->g, err)) < 0)
                return rc;
        }
        rc = op->take(s, round, err);
    }
    return rc < 0 ? rc : call_end(&s->call, err);
}

/* ---- all_gather: the input as one run of bytes ---------------------------------------------- */

static size_t gather_rounds(const struct staged *s)
{
    return n_pieces(s->n * s->n_blocks * s->width, s->h->stage_bytes);
}

static void gather_fill(struct staged *s, size_t round)
{
    size_t all = s->n * s->n_blocks * s->width, at = round * s->h->stage_bytes;
    if (at < all)
        s->dev->ops->to_host(s->dev, stage_of(s, s->g->me), s->in + at,
                             min_size(all - at, s->h->stage_bytes));
}

/* Bytes at .. end of member i's input go where its blocks lie in the output. */
static void gather_member(struct staged *s, uint32_t i, size_t at, size_t end)
{
    const uint8_t *from = stage_of(s, i);
    size_t block = s->n * s->width;
    while (at < end) {
        size_t b = at / block, in_block = at % block, n = min_size(block - in_block, end - at);
        uint8_t *to = s->out + (b * s->g->n_ranks + i) * block + in_block;
        if (i != s->g->me)
            s->dev->ops->to_device(s->dev, to, from, n);
        else if (to != s->in + at)
            s->dev->ops->copy(s->dev, to, s->in + at, n);
        from += n;
        at += n;
    }
}

static int gather_take(struct staged *s, size_t round, struct err *err)
{
    size_t all = s->n * s->n_blocks * s->width, at = round * s->h->stage_bytes;
    (void)err;
    for (uint32_t k = 0; k < s->g->n_ranks; k++) /* not all from the same member at once */
        gather_member(s, (s->g->me + k) % s->g->n_ranks, at,
                      min_size(all, at + s->h->stage_bytes));
    return 0;
}

int stage_all_gather(struct host *h, const struct coll_group *g, enum elem_type type,
                     const void *in, size_t n, size_t n_blocks, void *out, struct err *err)
{
    static const struct staged_op op = {SHM_ALL_GATHER, gather_rounds, gather_fill, gather_take};
    struct staged s = {.h = h, .g = g, .in = in, .out = out, .n = n, .n_blocks = n_blocks,
                       .word = call_word(type, COLL_SUM), .width = fold_of(type, COLL_SUM)->width};
    return run(&s, &op, err);
}

/* ---- reduce_scatter: whole blocks, or the same part of all members' parts of one ------------- */

struct scatter_piece {
    size_t block, n_blocks, at, n; /* elements at .. at + n of each member's part */
};

static size_t scatter_room(const struct staged *s)
{
    size_t line = LINE_BYTES / s->width;
    return s->h->stage_bytes / s->width / s->g->n_ranks / line * line;
}

static size_t scatter_rounds(const struct staged *s)
{
    size_t room = scatter_room(s);
    if (s->n == 0)
        return 0;
    return s->n <= room ? n_pieces(s->n_blocks, room / s->n) : s->n_blocks * n_pieces(s->n, room);
}

static struct scatter_piece scatter_piece_of(const struct staged *s, size_t round)
{
    size_t room = scatter_room(s);
    if (s->n <= room) {
        size_t first = round * (room / s->n);
        return (struct scatter_piece){first, min_size(room / s->n, s->n_blocks - first), 0, s->n};
    }
    size_t pieces = n_pieces(s->n, room), at = round % pieces * room;
    return (struct scatter_piece){round / pieces, 1, at, min_size(room, s->n - at)};
}

static void scatter_fill(struct staged *s, size_t round)
{
    if (round >= scatter_rounds(s))
        return;
    struct scatter_piece p = scatter_piece_of(s, round);
    size_t n_parts = s->g->n_ranks * p.n_blocks, n_bytes = p.n * s->width;
    const uint8_t *from = s->in + p.block * s->g->n_ranks * s->n * s->width;
    if (p.n == s->n) {
        s->dev->ops->to_host(s->dev, stage_of(s, s->g->me), from, n_parts * n_bytes);
        return;
    }
    for (size_t i = 0; i < n_parts; i++)
        s->dev->ops->to_host(s->dev, stage_of(s, s->g->me) + i * n_bytes,
                             from + (i * s->n + p.at) * s->width, n_bytes);
}

static int scatter_take(struct staged *s, size_t round, struct err *err)
{
    struct scatter_piece p = scatter_piece_of(s, round);
    size_t n_bytes = p.n * s->width;
    (void)err;
    for (uint32_t i = 0; i < s->g->n_ranks; i++)
        s->h->inputs[i] = stage_of(s, i);
    for (size_t b = 0; b < p.n_blocks; b++) {
        size_t at = (b * s->g->n_ranks + s->g->me) * n_bytes;
        uint8_t *sum = stage_of(s, s->g->me) + at; /* nobody else reads my part of my stage */
        fold_run(s->fold, s->h->inputs, s->g->n_ranks, at, p.n, &sum, 1);
        s->dev->ops->to_device(s->dev, s->out + ((p.block + b) * s->n + p.at) * s->width, sum,
                               n_bytes);
    }
    return 0;
}

int stage_reduce_scatter(struct host *h, const struct coll_group *g, enum elem_type type,
                         const void *in, size_t n, size_t n_blocks, void *out, struct err *err)
{
    static const struct staged_op op = {SHM_REDUCE_SCATTER, scatter_rounds, scatter_fill,
                                        scatter_take};
    struct staged s = {.h = h, .g = g, .in = in, .out = out, .n = n, .n_blocks = n_blocks,
                       .word = call_word(type, COLL_SUM), .fold = fold_of(type, COLL_SUM)};
    s.width = s.fold->width;
    assert(scatter_room(&s) > 0);
    return run(&s, &op, err);
}

/* ---- all_reduce: each member sums its part of a piece for all -------------------------------- */

static size_t reduce_room(const struct staged *s)
{
    return s->h->stage_bytes / s->width;
}

static size_t reduce_rounds(const struct staged *s)
{
    return n_pieces(s->n, reduce_room(s));
}

static void reduce_fill(struct staged *s, size_t round)
{
    size_t at = round * reduce_room(s);
    if (at < s->n)
        s->dev->ops->to_host(s->dev, stage_of(s, s->g->me), s->in + at * s->width,
                             min_size(reduce_room(s), s->n - at) * s->width);
}

static int reduce_take(struct staged *s, size_t round, struct err *err)
{
    size_t room = reduce_room(s), at = round * room, n = min_size(room, s->n - at);
    size_t line = LINE_BYTES / s->width;
    size_t share = n_pieces(n_pieces(n, s->g->n_ranks), line) * line; /* no line has two writers */
    size_t first = min_size(n, s->g->me * share), count = min_size(share, n - first);
    for (uint32_t i = 0; i < s->g->n_ranks; i++) {
        s->h->inputs[i] = stage_of(s, i);
        s->h->outputs[i] = stage_of(s, i) + first * s->width;
    }
    fold_run(s->fold, s->h->inputs, s->g->n_ranks, first * s->width, count, s->h->outputs,
             s->g->n_ranks);
    int rc = shm_wait_all(&s->h->shm, s->g, err);
    if (rc == 0)
        s->dev->ops->to_device(s->dev, s->out + at * s->width, stage_of(s, s->g->me),
                               n * s->width);
    return rc;
}

int stage_all_reduce(struct host *h, const struct coll_group *g, enum coll_op op_kind,
                     enum elem_type type, void *x, size_t n, struct err *err)
{
    static const struct staged_op op = {SHM_ALL_REDUCE, reduce_rounds, reduce_fill, reduce_take};
    struct staged s = {.h = h, .g = g, .in = x, .out = x, .n = n, .n_blocks = 1,
                       .word = call_word(type, op_kind), .fold = fold_of(type, op_kind)};
    s.width = s.fold->width;
    return run(&s, &op, err);
}

/* ---- all_to_all_rows: the packed rows of each member as one run of bytes --------------------- */

static size_t bytes_of(const struct staged *s, const int64_t *rows)
{
    size_t n = 0;
    for (uint32_t i = 0; i < s->g->n_ranks; i++)
        n += (size_t)rows[i];
    return n * s->width;
}

/* One at least, in which counts are compared. */
static size_t rows_rounds(const struct staged *s)
{
    size_t most = 1;
    for (uint32_t i = 0; i < s->g->n_ranks; i++) {
        size_t n = bytes_of(s, call_rows_of(&s->call, i));
        most = n > most ? n : most;
    }
    return n_pieces(most, s->h->stage_bytes);
}

static void rows_fill(struct staged *s, size_t round)
{
    size_t all = bytes_of(s, s->send_rows), at = round * s->h->stage_bytes;
    if (at < all)
        s->dev->ops->to_host(s->dev, stage_of(s, s->g->me), s->in + at,
                             min_size(all - at, s->h->stage_bytes));
}

static int rows_take(struct staged *s, size_t round, struct err *err)
{
    size_t window = round * s->h->stage_bytes, window_end = window + s->h->stage_bytes;
    uint8_t *to = s->out;
    for (uint32_t i = 0; i < s->g->n_ranks; i++) {
        int64_t before;
        int rc = call_rows_before(&s->call, i, s->recv_rows[i], &before, err);
        if (rc < 0)
            return rc;
        size_t begin = (size_t)before * s->width, end = begin + (size_t)s->recv_rows[i] * s->width;
        size_t lo = begin > window ? begin : window, hi = min_size(end, window_end);
        if (lo < hi && i == s->g->me)
            s->dev->ops->copy(s->dev, to + (lo - begin), s->in + lo, hi - lo);
        else if (lo < hi)
            s->dev->ops->to_device(s->dev, to + (lo - begin), stage_of(s, i) + (lo - window),
                                   hi - lo);
        to += end - begin;
    }
    return 0;
}

int stage_all_to_all_rows(struct host *h, const struct coll_group *g, const void *send,
                          const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                          size_t row_bytes, struct err *err)
{
    static const struct staged_op op = {SHM_ALL_TO_ALL_ROWS, rows_rounds, rows_fill, rows_take};
    struct staged s = {.h = h, .g = g, .in = send, .out = recv, .n = row_bytes, .n_blocks = 1,
                       .width = row_bytes, .send_rows = send_rows, .recv_rows = recv_rows};
    return run(&s, &op, err);
}
