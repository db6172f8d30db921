/* outline_linear.c - the blocks that mix a sequence by a recurrent state, or by compressed keys */
#include <errno.h>
#include <string.h>

#include "common/outline_build.h"

#define HEADS_MAX 4096u
#define DIM_MAX   8192u

/* ---- a gated convolution -------------------------------------------------------------------- */

int build_conv(struct builder *b, struct outline_block *k)
{
    uint64_t h = b->o->hidden;
    uint32_t kernel;
    int rc = build_number(b, 0, KEYS("conv_L_cache"), 1, 64, 3, &kernel);
    if (rc < 0)
        return rc;
    memcpy(k->kind, "conv", 5);
    build_op(k, OP_GATED_CONV);
    build_tensor(k, PART_ATTENTION, "conv.in_proj.weight", 3 * h, h, 1);
    build_tensor(k, PART_ATTENTION, "conv.conv.weight", h, kernel, 1);
    build_tensor(k, PART_ATTENTION, "conv.out_proj.weight", h, h, 1);
    return 0;
}

/* ---- KDA ------------------------------------------------------------------------------------ */

static int kda_widths(struct builder *b, uint32_t *heads, uint32_t *d, uint32_t *kernel)
{
    const struct json *own = json_get(b->text, "linear_attn_config"), *text = b->text;
    int rc;
    if (own)
        b->text = own;
    if ((rc = build_number(b, 0, KEYS("num_heads", "linear_num_heads", "num_attention_heads"), 1,
                           HEADS_MAX, OUTLINE_REQUIRED, heads)) == 0 &&
        (rc = build_number(b, 0, KEYS("linear_head_dim", "head_dim"), 1, DIM_MAX,
                           OUTLINE_REQUIRED, d)) == 0)
        rc = build_number(b, 0, KEYS("short_conv_kernel_size", "linear_conv_kernel_dim"), 1, 64, 4,
                          kernel);
    b->text = text;
    return rc;
}

static bool kda_is_bounded(const struct builder *b)
{
    const struct json *own = json_get(b->text, "linear_attn_config");
    return json_get(own, "gate_lower_bound") || build_has(b, "linear_lower_bound") ||
           build_has(b, "kda_lower_bound") || build_is(b, "glm5_next");
}

static int build_kda(struct builder *b, struct outline_block *k)
{
    uint64_t h = b->o->hidden;
    uint32_t heads, d, kernel;
    bool full = false, no_lora;
    int rc = kda_widths(b, &heads, &d, &kernel);
    if (rc < 0 || (rc = build_flag(b, "no_kda_lora", false, &no_lora)) < 0)
        return rc;
    json_as_bool(json_get(json_get(b->text, "linear_attn_config"), "use_full_rank_gate"), &full);
    uint64_t wide = (uint64_t)heads * d;
    memcpy(k->kind, "kda", 4);
    k->heads = k->kv_heads = heads;
    k->key_dim = k->value_dim = d;
    k->n_state = wide * d;
    build_op(k, kda_is_bounded(b) ? OP_KDA_BOUNDED : OP_KDA_SOFTPLUS);
    build_op(k, OP_SHORT_CONV);
    build_op(k, OP_GATED_NORM);
    build_tensor(k, PART_ATTENTION, "q_proj.weight", wide, h, 1);
    build_tensor(k, PART_ATTENTION, "k_proj.weight", wide, h, 1);
    build_tensor(k, PART_ATTENTION, "v_proj.weight", wide, h, 1);
    build_tensor(k, PART_ATTENTION, "q_conv1d.weight|k_conv1d.weight|v_conv1d.weight|conv1d.weight",
                 3 * wide, kernel, 1);
    if (no_lora) {
        build_tensor(k, PART_ATTENTION, "f_proj.weight", wide, h, 1);
    } else {
        build_tensor(k, PART_ATTENTION, "f_a_proj.weight", d, h, 1);
        build_tensor(k, PART_ATTENTION, "f_b_proj.weight", wide, d, 1);
    }
    build_tensor(k, PART_ATTENTION, "dt_bias", wide, 0, 1);
    build_tensor(k, PART_ATTENTION, "A_log", heads, 0, 1);
    /* Kimi K3 stores it padded to a multiple of 128. */
    if (build_is(b, "kimi_k3"))
        k->tensors[k->n_tensors - 1].n_padding = (128 - heads % 128) % 128;
    build_tensor(k, PART_ATTENTION, "b_proj.weight", heads, h, 1);
    if (full || no_lora) {
        build_tensor(k, PART_ATTENTION, "g_proj.weight", wide, h, 1);
    } else {
        build_tensor(k, PART_ATTENTION, "g_a_proj.weight", d, h, 1);
        build_tensor(k, PART_ATTENTION, "g_b_proj.weight", wide, d, 1);
    }
    build_tensor(k, PART_ATTENTION, "o_norm.weight", d, 0, 1);
    build_tensor(k, PART_ATTENTION, "o_proj.weight", h, wide, 1);
    return 0;
}

