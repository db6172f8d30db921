/* kda.c - Kimi Delta Attention: convolved queries, keys and values, a gated delta-rule state, and
 * a gated norm on the way out */
#include "worker/kda.h"

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
    };
}

static int64_t wide_of(const struct pass *p)
{
    return (int64_t)p->spec->kda_heads * p->spec->kda_head_dim;
}

/* Rows of the piece before that the convolution sees. */
static int64_t lead_of(const struct pass *p)
{
    return p->before ? (int64_t)p->spec->conv_kernel - 1 : 0;
}

/* (n, D) after the leading rows. */
static elem *take_led(struct pass *p)
{
    return activations_take(p->act, (lead_of(p) + p->n) * wide_of(p));
}

/* Where the piece's own rows begin. */
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

/* Bytes of the rows that pieces share, of q, k or v. */
static size_t shared_bytes(const struct pass *p)
{
    return (size_t)((p->spec->conv_kernel - 1) * wide_of(p)) * elem_size(p->dev);
}

/* Those of q, k and v in what a piece hands on. */
static elem *shared_rows(const struct pass *p, const struct kda_ends *ends, int i)
{
    return elem_at(p->dev, ends->rows, i * (p->spec->conv_kernel - 1) * wide_of(p));
}

/* The last rows of x (lead and n rows). */
static elem *last_rows(const struct pass *p, elem *x)
{
    int64_t row = lead_of(p) + p->n - (p->spec->conv_kernel - 1);
    return elem_at(p->dev, x, row * wide_of(p));
}

static void project_qkv(struct pass *p, const struct unit_view *u, struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;

    for (int i = 0; i < 3; i++) {
        linear_forward(p, u, proj_roles[i], own_rows(p, s->in[i]), s->x, p->spec->hidden,
                       wide_of(p), 0);
        if (p->before)
            ops->copy(p->dev, s->in[i], shared_rows(p, &s->before, i), shared_bytes(p));
        if (s->after.state)
            ops->copy(p->dev, shared_rows(p, &s->after, i), last_rows(p, s->in[i]),
                      shared_bytes(p));
    }
}

/* The documents of the rows that the convolution sees; both is room for them. */
static const int32_t *led_seqlens(const struct pass *p, int32_t *both)
{
    both[0] = 0;
    both[1] = (int32_t)(lead_of(p) + p->n);
    return p->before ? both : p->cu_seqlens;
}

