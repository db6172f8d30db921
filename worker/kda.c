/* kda.c - Kimi Delta Attention: convolved queries, keys and values, a gated delta-rule state, and
 * a gated norm on the way out */
#include "worker/kda.h"

#include <stdlib.h>

#include "common/mem.h"
#include "worker/linear.h"
#include "worker/segments.h"

#define L2_EPS 1e-6f

static const enum tensor_role proj_roles[3] = { ROLE_KDA_Q, ROLE_KDA_K, ROLE_KDA_V };
static const enum tensor_role conv_roles[3] = { ROLE_KDA_Q_CONV, ROLE_KDA_K_CONV,
                                                ROLE_KDA_V_CONV };

static struct kda_shape shape_of(const struct pass *p)
{
    return (struct kda_shape){
        .n_tokens = p->n,
        .cu_seqlens = p->cu_seqlens,
        .n_docs = p->n_docs,
        .n_heads = (int32_t)p->spec->kda_heads,
        .head_dim = (int32_t)p->spec->kda_head_dim,
        .scale = 1 / sqrtf((float)p->spec->kda_head_dim),
        .only_ends = p->segment != NULL,
    };
}

static int64_t wide_of(const struct pass *p)
{
    return (int64_t)p->spec->kda_heads * p->spec->kda_head_dim;
}

/* Rows that a segment hands to the next one. */
static int64_t rows_shared(const struct pass *p)
{
    return (int64_t)p->spec->conv_kernel - 1;
}

/* Rows of the segment before that the convolution sees. */
static int64_t lead_of(const struct pass *p)
{
    int64_t before = rows_before(p);
    return before < rows_shared(p) ? before : rows_shared(p);
}

/* (n, D) after the leading rows. */
static elem *take_led(struct pass *p)
{
    return activations_take(p->act, (lead_of(p) + p->n) * wide_of(p));
}

/* Where the rows of the pass begin. */
static elem *own_rows(const struct pass *p, elem *x)
{
    return elem_at(p->dev, x, lead_of(p) * wide_of(p));
}

static void carve_kept(struct pass *p, struct kda_saved *out)
{
    const struct model_spec *m = p->spec;
    int64_t wide = wide_of(p) * p->n;
    struct kda_shape shape = shape_of(p);

    for (int i = 0; i < 3; i++)
        out->in[i] = take_led(p);
    out->f = activations_take(p->act, p->n * m->kda_head_dim);
    out->beta = activations_take(p->act, p->n * m->kda_heads);
    if (m->kda_gate_full_rank)
        out->gate = activations_take(p->act, wide);
    else
        out->gate_low = activations_take(p->act, p->n * m->kda_head_dim);
    out->o = activations_take(p->act, wide);
    out->core = activations_take_f32(p->act,
                                     (int64_t)p->dev->ops->kda_saved_floats(p->dev, &shape));
}

static void carve_again(struct pass *p, struct kda_saved *out)
{
    const struct model_spec *m = p->spec;
    int64_t wide = wide_of(p) * p->n, per_head = p->n * m->kda_heads;

    for (int i = 0; i < 3; i++)
        out->pre[i] = take_led(p);
    out->q = activations_take(p->act, wide);
    out->k = activations_take(p->act, wide);
    out->v = take_led(p);
    out->q_rstd = activations_take_f32(p->act, per_head);
    out->k_rstd = activations_take_f32(p->act, per_head);
    out->z = activations_take(p->act, wide);
    out->decay = activations_take_f32(p->act, wide);
    if (!m->kda_gate_full_rank)
        out->gate = activations_take(p->act, wide);
    out->o_rstd = activations_take_f32(p->act, per_head);
    out->gated = activations_take(p->act, wide);
}

void kda_carve(struct pass *p, enum carve what, struct kda_saved *out)
{
    if (what != CARVE_AGAIN) {
        *out = (struct kda_saved){0};
        carve_kept(p, out);
    }
    if (what != CARVE_KEPT)
        carve_again(p, out);
}

/* Numbers in such rows, of q, k or v; and in a state. */
static int64_t shared_numbers(const struct pass *p)
{
    return rows_shared(p) * wide_of(p);
}

static int64_t state_floats(const struct pass *p)
{
    return wide_of(p) * p->spec->kda_head_dim;
}

static size_t lead_bytes(const struct pass *p)
{
    return (size_t)(lead_of(p) * wide_of(p)) * elem_size(p->dev);
}

/* Of q, k or v the rows handed on, in what is shared: they lie at the end of their place, as those
 * a segment does not see are the first. */
