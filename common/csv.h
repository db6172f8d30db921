/* csv.h - CSV files: a first line that names columns, then rows of numbers
 *
 * Columns are found by their names, in any order; every mistake is told with file and line. */
#ifndef COMMON_CSV_H
#define COMMON_CSV_H

#include <stdio.h>

#include "common/err.h"
#include "common/types.h"

#define CSV_COLUMNS_MAX 16

struct csv_column {
    const char *name, *other_name;      /* other: also taken for it, or NULL */
    bool        is_required, is_double; /* not double: whole numbers alone */
    double      min, max;
};

struct csv {
    const char *path;
    FILE       *file;
    const struct csv_column *column; /* (n_columns) */
    uint32_t    n_columns;
    int         at[CSV_COLUMNS_MAX]; /* which field of a line each column is; -1: none */
    uint32_t    n_fields;            /* in the first line */
    uint64_t    n_line;              /* of the newest line, from 1 */
    char        text[CSV_LINE_BYTES_MAX + 2]; /* one byte more than is allowed, and its end */
};

/* Reads the first line. path and column are kept until csv_close, which is needed after a failure,
 * too. */
int  csv_open(struct csv *c, const char *path, const struct csv_column *column, uint32_t n_columns,
              struct err *err);
void csv_close(struct csv *c);

/* The next row: 1 and its values by column (NAN where the column is absent), 0 at the end. */
int csv_row(struct csv *c, double *out, struct err *err);

/* -EINVAL, about line c->n_line. */
int csv_fail(const struct csv *c, struct err *err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
