/* field_print.c - fields as people read them: messages, YAML, documentation */
#include "common/field.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/field_text.h"
#include "common/tame.h"

/* ---- for messages --------------------------------------------------------------------------- */

void field_quote(const char *text, char out_text[FIELD_QUOTE_BYTES])
{
    size_t n = strlen(text), n_max = FIELD_QUOTE_BYTES - 8;
    int length = snprintf(out_text, FIELD_QUOTE_BYTES, "'%.*s%s'", (int)(n > n_max ? n_max : n),
                          text, n > n_max ? "..." : "");
    tame_bytes(out_text, (size_t)length);
}

/* 1e9 rather than 1e+09; small whole numbers as they are. */
static void number_text(double x, char *out_text, size_t n_bytes)
{
    char text[40];
    bool is_plain = x < 1e6 && x > -1e6 && x == (double)(int64_t)x;
    snprintf(text, sizeof text, is_plain ? "%.0f" : "%.6g", x);
    char *e = strchr(text, 'e');
    if (!e) {
        snprintf(out_text, n_bytes, "%s", text);
        return;
    }
    int exponent = atoi(e + 1);
    *e = '\0';
    snprintf(out_text, n_bytes, "%se%d", text, exponent);
}

/* A power of 1024 as a size; else the number. */
static void bound_text(const struct field *f, double x, char *out_text, size_t n_bytes)
{
    static const struct { double bytes; const char *unit; } sizes[] = {
        {0x1p40, "TiB"}, {0x1p30, "GiB"}, {0x1p20, "MiB"}, {0x1p10, "KiB"},
    };
    if (f->type == FIELD_DURATION) {
        double s = x * (double)f->duration_ns / (double)NS_PER_S;
        const char *unit = s >= 86400 ? "d" : s >= 1 ? "s" : "ms";
        number_text(s >= 86400 ? s / 86400 : s >= 1 ? s : s * 1000, out_text, n_bytes);
        if (s != 0)
            strncat(out_text, unit, n_bytes - strlen(out_text) - 1);
        return;
    }
    for (size_t i = 0; f->type == FIELD_SIZE && i < sizeof sizes / sizeof *sizes; i++)
        if (x >= sizes[i].bytes) {
            number_text(x / sizes[i].bytes, out_text, n_bytes);
            strncat(out_text, sizes[i].unit, n_bytes - strlen(out_text) - 1);
            return;
        }
    number_text(x, out_text, n_bytes);
}

void field_allowed(const struct field *f, char out_text[FIELD_EXPECTED_BYTES])
{
    char low[48], high[48];
    size_t n = 0;
    out_text[0] = '\0';
    for (size_t i = 0; f->words && f->words[i] && n < FIELD_EXPECTED_BYTES; i++)
        n += (size_t)snprintf(out_text + n, FIELD_EXPECTED_BYTES - n, "%s%s", i ? ", " : "",
                              f->words[i]);
    if (f->words || f->type == FIELD_BOOL || f->type == FIELD_PB_BOOL ||
        f->type == FIELD_STRING || f->type == FIELD_PATH || f->type == FIELD_STRINGS ||
        f->type == FIELD_PATHS)
        return;
    bound_text(f, f->min, low, sizeof low);
    bound_text(f, f->max, high, sizeof high);
    snprintf(out_text, FIELD_EXPECTED_BYTES, "%s%s%s%s%s%s", f->zero ? f->zero : "",
             f->zero ? " or " : "", f->min_open ? "more than " : "", low,
             f->max_open ? " to less than " : " to ", high);
}

static const char *type_text(enum field_type type)
{
    switch (type) {
    case FIELD_STRING:   return "text";
    case FIELD_PATH:     return "a path";
    case FIELD_WORD:
    case FIELD_ENUM:     return "one of";
    case FIELD_U32:
    case FIELD_U64:
    case FIELD_I32:      return "a whole number";
    case FIELD_DOUBLE:   return "a number";
    case FIELD_BOOL:
    case FIELD_PB_BOOL:  return "true or false";
    case FIELD_DURATION: return "a duration (2h, 90s, 1-12:00:00)";
    case FIELD_SIZE:     return "a size (16GiB, 500MB)";
    case FIELD_STRINGS:  return "a list of texts";
    case FIELD_PATHS:    return "a list of paths";
    case FIELD_DOUBLES:  return "a list of numbers";
    case FIELD_U64S:     return "a list of whole numbers";
    }
    abort(); /* every type is above */
}