static elem *rows_from(const struct pass *p, elem *shared, int32_t segment, int i, int64_t n_rows)
{
    int64_t row = (segment * 3 + i + 1) * rows_shared(p) - n_rows;
    return elem_at(p->dev, shared, row * wide_of(p));
}

/* The last ones of x (lead and n rows), which the next segment sees. */
static elem *last_rows(const struct pass *p, elem *x)
{
    return elem_at(p->dev, x, (lead_of(p) + p->n - rows_shared(p)) * wide_of(p));
}

/* in gets what leads, and the next segment what it will see. */
static void hand_on_rows(struct pass *p, elem *in, int i)
{
    const struct device_ops *ops = p->dev->ops;

    if (rows_before(p))
        ops->copy(p->dev, in, rows_from(p, p->kda_cut->rows, p->segment->index - 1, i, lead_of(p)),
                  lead_bytes(p));
    if (rows_go_on(p))
        ops->copy(p->dev,
                  rows_from(p, p->kda_cut->rows, p->segment->index, i, rows_shared(p)),
                  last_rows(p, in), (size_t)shared_numbers(p) * elem_size(p->dev));
}

/* The states before and after the rows; NULL: none, or nobody's. */
static float *state_before(const struct pass *p)
{
    return rows_before(p) ? p->kda_cut->states + (p->segment->index - 1) * state_floats(p) : NULL;
}

static float *state_after(const struct pass *p)
{
    return rows_go_on(p) ? p->kda_cut->states + p->segment->index * state_floats(p) : NULL;
}

static void project_qkv(struct pass *p, const struct unit_view *u, struct kda_saved *s)
{
    for (int i = 0; i < 3; i++) {
        linear_forward(p, u, proj_roles[i], own_rows(p, s->in[i]), s->x, p->spec->hidden,
                       wide_of(p), 0);
        hand_on_rows(p, s->in[i], i);
    }
}

/* The documents of the rows that the convolution sees; gives an array, freed with free(). */
static int32_t *led_seqlens(const struct pass *p)
{
    int32_t *cu_seqlens = xcalloc((size_t)p->n_docs + 1, sizeof *cu_seqlens);

    for (int32_t i = 1; i <= p->n_docs; i++)
        cu_seqlens[i] = p->cu_seqlens[i] + (int32_t)lead_of(p);
    return cu_seqlens;
}

/* Query, key and value: convolved; query and key brought to length 1 per head. */
static void shape_qkv(struct pass *p, const struct unit_view *u, elem *spare, struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads, rows = p->n * m->kda_heads;
    elem *out[3] = { s->q, s->k, s->v };
    float *rstd[2] = { s->q_rstd, s->k_rstd };
    int32_t *cu_seqlens = led_seqlens(p);

    for (int i = 0; i < 3; i++) {
        elem *y = i < 2 ? spare : out[i];
        ops->short_conv(p->dev, y, s->pre[i], s->in[i], weight_of(u, conv_roles[i]), cu_seqlens,
                        p->n_docs, wide, (int32_t)m->conv_kernel);
        if (i < 2)
            ops->l2_norm(p->dev, out[i], rstd[i], own_rows(p, spare), rows, d, L2_EPS);
    }
    free(cu_seqlens);
}

static void project_gates(struct pass *p, const struct unit_view *u, elem *spare,
                          struct kda_saved *s)
{
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim;

    linear_forward(p, u, ROLE_KDA_F_A, s->f, s->x, m->hidden, d, 0);
    linear_forward(p, u, ROLE_KDA_BETA, spare, s->x, m->hidden, m->kda_heads, 0);
    p->dev->ops->sigmoid(p->dev, s->beta, spare, p->n * m->kda_heads);
    if (m->kda_gate_full_rank)
        linear_forward(p, u, ROLE_KDA_G, s->gate, s->x, m->hidden, d * m->kda_heads, 0);
    else
        linear_forward(p, u, ROLE_KDA_G_A, s->gate_low, s->x, m->hidden, d, 0);
}

static void shape_gates(struct pass *p, const struct unit_view *u, struct kda_saved *s)
{
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads;

    linear_forward(p, u, ROLE_KDA_F_B, s->z, s->f, d, wide, 0);
    p->dev->ops->kda_gate(p->dev, s->decay, s->z, weight_of(u, ROLE_KDA_DT_BIAS),
                          weight_of(u, ROLE_KDA_A_LOG), p->n, (int32_t)m->kda_heads, (int32_t)d,
                          m->kda_gate_bounded, m->kda_gate_lower_bound);
    if (!m->kda_gate_full_rank)
        linear_forward(p, u, ROLE_KDA_G_B, s->gate, s->gate_low, d, wide, 0);
}

