/* coll_shm.c - shared memory among the ranks of one machine: what lies where in it */
#include "worker/coll_shm_parts.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"

struct shm_rank *shm_rank_of(const struct shm *s, uint32_t rank)
{
    return (struct shm_rank *)(s->base + s->ranks_at + rank * s->rank_stride);
}

int64_t *shm_rows_of(const struct shm *s, uint32_t rank, uint32_t group, uint32_t meeting)
{
    return (int64_t *)(shm_rank_of(s, rank) + 1) +
           (size_t)(group * COLL_OPEN_MAX + meeting) * s->world;
}

uint8_t *shm_small_of(const struct shm *s, uint32_t group, uint32_t meeting)
{
    return (uint8_t *)shm_rank_of(s, s->rank) + s->small_at +
           (size_t)(group * COLL_OPEN_MAX + meeting) * SHM_SMALL_BYTES;
}

uint32_t shm_count_here(const struct shm *s, const struct coll_group *g, uint32_t *out_first)
{
    uint32_t n = 0;
    *out_first = g->ranks[0];
    if (s->n_here == s->world)
        return g->n_ranks;
    for (uint32_t i = g->n_ranks; i-- > 0;)
        if (shm_is_here(s, g->ranks[i])) {
            *out_first = g->ranks[i];
            n++;
        }
    return n;
}

uint8_t *shm_arena_of(const struct shm *s, uint32_t rank)
{
    return s->base + s->arenas_at + s->places[rank] * s->arena_bytes;
}

void *shm_alloc(struct shm *s, size_t n_bytes)
{
    size_t rounded = (n_bytes + 63) & ~(size_t)63, used = atomic_load(&s->arena_used);
    do {
        if (rounded < n_bytes || rounded > s->arena_bytes - used)
            return NULL;
    } while (!atomic_compare_exchange_weak(&s->arena_used, &used, used + rounded));
    atomic_fetch_add(&s->n_allocs, 1);
    return shm_arena_of(s, s->rank) + used;
}

/* ---- the mapping; coll_meet brings the ranks together --------------------------------------- */

#ifdef __SANITIZE_THREAD__
/* The thread sanitizer knows memory by its address: for it ranks that are threads of one process,
 * as in tests, have one mapping together. */
static pthread_mutex_t maps_lock = PTHREAD_MUTEX_INITIALIZER;
static struct map {
    ino_t    inode;
    uint8_t *base;
    uint32_t n_users; /* 0: a free place */
} maps[64];

static void *map_shared(size_t n_bytes, int fd)
{
    struct stat of;
    struct map *m = NULL;
    void *p = MAP_FAILED;
    if (fstat(fd, &of) < 0)
        return p;
    pthread_mutex_lock(&maps_lock);
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++)
        if (maps[i].n_users > 0 && maps[i].inode == of.st_ino)
            m = &maps[i];
        else if (!m && maps[i].n_users == 0)
            m = &maps[i];
    assert(m);
    if (m->n_users > 0)
        p = m->base;
    else
        p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (p != MAP_FAILED)
        *m = (struct map){.inode = of.st_ino, .base = p, .n_users = m->n_users + 1};
    pthread_mutex_unlock(&maps_lock);
    return p;
}

static void unmap_shared(void *p, size_t n_bytes)
{
    pthread_mutex_lock(&maps_lock);
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++)
        if (maps[i].n_users > 0 && maps[i].base == p && --maps[i].n_users == 0)
            munmap(p, n_bytes);
    pthread_mutex_unlock(&maps_lock);
}
#else
static void *map_shared(size_t n_bytes, int fd)
{
    return mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
}

static void unmap_shared(void *p, size_t n_bytes)
{
    munmap(p, n_bytes);
}
#endif

void shm_close(struct shm *s)
{
    if (s->base) {
        atomic_store(&shm_rank_of(s, s->rank)->has_left, 1);
        unmap_shared(s->base, s->map_bytes);
    }
    for (uint32_t i = 0; i < s->n_peers; i++)
        if (s->peers[i] >= 0)
            close(s->peers[i]);
    free(s->peers);
    free(s->places);
    *s = (struct shm){0};
}

void shm_place(struct shm *s, const uint32_t *hosts)
{
    s->places = xcalloc(s->world, sizeof *s->places);
    for (uint32_t r = s->world; r-- > 0;)
        if (!hosts || hosts[r] == hosts[s->rank]) {
            s->first = r;
            s->n_here++;
        } else {
            s->places[r] = SHM_ELSEWHERE;
        }
    for (uint32_t r = 0, n = 0; r < s->world; r++)
        if (shm_is_here(s, r))
            s->places[r] = n++;
}

void shm_plan(struct shm *s, size_t arena_bytes)
{
    const size_t page = 4096;
    s->arena_bytes = arena_bytes;
    s->ranks_at = page;
    size_t n_meetings = (size_t)COLL_GROUPS_MAX * COLL_OPEN_MAX;
    size_t rank_bytes = sizeof(struct shm_rank) + n_meetings * s->world * sizeof(int64_t);
    s->small_at = (rank_bytes + page - 1) & ~(page - 1);
    s->rank_stride = s->small_at + n_meetings * SHM_SMALL_BYTES;
    s->arenas_at = s->ranks_at + s->world * s->rank_stride;
    s->map_bytes = s->arenas_at + s->n_here * arena_bytes;
}

static void tell_cores(struct shm *s)
{
    cpu_set_t mine;
    if (sched_getaffinity(0, sizeof mine, &mine) < 0)
        return;
    for (uint32_t i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &mine))
            atomic_fetch_or(&shm_header_of(s)->cores[i / 64], 1ull << i % 64);
}

int shm_map(struct shm *s, int fd, struct err *err)
{
    void *p = map_shared(s->map_bytes, fd);
    if (p == MAP_FAILED)
        return err_set(err, -errno, "mapping %zu GiB of address space for the collectives: %s",
                       s->map_bytes >> 30, strerror(errno));
    s->base = p;
    tell_cores(s);
    madvise(shm_arena_of(s, s->rank), s->arena_bytes, MADV_HUGEPAGE);
    madvise(s->base, s->map_bytes, MADV_DONTDUMP);
    return 0;
}
