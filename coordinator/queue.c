/* queue.c - which waiting jobs start now, and why the others do not: a pure function */
#include "coordinator/queue.h"

#include <stdlib.h>
#include <string.h>

bool queue_is_before(const struct queue_job *a, const struct queue_job *b)
{
    return a->priority != b->priority ? a->priority > b->priority : a->id < b->id;
}

/* Memory sizes in ascending order, to count how many are large enough. */
struct sizes {
    uint64_t *bytes;
    size_t    n;
};

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static size_t sizes_at_least(const struct sizes *s, uint64_t bytes)
{
    size_t low = 0, high = s->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (s->bytes[middle] < bytes)
            low = middle + 1;
        else
            high = middle;
    }
    return s->n - low;
}

static struct sizes sizes_of(const struct queue_worker *workers, size_t n, bool free_only,
                             struct arena *arena)
{
    struct sizes s = {.bytes = arena_alloc(arena, n * sizeof(uint64_t))};
    for (size_t i = 0; i < n; i++)
        if (workers[i].is_free || !free_only)
            s.bytes[s.n++] = workers[i].memory_bytes;
    qsort(s.bytes, s.n, sizeof *s.bytes, by_size);
    return s;
}

static void sizes_remove(struct sizes *s, uint64_t bytes)
{
    size_t i = s->n - sizes_at_least(s, bytes);
    memmove(s->bytes + i, s->bytes + i + 1, (s->n - i - 1) * sizeof *s->bytes);
    s->n--;
}

static int by_node(const void *a, const void *b)
{
    const struct queue_worker *x = a, *y = b;
    int order = strcmp(x->node, y->node);
    return order ? order : strcmp(x->name, y->name);
}

/* A node's workers are neighbours in the array. */
struct run {
    size_t first, n;
    size_t n_free; /* of them, free and large enough */
};

/* The workers while jobs take them away. */
struct pool {
    struct queue_worker *workers; /* by node and name, once there is something to choose */
    size_t               n;
    struct sizes         free_ones;
    struct run          *runs;    /* n; NULL until the workers are sorted */
};

static int most_free_first(const void *a, const void *b)
{
    const struct run *x = a, *y = b;
    if (x->n_free != y->n_free)
        return x->n_free < y->n_free ? 1 : -1;
    return (x->first > y->first) - (x->first < y->first);
}

static bool fits(const struct queue_worker *w, const struct queue_job *job)
{
    return w->is_free && w->memory_bytes >= job->memory_bytes;
}

/* The nodes, those with the most that fit first; returns how many nodes. */
static size_t find_runs(struct pool *p, const struct queue_job *job)
{
    size_t n_runs = 0;
    for (size_t i = 0; i < p->n; i++) {
        if (!i || strcmp(p->workers[i].node, p->workers[i - 1].node))
            p->runs[n_runs++] = (struct run){.first = i};
        struct run *r = &p->runs[n_runs - 1];
        r->n++;
        r->n_free += fits(&p->workers[i], job);
    }
    qsort(p->runs, n_runs, sizeof *p->runs, most_free_first);
    return n_runs;
}

/* Takes workers of one run until the gang has n_wanted; returns how many it has then. */
static size_t take(struct pool *p, const struct run *r, const struct queue_job *job,
                   uint32_t *gang, size_t n_gang, size_t n_wanted)
{
    for (size_t i = r->first; i < r->first + r->n && n_gang < n_wanted; i++)
        if (fits(&p->workers[i], job)) {
            p->workers[i].is_free = false;
            sizes_remove(&p->free_ones, p->workers[i].memory_bytes);
            gang[n_gang++] = p->workers[i].index;
        }
    return n_gang;
}

/* Whether every group of ranks that exchange tokens may be on one node of workers that are in order
 * of their nodes, be they free or not. */
static bool fits_together(const struct queue_job *job, const struct queue_worker *workers, size_t n,
                          bool free_only)
{
    size_t together = job->n_together ? job->n_together : 1, n_here = 0, n_placed = 0;
    for (size_t i = 0; i < n; i++) {
        if (i && strcmp(workers[i].node, workers[i - 1].node)) {
            n_placed += n_here / together * together;
            n_here = 0;
        }
        n_here += (workers[i].is_free || !free_only) &&
                  workers[i].memory_bytes >= job->memory_bytes;
    }
    return n_placed + n_here / together * together >= job->n_workers;
}

static bool grows_when_spread(const struct queue_job *job)
{
    return job->memory_bytes_spread > job->memory_bytes && job->n_together > 1;
}

