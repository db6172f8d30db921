/* coll_calls.h - calls of any collectives, with results that every rank can work out */
#ifndef TESTS_COLL_CALLS_H
#define TESTS_COLL_CALLS_H

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/patience.h"
#include "tests/seed.h"
#include "worker/coll.h"

#define WORLD_MAX 8u

static uint32_t seed0;

static inline uint32_t next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static inline void make_id(uint8_t id[16])
{
    static uint32_t n;
    memset(id, 0, 16);
    uint32_t words[4] = {(uint32_t)getpid(), ++n, (uint32_t)time(NULL), seed0};
    memcpy(id, words, 16);
}

struct rank {
    uint8_t  id[16];
    bool     is_apart; /* tensors lie in a device's memory, which the host does not touch */
    uint32_t rank, world;
    uint64_t call_timeout_ns;
    void   (*body)(struct rank *r, struct coll *c);
    struct err err;
    int      rc;
};

/* ---- values --------------------------------------------------------------------------------- */

/* What rank puts at element i of call number k; any rank can work out anybody's. */
static inline float value(uint32_t k, uint32_t rank, size_t i)
{
    uint32_t s = k * 7919u + rank * 104729u + (uint32_t)i * 31u + seed0;
    return (float)((int32_t)(next(&s) % 20001u) - 10000) / 4096.0f * (rank == 1 ? 1e3f : 1.0f);
}

static inline float plain_sum(uint32_t k, const struct coll_group *g, size_t i)
{
    float sum = value(k, g->ranks[0], i);
    for (uint32_t m = 1; m < g->n_ranks; m++)
        sum += value(k, g->ranks[m], i);
    return sum;
}

