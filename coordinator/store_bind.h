/* store_bind.h - parameters into statements, columns out of them */
#ifndef COORDINATOR_STORE_BIND_H
#define COORDINATOR_STORE_BIND_H

#include <math.h>
#include <string.h>

#include "common/mem.h"
#include "coordinator/store_parts.h"

/* The n-th put after bind binds parameter n. Texts and blobs are borrowed until the statement has
 * run. */
struct binder {
    sqlite3_stmt *s;
    int n;
};

static inline struct binder bind(struct store_tables *t, enum statement which)
{
    return (struct binder){tables_statement(t, which), 0};
}

static inline void put_int(struct binder *b, uint64_t x)
{
    sqlite3_bind_int64(b->s, ++b->n, (sqlite3_int64)x);
}

static inline void put_text(struct binder *b, const char *text)
{
    sqlite3_bind_text(b->s, ++b->n, text, -1, SQLITE_STATIC);
}

static inline void put_blob(struct binder *b, const void *bytes, size_t n_bytes)
{
    sqlite3_bind_blob64(b->s, ++b->n, n_bytes ? bytes : "", n_bytes, SQLITE_STATIC);
}

static inline void put_real(struct binder *b, double x)
{
    sqlite3_bind_double(b->s, ++b->n, x); /* NaN becomes NULL */
}

static inline char *text_at(sqlite3_stmt *s, int column, struct arena *a)
{
    const char *text = (const char *)sqlite3_column_text(s, column);
    return arena_strdup(a, text ? text : "");
}

static inline uint64_t int_at(sqlite3_stmt *s, int column)
{
    return (uint64_t)sqlite3_column_int64(s, column);
}

static inline double real_at(sqlite3_stmt *s, int column)
{
    return sqlite3_column_type(s, column) == SQLITE_NULL ? (double)NAN
                                                         : sqlite3_column_double(s, column);
}

#define PUSH(arena, items, n, item)                                                             \
    do {                                                                                        \
        (items) = arena_grow((arena), (items), (n), sizeof *(items));                           \
        (items)[(n)++] = (item);                                                                \
    } while (0)

#endif
