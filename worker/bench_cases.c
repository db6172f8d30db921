/* bench_cases.c - what bench runs: ops with their shapes, inputs and costs
 *
 * The shapes are those of a small hybrid: 8 documents of 256 tokens, hidden 256, 4 heads of 64,
 * 32 experts of width 64 with 4 chosen. */
#include "worker/bench_cases.h"

#define TOKENS  2048
#define DOCS    8
#define HEADS   4
#define EXPERTS 32
#define TOP_K   4
#define SLOTS   (TOKENS * TOP_K)

static const int32_t cu_seqlens[DOCS + 1] = {0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048};

static void set_in(struct bench_case *c, int i, int64_t n, float width)
{
    c->n_in[i] = n;
    c->width[i] = width;
}

/* Bytes of every tensor once, which is the least; accumulating ops add what they read again. */
static void count_bytes(struct bench_case *c)
{
    for (int i = 0; i < BENCH_TENSORS_MAX; i++)
        c->bytes += (double)sizeof(float) * (double)(c->n_in[i] + c->n_out[i]);
}

/* ---- products: n rows, d in, m out ---- */

static void declare_product(struct bench_case *c, struct device *dev)
{
    (void)dev;
    set_in(c, 0, c->n * c->d, 1);
    set_in(c, 1, c->m * c->d, 1);
    set_in(c, 2, c->n * c->m, 1);
    c->n_out[0] = c->n * (c->m > c->d ? c->m : c->d);
    c->n_out[1] = c->m * c->d;
    c->flops = 2.0 * (double)(c->n * c->d * c->m);
    c->bytes = 4.0 * (double)(c->n * c->d + c->m * c->d + c->n * c->m);
}

static void run_linear(const struct bench_case *c, struct device *dev, float *const *in,
                       float *const *out)
{
    dev->ops->linear(dev, out[0], in[0], in[1], c->n, c->d, c->m, 0);
}

static void run_linear_dx(const struct bench_case *c, struct device *dev, float *const *in,
                          float *const *out)
{
    dev->ops->linear_dx(dev, out[0], in[2], in[1], c->n, c->d, c->m, 0);
}

static void run_linear_dw(const struct bench_case *c, struct device *dev, float *const *in,
                          float *const *out)
{
    dev->ops->linear_dw(dev, out[1], in[2], in[0], c->n, c->d, c->m);
}

/* The experts get rows in the ratio 1 : 3, in steps. */
static void declare_grouped(struct bench_case *c, struct device *dev)
{
    declare_product(c, dev);
    set_in(c, 1, EXPERTS * c->m * c->d, 1);
    c->n_out[1] = EXPERTS * c->m * c->d;
    c->bytes = 4.0 * (double)(c->n * c->d + EXPERTS * c->m * c->d + c->n * c->m);
}

static void expert_offsets(int64_t n, int64_t *offsets)
{
    int64_t total = 0;
    for (int e = 0; e < EXPERTS; e++) {
        offsets[e] = total * n / (2 * EXPERTS);
        total += 1 + e % 3;
    }
    offsets[EXPERTS] = n;
}

static void run_grouped_linear(const struct bench_case *c, struct device *dev, float *const *in,
                               float *const *out)
{
    int64_t offsets[EXPERTS + 1];
    const float *w[EXPERTS];
    expert_offsets(c->n, offsets);
    for (int e = 0; e < EXPERTS; e++)
        w[e] = in[1] + e * c->m * c->d;
    dev->ops->grouped_linear(dev, out[0], in[0], w, offsets, EXPERTS, c->d, c->m);
}

static void run_grouped_linear_dx(const struct bench_case *c, struct device *dev, float *const *in,
                                  float *const *out)
{
    int64_t offsets[EXPERTS + 1];
    const float *w[EXPERTS];
    expert_offsets(c->n, offsets);
    for (int e = 0; e < EXPERTS; e++)
        w[e] = in[1] + e * c->m * c->d;
    dev->ops->grouped_linear_dx(dev, out[0], in[2], w, offsets, EXPERTS, c->d, c->m, 0);
}

