/* ctl_terms.c - --filter, --since, --user, --sort and -o against a list's columns
 *
 * --filter COLUMN=VALUE[,VALUE]...; further conditions after a comma or in another --filter. All
 * must hold. The operators are = != < <= > >= and ~, which looks for a part of a text. */
#include "coordinator/ctl_list.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "common/clock.h"
#include "common/field.h"
#include "common/field_text.h"

/* ---- columns --------------------------------------------------------------------------------- */

void list_column_name(const struct list_column *column, char out[32])
{
    size_t n = strcspn(column->head, "(");
    for (size_t i = 0; i < n && i < 31; i++)
        out[i] = (char)tolower((unsigned char)column->head[i]);
    out[n < 31 ? n : 31] = '\0';
}

const struct list_column *list_column_find(const struct ctl_list *list, const char *name)
{
    char own[32];
    for (size_t i = 0; i < list->n_columns; i++) {
        list_column_name(&list->columns[i], own);
        if (!strcasecmp(own, name))
            return &list->columns[i];
    }
    return NULL;
}

char *list_column_names(const struct ctl_list *list)
{
    char *text = NULL, name[32];
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    if (!out)
        abort();
    for (size_t i = 0; i < list->n_columns; i++) {
        list_column_name(&list->columns[i], name);
        fprintf(out, "%s%s", i ? ", " : "", name);
    }
    fclose(out);
    return text;
}

static const struct list_column *named(const struct ctl *c, const struct ctl_list *list,
                                       const char *option, const char *name)
{
    char quoted[FIELD_QUOTE_BYTES];
    const struct list_column *column = list_column_find(list, name);
    if (column)
        return column;
    char *names = list_column_names(list);
    field_quote(name, quoted);
    ctl_fail(c, CTL_USAGE, "%s: %s is not a column of %s; expected %s%s", option, quoted,
             list->rows, !strcmp(option, "--output") ? "wide, json, yaml, name, or of these: "
                                                     : "one of ", names);
    free(names);
    return NULL;
}

/* ---- values ---------------------------------------------------------------------------------- */

bool list_time(const char *text, int64_t *out_ns)
{
    static const char *const forms[] = {"%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S",
                                        "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M",
                                        "%Y-%m-%d %H:%M", "%Y-%m-%d"};
    double seconds;
    if (text_duration(text, &seconds)) {
        *out_ns = clock_wall_ns() - (int64_t)(seconds * 1e9);
        return seconds < 1e9;
    }
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        struct tm tm = {.tm_mday = 1};
        const char *end = strptime(text, forms[i], &tm);
        if (end && !*end) {
            *out_ns = (int64_t)timegm(&tm) * (int64_t)NS_PER_S;
            return true;
        }
    }
    return false;
}

static bool is_word(const struct list_column *column, const char **text)
{
    for (size_t i = 0; column->word && column->word(i); i++)
        if (!strcasecmp(column->word(i), *text)) {
            *text = column->word(i);
            return true;
        }
    return !column->word;
}

static void expected_of(const struct list_column *column, char out[256])
{
    static const char *const expected[] = {
        [LIST_TEXT] = "one of ", [LIST_NUMBER] = "a number",
        [LIST_SPAN] = "a duration, as in 90s or 2h", [LIST_BYTES] = "a size, as in 16GiB",
        [LIST_INSTANT] = "a time: 2h (ago), 2026-11-29, 2026-11-29T13:49:53 (UTC)",
    };
    int n = snprintf(out, 256, "%s", expected[column->kind]);
    for (size_t i = 0; column->word && column->word(i) && n < 256; i++)
        n += snprintf(out + n, 256 - (size_t)n, "%s%s", i ? ", " : "", column->word(i));
}

/* Adds a value to a term; says what is wrong with it. */
static int add_value(const struct ctl *c, const char *option, struct list_term *t, char *text)
{
    char quoted[FIELD_QUOTE_BYTES], name[32], expected[256];
    double x = (double)NAN;
    const char *word = text;
    int64_t ns;
    bool is_good = t->column->kind == LIST_TEXT    ? t->op == BALLAST__LIST_OP__LIST_HOLDS ||
                                                     is_word(t->column, &word)
                 : t->column->kind == LIST_NUMBER  ? text_double(text, &x)
                 : t->column->kind == LIST_SPAN    ? text_duration(text, &x)
                 : t->column->kind == LIST_BYTES   ? text_size(text, &x)
                                                   : list_time(text, &ns);
    if (t->column->kind == LIST_INSTANT && is_good)
        x = (double)ns;
    if (t->n_values == LIST_TERMS_MAX)
        return ctl_fail(c, CTL_USAGE, "%s: at most %u values", option, LIST_TERMS_MAX);
    if (is_good) {
        t->texts[t->n_values] = word;
        t->numbers[t->n_values++] = x;
        return CTL_OK;
    }
    field_quote(text, quoted);
    list_column_name(t->column, name);
    expected_of(t->column, expected);
    return ctl_fail(c, CTL_USAGE, "%s: %s: %s is not %s", option, name, quoted, expected);
}