void field_expected(const struct field *f, char out_text[FIELD_EXPECTED_BYTES])
{
    char allowed[FIELD_EXPECTED_BYTES];
    field_allowed(f, allowed);
    const char *between = !*allowed ? "" : f->words ? " " : ", allowed ";
    snprintf(out_text, FIELD_EXPECTED_BYTES, "%s%s%.400s", type_text(f->type), between, allowed);
}

/* Edits (insert, delete, replace, swap of neighbours) between two short words. */
static size_t distance(const char *a, const char *b)
{
    enum { N = 64 };
    size_t d[3][N + 1], na = strlen(a), nb = strlen(b);
    if (na > N || nb > N)
        return SIZE_MAX;
    for (size_t j = 0; j <= nb; j++)
        d[0][j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t *row = d[i % 3], *above = d[(i - 1) % 3], *above2 = d[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            size_t best = above[j - 1] + (tolower((unsigned char)a[i - 1]) !=
                                          tolower((unsigned char)b[j - 1]));
            if (above[j] + 1 < best)
                best = above[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                above2[j - 2] + 1 < best)
                best = above2[j - 2] + 1;
            row[j] = best;
        }
    }
    return d[na % 3][nb];
}

const char *field_nearest(const char *text, const char *const *words)
{
    const char *best = NULL;
    size_t least = strlen(text) / 3 + 1;
    for (; *words; words++) {
        size_t n = distance(text, *words);
        if (n <= least && n < strlen(*words) && (!best || n < least)) {
            best = *words;
            least = n;
        }
    }
    return best;
}

/* ---- YAML ----------------------------------------------------------------------------------- */

static void print_string(const char *s, FILE *out)
{
    static const char *const reserved[] = {"null", "true", "false", "yes", "no", "on", "off"};
    bool plain = isalnum((unsigned char)*s) || *s == '/';
    for (const char *c = s; plain && *c; c++)
        plain = isalnum((unsigned char)*c) || strchr("_./+-*", *c);
    for (size_t i = 0; i < sizeof reserved / sizeof *reserved; i++)
        plain &= strcasecmp(s, reserved[i]) != 0;
    if (plain) {
        fputs(s, out);
        return;
    }
    fputc('"', out);
    for (const char *c = s; *c; c++)
        fprintf(out, strchr("\"\\", *c) ? "\\%c" : "%c", *c);
    fputc('"', out);
}

static void print_double(double x, FILE *out)
{
    char text[NUMBER_TEXT_BYTES];
    text_shortest(x, text);
    fputs(text, out);
}

static void print_duration(const struct field *f, uint64_t x, FILE *out)
{
    uint64_t ns = x * f->duration_ns, s = ns / NS_PER_S;
    if (ns % NS_PER_S && ns % NS_PER_MS)
        fprintf(out, "%.9gs", (double)ns / (double)NS_PER_S);
    else if (ns % NS_PER_S)
        fprintf(out, "%llums", (unsigned long long)(ns / NS_PER_MS));
    else if (s && s % 3600 == 0)
        fprintf(out, "%" PRIu64 "h", s / 3600);
    else if (s && s % 60 == 0)
        fprintf(out, "%" PRIu64 "m", s / 60);
    else
        fprintf(out, "%" PRIu64 "s", s);
}

static void print_number(const struct field *f, const void *at, FILE *out)
{
    switch (f->type) {
    case FIELD_U32: fprintf(out, "%" PRIu32, *(const uint32_t *)at); break;
    case FIELD_I32: fprintf(out, "%" PRId32, *(const int32_t *)at); break;
    default:        fprintf(out, "%" PRIu64, *(const uint64_t *)at); break;
    }
}

static bool is_zero(const struct field *f, const void *at)
{
    switch (f->type) {
    case FIELD_DOUBLE: return *(const double *)at == 0;
    case FIELD_U32:
    case FIELD_I32:    return *(const uint32_t *)at == 0;
    default:           return *(const uint64_t *)at == 0;
    }
}

