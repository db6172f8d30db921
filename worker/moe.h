/* moe.h - routed experts in a latent width, and the shared experts beside them; model.md part 5
 *
 * The router sees the full hidden state. Tokens travel in the latent width to the ranks that serve
 * their experts and come back as one row per (token, slot); the source weighs and sums them. */
#ifndef WORKER_MOE_H
#define WORKER_MOE_H

#include "worker/dispatch.h"
#include "worker/mlp.h"
#include "worker/shard.h"

/* What a job adds to the router: losses, and room for so many tokens. All zero: nothing. */
enum aux_scope { AUX_MICRO_BATCH, AUX_SEQUENCE, AUX_GLOBAL }; /* a document is a sequence */
struct moe_rules {
    bool   force_balance;   /* choices go to all experts in turn; to measure, not to train */
    double capacity_factor; /* of a micro-batch's choices / experts; 0: no limit */
    enum overflow_kind  overflow;
    enum overflow_order order;
    float  aux_loss, z_loss; /* coefficients; 0: none */
    enum aux_scope aux_scope;
};

enum moe_loss { MOE_AUX_LOSS, MOE_Z_LOSS, MOE_LOSSES };

/* What all MoE layers of a rank share. */
struct moe {
    struct shard *shard;       /* borrowed */
    struct dispatch *dispatch; /* borrowed */
    struct moe_rules rules;
    int64_t piece_rows, kept_rows; /* that come at once, and that stay of a layer, at most */
    uint32_t n_slots, n_sources; /* of this rank; ranks that send rows here */
    const elem **w;            /* 3 n_slots: gates, ups, downs; NULL before moe_init */
    float **dw;                /* 3 times the larger of n_slots and n_sources */
    const uint8_t **packed;    /* 3 n_slots: the same, where experts are packed */
    const elem **a, **b;       /* 3 n_slots: the adapters' beside them */
    float **da, **db;          /* as dw */
    const float *ones;         /* n * top_k on the device, of this step */
    /* Counters on the device: (n_layers, n_experts), (n_layers, n_experts, bins) or NULL. */
    int64_t *tokens, *margins;
    float *margin_lo, *margin_hi; /* n_layers, host */
    int64_t *layer_rows;          /* n_layers, host: served since the counters' reset */
    /* With a capacity: (n_layers, n_experts) and twice (n_layers), host, since the reset. */
    int64_t *served, *rerouted, *dropped;
    int32_t *host_counts;         /* n_experts */
    int32_t *in_turn;             /* (n_in_turn), device: with force_balance, where choices go */
    int64_t n_in_turn;
    /* (n_layers, n_experts), device: the global batch's, for the loss over it. */
    int64_t *choices;
    double  *acc_losses;          /* MOE_LOSSES, device: of a micro-batch, over layers */
    float    loss_weight;         /* of this micro-batch: its labels */
    bool counting;                /* this forward goes into the counters */
    bool capping;                 /* the capacity holds in this pass */
    bool surveying;               /* this forward is there to fill choices */
};

/* Takes the pointers' memory and, on dev, the counters'. -ENOMEM. */
int  moe_init(struct moe *e, const struct model_spec *m, const struct slots *slots,
              const struct moe_rules *rules, bool count_margins, struct device *dev,
              struct err *err);
void moe_fini(struct moe *e, struct device *dev);

/* A piece's rows at the expert side, and what their backward needs. */
struct moe_rows {
    struct dispatch_piece piece; /* unset where these are of all pieces, one after another */
    int64_t n_rows;
    elem   *rows;               /* (n_rows, latent), as they were laid out */
    elem   *gate, *up, *hidden; /* (n_rows, expert_inter) */
};

