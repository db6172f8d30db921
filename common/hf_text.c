/* hf_text.c - reads the text model of a config.json
 *
 * Whole numbers are a table: key, range, place. What follows from several keys at once (which
 * layer is of which kind, what must agree) is code. Keys that only describe inference or a
 * tokenizer are not looked at. */
#include "common/hf_text.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "common/hf_keys.h"

#define WIDTH_MAX (1u << 20)
#define VOCAB_MAX (1u << 24)
#define SHARED_EXPERTS_MAX 256u
#define MTP_LAYERS_MAX 16u
#define LATENT_NORM_EPS 1e-6 /* published configurations do not say it */

#define AT(field) offsetof(struct model_spec, field)

static const struct hf_number numbers[] = {
    { "num_hidden_layers", NULL, AT(n_layers), 1, LAYERS_MAX },
    { "hidden_size", NULL, AT(hidden), 1, WIDTH_MAX },
    { "vocab_size", NULL, AT(vocab), 2, VOCAB_MAX },
    { "num_attention_heads", NULL, AT(heads), 1, HF_HEADS_MAX },
    { "q_lora_rank", NULL, AT(q_lora_rank), 1, WIDTH_MAX, HF_OPTIONAL },
    { "kv_lora_rank", NULL, AT(kv_lora_rank), 1, WIDTH_MAX },
    { "qk_nope_head_dim", NULL, AT(qk_nope_dim), 1, 1024 },
    { "qk_rope_head_dim", NULL, AT(qk_rope_dim), 1, 1024 },
    { "v_head_dim", NULL, AT(v_dim), 1, 1024 },
    { "intermediate_size", NULL, AT(dense_inter), 1, WIDTH_MAX },
    { "num_experts", "n_routed_experts", AT(n_experts), 1, EXPERTS_MAX },
    { "num_experts_per_token", "num_experts_per_tok", AT(top_k), 1, EXPERTS_MAX },
    { "num_shared_experts", "n_shared_experts", AT(n_shared_experts), 0, SHARED_EXPERTS_MAX,
      HF_OPTIONAL },
    { "num_expert_group", "n_group", AT(n_expert_groups), 1, EXPERTS_MAX, HF_OPTIONAL },
    { "topk_group", NULL, AT(top_groups), 1, EXPERTS_MAX, HF_OPTIONAL },
    { "moe_intermediate_size", NULL, AT(expert_inter), 1, WIDTH_MAX },
    { "routed_expert_hidden_size", NULL, AT(latent), 1, WIDTH_MAX, HF_OPTIONAL },
    { "attn_res_block_size", NULL, AT(attn_res_block), 1, LAYERS_MAX, HF_OPTIONAL },
    { "num_nextn_predict_layers", NULL, AT(n_mtp_layers), 0, MTP_LAYERS_MAX, HF_OPTIONAL },
};

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
                       hf_shown(text, part));
    m->activation = ACTIVATION_SITU;
    rc = hf_real(o, "activation_situ_beta", 1e-3, 1e6, NAN, &m->situ_beta, err);
    if (rc == 0)
        rc = hf_real(o, "activation_situ_linear_beta", 1e-3, 1e6, NAN, &m->situ_linear_beta, err);
    return rc;
}

/* One word per layer, or the number of dense layers before the others. */
static int read_mlp_kinds(const struct json *o, struct model_spec *m, struct err *err)
{
    const struct json *types = json_get(o, "mlp_layer_types");
    uint32_t first, every = 1;
    int rc;

    if (!types) {
        if ((rc = json_get_u32(o, "first_k_dense_replace", 0, m->n_layers, &first, err)) < 0)
            return rc;
        rc = json_get_u32(o, "moe_layer_freq", 1, LAYERS_MAX, &every, err);
        if (rc < 0 && rc != -ENOENT)
            return rc;
        for (uint32_t l = 0; l < m->n_layers; l++)
            m->layers[l].mlp = l >= first && l % every == 0 ? MLP_MOE : MLP_DENSE;
        return 0;
    }
    if (json_kind_of(types) != JSON_ARRAY || json_count(types) != m->n_layers)
        return err_set(err, -EINVAL, "key 'mlp_layer_types' is not a list of %u layers",
                       m->n_layers);
    for (uint32_t l = 0; l < m->n_layers; l++) {
        const char *type = json_as_string(json_at(types, l));
        if (!type || (strcmp(type, "dense") != 0 && strcmp(type, "sparse") != 0))
            return err_set(err, -EINVAL,
                           "key 'mlp_layer_types', element %u: expected 'dense' or 'sparse'", l);
        m->layers[l].mlp = type[0] == 's' ? MLP_MOE : MLP_DENSE;
    }
    return 0;
}

