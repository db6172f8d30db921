/* hf_keys.h - keys of a config.json, checked: numbers, flags, texts, and what has one allowed value
 *
 * Private to hf_config. Every error names the key. Absent and null are the same. */
#ifndef COMMON_HF_KEYS_H
#define COMMON_HF_KEYS_H

#include "common/err.h"
#include "common/json.h"
#include "common/model_spec.h"

#define HF_HEADS_MAX 4096u

enum { HF_OPTIONAL = 1 }; /* absent leaves 0 */

/* A whole number of the model and where it goes. */
struct hf_number {
    const char *key, *also; /* also: another spelling, or NULL */
    size_t      place;      /* offset in model_spec, of a uint32_t */
    uint32_t    min, max;
    int         flags;
};

int hf_numbers(const struct json *o, const struct hf_number *table, size_t n,
               struct model_spec *m, struct err *err);

/* The spelling that the object has: also if it has only that one, else key. */
const char *hf_spelling(const struct json *o, const char *key, const char *also);

/* An absent flag is otherwise. */
int hf_flag(const struct json *o, const char *key, bool otherwise, bool *out, struct err *err);

/* A number in low..high; an absent one is otherwise, or an error where otherwise is NAN. */
int hf_real(const struct json *o, const char *key, double low, double high, double otherwise,
            float *out, struct err *err);

/* The key must be absent or the one value that is built here; -ENOTSUP names both. */
int hf_expect_text(const struct json *o, const char *key, const char *only, struct err *err);
int hf_expect_number(const struct json *o, const char *key, uint32_t only, struct err *err);
int hf_expect_flag(const struct json *o, const char *key, bool only, struct err *err);

/* Element i of key's list, the number of a layer from 1, as an index from 0. */
int hf_layer(const struct json *list, size_t i, const char *key, uint32_t n_layers,
             uint32_t *out, struct err *err);

/* Foreign text for a person: short, and without control characters. Returns out. */
const char *hf_shown(const char *text, char out[64]);

#endif