static void shape_output(struct pass *p, const struct unit_view *u, struct kda_saved *s)
{
    const struct model_spec *m = p->spec;

    p->dev->ops->gated_rms_norm(p->dev, s->gated, s->o_rstd, s->o, s->gate,
                                weight_of(u, ROLE_KDA_O_NORM), p->n * m->kda_heads,
                                m->kda_head_dim, m->norm_eps);
}

void kda_layer_forward(struct pass *p, const struct unit_view *u, const elem *x, elem *y,
                       float beta, struct kda_saved *s)
{
    struct activations_mark mark = activations_mark(p->act);
    struct kda_shape shape = shape_of(p);
    elem *spare = take_led(p);

    s->x = x;
    if (!spare)
        goto out;
    project_qkv(p, u, s);
    shape_qkv(p, u, spare, s);
    project_gates(p, u, spare, s);
    shape_gates(p, u, s);
    p->dev->ops->kda_forward(p->dev, s->o, state_after(p), s->core, s->q, s->k, own_rows(p, s->v),
                             s->decay, s->beta, state_before(p), &shape);
    shape_output(p, u, s);
    if (y)
        linear_forward(p, u, ROLE_KDA_O, y, s->gated, wide_of(p), p->spec->hidden, beta);
out:
    activations_release(p->act, mark);
}

void kda_layer_again(struct pass *p, const struct unit_view *u, const elem *x,
                     struct kda_saved *s)
{
    struct activations_mark mark = activations_mark(p->act);
    elem *spare = take_led(p);

    s->x = x;
    if (spare) {
        shape_qkv(p, u, spare, s);
        shape_gates(p, u, s);
        shape_output(p, u, s);
    }
    activations_release(p->act, mark);
}

struct scratch {
    elem  *d_o, *d_q, *d_k;        /* (n, D) each */
    elem  *d_gate, *d_v, *spare;   /* the same, with leading rows */
    float *d_decay;                /* (n, D) */
    elem  *d_beta, *d_low;         /* (n, heads), (n, head_dim) */
};

static void carve_scratch(struct pass *p, struct scratch *b)
{
    int64_t d = p->spec->kda_head_dim, wide = p->n * d * p->spec->kda_heads;
    elem **plain[] = { &b->d_o, &b->d_q, &b->d_k }, **led[] = { &b->d_gate, &b->d_v, &b->spare };

    for (int i = 0; i < 3; i++) {
        *plain[i] = activations_take(p->act, wide);
        *led[i] = take_led(p);
    }
    b->d_decay = activations_take_f32(p->act, wide);
    b->d_beta = activations_take(p->act, p->n * p->spec->kda_heads);
    b->d_low = activations_take(p->act, p->n * d);
}

static void backward_gates(struct pass *p, const struct unit_view *u, struct scratch *b, elem *dx,
                           const struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads;
    elem *d_z = b->d_o; /* free by now */

    if (m->kda_gate_full_rank) {
        linear_backward(p, u, ROLE_KDA_G, dx, 0, b->d_gate, s->x, m->hidden, wide);
    } else {
        linear_backward(p, u, ROLE_KDA_G_B, b->d_low, 0, b->d_gate, s->gate_low, d, wide);
        linear_backward(p, u, ROLE_KDA_G_A, dx, 0, b->d_low, s->x, m->hidden, d);
    }
    ops->sigmoid_backward(p->dev, b->spare, b->d_beta, s->beta, p->n * m->kda_heads);
    linear_backward(p, u, ROLE_KDA_BETA, dx, 1, b->spare, s->x, m->hidden, m->kda_heads);

    ops->kda_gate_backward(p->dev, d_z, gradient_of(u, ROLE_KDA_DT_BIAS),
                           gradient_of(u, ROLE_KDA_A_LOG), b->d_decay, s->z,
                           weight_of(u, ROLE_KDA_DT_BIAS), weight_of(u, ROLE_KDA_A_LOG), p->n,
                           (int32_t)m->kda_heads, (int32_t)d, m->kda_gate_bounded,
                           m->kda_gate_lower_bound);
    linear_backward(p, u, ROLE_KDA_F_B, b->d_low, 0, d_z, s->f, d, wide);
    linear_backward(p, u, ROLE_KDA_F_A, dx, 1, b->d_low, s->x, m->hidden, d);
}

