/* a_tables.h - for tests of the store's tables: both files in a folder, and questions */
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

/* Of a statement that has more time than a person's, as a busy machine needs for a small one. */
static inline struct store_read ask_tables(struct store_tables *t, const char *sql,
                                           uint32_t limit)
{
    struct store_read r = {.kind = STORE_SQL, .sql = sql, .limit = limit,
                           .limit_ns = 2 * PATIENCE * NS_PER_S};
    read_run(t, &r);
    return r;
}

#endif