/* ---- conditions ------------------------------------------------------------------------------ */

static int no_operator(const struct ctl *c, const char *piece)
{
    char quoted[FIELD_QUOTE_BYTES];
    field_quote(piece, quoted);
    return ctl_fail(c, CTL_USAGE, "--filter: %s is not a condition; expected COLUMN, one of = != "
                    "< <= > >= ~, and a value", quoted);
}

static int check_operator(const struct ctl *c, const struct list_term *t, const char *sign)
{
    bool is_text = t->column->kind == LIST_TEXT, is_set = t->op == BALLAST__LIST_OP__LIST_IS ||
                                                          t->op == BALLAST__LIST_OP__LIST_IS_NOT;
    bool is_part = t->op == BALLAST__LIST_OP__LIST_HOLDS;
    char name[32];
    list_column_name(t->column, name);
    if (is_set || is_part == is_text)
        return CTL_OK;
    return ctl_fail(c, CTL_USAGE, "--filter: %s is %s; %s does not go with it, expected %s", name,
                    is_text ? "a text" : "a number or a time", sign,
                    is_text ? "=, != or ~" : "one of = != < <= > >=");
}

/* piece is in the arena and is cut. */
static int add_condition(const struct ctl *c, struct list_query *q, char *piece)
{
    static const struct {
        const char *sign;
        Ballast__ListOp op;
    } signs[] = { /* longer ones first */
        {"!=", BALLAST__LIST_OP__LIST_IS_NOT}, {"<=", BALLAST__LIST_OP__LIST_AT_MOST},
        {">=", BALLAST__LIST_OP__LIST_AT_LEAST}, {"=", BALLAST__LIST_OP__LIST_IS},
        {"<", BALLAST__LIST_OP__LIST_BELOW}, {">", BALLAST__LIST_OP__LIST_ABOVE},
        {"~", BALLAST__LIST_OP__LIST_HOLDS},
    };
    size_t at = strcspn(piece, "=!<>~"), i = 0, n_signs = sizeof signs / sizeof *signs;
    while (i < n_signs && strncmp(piece + at, signs[i].sign, strlen(signs[i].sign)) != 0)
        i++;
    struct list_term *last = q->n_terms ? &q->terms[q->n_terms - 1] : NULL;
    if (i == n_signs && last && (last->op == BALLAST__LIST_OP__LIST_IS ||
                                 last->op == BALLAST__LIST_OP__LIST_IS_NOT))
        return add_value(c, "--filter", last, piece);
    if (i == n_signs || !at)
        return no_operator(c, piece);
    if (q->n_terms == LIST_TERMS_MAX)
        return ctl_fail(c, CTL_USAGE, "--filter: at most %u conditions", LIST_TERMS_MAX);
    char *value = piece + at + strlen(signs[i].sign);
    piece[at] = '\0';
    struct list_term *t = &q->terms[q->n_terms];
    *t = (struct list_term){.column = named(c, q->list, "--filter", piece), .op = signs[i].op};
    if (!t->column)
        return CTL_USAGE;
    q->n_terms++;
    int rc = check_operator(c, t, signs[i].sign);
    return rc == CTL_OK ? add_value(c, "--filter", t, value) : rc;
}

static int add_filter(const struct ctl *c, struct list_query *q, const char *text)
{
    char *rest = arena_strdup(&q->arena, text), *piece;
    int rc = CTL_OK;
    while (rc == CTL_OK && (piece = strsep(&rest, ",")) != NULL)
        rc = add_condition(c, q, piece);
    return rc;
}

/* What an option says by itself: --since 2h, --user ada. */
static int add_option(const struct ctl *c, struct list_query *q, const char *option,
                      const char *column, Ballast__ListOp op, const char *value)
{
    if (q->n_terms == LIST_TERMS_MAX)
        return ctl_fail(c, CTL_USAGE, "%s: at most %u conditions", option, LIST_TERMS_MAX);
    struct list_term *t = &q->terms[q->n_terms++];
    *t = (struct list_term){.column = list_column_find(q->list, column), .op = op};
    return add_value(c, option, t, arena_strdup(&q->arena, value));
}

/* Of --user, else of the setting of that name; -A, and ids, undo that. */
static int add_user(struct ctl *c, struct list_query *q)
{
    const char *user = c->user;
    char *set = NULL;
    if (user && c->all_users)
        return ctl_fail(c, CTL_USAGE, "--user, or --me, and -A contradict each other; give one");
    if (!user && !c->all_users && !c->n_args && !ctl_setting(c, CTL_SETTING_USER, &set))
        return CTL_USAGE;
    if (set)
        user = arena_strdup(&q->arena, set);
    free(set);
    if (!user)
        return CTL_OK;
    int rc = !strcmp(user, "me") ? ctl_who(c, &q->arena, &user) : CTL_OK;
    return rc == CTL_OK ? add_option(c, q, "--user", q->list->user, BALLAST__LIST_OP__LIST_IS,
                                     user) : rc;
}