/* ---- gated delta rule ----------------------------------------------------------------------- */

static int build_gdn(struct builder *b, struct outline_block *k)
{
    uint64_t h = b->o->hidden;
    uint32_t nk, nv, dk, dv, kernel;
    int rc;
    if ((rc = build_number(b, 0, KEYS("linear_num_key_heads"), 1, HEADS_MAX, OUTLINE_REQUIRED,
                           &nk)) < 0 ||
        (rc = build_number(b, 0, KEYS("linear_num_value_heads"), 1, HEADS_MAX, OUTLINE_REQUIRED,
                           &nv)) < 0 ||
        (rc = build_number(b, 0, KEYS("linear_key_head_dim"), 1, DIM_MAX, 128, &dk)) < 0 ||
        (rc = build_number(b, 0, KEYS("linear_value_head_dim"), 1, DIM_MAX, 128, &dv)) < 0 ||
        (rc = build_number(b, 0, KEYS("linear_conv_kernel_dim"), 1, 64, 4, &kernel)) < 0)
        return rc;
    uint64_t key = (uint64_t)nk * dk, value = (uint64_t)nv * dv;
    memcpy(k->kind, "gdn", 4);
    k->heads = k->kv_heads = nv;
    k->key_dim = dk;
    k->value_dim = dv;
    k->n_state = (uint64_t)nv * dk * dv;
    build_op(k, OP_GDN);
    build_op(k, OP_SHORT_CONV);
    build_op(k, OP_GATED_NORM);
    build_tensor(k, PART_ATTENTION, "in_proj_qkvz.weight|in_proj_qkv.weight|in_proj_z.weight",
                 2 * key + 2 * value, h, 1);
    build_tensor(k, PART_ATTENTION, "in_proj_ba.weight|in_proj_b.weight|in_proj_a.weight",
                 2ull * nv, h, 1);
    build_tensor(k, PART_ATTENTION, "linear_attn.conv1d.weight", 2 * key + value, kernel, 1);
    build_tensor(k, PART_ATTENTION, "A_log", nv, 0, 1);
    build_tensor(k, PART_ATTENTION, "dt_bias", nv, 0, 1);
    build_tensor(k, PART_ATTENTION, "linear_attn.norm.weight", dv, 0, 1);
    build_tensor(k, PART_ATTENTION, "linear_attn.out_proj.weight", h, value, 1);
    return 0;
}

/* ---- Mamba ---------------------------------------------------------------------------------- */