struct moe_saved {
    const elem *x;              /* (n, hidden), the input; borrowed */
    float   *scores, *weights;  /* (n, n_experts), (n, top_k) */
    float   *logits;            /* (n, n_experts), for the z-loss; else NULL */
    int32_t *ids, *sent;        /* (n, top_k); sent: -1 for what is dropped, NULL: no capacity */
    elem    *latent;            /* (n, latent); x without a latent projection */
    struct dispatch_plan *plan; /* ended by moe_drop */
    bool     keeps;             /* rows, of all pieces: no rank has more than kept_rows. Else each
                                 * piece travels once more in the backward */
    struct moe_rows arrived;    /* those */
    elem    *slots;             /* (n, top_k, latent), as they came back */
    elem    *sum, *normed;      /* (n, latent); normed is sum without a norm */
    float   *sum_rstd;          /* (n) */
    struct mlp_saved shared;
};

/* What depends on the tokens alone; the rest is taken by the forward, when routing is known. */
void moe_carve(struct pass *p, const struct moe *e, enum carve what, struct moe_saved *out);

/* y (n, hidden) += the layer of x; y NULL: only what the backward needs. Collective over the
 * expert group. */
int moe_forward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                const elem *x, elem *y, struct moe_saved *s, struct err *err);

/* What was carved to be made again, from what was kept, and the rows: tokens go to their experts
 * once more. Collective. */
int moe_again(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
              const elem *x, struct moe_saved *s, struct err *err);

/* dx (n, hidden) is assigned; the experts' gradients are sent home. Collective. */
int moe_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                 const elem *dy, elem *dx, struct moe_saved *s, struct err *err);

/* Ends the plan, if there is one. */
void moe_drop(struct moe_saved *s);

/* While counting: what the rows that arrive take, which stays, and, released again, a forward's
 * scratch; and a backward's, and where it is made again, of the rows. */
void moe_count_forward(struct pass *p, const struct moe *e);
void moe_count_backward(struct pass *p, const struct moe *e, bool is_again);

/* ---- to the experts and back (moe_trip.c): the experts are held ---- */

/* A plan for the layer's tokens, whose first piece sets out; and the rest of it, slots from
 * latents. What the rank computes in between it computes while they travel. */
int moe_set_out(struct pass *p, struct moe *e, uint32_t layer, struct moe_saved *s,
                struct err *err);
int moe_travel(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
               struct moe_saved *s, struct err *err);
/* The same where the slots are there already: rows are made again. Only a plan where they are not
 * kept: the backward makes those of each piece. */
int moe_set_out_again(struct pass *p, struct moe *e, uint32_t layer, struct moe_saved *s,
                      struct err *err);
int moe_travel_again(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                     struct moe_saved *s, struct err *err);
/* And backwards: from dy (n, latent), the gradient of the slots' weighted sum, to d_slots
 * (n, top_k, latent). */
int moe_set_out_backward(struct pass *p, struct moe *e, uint32_t layer, const elem *dy,
                         struct moe_saved *s, struct err *err);
int moe_travel_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        const elem *dy, elem *d_slots, struct moe_saved *s, struct err *err);
/* What a forward takes and keeps, also one that is made again, and what a backward takes besides;
 * while counting. */
void moe_trip_count(struct pass *p, const struct moe *e, bool is_again);
void moe_trip_count_backward(struct pass *p, const struct moe *e);

/* ---- the router (moe_router.c) ---- */

void moe_router_carve(struct pass *p, const struct moe_rules *r, struct moe_saved *out);
/* scores, weights, ids and sent from x; nothing where activations are only counted. */
void moe_route(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
               const elem *x, struct moe_saved *s);
/* (n, top_k): where choices go. */
const int32_t *moe_choices_sent(const struct moe *e, const struct moe_saved *s);
/* d_logits (n, n_experts) from d_weights (n, top_k) and the router's losses. While counting: what
 * it takes at most, however many documents there are, and gives back. */
void moe_router_count_backward(struct pass *p, const struct moe *e);
void moe_router_backward(struct pass *p, struct moe *e, uint32_t layer, float *d_logits,
                         const float *d_weights, const struct moe_saved *s);

/* ---- the experts' products (moe_experts.c) ---- */

/* What lies between A and B of the three matrices' adapters, (n_rows, r) each: s A x, and in a
 * backward s B^T dy. */
