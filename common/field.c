/* field.c - text to struct member: every value, from a file or the wire, passes one check here
 *
 * A value is read into a plain union first, checked, and stored only then, so that a bad text
 * changes nothing. A list is its elements: each is read and checked as the scalar it holds. */
#include "common/field.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/field_text.h"
#include "common/mem.h"

struct value {
    uint64_t    u; /* U32, U64, BOOL, DURATION, SIZE, ENUM */
    int64_t     i; /* I32 */
    double      d; /* DOUBLE */
    const char *s; /* STRING, PATH, WORD: borrowed */
};

/* ---- shape ---------------------------------------------------------------------------------- */

bool field_is_list(const struct field *f)
{
    return f->type >= FIELD_STRINGS;
}

static enum field_type element_type(const struct field *f)
{
    switch (f->type) {
    case FIELD_STRINGS: return FIELD_STRING;
    case FIELD_PATHS:   return FIELD_PATH;
    case FIELD_DOUBLES: return FIELD_DOUBLE;
    case FIELD_U64S:    return FIELD_U64;
    default:            return f->type;
    }
}

static bool is_text(enum field_type type)
{
    return type == FIELD_STRING || type == FIELD_PATH || type == FIELD_WORD;
}

static void *member(const struct field *f, const void *target)
{
    return (char *)target + f->offset;
}

static size_t *list_count(const struct field *f, const void *target)
{
    return (size_t *)((char *)target + f->count_offset);
}

static size_t element_bytes(const struct field *f)
{
    switch (element_type(f)) {
    case FIELD_DOUBLE: return sizeof(double);
    case FIELD_U64:    return sizeof(uint64_t);
    default:           return sizeof(char *);
    }
}

const struct field *field_find(const struct field_table *t, const char *path)
{
    for (size_t i = 0; i < t->n_fields; i++)
        if (!strcmp(t->fields[i].path, path))
            return &t->fields[i];
    return NULL;
}

/* ---- text to value -------------------------------------------------------------------------- */

static int wrong_type(const struct field *f, const char *text, struct err *err)
{
    char quoted[FIELD_QUOTE_BYTES], expected[FIELD_EXPECTED_BYTES];
    field_quote(text, quoted);
    field_expected(f, expected);
    return err_set(err, -EINVAL, "%s is not %s", quoted, expected);
}

static int out_of_range(const struct field *f, const char *text, struct err *err)
{
    char allowed[FIELD_EXPECTED_BYTES];
    field_allowed(f, allowed);
    return err_set(err, -ERANGE, "%.60s is out of range, allowed %s", text, allowed);
}

static bool read_word(const struct field *f, const char *text, uint64_t *out)
{
    for (uint64_t i = 0; f->words[i]; i++)
        if (!strcmp(f->words[i], text)) {
            *out = i;
            return true;
        }
    return false;
}

static int wrong_word(const struct field *f, const char *text, struct err *err)
{
    char quoted[FIELD_QUOTE_BYTES], allowed[FIELD_EXPECTED_BYTES];
    const char *near = field_nearest(text, f->words);
    field_quote(text, quoted);
    field_allowed(f, allowed);
    if (near)
        return err_set(err, -EINVAL, "%s is not allowed; did you mean '%s'? Allowed: %s", quoted,
                       near, allowed);
    return err_set(err, -EINVAL, "%s is not allowed; allowed: %s", quoted, allowed);
}

static int read_integer(const struct field *f, const char *text, struct value *out,
                        struct err *err)
{
    bool negative = false;
    int rc = text_integer(text, &out->u, &negative);
    if (rc == -EINVAL)
        return wrong_type(f, text, err);
    if (rc < 0 || (negative && (element_type(f) != FIELD_I32 || out->u > INT64_MAX)))
        return out_of_range(f, text, err);
    out->i = negative ? -(int64_t)out->u : (int64_t)(out->u & INT64_MAX);
    return 0;
}

/* The text that an older spelling stands for. */
static const char *meant(const struct field *f, const char *text)
{
    for (const struct field_spelling *s = f->spellings; s && s->written; s++)
        if (!strcmp(s->written, text))
            return s->means;
    return text;
}

static int read_value(const struct field *f, const char *text, struct value *out, struct err *err)
{
    double d;
    text = meant(f, text);
    if (f->zero && !strcmp(f->zero, text))
        return 0; /* all of *out is zero */
    switch (element_type(f)) {
    case FIELD_STRING:
    case FIELD_PATH:
        out->s = text;
        return 0;
    case FIELD_WORD:
    case FIELD_ENUM:
        out->s = text;
        return read_word(f, text, &out->u) ? 0 : wrong_word(f, text, err);
    case FIELD_U32:
    case FIELD_U64:
    case FIELD_I32:
        return read_integer(f, text, out, err);
    case FIELD_DOUBLE:
        return text_double(text, &out->d) ? 0 : wrong_type(f, text, err);
    case FIELD_BOOL:
    case FIELD_PB_BOOL:
        return text_bool(text, &out->u) ? 0 : wrong_type(f, text, err);
    case FIELD_DURATION:
        if (!text_duration(text, &d))
            return wrong_type(f, text, err);
        d *= (double)NS_PER_S / (double)f->duration_ns;
        if (d >= 0x1p63)
            return out_of_range(f, text, err);
        out->u = (uint64_t)llround(d);
        return 0;
    case FIELD_SIZE:
        if (!text_size(text, &d))
            return wrong_type(f, text, err);
        if (d >= 0x1p63)
            return out_of_range(f, text, err);
        out->u = (uint64_t)d;
        return 0;
    default:
        break;
    }
    abort(); /* element_type never returns a list */
}

