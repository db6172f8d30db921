/* outline_mixer.c - the blocks that mix a sequence by softmax attention, and every block's norms */
#include <errno.h>
#include <string.h>

#include "common/outline_build.h"

#define HEADS_MAX 4096u
#define DIM_MAX   8192u

/* Two blocks in one: all matrices are twice as tall. */
static void double_up(struct outline_block *k)
{
    for (uint32_t i = 0; i < k->n_tensors; i++)
        k->tensors[i].out *= 2;
    k->heads *= 2;
}

/* What a layer has around its block: one norm before it, and what the residual scheme adds. */
static void add_stream(struct builder *b, struct outline_block *k)
{
    static const struct residual_names names = {
        "self_attention_res_norm.weight", "self_attention_res_proj.weight",
        "hc_attn_fn|attn_hc.fn", "hc_attn_base|attn_hc.base", "hc_attn_scale|attn_hc.scale",
    };
    uint64_t h = b->o->hidden;
    build_post_norm(b, k, "post_attention_layernorm.weight|post_attn_norm.weight");
    if (build_is(b, "longcat")) {
        double_up(k);
        build_tensor(k, PART_NORMS, "input_layernorm.1.weight", h, 0, 1);
    }
    build_norm(b, k, b->one_block ? "norm.weight" : "input_layernorm.weight|attn_norm.weight|"
               "norm_attn_norm.norm_1.weight|operator_norm.weight|pre_attn_norm.weight|"
               "input_layernorm.0.weight", "input_layernorm.bias");
    build_residual(b, k, &names);
}

/* Which positions turn, and how. */
static int add_rotary(struct builder *b, struct outline_block *k)
{
    const struct json *scaling = json_get(b->text, "rope_scaling");
    const struct json *parameters = json_get(b->text, "rope_parameters");
    const struct json *from = scaling ? scaling : parameters;
    const char *type = json_as_string(json_get(from, "rope_type"));
    double part = 1, of = 0;
    if (!type)
        type = json_as_string(json_get(from, "type"));
    json_as_double(json_get(b->text, "partial_rotary_factor"), &part);
    json_as_double(json_get(parameters, "partial_rotary_factor"), &part);
    json_as_double(json_get(b->text, "rotary_dim"), &of);
    build_op(k, OP_ROTARY);
    if (part < 1 || (of > 0 && of < k->key_dim) || build_is(b, "qwen3_next qwen3_5"))
        build_op(k, OP_ROTARY_PARTIAL);
    if (type && !strcmp(type, "yarn"))
        build_op(k, OP_YARN);
    else if (type && strcmp(type, "default") != 0)
        build_op(k, OP_ROTARY_SCALED);
    return 0;
}

/* Layers with a window, or those without one, may have heads of their own. */
static int read_own_heads(struct builder *b, uint32_t l, struct outline_block *k)
{
    const struct json *text = b->text, *other = json_get(text, "attention_other_setting");
    bool is_window = b->mix[l] == MIX_SLIDING;
    int rc;
    if (!is_window)
        return build_number(b, 0, KEYS("global_head_dim"), 1, DIM_MAX, k->key_dim, &k->key_dim) < 0
                   ? -EINVAL
                   : build_number(b, 0, KEYS("num_global_key_value_heads"), 1, HEADS_MAX,
                                  k->kv_heads, &k->kv_heads);
    if ((rc = build_number(b, 0, KEYS("swa_num_attention_heads"), 1, HEADS_MAX, k->heads,
                           &k->heads)) < 0 ||
        (rc = build_number(b, 0, KEYS("swa_num_key_value_heads"), 1, HEADS_MAX, k->kv_heads,
                           &k->kv_heads)) < 0 ||
        (rc = build_number(b, 0, KEYS("swa_head_dim"), 1, DIM_MAX, k->key_dim, &k->key_dim)) < 0 ||
        !other)
        return rc;
    b->text = other;
    if ((rc = build_number(b, 0, KEYS("num_attention_heads"), 1, HEADS_MAX, k->heads,
                           &k->heads)) == 0)
        rc = build_number(b, 0, KEYS("num_attention_groups"), 1, HEADS_MAX, k->kv_heads,
                          &k->kv_heads);
    b->text = text;
    return rc;
}