static int build_mamba2(struct builder *b, struct outline_block *k)
{
    uint64_t h = b->o->hidden;
    uint32_t heads, p, n, groups, kernel;
    bool bias;
    int rc;
    if ((rc = build_number(b, 0, KEYS("mamba_num_heads", "mamba_n_heads"), 1, HEADS_MAX,
                           OUTLINE_REQUIRED, &heads)) < 0 ||
        (rc = build_number(b, 0, KEYS("mamba_head_dim", "mamba_d_head"), 1, DIM_MAX, 64, &p)) < 0 ||
        (rc = build_number(b, 0, KEYS("ssm_state_size", "mamba_d_state"), 1, DIM_MAX, 128,
                           &n)) < 0 ||
        (rc = build_number(b, 0, KEYS("n_groups", "mamba_n_groups"), 1, HEADS_MAX, 1,
                           &groups)) < 0 ||
        (rc = build_number(b, 0, KEYS("conv_kernel", "mamba_d_conv"), 1, 64, 4, &kernel)) < 0 ||
        (rc = build_flag(b, "use_conv_bias", true, &bias)) < 0)
        return rc;
    uint64_t di = (uint64_t)heads * p, conv = di + 2ull * groups * n;
    memcpy(k->kind, "mamba2", 7);
    k->heads = k->kv_heads = heads;
    k->key_dim = n;
    k->value_dim = p;
    k->n_state = di * n;
    build_op(k, OP_MAMBA2);
    build_op(k, OP_SHORT_CONV);
    build_op(k, OP_GATED_NORM);
    build_tensor(k, PART_ATTENTION, "mixer.in_proj.weight|mamba.in_proj.weight", di + conv + heads,
                 h, 1);
    build_tensor(k, PART_ATTENTION, "conv1d.weight", conv, kernel, 1);
    if (bias)
        build_tensor(k, PART_ATTENTION, "conv1d.bias", conv, 0, 1);
    build_tensor(k, PART_ATTENTION, "A_log", heads, 0, 1);
    build_tensor(k, PART_ATTENTION, "mixer.D|mamba.D", heads, 0, 1);
    build_tensor(k, PART_ATTENTION, "dt_bias", heads, 0, 1);
    build_tensor(k, PART_ATTENTION, "mixer.norm.weight|mamba.norm.weight", di, 0, 1);
    build_tensor(k, PART_ATTENTION, "out_proj.weight", h, di, 1);
    return 0;
}

static int build_mamba1(struct builder *b, struct outline_block *k)
{
    uint64_t h = b->o->hidden;
    uint32_t n, expand, rank, kernel;
    int rc;
    if ((rc = build_number(b, 0, KEYS("mamba_d_state"), 1, DIM_MAX, 16, &n)) < 0 ||
        (rc = build_number(b, 0, KEYS("mamba_expand"), 1, 64, 2, &expand)) < 0 ||
        (rc = build_number(b, 0, KEYS("mamba_dt_rank"), 1, WIDTH_MAX, b->o->hidden / 16 + 1,
                           &rank)) < 0 ||
        (rc = build_number(b, 0, KEYS("mamba_d_conv"), 1, 64, 4, &kernel)) < 0)
        return rc;
    uint64_t di = h * expand;
    memcpy(k->kind, "mamba1", 7);
    k->heads = k->kv_heads = 1;
    k->key_dim = n;
    k->value_dim = (uint32_t)di;
    k->n_state = di * n;
    build_op(k, OP_MAMBA1);
    build_op(k, OP_SHORT_CONV);
    build_tensor(k, PART_ATTENTION, "mamba.in_proj.weight", 2 * di, h, 1);
    build_tensor(k, PART_ATTENTION, "mamba.conv1d.weight", di, kernel, 1);
    build_tensor(k, PART_ATTENTION, "mamba.conv1d.bias", di, 0, 1);
    build_tensor(k, PART_ATTENTION, "mamba.x_proj.weight", rank + 2ull * n, di, 1);
    build_tensor(k, PART_ATTENTION, "mamba.dt_proj.weight", di, rank, 1);
    build_tensor(k, PART_ATTENTION, "mamba.dt_proj.bias", di, 0, 1);
    build_tensor(k, PART_ATTENTION, "mamba.A_log", di, n, 1);
    build_tensor(k, PART_ATTENTION, "mamba.D", di, 0, 1);
    build_tensor(k, PART_ATTENTION, "mamba.out_proj.weight", h, di, 1);
    if (build_is(b, "jamba"))
        build_tensor(k, PART_ATTENTION, "mamba.dt_layernorm.weight|mamba.b_layernorm.weight|"
                     "mamba.c_layernorm.weight", rank + 2ull * n, 0, 1);
    return 0;
}

