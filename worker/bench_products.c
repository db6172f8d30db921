/* bench_products.c - cases of bench: products of n rows, d in, m out, and those of experts */
#include "worker/bench_cases_parts.h"

#define SLOTS (TOKENS * TOP_K)

static void declare_product(struct bench_case *c, struct device *dev)
{
    (void)dev;
    bench_set_in(c, 0, c->n * c->d, 1);
    bench_set_in(c, 1, c->m * c->d, 1);
    bench_set_in(c, 2, c->n * c->m, 1);
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
    bench_set_in(c, 1, EXPERTS * c->m * c->d, 1);
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

/* Where each expert's rows and weights begin. */
static void find_experts(const struct bench_case *c, float *const *in,
                         int64_t offsets[EXPERTS + 1], const float *w[EXPERTS])
{
    expert_offsets(c->n, offsets);
    for (int e = 0; e < EXPERTS; e++)
        w[e] = in[1] + e * c->m * c->d;
}

static void run_grouped_linear(const struct bench_case *c, struct device *dev, float *const *in,
                               float *const *out)
{
    int64_t offsets[EXPERTS + 1];
    const float *w[EXPERTS];
    find_experts(c, in, offsets, w);
    dev->ops->grouped_linear(dev, out[0], in[0], w, offsets, EXPERTS, c->d, c->m);
}

static void run_grouped_linear_dx(const struct bench_case *c, struct device *dev, float *const *in,
                                  float *const *out)
{
    int64_t offsets[EXPERTS + 1];
    const float *w[EXPERTS];
    find_experts(c, in, offsets, w);
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
};
const struct bench_family bench_products = {cases, sizeof cases / sizeof *cases};