struct moe_lora_scratch {
    elem  *z[3], *dz[3];
    float *floats;
    elem  *y; /* (n_rows, latent), in a forward */
};

struct moe_scratch { /* of a backward */
    float *d_weights, *d_logits;     /* (n, top_k), (n, n_experts) */
    elem  *d_router;                 /* d_logits as elements */
    elem  *d_latent, *d_sum;         /* (n, latent) */
    elem  *d_slots;                  /* (n, top_k, latent), as they came back */
    elem  *d_rows;                   /* (n_rows, latent) */
    elem  *d_gate, *d_up, *d_hidden; /* (n_rows, expert_inter) */
    struct moe_lora_scratch lora;
};

/* out_rows (n_rows, latent) from a piece's rows r; NULL: only what the backward needs. */
int moe_experts_forward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        elem *out_rows, const struct moe_rows *r, struct err *err);
/* b->d_rows: in, the gradient of what went back; out, of what arrived. Weight gradients are sent
 * home by shard_experts_reduce, once for all pieces of a layer. */
int moe_experts_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                         struct moe_scratch *b, const struct moe_rows *r, struct err *err);

/* ---- one of the three matrices (moe_product.c) ---- */

/* Of the groups of rows at hand; x, dx (n_rows, in); y, dy (n_rows, out). */
struct moe_product {
    enum tensor_role role;
    const int64_t *offsets; /* n_groups + 1 */
    int32_t n_groups;
    int64_t n_rows, in, out;
};

/* Points e's arrays to the matrices in the slots' blocks. */
void moe_product_point(struct moe *e, const struct shard_experts *x, const struct unit_view *u);

/* y = x W^T, dx = dy W, and dx = dy W + dy2 W2, of plain matrices or packed ones. */
void moe_product_forward(const struct pass *p, const struct moe *e, const struct moe_product *w,
                         elem *y, const elem *x);
void moe_product_dx(const struct pass *p, const struct moe *e, const struct moe_product *w,
                    elem *dx, const elem *dy);
void moe_product_dx_pair(const struct pass *p, const struct moe *e, const struct moe_product *w,
                         elem *dx, const elem *dy, const struct moe_product *w2, const elem *dy2);

/* ---- the experts' adapters (moe_lora.c) ---- */

/* Where there are some; else nothing is taken. */
void moe_lora_carve_forward(struct pass *p, int64_t n_rows, struct moe_lora_scratch *out);
void moe_lora_carve_backward(struct pass *p, int64_t n_rows, struct moe_lora_scratch *out);

/* Points e's arrays to the adapters in the slots' blocks; in blocks of gradients, of group i of
 * n. */
void moe_lora_point(const struct pass *p, struct moe *e, const struct shard_experts *x,
                    const struct unit_view *u);
void moe_lora_point_gradients(const struct pass *p, struct moe *e, uint32_t i, uint32_t n,
                              float *block, const struct unit_view *u);

/* y += the adapter's part; more (n_rows, out) is scratch. */
void moe_lora_forward(struct pass *p, struct moe *e, const struct unit_view *u,
                      const struct moe_product *w, elem *y, elem *more, const elem *x,
                      struct moe_lora_scratch *b);
/* What lies between A and B, from dy and x; then dx += the adapter's part; then the gradients, of
 * a shared A apart, which is one for all groups. */
void moe_lora_shrink(struct pass *p, struct moe *e, const struct unit_view *u,
                     const struct moe_product *w, const elem *dy, const elem *x,
                     struct moe_lora_scratch *b);
void moe_lora_dx(struct pass *p, struct moe *e, const struct unit_view *u,
                 const struct moe_product *w, elem *dx, const struct moe_lora_scratch *b);
void moe_lora_gradients(struct pass *p, struct moe *e, const struct unit_view *u,
                        const struct moe_product *w, const elem *dy, const elem *x,
                        const struct moe_lora_scratch *b);
void moe_lora_shared_gradient(struct pass *p, const struct unit_view *u,
                              const struct moe_product *w, const elem *x,
                              const struct moe_lora_scratch *b);

#endif
