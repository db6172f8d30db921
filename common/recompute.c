/* recompute.c - the words, and the products that are made again */
#include "common/recompute.h"

#include <string.h>

const char *const recompute_words[RECOMPUTE_WAYS] = {"off", "selective", "full"};

enum recompute recompute_of(const char *word)
{
    int how = RECOMPUTE_WAYS;
    while (--how > RECOMPUTE_OFF && strcmp(word, recompute_words[how]) != 0)
        ;
    return (enum recompute)how;
}

/* Weights that one token meets once more. */
static double attention_again(const struct model_spec *m, const struct layer_spec *l)
{
    double d = m->kda_head_dim, q = m->qk_nope_dim + m->qk_rope_dim;
    if (l->attention == ATTENTION_KDA)
        return d * d * m->kda_heads * (m->kda_gate_full_rank ? 1 : 2);
    return m->heads * (m->q_lora_rank * q + m->kv_lora_rank * (double)(m->qk_nope_dim + m->v_dim));
}

/* Gate and up, not down. */
static double feed_forward_again(const struct model_spec *m, const struct layer_spec *l)
{
    double experts = (double)m->top_k * m->latent + (double)m->n_shared_experts * m->hidden;
    return 2.0 * (l->mlp == MLP_MOE ? experts * m->expert_inter : (double)m->hidden *
                                                                     m->dense_inter);
}

double recompute_flops(const struct model_spec *m, enum recompute how)
{
    struct model_counts counts = model_spec_count(m);
    double n = 0;
    if (how == RECOMPUTE_FULL) /* all but the head runs its forward twice */
        return model_spec_flops(&counts) / 3 - 2.0 * m->vocab * m->hidden;
    for (uint32_t l = 0; how == RECOMPUTE_SELECTIVE && l < m->n_layers; l++)
        n += attention_again(m, &m->layers[l]) + feed_forward_again(m, &m->layers[l]);
    return 2 * n;
}
