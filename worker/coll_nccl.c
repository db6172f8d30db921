/* coll_nccl.c - collectives of ranks that have a GPU each, through NCCL
 *
 * The ranks find each other as the host collectives do, and what the host has to know at once
 * (words) goes through its memory: it is faster there, and whoever waits learns of an abort.
 *
 * A rank whose neighbour is gone waits in its device, where nothing ends the wait but an abort of
 * the communicators. So a thread watches: the neighbours, an abort by any rank, NCCL's own errors,
 * and whether what has begun on the device ends. Communicators do not block, so every call into
 * NCCL is short, and one lock keeps the watcher from aborting what is being called.
 *
 * All communicators work on the device's one stream. Launches are in the order of the calls, which
 * is the same on all members, so that none waits for one that waits for it.
 *
 * NCCL chooses the order of sums, the same on all members and in all runs. A deterministic device
 * gets the order of ranks instead: parts travel as they are and are added by the device. */
#include "worker/coll_nccl.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <nccl.h>

#include "common/clock.h"
#include "common/mem.h"
#include "kernels/cuda.h"
#include "worker/coll_call.h"

#define WATCH_NS      (20 * NS_PER_MS)
#define LOOK_EVERY    5u  /* of those until neighbours are looked at */
#define REASON_NS     (500 * NS_PER_MS)
#define POLL_NS       50000
#define FLIGHTS       SHM_RING
#define SCRATCH_BYTES ((size_t)64 << 20) /* of an ordered sum, at least */

#ifdef BALLAST_CHECKS
#define CHECKS true
#else
#define CHECKS false
#endif

/* A call on its way through the device. */
struct flight {
    cudaEvent_t began, done;
    uint32_t note;
    uint64_t began_ns; /* when it was first seen to have begun; 0: not yet */
};

struct nccl {
    struct coll coll;
    struct host *host; /* owned */
    pthread_t watcher;
    bool has_watcher;
    atomic_bool is_closing;
    pthread_mutex_t lock; /* of all below, which both threads use */
    ncclComm_t comms[COLL_GROUPS_MAX]; /* [COLL_WORLD] all ranks'; NULL: none, or aborted */
    ncclComm_t splitting;              /* not yet in comms */
    bool is_aborted;
    struct flight flights[FLIGHTS];
    uint32_t n_launched, n_landed;
    void  *scratch; /* of the training thread alone, from the device */
    size_t scratch_bytes;
};

static struct nccl *nccl_of(struct coll *c)
{
    return (struct nccl *)c;
}

/* ---- abort, and who watches ------------------------------------------------------------------ */

/* With the lock. What the device waits for in NCCL then ends. */
static void abort_comms(struct nccl *x)
{
    if (x->is_aborted)
        return;
    x->is_aborted = true;
    for (uint32_t i = COLL_GROUPS_MAX; i-- > 0;) /* the world's last, the others come from it */
        if (x->comms[i]) {
            ncclCommAbort(x->comms[i]);
            x->comms[i] = NULL;
        }
}

/* With the lock. Errors that NCCL meets in threads of its own. */
static void look_for_errors(struct nccl *x)
{
    for (uint32_t i = 0; i < COLL_GROUPS_MAX; i++) {
        ncclResult_t r = ncclSuccess;
        if (!x->comms[i] || ncclCommGetAsyncError(x->comms[i], &r) != ncclSuccess ||
            r == ncclSuccess || r == ncclInProgress)
            continue;
        shm_look(&x->host->shm); /* a neighbour's end is the better reason */
        shm_abort(&x->host->shm, "rank %u: NCCL: %s", x->coll.rank, ncclGetErrorString(r));
        return;
    }
}

/* With the lock. Notes what the device has done, and gives up on what it does not end. */
static void look_at_flights(struct nccl *x)
{
    struct shm *s = &x->host->shm;
    while (x->n_landed < x->n_launched) {
        struct flight *f = &x->flights[x->n_landed % FLIGHTS];
        if (cudaEventQuery(f->done) == cudaSuccess) {
            call_note_left(x->host, f->note);
            x->n_landed++;
            continue;
        }
        if (!f->began_ns && cudaEventQuery(f->began) == cudaSuccess)
            f->began_ns = clock_now_ns();
        if (f->began_ns && s->call_timeout_ns &&
            clock_now_ns() - f->began_ns > s->call_timeout_ns)
            shm_give_up(s, &x->coll.world_group);
        return;
    }
}