/* ---- order and columns ----------------------------------------------------------------------- */

static int add_order(const struct ctl *c, struct list_query *q, const char *text)
{
    char *rest = arena_strdup(&q->arena, text), *piece;
    while ((piece = strsep(&rest, ",")) != NULL) {
        bool descending = *piece == '-';
        const struct list_column *column = named(c, q->list, "--sort", piece + descending);
        if (!column || q->n_order == LIST_TERMS_MAX)
            return CTL_USAGE;
        q->order[q->n_order].column = column;
        q->order[q->n_order++].descending = descending;
    }
    return CTL_OK;
}

static int add_columns(const struct ctl *c, struct list_query *q, const char *text)
{
    char *rest = arena_strdup(&q->arena, text), *piece;
    while ((piece = strsep(&rest, ",")) != NULL) {
        const struct list_column *column = named(c, q->list, "--output", piece);
        if (!column || q->n_columns == sizeof q->columns / sizeof *q->columns)
            return CTL_USAGE;
        q->columns[q->n_columns++] = column;
    }
    return CTL_OK;
}

int list_begin(struct ctl *c, const struct ctl_list *list, struct list_query *q)
{
    int rc = CTL_OK;
    *q = (struct list_query){.list = list, .is_ordered = c->sort != NULL,
                             .count = c->count ? c->count : list->count ? list->count
                                                                        : UINT64_MAX};
    for (size_t i = 0; i < c->n_filters && rc == CTL_OK; i++)
        rc = add_filter(c, q, c->filters[i]);
    if (rc == CTL_OK && (c->sort || list->order))
        rc = add_order(c, q, c->sort ? c->sort : list->order);
    if (rc == CTL_OK && c->columns)
        rc = add_columns(c, q, c->columns);
    if (rc == CTL_OK && c->since)
        rc = add_option(c, q, "--since", list->since, BALLAST__LIST_OP__LIST_AT_LEAST, c->since);
    if (rc == CTL_OK && list->user)
        rc = add_user(c, q);
    return rc;
}

void list_fini(struct list_query *q)
{
    arena_fini(&q->arena);
    arena_fini(&q->values);
}

/* ---- for the coordinator --------------------------------------------------------------------- */

static char *value_text(struct list_query *q, const struct list_term *t, size_t i)
{
    if (t->column->kind == LIST_TEXT)
        return (char *)t->texts[i];
    return arena_printf(&q->arena, "%.0f", t->numbers[i]);
}

/* It compares whole numbers. */
static bool can_be_told(const struct list_term *t)
{
    bool can = t->column->is_known_there;
    for (size_t i = 0; i < t->n_values && t->column->kind != LIST_TEXT; i++)
        can = can && t->numbers[i] == floor(t->numbers[i]) && fabs(t->numbers[i]) < 9e18;
    return can;
}

bool list_tell_terms(struct list_query *q, size_t *out_n, Ballast__ListTerm ***out)
{
    Ballast__ListTerm **terms = arena_alloc(&q->arena, (q->n_terms + 1) * sizeof *terms);
    size_t n = 0;
    for (size_t i = 0; i < q->n_terms; i++) {
        const struct list_term *t = &q->terms[i];
        if (!can_be_told(t))
            continue;
        Ballast__ListTerm *told = arena_alloc(&q->arena, sizeof *told);
        ballast__list_term__init(told);
        told->column = arena_alloc(&q->arena, 32);
        list_column_name(t->column, told->column);
        told->op = t->op;
        told->values = arena_alloc(&q->arena, t->n_values * sizeof *told->values);
        for (size_t k = 0; k < t->n_values; k++)
            told->values[told->n_values++] = value_text(q, t, k);
        terms[n++] = told;
    }
    *out = terms;
    *out_n = n;
    return n == q->n_terms;
}

bool list_tell_order(struct list_query *q, size_t *out_n, Ballast__ListOrder ***out)
{
    Ballast__ListOrder **order = arena_alloc(&q->arena, (q->n_order + 1) * sizeof *order);
    for (size_t i = 0; i < q->n_order; i++) {
        if (!q->order[i].column->is_known_there || q->order[i].column->kind == LIST_TEXT)
            return false; /* texts are in another order here: w2 before w10 */
        order[i] = arena_alloc(&q->arena, sizeof *order[i]);
        ballast__list_order__init(order[i]);
        order[i]->column = arena_alloc(&q->arena, 32);
        list_column_name(q->order[i].column, order[i]->column);
        order[i]->descending = q->order[i].descending;
    }
    *out = order;
    *out_n = q->n_order;
    return true;
}
