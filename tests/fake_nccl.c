/* fake_nccl.c - what a call asks is posted, computed once all have posted, written once all have
 * computed */
#include "tests/fake_nccl.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <nccl.h>

#include "kernels/cuda.h"

/* Which the header declares without saying that they take nothing. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

#define RANKS_HERE 8
#define ASKS_MAX   256

enum kind { GATHER, SCATTER, REDUCE, SEND, RECV, SPLIT };
struct ask {
    enum kind kind;
    const uint8_t *in;
    uint8_t *out, *result;
    size_t n_bytes;
    int peer;
    ncclRedOp_t op;
    int color, key;
    ncclComm_t *out_comm;
};

/* The members of one communicator. */
struct meeting {
    uint8_t id[32];
    int n;
    atomic_int n_joined, n_left;
    ncclComm_t members[RANKS_HERE];
    _Atomic uint64_t posted[RANKS_HERE], computed[RANKS_HERE];
    struct meeting *next;
};

enum phase { JOINING, IDLE, POSTED, COMPUTED };
struct ncclComm {
    struct meeting *m;
    int rank, world_rank;
    enum phase phase;
    uint64_t seq;
    struct ask asks[ASKS_MAX];
    int n_asks;
    struct region *regions; /* that were registered with it */
    bool is_aborted;
};

