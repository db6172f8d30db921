/* json.c - json-c behind plain functions: limits on the way in, strict JSON on the way out */
#include "common/json.h"

#include <json-c/json.h>

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/field_text.h"
#include "common/file.h"
#include "common/json_unique.h"
#include "common/mem.h"

/* struct json is json-c's json_object under the project's name. */
static struct json_object *in(const struct json *v)
{
    return (struct json_object *)v;
}

static struct json *made(struct json_object *o)
{
    if (!o)
        abort(); /* json-c returns NULL only when memory has run out */
    return (struct json *)o;
}

/* ---- reading -------------------------------------------------------------------------------- */

static int parse_with(struct json_tokener *tok, const char *text, size_t n_bytes,
                      struct json **out, struct err *err)
{
    json_tokener_set_flags(tok, JSON_TOKENER_STRICT | JSON_TOKENER_VALIDATE_UTF8 |
                                    JSON_TOKENER_ALLOW_TRAILING_CHARS);
    struct json_object *o = json_tokener_parse_ex(tok, text, (int)n_bytes);
    size_t end = json_tokener_get_parse_end(tok);
    if (json_tokener_get_error(tok) == json_tokener_continue)
        o = json_tokener_parse_ex(tok, "", 1); /* a number ends with the text */
    enum json_tokener_error code = json_tokener_get_error(tok);
    if (code == json_tokener_continue || code == json_tokener_error_parse_eof)
        return err_set(err, -EINVAL, "not JSON: it ends too early, after %zu bytes",
                       n_bytes);
    if (code != json_tokener_success)
        return err_set(err, -EINVAL, "not JSON: %s at byte %zu", json_tokener_error_desc(code),
                       end);
    while (end < n_bytes && strchr(" \t\r\n", text[end]) && text[end])
        end++;
    if (end < n_bytes) {
        json_object_put(o);
        return err_set(err, -EINVAL, "not JSON: something follows its end at byte %zu", end);
    }
    if (!o)
        return err_set(err, -EINVAL, "the JSON document is null, expected an object");
    int rc = json_check_unique((struct json *)o, text, n_bytes, err);
    if (rc < 0)
        json_object_put(o);
    else
        *out = (struct json *)o;
    return rc;
}

int json_parse(const char *text, size_t n_bytes, size_t bytes_max, struct json **out,
               struct err *err)
{
    if (n_bytes > bytes_max || n_bytes >= INT32_MAX)
        return err_set(err, -EFBIG, "%zu bytes of JSON, allowed up to %zu", n_bytes, bytes_max);
    struct json_tokener *tok = json_tokener_new_ex(JSON_DEPTH_MAX);
    if (!tok)
        abort();
    int rc = parse_with(tok, text, n_bytes, out, err);
    json_tokener_free(tok);
    return rc;
}

int json_read_file(const char *path, size_t bytes_max, struct json **out, struct err *err)
{
    struct stat s;
    int fd = file_open(path, &s, err);
    if (fd < 0)
        return fd;
    size_t size = (size_t)s.st_size;
    char *text = size <= bytes_max ? xcalloc(1, size) : NULL;
    ssize_t n = text ? file_read(fd, text, size) : 0;
    close(fd);
    int rc = !text ? err_set(err, -EFBIG, "%zu bytes, allowed up to %zu", size, bytes_max)
             : n < 0 ? err_set(err, (int)n, "%s", strerror((int)-n))
                     : json_parse(text, (size_t)n, bytes_max, out, err);
    free(text);
    if (rc < 0)
        err_prefix(err, "%s", path);
    return rc;
}

void json_destroy(struct json *v)
{
    json_object_put(in(v));
}

/* ---- looking -------------------------------------------------------------------------------- */

enum json_kind json_kind_of(const struct json *v)
{
    switch (json_object_get_type(in(v))) {
    case json_type_boolean: return JSON_BOOL;
    case json_type_int:     return JSON_INTEGER;
    case json_type_double:  return JSON_DOUBLE;
    case json_type_string:  return JSON_STRING;
    case json_type_array:   return JSON_ARRAY;
    case json_type_object:  return JSON_OBJECT;
    case json_type_null:    break;
    }
    return JSON_NULL;
}