static void run_grouped_linear_dw(const struct bench_case *c, struct device *dev, float *const *in,
                                  float *const *out)
{
    int64_t offsets[EXPERTS + 1];
    float *dw[EXPERTS];
    expert_offsets(c->n, offsets);
    for (int e = 0; e < EXPERTS; e++)
        dw[e] = out[1] + e * c->m * c->d;
    dev->ops->grouped_linear_dw(dev, dw, in[2], in[0], offsets, EXPERTS, c->d, c->m);
}

/* ---- rows: n rows of d; three full inputs and two full outputs at most ---- */

static void declare_rows(struct bench_case *c, int n_inputs, int n_outputs, double flops_each)
{
    for (int i = 0; i < n_inputs; i++)
        set_in(c, i, c->n * c->d, 1);
    for (int i = 0; i < n_outputs; i++)
        c->n_out[i] = c->n * c->d;
    c->flops = flops_each * (double)(c->n * c->d);
    count_bytes(c);
    set_in(c, n_inputs, c->d, 1);   /* a weight */
    set_in(c, n_inputs + 1, c->n, 1); /* a number a row */
    c->n_out[n_outputs] = c->n;
    c->n_out[n_outputs + 1] = c->d;
}

static void declare_1_1(struct bench_case *c, struct device *dev)
{
    (void)dev;
    declare_rows(c, 1, 1, 10);
}

static void declare_2_1(struct bench_case *c, struct device *dev)
{
    (void)dev;
    declare_rows(c, 2, 1, 10);
}

static void declare_3_2(struct bench_case *c, struct device *dev)
{
    (void)dev;
    declare_rows(c, 3, 2, 20);
}

static void run_rms_norm(const struct bench_case *c, struct device *dev, float *const *in,
                         float *const *out)
{
    dev->ops->rms_norm(dev, out[0], out[1], in[0], in[1], c->n, c->d, 1e-5f);
}

static void run_rms_norm_backward(const struct bench_case *c, struct device *dev, float *const *in,
                                  float *const *out)
{
    dev->ops->rms_norm_backward(dev, out[0], out[2], in[0], in[1], in[2], in[3], c->n, c->d, 0);
}

static void run_gated_rms_norm(const struct bench_case *c, struct device *dev, float *const *in,
                               float *const *out)
{
    dev->ops->gated_rms_norm(dev, out[0], out[1], in[0], in[1], in[2], c->n, c->d, 1e-5f);
}

static void run_gated_rms_norm_backward(const struct bench_case *c, struct device *dev,
                                        float *const *in, float *const *out)
{
    dev->ops->gated_rms_norm_backward(dev, out[0], out[1], out[3], in[0], in[1], in[2], in[3],
                                      in[4], c->n, c->d);
}

static void run_l2_norm(const struct bench_case *c, struct device *dev, float *const *in,
                        float *const *out)
{
    dev->ops->l2_norm(dev, out[0], out[1], in[0], c->n, c->d, 1e-6f);
}

static void run_l2_norm_backward(const struct bench_case *c, struct device *dev, float *const *in,
                                 float *const *out)
{
    dev->ops->l2_norm_backward(dev, out[0], in[0], in[1], in[3], c->n, c->d);
}

static void run_sigmoid_gate(const struct bench_case *c, struct device *dev, float *const *in,
                             float *const *out)
{
    dev->ops->sigmoid_gate(dev, out[0], in[0], in[1], c->n * c->d);
}

static void run_sigmoid_gate_backward(const struct bench_case *c, struct device *dev,
                                      float *const *in, float *const *out)
{
    dev->ops->sigmoid_gate_backward(dev, out[0], out[1], in[0], in[1], in[2], c->n * c->d);
}

static void run_situ(const struct bench_case *c, struct device *dev, float *const *in,
                     float *const *out)
{
    dev->ops->situ(dev, out[0], in[0], in[1], c->n * c->d, 4, 25);
}

static void run_situ_backward(const struct bench_case *c, struct device *dev, float *const *in,
                              float *const *out)
{
    dev->ops->situ_backward(dev, out[0], out[1], in[0], in[1], in[2], c->n * c->d, 4, 25);
}