static int read_heads(struct builder *b, uint32_t l, struct outline_block *k)
{
    uint32_t hidden = b->o->hidden;
    int rc;
    if ((rc = build_number(b, l, KEYS("num_attention_heads", "n_heads", "n_head"), 1, HEADS_MAX,
                           OUTLINE_REQUIRED, &k->heads)) < 0 ||
        (rc = build_number(b, l, KEYS("num_key_value_heads", "num_kv_heads", "kv_n_heads",
                                      "num_attention_groups"), 1,
                           HEADS_MAX, k->heads, &k->kv_heads)) < 0 ||
        (rc = build_number(b, 0, KEYS("head_dim", "attention_head_dim"), 1, DIM_MAX,
                           hidden / k->heads ? hidden / k->heads : 1, &k->key_dim)) < 0 ||
        (rc = read_own_heads(b, l, k)) < 0)
        return rc;
    if (k->heads % k->kv_heads != 0)
        return err_set(b->err, -EINVAL, "key 'num_key_value_heads' is %u, which does not divide "
                       "%u heads", k->kv_heads, k->heads);
    k->value_dim = k->key_dim;
    return 0;
}

/* Norms of queries and keys: of each head, of all heads at once, or without weights. */
static int add_qk_norm(struct builder *b, struct outline_block *k)
{
    bool used;
    bool by_habit = build_is(b, "qwen3 olmoe flex_olmo dots1 afmoe lfm2 exaone step3p gemma");
    int rc = build_flag(b, "use_qk_norm", by_habit, &used);
    if (rc < 0 || !used)
        return rc;
    if (build_is(b, "llama4")) {
        build_op(k, OP_QK_NORM_PLAIN);
        return 0;
    }
    bool all = build_is(b, "olmoe flex_olmo minimax_m2") ||
               !strcmp(build_text(b, "qk_norm_type"), "per_layer");
    uint64_t d = k->key_dim;
    build_op(k, all ? OP_QK_NORM_ALL : OP_QK_NORM_HEAD);
    build_tensor(k, PART_ATTENTION, "q_norm.weight|query_layernorm.weight|"
                 "q_layernorm.weight",
                 all ? k->heads * d : d, 0, 1);
    build_tensor(k, PART_ATTENTION, "k_norm.weight|key_layernorm.weight|"
                 "k_layernorm.weight",
                 all ? k->kv_heads * d : d, 0, 1);
    return 0;
}

static int add_biases(struct builder *b, struct outline_block *k)
{
    uint64_t q = (uint64_t)k->heads * k->key_dim, kv = (uint64_t)k->kv_heads * k->key_dim;
    bool all, qkv;
    int rc;
    if ((rc = build_flag(b, "attention_bias", false, &all)) < 0 ||
        (rc = build_flag(b, "use_qkv_bias", build_is(b, "qwen2"), &qkv)) < 0)
        return rc;
    if (!all && !qkv)
        return 0;
    build_op(k, OP_ATTENTION_BIAS);
    build_tensor(k, PART_ATTENTION, "q_proj.bias", q, 0, 1);
    build_tensor(k, PART_ATTENTION, "k_proj.bias", kv, 0, 1);
    build_tensor(k, PART_ATTENTION, "v_proj.bias", kv, 0, 1);
    if (all && !build_is(b, "glm4_moe qwen2"))
        build_tensor(k, PART_ATTENTION, "o_proj.bias", b->o->hidden, 0, 1);
    return 0;
}

/* A learned logit of every head. */
static int add_sinks(struct builder *b, uint32_t l, struct outline_block *k)
{
    const char *key = b->mix[l] == MIX_SLIDING ? "add_swa_attention_sink_bias"
                                               : "add_full_attention_sink_bias";
    bool used;
    int rc = build_flag(b, key, build_is(b, "gpt_oss"), &used);
    if (rc < 0 || !used)
        return rc;
    build_op(k, OP_SINKS);
    build_tensor(k, PART_ATTENTION, "sinks|attention_sink_bias", k->heads, 0, 1);
    return 0;
}

static int add_window(struct builder *b, uint32_t l, struct outline_block *k)
{
    if (b->mix[l] == MIX_SLIDING) {
        build_op(k, OP_SLIDING_WINDOW);
        return build_number(b, 0, KEYS("sliding_window", "sliding_window_size"), 1, 1u << 30,
                            OUTLINE_REQUIRED, &k->window);
    }
    if (b->mix[l] != MIX_CHUNKED && (build_is(b, "mimo") || !build_has(b, "attention_chunk_size")))
        return 0;
    build_op(k, OP_CHUNKED_ATTENTION);
    return build_number(b, 0, KEYS("attention_chunk_size"), 1, 1u << 30, 0, &k->window);
}

