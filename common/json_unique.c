/* json_unique.c - finds a key that an object holds twice
 *
 * Two readers of such a document may see two different ones. In valid JSON each member has exactly
 * one colon outside of strings, so their number tells in one pass; only a document that lost a
 * member is then walked for its name. */
#include "common/json_unique.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

/* ---- whether -------------------------------------------------------------------------------- */

static size_t count_colons(const char *text, size_t n_bytes)
{
    size_t n = 0;
    bool inside = false;
    for (size_t i = 0; i < n_bytes; i++) {
        if (text[i] == '"')
            inside = !inside;
        else if (inside && text[i] == '\\')
            i++;
        else if (!inside && text[i] == ':')
            n++;
    }
    return n;
}

static size_t count_members(const struct json *v)
{
    size_t n = 0;
    if (json_kind_of(v) == JSON_ARRAY) {
        for (size_t i = 0; i < json_count(v); i++)
            n += count_members(json_at(v, i));
    } else if (json_kind_of(v) == JSON_OBJECT) {
        for (struct json_iter i = json_iter(v); json_next(&i);)
            n += 1 + count_members(i.value);
    }
    return n;
}

/* ---- which ---------------------------------------------------------------------------------- */

struct walk {
    const char *at, *end; /* valid JSON: what is looked for is there */
    char *twice;          /* the first key that was found twice */
};

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The next character of structure; white space, numbers and words are passed over. */
static char next_mark(struct walk *w)
{
    while (w->at < w->end && !strchr("{}[]\",:", *w->at))
        w->at++;
    return w->at < w->end ? *w->at : '\0';
}

/* At a quote: past the string. With out_key: what it says, escapes resolved. */
static void pass_string(struct walk *w, char **out_key)
{
    const char *first = w->at++;
    while (w->at < w->end && *w->at != '"')
        w->at += *w->at == '\\' ? 2 : 1;
    w->at++;
    if (!out_key)
        return;
    struct json *key = NULL;
    size_t n_bytes = (size_t)(w->at - first);
    *out_key = xstrdup(json_parse(first, n_bytes, n_bytes, &key, NULL) == 0 ? json_as_string(key)
                                                                           : "?");
    json_destroy(key);
}

static void pass_value(struct walk *w);

static void look_for_two(struct walk *w, char **keys, size_t n)
{
    qsort(keys, n, sizeof *keys, by_text);
    for (size_t i = 1; i < n && !w->twice; i++)
        if (strcmp(keys[i], keys[i - 1]) == 0)
            w->twice = xstrdup(keys[i]);
}

static void pass_object(struct walk *w)
{
    char **keys = xcalloc(1, sizeof *keys);
    size_t n = 0;
    w->at++;
    for (char c; (c = next_mark(w)) != '}' && c && !w->twice;) {
        if (c == '"') {
            keys = xrealloc(keys, (n + 1) * sizeof *keys);
            pass_string(w, &keys[n++]);
            next_mark(w);
            w->at++; /* the colon */
            pass_value(w);
        } else {
            w->at++; /* a comma */
        }
    }
    w->at++;
    if (!w->twice)
        look_for_two(w, keys, n);
    for (size_t i = 0; i < n; i++)
        free(keys[i]);
    free(keys);
}

static void pass_array(struct walk *w)
{
    w->at++;
    for (char c; (c = next_mark(w)) != ']' && c && !w->twice;) {
        if (c == ',')
            w->at++;
        else
            pass_value(w);
    }
    w->at++;
}

/* A number or a word ends at the mark that follows it. */
static void pass_value(struct walk *w)
{
    switch (next_mark(w)) {
    case '{':
        pass_object(w);
        break;
    case '[':
        pass_array(w);
        break;
    case '"':
        pass_string(w, NULL);
        break;
    }
}

int json_check_unique(const struct json *root, const char *text, size_t n_bytes, struct err *err)
{
    struct walk w = {.at = text, .end = text + n_bytes};
    if (count_members(root) == count_colons(text, n_bytes))
        return 0;
    pass_value(&w);
    err_set(err, -EINVAL, "key '%.200s' is there twice in one object", w.twice ? w.twice : "?");
    free(w.twice);
    return -EINVAL;
}
