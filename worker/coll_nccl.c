/* coll_nccl.c - NCCL's communicators, and who watches them
 *
 * A rank whose neighbour is gone waits in its device, where nothing ends the wait but an abort of
 * the communicators. So a thread watches: the neighbours, an abort by any rank, NCCL's own errors,
 * and whether what has begun on the device ends. One lock keeps the watcher from aborting what is
 * being called.
 *
 * Opening does not block, as it takes as long as the slowest rank. The communicators that work are
 * split off and do: each launch of one that does not block starts a thread inside NCCL, a tenth of
 * a millisecond of the host's time. Their calls are short all the same, but for the first between
 * two ranks, which waits for the other to come.
 *
 * All communicators work on one stream, beside that of the ops. Launches are in it in the order of
 * the calls, which is the same on all members, so that none waits for one that waits for it; each
 * waits for the ops before its call alone. */
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
#include "common/progress.h"
#include "kernels/cuda.h"
#include "worker/coll_flight.h"
#include "worker/coll_nccl_memory.h"

#define WATCH_NS   (20 * NS_PER_MS)
#define LOOK_EVERY 5u /* of those until neighbours are looked at */
#define REASON_NS  (500 * NS_PER_MS)
#define POLL_NS    50000

struct nccl {
    struct host *host;  /* borrowed */
    struct device *dev; /* borrowed */
    pthread_t watcher;
    bool has_watcher;
    atomic_bool is_closing;
    pthread_mutex_t lock; /* of all below, which both threads use */
    ncclComm_t root; /* of all ranks, does not block; the others are split off it */
    ncclComm_t comms[COLL_GROUPS_MAX]; /* [COLL_WORLD] all ranks'; NULL: none, or aborted */
    ncclComm_t splitting;              /* not yet in comms */
    bool is_aborted;
    struct nccl_memory memory;
    struct flights flights;
    struct shm_patience patience; /* with the flight that is to land next */
};

/* ---- abort, and who watches ------------------------------------------------------------------ */

/* With the lock. What the device waits for in NCCL then ends: first all are told, then all are
 * waited for, as what one waits for may be behind another in the stream. */
static void abort_comms(struct nccl *x)
{
    if (x->is_aborted)
        return;
    x->is_aborted = true;
    ncclGroupStart();
    for (uint32_t i = 0; i < COLL_GROUPS_MAX; i++)
        if (x->comms[i])
            ncclCommAbort(x->comms[i]);
    ncclGroupEnd();
    if (x->root)
        ncclCommAbort(x->root);
    memset(x->comms, 0, sizeof x->comms);
    x->root = NULL;
    nccl_memory_forget(&x->memory);
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
        shm_abort(&x->host->shm, "rank %u: NCCL: %s", x->host->coll.rank, ncclGetErrorString(r));
        return;
    }
}

/* With the lock. Notes what the device has done, and gives up on what it does not end. */
static void look_at_flights(struct nccl *x)
{
    struct shm *s = &x->host->shm;
    while (x->flights.n_landed < x->flights.n_launched) {
        struct flight *f = flights_at(&x->flights, x->flights.n_landed + 1);
        if (cudaEventQuery(f->done) == cudaSuccess) {
            call_note_left(x->host, f->note);
            x->flights.n_landed++;
            x->patience = (struct shm_patience){0};
            progress_made();
            continue;
        }
        if (!f->began_ns && cudaEventQuery(f->began) == cudaSuccess)
            f->began_ns = clock_now_ns();
        if (f->began_ns && shm_is_too_long(s, &x->host->coll.world_group, &x->patience))
            shm_give_up(s, &x->host->coll.world_group, clock_now_ns() - f->began_ns);
        return;
    }
}

static void *watch(void *arg)
{
    struct nccl *x = arg;
    struct shm *s = &x->host->shm;
    cuda_stream(x->dev); /* its device is this thread's, too */
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

/* ---- communicators, all with the lock -------------------------------------------------------- */

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
    shm_abort(s, "rank %u: NCCL: %s: %s", x->host->coll.rank, what, ncclGetErrorString(r));
    pthread_mutex_lock(&x->lock);
    return shm_check(s, err);
}

/* Waits until *comm has taken up what was asked of it with result r. The device may still be at
 * work on it. Success says nothing yet where a call only begins something: *comm knows. */
static int settle(struct nccl *x, ncclComm_t *comm, ncclResult_t r, const char *what,
                  struct err *err)
{
    for (uint32_t i = 0; r == ncclInProgress || (r == ncclSuccess && i == 0); i++) {
        if (i > 0) {
            pthread_mutex_unlock(&x->lock);
            if (i < 100)
                sched_yield();
            else
                nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
            pthread_mutex_lock(&x->lock);
        }
        int rc = shm_check(&x->host->shm, err);
        if (rc < 0)
            return rc;
        ncclResult_t asked = ncclCommGetAsyncError(*comm, &r);
        r = asked == ncclSuccess ? r : asked;
    }
    return r == ncclSuccess ? 0 : fail(x, r, what, err);
}