struct region {
    ncclComm_t comm;
    struct region *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct meeting *meetings;
static atomic_int broken = -1;
static atomic_bool refuses;
static atomic_int n_registered, n_deregistered, n_aborted;
static _Thread_local ncclComm_t grouped; /* the one that a group asks something of */

void fake_nccl_break(int rank)
{
    atomic_store(&broken, rank);
}

void fake_nccl_refuse(bool does)
{
    atomic_store(&refuses, does);
}

struct fake_nccl_memory fake_nccl_memory(void)
{
    return (struct fake_nccl_memory){atomic_exchange(&n_registered, 0),
                                     atomic_exchange(&n_deregistered, 0),
                                     atomic_exchange(&n_aborted, 0)};
}

static struct meeting *meeting_of(const uint8_t id[32], int n)
{
    pthread_mutex_lock(&lock);
    struct meeting *m = meetings;
    while (m && memcmp(m->id, id, sizeof m->id) != 0)
        m = m->next;
    if (!m) {
        m = calloc(1, sizeof *m);
        memcpy(m->id, id, sizeof m->id);
        m->n = n;
        m->next = meetings;
        meetings = m;
    }
    pthread_mutex_unlock(&lock);
    return m;
}

static ncclComm_t join(const uint8_t id[32], int n, int rank, int world_rank)
{
    ncclComm_t c = calloc(1, sizeof *c);
    c->m = meeting_of(id, n);
    c->rank = rank;
    c->world_rank = world_rank;
    c->m->members[rank] = c;
    atomic_fetch_add(&c->m->n_joined, 1);
    return c;
}

/* ---- progress ---- */

static const struct ask *nth(const struct ncclComm *c, enum kind kind, int peer, int n)
{
    for (int i = 0; i < c->n_asks; i++)
        if (c->asks[i].kind == kind && c->asks[i].peer == peer && n-- == 0)
            return &c->asks[i];
    assert(!"a receive without its send");
    return NULL;
}

/* In the order of ranks. */
static void fold(struct ncclComm *c, int i, size_t from)
{
    struct ask *a = &c->asks[i];
    for (int r = 0; r < c->m->n; r++) {
        const float *x = (const float *)(c->m->members[r]->asks[i].in + from);
        float *sum = (float *)a->result;
        for (size_t k = 0; k < a->n_bytes / sizeof *x; k++)
            sum[k] = r == 0 ? x[k] : a->op == ncclSum ? sum[k] + x[k]
                                 : x[k] > sum[k]      ? x[k]
                                                      : sum[k];
    }
}

static size_t result_bytes(const struct ncclComm *c, const struct ask *a)
{
    return a->kind == GATHER ? a->n_bytes * (size_t)c->m->n : a->n_bytes;
}

static void split(struct ncclComm *c, struct ask *a)
{
    uint8_t id[32] = {0};
    int n = 0, rank = 0;
    for (int r = 0; r < c->m->n; r++) {
        const struct ask *other = &c->m->members[r]->asks[0];
        n += other->color == a->color;
        rank += other->color == a->color && other->key < a->key;
    }
    memcpy(id, &c->m, sizeof c->m);
    memcpy(id + 8, &c->seq, sizeof c->seq);
    memcpy(id + 16, &a->color, sizeof a->color);
    *a->out_comm = join(id, n, rank, c->world_rank);
}

static void compute(struct ncclComm *c)
{
    int n_received[RANKS_HERE] = {0};
    for (int i = 0; i < c->n_asks; i++) {
        struct ask *a = &c->asks[i];
        a->result = calloc(1, result_bytes(c, a) + 1);
        if (a->kind == GATHER)
            for (int r = 0; r < c->m->n; r++)
                memcpy(a->result + (size_t)r * a->n_bytes, c->m->members[r]->asks[i].in,
                       a->n_bytes);
        else if (a->kind == SCATTER)
            fold(c, i, (size_t)c->rank * a->n_bytes);
        else if (a->kind == REDUCE)
            fold(c, i, 0);
        else if (a->kind == RECV) {
            const struct ask *sent = nth(c->m->members[a->peer], SEND, c->rank,
                                         n_received[a->peer]++);
            assert(sent->n_bytes == a->n_bytes);
            memcpy(a->result, sent->in, a->n_bytes);
        } else if (a->kind == SPLIT)
            split(c, a);
    }
}

static void write_results(struct ncclComm *c)
{
    for (int i = 0; i < c->n_asks; i++) {
        struct ask *a = &c->asks[i];
        if (a->out)
            memcpy(a->out, a->result, result_bytes(c, a));
        free(a->result);
    }
    c->n_asks = 0;
}

static bool all_at(struct meeting *m, _Atomic uint64_t *seqs, uint64_t seq)
{
    bool all = true;
    for (int r = 0; r < m->n; r++)
        all = all && atomic_load(&seqs[r]) >= seq;
    return all;
}

static void get_on(struct ncclComm *c)
{
    struct meeting *m = c->m;
    if (c->phase == JOINING && atomic_load(&m->n_joined) == m->n)
        c->phase = IDLE;
    if (c->phase == POSTED && all_at(m, m->posted, c->seq)) {
        compute(c);
        atomic_store(&m->computed[c->rank], c->seq);
        c->phase = COMPUTED;
    }
    if (c->phase == COMPUTED && all_at(m, m->computed, c->seq)) {
        write_results(c);
        c->phase = IDLE;
    }
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *out)
{
    if (atomic_load(&broken) == c->world_rank) {
        *out = ncclRemoteError;
        return ncclSuccess;
    }
    get_on(c);
    *out = c->phase == IDLE ? ncclSuccess : ncclInProgress;
    return ncclSuccess;
}

/* ---- asking ---- */

/* As the true one, it refuses what comes before the last is over. */
static bool is_ready(ncclComm_t c)
{
    return c->phase == IDLE;
}

static struct ask *add(ncclComm_t c, enum kind kind, const void *in, void *out, size_t n_bytes)
{
    assert(is_ready(c) && c->n_asks < ASKS_MAX);
    grouped = c;
    c->asks[c->n_asks] = (struct ask){.kind = kind, .in = in, .out = out, .n_bytes = n_bytes};
    return &c->asks[c->n_asks++];
}

static void post(ncclComm_t c)
{
    c->seq++;
    c->phase = POSTED;
    atomic_store(&c->m->posted[c->rank], c->seq);
}

static size_t width(ncclDataType_t type)
{
    return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1;
}

ncclResult_t ncclGroupStart(void)
{
    grouped = NULL;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (!grouped)
        return ncclSuccess;
    post(grouped);
    return ncclInProgress;
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t n, ncclDataType_t type, ncclComm_t c,
                           cudaStream_t stream)
{
    (void)stream;
    add(c, GATHER, in, out, n * width(type));
    return ncclSuccess;
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t n, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t stream)
{
    (void)stream;
    assert(type == ncclFloat32);
    add(c, SCATTER, in, out, n * width(type))->op = op;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t n, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t c, cudaStream_t stream)
{
    (void)stream;
    assert(type == ncclFloat32);
    add(c, REDUCE, in, out, n * width(type))->op = op;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *in, size_t n, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t stream)
{
    (void)stream;
    add(c, SEND, in, NULL, n * width(type))->peer = peer;
    return ncclSuccess;
}

ncclResult_t ncclRecv(void *out, size_t n, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t stream)
{
    (void)stream;
    add(c, RECV, NULL, out, n * width(type))->peer = peer;
    return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *out, ncclConfig_t *config)
{
    assert(config->blocking == 1);
    if (!is_ready(c))
        return ncclInvalidArgument;
    struct ask *a = add(c, SPLIT, NULL, NULL, 0);
    a->color = color;
    a->key = key;
    a->out_comm = out;
    post(c);
    return ncclSuccess; /* as the true one says, though it has only begun */
}

/* ---- life ---- */

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    static atomic_uint n_ids;
    uint32_t id = atomic_fetch_add(&n_ids, 1) + 1;
    memset(out, 0, sizeof *out);
    memcpy(out, &id, sizeof id);
    memset(out->internal + 24, 0x5a, 8); /* no id of a split has it */
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int n, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    assert(config->blocking == 0);
    *out = join((const uint8_t *)id.internal, n, rank, rank);
    return ncclInProgress;
}

