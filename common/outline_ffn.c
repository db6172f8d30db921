/* outline_ffn.c - feed-forward blocks: dense ones, and experts with their router */
#include <errno.h>
#include <string.h>

#include "common/outline_build.h"

#define SHARED_MAX 256u

/* A layer of LongCat holds two of each but the experts. */
static uint32_t n_copies(const struct builder *b)
{
    return build_is(b, "longcat") ? 2 : 1;
}

static void add_stream(struct builder *b, struct outline_block *k)
{
    static const struct residual_names names = {
        "mlp_res_norm.weight", "mlp_res_proj.weight",
        "hc_ffn_fn|ffn_hc.fn", "hc_ffn_base|ffn_hc.base", "hc_ffn_scale|ffn_hc.scale",
    };
    uint64_t h = b->o->hidden;
    build_post_norm(b, k, "post_mlp_layernorm.weight|post_feedforward_layernorm.weight|"
                    "post_moe_norm.weight");
    if (build_is(b, "arctic") && k->n_experts)
        build_tensor(k, PART_NORMS, "residual_layernorm.weight", h, 0, 1);
    if (build_is(b, "longcat"))
        build_tensor(k, PART_NORMS, "post_attention_layernorm.1.weight", h, 0, 1);
    build_norm(b, k, b->one_block ? "norm.weight" : "post_attention_layernorm.weight|"
               "pre_ff_layernorm.weight|ffn_norm.weight|norm_attn_norm.norm_2.weight|"
               "pre_mlp_layernorm.weight|pre_feedforward_layernorm.weight|pre_moe_norm.weight|"
               "post_attention_layernorm.0.weight",
               "post_attention_layernorm.bias");
    build_residual(b, k, &names);
}

/* Says whether an expert has two matrices instead of three, too. */
static bool add_activation(struct builder *b, struct outline_block *k)
{
    const char *act = build_text(b, "mlp_hidden_act");
    if (!*act)
        act = build_text(b, "hidden_act");
    if (!*act)
        act = build_text(b, "hidden_activation");
    if (!strcmp(act, "relu2")) {
        build_op(k, OP_RELU2);
        return true;
    }
    if (!strcmp(act, "situ"))
        build_op(k, OP_SITU);
    else if (build_has(b, "swiglu_limit"))
        build_op(k, OP_SWIGLU_CLAMPED);
    else
        build_op(k, !*act || !strcmp(act, "silu") ? OP_SWIGLU : OP_OTHER_ACTIVATION);
    return false;
}

static void add_mlp(struct outline_block *k, enum outline_part part, const char *up,
                    const char *down, uint64_t h, uint64_t inter, bool two)
{
    build_tensor(k, part, up, two ? inter : 2 * inter, h, 1);
    build_tensor(k, part, down, h, inter, 1);
}

static int dense_width(struct builder *b, uint32_t *out)
{
    return build_number(b, 0, KEYS("intermediate_size_mlp", "dense_intermediate_size",
                                   "intermediate_size", "ffn_hidden_size"), 1, WIDTH_MAX,
                        OUTLINE_REQUIRED, out);
}

static void add_dense(struct builder *b, struct outline_block *k, uint64_t width, bool two)
{
    build_op(k, OP_DENSE_MLP);
    add_mlp(k, PART_DENSE, "mlp.gate_proj.weight|mlp.up_proj.weight|mixer.up_proj.weight|"
            "feed_forward.gate_proj.weight|feed_forward.up_proj.weight|mlp.gate_up_proj.weight|"
            "feed_forward.w1.weight|feed_forward.w3.weight|residual_mlp.w1.weight|"
            "residual_mlp.w3.weight|mlps.0.gate_proj.weight|mlps.0.up_proj.weight|"
            "mlps.1.gate_proj.weight|mlps.1.up_proj.weight|block_sparse_moe.gate_proj.weight|"
            "block_sparse_moe.up_proj.weight",
            "mlp.down_proj.weight|mixer.down_proj.weight|feed_forward.down_proj.weight|"
            "feed_forward.w2.weight|residual_mlp.w2.weight|mlps.0.down_proj.weight|"
            "mlps.1.down_proj.weight|block_sparse_moe.down_proj.weight", b->o->hidden, width, two);
}

