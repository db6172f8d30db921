/* kda.h - the Kimi Delta Attention layer; model.md part 2 */
#ifndef WORKER_KDA_H
#define WORKER_KDA_H

#include "worker/layer.h"

/* What a segment hands to the next one where a document goes on: its state (heads, head_dim,
 * head_dim), and the last rows of in (3, conv_kernel - 1, D). One of each a segment, for the
 * next. */
struct kda_cut {
    float *states;
    elem  *rows;
    float *d_states[2]; /* of a backward: of the segment's end and start, in turn */
    elem  *d_rows;
};

/* D = heads * head_dim; all (n, D) unless said. */
struct kda_saved {
    const elem *x;             /* (n, hidden), the layer's input; borrowed */
    elem  *in[3], *pre[3];     /* q, k, v: before the convolution, before its SiLU. Where a
                                * document goes on, rows of the segment before lead */
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

/* What n_segments share, of a forward; and besides, of a backward. */
void kda_cut_carve(struct pass *p, int32_t n_segments, struct kda_cut *out);
void kda_cut_carve_backward(struct pass *p, struct kda_cut *out);

#endif
