/* hf_config.c - reads a config.json of the Kimi K3 family
 *
 * Whole numbers are a table: key, range, place. What follows from several keys at once (which
 * layer is of which kind, what must agree) is code. Keys that only describe inference or a
 * tokenizer are not looked at. */
#include "common/hf_config.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/json.h"
#include "common/mem.h"

#define WIDTH_MAX (1u << 20)
#define VOCAB_MAX (1u << 24)
#define HEADS_MAX 4096u
#define SHARED_EXPERTS_MAX 256u
#define LATENT_NORM_EPS 1e-6 /* published configurations do not say it */

enum { OPTIONAL = 1 }; /* absent or null leaves 0 */

struct number {
    const char *key;
    size_t      place;
    uint32_t    min, max;
    int         flags;
};

#define AT(field) offsetof(struct model_spec, field)

static const struct number text_numbers[] = {
    { "num_hidden_layers", AT(n_layers), 1, LAYERS_MAX },
    { "hidden_size", AT(hidden), 1, WIDTH_MAX },
    { "vocab_size", AT(vocab), 2, VOCAB_MAX },
    { "num_attention_heads", AT(heads), 1, HEADS_MAX },
    { "q_lora_rank", AT(q_lora_rank), 1, WIDTH_MAX, OPTIONAL },
    { "kv_lora_rank", AT(kv_lora_rank), 1, WIDTH_MAX },
    { "qk_nope_head_dim", AT(qk_nope_dim), 1, 1024 },
    { "qk_rope_head_dim", AT(qk_rope_dim), 1, 1024 },
    { "v_head_dim", AT(v_dim), 1, 1024 },
    { "intermediate_size", AT(dense_inter), 1, WIDTH_MAX },
    { "num_experts", AT(n_experts), 1, EXPERTS_MAX },
    { "num_experts_per_token", AT(top_k), 1, EXPERTS_MAX },
    { "num_shared_experts", AT(n_shared_experts), 0, SHARED_EXPERTS_MAX, OPTIONAL },
    { "moe_intermediate_size", AT(expert_inter), 1, WIDTH_MAX },
    { "routed_expert_hidden_size", AT(latent), 1, WIDTH_MAX, OPTIONAL },
    { "attn_res_block_size", AT(attn_res_block), 1, LAYERS_MAX, OPTIONAL },
};

static const struct number linear_numbers[] = {
    { "num_heads", AT(kda_heads), 1, HEADS_MAX },
    { "head_dim", AT(kda_head_dim), 1, 1024 },
    { "short_conv_kernel_size", AT(conv_kernel), 1, 16 },
};

static int read_numbers(const struct json *o, const struct number *table, size_t n,
                        struct model_spec *m, struct err *err)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t x = 0;
        int rc = json_get_u32(o, table[i].key, table[i].min, table[i].max, &x, err);
        if (rc < 0 && !(rc == -ENOENT && table[i].flags & OPTIONAL))
            return rc;
        memcpy((char *)m + table[i].place, &x, sizeof x);
    }
    return 0;
}

