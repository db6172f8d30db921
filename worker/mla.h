/* mla.h - latent attention, with or without rotary, an indexer and an output gate; model.md part 3 */
#ifndef WORKER_MLA_H
#define WORKER_MLA_H

#include "worker/dsa.h"

struct mla_saved {
    const float *x;               /* (n, hidden), the layer's input; borrowed */
    float *q_low, *q_rstd, *q_latent; /* (n, q_lora_rank), before and after its norm */
    float *q;                     /* (n, heads, nope + rope) */
    float *low, *kv_rstd, *latent; /* (n, kv_lora_rank), before and after its norm */
    float *k_rope;                /* (n, rope), one for all heads */
    float *kv;                    /* (n, heads, nope + v); NULL with an indexer */
    struct dsa_saved dsa;         /* with an indexer only */
    float *o, *lse;               /* (n, heads, v), (n, heads) */
    float *gate, *gated;          /* (n, heads * v), with an output gate only */
};

void mla_carve(struct pass *p, struct mla_saved *out);

/* y (n, hidden) = beta y + the layer of x. */
void mla_layer_forward(struct pass *p, const struct unit_view *u, const float *x, float *y,
                       float beta, struct mla_saved *s);

/* dx (n, hidden) is assigned; takes scratch and gives it back. */
void mla_layer_backward(struct pass *p, const struct unit_view *u, const float *dy, float *dx,
                        const struct mla_saved *s);

#endif
