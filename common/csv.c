/* csv.c - CSV files: a first line that names columns, then rows of numbers */
#include "common/csv.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "common/file.h"
#include "common/field.h"
#include "common/field_text.h"

int csv_fail(const struct csv *c, struct err *err, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return err_set(err, -EINVAL, "%s:%" PRIu64 ": %s", c->path, c->n_line, text);
}

/* Into c->text, as much as fits; -1 at the end of the file. */
static ssize_t read_line(struct csv *c)
{
    size_t n = 0;
    for (int byte; n < sizeof c->text - 1 && (byte = getc(c->file)) != EOF;) {
        c->text[n++] = (char)byte;
        if (byte == '\n')
            break;
    }
    c->text[n] = '\0';
    return n ? (ssize_t)n : -1;
}

/* The next line that is not empty, without its end: 1, 0 at the end of the file, or negative. */
static int next_line(struct csv *c, struct err *err)
{
    for (;;) {
        ssize_t n = read_line(c);
        if (ferror(c->file))
            return err_set(err, -errno, "%s: %s", c->path, strerror(errno));
        if (n < 0)
            return 0;
        c->n_line++;
        if (memchr(c->text, '\0', (size_t)n))
            return csv_fail(c, err, "a zero byte; a CSV file is expected");
        if (n > CSV_LINE_BYTES_MAX)
            return csv_fail(c, err, "a line of more than %d bytes; a CSV file is expected",
                            CSV_LINE_BYTES_MAX);
        if (c->n_line > CSV_LINES_MAX)
            return csv_fail(c, err, "more than %" PRIu64 " lines", (uint64_t)CSV_LINES_MAX);
        c->text[strcspn(c->text, "\r\n")] = '\0';
        if (c->text[strspn(c->text, " \t")])
            return 1;
    }
}

/* Cuts the next field off *rest: trimmed, without a pair of quotes; NULL after the last. */
static char *next_field(char **rest)
{
    char *field = *rest;
    if (!field)
        return NULL;
    size_t n = strcspn(field, ",");
    *rest = field[n] ? field + n + 1 : NULL;
    field[n] = '\0';
    field += strspn(field, " \t");
    for (n = strlen(field); n && (field[n - 1] == ' ' || field[n - 1] == '\t'); n--)
        field[n - 1] = '\0';
    if (n > 1 && field[0] == '"' && field[n - 1] == '"') {
        field[n - 1] = '\0';
        field++;
    }
    return field;
}

static int expected_columns(const struct csv *c, struct err *err, const char *problem)
{
    char names[256] = "";
    for (uint32_t i = 0; i < c->n_columns; i++) {
        strcat(names, i ? ", " : "");
        strcat(names, c->column[i].name);
        strcat(names, c->column[i].is_required ? "" : " (optional)");
    }
    return csv_fail(c, err, "%s; the first line names the columns: %s", problem, names);
}

static int read_header(struct csv *c, struct err *err)
{
    char problem[160], quoted[FIELD_QUOTE_BYTES];
    int rc = next_line(c, err);
    if (rc < 0)
        return rc;
    if (rc == 0)
        return err_set(err, -EINVAL, "%s: the file is empty", c->path);
    char *rest = c->text, *field;
    if (!strncmp(rest, "\xef\xbb\xbf", 3)) /* a byte order mark, as spreadsheets write it */
        rest += 3;
    for (uint32_t i = 0; i < c->n_columns; i++)
        c->at[i] = -1;
    while ((field = next_field(&rest))) {
        uint32_t i = 0;
        while (i < c->n_columns && strcmp(field, c->column[i].name) != 0 &&
               (!c->column[i].other_name || strcmp(field, c->column[i].other_name) != 0))
            i++;
        field_quote(field, quoted);
        snprintf(problem, sizeof problem, "column %s is %s", quoted,
                 i == c->n_columns ? "unknown" : "there twice");
        if (i == c->n_columns || c->at[i] >= 0)
            return expected_columns(c, err, problem);
        c->at[i] = (int)c->n_fields++;
    }
    for (uint32_t i = 0; i < c->n_columns; i++) {
        snprintf(problem, sizeof problem, "no column '%s'", c->column[i].name);
        if (c->column[i].is_required && c->at[i] < 0)
            return expected_columns(c, err, problem);
    }
    return 0;
}

static int read_value(const struct csv *c, uint32_t i, const char *text, double *out,
                      struct err *err)
{
    const struct csv_column *k = &c->column[i];
    char quoted[FIELD_QUOTE_BYTES];
    uint64_t whole;
    bool negative, is_number;
    double x = 0;
    if (k->is_double) {
        is_number = text_double(text, &x) && isfinite(x);
    } else {
        is_number = text_integer(text, &whole, &negative) == 0;
        x = is_number ? (negative ? -(double)whole : (double)whole) : 0;
    }
    if (!is_number || x < k->min || x > k->max) {
        field_quote(text, quoted);
        return csv_fail(c, err, "%s is %s: must be a %snumber from %.17g to %.17g", k->name, quoted,
                        k->is_double ? "" : "whole ", k->min, k->max);
    }
    *out = x;
    return 0;
}

int csv_row(struct csv *c, double *out, struct err *err)
{
    char *field[CSV_COLUMNS_MAX], *rest;
    uint32_t n = 0;
    int rc = next_line(c, err);
    if (rc <= 0)
        return rc;
    rest = c->text;
    for (char *f; (f = next_field(&rest)); n++)
        if (n < c->n_fields)
            field[n] = f;
    if (n != c->n_fields)
        return csv_fail(c, err, "%u fields: the first line has %u", n, c->n_fields);
    for (uint32_t i = 0; i < c->n_columns; i++) {
        out[i] = NAN;
        if (c->at[i] >= 0 && (rc = read_value(c, i, field[c->at[i]], &out[i], err)) < 0)
            return rc;
    }
    return 1;
}

int csv_open(struct csv *c, const char *path, const struct csv_column *column, uint32_t n_columns,
             struct err *err)
{
    *c = (struct csv){ .path = path, .column = column, .n_columns = n_columns };
    c->file = file_stream(path, err);
    return c->file ? read_header(c, err) : err->code;
}

void csv_close(struct csv *c)
{
    if (c->file)
        fclose(c->file);
}
