/* json.h - JSON values, read and written; json-c's home
 *
 * Reads what real files hold: strict JSON, and the bare NaN, Infinity and -Infinity of Python.
 * Writes strict JSON: a number that is not finite becomes null. */
#ifndef COMMON_JSON_H
#define COMMON_JSON_H

#include "common/err.h"
#include "common/types.h"

struct json; /* a value; its parts live as long as the root */

enum json_kind {
    JSON_NULL, JSON_BOOL, JSON_INTEGER, JSON_DOUBLE, JSON_STRING, JSON_ARRAY, JSON_OBJECT
};

#define JSON_DEPTH_MAX 64

/* Gives *out, ended with json_destroy. n_bytes beyond bytes_max is refused with -EFBIG, bad text
 * with -EINVAL and the byte where it stops being JSON. A null document is refused, and an object
 * with the same key twice, by the key. */
int  json_parse(const char *text, size_t n_bytes, size_t bytes_max, struct json **out,
                struct err *err);
/* The same of a regular file; errors begin with its name. */
int  json_read_file(const char *path, size_t bytes_max, struct json **out, struct err *err);
void json_destroy(struct json *v);

/* ---- looking. NULL stands for null and for what is absent, and is JSON_NULL. */
enum json_kind json_kind_of(const struct json *v);
size_t json_count(const struct json *v); /* elements of an array or object, else 0 */
const struct json *json_at(const struct json *array, size_t i);
const struct json *json_get(const struct json *object, const char *key);
/* From now on the keys that this thread asks json_get for become members of set, an object that
 * stays the caller's; NULL: of none any more. */
void json_note_keys(struct json *set);

/* Members in the file's order: for (struct json_iter i = json_iter(o); json_next(&i);) */
struct json_iter {
    const char *key;
    const struct json *value;
    void *next;
};
struct json_iter json_iter(const struct json *object);
bool json_next(struct json_iter *i);

/* The value, or false / NULL if it is of another kind or out of range. A whole double counts as
 * an integer, any number as a double. */
const char *json_as_string(const struct json *v); /* NUL-terminated */
bool json_as_u64(const struct json *v, uint64_t *out);
bool json_as_double(const struct json *v, double *out);
bool json_as_bool(const struct json *v, bool *out);

/* A member of an object: 0; -ENOENT if it is absent or null; -EINVAL if it is of another kind or
 * outside min..max. err names key and kind. *out is untouched on failure. */
int json_get_u64(const struct json *object, const char *key, uint64_t min, uint64_t max,
                 uint64_t *out, struct err *err);
int json_get_u32(const struct json *object, const char *key, uint32_t min, uint32_t max,
                 uint32_t *out, struct err *err);
int json_get_double(const struct json *object, const char *key, double *out, struct err *err);
int json_get_bool(const struct json *object, const char *key, bool *out, struct err *err);
/* Lives as long as object. */
int json_get_string(const struct json *object, const char *key, const char **out,
                    struct err *err);

/* ---- building. put and push take value (NULL writes null); a key put twice holds the last. */
struct json *json_new_object(void);
struct json *json_new_array(void);
struct json *json_new_string(const char *text); /* bytes that are no UTF-8 become '?' */
struct json *json_new_u64(uint64_t x);
struct json *json_new_i64(int64_t x);
struct json *json_new_double(double x); /* shortest text that reads back the same */
struct json *json_new_bool(bool x);
void json_put(struct json *object, const char *key, struct json *value);
void json_push(struct json *array, struct json *value);
/* Appends from's members to object; takes from. */
void json_put_all(struct json *object, struct json *from);

/* A value of its own; NULL of what is null. */
struct json *json_copy(const struct json *v);

/* Removes the members of that name from object and from the objects in it. Returns how many. */
size_t json_remove(struct json *object, const char *key);

/* On one line, or indented. Gives, freed with free(). */
char *json_text(const struct json *v, bool pretty);

#endif
