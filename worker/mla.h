/* mla.h - latent attention, with or without rotary, indexer and output gate; model.md part 3 */
#ifndef WORKER_MLA_H
#define WORKER_MLA_H

#include "worker/dsa.h"

struct mla_saved {
    const elem *x;           /* (n, hidden), the layer's input; borrowed */
    elem  *q_low, *q_latent; /* (n, q_lora_rank), before and after its norm */
    elem  *q;                /* (n, heads, nope + rope) */
    elem  *low, *latent;     /* (n, kv_lora_rank), before and after its norm */
    float *q_rstd, *kv_rstd; /* (n), of those norms */
    elem  *k_rope;           /* (n, rope), one for all heads */
    elem  *kv;               /* (n, heads, nope + v); NULL with an indexer */
    struct dsa_saved dsa;    /* with an indexer only */
    elem  *o;                /* (n, heads, v) */
    float *lse;              /* (n, heads) */
    elem  *gate, *gated;     /* (n, heads * v), with an output gate only */
};

void mla_carve(struct pass *p, enum carve what, struct mla_saved *out);

/* y (n, hidden) = beta y + the layer of x; y NULL: only what a backward needs. */
void mla_layer_forward(struct pass *p, const struct unit_view *u, const elem *x, elem *y,
                       float beta, struct mla_saved *s);

/* What was carved to be made again, from what was kept. */
void mla_layer_again(struct pass *p, const struct unit_view *u, const elem *x,
                     struct mla_saved *s);

/* dx (n, hidden) is assigned; takes scratch and gives it back. */
void mla_layer_backward(struct pass *p, const struct unit_view *u, const elem *dy, elem *dx,
                        const struct mla_saved *s);

/* ---- what segments share, where attention is over chosen keys ---- */

/* Of all rows of the pass: keys, choices and lse, which a forward fills. */
void mla_cut_carve(struct pass *p, struct mla_saved *out);
/* What a backward needs besides; and learning, which comes after all is chosen and goes backwards,
 * too, as the keys' gradients come from later queries. */
void mla_cut_carve_backward(struct pass *p, struct mla_saved *cut);
void mla_cut_carve_learning(struct pass *p, struct mla_saved *cut);

/* The indexer of a segment learns from x (n, hidden), once all is chosen. */
void mla_layer_learn(struct pass *p, const struct unit_view *u, const elem *x,
                     struct mla_saved *s);

#endif
