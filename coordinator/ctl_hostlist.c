/* ctl_hostlist.c - packs names that differ in their last number, and takes them apart again */
#include "coordinator/ctl_hostlist.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/field.h"

#define DIGITS_MAX 9

/* Where the number that ends a name begins; at most DIGITS_MAX of them. */
static size_t stem_bytes(const char *name)
{
    size_t n = strlen(name), digits = 0;
    while (digits < DIGITS_MAX && digits < n && isdigit((unsigned char)name[n - digits - 1]))
        digits++;
    return n - digits;
}

static int by_name(const void *a, const void *b)
{
    const char *x = *(const char *const *)a, *y = *(const char *const *)b;
    size_t nx = stem_bytes(x), ny = stem_bytes(y), least = nx < ny ? nx : ny;
    int order = strncmp(x, y, least);
    if (order || nx != ny)
        return order ? order : nx < ny ? -1 : 1;
    size_t dx = strlen(x + nx), dy = strlen(y + ny);
    return dx != dy ? (dx < dy ? -1 : 1) : strcmp(x + nx, y + ny);
}

/* Whether b is what comes after a: one stem, one width or grown by a digit without zeros ahead. */
static bool are_next(const char *a, const char *b)
{
    size_t n = stem_bytes(a), da = strlen(a) - n, db;
    if (stem_bytes(b) != n || strncmp(a, b, n) != 0 || !da)
        return false;
    db = strlen(b) - n;
    bool same_width = da == db || (a[n] != '0' && b[n] != '0' && db == da + 1);
    return same_width && atol(b + n) == atol(a + n) + 1;
}

static bool share_stem(const char *a, const char *b)
{
    size_t n = stem_bytes(a);
    return a[n] && stem_bytes(b) == n && b[n] && !strncmp(a, b, n);
}

/* The names [from, to) share a stem. */
static void write_group(FILE *out, const char **names, size_t from, size_t to)
{
    size_t n = stem_bytes(names[from]);
    if (to - from == 1) {
        fputs(names[from], out);
        return;
    }
    fprintf(out, "%.*s[", (int)n, names[from]);
    for (size_t i = from; i < to;) {
        size_t last = i;
        while (last + 1 < to && are_next(names[last], names[last + 1]))
            last++;
        fprintf(out, "%s%s", i > from ? "," : "", names[i] + n);
        if (last > i)
            fprintf(out, "-%s", names[last] + n);
        i = last + 1;
    }
    fputc(']', out);
}

char *hostlist_pack(struct arena *a, const char *const *names, size_t n)
{
    char *text = NULL;
    size_t n_text = 0, n_kept = 0;
    const char **sorted = xcalloc(n + 1, sizeof *sorted);
    FILE *out = open_memstream(&text, &n_text);
    if (!out)
        abort();
    for (size_t i = 0; i < n; i++)
        sorted[i] = names[i];
    qsort(sorted, n, sizeof *sorted, by_name);
    for (size_t i = 0; i < n; i++)
        if (!n_kept || strcmp(sorted[n_kept - 1], sorted[i]) != 0)
            sorted[n_kept++] = sorted[i];
    for (size_t i = 0, end; i < n_kept; i = end) {
        for (end = i + 1; end < n_kept && share_stem(sorted[i], sorted[end]);)
            end++;
        fputs(i ? "," : "", out);
        write_group(out, sorted, i, end);
    }
    fclose(out);
    free(sorted);
    char *kept = arena_strdup(a, text);
    free(text);
    return kept;
}

/* ---- and apart ------------------------------------------------------------------------------- */

struct names {
    struct arena *a;
    char **names;
    size_t n;
};

static int add_name(struct names *l, char *name, struct err *err)
{
    if (l->n == HOSTLIST_MAX)
        return err_set(err, -E2BIG, "more than %u names", HOSTLIST_MAX);
    l->names = xrealloc(l->names, (l->n + 1) * sizeof *l->names);
    l->names[l->n++] = name;
    return 0;
}

static int refuse(const char *text, struct err *err)
{
    char quoted[FIELD_QUOTE_BYTES];
    field_quote(text, quoted);
    return err_set(err, -EINVAL, "%s is not a list of names, as in node[01-08,11],login", quoted);
}

/* "01-08" or "11" of stem[...]tail. */
static int add_range(struct names *l, const char *whole, const char *stem, const char *range,
                     const char *tail, struct err *err)
{
    char *end;
    size_t width = strspn(range, "0123456789");
    unsigned long low = strtoul(range, &end, 10), high = low;
    if (!width || width > DIGITS_MAX)
        return refuse(whole, err);
    if (*end == '-') {
        size_t digits = strspn(end + 1, "0123456789");
        if (!digits || digits > DIGITS_MAX)
            return refuse(whole, err);
        high = strtoul(end + 1, &end, 10);
    }
    if (*end || high < low)
        return refuse(whole, err);
    int rc = 0;
    for (unsigned long i = low; i <= high && rc == 0; i++)
        rc = add_name(l, arena_printf(l->a, "%s%0*lu%s", stem, *range == '0' ? (int)width : 1, i,
                                      tail), err);
    return rc;
}

static int add_item(struct names *l, const char *whole, char *item, struct err *err)
{
    char *open = strchr(item, '['), *close = strchr(item, ']'), *range;
    if (!*item || (!open) != (!close) || (open && (close < open || strpbrk(close + 1, "[]"))))
        return refuse(whole, err);
    if (!open)
        return add_name(l, arena_strdup(l->a, item), err);
    *open = *close = '\0';
    int rc = 0;
    for (char *rest = open + 1; rc == 0 && (range = strsep(&rest, ",")) != NULL;)
        rc = add_range(l, whole, item, range, close + 1, err);
    return rc;
}

int hostlist_expand(struct arena *a, const char *text, char ***out_names, size_t *out_n,
                    struct err *err)
{
    struct names l = {.a = a};
    char *copy = arena_strdup(a, text), *start = copy;
    int rc = 0, depth = 0;
    for (char *at = copy; rc == 0; at++) {
        depth += (*at == '[') - (*at == ']');
        if (*at && (*at != ',' || depth > 0))
            continue;
        bool is_end = !*at;
        *at = '\0';
        rc = add_item(&l, text, start, err);
        start = at + 1;
        if (is_end)
            break;
    }
    if (rc == 0) {
        *out_names = arena_memdup(a, l.names, l.n * sizeof *l.names);
        *out_n = l.n;
    }
    free(l.names);
    return rc;
}