static void run_swiglu(const struct bench_case *c, struct device *dev, float *const *in,
                       float *const *out)
{
    dev->ops->swiglu(dev, out[0], in[0], in[1], c->n * c->d);
}

static void run_swiglu_backward(const struct bench_case *c, struct device *dev, float *const *in,
                                float *const *out)
{
    dev->ops->swiglu_backward(dev, out[0], out[1], in[0], in[1], in[2], c->n * c->d);
}

static void run_axpy(const struct bench_case *c, struct device *dev, float *const *in,
                     float *const *out)
{
    dev->ops->axpy(dev, out[0], 0.5f, in[0], c->n * c->d);
}

/* ---- KDA: n tokens, heads of d ---- */

#define CONV_KERNEL 4

static void declare_conv(struct bench_case *c, struct device *dev)
{
    (void)dev;
    for (int i = 0; i < 3; i++)
        set_in(c, i, c->n * c->d, 1);
    set_in(c, 3, CONV_KERNEL * c->d, 1);
    c->n_out[0] = c->n_out[1] = c->n * c->d;
    c->n_out[2] = CONV_KERNEL * c->d;
    c->flops = 10.0 * (double)(c->n * c->d);
    c->bytes = 4.0 * 4 * (double)(c->n * c->d);
}

static void run_short_conv(const struct bench_case *c, struct device *dev, float *const *in,
                           float *const *out)
{
    dev->ops->short_conv(dev, out[0], out[1], in[0], in[3], cu_seqlens, DOCS, c->d, CONV_KERNEL);
}

static void run_short_conv_backward(const struct bench_case *c, struct device *dev,
                                    float *const *in, float *const *out)
{
    dev->ops->short_conv_backward(dev, out[0], out[2], in[0], in[1], in[2], in[3], cu_seqlens, DOCS,
                                  c->d, CONV_KERNEL);
}

static void declare_gate(struct bench_case *c, struct device *dev)
{
    (void)dev;
    int64_t width = HEADS * c->d;
    set_in(c, 0, c->n * width, 1);
    set_in(c, 1, c->n * width, 1);
    set_in(c, 2, width, 1);
    set_in(c, 3, HEADS, 0.5f);
    c->n_out[0] = c->n * width;
    c->n_out[1] = width;
    c->n_out[2] = HEADS;
    c->flops = 12.0 * (double)(c->n * width);
    count_bytes(c);
}

static void run_kda_gate(const struct bench_case *c, struct device *dev, float *const *in,
                         float *const *out)
{
    dev->ops->kda_gate(dev, out[0], in[0], in[2], in[3], c->n, HEADS, (int32_t)c->d, true, -5);
}

static void run_kda_gate_backward(const struct bench_case *c, struct device *dev, float *const *in,
                                  float *const *out)
{
    dev->ops->kda_gate_backward(dev, out[0], out[1], out[2], in[1], in[0], in[2], in[3], c->n,
                                HEADS, (int32_t)c->d, true, -5);
}

static struct kda_shape kda_shape_of(const struct bench_case *c)
{
    return (struct kda_shape){c->n, cu_seqlens, DOCS, HEADS, (int32_t)c->d, 0.125f};
}

/* Operations per token and head: 6 d^2 + 3 C d + C^2 forward, about 2.5 times that backward. */
static void declare_kda(struct bench_case *c, struct device *dev)
{
    struct kda_shape shape = kda_shape_of(c);
    int64_t rows = c->n * HEADS;
    double core = 6.0 * (double)(c->d * c->d) + 3.0 * 64 * (double)c->d + 64 * 64;
    for (int i = 0; i < 5; i++)
        set_in(c, i, rows * c->d, 0.12f); /* q, k, v, g, dO; about unit rows */
    set_in(c, 5, rows, 0.2f);
    c->n_out[0] = (int64_t)dev->ops->kda_saved_floats(dev, &shape);
    c->is_own[0] = true;
    for (int i = 1; i <= 5; i++)
        c->n_out[i] = rows * c->d;
    c->n_out[6] = rows;
    c->flops = core * (double)rows;
    c->bytes = 4.0 * 5 * (double)(rows * c->d);
}

