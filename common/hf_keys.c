/* hf_keys.c - reads single keys of a config.json */
#include "common/hf_keys.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/tame.h"

const char *hf_spelling(const struct json *o, const char *key, const char *also)
{
    return also && !json_get(o, key) && json_get(o, also) ? also : key;
}

/* Two spellings that disagree would let the reader choose the model. */
static int check_spellings(const struct json *o, const struct hf_number *number, struct err *err)
{
    uint64_t a, b;

    if (!number->also || !json_as_u64(json_get(o, number->key), &a) ||
        !json_as_u64(json_get(o, number->also), &b) || a == b)
        return 0;
    return err_set(err, -EINVAL, "key '%s' is %llu, but '%s' is %llu", number->key,
                   (unsigned long long)a, number->also, (unsigned long long)b);
}

int hf_numbers(const struct json *o, const struct hf_number *table, size_t n,
               struct model_spec *m, struct err *err)
{
    for (size_t i = 0; i < n; i++) {
        const char *key = hf_spelling(o, table[i].key, table[i].also);
        uint32_t x = 0;
        int rc = json_get_u32(o, key, table[i].min, table[i].max, &x, err);
        if (rc < 0 && !(rc == -ENOENT && table[i].flags & HF_OPTIONAL))
            return rc;
        if ((rc = check_spellings(o, &table[i], err)) < 0)
            return rc;
        memcpy((char *)m + table[i].place, &x, sizeof x);
    }
    return 0;
}

int hf_flag(const struct json *o, const char *key, bool otherwise, bool *out, struct err *err)
{
    bool x = otherwise;
    int rc = json_get_bool(o, key, &x, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    *out = x;
    return 0;
}

int hf_real(const struct json *o, const char *key, double low, double high, double otherwise,
            float *out, struct err *err)
{
    double x = otherwise;
    int rc = json_get_double(o, key, &x, err);
    if (rc < 0 && !(rc == -ENOENT && !isnan(otherwise)))
        return rc;
    if (!(x >= low && x <= high)) /* also refuses NaN */
        return err_set(err, -EINVAL, "key '%s' is %g, expected %g to %g", key, x, low, high);
    *out = (float)x;
    return 0;
}

int hf_layer(const struct json *list, size_t i, const char *key, uint32_t n_layers,
             uint32_t *out, struct err *err)
{
    uint64_t l;
    if (!json_as_u64(json_at(list, i), &l) || l < 1 || l > n_layers)
        return err_set(err, -EINVAL, "key '%s', element %zu: expected a layer number from 1 to %u",
                       key, i, n_layers);
    *out = (uint32_t)l - 1;
    return 0;
}

const char *hf_shown(const char *text, char out[64])
{
    size_t i = 0;
    for (; text[i] && i < 60; i++)
        out[i] = text[i];
    snprintf(out + i, 64 - i, "%s", text[i] ? "..." : "");
    tame_text(out);
    return out;
}

int hf_expect_text(const struct json *o, const char *key, const char *only, struct err *err)
{
    const char *text = only;
    char part[64];
    int rc = json_get_string(o, key, &text, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    if (strcmp(text, only) != 0)
        return err_set(err, -ENOTSUP, "key '%s' is '%s'; supported: %s", key,
                       hf_shown(text, part), only);
    return 0;
}

int hf_expect_number(const struct json *o, const char *key, uint32_t only, struct err *err)
{
    uint32_t x = only;
    int rc = json_get_u32(o, key, 0, UINT32_MAX, &x, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    if (x != only)
        return err_set(err, -ENOTSUP, "key '%s' is %u; supported: %u", key, x, only);
    return 0;
}

int hf_expect_flag(const struct json *o, const char *key, bool only, struct err *err)
{
    bool x = only;
    int rc = hf_flag(o, key, only, &x, err);
    if (rc < 0)
        return rc;
    if (x != only)
        return err_set(err, -ENOTSUP, "key '%s' is %s; supported: %s", key, x ? "true" : "false",
                       only ? "true" : "false");
    return 0;
}