static int build_dense(struct builder *b, struct outline_block *k)
{
    uint32_t inter;
    int rc = dense_width(b, &inter);
    if (rc < 0)
        return rc;
    memcpy(k->kind, "dense", 6);
    add_dense(b, k, (uint64_t)inter * n_copies(b), add_activation(b, k));
    add_stream(b, k);
    return 0;
}

/* A dense block beside the experts that is no expert: its output is added to theirs. */
static int add_beside(struct builder *b, struct outline_block *k, bool two)
{
    bool residual, moe_block;
    uint32_t inter = b->o->hidden;
    int rc;
    if ((rc = build_flag(b, "residual_moe", false, &residual)) < 0 ||
        (rc = build_flag(b, "enable_moe_block", false, &moe_block)) < 0)
        return rc;
    if (!residual && !moe_block && !build_is(b, "arctic longcat"))
        return 0;
    if (!build_is(b, "arctic") && (rc = dense_width(b, &inter)) < 0)
        return rc;
    add_dense(b, k, (uint64_t)inter * n_copies(b), two);
    if (moe_block) {
        build_tensor(k, PART_ROUTER, "router.scale", b->o->hidden, 0, 1);
        build_tensor(k, PART_ROUTER, "router.per_expert_scale", k->n_experts, 0, 1);
        build_tensor(k, PART_NORMS, "post_feedforward_layernorm_1.weight|"
                     "post_feedforward_layernorm_2.weight|pre_feedforward_layernorm_2.weight",
                     3ull * b->o->hidden, 0, 1);
    }
    return 0;
}

/* ---- router --------------------------------------------------------------------------------- */

static int has_correction(struct builder *b, uint32_t l, bool *out)
{
    static const char *const keys[] = {"use_routing_bias", "moe_router_enable_expert_bias",
                                       "use_expert_bias", "use_moe_router_bias"};
    bool said = false;
    uint32_t n_hash;
    int rc = 0;
    for (size_t i = 0; !said && i < sizeof keys / sizeof *keys; i++)
        if ((rc = build_flag(b, keys[i], false, &said)) < 0)
            return rc;
    if ((rc = build_number(b, 0, KEYS("num_hash_layers"), 0, LAYERS_MAX, 0, &n_hash)) < 0)
        return rc;
    bool noaux = !strcmp(build_text(b, "topk_method"), "noaux_tc");
    *out = (noaux || said ||
            build_is(b, "kimi_ glm4_moe glm_moe_dsa glm5_next nemotron_h deepseek_v3 afmoe "
                     "ernie4_5 longcat step3p")) && l >= n_hash;
    return 0;
}

static int add_router_ops(struct builder *b, uint32_t l, bool biased, struct outline_block *k)
{
    const char *scores[] = {build_text(b, "scoring_func"), build_text(b, "score_function"),
                            build_text(b, "moe_router_activation_func"),
                            build_text(b, "score_func"), build_text(b, "moe_router_activation")};
    uint32_t groups, n_hash;
    int rc;
    if ((rc = build_number(b, 0, KEYS("n_group", "num_expert_group"), 1, EXPERTS_MAX, 1,
                           &groups)) < 0 ||
        (rc = build_number(b, 0, KEYS("num_hash_layers"), 0, LAYERS_MAX, 0, &n_hash)) < 0)
        return rc;
    const char *score = "";
    for (size_t i = 0; !*score && i < sizeof scores / sizeof *scores; i++)
        score = scores[i];
    if (!*score && build_is(b, "ernie4_5 longcat"))
        score = "softmax";
    if (l < n_hash)
        build_op(k, OP_ROUTER_HASH);
    if (!strcmp(score, "sqrtsoftplus"))
        build_op(k, OP_ROUTER_SQRT_SOFTPLUS);
    else if (!strcmp(score, "sigmoid") || (!*score && biased))
        build_op(k, biased ? OP_ROUTER_SIGMOID : OP_ROUTER_SIGMOID_PLAIN);
    else if (build_is(b, "llama4"))
        build_op(k, OP_ROUTER_SIGMOID_PLAIN);
    else
        build_op(k, build_is(b, "gpt_oss granitemoe") ? OP_ROUTER_SOFTMAX_CHOSEN
                                                      : OP_ROUTER_SOFTMAX);
    if (groups > 1)
        build_op(k, OP_ROUTER_GROUPS);
    return 0;
}

