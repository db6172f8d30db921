/* moe_experts.c - the products of the experts that a rank serves, and their weight gradients
 *
 * Each slot's rows lie together. In deterministic mode weight gradients are made source by source,
 * so that it does not matter which rank serves an expert. */
#include "worker/moe.h"

#include "common/clock.h"
#include "worker/partials.h"

/* Where a block's three matrices begin, as tensor_map.h lays them out. */
static void point_block(float **at, uint32_t i, uint32_t n, float *block,
                        const struct unit_view *u)
{
    at[i] = block;
    at[n + i] = block + u->at[ROLE_EXPERT_UP];
    at[2 * n + i] = block + u->at[ROLE_EXPERT_DOWN];
}

static void point_weights(struct moe *e, const struct shard_experts *x, const struct unit_view *u)
{
    for (uint32_t i = 0; i < x->n_slots; i++) {
        e->w[i] = x->weights[i];
        e->w[x->n_slots + i] = x->weights[i] + u->at[ROLE_EXPERT_UP];
        e->w[2 * x->n_slots + i] = x->weights[i] + u->at[ROLE_EXPERT_DOWN];
    }
}

static void spend(struct moe *e, uint64_t began_ns)
{
    if (e->training)
        e->expert_ns += clock_now_ns() - began_ns;
}

int moe_experts_forward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        float *out_rows, struct moe_saved *s, struct err *err)
{
    const struct device_ops *ops = p->dev->ops;
    const int64_t *offsets = dispatch_plan_offsets(s->plan);
    int64_t latent = p->spec->latent, inter = p->spec->expert_inter;
    struct shard_experts x = {0};

    int rc = shard_experts_acquire(e->shard, layer, &x, err);
    if (rc < 0)
        return rc;
    int32_t n = (int32_t)x.n_slots;
    uint64_t began = clock_now_ns();
    point_weights(e, &x, u);
    ops->grouped_linear(p->dev, s->gate, s->rows, e->w, offsets, n, latent, inter);
    ops->grouped_linear(p->dev, s->up, s->rows, e->w + n, offsets, n, latent, inter);
    mlp_activate(p, s->hidden, s->gate, s->up, s->n_rows * inter);
    ops->grouped_linear(p->dev, out_rows, s->hidden, e->w + 2 * n, offsets, n, inter, latent);
    spend(e, began);
    shard_experts_release(e->shard, layer);
    return 0;
}

/* Adds the weight gradients of n groups of rows into the blocks that e->dw points to. */
static void weight_gradients(struct pass *p, struct moe *e, const int64_t *offsets, uint32_t n,
                             const struct moe_scratch *b, const struct moe_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    int64_t latent = p->spec->latent, inter = p->spec->expert_inter;
    int32_t n_groups = (int32_t)n;

    ops->grouped_linear_dw(p->dev, e->dw, b->d_gate, s->rows, offsets, n_groups, latent, inter);
    ops->grouped_linear_dw(p->dev, e->dw + n, b->d_up, s->rows, offsets, n_groups, latent, inter);
    ops->grouped_linear_dw(p->dev, e->dw + 2 * n, b->d_rows, s->hidden, offsets, n_groups, inter,
                           latent);
}

/* One block for each source of each slot, added at home in rank order: which rank serves an expert
 * then changes no bit. */
static int partial_gradients(struct pass *p, struct moe *e, uint32_t layer,
                             const struct shard_experts *x, const struct unit_view *u,
                             const struct moe_scratch *b, const struct moe_saved *s, struct err *err)
{
    struct partials *q;
    uint64_t began = clock_now_ns();
    int rc = partials_open(e->shard, layer, s->plan, x, &q, err);

    for (uint32_t slot = 0; rc == 0 && slot < x->n_slots; slot++) {
        const int64_t *blocks = dispatch_plan_blocks(s->plan) + (size_t)slot * e->n_sources;
        float *const *sums = partials_of_slot(q, slot);
        for (uint32_t m = 0; m < e->n_sources; m++)
            if (blocks[m + 1] > blocks[m])
                point_block(e->dw, m, e->n_sources, sums[m], u);
        if (blocks[e->n_sources] > blocks[0])
            weight_gradients(p, e, blocks, e->n_sources, b, s);
        partials_add_single(q, slot);
    }
    spend(e, began);
    return rc < 0 ? rc : partials_close(q, err);
}

static int summed_gradients(struct pass *p, struct moe *e, const struct shard_experts *x,
                            const struct unit_view *u, const struct moe_scratch *b,
                            const struct moe_saved *s)
{
    uint64_t began = clock_now_ns();
    for (uint32_t i = 0; i < x->n_slots; i++)
        point_block(e->dw, i, x->n_slots, x->gradients[i], u);
    weight_gradients(p, e, dispatch_plan_offsets(s->plan), x->n_slots, b, s);
    spend(e, began);
    return 0;
}

int moe_experts_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                         struct moe_scratch *b, const struct moe_saved *s, struct err *err)
{
    const struct device_ops *ops = p->dev->ops;
    const int64_t *offsets = dispatch_plan_offsets(s->plan);
    int64_t latent = p->spec->latent, inter = p->spec->expert_inter;
    struct shard_experts x = {0};

    int rc = shard_experts_acquire(e->shard, layer, &x, err);
    if (rc < 0)
        return rc;
    int32_t n = (int32_t)x.n_slots;
    shard_experts_gradient(e->shard, layer, &x);
    uint64_t began = clock_now_ns();
    point_weights(e, &x, u);
    ops->grouped_linear_dx(p->dev, b->d_hidden, b->d_rows, e->w + 2 * n, offsets, n, inter, latent,
                           0);
    mlp_activate_backward(p, b->d_gate, b->d_up, b->d_hidden, s->gate, s->up, s->n_rows * inter);
    spend(e, began);
    rc = p->dev->deterministic ? partial_gradients(p, e, layer, &x, u, b, s, err)
                               : summed_gradients(p, e, &x, u, b, s);
    if (rc == 0) {
        began = clock_now_ns();
        ops->grouped_linear_dx(p->dev, b->d_rows, b->d_gate, e->w, offsets, n, latent, inter, 0);
        ops->grouped_linear_dx(p->dev, b->d_rows, b->d_up, e->w + n, offsets, n, latent, inter, 1);
        spend(e, began);
        rc = shard_experts_reduce(e->shard, layer, err);
    }
    shard_experts_release(e->shard, layer);
    return rc;
}
