/* cuda_ops_experts.c - cases of a whole routed layer of experts, forward and backward
 *
 * Rows go to their experts, through the three products with the activation between them, and back,
 * where each token sums those of its choices; then the same backwards, with all gradients. It is
 * made of the ops that a rank alone calls for it. */
#include "tests/cuda_ops.h"

#include <math.h>

/* Elements round in every op of the chain. */
#define TOLERANCE_F32  5e-5
#define TOLERANCE_BF16 4e-2

/* d: tokens, choices of each, experts, width, width between */
struct layer {
    int64_t n, n_rows, width, inter;
    int32_t top_k, n_experts;
    const int64_t *offsets;             /* (experts + 1) */
    const int64_t *token_at, *row_of;   /* of a row; of a token's choice */
    const float *weight_at, *weight_of; /* the same */
    const float *ones;
    const elem *x, *dy, **gate, **up, **down;
    float **d_gate, **d_up, **d_down;
};

/* What lies in rows. */
struct rows {
    elem *x, *gate, *up, *hidden, *y, *slots;
    elem *d_y, *d_hidden, *d_gate, *d_up, *d_x, *d_slots;
};

/* Any expert for each choice; rows in the order of experts, then of choices. */
static void route(struct trial *t, struct layer *l)
{
    int64_t n = l->n_rows, *expert = trial_host(t, (size_t)(n + 1) * sizeof *expert);
    int64_t *offsets = trial_host(t, (size_t)(l->n_experts + 1) * sizeof *offsets);
    int64_t *next = trial_host(t, (size_t)(l->n_experts + 1) * sizeof *next);
    int64_t *row_of = trial_host(t, (size_t)(n + 1) * sizeof *row_of);
    int64_t *token_at = trial_host(t, (size_t)(n + 1) * sizeof *token_at);
    float *weight_of = trial_host(t, (size_t)(n + 1) * sizeof *weight_of);
    float *weight_at = trial_host(t, (size_t)(n + 1) * sizeof *weight_at);
    for (int64_t i = 0; i < n; i++)
        offsets[1 + (expert[i] = trial_below(t, l->n_experts))]++;
    for (int32_t e = 0; e < l->n_experts; e++)
        next[e + 1] = offsets[e + 1] += offsets[e];
    for (int64_t i = 0; i < n; i++) {
        int64_t row = row_of[i] = next[expert[i]]++;
        token_at[row] = i / l->top_k;
        weight_at[row] = weight_of[i] = (float)trial_uniform(t);
    }
    l->offsets = offsets;
    l->row_of = in_bytes(t, row_of, (size_t)n * sizeof *row_of);
    l->token_at = in_bytes(t, token_at, (size_t)n * sizeof *token_at);
    l->weight_of = in_floats_of(t, weight_of, n);
    l->weight_at = in_floats_of(t, weight_at, n);
    for (int64_t i = 0; i < n; i++)
        weight_of[i] = 1;
    l->ones = in_floats_of(t, weight_of, n);
}

static const elem **matrices(struct trial *t, const struct layer *l, float width)
{
    int64_t each = l->width * l->inter;
    const elem *all = in_elems(t, l->n_experts * each, width);
    const elem **to = trial_host(t, (size_t)l->n_experts * sizeof *to);
    for (int32_t e = 0; e < l->n_experts; e++)
        to[e] = const_elem_at(t->dev, all, e * each);
    return to;
}

static float **gradients(struct trial *t, const struct layer *l, const char *name)
{
    int64_t each = l->width * l->inter;
    float *all = inout_floats(t, name, l->n_experts * each, 1);
    float **to = trial_host(t, (size_t)l->n_experts * sizeof *to);
    for (int32_t e = 0; e < l->n_experts; e++)
        to[e] = all + e * each;
    return to;
}

static struct layer layer_of(struct trial *t)
{
    struct layer l = {.n = t->d[0], .n_rows = t->d[0] * t->d[1], .width = t->d[3],
                      .inter = t->d[4], .top_k = (int32_t)t->d[1],
                      .n_experts = (int32_t)t->d[2]};
    route(t, &l);
    l.x = in_elems(t, l.n * l.width, 1);
    l.dy = in_elems(t, l.n * l.width, 1);
    l.gate = matrices(t, &l, 1 / sqrtf((float)l.width));
    l.up = matrices(t, &l, 1 / sqrtf((float)l.width));
    l.down = matrices(t, &l, 1 / sqrtf((float)l.inter));
    l.d_gate = gradients(t, &l, "d_gate");
    l.d_up = gradients(t, &l, "d_up");
    l.d_down = gradients(t, &l, "d_down");
    return l;
}