static void declare_kda_backward(struct bench_case *c, struct device *dev)
{
    declare_kda(c, dev);
    c->flops *= 3.5; /* the forward again, for its saved state, and the backward */
    c->bytes *= 3;
}

static void run_kda_forward(const struct bench_case *c, struct device *dev, float *const *in,
                            float *const *out)
{
    struct kda_shape shape = kda_shape_of(c);
    int64_t n = c->n * HEADS * c->d;
    dev->ops->zero(dev, out[2], (size_t)n * sizeof(float));
    dev->ops->sigmoid(dev, out[3], in[3], n);
    dev->ops->axpy(dev, out[2], -0.2f, out[3], n); /* the decay: g < 0 */
    dev->ops->kda_forward(dev, out[1], NULL, out[0], in[0], in[1], in[2], out[2], in[5], NULL,
                          &shape);
}

static void run_kda_backward(const struct bench_case *c, struct device *dev, float *const *in,
                             float *const *out)
{
    struct kda_shape shape = kda_shape_of(c);
    run_kda_forward(c, dev, in, out);
    dev->ops->kda_backward(dev, out[1], out[3], out[4], out[5], out[6], NULL, in[4], NULL, in[0],
                           in[1], in[2], out[2], in[5], NULL, out[0], &shape);
}

/* ---- attention: n tokens, heads of d + m shared, values of d ---- */

static struct attention_shape attention_shape_of(const struct bench_case *c)
{
    return (struct attention_shape){
        c->n, cu_seqlens, DOCS, HEADS, (int32_t)c->d, (int32_t)c->m, (int32_t)c->d, 0.1f,
    };
}

static void declare_attention(struct bench_case *c, struct device *dev)
{
    (void)dev;
    int64_t rows = c->n * HEADS;
    double pairs = (double)rows * (TOKENS / DOCS) / 2;
    set_in(c, 0, rows * (c->d + c->m), 1);
    set_in(c, 1, rows * 2 * c->d, 1);
    set_in(c, 2, c->n * c->m, 1);
    set_in(c, 3, rows * c->d, 1);
    c->n_out[0] = rows * c->d;
    c->n_out[1] = rows;
    c->n_out[2] = rows * (c->d + c->m);
    c->n_out[3] = rows * 2 * c->d;
    c->n_out[4] = c->n * c->m;
    c->flops = pairs * 2 * (double)(2 * c->d + c->m);
    c->bytes = 4.0 * (double)(rows * (4 * c->d + c->m));
}

static void declare_attention_backward(struct bench_case *c, struct device *dev)
{
    declare_attention(c, dev);
    c->flops *= 3.5;
    c->bytes *= 3;
}

static void run_attention(const struct bench_case *c, struct device *dev, float *const *in,
                          float *const *out)
{
    struct attention_shape shape = attention_shape_of(c);
    dev->ops->attention(dev, out[0], out[1], in[0], in[1], in[2], c->m, &shape);
}

static void run_attention_backward(const struct bench_case *c, struct device *dev, float *const *in,
                                   float *const *out)
{
    struct attention_shape shape = attention_shape_of(c);
    run_attention(c, dev, in, out);
    dev->ops->attention_backward(dev, out[2], out[3], out[4], c->m, in[3], out[0], out[1], in[0],
                                 in[1], in[2], c->m, &shape);
}

/* ---- the rest ---- */

static void declare_combine(struct bench_case *c, struct device *dev)
{
    (void)dev;
    set_in(c, 0, c->n * TOP_K * c->d, 1);
    set_in(c, 1, c->n * TOP_K, 1);
    c->n_out[0] = c->n * c->d;
    c->flops = 2.0 * TOP_K * (double)(c->n * c->d);
    count_bytes(c);
}

static void run_combine(const struct bench_case *c, struct device *dev, float *const *in,
                        float *const *out)
{
    dev->ops->combine(dev, out[0], in[0], in[1], c->n, TOP_K, c->d);
}

