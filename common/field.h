/* field.h - one table of fields over a C struct: type, default, range, words, unit, help
 *
 * The same table serves the YAML parser (conf), --set, the check of a foreign message, the printer
 * and the documentation, so a key, its limits and its explanation have one place. A key is its
 * dotted path, as in train.optimizer.lr. This part is pure: text in, struct members out. */
#ifndef COMMON_FIELD_H
#define COMMON_FIELD_H

#include <stdio.h>

#include "common/err.h"
#include "common/problems.h"
#include "common/types.h"

enum field_type {
    FIELD_STRING,   /* char *, owned by the struct (malloc) */
    FIELD_PATH,     /* char *, owned; a relative one is taken against the file's folder */
    FIELD_WORD,     /* char *, owned; one of words */
    FIELD_ENUM,     /* int: the index in words */
    FIELD_U32,      /* uint32_t */
    FIELD_U64,      /* uint64_t */
    FIELD_I32,      /* int32_t */
    FIELD_DOUBLE,   /* double, finite */
    FIELD_BOOL,     /* bool */
    FIELD_PB_BOOL,  /* int, protobuf-c's bool */
    FIELD_DURATION, /* uint64_t; what one is worth stands in duration_ns */
    FIELD_SIZE,     /* uint64_t bytes; written 16GiB, 500MB, 4096 */
    /* lists: T * at offset (malloc), size_t at count_offset; min, max are of the elements */
    FIELD_STRINGS,  /* char **, each owned */
    FIELD_PATHS,    /* char **, each owned, as FIELD_PATH; globs stay patterns */
    FIELD_DOUBLES,  /* double * */
    FIELD_U64S,     /* uint64_t * */
};

/* Another way to write a value: {"true", "full"}. A list of them ends with {NULL}. */
struct field_spelling {
    const char *written, *means;
};

struct field {
    const char *path;
    enum field_type type;
    size_t offset, count_offset;
    const char *preset;    /* the default as one writes it, "" is an empty string or list;
                            * NULL: the key is required */
    double min, max;       /* of numbers, durations (in its unit) and sizes */
    bool   min_open, max_open; /* the bound itself is not allowed */
    uint32_t n_min, n_max; /* of lists; n_max 0: 256 */
    uint64_t duration_ns;  /* what 1 in the struct is worth: NS_PER_S, NS_PER_MS, 1 */
    const char *const *words; /* ends with NULL */
    const struct field_spelling *spellings; /* also accepted */
    const char *zero;      /* a word that means and prints 0, as in auto, none */
    const char *same_as;   /* an older key: spellings give the value for the key named here */
    const char *unit, *help;
};

struct field_table {
    const struct field *fields;
    size_t n_fields;
};

#define FIELD_LIST_MAX   256u
#define FIELD_BYTES_MAX  PATH_BYTES_MAX /* of one text */

/* The field of that path, or NULL. */
const struct field *field_find(const struct field_table *t, const char *path);

/* Reads text as f's value into target; a list is written "[a, b]" or "a, b". Frees what was
 * there. On failure target is untouched and err says what was expected, without the key. */
int field_parse(const struct field *f, void *target, const char *text, struct err *err);

/* Is it one of the list types? */
bool field_is_list(const struct field *f);
/* Empties a list; appends one element to it. */
void field_clear(const struct field *f, void *target);
int  field_append(const struct field *f, void *target, const char *text, struct err *err);

/* "a whole number, allowed 1 to 1e9", "one of off, full, selective": what f takes. */
#define FIELD_EXPECTED_BYTES 512
void field_expected(const struct field *f, char out_text[FIELD_EXPECTED_BYTES]);

/* As text in messages: quoted, shortened, without control characters. */
#define FIELD_QUOTE_BYTES 80
void field_quote(const char *text, char out_text[FIELD_QUOTE_BYTES]);

/* Checks the values in target against the fields' ranges, words and lengths (for bytes from the
 * wire). */
void fields_check(const struct field_table *t, const void *target, struct problems *out);

/* Sets every member to its default without freeing (memory of unknown content); required members
 * become NULL, zero or empty. */
void fields_init(const struct field_table *t, void *target);
void fields_fini(const struct field_table *t, void *target); /* frees the owned members */

/* The value as one writes it in YAML flow style. Gives, freed with free(). */
char *field_text(const struct field *f, const void *target);
/* The range as in "1 to 1e9", "one of a, b"; "" where there is none to tell. */
void field_allowed(const struct field *f, char out_text[FIELD_EXPECTED_BYTES]);

/* Writes YAML that reads back to the same struct: nested by path, every key, in table order. */
void fields_print_yaml(const struct field_table *t, const void *target, FILE *out);
/* Documentation: one markdown row per key (key, type, default, allowed, meaning). */
void fields_print_markdown(const struct field_table *t, FILE *out);

/* The nearest of words (NULL-terminated) to text, or NULL if none is near enough to be meant. */
const char *field_nearest(const char *text, const char *const *words);

/* For messages about keys. prefix is "" or a section's path with its dot, key the unknown word
 * after it: "unknown; did you mean 'train.steps'?", or the keys that are allowed there. */
void field_unknown(const struct field_table *t, const char *prefix, const char *key,
                   char out_text[FIELD_EXPECTED_BYTES]);
bool field_is_section(const struct field_table *t, const char *path);
void field_not_section(const struct field_table *t, const char *path,
                       char out_text[FIELD_EXPECTED_BYTES]);

#endif