ncclResult_t ncclCommRegister(const ncclComm_t c, void *p, size_t n, void **out_handle)
{
    assert(!c->is_aborted && p && n > 0);
    if (atomic_load(&refuses))
        return ncclSystemError;
    struct region *r = calloc(1, sizeof *r);
    r->comm = c;
    r->next = c->regions;
    c->regions = *out_handle = r;
    atomic_fetch_add(&n_registered, 1);
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t c, void *handle)
{
    struct region **at = &c->regions;
    assert(!c->is_aborted);
    while (*at && *at != handle)
        at = &(*at)->next;
    struct region *r = *at;
    assert(r && r->comm == c);
    *at = r->next;
    free(r);
    atomic_fetch_add(&n_deregistered, 1);
    return ncclSuccess;
}

/* The last one that goes takes the memory, as others may still look at what it asked. */
ncclResult_t ncclCommAbort(ncclComm_t c)
{
    struct meeting *m = c->m;
    assert(!c->is_aborted);
    c->is_aborted = true;
    for (struct region *r = c->regions, *next; r; r = next) {
        next = r->next;
        free(r);
        atomic_fetch_add(&n_aborted, 1);
    }
    c->regions = NULL;
    for (int i = 0; i < c->n_asks && c->phase == COMPUTED; i++)
        free(c->asks[i].result);
    if (atomic_fetch_add(&m->n_left, 1) + 1 == atomic_load(&m->n_joined) &&
        atomic_load(&m->n_joined) == m->n)
        for (int r = 0; r < m->n; r++)
            free(m->members[r]);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
    return r == ncclRemoteError ? "a remote rank failed" : "an error";
}

/* ---- the little that is taken of CUDA ---- */

cudaStream_t cuda_stream(struct device *dev)
{
    (void)dev;
    return NULL;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags)
{
    (void)flags;
    *out = malloc(1);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)event, (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    (void)stream, (void)event, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    (void)flags;
    *out = malloc(1);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
}

/* All is over at once. */
cudaError_t cudaEventElapsedTime(float *out_ms, cudaEvent_t from, cudaEvent_t to)
{
    (void)from, (void)to;
    *out_ms = 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t rc)
{
    (void)rc;
    return "an error";
}