static int add_router(struct builder *b, uint32_t l, struct outline_block *k)
{
    bool biased;
    int rc = has_correction(b, l, &biased);
    if (rc < 0 || (rc = add_router_ops(b, l, biased, k)) < 0)
        return rc;
    build_tensor(k, PART_ROUTER, "mlp.gate.weight|block_sparse_moe.gate.weight|mlp.router.weight|"
                 "mixer.gate.weight|ffn.gate.weight|feed_forward.router.weight|gate.wg.weight|"
                 "router.layer.weight|feed_forward.gate.weight|router.gate.weight|"
                 "router.classifier.weight|moe.gate.weight|router.proj.weight|"
                 "primary_router.weight",
                 k->n_experts + k->n_zero, b->o->hidden, 1);
    if (k->n_zero)
        build_op(k, OP_ZERO_EXPERTS);
    if (biased)
        build_tensor(k, PART_ROUTER, "e_score_correction_bias|ffn.gate.bias|gate.expert_bias|"
                     "mlp.expert_bias|feed_forward.expert_bias|moe.router_bias",
                     k->n_experts + k->n_zero, 0, 1);
    if (build_is(b, "gpt_oss"))
        build_tensor(k, PART_ROUTER, "mlp.router.bias", k->n_experts, 0, 1);
    return 0;
}

/* ---- experts -------------------------------------------------------------------------------- */

/* Width of all shared experts together: stated, or a number of experts of the routed width. */
static int shared_width(struct builder *b, uint32_t l, uint32_t inter, uint64_t *out)
{
    const uint32_t unsaid = WIDTH_MAX + 1;
    uint32_t n, width;
    int rc;
    if ((rc = build_number(b, l, KEYS("n_shared_experts", "num_shared_experts",
                                      "num_shared_expert", "moe_num_shared_experts"), 0,
                           SHARED_MAX, build_is(b, "llama4") ? 1 : 0, &n)) < 0 ||
        (rc = build_number(b, l, KEYS("shared_expert_intermediate_size",
                                      "moe_shared_expert_intermediate_size",
                                      "shared_intermediate_size", "share_expert_dim"), 0,
                           WIDTH_MAX, unsaid, &width)) < 0)
        return rc;
    bool stated = width != unsaid;
    *out = stated ? (uint64_t)width * (n && build_is(b, "bailing") ? n : 1) : (uint64_t)n * inter;
    return 0;
}

static int add_shared(struct builder *b, uint32_t l, bool two, struct outline_block *k)
{
    uint64_t h = b->o->hidden, width;
    int rc = shared_width(b, l, k->expert_inter, &width);
    if (rc < 0 || width == 0)
        return rc;
    build_op(k, OP_SHARED_EXPERT);
    add_mlp(k, PART_SHARED,
            "shared_experts.gate_proj.weight|shared_experts.up_proj.weight|"
            "shared_expert.gate_proj.weight|shared_expert.up_proj.weight|"
            "shared_mlp.gate_proj.weight|shared_mlp.up_proj.weight|shared_experts.w1.weight|"
            "shared_experts.w3.weight|shared_mlp.gate_and_up_proj.weight|"
            "share_expert.gate_proj.weight|share_expert.up_proj.weight|"
            "shared_mlp.input_linear.weight",
            "shared_experts.down_proj.weight|shared_expert.down_proj.weight|"
            "shared_mlp.down_proj.weight|shared_experts.w2.weight|share_expert.down_proj.weight|"
            "shared_mlp.output_linear.weight", h, width, two);
    if (build_is(b, "qwen2_moe qwen3_next qwen3_5")) {
        build_op(k, OP_SHARED_EXPERT_GATE);
        build_tensor(k, PART_SHARED, "shared_expert_gate.weight", 1, h, 1);
    }
    return 0;
}

/* Projections into and out of the width that routed experts see. */
static int add_latent(struct builder *b, struct outline_block *k)
{
    uint64_t h = b->o->hidden, w;
    bool norm;
    int rc;
    if ((rc = build_number(b, 0, KEYS("routed_expert_hidden_size", "moe_latent_size"), 1,
                           WIDTH_MAX, 0, &k->expert_in)) < 0 ||
        (rc = build_flag(b, "latent_moe_use_norm", false, &norm)) < 0)
        return rc;
    if (!k->expert_in) {
        k->expert_in = b->o->hidden;
        return 0;
    }
    w = k->expert_in;
    build_op(k, OP_LATENT_EXPERTS);
    build_tensor(k, PART_LATENT, "routed_expert_down_proj.weight|fc1_latent_proj.weight", w, h, 1);
    build_tensor(k, PART_LATENT, "routed_expert_up_proj.weight|fc2_latent_proj.weight", h, w, 1);
    if (norm)
        build_tensor(k, PART_LATENT, "routed_expert_norm.weight", w, 0, 1);
    return 0;
}

