/* head.h - from the last running sum to the loss: the final mix, the final norm, the vocabulary */
#ifndef WORKER_HEAD_H
#define WORKER_HEAD_H

#include "worker/decoder.h"

struct head {
    struct mix mix;
    const elem *from; /* (n, hidden), what is normed: the mix, or the running sum without one */
    elem  *mixed;     /* NULL without a bank */
    elem  *x;         /* (n, hidden): normed */
    float *rstd;      /* (n) */
    elem  *d_x, *d_mixed;
};

/* Takes what it needs from the activations; the caller releases it. */
int head_forward(struct pass *p, const struct unit_view *u, struct residuals *r, struct head *out,
                 struct err *err);

/* Adds the losses of rows with a label >= 0 to the pass's; labels on the device. */
void head_loss_only(struct pass *p, const struct unit_view *u, const struct head *h,
                    const int32_t *labels);

/* The same, with gradients: assigns r->d_p and the bank's, adds the unit's. */
void head_loss_backward(struct pass *p, const struct unit_view *u, struct residuals *r,
                        const struct head *h, const int32_t *labels);

/* out_logits (n, vocab) in host memory. */
int head_logits(struct pass *p, const struct unit_view *u, const struct head *h,
                float *out_logits, struct err *err);

/* While counting: what a forward takes, released again. */
void head_count(struct pass *p);

#endif