/* Output gates: of every number inside q_proj or beside it, or of every head. */
static int add_gates(struct builder *b, struct outline_block *k, bool *out_in_query)
{
    bool head_wise;
    int rc;
    if ((rc = build_flag(b, "attn_output_gate", build_is(b, "qwen3_next qwen3_5"),
                         out_in_query)) < 0 ||
        (rc = build_flag(b, "use_head_wise_attn_gate", false, &head_wise)) < 0)
        return rc;
    if (*out_in_query || head_wise || build_is(b, "afmoe"))
        build_op(k, OP_GQA_GATE);
    if (head_wise || build_is(b, "afmoe"))
        build_tensor(k, PART_ATTENTION, "g_proj.weight|self_attn.gate_proj.weight",
                     head_wise ? k->heads : (uint64_t)k->heads * k->value_dim, b->o->hidden, 1);
    return 0;
}

/* An indexer that chooses blocks of keys, in the layers that a list marks. */
static int add_block_indexer(struct builder *b, uint32_t l, struct outline_block *k)
{
    const struct json *own = json_get(b->text, "sparse_attention_config"), *text = b->text;
    uint32_t used, blocks, size;
    uint64_t h = b->o->hidden;
    int rc;
    if (!own)
        return 0;
    b->text = own;
    if ((rc = build_number(b, l, KEYS("sparse_attention_freq"), 0, 1, 1, &used)) == 0 && used &&
        (rc = build_number(b, 0, KEYS("sparse_num_index_heads"), 1, HEADS_MAX, OUTLINE_REQUIRED,
                           &k->index_heads)) == 0 &&
        (rc = build_number(b, 0, KEYS("sparse_index_dim"), 1, DIM_MAX, OUTLINE_REQUIRED,
                           &k->index_dim)) == 0 &&
        (rc = build_number(b, 0, KEYS("sparse_topk_blocks"), 1, 1u << 16, OUTLINE_REQUIRED,
                           &blocks)) == 0 &&
        (rc = build_number(b, 0, KEYS("sparse_block_size"), 1, 1u << 14, OUTLINE_REQUIRED,
                           &size)) == 0) {
        k->index_top_k = blocks * size;
        build_op(k, OP_INDEXER_BLOCKS);
        build_op(k, OP_SPARSE_ATTENTION);
        build_tensor(k, PART_ATTENTION, "index_q_proj.weight",
                     (uint64_t)k->index_heads * k->index_dim, h, 1);
        build_tensor(k, PART_ATTENTION, "index_k_proj.weight", k->index_dim, h, 1);
        build_tensor(k, PART_ATTENTION, "index_q_norm.weight", k->index_dim, 0, 1);
        build_tensor(k, PART_ATTENTION, "index_k_norm.weight", k->index_dim, 0, 1);
    }
    b->text = text;
    return rc;
}

/* Queries, whole or in two factors with a norm between. */
static int add_query(struct builder *b, struct outline_block *k, uint64_t wide)
{
    uint32_t shared;
    int rc = build_number(b, 0, KEYS("share_q_dim"), 1, WIDTH_MAX, 0, &shared);
    if (rc == 0 && shared) {
        build_op(k, OP_FACTORED_QUERY);
        build_tensor(k, PART_ATTENTION, "inter_norm.weight", shared, 0, 1);
        build_tensor(k, PART_ATTENTION, "wq.weight", wide, shared, 1);
    }
    if (rc == 0)
        build_tensor(k, PART_ATTENTION, "self_attn.q_proj.weight|mixer.q_proj.weight|q_proj.weight",
                     shared ? shared : wide, b->o->hidden, 1);
    return rc;
}

/* Layers that use the keys and values of the one before have none of their own. */
static int borrows_keys(struct builder *b, uint32_t l, bool *out)
{
    bool shared;
    uint32_t every;
    int rc;
    if ((rc = build_flag(b, "use_cla", false, &shared)) < 0 ||
        (rc = build_number(b, 0, KEYS("cla_share_factor"), 1, LAYERS_MAX, 1, &every)) < 0)
        return rc;
    *out = shared && l % every != 0;
    return 0;
}

