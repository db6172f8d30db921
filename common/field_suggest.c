/* field_suggest.c - what a wrong key was meant to be */
#include "common/field.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

bool field_is_section(const struct field_table *t, const char *path)
{
    size_t n = strlen(path);
    for (size_t i = 0; i < t->n_fields; i++)
        if (!strncmp(t->fields[i].path, path, n) && t->fields[i].path[n] == '.')
            return true;
    return false;
}

/* The keys that may follow prefix ("" or "train."), each once, ended by NULL. Gives the array;
 * the names in it are owned too. */
static char **keys_under(const struct field_table *t, const char *prefix)
{
    size_t n_prefix = strlen(prefix), n = 0;
    char **keys = xcalloc(t->n_fields + 1, sizeof *keys);
    for (size_t i = 0; i < t->n_fields; i++) {
        const char *path = t->fields[i].path;
        if (strncmp(path, prefix, n_prefix) != 0 || t->fields[i].same_as)
            continue;
        size_t n_key = strcspn(path + n_prefix, ".");
        if (n && strlen(keys[n - 1]) == n_key && !strncmp(keys[n - 1], path + n_prefix, n_key))
            continue;
        keys[n++] = xasprintf("%.*s", (int)n_key, path + n_prefix);
    }
    return keys;
}

static void free_keys(char **keys)
{
    for (char **k = keys; *k; k++)
        free(*k);
    free(keys);
}

/* A field elsewhere whose last word is key: people forget the section. */
static const char *field_elsewhere(const struct field_table *t, const char *key)
{
    for (size_t i = 0; i < t->n_fields; i++) {
        const char *dot = strrchr(t->fields[i].path, '.');
        if (!strcmp(dot ? dot + 1 : t->fields[i].path, key))
            return t->fields[i].path;
    }
    return NULL;
}

static void append_keys(char **keys, char out_text[FIELD_EXPECTED_BYTES])
{
    size_t n = strlen(out_text);
    for (char **k = keys; *k && n < FIELD_EXPECTED_BYTES; k++)
        n += (size_t)snprintf(out_text + n, FIELD_EXPECTED_BYTES - n, "%s%s",
                              k == keys ? "" : ", ", *k);
}

void field_unknown(const struct field_table *t, const char *prefix, const char *key,
                   char out_text[FIELD_EXPECTED_BYTES])
{
    const size_t n_bytes = FIELD_EXPECTED_BYTES;
    char **keys = keys_under(t, prefix);
    const char *near = field_nearest(key, (const char *const *)keys);
    const char *elsewhere = field_elsewhere(t, key);
    if (near || elsewhere) {
        snprintf(out_text, n_bytes, "unknown; did you mean '%s%s'?", near ? prefix : "",
                 near ? near : elsewhere);
    } else {
        snprintf(out_text, n_bytes, "unknown; allowed here: ");
        append_keys(keys, out_text);
    }
    free_keys(keys);
}

void field_not_section(const struct field_table *t, const char *path,
                       char out_text[FIELD_EXPECTED_BYTES])
{
    char *prefix = xasprintf("%s.", path);
    char **keys = keys_under(t, prefix);
    snprintf(out_text, FIELD_EXPECTED_BYTES, "is a section, expected keys under it: ");
    append_keys(keys, out_text);
    free_keys(keys);
    free(prefix);
}