static void print_list(const struct field *f, const void *target, FILE *out)
{
    size_t n = *(const size_t *)((const char *)target + f->count_offset);
    const void *list = *(void *const *)((const char *)target + f->offset);
    fputc('[', out);
    for (size_t i = 0; i < n; i++) {
        if (i)
            fputs(", ", out);
        if (f->type == FIELD_DOUBLES)
            print_double(((const double *)list)[i], out);
        else if (f->type == FIELD_U64S)
            fprintf(out, "%" PRIu64, ((const uint64_t *)list)[i]);
        else
            print_string(((char *const *)list)[i], out);
    }
    fputc(']', out);
}

static void print_value(const struct field *f, const void *target, FILE *out)
{
    const void *at = (const char *)target + f->offset;
    if (field_is_list(f)) {
        print_list(f, target, out);
        return;
    }
    switch (f->type) {
    case FIELD_STRING:
    case FIELD_PATH:
    case FIELD_WORD: {
        const char *text = *(char *const *)at;
        if (f->type == FIELD_WORD && text)
            fputs(text, out);
        else
            print_string(text ? text : "", out);
        return;
    }
    case FIELD_ENUM:    fputs(f->words[*(const int *)at], out); return;
    case FIELD_BOOL:    fputs(*(const bool *)at ? "true" : "false", out); return;
    case FIELD_PB_BOOL: fputs(*(const int *)at ? "true" : "false", out); return;
    default: break;
    }
    if (f->zero && is_zero(f, at))
        fputs(f->zero, out);
    else if (f->type == FIELD_DOUBLE)
        print_double(*(const double *)at, out);
    else if (f->type == FIELD_DURATION)
        print_duration(f, *(const uint64_t *)at, out);
    else
        print_number(f, at, out);
}

char *field_text(const struct field *f, const void *target)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    if (!out)
        abort();
    print_value(f, target, out);
    fclose(out);
    return text;
}

/* Opens the sections of path that the path before it was not in. */
static void print_sections(const char *path, const char *before, FILE *out)
{
    int depth = 0;
    bool same = true;
    const char *dot;
    while ((dot = strchr(path, '.')) != NULL) {
        size_t n = (size_t)(dot - path) + 1;
        same = same && !strncmp(path, before, n);
        if (!same)
            fprintf(out, "%*s%.*s:\n", 2 * depth, "", (int)(n - 1), path);
        before = same ? before + n : "";
        path = dot + 1;
        depth++;
    }
    fprintf(out, "%*s%s: ", 2 * depth, "", path);
}

void fields_print_yaml(const struct field_table *t, const void *target, FILE *out)
{
    const char *before = "";
    for (size_t i = 0; i < t->n_fields; i++) {
        const struct field *f = &t->fields[i];
        if (f->same_as)
            continue;
        print_sections(f->path, before, out);
        print_value(f, target, out);
        fputc('\n', out);
        before = f->path;
    }
}

/* ---- documentation -------------------------------------------------------------------------- */

static const char *type_heading(enum field_type type)
{
    switch (type) {
    case FIELD_WORD:
    case FIELD_ENUM:     return "word";
    case FIELD_DURATION: return "duration";
    case FIELD_SIZE:     return "size";
    case FIELD_BOOL:
    case FIELD_PB_BOOL:  return "true or false";
    case FIELD_STRINGS:
    case FIELD_PATHS:
    case FIELD_DOUBLES:
    case FIELD_U64S:     return type_text(type) + strlen("a ");
    case FIELD_STRING:   return "text";
    default:             return type_text(type) + strlen("a ");
    }
}

void fields_print_markdown(const struct field_table *t, FILE *out)
{
    fprintf(out, "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n");
    for (size_t i = 0; i < t->n_fields; i++) {
        const struct field *f = &t->fields[i];
        char allowed[FIELD_EXPECTED_BYTES] = "";
        if (f->same_as) {
            fprintf(out, "| `%s` | | | | older spelling of `%s`: %s |\n", f->path, f->same_as,
                    f->help);
            continue;
        }
        field_allowed(f, allowed);
        fprintf(out, "| `%s` | %s%s%s | %s%s%s | %s | %s |\n", f->path, type_heading(f->type),
                f->unit ? ", " : "", f->unit ? f->unit : "", f->preset && *f->preset ? "`" : "",
                !f->preset ? "required" : *f->preset ? f->preset : "empty",
                f->preset && *f->preset ? "`" : "", allowed, f->help);
    }
}
