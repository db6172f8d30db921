/* a_model.h - a small Kimi K3 for tests: dense KDA, then sparse MLA, then sparse KDA */
#ifndef TESTS_A_MODEL_H
#define TESTS_A_MODEL_H

#include "common/model_spec.h"

static inline struct model_spec a_model(void)
{
    return (struct model_spec){
        .family = FAMILY_KIMI_K3, .n_layers = 3,
        .layers = { { ATTENTION_KDA, MLP_DENSE }, { ATTENTION_MLA, MLP_MOE },
                    { ATTENTION_KDA, MLP_MOE } },
        .residual = RESIDUAL_ATTN_RES, .attn_res_block = 2, .hidden = 32, .vocab = 64,
        .norm_eps = 1e-5f, .latent_norm_eps = 1e-6f, .init_std = 0.02f, .kda_heads = 2,
        .kda_head_dim = 16, .conv_kernel = 4, .kda_gate_bounded = true,
        .kda_gate_lower_bound = -5, .kda_gate_full_rank = true, .heads = 2, .q_lora_rank = 16,
        .kv_lora_rank = 16, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 16,
        .mla_output_gate = true, .activation = ACTIVATION_SITU, .situ_beta = 4,
        .situ_linear_beta = 25, .dense_inter = 48, .n_experts = 8, .top_k = 2, .expert_inter = 24,
        .n_shared_experts = 1, .latent = 16, .latent_moe = true, .latent_norm = true,
        .renormalize = true, .routed_scale = 1,
    };
}

#endif
