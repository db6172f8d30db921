/* moe_experts.c - the products of the experts that a rank serves, and their weight gradients
 *
 * Each slot's rows lie together. In deterministic mode weight gradients are made source by source,
 * so that it does not matter which rank serves an expert. */
#include "worker/moe.h"

#include "kernels/spans.h"
#include "worker/partials.h"
#include "worker/phases.h"

/* Where a block's three matrices begin, as tensor_map.h lays them out, or its adapters. */
static void point_gradients(const struct pass *p, struct moe *e, uint32_t i, uint32_t n,
                            float *block, const struct unit_view *u)
{
    if (p->lora.r) {
        moe_lora_point_gradients(p, e, i, n, block, u);
        return;
    }
    e->dw[i] = block + u->at[ROLE_EXPERT_GATE];
    e->dw[n + i] = block + u->at[ROLE_EXPERT_UP];
    e->dw[2 * n + i] = block + u->at[ROLE_EXPERT_DOWN];
}

struct products {
    struct moe_product gate, up, down;
};

static struct products products_of(const struct pass *p, const int64_t *offsets, int32_t n_groups,
                                   int64_t n_rows)
{
    int64_t latent = p->spec->latent, inter = p->spec->expert_inter;
    return (struct products){
        .gate = { ROLE_EXPERT_GATE, offsets, n_groups, n_rows, latent, inter },
        .up = { ROLE_EXPERT_UP, offsets, n_groups, n_rows, latent, inter },
        .down = { ROLE_EXPERT_DOWN, offsets, n_groups, n_rows, inter, latent },
    };
}

static void products_forward(struct pass *p, struct moe *e, const struct unit_view *u,
                             const struct products *w, elem *out_rows, const struct moe_rows *r,
                             struct moe_lora_scratch *b)
{
    moe_product_forward(p, e, &w->gate, r->gate, r->rows);
    moe_lora_forward(p, e, u, &w->gate, r->gate, r->hidden, r->rows, b);
    moe_product_forward(p, e, &w->up, r->up, r->rows);
    moe_lora_forward(p, e, u, &w->up, r->up, r->hidden, r->rows, b);
    mlp_activate(p, r->hidden, r->gate, r->up, r->n_rows * p->spec->expert_inter);
    if (!out_rows)
        return;
    moe_product_forward(p, e, &w->down, out_rows, r->hidden);
    moe_lora_forward(p, e, u, &w->down, out_rows, b->y, r->hidden, b);
}

int moe_experts_forward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        elem *out_rows, const struct moe_rows *r, struct err *err)
{
    struct activations_mark mark = activations_mark(p->act);
    struct shard_experts x = {0};
    struct moe_lora_scratch b;

    moe_lora_carve_forward(p, r->n_rows, &b);
    int rc = activations_check(p->act, err);
    if (rc == 0)
        rc = shard_experts_acquire(e->shard, layer, &x, err);
    if (rc == 0) {
        struct products w = products_of(p, r->piece.offsets, (int32_t)x.n_slots,
                                        r->n_rows);
        spans_begin(p->dev, PHASE_EXPERTS, (int32_t)layer);
        moe_product_point(e, &x, u);
        moe_lora_point(p, e, &x, u);
        products_forward(p, e, u, &w, out_rows, r, &b);
        spans_end(p->dev);
        shard_experts_release(e->shard, layer);
    }
    activations_release(p->act, mark);
    return rc;
}

/* Adds the weight gradients of n groups of rows into the blocks that e's arrays point to. */
static void weight_gradients(struct pass *p, struct moe *e, const struct unit_view *u,
                             const int64_t *offsets, uint32_t n, const struct moe_scratch *b,
                             const struct moe_rows *r)
{
    const struct device_ops *ops = p->dev->ops;
    int64_t latent = p->spec->latent, inter = p->spec->expert_inter;
    int32_t n_groups = (int32_t)n;

    if (p->lora.r) {
        struct products w = products_of(p, offsets, n_groups, r->n_rows);
        moe_lora_gradients(p, e, u, &w.gate, b->d_gate, r->rows, &b->lora);
        moe_lora_gradients(p, e, u, &w.up, b->d_up, r->rows, &b->lora);
        moe_lora_gradients(p, e, u, &w.down, b->d_rows, r->hidden, &b->lora);
        return;
    }
    ops->grouped_linear_dw(p->dev, e->dw, b->d_gate, r->rows, offsets, n_groups, latent, inter);
    ops->grouped_linear_dw(p->dev, e->dw + n, b->d_up, r->rows, offsets, n_groups, latent, inter);
    ops->grouped_linear_dw(p->dev, e->dw + 2 * n, b->d_rows, r->hidden, offsets, n_groups, inter,
                           latent);
}

/* One block for each source of each slot, added at home in rank order: which rank serves an expert
 * then changes no bit. */