/* ---- linear attention with a fixed decay ---------------------------------------------------- */

static int build_lightning(struct builder *b, struct outline_block *k)
{
    uint64_t h = b->o->hidden;
    uint32_t heads, d;
    int rc;
    if ((rc = build_number(b, 0, KEYS("num_attention_heads"), 1, HEADS_MAX, OUTLINE_REQUIRED,
                           &heads)) < 0 ||
        (rc = build_number(b, 0, KEYS("head_dim"), 1, DIM_MAX, b->o->hidden / heads, &d)) < 0)
        return rc;
    uint64_t wide = (uint64_t)heads * d;
    memcpy(k->kind, "lightning", 10);
    k->heads = k->kv_heads = heads;
    k->key_dim = k->value_dim = d;
    k->n_state = wide * d;
    build_op(k, OP_LIGHTNING);
    build_op(k, OP_GATED_NORM);
    build_tensor(k, PART_ATTENTION, "qkv_proj.weight|query_key_value.weight", 3 * wide, h, 1);
    build_tensor(k, PART_ATTENTION, "output_gate.weight|g_proj.weight", wide, h, 1);
    build_tensor(k, PART_ATTENTION, "self_attn.norm.weight|g_norm.weight", wide, 0, 1);
    build_tensor(k, PART_ATTENTION, "out_proj.weight|dense.weight", h, wide, 1);
    if (!build_is(b, "minimax_m1"))
        outline_note(b->o, "linear attention with a fixed decay is assumed for the layers that "
                     "the keys call linear");
    return 0;
}

int build_linear(struct builder *b, struct outline_block *k)
{
    if (json_get(b->text, "linear_attn_config") || build_has(b, "linear_num_heads") ||
        build_has(b, "kda_lower_bound") || build_has(b, "no_kda_lora"))
        return build_kda(b, k);
    if (build_has(b, "linear_num_value_heads"))
        return build_gdn(b, k);
    if (build_has(b, "mamba_num_heads") || build_has(b, "mamba_n_heads"))
        return build_mamba2(b, k);
    if (build_has(b, "mamba_d_state"))
        return build_mamba1(b, k);
    return build_lightning(b, k);
}

/* ---- shared keys and values, compressed ---------------------------------------------------- */

static void add_compressor(struct outline_block *k, const char *kv, const char *gate,
                           const char *ape, const char *norm, uint64_t wide, uint64_t d,
                           uint64_t ratio, uint64_t h)
{
    build_tensor(k, PART_ATTENTION, kv, wide, h, 1);
    build_tensor(k, PART_ATTENTION, gate, wide, h, 1);
    build_tensor(k, PART_ATTENTION, ape, ratio, wide, 1);
    build_tensor(k, PART_ATTENTION, norm, d, 0, 1);
}