static int add_root(struct nccl *x, const int32_t *id_words, struct err *err)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    config.blocking = 0;
    memcpy(&id, id_words, sizeof id);
    ncclResult_t r = ncclCommInitRankConfig(&x->root, (int)x->host->coll.world, id,
                                            (int)x->host->coll.rank, &config);
    return settle(x, &x->root, r, "opening the communicator of all ranks", err);
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

/* A communicator that works. A group of all ranks is the world, and one rank needs none. Groups of
 * one kind are equal in size, so all ranks split, or none does. The group is there when the split
 * is over. */
static int add_group(struct nccl *x, const struct coll_group *g, struct err *err)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int rc;
    bool is_world = g->n_ranks == x->host->coll.world;
    assert(g->id < COLL_GROUPS_MAX);
    if ((is_world && g->id != COLL_WORLD) || (g->n_ranks == 1 && !is_world))
        return 0;
    config.blocking = 1;
    ncclResult_t r = ncclCommSplit(x->root, (int)g->ranks[0], (int)g->me, &x->splitting, &config);
    do {
        rc = settle(x, &x->root, r, "splitting the ranks", err);
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
    uint32_t id = g->n_ranks == x->host->coll.world ? COLL_WORLD : g->id;
    assert(id < COLL_GROUPS_MAX && g->ranks[g->me] == x->host->coll.rank);
    assert(x->comms[id] || x->is_aborted);
    return &x->comms[id];
}

/* ---- one launch ------------------------------------------------------------------------------ */