/* A group's worth is the sum of its two best, so it needs two. */
static int read_groups(const struct json *o, struct model_spec *m, struct err *err)
{
    const char *key = hf_spelling(o, "num_expert_group", "n_group");

    if (m->n_expert_groups == 0)
        m->n_expert_groups = 1;
    if (m->top_groups == 0)
        m->top_groups = m->n_expert_groups;
    uint32_t size = m->n_experts / m->n_expert_groups;
    if (m->n_expert_groups > 1 && (m->n_experts % m->n_expert_groups != 0 || size < 2))
        return err_set(err, -EINVAL, "key '%s' is %u, which does not cut %u experts into equal "
                       "groups of two or more", key, m->n_expert_groups, m->n_experts);
    if (m->top_groups > m->n_expert_groups || m->top_groups * size < m->top_k)
        return err_set(err, -EINVAL, "key 'topk_group' is %u of %u groups of %u experts, from "
                       "which %u are chosen", m->top_groups, m->n_expert_groups, size, m->top_k);
    return 0;
}

/* Kimi's say which; of the others' references some read the key and some do not. */
static int read_scores(const struct json *o, struct model_spec *m, struct err *err)
{
    const char *key = hf_spelling(o, "moe_router_activation_func", "scoring_func");
    const char *text = "sigmoid";
    int rc = json_get_string(o, key, &text, err);

    if (rc < 0 && rc != -ENOENT)
        return rc;
    m->router_softmax = m->family != FAMILY_DEEPSEEK_V3 && strcmp(text, "softmax") == 0;
    return m->router_softmax ? 0 : hf_expect_text(o, key, "sigmoid", err);
}

/* Without groups where a config says so, whatever their number. */
static int check_grouped(const struct json *o, const struct model_spec *m, struct err *err)
{
    bool grouped;
    int rc = hf_flag(o, "use_grouped_topk", true, &grouped, err);

    if (rc == 0 && !grouped && m->n_expert_groups > 1)
        rc = err_set(err, -ENOTSUP, "key 'use_grouped_topk' is false, but '%s' is %u; supported: "
                     "true, or 1 group", hf_spelling(o, "num_expert_group", "n_group"),
                     m->n_expert_groups);
    return rc;
}

/* What references take for granted differs, so it must be said. */
static int check_said(const struct json *o, const struct model_spec *m, struct err *err)
{
    bool says_groups = json_get(o, "n_group") || json_get(o, "num_expert_group");

    if (m->family == FAMILY_KIMI_K3)
        return 0;
    if (!json_get(o, "routed_scaling_factor"))
        return err_set(err, -EINVAL, "key 'routed_scaling_factor' is missing");
    if (m->family == FAMILY_DEEPSEEK_V3 && (!says_groups || !json_get(o, "topk_group")))
        return err_set(err, -EINVAL, "key '%s' is missing; 1 means that experts have no groups",
                       says_groups ? "topk_group" : "n_group");
    return 0;
}

static int read_experts(const struct json *o, struct model_spec *m, struct err *err)
{
    int rc;

    if (m->top_k > m->n_experts)
        return err_set(err, -EINVAL, "key '%s' is %u, but %s is %u",
                       hf_spelling(o, "num_experts_per_token", "num_experts_per_tok"), m->top_k,
                       hf_spelling(o, "num_experts", "n_routed_experts"), m->n_experts);
    m->latent_moe = m->latent != 0;
    if (!m->latent_moe)
        m->latent = m->hidden;
    if ((rc = hf_flag(o, "latent_moe_use_norm", false, &m->latent_norm, err)) < 0 ||
        (rc = hf_flag(o, hf_spelling(o, "moe_renormalize", "norm_topk_prob"), true,
                      &m->renormalize, err)) < 0 ||
        (rc = hf_real(o, "routed_scaling_factor", 1e-6, 1e6, 1, &m->routed_scale, err)) < 0 ||
        (rc = read_scores(o, m, err)) < 0 ||
        (rc = hf_expect_text(o, "topk_method", "noaux_tc", err)) < 0 ||
        (rc = check_said(o, m, err)) < 0 || (rc = read_groups(o, m, err)) < 0 ||
        (rc = check_grouped(o, m, err)) < 0)
        return rc;
    return read_mlp_kinds(o, m, err);
}

