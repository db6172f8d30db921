/* link_peers.c - two chained hash tables over the same peers, and a queue in each peer */
#include "common/link_peers.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"

#define N_BUCKETS_MIN 64

static size_t hash_id(const uint8_t *id, size_t n_id)
{
    uint64_t h = hash_fnv(HASH_FNV, id, n_id);
    return (size_t)(h ^ h >> 32);
}

struct peer *peers_find(const struct peer_table *t, link_peer number)
{
    if (!t->n_buckets)
        return NULL;
    struct peer *p = t->by_number[number & (t->n_buckets - 1)];
    while (p && p->number != number)
        p = p->next_by_number;
    return p;
}

struct peer *peers_find_id(const struct peer_table *t, const uint8_t *id, size_t n_id)
{
    if (!t->n_buckets)
        return NULL;
    struct peer *p = t->by_id[hash_id(id, n_id) & (t->n_buckets - 1)];
    while (p && (p->n_id != n_id || memcmp(p->id, id, n_id)))
        p = p->next_by_id;
    return p;
}

static void chain(struct peer_table *t, struct peer *p)
{
    struct peer **id = &t->by_id[hash_id(p->id, p->n_id) & (t->n_buckets - 1)];
    struct peer **number = &t->by_number[p->number & (t->n_buckets - 1)];
    p->next_by_id = *id;
    p->next_by_number = *number;
    *id = *number = p;
}

static void grow(struct peer_table *t)
{
    struct peer_table old = *t;
    t->n_buckets = old.n_buckets ? old.n_buckets * 2 : N_BUCKETS_MIN;
    t->by_id = xcalloc(t->n_buckets, sizeof(struct peer *));
    t->by_number = xcalloc(t->n_buckets, sizeof(struct peer *));
    for (size_t i = 0; i < old.n_buckets; i++)
        for (struct peer *p = old.by_number[i], *next; p; p = next) {
            next = p->next_by_number;
            chain(t, p);
        }
    free(old.by_id);
    free(old.by_number);
}

struct peer *peers_add(struct peer_table *t, const uint8_t *id, size_t n_id)
{
    assert(n_id <= ROUTING_ID_BYTES_MAX);
    if (t->n_peers >= t->n_buckets)
        grow(t);
    struct peer *p = xcalloc(1, sizeof *p + n_id);
    p->number = ++t->last_number;
    p->n_id = (uint8_t)n_id;
    memcpy(p->id, id, n_id);
    chain(t, p);
    t->n_peers++;
    return p;
}

void peers_remove(struct peer_table *t, struct peer *p)
{
    struct peer **at = &t->by_id[hash_id(p->id, p->n_id) & (t->n_buckets - 1)];
    while (*at != p)
        at = &(*at)->next_by_id;
    *at = p->next_by_id;
    at = &t->by_number[p->number & (t->n_buckets - 1)];
    while (*at != p)
        at = &(*at)->next_by_number;
    *at = p->next_by_number;
    t->n_peers--;
    peer_clear(p);
    free(p->address);
    free(p->user);
    free(p->slot);
    free(p);
}

void peers_visit_silent(struct peer_table *t, uint64_t before_ns,
                        void (*visit)(void *context, struct peer *p), void *context)
{
    for (size_t i = 0; i < t->n_buckets; i++)
        for (struct peer *p = t->by_number[i], *next; p; p = next) {
            next = p->next_by_number;
            if (p->heard_ns < before_ns)
                visit(context, p);
        }
}

void peers_fini(struct peer_table *t)
{
    for (size_t i = 0; i < t->n_buckets; i++)
        while (t->by_number[i])
            peers_remove(t, t->by_number[i]);
    free(t->by_id);
    free(t->by_number);
    *t = (struct peer_table){0};
}

void peer_push(struct peer *p, const struct link_frame *frames, size_t n_frames)
{
    assert(n_frames <= LINK_FRAMES_MAX);
    size_t n_bytes = 0;
    for (size_t i = 0; i < n_frames; i++)
        n_bytes += frames[i].n_bytes;
    struct queued_message *m = xcalloc(1, sizeof *m + n_bytes);
    m->n_frames = n_frames;
    m->n_bytes = n_bytes;
    uint8_t *at = m->bytes;
    for (size_t i = 0; i < n_frames; i++) {
        m->frame_bytes[i] = (uint32_t)frames[i].n_bytes;
        if (frames[i].n_bytes)
            at = mempcpy(at, frames[i].bytes, frames[i].n_bytes);
    }
    if (p->last)
        p->last->next = m;
    else
        p->first = m;
    p->last = m;
    p->n_queued++;
    p->queued_bytes += n_bytes;
}

void peer_pop(struct peer *p)
{
    struct queued_message *m = p->first;
    p->first = m->next;
    if (!p->first)
        p->last = NULL;
    p->n_queued--;
    p->queued_bytes -= m->n_bytes;
    free(m);
}

void peer_clear(struct peer *p)
{
    while (p->first)
        peer_pop(p);
}
