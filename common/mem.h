/* mem.h - allocation that ends the process when host memory runs out, and an arena
 *
 * Memory is organised by lifetime: what one loop turn makes goes into one arena that is reset at
 * the turn's end. */
#ifndef COMMON_MEM_H
#define COMMON_MEM_H

#include <stddef.h>

#include <protobuf-c/protobuf-c.h>

/* Zeroed; freed with free(). Never NULL, also for a size of 0. */
void *xcalloc(size_t n, size_t size);
void *xrealloc(void *old, size_t size);
/* Room for one item more where there are n: *n_alloc is for how many there is, twice as many when
 * they are full; 0 with items NULL in the beginning. */
void *xgrow(void *items, size_t n, size_t *n_alloc, size_t item_bytes);
char *xstrdup(const char *text);
char *xasprintf(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *xmemdup(const void *bytes, size_t n_bytes);

/* For programs that take and free large blocks again and again: up to some MiB stay with the
 * process instead of going back to the system each time. */
void mem_keep_freed(void);

struct arena_block;

/* All zero is an empty arena. */
struct arena {
    struct arena_block *head;
    size_t              used_bytes; /* handed out since the last reset */
    ProtobufCAllocator  pb;         /* see arena_pb */
};

/* Zeroed, aligned to 16 bytes, lives until arena_reset or arena_fini. */
void *arena_alloc(struct arena *a, size_t n_bytes);
char *arena_strdup(struct arena *a, const char *text);
char *arena_printf(struct arena *a, const char *format, ...) __attribute__((format(printf, 2, 3)));
void *arena_memdup(struct arena *a, const void *bytes, size_t n_bytes);
/* The same in the arena, for a list that has grown by this alone; the old one is left to it. */
void *arena_grow(struct arena *a, void *items, size_t n, size_t item_bytes);

/* An allocator for protobuf-c's unpack that allocates in the arena; lives as long as it. What is
 * unpacked with it is never freed one by one. */
ProtobufCAllocator *arena_pb(struct arena *a);

/* Forgets everything; keeps one block for the next turn. */
void arena_reset(struct arena *a);
void arena_fini(struct arena *a);

#endif