size_t json_count(const struct json *v)
{
    enum json_kind kind = json_kind_of(v);
    if (kind == JSON_ARRAY)
        return json_object_array_length(in(v));
    return kind == JSON_OBJECT ? (size_t)json_object_object_length(in(v)) : 0;
}

const struct json *json_at(const struct json *array, size_t i)
{
    if (json_kind_of(array) != JSON_ARRAY || i >= json_object_array_length(in(array)))
        return NULL;
    return (const struct json *)json_object_array_get_idx(in(array), i);
}

static _Thread_local struct json *noted; /* keys that were asked for */

void json_note_keys(struct json *set)
{
    noted = set;
}

const struct json *json_get(const struct json *object, const char *key)
{
    struct json_object *value = NULL;
    if (noted)
        json_put(noted, key, json_new_bool(true));
    if (json_kind_of(object) != JSON_OBJECT)
        return NULL;
    json_object_object_get_ex(in(object), key, &value);
    return (const struct json *)value;
}

struct json_iter json_iter(const struct json *object)
{
    struct json_iter i = {0};
    if (json_kind_of(object) == JSON_OBJECT)
        i.next = json_object_get_object(in(object))->head;
    return i;
}

bool json_next(struct json_iter *i)
{
    struct lh_entry *entry = i->next;
    if (!entry)
        return false;
    i->key = lh_entry_k(entry);
    i->value = (const struct json *)lh_entry_v(entry);
    i->next = entry->next;
    return true;
}

const char *json_as_string(const struct json *v)
{
    return json_kind_of(v) == JSON_STRING ? json_object_get_string(in(v)) : NULL;
}

/* Python writes 8.0 where it means 8. Beyond 2^53 a double no longer says which integer. */
static bool is_whole_double(const struct json *v)
{
    double x = json_object_get_double(in(v));
    return x == floor(x) && x >= 0 && x < 0x1p53;
}

bool json_as_u64(const struct json *v, uint64_t *out)
{
    enum json_kind kind = json_kind_of(v);
    if (kind == JSON_DOUBLE && is_whole_double(v)) {
        *out = (uint64_t)json_object_get_double(in(v));
        return true;
    }
    if (kind != JSON_INTEGER || json_object_get_int64(in(v)) < 0)
        return false;
    *out = json_object_get_uint64(in(v));
    return true;
}

bool json_as_double(const struct json *v, double *out)
{
    enum json_kind kind = json_kind_of(v);
    if (kind != JSON_INTEGER && kind != JSON_DOUBLE)
        return false;
    *out = json_object_get_double(in(v));
    return true;
}

bool json_as_bool(const struct json *v, bool *out)
{
    if (json_kind_of(v) != JSON_BOOL)
        return false;
    *out = json_object_get_boolean(in(v));
    return true;
}

/* ---- members -------------------------------------------------------------------------------- */

static int absent(const char *key, struct err *err)
{
    return err_set(err, -ENOENT, "key '%s' is missing", key);
}

int json_get_u64(const struct json *object, const char *key, uint64_t min, uint64_t max,
                 uint64_t *out, struct err *err)
{
    const struct json *v = json_get(object, key);
    uint64_t x;
    if (!v)
        return absent(key, err);
    if (!json_as_u64(v, &x) || x < min || x > max)
        return err_set(err, -EINVAL,
                       "key '%s' is %.60s, expected a whole number from %" PRIu64 " to %" PRIu64,
                       key, json_object_get_string(in(v)), min, max);
    *out = x;
    return 0;
}

int json_get_u32(const struct json *object, const char *key, uint32_t min, uint32_t max,
                 uint32_t *out, struct err *err)
{
    uint64_t x = 0;
    int rc = json_get_u64(object, key, min, max, &x, err);
    if (rc == 0)
        *out = (uint32_t)x;
    return rc;
}

