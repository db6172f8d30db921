/* decoder.h - one decoder layer and the residual scheme around it; model.md 1.2
 *
 * Between layers travels a running sum p. With attention residuals the input of every sublayer is
 * a mix of the bank (the running sums at the starts of blocks) and p; a block's first layer pushes
 * p into the bank and begins a new sum. A pushed p is not copied: the bank is a list of the p of
 * those layers, so keeping each layer's p keeps everything that a recomputation needs. */
#ifndef WORKER_DECODER_H
#define WORKER_DECODER_H

#include "worker/kda.h"
#include "worker/mla.h"
#include "worker/moe.h"

struct residuals {
    elem **p;          /* n_layers + 1 running sums, each (n, hidden): before layer l, and last */
    elem **d_bank;     /* n_blocks gradients of bank rows, each (n, hidden) */
    elem  *d_p;        /* gradient of the running sum, moving towards the first layer */
    const elem **rows; /* n_blocks + 1, the arguments of one mix */
    elem **d_rows;
};

/* Bank rows that are there when the attention of layer l mixes. The final mix is that of a layer
 * n_layers. */
uint32_t bank_rows_attention(const struct model_spec *m, uint32_t l);

/* One mix of the first n_bank bank rows and p. */
struct mix {
    enum tensor_role norm, proj;
    uint32_t n_bank;
    const elem *p;  /* (n, hidden) */
    float *weights; /* (n, n_bank + 1), kept for the backward */
};
void mix_forward(struct pass *p, const struct unit_view *u, struct residuals *r,
                 const struct mix *mix, elem *y);
/* Adds to the bank's gradients and to d_p. */
void mix_backward(struct pass *p, const struct unit_view *u, struct residuals *r,
                  const struct mix *mix, const elem *dy, elem *d_p);

struct decoder_saved {
    bool makes_again; /* carved as selective recomputation keeps it */
    struct activations_mark mark; /* where what it keeps begins */
    struct mix attention_mix, mlp_mix;
    elem  *h, *x;            /* input of the attention: mixed (NULL: p itself), then normed */
    elem  *mid;              /* the running sum after the attention */
    elem  *m, *y;            /* input of the feed-forward, likewise */
    float *h_rstd, *m_rstd;  /* (n), of those norms */
    struct kda_saved kda;
    struct mla_saved mla;
    struct mlp_saved mlp;
    struct moe_saved moe;
};

/* CARVE_ALL, or CARVE_KEPT: forward and backward take the rest when they come to it. */
void decoder_carve(struct pass *p, const struct moe *e, uint32_t l, enum carve what,
                   struct decoder_saved *out);

/* out (n, hidden), the next running sum, or NULL: only what the backward needs. Collective. */
int decoder_forward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                    struct residuals *r, elem *out, struct decoder_saved *s, struct err *err);

/* Moves r->d_p from the layer's output to its input, and ends the plan of its rows. Collective. */
int decoder_backward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                     struct residuals *r, struct decoder_saved *s, struct err *err);

/* Where the gradient of the running sum is that came into layer l: r->d_p becomes it. */
void decoder_pass_on(const struct model_spec *m, uint32_t l, struct residuals *r);

/* The indexer of a segment's layer learns, once all is chosen. */
int decoder_learn(struct pass *p, uint32_t l, const struct unit_view *u, struct residuals *r,
                  struct err *err);

/* While counting: what a forward of layer l takes, of which stays what is kept; and what its
 * backward takes, released again. */
void decoder_count_forward(struct pass *p, const struct moe *e, uint32_t l, enum carve what,
                           struct decoder_saved *out);
void decoder_count_backward(struct pass *p, const struct moe *e, uint32_t l,
                            struct decoder_saved *s);

#endif
