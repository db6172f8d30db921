/* kda.c - Kimi Delta Attention: convolved queries, keys and values, a gated delta-rule state, and
 * a gated norm on the way out */
#include "worker/kda.h"

#include "worker/linear.h"

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
    };
}

static void carve_kept(struct pass *p, struct kda_saved *out)
{
    const struct model_spec *m = p->spec;
    int64_t wide = (int64_t)m->kda_heads * m->kda_head_dim * p->n;
    struct kda_shape shape = shape_of(p);

    for (int i = 0; i < 3; i++)
        out->in[i] = activations_take(p->act, wide);
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
    int64_t wide = (int64_t)m->kda_heads * m->kda_head_dim * p->n, per_head = p->n * m->kda_heads;

    for (int i = 0; i < 3; i++)
        out->pre[i] = activations_take(p->act, wide);
    out->q = activations_take(p->act, wide);
    out->k = activations_take(p->act, wide);
    out->v = activations_take(p->act, wide);
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

static void project_qkv(struct pass *p, const struct unit_view *u, struct kda_saved *s)
{
    int64_t wide = (int64_t)p->spec->kda_head_dim * p->spec->kda_heads;

    for (int i = 0; i < 3; i++)
        linear_forward(p, u, proj_roles[i], s->in[i], s->x, p->spec->hidden, wide, 0);
}

/* Query, key and value: convolved; query and key brought to length 1 per head. */
static void shape_qkv(struct pass *p, const struct unit_view *u, elem *spare, struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads, rows = p->n * m->kda_heads;
    elem *out[3] = { s->q, s->k, s->v };
    float *rstd[2] = { s->q_rstd, s->k_rstd };

    for (int i = 0; i < 3; i++) {
        elem *y = i < 2 ? spare : out[i];
        ops->short_conv(p->dev, y, s->pre[i], s->in[i], weight_of(u, conv_roles[i]), p->cu_seqlens,
                        p->n_docs, wide, (int32_t)m->conv_kernel);
        if (i < 2)
            ops->l2_norm(p->dev, out[i], rstd[i], spare, rows, d, L2_EPS);
    }
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
    int64_t wide = (int64_t)p->spec->kda_head_dim * p->spec->kda_heads;
    struct activations_mark mark = activations_mark(p->act);
    struct kda_shape shape = shape_of(p);
    elem *spare = activations_take(p->act, p->n * wide);

    s->x = x;
    if (!spare)
        goto out;
    project_qkv(p, u, s);
    shape_qkv(p, u, spare, s);
    project_gates(p, u, spare, s);
    shape_gates(p, u, s);
    p->dev->ops->kda_forward(p->dev, s->o, NULL, s->core, s->q, s->k, s->v, s->decay, s->beta,
                             NULL, &shape);
    shape_output(p, u, s);
    linear_forward(p, u, ROLE_KDA_O, y, s->gated, wide, p->spec->hidden, beta);
out:
    activations_release(p->act, mark);
}

void kda_layer_again(struct pass *p, const struct unit_view *u, const elem *x,
                     struct kda_saved *s)
{
    struct activations_mark mark = activations_mark(p->act);
    elem *spare = activations_take(p->act,
                                   p->n * p->spec->kda_head_dim * p->spec->kda_heads);

    s->x = x;
    if (spare) {
        shape_qkv(p, u, spare, s);
        shape_gates(p, u, s);
        shape_output(p, u, s);
    }
    activations_release(p->act, mark);
}

struct scratch {
    elem  *d_o, *d_gate, *d_q, *d_k, *d_v, *spare; /* (n, D) each */
    float *d_decay;                                /* the same */
    elem  *d_beta, *d_low;                         /* (n, heads), (n, head_dim) */
};

static void carve_scratch(struct pass *p, struct scratch *b)
{
    int64_t d = p->spec->kda_head_dim, wide = p->n * d * p->spec->kda_heads;
    elem **all[] = { &b->d_o, &b->d_gate, &b->d_q, &b->d_k, &b->d_v, &b->spare };

    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        *all[i] = activations_take(p->act, wide);
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

static void backward_qkv(struct pass *p, const struct unit_view *u, struct scratch *b, elem *dx,
                         const struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads, rows = p->n * m->kda_heads;
    const elem *dy[3] = { b->d_q, b->d_k, b->d_v }, *unit[2] = { s->q, s->k };
    const float *rstd[2] = { s->q_rstd, s->k_rstd };

    for (int i = 0; i < 3; i++) {
        const elem *d_conv = dy[i];
        elem *d_in = b->d_gate; /* free by now */
        if (i < 2) {
            ops->l2_norm_backward(p->dev, b->spare, dy[i], unit[i], rstd[i], rows, d);
            d_conv = b->spare;
        }
        ops->short_conv_backward(p->dev, d_in, gradient_of(u, conv_roles[i]), d_conv, s->pre[i],
                                 s->in[i], weight_of(u, conv_roles[i]), p->cu_seqlens, p->n_docs,
                                 wide, (int32_t)m->conv_kernel);
        linear_backward(p, u, proj_roles[i], dx, 1, d_in, s->x, m->hidden, wide);
    }
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
    ops->kda_backward(p->dev, b.d_q, b.d_k, b.d_v, b.d_decay, b.d_beta, NULL, b.d_o, NULL, s->q,
                      s->k, s->v, s->decay, s->beta, NULL, s->core, &shape);
    backward_gates(p, u, &b, dx, s);
    backward_qkv(p, u, &b, dx, s);
out:
    activations_release(p->act, mark);
}