/* What is asked of NCCL in one launch. */
struct launch {
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

/* Asks for it all at once. */
static int ask(struct nccl *x, const struct coll_group *g, ask_fn fn, const void *arg,
               struct flight *flight, const char *what, struct err *err)
{
    struct launch l = {.stream = x->flights.stream};
    ncclComm_t *comm = comm_of(x, g);
    if (x->is_aborted)
        return shm_check(&x->host->shm, err);
    l.comm = *comm;
    cudaEventRecord(flight->ready, cuda_stream(x->dev));
    cudaStreamWaitEvent(l.stream, flight->ready, 0);
    cudaEventRecord(flight->began, l.stream);
    also(&l, ncclGroupStart());
    fn(&l, arg);
    ncclResult_t r = ncclGroupEnd();
    int rc = settle(x, comm, l.result == ncclSuccess ? r : l.result, what, err);
    cudaEventRecord(flight->done, l.stream);
    return rc;
}

/* The same with the lock, and the call's note. */
static int launch(struct nccl *x, const struct coll_group *g, ask_fn fn, const void *arg,
                  enum phase hidden, uint32_t note, const char *what, uint32_t *out_launch,
                  struct err *err)
{
    pthread_mutex_lock(&x->lock);
    struct flight *f = flights_next(&x->flights, x->dev);
    f->note = note;
    f->hidden = hidden;
    f->layer = x->host->coll.layer;
    int rc = ask(x, g, fn, arg, f, what, err);
    x->flights.n_launched += rc == 0;
    *out_launch = x->flights.n_launched;
    pthread_mutex_unlock(&x->lock);
    return rc;
}

/* Where a later launch has the flight, it is waited for that one, which comes behind in the same
 * stream. */
void nccl_finish(struct nccl *x, uint32_t launch)
{
    if (launch == 0)
        return;
    struct flight *f = flights_at(&x->flights, launch);
    cudaEventRecord(f->waited, cuda_stream(x->dev));
    f->is_waited = true;
    cudaStreamWaitEvent(cuda_stream(x->dev), f->done, 0);
}

static ncclDataType_t nccl_type(enum elem_type type)
{
    return type == ELEM_F32 ? ncclFloat32 : ncclBfloat16;
}

static void ask_gather(struct launch *l, const void *arg)
{
    const struct nccl_blocks *b = arg;
    for (size_t i = 0; i < b->n_blocks; i++)
        also(l, ncclAllGather(b->in + i * b->in_stride, b->out + i * b->out_stride, b->n,
                              nccl_type(b->type), l->comm, l->stream));
}

int nccl_gather(struct nccl *x, const struct coll_group *g, const struct nccl_blocks *blocks,
                uint32_t note, uint32_t *out_launch, struct err *err)
{
    return launch(x, g, ask_gather, blocks, PHASE_GATHER_HIDDEN, note, "all_gather", out_launch,
                  err);
}

static void ask_scatter(struct launch *l, const void *arg)
{
    const struct nccl_blocks *b = arg;
    for (size_t i = 0; i < b->n_blocks; i++)
        also(l, ncclReduceScatter(b->in + i * b->in_stride, b->out + i * b->out_stride, b->n,
                                  nccl_type(b->type), ncclSum, l->comm, l->stream));
}

int nccl_scatter(struct nccl *x, const struct coll_group *g, const struct nccl_blocks *blocks,
                 uint32_t note, uint32_t *out_launch, struct err *err)
{
    return launch(x, g, ask_scatter, blocks, PHASE_REDUCE_HIDDEN, note, "reduce_scatter",
                  out_launch, err);
}

static void ask_reduce(struct launch *l, const void *arg)
{
    const struct nccl_blocks *b = arg;
    also(l, ncclAllReduce(b->in, b->out, b->n, nccl_type(b->type),
                          b->op == COLL_SUM ? ncclSum : ncclMax, l->comm, l->stream));
}

int nccl_reduce(struct nccl *x, const struct coll_group *g, const struct nccl_blocks *block,
                uint32_t note, uint32_t *out_launch, struct err *err)
{
    return launch(x, g, ask_reduce, block, PHASE_REDUCE_HIDDEN, note, "all_reduce", out_launch,
                  err);
}

struct exchange {
    const struct nccl_part *parts;
    uint32_t n_members, me;
};

static void ask_exchange(struct launch *l, const void *arg)
{
    const struct exchange *e = arg;
    for (uint32_t i = 0; i < e->n_members; i++) {
        const struct nccl_part *p = &e->parts[i];
        if (i != e->me && p->n_send > 0)
            also(l, ncclSend(p->send, p->n_send, ncclUint8, (int)i, l->comm, l->stream));
        if (i != e->me && p->n_recv > 0)
            also(l, ncclRecv(p->recv, p->n_recv, ncclUint8, (int)i, l->comm, l->stream));
    }
}

int nccl_exchange(struct nccl *x, const struct coll_group *g, const struct nccl_part *parts,
                  uint32_t note, uint32_t *out_launch, struct err *err)
{
    const struct exchange e = {.parts = parts, .n_members = g->n_ranks, .me = g->me};
    const struct nccl_part *mine = &parts[g->me];
    bool has_others = false;
    for (uint32_t i = 0; i < g->n_ranks; i++)
        has_others = has_others || (i != g->me && parts[i].n_send + parts[i].n_recv > 0);
    assert(mine->n_send == mine->n_recv);
    *out_launch = 0;
    int rc = 0;
    if (has_others)
        rc = launch(x, g, ask_exchange, &e, PHASE_DISPATCH_HIDDEN, note, "all_to_all", out_launch,
                    err);
    else
        call_note_left(x->host, note);
    if (rc == 0 && mine->n_send > 0) /* while those of others travel */
        x->dev->ops->copy(x->dev, mine->recv, mine->send, mine->n_send);
    return rc;
}

/* ---- memory ---------------------------------------------------------------------------------- */

void nccl_know(struct nccl *x, void *p, size_t n_bytes)
{
    pthread_mutex_lock(&x->lock);
    if (!x->is_aborted)
        nccl_memory_add(&x->memory, x->comms, p, n_bytes);
    pthread_mutex_unlock(&x->lock);
}

/* Ops come after what was launched with p; those are waited for without the lock, so that an abort
 * can end the wait. */
void nccl_forget(struct nccl *x, const void *p)
{
    pthread_mutex_lock(&x->lock);
    bool has_some = x->memory.n_known > 0;
    pthread_mutex_unlock(&x->lock);
    if (!has_some)
        return;
    x->dev->ops->synchronize(x->dev);
    pthread_mutex_lock(&x->lock);
    if (!x->is_aborted)
        nccl_memory_drop(&x->memory, x->comms, p);
    pthread_mutex_unlock(&x->lock);
}

void nccl_forget_all(struct nccl *x)
{
    pthread_mutex_lock(&x->lock);
    if (!x->is_aborted)
        nccl_memory_drop_all(&x->memory, x->comms);
    pthread_mutex_unlock(&x->lock);
}

/* ---- open and close -------------------------------------------------------------------------- */

void nccl_close(struct nccl *x)
{
    stop_watcher(x);
    abort_comms(x);
    flights_fini(&x->flights);
    pthread_mutex_destroy(&x->lock);
    free(x);
}

static int make_comms(struct nccl *x, const struct coll_group *groups, uint32_t n_groups,
                      struct err *err)
{
    int32_t words[sizeof(ncclUniqueId) / sizeof(int32_t)];
    int rc = agree_on_id(x, words, err);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&x->lock);
    rc = add_root(x, words, err);
    if (rc == 0)
        rc = add_group(x, &x->host->coll.world_group, err);
    for (uint32_t i = 0; i < n_groups && rc == 0; i++)
        rc = add_group(x, &groups[i], err);
    pthread_mutex_unlock(&x->lock);
    return rc;
}

int nccl_open(struct host *host, struct device *dev, const struct coll_group *groups,
              uint32_t n_groups, struct nccl **out, struct err *err)
{
    struct nccl *x = xcalloc(1, sizeof *x);
    int rc;
    x->host = host;
    x->dev = dev;
    pthread_mutex_init(&x->lock, NULL);
    setenv("NCCL_NVLS_ENABLE", "0", 0); /* NVLink multicast, unless somebody asked for it */
    cuda_stream(dev); /* makes its device this thread's */
    if ((rc = flights_init(&x->flights, err)) < 0 || (rc = start_watcher(x, err)) < 0 ||
        (rc = make_comms(x, groups, n_groups, err)) < 0) {
        host->coll.ops->abort(&host->coll);
        nccl_close(x);
        return rc;
    }
    *out = x;
    return 0;
}