static elem *block(struct trial *t, int64_t n)
{
    return scratch_bytes(t, (size_t)n * elem_size(t->dev));
}

static struct rows rows_of(struct trial *t, const struct layer *l)
{
    int64_t n = l->n_rows * l->width, n_inter = l->n_rows * l->inter;
    return (struct rows){
        .x = block(t, n), .gate = block(t, n_inter), .up = block(t, n_inter),
        .hidden = block(t, n_inter), .y = block(t, n), .slots = block(t, n),
        .d_y = block(t, n), .d_hidden = block(t, n_inter), .d_gate = block(t, n_inter),
        .d_up = block(t, n_inter), .d_x = block(t, n), .d_slots = block(t, n),
    };
}

static void forward(struct device *dev, const struct layer *l, const struct rows *r, elem *y)
{
    const struct device_ops *ops = dev->ops;
    int64_t n = l->n_rows, width = l->width, inter = l->inter;
    ops->gather_rows(dev, r->x, l->x, l->token_at, NULL, n, width);
    ops->grouped_linear(dev, r->gate, r->x, l->gate, l->offsets, l->n_experts, width, inter);
    ops->grouped_linear(dev, r->up, r->x, l->up, l->offsets, l->n_experts, width, inter);
    ops->swiglu(dev, r->hidden, r->gate, r->up, n * inter);
    ops->grouped_linear(dev, r->y, r->hidden, l->down, l->offsets, l->n_experts, inter, width);
    ops->gather_rows(dev, r->slots, r->y, l->row_of, NULL, n, width);
    ops->combine(dev, y, r->slots, l->weight_of, l->n, l->top_k, width);
}

static void backward(struct device *dev, const struct layer *l, const struct rows *r, elem *dx,
                     float *d_weights)
{
    const struct device_ops *ops = dev->ops;
    int64_t n = l->n_rows, width = l->width, inter = l->inter;
    int32_t n_experts = l->n_experts;
    ops->combine_backward(dev, (elem *)NULL, d_weights, l->dy, r->slots, l->weight_of, l->n,
                          l->top_k, width);
    ops->gather_rows(dev, r->d_y, l->dy, l->token_at, l->weight_at, n, width);
    ops->grouped_linear_dx(dev, r->d_hidden, r->d_y, l->down, l->offsets, n_experts, inter, width,
                           0);
    ops->swiglu_backward(dev, r->d_gate, r->d_up, r->d_hidden, r->gate, r->up, n * inter);
    ops->grouped_linear_dx_pair(dev, r->d_x, r->d_gate, l->gate, r->d_up, l->up, l->offsets,
                                n_experts, width, inter);
    ops->grouped_linear_dw(dev, l->d_gate, r->d_gate, r->x, l->offsets, n_experts, width, inter);
    ops->grouped_linear_dw(dev, l->d_up, r->d_up, r->x, l->offsets, n_experts, width, inter);
    ops->grouped_linear_dw(dev, l->d_down, r->d_y, r->hidden, l->offsets, n_experts, inter, width);
    ops->gather_rows(dev, r->d_slots, r->d_x, l->row_of, NULL, n, width);
    ops->combine(dev, dx, r->d_slots, l->ones, l->n, l->top_k, width);
}

static void routed_layer(struct trial *t)
{
    struct layer l = layer_of(t);
    struct rows r = rows_of(t, &l);
    elem *y = out_elems(t, "y", l.n * l.width), *dx = out_elems(t, "dx", l.n * l.width);
    float *d_weights = out_floats(t, "d_weights", l.n_rows);
    t->tolerance_f32 = TOLERANCE_F32;
    t->tolerance_bf16 = TOLERANCE_BF16;
    t->flops = 9 * 2.0 * (double)l.n_rows * (double)(l.width * l.inter);
    TRIAL_RUN(t) {
        forward(t->dev, &l, &r, y);
        backward(t->dev, &l, &r, dx, d_weights);
    }
}

static const struct op_case cases[] = {
    {"routed_layer", routed_layer, {1, 1, 1, 8, 5}},
    {"routed_layer", routed_layer, {40, 3, 7, 33, 20}},
    {"routed_layer", routed_layer, {100, 4, 16, 128, 72}},
    {"routed_layer", routed_layer, {500, 8, 64, 1024, 512}, CASE_LARGE},
    {"routed_layer", routed_layer, {8192, 16, 14, 3584, 3072}, CASE_BENCH},
    {"routed_layer", routed_layer, {8192, 16, 112, 3584, 3072}, CASE_BENCH},
    {"routed_layer", routed_layer, {8192, 8, 64, 2048, 1024}, CASE_BENCH},
};
OP_FAMILY(experts, cases)
