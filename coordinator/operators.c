/* operators.c - one row per operator: fused, composed of others, or missing with its definition */
#include "coordinator/operators.h"

#include <stddef.h>

#define FUSED(text)    .status = OPERATOR_FUSED, .note = text
#define COMPOSED(text) .status = OPERATOR_COMPOSED, .note = text
#define MISSING(text, definition, where) \
    .status = OPERATOR_MISSING, .note = text, .formula = definition, .source = where

static const struct operator_fact facts[OUTLINE_OPS] = {
    [OP_EMBEDDING] = {"embedding", FUSED("kernels/embedding")},
    [OP_HEAD] = {"linear_cross_entropy", FUSED("head and loss without whole logits")},
    [OP_TIED_HEAD] = {"tied_head", MISSING("embedding and head are one matrix",
        "logits = E h with E the embedding table; its gradient is the sum of the head's and of the "
        "look-ups' gradients", "model with tie_word_embeddings true; one parameter in two units")},
    [OP_RMS_NORM] = {"rms_norm", FUSED("kernels/rms_norm")},
    [OP_RMS_NORM_ZERO_CENTRED] = {"rms_norm_zero_centred", COMPOSED("rms_norm with 1 + w; decay "
        "pulls w to 0")},
    [OP_LAYER_NORM] = {"layer_norm", FUSED("kernels/layer_norm")},
    [OP_SCALED_STREAM] = {"scaled_stream", MISSING("constant factors on residuals and logits",
        "x += a f(norm(x)) with a constant a per kind of block; logits divided by a constant; "
        "embedding multiplied by one", "transformers models/granitemoe, models/minimax")},
    [OP_ATTN_RES] = {"attn_res", FUSED("kernels/attn_res")},
    [OP_HYPER_CONNECTIONS] = {"hyper_connections", MISSING("n parallel residual streams",
        "n streams X; per block: z = sum_i a_i X_i, X = C X + b f(norm(z)), where a, b and the "
        "doubly stochastic C (by Sinkhorn steps) are functions of RMS(vec X) by a matrix "
        "[n^2 + 2n, nH], a base and three scales", "transformers models/deepseek_v4, "
        "models/glm5_next")},
    [OP_KDA_BOUNDED] = {"kda_bounded", FUSED("kernels/kda, decay by a bounded sigmoid")},
    [OP_KDA_SOFTPLUS] = {"kda_softplus", FUSED("kernels/kda, decay by a softplus")},
    [OP_GDN] = {"gated_delta_rule", COMPOSED("kda with one decay repeated over the channels; key "
        "heads repeated over their value heads")},
    [OP_MAMBA1] = {"mamba1", MISSING("selective scan with a matrix A per channel",
        "D_t = softplus(W_dt x_dt + b); S_t = exp(-exp(A_log) D_t) S_(t-1) + D_t B_t x_t; "
        "y_t = C_t S_t + D x_t, per channel with a state of d_state; out = W_out (y silu(z))",
        "transformers models/jamba")},
    [OP_MAMBA2] = {"mamba2", MISSING("state space with one decay per head",
        "D_t = softplus(dt + dt_bias); S_t = exp(a D_t) S_(t-1) + D_t x_t B_t^T, a = -exp(A_log); "
        "y_t = S_t C_t + D x_t; out = W_out (w groupRMS(y silu(z))). Chunked as KDA without the "
        "triangular solve: query C, key B, value D_t x, scale 1",
        "transformers models/nemotron_h")},
    [OP_LIGHTNING] = {"lightning_attention", MISSING("linear attention with a constant decay",
        "S_t = exp(-s_h) S_(t-1) + k_t v_t^T; o_t = S_t^T q_t, with a slope s_h per head and "
        "layer; out = W_out (norm(o) sigmoid(W_g x)). Chunked as KDA without beta and solve",
        "transformers models/minimax")},
    [OP_SHORT_CONV] = {"short_conv", FUSED("kernels/short_conv")},
    [OP_GATED_NORM] = {"gated_rms_norm", FUSED("kernels/gated_rms_norm")},
    [OP_MLA] = {"latent_attention", FUSED("kernels/attention")},
    [OP_MLA_GATE] = {"attention_output_gate", FUSED("kernels/sigmoid_gate")},
    [OP_GQA] = {"grouped_query_attention", MISSING("heads that share keys and values",
        "o_h = softmax(q_h K_g(h)^T d^-0.5 + causal) V_g(h), g(h) = floor(h / (heads / kv heads)); "
        "dK and dV of a group are sums over its heads", "transformers models/mixtral")},
    [OP_GQA_GATE] = {"query_gate", COMPOSED("q_proj gives query and gate; sigmoid_gate on the "
        "output")},
    [OP_QK_NORM_HEAD] = {"qk_norm_head", COMPOSED("rms_norm on rows of one head")},
    [OP_QK_NORM_ALL] = {"qk_norm_all", COMPOSED("rms_norm on the whole projection")},
    [OP_QK_NORM_PLAIN] = {"qk_norm_plain", COMPOSED("l2_norm with a constant scale")},
    [OP_ROTARY] = {"rotary", FUSED("kernels/rotary, interleaved and half-split")},
    [OP_ROTARY_PARTIAL] = {"rotary_partial", COMPOSED("rotary on the first dims of a head")},
    [OP_ROTARY_SCALED] = {"rotary_scaled", COMPOSED("rotary with another table of angles")},
    [OP_YARN] = {"rotary_yarn", FUSED("kernels/rotary with YaRN's table")},
    [OP_ATTENTION_BIAS] = {"attention_bias", MISSING("biases of projections",
        "y = W x + b; db = sum of dy over tokens", "transformers models/gpt_oss, models/glm4_moe")},
    [OP_CLIP_QKV] = {"clip_qkv", MISSING("a clamp of queries, keys and values",
        "y = min(max(x, -c), c); the gradient is 0 outside", "transformers models/olmoe")},
    [OP_SLIDING_WINDOW] = {"sliding_window", MISSING("attention to the last keys only",
        "token t sees keys t - W + 1 .. t", "transformers models/gpt_oss")},
    [OP_CHUNKED_ATTENTION] = {"chunked_attention", MISSING("attention inside chunks",
        "token t sees keys floor(t / C) C .. t", "transformers models/llama4")},
    [OP_SINKS] = {"attention_sinks", MISSING("a learned logit per head in the softmax",
        "p = softmax over [s, sink_h], the sink's share is dropped; "
        "d sink_h = -sum p_sink (do . o)",
        "transformers models/gpt_oss")},
    [OP_SHARED_KV] = {"shared_key_value", MISSING("one vector is key and value of all heads",
        "kv = rotary(RMS(W x)); o_h = softmax(q_h kv^T) kv, its last dims turned back; grouped "
        "output projection", "transformers models/deepseek_v4")},
    [OP_COMPRESSED_KV] = {"compressed_keys", MISSING("windows of tokens pooled into one key",
        "c_w = RMS(sum_j softmax_j(W_g x_j + ape_j) W x_j) per channel, appended to the keys, "
        "visible once its window is complete", "transformers models/deepseek_v4")},
    [OP_INDEXER] = {"indexer", FUSED("kernels/index_select")},
    [OP_INDEXER_SHARED] = {"indexer_shared", MISSING("layers that use an earlier layer's choice",
        "the set of chosen keys of the nearest earlier layer that has an indexer; it must outlive "
        "that layer, also when layers are computed again", "transformers models/glm_moe_dsa")},
    [OP_INDEXER_POOLED] = {"indexer_pooled", MISSING("index keys shared by pools of tokens",
        "kp_p = sum_j softmax_j(g_j + ape_j) k_j per channel over the K tokens of a pool; scores "
        "and choice are of pools, every token of a chosen pool is attended",
        "transformers models/glm5_next")},
    [OP_SPARSE_ATTENTION] = {"sparse_attention", FUSED("kernels/sparse_attention")},
    [OP_DENSE_MLP] = {"dense_mlp", COMPOSED("products and the activation")},
    [OP_ROUTER_SIGMOID] = {"router_sigmoid", FUSED("kernels/router, with a correction bias")},
    [OP_ROUTER_SIGMOID_PLAIN] = {"router_sigmoid_plain", COMPOSED("router with a bias of zero")},
    [OP_ROUTER_GROUPS] = {"router_groups", FUSED("kernels/router, the best groups first")},
    [OP_ROUTER_SOFTMAX] = {"router_softmax", FUSED("kernels/router, scores by a softmax")},
    [OP_ROUTER_SOFTMAX_CHOSEN] = {"router_softmax_chosen", MISSING("a softmax over the chosen",
        "the k greatest logits are chosen; weights = softmax over these k",
        "transformers models/gpt_oss, models/granitemoe")},
    [OP_ROUTER_SQRT_SOFTPLUS] = {"router_sqrt_softplus", MISSING("scores sqrt(softplus(logit))",
        "s = sqrt(softplus(logit)); choice by s + bias; weights s of the chosen over their sum",
        "transformers models/deepseek_v4")},
    [OP_ROUTER_HASH] = {"router_hash", MISSING("a table from token ids to experts",
        "experts = table[token id]; weights from the scores of these experts",
        "transformers models/deepseek_v4")},
    [OP_EXPERTS] = {"experts", FUSED("kernels/grouped_linear, dispatch and combine")},
    [OP_EXPERT_BIAS] = {"expert_bias", MISSING("biases of experts' products",
        "y = W_2 act(W_1 x + b_1) + b_2 per expert; db = sums over the expert's rows",
        "transformers models/gpt_oss")},
    [OP_LATENT_EXPERTS] = {"latent_experts", COMPOSED("products around the experts")},
    [OP_SHARED_EXPERT] = {"shared_expert", COMPOSED("a dense block beside the experts")},
    [OP_SHARED_EXPERT_GATE] = {"shared_expert_gate", MISSING("a gate per token on the shared "
        "expert", "y += sigmoid(w . x) shared(x)", "transformers models/qwen3_next")},
    [OP_SWIGLU] = {"swiglu", FUSED("kernels/swiglu")},
    [OP_SWIGLU_CLAMPED] = {"swiglu_clamped", MISSING("SwiGLU with a clamp",
        "a = min(a, c), u = min(max(u, -c), c) before the product; gpt_oss: a sigmoid(1.702 a) "
        "(u + 1)", "transformers models/gpt_oss, models/glm5_next")},
    [OP_SITU] = {"situ", FUSED("kernels/situ")},
    [OP_RELU2] = {"relu2", MISSING("squared ReLU, experts of two matrices",
        "y = W_down max(W_up x, 0)^2", "transformers models/nemotron_h")},
    [OP_GATED_CONV] = {"gated_convolution", MISSING("a short convolution between two gates",
        "b, c, u = W_in x; y = W_out (c conv(b u)), a causal convolution per channel without an "
        "activation", "transformers models/lfm2_moe")},
    [OP_INDEXER_BLOCKS] = {"indexer_blocks", MISSING("an indexer that chooses blocks of keys",
        "score of a block = max over its keys of iq_t . ik_s, per group of heads; the best blocks "
        "and the token's own are attended", "the model's own code (MiniMax-M3)")},
    [OP_ZERO_EXPERTS] = {"zero_experts", MISSING("experts that compute nothing",
        "a choice beyond the last expert adds w x instead of w expert(x)",
        "transformers models/longcat_flash")},
    [OP_SOFT_CAP] = {"soft_cap", MISSING("a smooth bound on scores or logits",
        "y = c tanh(x / c); dx = dy (1 - (y / c)^2)", "transformers models/gemma2")},
    [OP_POST_NORM] = {"post_norm", MISSING("a norm of a block's output before it is added",
        "x += RMS(f(RMS(x)))", "transformers models/gemma2, models/afmoe")},
    [OP_FACTORED_QUERY] = {"factored_query", COMPOSED("a product, a norm and a product to all "
        "heads")},
    [OP_OTHER_ACTIVATION] = {"activation", MISSING("an activation that is not built",
        "as the key hidden_act says", "the model's own code")},
};

const struct operator_fact *operator_fact(enum outline_op op)
{
    return &facts[op];
}

const char *operator_status_name(enum operator_status status)
{
    static const char *const names[] = {"fused", "composed", "missing"};
    return names[status];
}

uint32_t operator_layers(const struct outline *o, enum outline_op op)
{
    uint64_t bit = 1ull << op;
    uint32_t n = (o->top.ops & bit) != 0;
    for (uint32_t l = 0; l < o->n_layers; l++) {
        uint16_t mixer = o->layers[l].mixer, ffn = o->layers[l].ffn;
        n += (mixer != OUTLINE_NONE && o->blocks[mixer].ops & bit) ||
             (ffn != OUTLINE_NONE && o->blocks[ffn].ops & bit);
    }
    return n;
}

uint32_t operators_missing(const struct outline *o)
{
    uint32_t n = 0;
    for (int op = 0; op < OUTLINE_OPS; op++)
        n += facts[op].status == OPERATOR_MISSING && operator_layers(o, (enum outline_op)op) > 0;
    return n;
}
