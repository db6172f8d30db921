/* bench_mixers.c - cases of bench: what mixes tokens, KDA with its convolution and attention */
#include "worker/bench_cases_parts.h"

static const int32_t cu_seqlens[DOCS + 1] = {0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048};

/* ---- KDA: n tokens, heads of d ---- */

#define CONV_KERNEL 4

static void declare_conv(struct bench_case *c, struct device *dev)
{
    (void)dev;
    for (int i = 0; i < 3; i++)
        bench_set_in(c, i, c->n * c->d, 1);
    bench_set_in(c, 3, CONV_KERNEL * c->d, 1);
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
    bench_set_in(c, 0, c->n * width, 1);
    bench_set_in(c, 1, c->n * width, 1);
    bench_set_in(c, 2, width, 1);
    bench_set_in(c, 3, HEADS, 0.5f);
    c->n_out[0] = c->n * width;
    c->n_out[1] = width;
    c->n_out[2] = HEADS;
    c->flops = 12.0 * (double)(c->n * width);
    bench_count_bytes(c);
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
        bench_set_in(c, i, rows * c->d, 0.12f); /* q, k, v, g, dO; about unit rows */
    bench_set_in(c, 5, rows, 0.2f);
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
    bench_set_in(c, 0, rows * (c->d + c->m), 1);
    bench_set_in(c, 1, rows * 2 * c->d, 1);
    bench_set_in(c, 2, c->n * c->m, 1);
    bench_set_in(c, 3, rows * c->d, 1);
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

static const struct bench_case cases[] = {
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
};
const struct bench_family bench_mixers = {cases, sizeof cases / sizeof *cases};