static void *watch(void *arg)
{
    struct nccl *x = arg;
    struct shm *s = &x->host->shm;
    cuda_stream(x->coll.dev); /* its device is this thread's, too */
    for (uint32_t tick = 0; !atomic_load(&x->is_closing); tick++) {
        nanosleep(&(struct timespec){.tv_nsec = WATCH_NS}, NULL);
        if (tick % LOOK_EVERY == 0)
            shm_look(s);
        /* The other thread holds the lock for long only if NCCL does not come back to it; then
         * the daemon's patience ends the process. */
        if (pthread_mutex_trylock(&x->lock) != 0)
            continue;
        if (!x->is_aborted && shm_check(s, NULL) == 0) {
            look_for_errors(x);
            look_at_flights(x);
        }
        if (shm_check(s, NULL) < 0)
            abort_comms(x);
        pthread_mutex_unlock(&x->lock);
    }
    return NULL;
}

static int start_watcher(struct nccl *x, struct err *err)
{
    x->host->shm.is_watched = true;
    int code = pthread_create(&x->watcher, NULL, watch, x);
    x->has_watcher = code == 0;
    return code ? err_set(err, -code, "thread of the collectives: %s", strerror(code)) : 0;
}

static void stop_watcher(struct nccl *x)
{
    atomic_store(&x->is_closing, true);
    if (x->has_watcher)
        pthread_join(x->watcher, NULL);
    x->host->shm.is_watched = false;
}

/* ---- calls into NCCL, all with the lock ------------------------------------------------------ */

/* Why NCCL failed here: what another rank says about itself is the better reason, but may come a
 * little later. */
static int fail(struct nccl *x, ncclResult_t r, const char *what, struct err *err)
{
    struct shm *s = &x->host->shm;
    uint64_t deadline = clock_now_ns() + REASON_NS;
    bool is_remote = r == ncclRemoteError || r == ncclSystemError || r == ncclInternalError;
    pthread_mutex_unlock(&x->lock);
    while (is_remote && shm_check(s, NULL) == 0 && clock_now_ns() < deadline)
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    shm_abort(s, "rank %u: NCCL: %s: %s", x->coll.rank, what, ncclGetErrorString(r));
    pthread_mutex_lock(&x->lock);
    return shm_check(s, err);
}

/* Waits until *comm has taken up what was asked of it with result r. The device may still be at
 * work on it. */
static int settle(struct nccl *x, ncclComm_t *comm, ncclResult_t r, const char *what,
                  struct err *err)
{
    int rc = 0;
    for (uint32_t i = 0; r == ncclInProgress && rc == 0; i++) {
        pthread_mutex_unlock(&x->lock);
        if (i < 100)
            sched_yield();
        else
            nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        pthread_mutex_lock(&x->lock);
        if ((rc = shm_check(&x->host->shm, err)) < 0)
            return rc;
        ncclResult_t asked = ncclCommGetAsyncError(*comm, &r);
        r = asked == ncclSuccess ? r : asked;
    }
    return r == ncclSuccess ? 0 : fail(x, r, what, err);
}

static int add_world(struct nccl *x, const int32_t *id_words, struct err *err)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    config.blocking = 0;
    memcpy(&id, id_words, sizeof id);
    ncclResult_t r = ncclCommInitRankConfig(&x->comms[COLL_WORLD], (int)x->coll.world, id,
                                            (int)x->coll.rank, &config);
    return settle(x, &x->comms[COLL_WORLD], r, "opening the communicator of all ranks", err);
}