/* ---- the one range check -------------------------------------------------------------------- */

static bool within(const struct field *f, double x)
{
    return isfinite(x) && (f->min_open ? x > f->min : x >= f->min) &&
           (f->max_open ? x < f->max : x <= f->max);
}

static int check_text(const struct field *f, const char *text, struct err *err)
{
    size_t n_max = f->max > 0 ? (size_t)f->max : FIELD_BYTES_MAX - 1;
    if (!*text && (field_is_list(f) || !f->preset || *f->preset))
        return err_set(err, -EINVAL, "is empty, expected text");
    if (strlen(text) > n_max)
        return err_set(err, -ERANGE, "is %zu bytes long, allowed up to %zu", strlen(text), n_max);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if (*c < ' ' || *c == 0x7f || (*c == 0xc2 && c[1] < 0xa0)) /* U+0080..9f are some too */
            return err_set(err, -EINVAL, "holds a control character (byte 0x%02x)", *c);
    return 0;
}

/* written: as the person wrote it, NULL when the value came as bytes. */
static int check_value(const struct field *f, const struct value *v, const char *written,
                       struct err *err)
{
    char text[40];
    uint64_t index;
    double x = 0;
    switch (element_type(f)) {
    case FIELD_STRING:
    case FIELD_PATH:
        return check_text(f, v->s ? v->s : "", err);
    case FIELD_WORD:
        return read_word(f, v->s ? v->s : "", &index) ? 0
                                                      : wrong_word(f, v->s ? v->s : "", err);
    case FIELD_ENUM: /* was read from a word */
    case FIELD_BOOL:
    case FIELD_PB_BOOL:
        return 0;
    case FIELD_I32:
        x = (double)v->i;
        snprintf(text, sizeof text, "%" PRId64, v->i);
        break;
    case FIELD_DOUBLE:
        x = v->d;
        snprintf(text, sizeof text, "%g", v->d);
        break;
    default:
        x = (double)v->u;
        snprintf(text, sizeof text, "%" PRIu64, v->u);
        break;
    }
    if (f->zero && x == 0 && (!written || !strcmp(meant(f, written), f->zero)))
        return 0;
    if (!within(f, x))
        return out_of_range(f, written ? written : text, err);
    return 0;
}

/* ---- value to member and back --------------------------------------------------------------- */

static void store(const struct field *f, void *at, const struct value *v)
{
    switch (element_type(f)) {
    case FIELD_STRING:
    case FIELD_PATH:
    case FIELD_WORD:     *(char **)at = xstrdup(v->s); break;
    case FIELD_ENUM:
    case FIELD_PB_BOOL:  *(int *)at = (int)v->u; break;
    case FIELD_BOOL:     *(bool *)at = v->u != 0; break;
    case FIELD_U32:      *(uint32_t *)at = (uint32_t)v->u; break;
    case FIELD_I32:      *(int32_t *)at = (int32_t)v->i; break;
    case FIELD_DOUBLE:   *(double *)at = v->d; break;
    default:             *(uint64_t *)at = v->u; break;
    }
}

static struct value load(const struct field *f, const void *at)
{
    struct value v = {0};
    switch (element_type(f)) {
    case FIELD_STRING:
    case FIELD_PATH:
    case FIELD_WORD:     v.s = *(char *const *)at; break;
    case FIELD_ENUM:
    case FIELD_PB_BOOL:  v.u = (uint64_t)*(const int *)at; break;
    case FIELD_BOOL:     v.u = *(const bool *)at; break;
    case FIELD_U32:      v.u = *(const uint32_t *)at; break;
    case FIELD_I32:      v.i = *(const int32_t *)at; break;
    case FIELD_DOUBLE:   v.d = *(const double *)at; break;
    default:             v.u = *(const uint64_t *)at; break;
    }
    return v;
}

static int read_checked(const struct field *f, const char *text, struct value *out,
                        struct err *err)
{
    int rc = read_value(f, text, out, err);
    return rc < 0 ? rc : check_value(f, out, text, err);
}

void field_clear(const struct field *f, void *target)
{
    if (!field_is_list(f)) {
        if (is_text(f->type)) {
            free(*(char **)member(f, target));
            *(char **)member(f, target) = NULL;
        }
        return;
    }
    void **list = member(f, target);
    if (is_text(element_type(f)))
        for (size_t i = 0; i < *list_count(f, target); i++)
            free(((char **)*list)[i]);
    free(*list);
    *list = NULL;
    *list_count(f, target) = 0;
}

