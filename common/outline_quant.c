/* outline_quant.c - reads how the weights of a checkpoint are packed */
#include <errno.h>
#include <string.h>

#include "common/hf_keys.h"
#include "common/outline_build.h"

static void set(struct outline_quant *q, const char *method, uint32_t bits, uint32_t group,
                uint32_t block)
{
    *q = (struct outline_quant){.bits = bits, .group = group, .block = block};
    strncpy(q->method, method, sizeof q->method - 1);
}

static uint32_t small_number(const struct json *o, const char *key, uint32_t otherwise)
{
    uint64_t x;
    return json_as_u64(json_get(o, key), &x) && x <= 4096 ? (uint32_t)x : otherwise;
}

/* compressed-tensors: the first group's weights speak for all. */
static void read_groups(const struct json *o, struct outline_quant *q)
{
    const struct json *groups = json_get(o, "config_groups"), *first = NULL;
    const char *format = json_as_string(json_get(o, "format"));
    char shown[64];
    for (struct json_iter i = json_iter(groups); !first && json_next(&i);)
        first = i.value;
    const struct json *weights = json_get(first, "weights");
    set(q, format ? hf_shown(format, shown) : "compressed-tensors",
        small_number(weights, "num_bits", 8), small_number(weights, "group_size", 0), 0);
}

int build_quant(struct builder *b)
{
    const struct json *o = json_get(b->text, "quantization_config");
    struct outline_quant *q = &b->o->quant;
    char shown[64];
    if (!o)
        o = json_get(b->root, "quantization_config");
    if (!o)
        return 0;
    if (json_kind_of(o) != JSON_OBJECT)
        return err_set(b->err, -EINVAL, "key 'quantization_config' is not an object");
    const char *method = json_as_string(json_get(o, "quant_method"));
    const struct json *block = json_get(o, "weight_block_size");
    uint64_t side = 0;
    json_as_u64(json_at(block, 0), &side);
    if (!method)
        return err_set(b->err, -EINVAL, "quantization_config: key 'quant_method' is missing or "
                       "not a text");
    if (!strcmp(method, "compressed-tensors"))
        read_groups(o, q);
    else if (!strcmp(method, "fp8"))
        set(q, "fp8", 8, 0, side <= 4096 ? (uint32_t)side : 0);
    else if (!strcmp(method, "mxfp4"))
        set(q, "mxfp4", 4, 32, 0);
    else
        set(q, hf_shown(method, shown), small_number(o, "bits", 4),
            small_number(o, "group_size", 0), 0);
    return 0;
}