static int add_projections(struct builder *b, uint32_t l, struct outline_block *k, bool gate)
{
    uint64_t h = b->o->hidden, q = (uint64_t)k->heads * k->key_dim;
    uint64_t keys = (uint64_t)k->kv_heads * k->key_dim, v = (uint64_t)k->kv_heads * k->value_dim;
    bool borrows, same;
    int rc;
    if ((rc = borrows_keys(b, l, &borrows)) < 0 ||
        (rc = build_flag(b, "attention_k_eq_v", false, &same)) < 0)
        return rc;
    if (build_is(b, "mimo_v2 dbrx")) {
        build_tensor(k, PART_ATTENTION, "qkv_proj.weight|q_proj.weight|k_proj.weight|v_proj.weight|"
                     "attn.Wqkv.weight", q + keys + v, h, 1);
    } else if ((rc = add_query(b, k, gate ? 2 * q : q)) < 0) {
        return rc;
    } else if (!borrows) {
        build_tensor(k, PART_ATTENTION, "k_proj.weight", keys, h, 1);
        if (!same || b->mix[l] == MIX_SLIDING)
            build_tensor(k, PART_ATTENTION, "v_proj.weight", v, h, 1);
    }
    build_tensor(k, PART_ATTENTION, "o_proj.weight|self_attn.out_proj.weight|attn.out_proj.weight",
                 h, (uint64_t)k->heads * k->value_dim, 1);
    return 0;
}

static int build_grouped(struct builder *b, uint32_t l, struct outline_block *k)
{
    bool gate;
    int rc = read_heads(b, l, k);
    if (rc < 0 || (rc = build_number(b, 0, KEYS("v_head_dim"), 1, DIM_MAX, k->key_dim,
                                     &k->value_dim)) < 0 ||
        (rc = add_gates(b, k, &gate)) < 0 || (rc = add_projections(b, l, k, gate)) < 0)
        return rc;
    memcpy(k->kind, "gqa", 4);
    build_op(k, OP_GQA);
    if (build_has(b, "clip_qkv"))
        build_op(k, OP_CLIP_QKV);
    if ((rc = add_sinks(b, l, k)) < 0 || (rc = add_window(b, l, k)) < 0 ||
        (rc = add_qk_norm(b, k)) < 0 || (rc = add_biases(b, k)) < 0 ||
        (rc = add_block_indexer(b, l, k)) < 0)
        return rc;
    return build_is(b, "nemotron_h jamba") ? 0 : add_rotary(b, k);
}

/* ---- latent attention ----------------------------------------------------------------------- */

static bool indexer_is_shared(const struct builder *b, uint32_t l)
{
    const struct json *types = json_get(b->text, "indexer_types");
    const char *type = json_as_string(json_at(types, l));
    return type && !strcmp(type, "shared");
}

static int add_indexer(struct builder *b, uint32_t l, uint64_t q, struct outline_block *k)
{
    const struct json *own = json_get(b->text, "dsa_config"), *text = b->text;
    uint64_t h = b->o->hidden;
    uint32_t pool;
    int rc;
    b->text = own ? own : text;
    if ((rc = build_number(b, 0, KEYS("index_topk"), 1, 1u << 20, OUTLINE_REQUIRED,
                           &k->index_top_k)) == 0 &&
        (rc = build_number(b, 0, KEYS("index_n_heads"), 1, HEADS_MAX, OUTLINE_REQUIRED,
                           &k->index_heads)) == 0)
        rc = build_number(b, 0, KEYS("index_head_dim"), 1, DIM_MAX, OUTLINE_REQUIRED,
                          &k->index_dim);
    b->text = text;
    if (rc < 0 || (rc = build_number(b, 0, KEYS("index_kpool"), 1, 1u << 16, 0, &pool)) < 0)
        return rc;
    build_op(k, OP_SPARSE_ATTENTION);
    if (indexer_is_shared(b, l)) {
        build_op(k, OP_INDEXER_SHARED);
        return 0;
    }
    uint64_t di = k->index_dim;
    build_op(k, pool ? OP_INDEXER_POOLED : OP_INDEXER);
    build_tensor(k, PART_ATTENTION, "indexer.wq_b.weight", k->index_heads * di, q, 1);
    build_tensor(k, PART_ATTENTION, "indexer.wk.weight", di, h, 1);
    build_tensor(k, PART_ATTENTION, "indexer.k_norm.weight", di, 0, 1);
    build_tensor(k, PART_ATTENTION, "indexer.k_norm.bias", di, 0, 1);
    build_tensor(k, PART_ATTENTION, "indexer.weights_proj.weight", k->index_heads, h, 1);
    if (pool) {
        build_tensor(k, PART_ATTENTION, "indexer.index_kpool_compress_gate", di, h, 1);
        build_tensor(k, PART_ATTENTION, "indexer.index_kpool_compress_ape", pool, di, 1);
    }
    return 0;
}

