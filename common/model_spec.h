/* model_spec.h - a model's structure as data, and its exact counts
 *
 * A model is a list of layers, each of one attention kind and one feed-forward kind, under one
 * residual scheme. hf_config fills it from a config.json; everything else (tensor_map,
 * memory_model, the trainer) reads only this. */
#ifndef COMMON_MODEL_SPEC_H
#define COMMON_MODEL_SPEC_H

#include "common/rotary.h"
#include "common/types.h"

/* Whose names the tensors have; DeepSeek-V3's are Kimi-K2's and DeepSeek-V3.2's too. */
enum model_family { FAMILY_KIMI_K3, FAMILY_KIMI_LINEAR, FAMILY_DEEPSEEK_V3 };

enum attention_kind { ATTENTION_KDA, ATTENTION_MLA };
enum mlp_kind { MLP_DENSE, MLP_MOE };
enum residual_kind { RESIDUAL_PLAIN, RESIDUAL_ATTN_RES };
enum activation_kind { ACTIVATION_SITU, ACTIVATION_SWIGLU };

struct layer_spec {
    enum attention_kind attention;
    enum mlp_kind       mlp;
};

struct model_spec {
    enum model_family  family;
    bool               dense_as_moe; /* dense layers' tensors stand under the MoE's name */
    uint32_t           n_layers;
    struct layer_spec  layers[LAYERS_MAX];
    enum residual_kind residual;
    uint32_t           attn_res_block; /* decoder layers per block */

    uint32_t hidden, vocab;
    float    norm_eps;       /* every RMS norm but the two below */
    float    latent_norm_eps; /* q_a and kv_a norms of MLA */
    float    init_std;

    /* KDA */
    uint32_t kda_heads, kda_head_dim, conv_kernel;
    bool     kda_gate_bounded; /* else the softplus form */
    float    kda_gate_lower_bound;
    bool     kda_gate_full_rank; /* output gate g_proj, else g_a/g_b */

    /* MLA; q_lora_rank 0: a direct q projection */
    uint32_t heads, q_lora_rank, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim;
    bool     mla_output_gate, mla_rotary;
    bool     attention_bias; /* in MLA: of q_a, kv_a and o */
    struct rotary_config rotary; /* with mla_rotary: of the shared key part and its partner */
    bool     rotary_interleaved;

    /* a lightning indexer in every MLA layer; index_top_k 0: none, attention is dense. With
     * mla_rotary the first rotary.dim dims turn, too, by halves */
    uint32_t index_heads, index_head_dim, index_top_k;
    float    index_norm_eps;

    /* feed-forward */
    enum activation_kind activation;
    float    situ_beta, situ_linear_beta;
    uint32_t dense_inter;
    uint32_t n_experts, top_k, expert_inter, n_shared_experts;
    uint32_t latent; /* width the routed experts see: hidden where there is no latent projection */
    bool     latent_moe, latent_norm;
    uint32_t n_expert_groups, top_groups; /* experts are chosen in the best groups; 1: no groups */
    bool     router_softmax; /* scores are a softmax over all experts, else sigmoids */
    bool     renormalize;
    float    routed_scale;

    uint32_t n_mtp_layers; /* next-token layers after the last one: not computed, carried along */
};

struct model_counts {
    uint64_t total, active; /* both embedding matrices counted in both */
    uint64_t attention, mlp_dense, experts, shared, router, latent_projections, norms, embedding;
    uint64_t per_expert;
};

/* Exact parameter counts of the text model (live A_log entries only). */
struct model_counts model_spec_count(const struct model_spec *m);

/* Floating-point operations of a token's forward and backward: two per multiply-add, forward once
 * and backward twice. The embedding is a look-up; attention over other tokens is not counted. */
double model_spec_flops(const struct model_counts *n);
/* Those of its forward in the routed experts of one layer; 0 without any. */
double model_spec_expert_flops(const struct model_spec *m);

#endif