/* The id of the communicator of all ranks, made by rank 0. */
static int agree_on_id(struct nccl *x, int32_t *out_words, struct err *err)
{
    enum { N_WORDS = sizeof(ncclUniqueId) / sizeof(int32_t) };
    struct coll *host = &x->host->coll;
    int32_t *all = xcalloc((size_t)host->world * (N_WORDS + 1), sizeof *all);
    int32_t mine[N_WORDS + 1] = {0};
    ncclUniqueId id;
    if (host->rank == 0) {
        mine[N_WORDS] = (int32_t)ncclGetUniqueId(&id);
        memcpy(mine, &id, sizeof id);
    }
    int rc = host->ops->all_gather_i32(host, &host->world_group, mine, N_WORDS + 1, all, err);
    if (rc == 0 && all[N_WORDS] != ncclSuccess)
        rc = err_set(err, -EIO, "rank 0: NCCL: making an id: %s",
                     ncclGetErrorString((ncclResult_t)all[N_WORDS]));
    memcpy(out_words, all, sizeof id);
    free(all);
    return rc;
}

/* A group of its own ranks is a part of the world; one of all ranks is the world, and one rank
 * needs none. Groups of one kind are equal in size, so all ranks split, or none does. What the
 * split returns says nothing yet: the world has to be asked, and the group be there. */
static int add_group(struct nccl *x, const struct coll_group *g, struct err *err)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int rc;
    assert(g->id != COLL_WORLD && g->id < COLL_GROUPS_MAX);
    if (g->n_ranks == x->coll.world || g->n_ranks == 1)
        return 0;
    config.blocking = 0;
    config.splitShare = 1; /* they never work at the same time */
    ncclResult_t r = ncclCommSplit(x->comms[COLL_WORLD], (int)g->ranks[0], (int)g->me,
                                   &x->splitting, &config);
    do {
        r = r == ncclSuccess ? ncclInProgress : r;
        rc = settle(x, &x->comms[COLL_WORLD], r, "splitting the ranks", err);
        r = ncclInProgress;
    } while (rc == 0 && !x->splitting);
    if (rc < 0)
        return rc;
    x->comms[g->id] = x->splitting;
    x->splitting = NULL;
    return settle(x, &x->comms[g->id], ncclInProgress, "opening the communicator of a group", err);
}

static ncclComm_t *comm_of(struct nccl *x, const struct coll_group *g)
{
    uint32_t id = g->n_ranks == x->coll.world ? COLL_WORLD : g->id;
    assert(id < COLL_GROUPS_MAX && g->ranks[g->me] == x->coll.rank);
    assert(x->comms[id] || x->is_aborted);
    return &x->comms[id];
}

/* ---- one operation --------------------------------------------------------------------------- */

struct rows {
    const int64_t *send, *recv;
};

/* Shows that a call begins. Builds that check stop here for each other, and compare. */
static int enter(struct nccl *x, const struct coll_group *g, enum shm_op op, uint32_t word,
                 size_t n, size_t n_blocks, const struct rows *rows, uint32_t *out_note,
                 struct err *err)
{
    struct host *h = x->host;
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
    if (rows)
        call_show_rows(h, g, rows->send);
    rc = call_enter(h, g, op, word, NULL, 0, n, n_blocks, &c, err);
    for (uint32_t i = 0; rows && i < g->n_ranks && rc == 0; i++)
        rc = call_rows_before(&c, i, rows->recv[i], &before, err);
    if (rc == 0)
        rc = shm_wait_all(&h->shm, g, err);
    if (rc == 0)
        *out_note = c.note;
    return rc;
}

/* What is asked of NCCL in one launch. */
struct launch {
    struct nccl *x;
    ncclComm_t comm;
    cudaStream_t stream;
    ncclResult_t result; /* the first that failed */
};

static void also(struct launch *l, ncclResult_t r)
{
    if (l->result == ncclSuccess && r != ncclInProgress)
        l->result = r;
}

typedef void (*ask_fn)(struct launch *l, const void *arg);

