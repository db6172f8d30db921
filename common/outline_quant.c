/* outline_quant.c - reads how the weights of a checkpoint are packed */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "common/hf_config.h"
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

/* Groups of tensors that are packed alike: the narrowest speaks for all, as experts are that. */
static void read_groups(const struct json *o, const char *method, struct outline_quant *q)
{
    const char *format = json_as_string(json_get(o, "format"));
    uint32_t bits = 0, size = 0;
    char shown[64];
    for (struct json_iter i = json_iter(json_get(o, "config_groups")); json_next(&i);) {
        const struct json *weights = json_get(i.value, "weights");
        uint32_t own = small_number(weights, "num_bits", 8);
        if (bits && own >= bits)
            continue;
        bits = own;
        size = small_number(weights, "group_size", 0);
    }
    set(q, format ? hf_shown(format, shown) : method, bits ? bits : 8, size, 0);
}

/* NVIDIA's exporter: an algorithm in place of a method. */
static void read_algorithm(const struct json *o, const char *algorithm, struct outline_quant *q)
{
    bool is_fp8 = strstr(algorithm, "FP8") || strstr(algorithm, "INT8") || strstr(algorithm, "W8");
    char method[40], shown[64];
    if (json_get(o, "config_groups")) {
        read_groups(o, "modelopt", q);
    } else {
        uint32_t group = small_number(o, "group_size", is_fp8 ? 0 : 16);
        set(q, "modelopt", is_fp8 ? 8 : 4, group, 0);
    }
    snprintf(method, sizeof method, "modelopt %.20s", hf_shown(algorithm, shown));
    memcpy(q->method, method, sizeof method);
}

static uint32_t bits_of(const struct json *o, const char *method)
{
    bool eight = false;
    json_as_bool(json_get(o, "load_in_8bit"), &eight);
    return small_number(o, "bits", small_number(o, "w_bit", eight || strstr(method, "8") ? 8 : 4));
}

static int read_object(const struct json *o, struct outline_quant *q, struct err *err)
{
    const char *method = json_as_string(json_get(o, "quant_method"));
    const char *algorithm = json_as_string(json_get(o, "quant_algo"));
    const struct json *block = json_get(o, "weight_block_size");
    uint64_t side = 0;
    char shown[64];
    json_as_u64(json_at(block, 0), &side);
    if (!method && !algorithm)
        return err_set(err, -EINVAL, "quantization_config: key 'quant_method' is missing or not a "
                       "text");
    if (!method || (!strcmp(method, "modelopt") && algorithm))
        read_algorithm(o, algorithm, q);
    else if (!strcmp(method, "compressed-tensors"))
        read_groups(o, method, q);
    else if (!strcmp(method, "fp8"))
        set(q, "fp8", 8, 0, side <= 4096 ? (uint32_t)side : 0);
    else if (!strcmp(method, "mxfp4"))
        set(q, "mxfp4", 4, 32, 0);
    else
        set(q, hf_shown(method, shown), bits_of(o, method),
            small_number(o, "group_size", small_number(o, "q_group_size", 0)), 0);
    return 0;
}

int build_quant(struct builder *b)
{
    const struct json *o = json_get(b->text, "quantization_config");
    if (!o)
        o = json_get(b->root, "quantization_config");
    if (!o)
        o = json_get(b->root, "compression_config");
    if (!o)
        return 0;
    if (json_kind_of(o) != JSON_OBJECT)
        return err_set(b->err, -EINVAL, "key 'quantization_config' is not an object");
    return read_object(o, &b->o->quant, b->err);
}

int build_quant_beside(const char *path, struct outline_quant *out, struct err *err)
{
    struct json *root;
    struct stat s;
    if (stat(path, &s) < 0)
        return 0;
    int rc = json_read_file(path, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc < 0)
        return rc;
    const struct json *o = json_get(root, "quantization");
    rc = json_get(o, "quant_algo") ? read_object(o, out, err) : 0;
    json_destroy(root);
    if (rc < 0)
        err_prefix(err, "%s", path);
    return rc;
}