static void declare_router(struct bench_case *c, struct device *dev)
{
    (void)dev;
    set_in(c, 0, c->n * c->d, 1);
    set_in(c, 1, c->d, 0.1f);
    c->n_out[0] = c->n * c->d;
    c->n_out[1] = c->n * TOP_K;
    c->n_out[2] = c->n * TOP_K; /* ids, as bits */
    c->flops = 10.0 * (double)(c->n * c->d);
    count_bytes(c);
}

static void run_router(const struct bench_case *c, struct device *dev, float *const *in,
                       float *const *out)
{
    struct router_shape shape = {c->n, (int32_t)c->d, TOP_K, true, 1};
    dev->ops->router(dev, out[0], (int32_t *)out[2], out[1], in[0], in[1], &shape);
}

static void declare_attn_res(struct bench_case *c, struct device *dev)
{
    (void)dev;
    for (int i = 0; i < 4; i++)
        set_in(c, i, c->n * c->d, 1);
    set_in(c, 4, c->d, 0.1f);
    c->n_out[0] = c->n * c->d;
    c->n_out[1] = c->n * 4;
    c->flops = 4 * 6.0 * (double)(c->n * c->d);
    count_bytes(c);
}

static void run_attn_res(const struct bench_case *c, struct device *dev, float *const *in,
                         float *const *out)
{
    const float *rows[] = {in[0], in[1], in[2], in[3]};
    dev->ops->attn_res(dev, out[0], out[1], rows, 4, in[4], in[4], c->n, c->d, 1e-5f);
}

/* n rows of d against a vocabulary of m; the labels are the shape's own. */
static void declare_head(struct bench_case *c, struct device *dev)
{
    (void)dev;
    set_in(c, 0, c->n * c->d, 1);
    set_in(c, 1, c->m * c->d, 0.1f);
    c->n_out[0] = c->n * c->d;
    c->n_out[1] = c->m * c->d;
    c->n_out[2] = c->n;                                   /* the labels, as bits */
    c->n_out[3] = sizeof(double) / sizeof(float);         /* the loss */
    c->is_own[2] = c->is_own[3] = true;
    c->flops = 6.0 * (double)(c->n * c->d * c->m);
    count_bytes(c);
}

static void run_head(const struct bench_case *c, struct device *dev, float *const *in,
                     float *const *out)
{
    static int32_t labels[TOKENS];
    for (int64_t i = 0; i < c->n; i++)
        labels[i] = (int32_t)(i * 7919 % c->m);
    int32_t *to = (int32_t *)out[2];
    dev->ops->to_device(dev, to, labels, (size_t)c->n * sizeof *labels);
    dev->ops->linear_cross_entropy(dev, (double *)out[3], out[0], out[1], in[0], in[1], NULL,
                                   to, c->n, c->d, c->m);
}

static void declare_adamw(struct bench_case *c, struct device *dev)
{
    (void)dev;
    set_in(c, 0, c->n, 1);
    for (int i = 0; i < 3; i++)
        c->n_out[i] = c->n;
    c->flops = 15.0 * (double)c->n;
    c->bytes = 4.0 * 7 * (double)c->n;
}

static void run_adamw(const struct bench_case *c, struct device *dev, float *const *in,
                      float *const *out)
{
    const struct adamw_config config = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 0.1f, 0.05f};
    dev->ops->adamw(dev, out[0], out[1], out[2], NULL, in[0], c->n, &config);
}

#define CASE(op, shape, declare, run, ...) {op, shape, declare, run, __VA_ARGS__}

