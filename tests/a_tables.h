/* a_tables.h - for tests of the store's tables: both files in a folder of their own, and questions */
#ifndef TESTS_A_TABLES_H
#define TESTS_A_TABLES_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "coordinator/store_parts.h"
#include "tests/folder.h"
#include "tests/patience.h"

/* path: ends with XXXXXX, as mkdtemp wants it. */
static inline void tables_make(struct store_tables *t, char *path)
{
    struct err err = {0};
    assert_non_null(mkdtemp(path));
    if (tables_open(t, path, &err) < 0)
        fail_msg("%s", err.text);
}

static inline void tables_remove(struct store_tables *t, const char *path)
{
    tables_close(t);
    remove_tree(path);
}

/* A person's statement has 2 s, which a busy machine may not give to a small one: then once more. */
static inline struct store_read ask_tables(struct store_tables *t, const char *sql,
                                           uint32_t limit)
{
    uint64_t end_ns = patience_end_ns(2);
    for (;;) {
        struct store_read r = {.kind = STORE_SQL, .sql = sql, .limit = limit};
        read_run(t, &r);
        if (r.rc != -ETIMEDOUT || clock_now_ns() > end_ns)
            return r;
        store_read_fini(&r);
    }
}

#endif