static int read_attention(const struct json *o, struct model_spec *m, struct err *err)
{
    int rc;

    if (m->family == FAMILY_DEEPSEEK_V3) {
        for (uint32_t l = 0; l < m->n_layers; l++)
            m->layers[l].attention = ATTENTION_MLA;
        rc = hf_rotary(o, m, err);
    } else if ((rc = hf_expect_flag(o, "mla_use_nope", true, err)) == 0) {
        rc = hf_linear(o, m, err);
    }
    return rc < 0 ? rc : hf_indexer(o, m, err);
}

/* Keys of other models that would change what is computed, and the values that would not: absent,
 * null, false, and the number here. */
static const struct {
    const char *key;
    double idle;
} foreign[] = {
    { "attn_logit_softcapping", 0 }, { "final_logit_softcapping", 0 }, { "sliding_window", 0 },
    { "swiglu_limit", 0 },           { "clip_qkv", 0 },                { "hc_mult", 1 },
    { "embedding_multiplier", 1 },   { "residual_multiplier", 1 },     { "logits_scaling", 1 },
    { "attention_multiplier", 1 },   { "logit_scale", 1 },             { "use_qk_norm", 0 },
    { "mlp_bias", 0 },               { "use_qkv_bias", 0 },            { "num_hash_layers", 0 },
    { "partial_rotary_factor", 1 },  { "index_topk_freq", 1 },         { "index_kpool", 1 },
    { "indexer_rope_interleave", 0 }, { "attention_dropout", 0 },      { "router_jitter_noise", 0 },
};

static int check_foreign(const struct json *o, struct err *err)
{
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        const struct json *v = json_get(o, foreign[i].key);
        bool flag = false;
        double x = 0;
        if (json_kind_of(v) == JSON_NULL || (json_as_bool(v, &flag) && !flag) ||
            (json_as_double(v, &x) && x == foreign[i].idle))
            continue;
        return err_set(err, -ENOTSUP, "key '%s' is set; this kind of model is built without it",
                       foreign[i].key);
    }
    return 0;
}

int hf_text(const struct json *o, struct model_spec *m, struct err *err)
{
    int rc;

    if ((rc = check_foreign(o, err)) < 0)
        return rc;
    if ((rc = hf_numbers(o, numbers, sizeof numbers / sizeof *numbers, m, err)) < 0)
        return rc;
    m->residual = m->attn_res_block ? RESIDUAL_ATTN_RES : RESIDUAL_PLAIN;
    if ((rc = hf_real(o, "rms_norm_eps", 1e-12, 1e-2, NAN, &m->norm_eps, err)) < 0 ||
        (rc = hf_real(o, "mla_latent_norm_eps", 1e-12, 1e-2, LATENT_NORM_EPS,
                      &m->latent_norm_eps, err)) < 0 ||
        (rc = hf_real(o, "initializer_range", 1e-6, 1, 0.02, &m->init_std, err)) < 0 ||
        (rc = hf_expect_flag(o, "tie_word_embeddings", false, err)) < 0 ||
        (rc = m->family == FAMILY_DEEPSEEK_V3
                  ? hf_flag(o, "attention_bias", false, &m->attention_bias, err)
                  : hf_expect_flag(o, "attention_bias", false, err)) < 0 ||
        (rc = hf_expect_number(o, "num_key_value_heads", m->heads, err)) < 0 ||
        (rc = hf_flag(o, "mla_use_output_gate", false, &m->mla_output_gate, err)) < 0 ||
        (rc = read_activation(o, m, err)) < 0 || (rc = read_experts(o, m, err)) < 0)
        return rc;
    return read_attention(o, m, err);
}