static int partial_gradients(struct pass *p, struct moe *e, uint32_t layer,
                             const struct shard_experts *x, const struct unit_view *u,
                             const struct moe_scratch *b, const struct moe_rows *r,
                             struct err *err)
{
    struct partials *q;
    spans_begin(p->dev, PHASE_EXPERTS, (int32_t)layer);
    int rc = partials_open(e->shard, layer, &r->piece, x, &q, err);

    for (uint32_t slot = 0; rc == 0 && slot < x->n_slots; slot++) {
        const int64_t *blocks = r->piece.blocks + (size_t)slot * e->n_sources;
        float *const *sums = partials_of_slot(q, slot);
        for (uint32_t m = 0; m < e->n_sources; m++)
            if (blocks[m + 1] > blocks[m])
                point_gradients(p, e, m, e->n_sources, sums[m], u);
        if (blocks[e->n_sources] > blocks[0])
            weight_gradients(p, e, u, blocks, e->n_sources, b, r);
        partials_add_single(q, slot);
    }
    spans_end(p->dev);
    return rc < 0 ? rc : partials_close(q, err);
}

static int summed_gradients(struct pass *p, struct moe *e, uint32_t layer,
                            const struct shard_experts *x, const struct unit_view *u,
                            const struct moe_scratch *b, const struct moe_rows *r)
{
    spans_begin(p->dev, PHASE_EXPERTS, (int32_t)layer);
    for (uint32_t i = 0; i < x->n_slots; i++)
        point_gradients(p, e, i, x->n_slots, x->gradients[i], u);
    weight_gradients(p, e, u, r->piece.offsets, x->n_slots, b, r);
    spans_end(p->dev);
    return 0;
}

/* d_hidden from d_rows, and d_gate and d_up from that. */
static void backward_down(struct pass *p, struct moe *e, const struct unit_view *u,
                          const struct products *w, struct moe_scratch *b,
                          const struct moe_rows *r)
{
    const struct moe_product *d = &w->down;

    moe_product_dx(p, e, d, b->d_hidden, b->d_rows);
    moe_lora_shrink(p, e, u, d, b->d_rows, r->hidden, &b->lora);
    moe_lora_dx(p, e, u, d, b->d_hidden, &b->lora);
    mlp_activate_backward(p, b->d_gate, b->d_up, b->d_hidden, r->gate, r->up, r->n_rows * d->in);
    moe_lora_shrink(p, e, u, &w->gate, b->d_gate, r->rows, &b->lora);
    moe_lora_shrink(p, e, u, &w->up, b->d_up, r->rows, &b->lora);
}

/* d_rows from d_gate and d_up. */
static void backward_in(struct pass *p, struct moe *e, const struct unit_view *u,
                        const struct products *w, struct moe_scratch *b)
{
    moe_product_dx_pair(p, e, &w->gate, b->d_rows, b->d_gate, &w->up, b->d_up);
    moe_lora_dx(p, e, u, &w->gate, b->d_rows, &b->lora);
    moe_lora_dx(p, e, u, &w->up, b->d_rows, &b->lora);
}

static int all_gradients(struct pass *p, struct moe *e, uint32_t layer, struct shard_experts *x,
                         const struct unit_view *u, const struct products *w,
                         const struct moe_scratch *b, const struct moe_rows *r, struct err *err)
{
    if (p->lora.r && !p->lora.on_experts)
        return 0;
    shard_experts_gradient(e->shard, layer, x);
    moe_lora_shared_gradient(p, u, &w->gate, r->rows, &b->lora);
    moe_lora_shared_gradient(p, u, &w->up, r->rows, &b->lora);
    moe_lora_shared_gradient(p, u, &w->down, r->hidden, &b->lora);
    return p->dev->deterministic ? partial_gradients(p, e, layer, x, u, b, r, err)
                                 : summed_gradients(p, e, layer, x, u, b, r);
}

int moe_experts_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                         struct moe_scratch *b, const struct moe_rows *r, struct err *err)
{
    struct shard_experts x = {0};

    int rc = shard_experts_acquire(e->shard, layer, &x, err);
    if (rc < 0)
        return rc;
    struct products w = products_of(p, r->piece.offsets, (int32_t)x.n_slots,
                                    r->n_rows);
    spans_begin(p->dev, PHASE_EXPERTS, (int32_t)layer);
    moe_product_point(e, &x, u);
    moe_lora_point(p, e, &x, u);
    backward_down(p, e, u, &w, b, r);
    spans_end(p->dev);
    if ((rc = all_gradients(p, e, layer, &x, u, &w, b, r, err)) == 0) {
        spans_begin(p->dev, PHASE_EXPERTS, (int32_t)layer);
        backward_in(p, e, u, &w, b);
        spans_end(p->dev);
    }
    shard_experts_release(e->shard, layer);
    return rc;
}