/* Asks for it all at once. Tracked as a flight, if it is one. */
static int ask(struct nccl *x, const struct coll_group *g, ask_fn fn, const void *arg,
               struct flight *flight, const char *what, struct err *err)
{
    struct launch l = {.x = x, .stream = cuda_stream(x->coll.dev)};
    ncclComm_t *comm = comm_of(x, g);
    if (x->is_aborted)
        return shm_check(&x->host->shm, err);
    l.comm = *comm;
    if (flight)
        cudaEventRecord(flight->began, l.stream);
    also(&l, ncclGroupStart());
    fn(&l, arg);
    ncclResult_t r = ncclGroupEnd();
    if (l.result == ncclSuccess)
        l.result = r;
    int rc = settle(x, comm, l.result, what, err);
    if (flight)
        cudaEventRecord(flight->done, l.stream);
    return rc;
}

/* The same with the lock, and the call's note. */
static int launch(struct nccl *x, const struct coll_group *g, ask_fn fn, const void *arg,
                  uint32_t note, const char *what, struct err *err)
{
    pthread_mutex_lock(&x->lock);
    if (x->n_launched - x->n_landed == FLIGHTS)
        x->n_landed++; /* nobody will know when it ended: the recorder has forgotten it, too */
    struct flight *f = &x->flights[x->n_launched % FLIGHTS];
    f->note = note;
    f->began_ns = 0;
    int rc = ask(x, g, fn, arg, f, what, err);
    x->n_launched += rc == 0;
    pthread_mutex_unlock(&x->lock);
    return rc;
}

static size_t width_of(enum elem_type type)
{
    return type == ELEM_F32 ? sizeof(float) : sizeof(uint16_t);
}

static ncclDataType_t nccl_type(enum elem_type type)
{
    return type == ELEM_F32 ? ncclFloat32 : ncclBfloat16;
}

static bool is_alone(const struct nccl *x, const struct coll_group *g)
{
    return g->n_ranks == 1 && x->coll.world > 1;
}

static void copy(struct nccl *x, void *to, const void *from, size_t n_bytes)
{
    if (to != from && n_bytes > 0)
        x->coll.dev->ops->copy(x->coll.dev, to, from, n_bytes);
}

/* ---- sums in the order of ranks -------------------------------------------------------------- */