/* An absent flag is otherwise. */
static int read_flag(const struct json *o, const char *key, bool otherwise, bool *out,
                     struct err *err)
{
    bool x = otherwise;
    int rc = json_get_bool(o, key, &x, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    *out = x;
    return 0;
}

/* A number in low..high; an absent one is otherwise, or an error where otherwise is NAN. */
static int read_real(const struct json *o, const char *key, double low, double high,
                     double otherwise, float *out, struct err *err)
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

/* Foreign text for a person: short, and without control characters. */
static const char *shown(const char *text, char out[64])
{
    size_t i = 0;
    for (; text[i] && i < 60; i++)
        out[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
    snprintf(out + i, 64 - i, "%s", text[i] ? "..." : "");
    return out;
}

/* The key must be absent or the one text that is built here. */
static int expect_text(const struct json *o, const char *key, const char *only, struct err *err)
{
    const char *text = only;
    char part[64];
    int rc = json_get_string(o, key, &text, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    if (strcmp(text, only) != 0)
        return err_set(err, -ENOTSUP, "key '%s' is '%s'; supported: %s", key, shown(text, part),
                       only);
    return 0;
}

static int expect_number(const struct json *o, const char *key, uint32_t only, struct err *err)
{
    uint32_t x = only;
    int rc = json_get_u32(o, key, 0, UINT32_MAX, &x, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    if (x != only)
        return err_set(err, -ENOTSUP, "key '%s' is %u; supported: %u", key, x, only);
    return 0;
}

static int expect_flag(const struct json *o, const char *key, bool only, struct err *err)
{
    bool x = only;
    int rc = read_flag(o, key, only, &x, err);
    if (rc < 0)
        return rc;
    if (x != only)
        return err_set(err, -ENOTSUP, "key '%s' is %s; supported: %s", key, x ? "true" : "false",
                       only ? "true" : "false");
    return 0;
}

static int read_activation(const struct json *o, struct model_spec *m, struct err *err)
{
    const char *text;
    char part[64];
    int rc = json_get_string(o, "hidden_act", &text, err);
    if (rc < 0)
        return rc;
    if (strcmp(text, "silu") == 0) {
        m->activation = ACTIVATION_SWIGLU;
        return 0;
    }
    if (strcmp(text, "situ") != 0)
        return err_set(err, -ENOTSUP, "key 'hidden_act' is '%s'; supported: situ, silu",
                       shown(text, part));
    m->activation = ACTIVATION_SITU;
    rc = read_real(o, "activation_situ_beta", 1e-3, 1e6, NAN, &m->situ_beta, err);
    if (rc == 0)
        rc = read_real(o, "activation_situ_linear_beta", 1e-3, 1e6, NAN, &m->situ_linear_beta,
                       err);
    return rc;
}

/* Marks the layers of one list, whose numbers begin with 1. */
static int read_layer_list(const struct json *linear, const char *key, enum attention_kind kind,
                           bool *seen, struct model_spec *m, struct err *err)
{
    const struct json *list = json_get(linear, key);

    if (!list)
        return err_set(err, -EINVAL, "key '%s' is missing", key);
    if (json_kind_of(list) != JSON_ARRAY)
        return err_set(err, -EINVAL, "key '%s' is not a list of layer numbers", key);
    for (size_t i = 0; i < json_count(list); i++) {
        uint64_t l;
        if (!json_as_u64(json_at(list, i), &l) || l < 1 || l > m->n_layers)
            return err_set(err, -EINVAL,
                           "key '%s', element %zu: expected a layer number from 1 to %u", key, i,
                           m->n_layers);
        if (seen[l - 1])
            return err_set(err, -EINVAL,
                           "layer %u stands twice in kda_layers and full_attn_layers",
                           (unsigned)l);
        seen[l - 1] = true;
        m->layers[l - 1].attention = kind;
    }
    return 0;
}

static int read_linear(const struct json *text, struct model_spec *m, struct err *err)
{
    const struct json *linear = json_get(text, "linear_attn_config");
    bool seen[LAYERS_MAX] = {0};
    int rc;

    if (json_kind_of(linear) != JSON_OBJECT)
        return err_set(err, -EINVAL, "key 'linear_attn_config' is missing or not an object");
    rc = read_numbers(linear, linear_numbers, sizeof linear_numbers / sizeof *linear_numbers, m,
                      err);
    if (rc == 0)
        rc = read_flag(linear, "use_full_rank_gate", false, &m->kda_gate_full_rank, err);
    m->kda_gate_bounded = json_get(linear, "gate_lower_bound") != NULL;
    if (rc == 0 && m->kda_gate_bounded)
        rc = read_real(linear, "gate_lower_bound", -5, -1e-3, NAN, &m->kda_gate_lower_bound, err);
    if (rc == 0)
        rc = read_layer_list(linear, "kda_layers", ATTENTION_KDA, seen, m, err);
    if (rc == 0)
        rc = read_layer_list(linear, "full_attn_layers", ATTENTION_MLA, seen, m, err);
    for (uint32_t l = 0; rc == 0 && l < m->n_layers; l++)
        if (!seen[l])
            rc = err_set(err, -EINVAL,
                         "layer %u stands neither in kda_layers nor in full_attn_layers", l + 1);
    if (rc < 0)
        err_prefix(err, "linear_attn_config");
    return rc;
}

static int read_experts(const struct json *o, struct model_spec *m, struct err *err)
{
    uint32_t first, every;
    int rc;

    if (m->top_k > m->n_experts)
        return err_set(err, -EINVAL, "key 'num_experts_per_token' is %u, but num_experts is %u",
                       m->top_k, m->n_experts);
    m->latent_moe = m->latent != 0;
    if (!m->latent_moe)
        m->latent = m->hidden;
    if ((rc = read_flag(o, "latent_moe_use_norm", false, &m->latent_norm, err)) < 0 ||
        (rc = read_flag(o, "moe_renormalize", true, &m->renormalize, err)) < 0 ||
        (rc = read_real(o, "routed_scaling_factor", 1e-6, 1e6, 1, &m->routed_scale, err)) < 0 ||
        (rc = expect_text(o, "moe_router_activation_func", "sigmoid", err)) < 0 ||
        (rc = expect_text(o, "topk_method", "noaux_tc", err)) < 0 ||
        (rc = expect_number(o, "num_expert_group", 1, err)) < 0 ||
        (rc = expect_number(o, "topk_group", 1, err)) < 0 ||
        (rc = json_get_u32(o, "first_k_dense_replace", 0, m->n_layers, &first, err)) < 0 ||
        (rc = json_get_u32(o, "moe_layer_freq", 1, LAYERS_MAX, &every, err)) < 0)
        return rc;
    for (uint32_t l = 0; l < m->n_layers; l++)
        m->layers[l].mlp = l >= first && l % every == 0 ? MLP_MOE : MLP_DENSE;
    return 0;
}

static int read_text(const struct json *o, struct model_spec *m, struct err *err)
{
    int rc;

    if ((rc = read_numbers(o, text_numbers, sizeof text_numbers / sizeof *text_numbers, m,
                           err)) < 0)
        return rc;
    m->residual = m->attn_res_block ? RESIDUAL_ATTN_RES : RESIDUAL_PLAIN;
    if (json_get(o, "dsa_config"))
        return err_set(err, -ENOTSUP, "key 'dsa_config': sparse attention is not supported; "
                       "supported are dense full_attn_layers");
    if ((rc = read_real(o, "rms_norm_eps", 1e-12, 1e-2, NAN, &m->norm_eps, err)) < 0 ||
        (rc = read_real(o, "mla_latent_norm_eps", 1e-12, 1e-2, LATENT_NORM_EPS,
                        &m->latent_norm_eps, err)) < 0 ||
        (rc = read_real(o, "initializer_range", 1e-6, 1, 0.02, &m->init_std, err)) < 0 ||
        (rc = expect_flag(o, "mla_use_nope", true, err)) < 0 ||
        (rc = expect_flag(o, "tie_word_embeddings", false, err)) < 0 ||
        (rc = expect_number(o, "num_nextn_predict_layers", 0, err)) < 0 ||
        (rc = expect_number(o, "num_key_value_heads", m->heads, err)) < 0 ||
        (rc = read_flag(o, "mla_use_output_gate", false, &m->mla_output_gate, err)) < 0 ||
        (rc = read_activation(o, m, err)) < 0 || (rc = read_experts(o, m, err)) < 0)
        return rc;
    return read_linear(o, m, err);
}

static int read_root(const struct json *root, struct model_spec *m, struct err *err)
{
    const char *type;
    char part[64];

    if (json_kind_of(root) != JSON_OBJECT)
        return err_set(err, -EINVAL, "not a JSON object, expected a model's config.json");
    int rc = json_get_string(root, "model_type", &type, err);
    if (rc < 0)
        return rc == -ENOENT ? err_set(err, -EINVAL, "key 'model_type' is missing; supported: "
                                       "kimi_k3") : rc;
    if (strcmp(type, "kimi_k3") != 0)
        return err_set(err, -ENOTSUP, "key 'model_type' is '%s'; supported: kimi_k3",
                       shown(type, part));
    m->family = FAMILY_KIMI_K3;
    if ((rc = expect_flag(root, "tie_word_embeddings", false, err)) < 0)
        return rc;
    const struct json *text = json_get(root, "text_config");
    if (json_kind_of(text) != JSON_OBJECT)
        return err_set(err, -EINVAL, "key 'text_config' is missing or not an object");
    rc = read_text(text, m, err);
    if (rc < 0)
        err_prefix(err, "text_config");
    return rc == -ENOENT ? -EINVAL : rc; /* the file is there, a key is not */
}

static int read_parsed(const char *name, struct json *root, struct model_spec *out,
                       struct err *err)
{
    struct model_spec m = {0};
    struct err own = {0};
    int rc = read_root(root, &m, &own);

    json_destroy(root);
    if (rc < 0)
        return err_set(err, rc, "%s: %s", name, own.text);
    *out = m;
    return 0;
}

int hf_config_parse(const char *name, const char *text, size_t n_bytes, struct model_spec *out,
                    struct err *err)
{
    struct json *root;
    int rc = json_parse(text, n_bytes, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc < 0) {
        err_prefix(err, "%s", name);
        return rc;
    }
    return read_parsed(name, root, out, err);
}

int hf_config_read(const char *path, struct model_spec *out, struct err *err)
{
    struct stat s;
    bool is_folder = stat(path, &s) == 0 && S_ISDIR(s.st_mode);
    char *file = is_folder ? xasprintf("%s/config.json", path) : xstrdup(path);
    struct json *root;
    int rc = json_read_file(file, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc == 0)
        rc = read_parsed(file, root, out, err);
    free(file);
    return rc;
}
