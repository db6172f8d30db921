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
static double experts_again(const struct model_spec *m, const struct layer_spec *l)
{
    return l->mlp == MLP_MOE ? 2.0 * m->top_k * m->latent * m->expert_inter : 0;
}

static double dense_again(const struct model_spec *m, const struct layer_spec *l)
{
    double shared = (double)m->n_shared_experts * m->expert_inter;
    return 2.0 * m->hidden * (l->mlp == MLP_MOE ? shared : m->dense_inter);
}

double recompute_flops(const struct model_spec *m, enum recompute how, bool by_piece)
{
    struct model_counts counts = model_spec_count(m);
    double n = 0;
    for (uint32_t l = 0; l < m->n_layers; l++) {
        if (how == RECOMPUTE_SELECTIVE)
            n += attention_again(m, &m->layers[l]) + dense_again(m, &m->layers[l]);
        if (how == RECOMPUTE_SELECTIVE || (how == RECOMPUTE_FULL && by_piece))
            n += experts_again(m, &m->layers[l]);
    }
    if (how == RECOMPUTE_FULL) /* all but the head runs its forward twice */
        return 2 * n + model_spec_flops(&counts) / 3 - 2.0 * m->vocab * m->hidden;
    return 2 * n;
}