/* Query, key and value: convolved; query and key brought to length 1 per head. */
static void shape_qkv(struct pass *p, const struct unit_view *u, elem *spare, struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads, rows = p->n * m->kda_heads;
    elem *out[3] = { s->q, s->k, s->v };
    float *rstd[2] = { s->q_rstd, s->k_rstd };
    int32_t both[2];
    const int32_t *cu_seqlens = led_seqlens(p, both);

    for (int i = 0; i < 3; i++) {
        elem *y = i < 2 ? spare : out[i];
        ops->short_conv(p->dev, y, s->pre[i], s->in[i], weight_of(u, conv_roles[i]), cu_seqlens,
                        p->n_docs, wide, (int32_t)m->conv_kernel);
        if (i < 2)
            ops->l2_norm(p->dev, out[i], rstd[i], own_rows(p, spare), rows, d, L2_EPS);
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
    p->dev->ops->kda_forward(p->dev, s->o, s->after.state, s->core, s->q, s->k,
                             own_rows(p, s->v), s->decay, s->beta, s->before.state, &shape);
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

/* d_in (lead and n rows) of q, k or v: the later piece's part is added, the earlier one's left. */
static void exchange_rows(struct pass *p, elem *d_in, const struct kda_saved *s, int i)
{
    const struct device_ops *ops = p->dev->ops;

    if (p->goes_on)
        ops->add(p->dev, last_rows(p, d_in), shared_rows(p, &s->gradients, i),
                 (p->spec->conv_kernel - 1) * wide_of(p));
    if (p->before)
        ops->copy(p->dev, shared_rows(p, &s->gradients, i), d_in, shared_bytes(p));
}

static void backward_qkv(struct pass *p, const struct unit_view *u, struct scratch *b, elem *dx,
                         const struct kda_saved *s)
{
    const struct device_ops *ops = p->dev->ops;
    const struct model_spec *m = p->spec;
    int64_t d = m->kda_head_dim, wide = d * m->kda_heads, rows = p->n * m->kda_heads;
    const elem *dy[2] = { b->d_q, b->d_k }, *unit[2] = { s->q, s->k };
    const float *rstd[2] = { s->q_rstd, s->k_rstd };
    int32_t both[2];
    const int32_t *cu_seqlens = led_seqlens(p, both);

    for (int i = 0; i < 3; i++) {
        elem *d_conv = i < 2 ? b->spare : b->d_v;
        elem *d_in = b->d_gate; /* free by now */
        if (i < 2)
            ops->l2_norm_backward(p->dev, own_rows(p, d_conv), dy[i], unit[i], rstd[i], rows, d);
        if (p->before) /* what came out for those rows is not this piece's */
            ops->zero(p->dev, d_conv, shared_bytes(p));
        ops->short_conv_backward(p->dev, d_in, gradient_of(u, conv_roles[i]), d_conv, s->pre[i],
                                 s->in[i], weight_of(u, conv_roles[i]), cu_seqlens, p->n_docs,
                                 wide, (int32_t)m->conv_kernel);
        exchange_rows(p, d_in, s, i);
        linear_backward(p, u, proj_roles[i], dx, 1, own_rows(p, d_in), s->x, m->hidden, wide);
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
    ops->kda_backward(p->dev, b.d_q, b.d_k, own_rows(p, b.d_v), b.d_decay, b.d_beta,
                      p->before ? s->gradients.state : NULL, b.d_o,
                      p->goes_on ? s->gradients.state : NULL, s->q, s->k, own_rows(p, s->v),
                      s->decay, s->beta, s->before.state, s->core, &shape);
    backward_gates(p, u, &b, dx, s);
    backward_qkv(p, u, &b, dx, s);
out:
    activations_release(p->act, mark);
}

/* ---- in segments ---------------------------------------------------------------------------- */

static int64_t state_floats(const struct pass *p)
{
    return wide_of(p) * p->spec->kda_head_dim;
}

static struct kda_ends ends_of(const struct pass *p, const struct kda_cut *cut, int32_t link)
{
    int64_t n_rows = 3 * (p->spec->conv_kernel - 1);
    if (!cut->states)
        return (struct kda_ends){0};
    return (struct kda_ends){ cut->states + link * state_floats(p),
                              segment_rows(p, cut->rows, link * n_rows, wide_of(p)) };
}

void kda_cut_carve(struct pass *p, struct kda_cut *out)
{
    int64_t n = p->segments->n_links, n_rows = 3 * (p->spec->conv_kernel - 1);

    out->states = activations_take_f32(p->act, n * state_floats(p));
    out->rows = activations_take(p->act, n * n_rows * wide_of(p));
}

void kda_cut_forward(struct pass *p, const struct unit_view *u, const elem *x, elem *y,
                     float beta, const struct kda_cut *cut)
{
    int64_t hidden = p->spec->hidden;

    for (int32_t i = 0; i < p->segments->n; i++) {
        const struct segment *g = &p->segments->all[i];
        struct activations_mark mark = activations_mark(p->act);
        struct pass part = segment_pass(p, g);
        struct kda_saved s;
        kda_carve(&part, CARVE_ALL, &s);
        if (g->before)
            s.before = ends_of(p, cut, g->link - 1);
        if (g->goes_on)
            s.after = ends_of(p, cut, g->link);
        kda_layer_forward(&part, u, segment_inputs(p, x, g->begin, hidden),
                          segment_rows(p, y, g->begin, hidden), beta, &s);
        activations_release(p->act, mark);
    }
}

void kda_cut_backward(struct pass *p, const struct unit_view *u, const elem *x, const elem *dy,
                      elem *dx, const struct kda_cut *cut)
{
    int64_t hidden = p->spec->hidden, n_rows = 3 * (p->spec->conv_kernel - 1);
    struct activations_mark begin = activations_mark(p->act);
    struct kda_ends gradients = { activations_take_f32(p->act, state_floats(p)),
                                  activations_take(p->act, n_rows * wide_of(p)) };

    for (int32_t i = p->segments->n; i-- > 0;) {
        const struct segment *g = &p->segments->all[i];
        const elem *in = segment_inputs(p, x, g->begin, hidden);
        struct activations_mark mark = activations_mark(p->act);
        struct pass part = segment_pass(p, g);
        struct kda_saved s;
        kda_carve(&part, CARVE_ALL, &s);
        if (g->before)
            s.before = ends_of(p, cut, g->link - 1);
        s.gradients = gradients;
        kda_layer_forward(&part, u, in, NULL, 0, &s);
        kda_layer_backward(&part, u, segment_inputs(p, dy, g->begin, hidden),
                           segment_rows(p, dx, g->begin, hidden), &s);
        activations_release(p->act, mark);
    }
    activations_release(p->act, begin);
}