uint64_t queue_memory_needed(const struct queue_job *job, struct queue_worker *workers,
                             size_t n_workers)
{
    if (!grows_when_spread(job))
        return job->memory_bytes;
    qsort(workers, n_workers, sizeof *workers, by_node);
    return fits_together(job, workers, n_workers, false) ? job->memory_bytes
                                                         : job->memory_bytes_spread;
}

static void sort_pool(struct pool *p, struct arena *arena)
{
    if (p->runs)
        return;
    p->runs = arena_alloc(arena, p->n * sizeof *p->runs);
    qsort(p->workers, p->n, sizeof *p->workers, by_node);
}

/* Enough are free. Prefers one node, the one that fits best; else as few nodes as possible, first
 * with whole groups of ranks that exchange tokens, then with what is left. */
static uint32_t *choose(struct pool *p, const struct queue_job *job, struct arena *arena)
{
    sort_pool(p, arena);
    uint32_t *gang = arena_alloc(arena, job->n_workers * sizeof *gang);
    size_t n_runs = find_runs(p, job), n_gang = 0, best = 0;
    for (size_t i = 1; i < n_runs && p->runs[i].n_free >= job->n_workers; i++)
        if (p->runs[i].n_free < p->runs[best].n_free)
            best = i;
    size_t n = job->n_workers, together = job->n_together ? job->n_together : 1;
    if (p->runs[best].n_free >= n)
        n_gang = take(p, &p->runs[best], job, gang, 0, n);
    for (size_t i = 0; i < n_runs && n_gang < n; i++) {
        size_t most = p->runs[i].n_free < n - n_gang ? p->runs[i].n_free : n - n_gang;
        n_gang = take(p, &p->runs[i], job, gang, n_gang, n_gang + most / together * together);
    }
    for (size_t i = 0; n_gang < n; i++)
        n_gang = take(p, &p->runs[i], job, gang, n_gang, n);
    return gang;
}

static struct wait_reason needs(const struct queue_job *job, size_t n_attached, size_t n_free,
                                bool because_of_memory)
{
    return (struct wait_reason){
        .kind = because_of_memory ? WAIT_MEMORY : WAIT_WORKERS,
        .a = job->n_workers, .b = n_attached, .c = n_free, .d = job->memory_bytes,
    };
}

/* What the gang needs on these nodes: at best, with all workers idle, and now. */
static void settle_memory(struct pool *p, struct queue_job *job, const struct sizes *all,
                          struct arena *arena)
{
    if (!grows_when_spread(job) || sizes_at_least(all, job->memory_bytes) < job->n_workers)
        return;
    sort_pool(p, arena);
    bool may_start = sizes_at_least(&p->free_ones, job->memory_bytes) >= job->n_workers;
    if (!fits_together(job, p->workers, p->n, may_start))
        job->memory_bytes = job->memory_bytes_spread;
}

void queue_decide(const struct queue_job *jobs, size_t n_jobs, struct queue_worker *workers,
                  size_t n_workers, struct arena *arena, struct queue_decision *out_decisions)
{
    if (!n_jobs)
        return;
    struct sizes all = sizes_of(workers, n_workers, false, arena);
    struct pool pool = {.workers = workers, .n = n_workers,
                        .free_ones = sizes_of(workers, n_workers, true, arena)};
    job_id behind = 0;
    for (size_t i = 0; i < n_jobs; i++) {
        struct queue_job job = jobs[i];
        struct queue_decision *out = &out_decisions[i];
        settle_memory(&pool, &job, &all, arena);
        size_t n_attached = sizes_at_least(&all, job.memory_bytes);
        size_t n_free = sizes_at_least(&pool.free_ones, job.memory_bytes);
        bool never_fits = n_attached < job.n_workers &&
            (job.memory_bytes == jobs[i].memory_bytes ||
             !fits_together(&jobs[i], pool.workers, pool.n, false));
        *out = (struct queue_decision){0};
        if (never_fits) {
            out->wait = needs(&job, n_attached, n_free, all.n >= job.n_workers);
        } else if (behind) {
            out->wait = (struct wait_reason){.kind = WAIT_BEHIND, .a = behind};
        } else if (n_free < job.n_workers) {
            out->wait = n_attached >= job.n_workers
                ? needs(&job, n_attached, n_free, pool.free_ones.n >= job.n_workers)
                : (struct wait_reason){.kind = WAIT_NODE, .a = job.n_together};
            behind = job.id;
        } else {
            out->workers = choose(&pool, &job, arena);
        }
    }
}