static void *take_scratch(struct nccl *x, size_t n_bytes, struct err *err)
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
static void add_parts(struct nccl *x, enum elem_type type, void *out, uint8_t *parts,
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

/* Bytes at in + i stride go to member i, into its parts at mine n_bytes. */
struct exchange {
    const struct coll_group *g;
    const uint8_t *in;
    uint8_t *parts;
    size_t stride, n_bytes;
};

static void ask_exchange(struct launch *l, const void *arg)
{
    const struct exchange *e = arg;
    for (uint32_t i = 0; i < e->g->n_ranks; i++) {
        also(l, ncclSend(e->in + i * e->stride, e->n_bytes, ncclUint8, (int)i, l->comm,
                         l->stream));
        also(l, ncclRecv(e->parts + i * e->n_bytes, e->n_bytes, ncclUint8, (int)i, l->comm,
                         l->stream));
    }
}

/* out (n) = the sum of member i's in at my part, where parts of members are stride bytes apart;
 * stride 0: the whole of it is everybody's part. */
static int ordered_sum(struct nccl *x, const struct coll_group *g, enum elem_type type,
                       const uint8_t *in, size_t n, size_t stride, uint8_t *out, uint32_t note,
                       const char *what, struct err *err)
{
    size_t width = width_of(type), piece = sum_piece(g, type, n);
    uint8_t *parts = take_scratch(x, sum_scratch(g, type, piece), err);
    int rc = parts ? 0 : -ENOMEM;
    for (size_t at = 0; at < n && rc == 0; at += piece) {
        size_t n_now = n - at < piece ? n - at : piece;
        struct exchange e = {.g = g, .in = in + at * width, .parts = parts, .stride = stride,
                             .n_bytes = n_now * width};
        rc = launch(x, g, ask_exchange, &e, note, what, err);
        if (rc == 0)
            add_parts(x, type, out + at * width, parts, g->n_ranks, n_now);
    }
    return rc;
}

/* ---- the operations -------------------------------------------------------------------------- */

struct blocks {
    const uint8_t *in;
    uint8_t *out;
    size_t n, n_blocks, in_stride, out_stride; /* bytes from one block to the next */
    enum elem_type type;
    ncclRedOp_t op;
};

static void ask_gather(struct launch *l, const void *arg)
{
    const struct blocks *b = arg;
    for (size_t i = 0; i < b->n_blocks; i++)
        also(l, ncclAllGather(b->in + i * b->in_stride, b->out + i * b->out_stride, b->n,
                              nccl_type(b->type), l->comm, l->stream));
}

static int nccl_all_gather(struct coll *c, const struct coll_group *g, enum elem_type type,
                           const void *in, size_t n, size_t n_blocks, void *out, struct err *err)
{
    struct nccl *x = nccl_of(c);
    size_t part = n * width_of(type);
    struct blocks b = {.in = in, .out = out, .n = n, .n_blocks = n_blocks, .in_stride = part,
                       .out_stride = part * g->n_ranks, .type = type};
    uint32_t note = 0;
    int rc = enter(x, g, SHM_ALL_GATHER, call_word(type, COLL_SUM), n, n_blocks, NULL, &note, err);
    if (rc < 0)
        return rc;
    if (is_alone(x, g) || n * n_blocks == 0) {
        copy(x, out, in, part * n_blocks);
        call_note_left(x->host, note);
        return 0;
    }
    return launch(x, g, ask_gather, &b, note, "all_gather", err);
}

static void ask_scatter(struct launch *l, const void *arg)
{
    const struct blocks *b = arg;
    for (size_t i = 0; i < b->n_blocks; i++)
        also(l, ncclReduceScatter(b->in + i * b->in_stride, b->out + i * b->out_stride, b->n,
                                  nccl_type(b->type), b->op, l->comm, l->stream));
}

static int nccl_reduce_scatter(struct coll *c, const struct coll_group *g, enum elem_type type,
                               const void *in, size_t n, size_t n_blocks, void *out,
                               struct err *err)
{
    struct nccl *x = nccl_of(c);
    size_t part = n * width_of(type);
    struct blocks b = {.in = in, .out = out, .n = n, .n_blocks = n_blocks,
                       .in_stride = part * g->n_ranks, .out_stride = part, .type = type,
                       .op = ncclSum};
    uint32_t note = 0;
    int rc = enter(x, g, SHM_REDUCE_SCATTER, call_word(type, COLL_SUM), n, n_blocks, NULL, &note,
                   err);
    if (rc < 0)
        return rc;
    if (is_alone(x, g) || n * n_blocks == 0) {
        copy(x, out, in, part * n_blocks);
        call_note_left(x->host, note);
        return 0;
    }
    if (!c->dev->deterministic)
        return launch(x, g, ask_scatter, &b, note, "reduce_scatter", err);
    for (size_t i = 0; i < n_blocks && rc == 0; i++)
        rc = ordered_sum(x, g, type, b.in + i * b.in_stride, n, part, b.out + i * part, note,
                         "reduce_scatter", err);
    return rc;
}

static void ask_reduce(struct launch *l, const void *arg)
{
    const struct blocks *b = arg;
    also(l, ncclAllReduce(b->in, b->out, b->n, nccl_type(b->type), b->op, l->comm, l->stream));
}

static int nccl_all_reduce(struct coll *c, const struct coll_group *g, enum coll_op op,
                           enum elem_type type, void *tensor, size_t n, struct err *err)
{
    struct nccl *x = nccl_of(c);
    struct blocks b = {.in = tensor, .out = tensor, .n = n, .type = type,
                       .op = op == COLL_SUM ? ncclSum : ncclMax};
    uint32_t note = 0;
    int rc = enter(x, g, SHM_ALL_REDUCE, call_word(type, op), n, 1, NULL, &note, err);
    if (rc < 0)
        return rc;
    if (is_alone(x, g) || n == 0) {
        call_note_left(x->host, note);
        return 0;
    }
    if (c->dev->deterministic && op == COLL_SUM)
        return ordered_sum(x, g, type, tensor, n, 0, tensor, note, "all_reduce", err);
    return launch(x, g, ask_reduce, &b, note, "all_reduce", err);
}

struct row_exchange {
    const struct coll_group *g;
    const uint8_t *send;
    uint8_t *recv;
    const struct rows *rows;
    size_t row_bytes;
};

/* Rows for me are already where they go. */
static void ask_rows(struct launch *l, const void *arg)
{
    const struct row_exchange *e = arg;
    const uint8_t *from = e->send;
    uint8_t *to = e->recv;
    for (uint32_t i = 0; i < e->g->n_ranks; i++) {
        size_t n_out = (size_t)e->rows->send[i] * e->row_bytes;
        size_t n_in = (size_t)e->rows->recv[i] * e->row_bytes;
        if (i != e->g->me && n_out > 0)
            also(l, ncclSend(from, n_out, ncclUint8, (int)i, l->comm, l->stream));
        if (i != e->g->me && n_in > 0)
            also(l, ncclRecv(to, n_in, ncclUint8, (int)i, l->comm, l->stream));
        from += n_out;
        to += n_in;
    }
}

static void copy_own_rows(struct nccl *x, const struct row_exchange *e)
{
    size_t before_send = 0, before_recv = 0;
    for (uint32_t i = 0; i < e->g->me; i++) {
        before_send += (size_t)e->rows->send[i];
        before_recv += (size_t)e->rows->recv[i];
    }
    copy(x, e->recv + before_recv * e->row_bytes, e->send + before_send * e->row_bytes,
         (size_t)e->rows->send[e->g->me] * e->row_bytes);
}

static bool has_others(const struct coll_group *g, const struct rows *rows)
{
    bool any = false;
    for (uint32_t i = 0; i < g->n_ranks; i++)
        any = any || (i != g->me && (rows->send[i] > 0 || rows->recv[i] > 0));
    return any;
}

static int nccl_all_to_all_rows(struct coll *c, const struct coll_group *g, const void *send,
                                const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                                size_t row_bytes, struct err *err)
{
    struct nccl *x = nccl_of(c);
    struct rows rows = {send_rows, recv_rows};
    struct row_exchange e = {.g = g, .send = send, .recv = recv, .rows = &rows,
                             .row_bytes = row_bytes};
    uint32_t note = 0;
    int rc = enter(x, g, SHM_ALL_TO_ALL_ROWS, 0, row_bytes, 1, &rows, &note, err);
    if (rc < 0)
        return rc;
    if (send_rows[g->me] != recv_rows[g->me])
        return err_set(err, -EPROTO, "all_to_all: rank %u sends %lld rows to itself and expects "
                       "%lld", c->rank, (long long)send_rows[g->me],
                       (long long)recv_rows[g->me]);
    copy_own_rows(x, &e);
    if (!has_others(g, &rows)) {
        call_note_left(x->host, note);
        return 0;
    }
    return launch(x, g, ask_rows, &e, note, "all_to_all", err);
}

/* ---- what the host collectives do ------------------------------------------------------------ */

static struct coll *host_coll(struct coll *c)
{
    struct coll *host = &nccl_of(c)->host->coll;
    host->layer = c->layer;
    return host;
}

static void *nccl_alloc(struct coll *c, size_t n_bytes)
{
    struct coll *host = host_coll(c);
    return host->ops->alloc(host, n_bytes);
}

static void nccl_free(struct coll *c, void *p)
{
    struct coll *host = host_coll(c);
    host->ops->free(host, p);
}

static int nccl_barrier(struct coll *c, const struct coll_group *g, struct err *err)
{
    struct coll *host = host_coll(c);
    return host->ops->barrier(host, g, err);
}

static int nccl_all_reduce_f64(struct coll *c, const struct coll_group *g, enum coll_op op,
                               double *words, size_t n, struct err *err)
{
    struct coll *host = host_coll(c);
    return host->ops->all_reduce_f64(host, g, op, words, n, err);
}

static int nccl_all_gather_i32(struct coll *c, const struct coll_group *g, const int32_t *in,
                               size_t n, int32_t *out, struct err *err)
{
    struct coll *host = host_coll(c);
    return host->ops->all_gather_i32(host, g, in, n, out, err);
}

static void nccl_trace(struct coll *c, FILE *out)
{
    struct coll *host = &nccl_of(c)->host->coll;
    host->ops->trace(host, out);
}

/* The watcher sees it within a moment and aborts what the device waits for. */
static void nccl_abort(struct coll *c)
{
    struct coll *host = &nccl_of(c)->host->coll;
    host->ops->abort(host);
}

/* ---- open and close -------------------------------------------------------------------------- */

/* All but the host collectives. Nobody's memory goes while another rank may still read it. */
static void end(struct nccl *x)
{
    struct coll *host = &x->host->coll;
    struct device *dev = x->coll.dev;
    bool is_well = x->has_watcher && shm_check(&x->host->shm, NULL) == 0;
    if (is_well)
        dev->ops->synchronize(dev);
    if (is_well)
        host->ops->barrier(host, &host->world_group, NULL); /* one that fails is no obstacle */
    stop_watcher(x);
    abort_comms(x);
    for (uint32_t i = 0; i < FLIGHTS; i++) {
        if (x->flights[i].began)
            cudaEventDestroy(x->flights[i].began);
        if (x->flights[i].done)
            cudaEventDestroy(x->flights[i].done);
    }
    if (x->scratch)
        dev->ops->free(dev, x->scratch);
    pthread_mutex_destroy(&x->lock);
    free(x);
}

static void nccl_close(struct coll *c)
{
    struct coll *host = &nccl_of(c)->host->coll;
    end(nccl_of(c));
    host->ops->close(host);
}

static const struct coll_ops nccl_ops = {
    .name            = "nccl",
    .close           = nccl_close,
    .alloc           = nccl_alloc,
    .free            = nccl_free,
    .all_gather      = nccl_all_gather,
    .reduce_scatter  = nccl_reduce_scatter,
    .all_reduce      = nccl_all_reduce,
    .all_to_all_rows = nccl_all_to_all_rows,
    .barrier         = nccl_barrier,
    .all_reduce_f64  = nccl_all_reduce_f64,
    .all_gather_i32  = nccl_all_gather_i32,
    .trace           = nccl_trace,
    .abort           = nccl_abort,
};

static int make_events(struct nccl *x, struct err *err)
{
    cudaError_t rc = cudaSuccess;
    cuda_stream(x->coll.dev); /* makes its device this thread's */
    for (uint32_t i = 0; i < FLIGHTS && rc == cudaSuccess; i++) {
        rc = cudaEventCreateWithFlags(&x->flights[i].began, cudaEventDisableTiming);
        if (rc == cudaSuccess)
            rc = cudaEventCreateWithFlags(&x->flights[i].done, cudaEventDisableTiming);
    }
    return rc == cudaSuccess ? 0 : err_set(err, -EIO, "events of the collectives: %s",
                                           cudaGetErrorString(rc));
}

int coll_nccl_open(struct coll *host, struct device *dev, const struct coll_group *groups,
                   uint32_t n_groups, struct coll **out_coll, struct err *err)
{
    int32_t words[sizeof(ncclUniqueId) / sizeof(int32_t)];
    struct nccl *x = xcalloc(1, sizeof *x);
    int rc;

    x->coll = *host;
    x->coll.ops = &nccl_ops;
    x->coll.dev = host->dev = dev;
    x->host = host_of(host);
    pthread_mutex_init(&x->lock, NULL);
    setenv("NCCL_NVLS_ENABLE", "0", 0); /* NVLink multicast, unless somebody asked for it */
    if ((rc = make_events(x, err)) < 0 || (rc = start_watcher(x, err)) < 0 ||
        (rc = agree_on_id(x, words, err)) < 0)
        goto fail;
    pthread_mutex_lock(&x->lock);
    rc = add_world(x, words, err);
    for (uint32_t i = 0; i < n_groups && rc == 0; i++)
        rc = add_group(x, &groups[i], err);
    pthread_mutex_unlock(&x->lock);
    if (rc < 0)
        goto fail;
    *out_coll = &x->coll;
    return 0;
fail:
    host->ops->abort(host);
    end(x);
    return rc;
}