/* An output gate of every number, or of every head. */
static int add_latent_gate(struct builder *b, struct outline_block *k)
{
    const char *granularity = build_text(b, "gated_attention_proj_granularity_type");
    bool gate;
    int rc = build_flag(b, "mla_use_output_gate", *granularity != '\0', &gate);
    if (rc < 0 || !gate)
        return rc;
    build_op(k, OP_MLA_GATE);
    build_tensor(k, PART_ATTENTION, "g_proj.weight",
                 !strcmp(granularity, "head_wise") ? k->heads : (uint64_t)k->heads * k->value_dim,
                 b->o->hidden, 1);
    return 0;
}

static int build_latent(struct builder *b, uint32_t l, struct outline_block *k)
{
    uint64_t h = b->o->hidden;
    uint32_t q, c, nope, rope;
    bool no_rotary;
    int rc = read_heads(b, l, k);
    if (rc < 0 ||
        (rc = build_number(b, 0, KEYS("q_lora_rank"), 1, WIDTH_MAX, 0, &q)) < 0 ||
        (rc = build_number(b, 0, KEYS("kv_lora_rank"), 1, WIDTH_MAX, OUTLINE_REQUIRED, &c)) < 0 ||
        (rc = build_number(b, 0, KEYS("qk_nope_head_dim"), 1, DIM_MAX, OUTLINE_REQUIRED,
                           &nope)) < 0 ||
        (rc = build_number(b, 0, KEYS("qk_rope_head_dim"), 0, DIM_MAX, 0, &rope)) < 0 ||
        (rc = build_number(b, 0, KEYS("v_head_dim"), 1, DIM_MAX, nope, &k->value_dim)) < 0 ||
        (rc = build_flag(b, "mla_use_nope", rope == 0, &no_rotary)) < 0)
        return rc;
    uint64_t heads = k->heads, wide = heads * (nope + rope), out = heads * k->value_dim;
    memcpy(k->kind, "mla", 4);
    k->key_dim = nope + rope;
    k->kv_heads = 1;
    build_op(k, OP_MLA);
    if (q) {
        build_tensor(k, PART_ATTENTION, "q_a_proj.weight", q, h, 1);
        build_tensor(k, PART_ATTENTION, "q_a_layernorm.weight", q, 0, 1);
        build_tensor(k, PART_ATTENTION, "q_b_proj.weight", wide, q, 1);
    } else {
        build_tensor(k, PART_ATTENTION, "q_proj.weight", wide, h, 1);
    }
    build_tensor(k, PART_ATTENTION, "kv_a_proj_with_mqa.weight", c + rope, h, 1);
    build_tensor(k, PART_ATTENTION, "kv_a_layernorm.weight", c, 0, 1);
    build_tensor(k, PART_ATTENTION, "kv_b_proj.weight", heads * (nope + k->value_dim), c, 1);
    build_tensor(k, PART_ATTENTION, "o_proj.weight", h, out, 1);
    if ((rc = add_latent_gate(b, k)) < 0)
        return rc;
    if (!no_rotary && (rc = add_rotary(b, k)) < 0)
        return rc;
    if (build_has(b, "index_topk") || build_has(b, "dsa_config")) {
        memcpy(k->kind, "mla_sparse", 11);
        return add_indexer(b, l, q ? q : h, k);
    }
    return 0;
}

int build_mixer(struct builder *b, uint32_t l, struct outline_block *k)
{
    bool latent;
    int rc = build_flag(b, "use_mla", build_has(b, "kv_lora_rank"), &latent);
    if (rc < 0)
        return rc;
    if (b->mix[l] == MIX_LINEAR || b->mix[l] == MIX_CONV)
        rc = b->mix[l] == MIX_CONV ? build_conv(b, k) : build_linear(b, k);
    else if (build_is(b, "deepseek_v4"))
        rc = build_compressed(b, l, k);
    else
        rc = latent ? build_latent(b, l, k) : build_grouped(b, l, k);
    if (rc == 0)
        add_stream(b, k);
    return rc;
}
