/* mem.c - aborting allocation and the arena of one loop turn */
#include "common/mem.h"

#include <stdalign.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BLOCK_BYTES (64u << 10)

struct arena_block {
    struct arena_block *next;
    size_t              size, used;
    alignas(16) unsigned char bytes[];
};

static void out_of_memory(size_t n_bytes)
{
    fprintf(stderr, "out of host memory: %zu bytes asked for\n", n_bytes);
    abort();
}

void mem_keep_freed(void)
{
    mallopt(M_MMAP_THRESHOLD, 4 << 20);
    mallopt(M_TRIM_THRESHOLD, 16 << 20);
    mallopt(M_TOP_PAD, 1 << 20);
}

void *xcalloc(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size ? size : 1);
    if (!p)
        out_of_memory(n * size);
    return p;
}

void *xrealloc(void *old, size_t size)
{
    void *p = realloc(old, size ? size : 1);
    if (!p)
        out_of_memory(size);
    return p;
}

void *xgrow(void *items, size_t n, size_t *n_alloc, size_t item_bytes)
{
    if (n < *n_alloc)
        return items;
    *n_alloc = *n_alloc ? 2 * *n_alloc : 16;
    return xrealloc(items, *n_alloc * item_bytes);
}

void *xmemdup(const void *bytes, size_t n_bytes)
{
    void *p = xcalloc(1, n_bytes);
    if (n_bytes)
        memcpy(p, bytes, n_bytes);
    return p;
}

char *xstrdup(const char *text)
{
    return xmemdup(text, strlen(text) + 1);
}

char *xasprintf(const char *format, ...)
{
    char *text = NULL;
    va_list args;
    va_start(args, format);
    int n = vasprintf(&text, format, args);
    va_end(args);
    if (n < 0)
        out_of_memory(0);
    return text;
}

void *arena_alloc(struct arena *a, size_t n_bytes)
{
    size_t need = (n_bytes + 15) & ~(size_t)15;
    if (need < n_bytes)
        out_of_memory(n_bytes);
    struct arena_block *b = a->head;
    if (!b || b->size - b->used < need) {
        size_t size = need > ARENA_BLOCK_BYTES ? need : ARENA_BLOCK_BYTES;
        b = xcalloc(1, sizeof *b + size);
        b->size = size;
        b->next = a->head;
        a->head = b;
    }
    void *p = b->bytes + b->used;
    b->used += need;
    a->used_bytes += need;
    memset(p, 0, need);
    return p;
}

void *arena_memdup(struct arena *a, const void *bytes, size_t n_bytes)
{
    void *p = arena_alloc(a, n_bytes);
    if (n_bytes)
        memcpy(p, bytes, n_bytes);
    return p;
}

void *arena_grow(struct arena *a, void *items, size_t n, size_t item_bytes)
{
    if (n & (n - 1)) /* full are 0 and the powers of two */
        return items;
    void *larger = arena_alloc(a, (n ? 2 * n : 1) * item_bytes);
    if (n)
        memcpy(larger, items, n * item_bytes);
    return larger;
}

char *arena_strdup(struct arena *a, const char *text)
{
    return arena_memdup(a, text, strlen(text) + 1);
}

char *arena_printf(struct arena *a, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *text = arena_alloc(a, (size_t)(n < 0 ? 0 : n) + 1);
    vsnprintf(text, (size_t)(n < 0 ? 0 : n) + 1, format, again);
    va_end(again);
    return text;
}

static void *pb_alloc(void *arena, size_t n_bytes)
{
    return arena_alloc(arena, n_bytes);
}

static void pb_free(void *arena, void *p)
{
    (void)arena;
    (void)p; /* the whole arena goes at once */
}

ProtobufCAllocator *arena_pb(struct arena *a)
{
    a->pb = (ProtobufCAllocator){.alloc = pb_alloc, .free = pb_free, .allocator_data = a};
    return &a->pb;
}

void arena_reset(struct arena *a)
{
    while (a->head && a->head->next) {
        struct arena_block *b = a->head;
        a->head = b->next;
        free(b);
    }
    if (a->head && a->head->size > ARENA_BLOCK_BYTES) {
        free(a->head);
        a->head = NULL;
    }
    if (a->head)
        a->head->used = 0;
    a->used_bytes = 0;
}

void arena_fini(struct arena *a)
{
    arena_reset(a);
    free(a->head);
    a->head = NULL;
}