#define CHECK(r, condition)                                                                        \
    do {                                                                                           \
        if (!(condition) && (r)->rc == 0) {                                                        \
            (r)->rc = -EBADMSG;                                                                    \
            err_prefix(&(r)->err, "line %d: %s", __LINE__, #condition);                            \
        }                                                                                          \
    } while (0)

/* Between the host's x and tensor, which may be the same memory. */
static inline void upload(struct coll *c, void *tensor, const void *x, size_t n_bytes)
{
    if (c->dev)
        c->dev->ops->to_device(c->dev, tensor, x, n_bytes);
    else if (tensor != x)
        memcpy(tensor, x, n_bytes);
}

static inline void download(struct coll *c, void *x, const void *tensor, size_t n_bytes)
{
    if (c->dev)
        c->dev->ops->to_host(c->dev, x, tensor, n_bytes);
    else if (tensor != x)
        memcpy(x, tensor, n_bytes);
}

static inline void check_all_reduce(struct rank *r, struct coll *c, const struct coll_group *g,
                                    uint32_t k, float *x, float *tensor, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = value(k, c->rank, i);
    upload(c, tensor, x, n * sizeof *x);
    CHECK(r, c->ops->all_reduce(c, g, COLL_SUM, ELEM_F32, tensor, n, &r->err) == 0);
    download(c, x, tensor, n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        CHECK(r, x[i] == plain_sum(k, g, i));
    double m[2] = {value(k, c->rank, 1), -(double)c->rank}, largest = -1e30;
    CHECK(r, c->ops->all_reduce_f64(c, g, COLL_MAX, m, 2, &r->err) == 0);
    for (uint32_t i = 0; i < g->n_ranks; i++)
        largest = value(k, g->ranks[i], 1) > largest ? value(k, g->ranks[i], 1) : largest;
    CHECK(r, m[0] == largest && m[1] == -(double)g->ranks[0]);
}

static inline void check_scatter_gather(struct rank *r, struct coll *c, const struct coll_group *g,
                                        uint32_t k, float *x, float *tensor, float *y, size_t n,
                                        size_t n_blocks)
{
    size_t whole = n * n_blocks * g->n_ranks * sizeof *x;
    for (size_t i = 0; i < n * n_blocks * g->n_ranks; i++)
        x[i] = value(k, c->rank, i);
    upload(c, tensor, x, whole);
    CHECK(r, coll_reduce_scatter(c, g, ELEM_F32, tensor, n, n_blocks, y, &r->err) == 0);
    for (size_t b = 0; b < n_blocks; b++)
        for (size_t i = 0; i < n; i++)
            CHECK(r, y[b * n + i] == plain_sum(k, g, (b * g->n_ranks + g->me) * n + i));
    for (size_t i = 0; i < n * n_blocks; i++)
        y[i] = value(k + 1, c->rank, i);
    CHECK(r, coll_all_gather(c, g, ELEM_F32, y, n, n_blocks, tensor, &r->err) == 0);
    download(c, x, tensor, whole);
    for (size_t b = 0; b < n_blocks; b++)
        for (uint32_t m = 0; m < g->n_ranks; m++)
            for (size_t i = 0; i < n; i++)
                CHECK(r, x[(b * g->n_ranks + m) * n + i] == value(k + 1, g->ranks[m], b * n + i));
}

/* Rows that rank a sends to rank b in call k. */
static inline int64_t n_rows(uint32_t k, uint32_t a, uint32_t b)
{
    uint32_t s = k * 31u + a * 17u + b * 5u + seed0;
    return next(&s) % 3 == 0 ? 0 : next(&s) % 40;
}

static inline void check_rows(struct rank *r, struct coll *c, const struct coll_group *g,
                              uint32_t k, float *x, float *tensor, float *y, size_t row_floats)
{
    int64_t send[WORLD_MAX], recv[WORLD_MAX];
    int32_t mine[WORLD_MAX], all[WORLD_MAX * WORLD_MAX];
    size_t n = 0;
    for (uint32_t m = 0; m < g->n_ranks; m++) {
        send[m] = n_rows(k, c->rank, g->ranks[m]);
        for (int64_t row = 0; row < send[m]; row++)
            for (size_t i = 0; i < row_floats; i++)
                x[n++] = value(k + g->ranks[m], c->rank, (size_t)row * row_floats + i);
    }
    for (uint32_t m = 0; m < g->n_ranks; m++)
        mine[m] = (int32_t)send[m];
    CHECK(r, c->ops->all_gather_i32(c, g, mine, g->n_ranks, all, &r->err) == 0);
    for (uint32_t m = 0; m < g->n_ranks; m++) {
        recv[m] = all[m * g->n_ranks + g->me];
        CHECK(r, recv[m] == n_rows(k, g->ranks[m], c->rank));
    }
    upload(c, tensor, x, n * sizeof *x);
    CHECK(r, coll_all_to_all_rows(c, g, tensor, send, y, recv, row_floats * sizeof *x,
                                  &r->err) == 0);
    n = 0;
    for (uint32_t m = 0; m < g->n_ranks; m++)
        for (int64_t row = 0; row < recv[m]; row++)
            for (size_t i = 0; i < row_floats; i++, n++)
                CHECK(r, y[n] == value(k + c->rank, g->ranks[m], (size_t)row * row_floats + i));
}

/* The groups that a rank of world is in: everybody, neighbours, every second, itself. */
static inline struct coll_group group_of(const struct coll *c, uint32_t which, uint32_t *ranks)
{
    struct coll_group g = {.ranks = ranks, .id = which};
    uint32_t stride = which == 2 ? 2 : 1, size = which == 0 ? c->world : which == 3 ? 1 : 2;
    uint32_t first = which == 0 ? 0 : which == 1 ? c->rank / 2 * 2 : which == 2 ? c->rank % 2
                                                                                : c->rank;
    for (uint32_t i = 0; i < size && first + i * stride < c->world; i++) {
        ranks[i] = first + i * stride;
        g.me = ranks[i] == c->rank ? i : g.me;
        g.n_ranks++;
    }
    if (which == 2) /* all of the same parity */
        for (uint32_t at = first + 2 * stride; at < c->world; at += 2) {
            g.me = at == c->rank ? g.n_ranks : g.me;
            ranks[g.n_ranks++] = at;
        }
    return g;
}

static inline void random_calls(struct rank *r, struct coll *c)
{
    enum { ROOM = 1u << 17 };
    uint32_t ranks[4][WORLD_MAX], s = seed0;
    struct coll_group groups[4];
    for (uint32_t i = 0; i < 4; i++)
        groups[i] = group_of(c, i, ranks[i]);
    float *travelling = c->ops->alloc(c, ROOM * sizeof(float));
    float *own = calloc(ROOM, sizeof *own), *out = calloc(ROOM, sizeof *out);
    for (uint32_t k = 0; k < 60; k++) {
        const struct coll_group *g = &groups[next(&s) % 4];
        float *tensor = next(&s) % 2 ? travelling : own;
        size_t n = next(&s) % 4 == 0 ? next(&s) % 20000 : next(&s) % 70, blocks = next(&s) % 4;
        CHECK(r, travelling != NULL);
        if (k % 3 == 0)
            check_all_reduce(r, c, g, k, own, tensor, n);
        else if (k % 3 == 1)
            check_scatter_gather(r, c, g, k, own, tensor, out, n % 4000, blocks);
        else
            check_rows(r, c, g, k, own, tensor, out, 1 + n % 65);
        CHECK(r, c->ops->barrier(c, &c->world_group, &r->err) == 0);
    }
    c->ops->free(c, travelling);
    free(own);
    free(out);
}

/* ---- calls that are started, and finished later ---------------------------------------------- */

enum { STARTED_MAX = 4, STARTED_ROOM = 1 << 15 };

/* One of them; in and out are tensors of STARTED_ROOM floats. */
struct started {
    enum { STARTED_GATHER, STARTED_SCATTER, STARTED_ROWS } kind;
    const struct coll_group *g;
    uint32_t k;
    size_t n, n_blocks; /* rows: numbers of one */
    int64_t send[WORLD_MAX], recv[WORLD_MAX];
    float *in, *out;
    coll_ticket ticket;
};

/* Numbers of in, filled into x; for rows also the counts. */
static inline size_t fill_started(struct started *s, uint32_t rank, float *x)
{
    const struct coll_group *g = s->g;
    size_t n = 0;
    if (s->kind != STARTED_ROWS) {
        n = s->n * s->n_blocks * (s->kind == STARTED_SCATTER ? g->n_ranks : 1);
        for (size_t i = 0; i < n; i++)
            x[i] = value(s->k, rank, i);
        return n;
    }
    for (uint32_t m = 0; m < g->n_ranks; m++) {
        s->send[m] = n_rows(s->k, rank, g->ranks[m]);
        s->recv[m] = n_rows(s->k, g->ranks[m], rank);
        for (size_t i = 0; i < (size_t)s->send[m] * s->n; i++)
            x[n++] = value(s->k + g->ranks[m], rank, i);
    }
    return n;
}

static inline int start_one(struct started *s, struct coll *c, struct err *err)
{
    switch (s->kind) {
    case STARTED_GATHER:
        return c->ops->start_all_gather(c, s->g, ELEM_F32, s->in, s->n, s->n_blocks, s->out,
                                        &s->ticket, err);
    case STARTED_SCATTER:
        return c->ops->start_reduce_scatter(c, s->g, ELEM_F32, s->in, s->n, s->n_blocks, s->out,
                                            &s->ticket, err);
    default:
        return c->ops->start_all_to_all_rows(c, s->g, s->in, s->send, s->out, s->recv,
                                             s->n * sizeof(float), &s->ticket, err);
    }
}

static inline void check_started(struct rank *r, struct coll *c, const struct started *s, float *x)
{
    const struct coll_group *g = s->g;
    size_t at = 0;
    download(c, x, s->out, STARTED_ROOM * sizeof *x);
    if (s->kind == STARTED_ROWS) {
        for (uint32_t m = 0; m < g->n_ranks; m++)
            for (size_t i = 0; i < (size_t)s->recv[m] * s->n; i++, at++)
                CHECK(r, x[at] == value(s->k + c->rank, g->ranks[m], i));
        return;
    }
    for (size_t b = 0; b < s->n_blocks; b++)
        for (uint32_t m = 0; m < (s->kind == STARTED_GATHER ? g->n_ranks : 1); m++)
            for (size_t i = 0; i < s->n; i++, at++)
                CHECK(r, x[at] == (s->kind == STARTED_GATHER
                                       ? value(s->k, g->ranks[m], b * s->n + i)
                                       : plain_sum(s->k, g, (b * g->n_ranks + g->me) * s->n + i)));
}

/* Some rank comes late, so that others run ahead of it. */
static inline void linger(uint32_t *of_rank)
{
    if (next(of_rank) % 4 == 0)
        nanosleep(&(struct timespec){.tv_nsec = next(of_rank) % 500 * 1000}, NULL);
}

static inline void finish_one(struct rank *r, struct coll *c, struct started *s, float *x)
{
    CHECK(r, c->ops->finish(c, s->ticket, &r->err) == 0);
    check_started(r, c, s, x);
}

/* An input is spoilt as soon as it may be. */
static inline void reclaim_one(struct rank *r, struct coll *c, struct started *s, float *x)
{
    for (size_t i = 0; i < STARTED_ROOM; i++)
        x[i] = -1e30f;
    CHECK(r, c->ops->reclaim(c, s->ticket, &r->err) == 0);
    upload(c, s->in, x, STARTED_ROOM * sizeof *x);
}

/* Several calls of different groups are open at once, with others that block between them; they
 * are finished and reclaimed in either order, which differs from rank to rank. */
static inline void started_calls(struct rank *r, struct coll *c)
{
    uint32_t ranks[4][WORLD_MAX], s = seed0, mine = seed0 + c->rank;
    struct coll_group groups[4];
    struct started calls[STARTED_MAX] = {0};
    float *x = calloc(STARTED_ROOM, sizeof *x), *apart = calloc(STARTED_ROOM, sizeof *apart);
    for (uint32_t i = 0; i < 4; i++)
        groups[i] = group_of(c, i, ranks[i]);
    for (uint32_t i = 0; i < STARTED_MAX; i++) {
        calls[i].in = c->ops->alloc(c, STARTED_ROOM * sizeof *x);
        calls[i].out = c->ops->alloc(c, STARTED_ROOM * sizeof *x);
        CHECK(r, calls[i].in && calls[i].out);
    }
    for (uint32_t round = 0; round < 40 && r->rc == 0; round++) {
        uint32_t n = 1 + next(&s) % STARTED_MAX;
        float *in0 = calls[0].in;
        if (!c->dev && round % 5 == 0)
            calls[0].in = apart; /* not in memory that travels */
        for (uint32_t i = 0; i < n; i++) {
            struct started *a = &calls[i];
            a->kind = next(&s) % 3;
            a->g = &groups[next(&s) % 4];
            a->k = 10 * round + i;
            a->n = a->kind == STARTED_ROWS ? 1 + next(&s) % 90 : next(&s) % 1300;
            a->n_blocks = next(&s) % 4;
            size_t n_floats = fill_started(a, c->rank, x);
            upload(c, a->in, x, n_floats * sizeof *x);
            linger(&mine);
            CHECK(r, start_one(a, c, &r->err) == 0);
            if (next(&s) % 3 == 0)
                CHECK(r, c->ops->barrier(c, &groups[next(&s) % 4], &r->err) == 0);
        }
        linger(&mine);
        bool forth = next(&mine) % 2;
        for (uint32_t i = 0; i < n; i++)
            finish_one(r, c, &calls[forth ? i : n - 1 - i], x);
        double words[3] = {c->rank, 1, 0};
        if (next(&s) % 2)
            CHECK(r, c->ops->all_reduce_f64(c, &c->world_group, COLL_SUM, words, 3, &r->err) == 0 &&
                         words[1] == c->world);
        forth = next(&mine) % 2;
        for (uint32_t i = 0; i < n; i++)
            reclaim_one(r, c, &calls[forth ? i : n - 1 - i], x);
        calls[0].in = in0;
    }
    for (uint32_t i = 0; i < STARTED_MAX; i++) {
        c->ops->free(c, calls[i].in);
        c->ops->free(c, calls[i].out);
    }
    free(apart);
    free(x);
}

/* ---- a rank that others give up ---- */

static atomic_uint n_gave_up;

/* Until n others have given up; those are not to see it leave. */
static inline void stay_away(uint32_t n)
{
    uint64_t end_ns = patience_end_ns(10);
    while (atomic_load(&n_gave_up) < n && clock_now_ns() < end_ns)
        nanosleep(&(struct timespec){.tv_nsec = 3 * 1000 * 1000}, NULL);
}

/* ---- rank 1 is stopped by another thread ----------------------------------------------------- */

static inline void *abort_soon(void *arg)
{
    struct coll *c = arg;
    nanosleep(&(struct timespec){.tv_nsec = 100 * 1000 * 1000}, NULL);
    c->ops->abort(c);
    return NULL;
}

static inline void stopped_from_outside(struct rank *r, struct coll *c)
{
    pthread_t thread;
    if (c->rank == 1) { /* which never comes to the barrier */
        pthread_create(&thread, NULL, abort_soon, c);
        pthread_join(thread, NULL);
    }
    r->rc = c->ops->barrier(c, &c->world_group, &r->err);
    CHECK(r, c->ops->barrier(c, &c->world_group, NULL) == -ECANCELED);
}

static inline void was_stopped(const struct rank *r)
{
    assert_int_equal(r->rc, -ECANCELED);
    if (!strstr(r->err.text, "rank 1 was stopped"))
        fail_msg("rank %u: %s", r->rank, r->err.text);
}

#endif