static const struct bench_case cases[] = {
    CASE("linear", "2048 x 256 -> 256", declare_product, run_linear, 2048, 256, 256),
    CASE("linear", "2048 x 256 -> 64", declare_product, run_linear, 2048, 256, 64),
    CASE("linear", "2048 x 256 -> 1024", declare_product, run_linear, 2048, 256, 1024),
    CASE("linear_dx", "2048 x 256 <- 256", declare_product, run_linear_dx, 2048, 256, 256),
    CASE("linear_dw", "2048: 256 x 256", declare_product, run_linear_dw, 2048, 256, 256),
    CASE("grouped_linear", "8192 x 256 -> 64, 32 experts", declare_grouped, run_grouped_linear,
         SLOTS, 256, 64),
    CASE("grouped_linear", "8192 x 64 -> 256, 32 experts", declare_grouped, run_grouped_linear,
         SLOTS, 64, 256),
    CASE("grouped_linear", "8192 x 256 -> 128, 32 experts", declare_grouped, run_grouped_linear,
         SLOTS, 256, 128),
    CASE("grouped_linear_dx", "8192 x 256 <- 64, 32 experts", declare_grouped,
         run_grouped_linear_dx, SLOTS, 256, 64),
    CASE("grouped_linear_dw", "8192: 64 x 256, 32 experts", declare_grouped,
         run_grouped_linear_dw, SLOTS, 256, 64),
    CASE("rms_norm", "2048 x 256", declare_1_1, run_rms_norm, 2048, 256),
    CASE("rms_norm_backward", "2048 x 256", declare_2_1, run_rms_norm_backward, 2048, 256),
    CASE("gated_rms_norm", "8192 x 64", declare_2_1, run_gated_rms_norm, 8192, 64),
    CASE("gated_rms_norm_backward", "8192 x 64", declare_3_2, run_gated_rms_norm_backward, 8192,
         64),
    CASE("l2_norm", "8192 x 64", declare_1_1, run_l2_norm, 8192, 64),
    CASE("l2_norm_backward", "8192 x 64", declare_2_1, run_l2_norm_backward, 8192, 64),
    CASE("sigmoid_gate", "2048 x 256", declare_2_1, run_sigmoid_gate, 2048, 256),
    CASE("sigmoid_gate_backward", "2048 x 256", declare_3_2, run_sigmoid_gate_backward, 2048, 256),
    CASE("situ", "8192 x 64", declare_2_1, run_situ, 8192, 64),
    CASE("situ_backward", "8192 x 64", declare_3_2, run_situ_backward, 8192, 64),
    CASE("swiglu", "8192 x 64", declare_2_1, run_swiglu, 8192, 64),
    CASE("swiglu_backward", "8192 x 64", declare_3_2, run_swiglu_backward, 8192, 64),
    CASE("axpy", "2048 x 256", declare_1_1, run_axpy, 2048, 256),
    CASE("short_conv", "2048 x 256, window 4", declare_conv, run_short_conv, 2048, 256),
    CASE("short_conv_backward", "2048 x 256, window 4", declare_conv, run_short_conv_backward, 2048,
         256),
    CASE("kda_gate", "2048 x 4 x 64", declare_gate, run_kda_gate, 2048, 64),
    CASE("kda_gate_backward", "2048 x 4 x 64", declare_gate, run_kda_gate_backward, 2048, 64),
    CASE("kda_forward", "8 x 256, 4 heads of 64", declare_kda, run_kda_forward, 2048, 64),
    CASE("kda_forward+backward", "8 x 256, 4 heads of 64", declare_kda_backward, run_kda_backward,
         2048, 64),
    CASE("attention", "8 x 256, 4 heads of 64 + 32", declare_attention, run_attention, 2048, 64,
         32),
    CASE("attention+backward", "8 x 256, 4 heads of 64 + 32", declare_attention_backward,
         run_attention_backward, 2048, 64, 32),
    CASE("attn_res", "4 rows of 2048 x 256", declare_attn_res, run_attn_res, 2048, 256),
    CASE("router", "2048 x 32, top 4", declare_router, run_router, 2048, EXPERTS),
    CASE("combine", "2048 x 4 x 256", declare_combine, run_combine, 2048, 256),
    CASE("linear_cross_entropy", "2048 x 256, vocabulary 256", declare_head, run_head, 2048, 256,
         256),
    CASE("adamw", "8450000", declare_adamw, run_adamw, 8450000),
};

const struct bench_case *bench_cases(size_t *out_n)
{
    *out_n = sizeof cases / sizeof cases[0];
    return cases;
}
