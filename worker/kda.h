/* kda.h - the Kimi Delta Attention layer; model.md part 2 */
#ifndef WORKER_KDA_H
#define WORKER_KDA_H

#include "worker/layer.h"

/* What a piece of a document hands to the next one, or its gradients to the one before. NULL:
 * nothing, there is no such piece. */
struct kda_ends {
    float *state; /* (heads, head_dim, head_dim) */
    elem  *rows;  /* (3, conv_kernel - 1, D): the last ones of in */
};

/* D = heads * head_dim; all (n, D) unless said. */
struct kda_saved {
    const elem *x;             /* (n, hidden), the layer's input; borrowed */
    elem  *in[3], *pre[3];     /* q, k, v: before the convolution, before its SiLU. In a piece that
                                * is not the first, conv_kernel - 1 rows of the one before lead */
    elem  *q, *k, *v;          /* q, k normalised per head; v has such rows, too */
    float *q_rstd, *k_rstd;    /* (n, heads) */
    elem  *f;                  /* (n, head_dim) */
    elem  *z;                  /* raw decay */
    float *decay;              /* its log */
    elem  *beta;               /* (n, heads) */
    elem  *gate_low;           /* (n, head_dim), low-rank gate only */
    elem  *gate;               /* before its sigmoid */
    elem  *o, *gated;
    float *o_rstd;             /* (n, heads) */
    float *core;               /* what the recurrence keeps */
    struct kda_ends before;    /* of the piece before; set by who has segments, as the two below */
    struct kda_ends after;     /* what this one hands on; state NULL: it is known */
    struct kda_ends gradients; /* of after, which a backward makes those of before */
};

void kda_carve(struct pass *p, enum carve what, struct kda_saved *out);

/* y (n, hidden) = beta y + the layer of x; y NULL: only what a backward needs. */
void kda_layer_forward(struct pass *p, const struct unit_view *u, const elem *x, elem *y,
                       float beta, struct kda_saved *s);

/* What was carved to be made again, from what was kept. Takes scratch and gives it back. */
void kda_layer_again(struct pass *p, const struct unit_view *u, const elem *x,
                     struct kda_saved *s);

/* dx (n, hidden) is assigned; takes scratch and gives it back. */
void kda_layer_backward(struct pass *p, const struct unit_view *u, const elem *dy, elem *dx,
                        const struct kda_saved *s);

/* ---- the same in segments: only what pieces hand on is kept, and all else made again ---- */

struct kda_cut {
    float *states; /* (links, heads, head_dim, head_dim) */
    elem  *rows;   /* (links, 3, conv_kernel - 1, D) */
};

/* The pass has segments. */
void kda_cut_carve(struct pass *p, struct kda_cut *out);
void kda_cut_forward(struct pass *p, const struct unit_view *u, const elem *x, elem *y,
                     float beta, const struct kda_cut *cut);
void kda_cut_backward(struct pass *p, const struct unit_view *u, const elem *x, const elem *dy,
                      elem *dx, const struct kda_cut *cut);

#endif