static int add_compressed_indexer(struct builder *b, struct outline_block *k, uint64_t q,
                                  uint64_t ratio)
{
    uint64_t h = b->o->hidden;
    int rc;
    if ((rc = build_number(b, 0, KEYS("index_n_heads"), 1, HEADS_MAX, OUTLINE_REQUIRED,
                           &k->index_heads)) < 0 ||
        (rc = build_number(b, 0, KEYS("index_head_dim"), 1, DIM_MAX, OUTLINE_REQUIRED,
                           &k->index_dim)) < 0 ||
        (rc = build_number(b, 0, KEYS("index_topk"), 1, 1u << 20, OUTLINE_REQUIRED,
                           &k->index_top_k)) < 0)
        return rc;
    build_op(k, OP_INDEXER_POOLED);
    build_tensor(k, PART_ATTENTION, "indexer.wq_b.weight",
                 (uint64_t)k->index_heads * k->index_dim, q, 1);
    build_tensor(k, PART_ATTENTION, "indexer.weights_proj.weight", k->index_heads, h, 1);
    add_compressor(k, "indexer.compressor.wkv.weight", "indexer.compressor.wgate.weight",
                   "indexer.compressor.ape", "indexer.compressor.norm.weight",
                   2ull * k->index_dim, k->index_dim, ratio, h);
    return 0;
}

int build_compressed(struct builder *b, uint32_t l, struct outline_block *k)
{
    uint64_t h = b->o->hidden;
    uint32_t q, groups, rank, ratio;
    int rc;
    if ((rc = build_number(b, 0, KEYS("num_attention_heads"), 1, HEADS_MAX, OUTLINE_REQUIRED,
                           &k->heads)) < 0 ||
        (rc = build_number(b, 0, KEYS("head_dim"), 1, DIM_MAX, OUTLINE_REQUIRED,
                           &k->key_dim)) < 0 ||
        (rc = build_number(b, 0, KEYS("q_lora_rank"), 1, WIDTH_MAX, OUTLINE_REQUIRED, &q)) < 0 ||
        (rc = build_number(b, 0, KEYS("o_groups"), 1, HEADS_MAX, OUTLINE_REQUIRED, &groups)) < 0 ||
        (rc = build_number(b, 0, KEYS("o_lora_rank"), 1, WIDTH_MAX, OUTLINE_REQUIRED,
                           &rank)) < 0 ||
        (rc = build_number(b, 0, KEYS("sliding_window"), 1, 1u << 30, OUTLINE_REQUIRED,
                           &k->window)) < 0 ||
        (rc = build_number(b, l, KEYS("compress_ratios"), 0, 1u << 16, 0, &ratio)) < 0)
        return rc;
    uint64_t d = k->key_dim, wide = k->heads * d;
    memcpy(k->kind, ratio == 0 ? "window" : ratio == 4 ? "csa" : "hca", ratio ? 4 : 7);
    k->kv_heads = 1;
    k->value_dim = k->key_dim;
    build_op(k, OP_SHARED_KV);
    build_op(k, OP_SINKS);
    build_op(k, OP_SLIDING_WINDOW);
    build_op(k, OP_ROTARY);
    build_tensor(k, PART_ATTENTION, "attn.wq_a.weight", q, h, 1);
    build_tensor(k, PART_ATTENTION, "attn.q_norm.weight", q, 0, 1);
    build_tensor(k, PART_ATTENTION, "attn.wq_b.weight", wide, q, 1);
    build_tensor(k, PART_ATTENTION, "attn.wkv.weight", d, h, 1);
    build_tensor(k, PART_ATTENTION, "attn.kv_norm.weight", d, 0, 1);
    build_tensor(k, PART_ATTENTION, "attn.wo_a.weight", rank, wide, 1);
    build_tensor(k, PART_ATTENTION, "attn.wo_b.weight", h, (uint64_t)groups * rank, 1);
    build_tensor(k, PART_ATTENTION, "attn.attn_sink", k->heads, 0, 1);
    if (!ratio)
        return 0;
    bool twice = ratio == 4;
    build_op(k, OP_COMPRESSED_KV);
    build_op(k, OP_YARN);
    add_compressor(k, "attn.compressor.wkv.weight", "attn.compressor.wgate.weight",
                   "attn.compressor.ape", "attn.compressor.norm.weight", twice ? 2 * d : d, d,
                   ratio, h);
    return twice ? add_compressed_indexer(b, k, q, ratio) : 0;
}