int json_get_double(const struct json *object, const char *key, double *out, struct err *err)
{
    const struct json *v = json_get(object, key);
    if (!v)
        return absent(key, err);
    if (!json_as_double(v, out))
        return err_set(err, -EINVAL, "key '%s' is %.60s, expected a number", key,
                       json_object_get_string(in(v)));
    return 0;
}

int json_get_bool(const struct json *object, const char *key, bool *out, struct err *err)
{
    const struct json *v = json_get(object, key);
    if (!v)
        return absent(key, err);
    if (!json_as_bool(v, out))
        return err_set(err, -EINVAL, "key '%s' is %.60s, expected true or false", key,
                       json_object_get_string(in(v)));
    return 0;
}

int json_get_string(const struct json *object, const char *key, const char **out,
                    struct err *err)
{
    const struct json *v = json_get(object, key);
    if (!v)
        return absent(key, err);
    const char *text = json_as_string(v);
    if (!text)
        return err_set(err, -EINVAL, "key '%s' is %.60s, expected text", key,
                       json_object_get_string(in(v)));
    *out = text;
    return 0;
}

/* ---- building ------------------------------------------------------------------------------- */

struct json *json_copy(const struct json *v)
{
    struct json_object *own = NULL;
    return v && json_object_deep_copy((struct json_object *)(uintptr_t)v, &own, NULL) == 0
               ? made(own) : NULL;
}

struct json *json_new_object(void)
{
    return made(json_object_new_object());
}

struct json *json_new_array(void)
{
    return made(json_object_new_array());
}

/* Length of the UTF-8 sequence at s, or 0 if there is none (overlong and surrogates included). */
static size_t utf8_bytes(const unsigned char *s)
{
    size_t n = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3
             : s[0] < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
        (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return n;
}

struct json *json_new_string(const char *text)
{
    char *copy = xstrdup(text);
    for (unsigned char *c = (unsigned char *)copy; *c;) {
        size_t n = utf8_bytes(c);
        if (n == 0)
            *c = '?';
        c += n ? n : 1;
    }
    struct json *v = made(json_object_new_string(copy));
    free(copy);
    return v;
}

struct json *json_new_u64(uint64_t x)
{
    return made(json_object_new_uint64(x));
}

struct json *json_new_i64(int64_t x)
{
    return made(json_object_new_int64(x));
}

struct json *json_new_double(double x)
{
    if (!isfinite(x))
        return NULL; /* json-c's null */
    char text[NUMBER_TEXT_BYTES];
    text_shortest(x, text);
    return made(json_object_new_double_s(x, text));
}

struct json *json_new_bool(bool x)
{
    return made(json_object_new_boolean(x));
}

void json_put(struct json *object, const char *key, struct json *value)
{
    if (json_object_object_add(in(object), key, in(value)) < 0)
        abort();
}

void json_put_all(struct json *object, struct json *from)
{
    for (struct json_iter i = json_iter(from); json_next(&i);)
        json_put(object, i.key, (struct json *)json_object_get(in(i.value)));
    json_object_put(in(from));
}

void json_push(struct json *array, struct json *value)
{
    if (json_object_array_add(in(array), in(value)) < 0)
        abort();
}

size_t json_remove(struct json *object, const char *key)
{
    size_t n = 0;
    if (json_kind_of(object) != JSON_OBJECT)
        return 0;
    if (json_object_object_get_ex(in(object), key, NULL)) {
        json_object_object_del(in(object), key);
        n++;
    }
    json_object_object_foreach(in(object), name, value) {
        (void)name;
        n += json_remove((struct json *)value, key);
    }
    return n;
}

char *json_text(const struct json *v, bool pretty)
{
    int flags = JSON_C_TO_STRING_NOSLASHESCAPE;
    flags |= pretty ? JSON_C_TO_STRING_PRETTY | JSON_C_TO_STRING_SPACED : JSON_C_TO_STRING_PLAIN;
    return xstrdup(json_object_to_json_string_ext(in(v), flags));
}
