/* model_spec.c - counts a model's parameters from its structure */
#include "common/model_spec.h"

static uint64_t count_kda(const struct model_spec *m)
{
    uint64_t hidden = m->hidden, d = m->kda_head_dim, h = m->kda_heads, wide = d * h;
    uint64_t gate = m->kda_gate_full_rank ? wide * hidden : d * hidden + wide * d;

    return 3 * wide * hidden + 3 * m->conv_kernel * wide + h + wide + d * hidden + wide * d +
           h * hidden + gate + d + hidden * wide;
}

static uint64_t count_mla(const struct model_spec *m)
{
    uint64_t hidden = m->hidden, h = m->heads, q = m->q_lora_rank, c = m->kv_lora_rank;
    uint64_t q_wide = h * (m->qk_nope_dim + m->qk_rope_dim), v_wide = h * m->v_dim;
    uint64_t query = q ? hidden * q + q + q * q_wide : hidden * q_wide;
    uint64_t biases = m->attention_bias ? q + c + m->qk_rope_dim + hidden : 0;

    return query + biases + hidden * (c + m->qk_rope_dim) + c +
           c * h * (m->qk_nope_dim + m->v_dim) +
           (m->mla_output_gate ? hidden * v_wide : 0) + v_wide * hidden;
}

static uint64_t count_indexer(const struct model_spec *m)
{
    uint64_t hidden = m->hidden, d = m->index_head_dim, h = m->index_heads;

    return m->index_top_k ? m->q_lora_rank * h * d + hidden * d + 2 * d + hidden * h : 0;
}

struct model_counts model_spec_count(const struct model_spec *m)
{
    struct model_counts c = {0};
    bool mixers = m->residual == RESIDUAL_ATTN_RES;
    uint64_t hidden = m->hidden, idle = 0;

    c.per_expert = 3ull * m->latent * m->expert_inter;
    for (uint32_t l = 0; l < m->n_layers; l++) {
        c.attention += m->layers[l].attention == ATTENTION_KDA ? count_kda(m)
                                                               : count_mla(m) + count_indexer(m);
        c.norms += 2 * hidden + (mixers ? 4 * hidden : 0);
        if (m->layers[l].mlp == MLP_DENSE) {
            c.mlp_dense += 3 * hidden * m->dense_inter;
            continue;
        }
        c.experts += m->n_experts * c.per_expert;
        idle += (m->n_experts - m->top_k) * c.per_expert;
        c.shared += 3 * hidden * m->n_shared_experts * m->expert_inter;
        c.router += hidden * m->n_experts + m->n_experts;
        c.latent_projections += (m->latent_moe ? 2 * hidden * m->latent : 0) +
                                (m->latent_norm ? m->latent : 0);
    }
    c.norms += hidden + (mixers ? 2 * hidden : 0);
    c.embedding = 2 * hidden * m->vocab;
    c.total = c.attention + c.mlp_dense + c.experts + c.shared + c.router +
              c.latent_projections + c.norms + c.embedding;
    c.active = c.total - idle;
    return c;
}

double model_spec_expert_flops(const struct model_spec *m)
{
    return 2.0 * 3 * (double)m->top_k * (double)m->latent * (double)m->expert_inter;
}

double model_spec_flops(const struct model_counts *n)
{
    return 6.0 * (double)(n->active - n->embedding / 2);
}