static void add_experts(struct builder *b, bool two, struct outline_block *k)
{
    uint64_t w = k->expert_in, m = k->expert_inter;
    build_op(k, OP_EXPERTS);
    k->expert_matrices = two ? 2 : 3;
    build_tensor(k, PART_EXPERTS,
                 "experts.{E}.gate_proj.weight|experts.{E}.up_proj.weight|experts.{E}.w1.weight|"
                 "experts.{E}.w3.weight|experts.gate_up_proj|experts.gate_up_proj.weight|"
                 "block_sparse_moe.input_linear.weight|experts.mlp.w1|experts.mlp.v1|"
                 "moe.gate_proj.weight|moe.up_proj.weight", two ? m : 2 * m, w, k->n_experts);
    build_tensor(k, PART_EXPERTS, "experts.{E}.down_proj.weight|experts.{E}.w2.weight|"
                 "experts.down_proj|experts.down_proj.weight|block_sparse_moe.output_linear.weight|"
                 "experts.mlp.w2|moe.down_proj.weight",
                 w, m, k->n_experts);
    if (build_is(b, "gpt_oss")) {
        build_op(k, OP_EXPERT_BIAS);
        build_tensor(k, PART_EXPERTS, "experts.gate_up_proj_bias", 2 * m, 0, k->n_experts);
        build_tensor(k, PART_EXPERTS, "experts.down_proj_bias", w, 0, k->n_experts);
    }
}

/* Choices that fall on nothing cost nothing: of an even load so many are left. */
static void note_zero(struct builder *b, struct outline_block *k)
{
    uint32_t all = k->n_experts + k->n_zero, chosen = k->top_k;
    if (!k->n_zero)
        return;
    k->top_k = chosen * k->n_experts / all ? chosen * k->n_experts / all : 1;
    outline_note(b->o, "%u of %u choices compute nothing: active are %u of %u chosen experts, as "
                 "on average", k->n_zero, all, k->top_k, chosen);
}

static int build_moe(struct builder *b, uint32_t l, struct outline_block *k)
{
    int rc;
    if ((rc = build_number(b, l, BUILD_N_EXPERTS, 1, EXPERTS_MAX, OUTLINE_REQUIRED,
                           &k->n_experts)) < 0 ||
        (rc = build_number(b, l, KEYS("num_experts_per_tok", "num_experts_per_token",
                                      "experts_per_token", "moe_topk", "moe_k", "moe_top_k",
                                      "top_k_experts", "moe_num_active_primary_experts"),
                           1, EXPERTS_MAX, OUTLINE_REQUIRED, &k->top_k)) < 0 ||
        (rc = build_number(b, l, KEYS("moe_intermediate_size", "expert_ffn_hidden_size",
                                      "moe_ffn_hidden_size", "intermediate_size",
                                      "ffn_hidden_size"), 1, WIDTH_MAX, OUTLINE_REQUIRED,
                           &k->expert_inter)) < 0 ||
        (rc = build_number(b, 0, KEYS("zero_expert_num"), 0, EXPERTS_MAX, 0, &k->n_zero)) < 0)
        return rc;
    if (k->top_k > k->n_experts)
        return err_set(b->err, -EINVAL, "key 'num_experts_per_tok' is %u, but there are %u "
                       "experts", k->top_k, k->n_experts);
    memcpy(k->kind, "moe", 4);
    bool two = add_activation(b, k);
    if ((rc = add_router(b, l, k)) < 0 || (rc = add_latent(b, k)) < 0 ||
        (rc = add_shared(b, l, two, k)) < 0 || (rc = add_beside(b, k, two)) < 0)
        return rc;
    note_zero(b, k);
    add_experts(b, two, k);
    add_stream(b, k);
    return 0;
}

int build_ffn(struct builder *b, uint32_t l, struct outline_block *k)
{
    return b->ffn[l] == FFN_MOE ? build_moe(b, l, k) : build_dense(b, k);
}