/* d_in (lead and n rows) of q, k or v: the later segment's part is added, the earlier one's
 * left. */
static void hand_back_rows(struct pass *p, elem *d_in, int i)
{
    const struct device_ops *ops = p->dev->ops;

    if (rows_go_on(p))
        ops->add(p->dev, last_rows(p, d_in), rows_from(p, p->kda_cut->d_rows, 0, i, rows_shared(p)),
                 shared_numbers(p));
    if (!rows_before(p))
        return;
    ops->zero(p->dev, rows_from(p, p->kda_cut->d_rows, 0, i, rows_shared(p)),
              (size_t)shared_numbers(p) * elem_size(p->dev));
    ops->copy(p->dev, rows_from(p, p->kda_cut->d_rows, 0, i, lead_of(p)), d_in, lead_bytes(p));
}

static void backward_qkv(struct pass *p, const struct unit_view *u, struct scratch *b, elem *dx,
                         const struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads, rows = p->n * m->kda_heads;
    const elem *dy[2] = { b->d_q, b->d_k }, *unit[2] = { s->q, s->k };
    const float *rstd[2] = { s->q_rstd, s->k_rstd };
    int32_t *cu_seqlens = led_seqlens(p);

    for (int i = 0; i < 3; i++) {
        elem *d_conv = i < 2 ? b->spare : b->d_v;
        elem *d_in = b->d_gate; /* free by now */
        if (i < 2)
            ops->l2_norm_backward(p->dev, own_rows(p, d_conv), dy[i], unit[i], rstd[i], rows, d);
        if (rows_before(p)) /* what came out for those rows is not this segment's */
            ops->zero(p->dev, d_conv, lead_bytes(p));
        ops->short_conv_backward(p->dev, d_in, gradient_of(u, conv_roles[i]), d_conv, s->pre[i],
                                 s->in[i], weight_of(u, conv_roles[i]), cu_seqlens, p->n_docs,
                                 wide, (int32_t)m->conv_kernel);
        hand_back_rows(p, d_in, i);
        linear_backward(p, u, proj_roles[i], dx, 1, own_rows(p, d_in), s->x, m->hidden, wide);
    }
    free(cu_seqlens);
}

static float *d_state_before(const struct pass *p)
{
    return rows_before(p) ? p->kda_cut->d_states[p->segment->index % 2] : NULL;
}

static const float *d_state_after(const struct pass *p)
{
    return rows_go_on(p) ? p->kda_cut->d_states[(p->segment->index + 1) % 2] : NULL;
}

void kda_layer_backward(struct pass *p, const struct unit_view *u, const elem *dy, elem *dx,
                        const struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads, rows = p->n * m->kda_heads;
    struct activations_mark mark = activations_mark(p->act);
    struct kda_shape shape = shape_of(p);
    struct scratch b;

    carve_scratch(p, &b);
    if (!b.d_low) /* the last one taken */
        goto out;
    linear_backward(p, u, ROLE_KDA_O, b.spare, 0, dy, s->gated, wide, m->hidden);
    ops->gated_rms_norm_backward(p->dev, b.d_o, b.d_gate, gradient_of(u, ROLE_KDA_O_NORM), b.spare,
                                 s->o, s->gate, weight_of(u, ROLE_KDA_O_NORM), s->o_rstd, rows, d);
    ops->kda_backward(p->dev, b.d_q, b.d_k, own_rows(p, b.d_v), b.d_decay, b.d_beta,
                      d_state_before(p), b.d_o, d_state_after(p), s->q, s->k, own_rows(p, s->v),
                      s->decay, s->beta, state_before(p), s->core, &shape);
    backward_gates(p, u, &b, dx, s);
    backward_qkv(p, u, &b, dx, s);
out:
    activations_release(p->act, mark);
}

/* ---- what segments share -------------------------------------------------------------------- */

void kda_cut_carve(struct pass *p, int32_t n_segments, struct kda_cut *out)
{
    *out = (struct kda_cut){
        .states = activations_take_f32(p->act, n_segments * state_floats(p)),
        .rows = activations_take(p->act, n_segments * 3 * shared_numbers(p)),
    };
}

void kda_cut_carve_backward(struct pass *p, struct kda_cut *out)
{
    for (int i = 0; i < 2; i++)
        out->d_states[i] = activations_take_f32(p->act, state_floats(p));
    out->d_rows = activations_take(p->act, 3 * shared_numbers(p));
}