static int too_many(const struct field *f, struct err *err)
{
    return err_set(err, -ERANGE, "has more than %u elements", f->n_max ? f->n_max
                                                                        : FIELD_LIST_MAX);
}

int field_append(const struct field *f, void *target, const char *text, struct err *err)
{
    struct value v = {0};
    size_t *n = list_count(f, target);
    void **list = member(f, target);
    int rc = read_checked(f, text, &v, err);
    if (rc < 0)
        return rc;
    if (*n >= (f->n_max ? f->n_max : FIELD_LIST_MAX))
        return too_many(f, err);
    *list = xrealloc(*list, (*n + 1) * element_bytes(f));
    store(f, (char *)*list + *n * element_bytes(f), &v);
    ++*n;
    return 0;
}

static char *trim(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    size_t n = strlen(text);
    while (n && isspace((unsigned char)text[n - 1]))
        text[--n] = '\0';
    return text;
}

/* Globs may hold brackets, but in pairs. */
static bool has_half_a_bracket(const char *text)
{
    int n_open = 0;
    for (; *text && n_open >= 0; text++)
        n_open += (*text == '[') - (*text == ']');
    return n_open != 0;
}

/* Reads the elements into a list of its own and swaps it in when all are good. */
static int parse_list(const struct field *f, void *target, const char *text, struct err *err)
{
    struct field fresh = *f;
    struct { void *list; size_t n; } elements = {0};
    fresh.offset = 0;
    fresh.count_offset = offsetof(__typeof__(elements), n);
    char *copy = xstrdup(text), *rest = trim(copy), *element;
    size_t n_bytes = strlen(rest);
    int rc = has_half_a_bracket(rest) ? wrong_type(f, text, err) : 0;

    if (n_bytes >= 2 && rest[0] == '[' && rest[n_bytes - 1] == ']') {
        rest[n_bytes - 1] = '\0';
        rest = trim(rest + 1);
    }
    while (rc == 0 && *rest && (element = strsep(&rest, ",")) != NULL) {
        rc = field_append(&fresh, &elements, trim(element), err);
        if (!rest)
            break;
    }
    if (rc == 0 && elements.n < f->n_min)
        rc = err_set(err, -ERANGE, "has %zu of at least %u elements", elements.n, f->n_min);
    if (rc == 0) {
        field_clear(f, target);
        *(void **)member(f, target) = elements.list;
        *list_count(f, target) = elements.n;
    } else {
        field_clear(&fresh, &elements);
    }
    free(copy);
    return rc;
}

int field_parse(const struct field *f, void *target, const char *text, struct err *err)
{
    struct value v = {0};
    if (field_is_list(f))
        return parse_list(f, target, text, err);
    int rc = read_checked(f, text, &v, err);
    if (rc < 0)
        return rc;
    field_clear(f, target);
    store(f, member(f, target), &v);
    return 0;
}

/* ---- whole structs -------------------------------------------------------------------------- */

static int check_list(const struct field *f, const void *target, struct err *err)
{
    size_t n = *list_count(f, target);
    const char *elements = *(const char *const *)member(f, target);
    if (n < f->n_min)
        return err_set(err, -ERANGE, "has %zu of at least %u elements", n, f->n_min);
    if (n > (f->n_max ? f->n_max : FIELD_LIST_MAX))
        return too_many(f, err);
    for (size_t i = 0; i < n; i++) {
        struct value v = load(f, elements + i * element_bytes(f));
        int rc = check_value(f, &v, NULL, err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int field_check(const struct field *f, const void *target, struct err *err)
{
    if (field_is_list(f))
        return check_list(f, target, err);
    struct value v = load(f, member(f, target));
    return check_value(f, &v, NULL, err);
}

void fields_check(const struct field_table *t, const void *target, struct problems *out)
{
    struct err err;
    for (size_t i = 0; i < t->n_fields; i++) {
        const struct field *f = &t->fields[i];
        if (!f->same_as && field_check(f, target, &err) < 0)
            problems_add(out, NULL, f->path, "%s", err.text);
    }
}

static void zero(const struct field *f, void *target)
{
    static const struct value nothing = {0};
    if (field_is_list(f)) {
        *(void **)member(f, target) = NULL;
        *list_count(f, target) = 0;
    } else if (is_text(f->type)) {
        *(char **)member(f, target) = NULL;
    } else {
        store(f, member(f, target), &nothing);
    }
}

void fields_init(const struct field_table *t, void *target)
{
    struct err err;
    for (size_t i = 0; i < t->n_fields; i++) {
        const struct field *f = &t->fields[i];
        if (f->same_as)
            continue;
        zero(f, target);
        if (f->preset && field_parse(f, target, f->preset, &err) < 0) {
            fprintf(stderr, "the default of %s: %s\n", f->path, err.text);
            abort(); /* a table with a default out of its own range is a broken program */
        }
    }
}

void fields_fini(const struct field_table *t, void *target)
{
    for (size_t i = 0; i < t->n_fields; i++)
        if (!t->fields[i].same_as)
            field_clear(&t->fields[i], target);
}
