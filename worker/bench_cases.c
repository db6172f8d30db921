/* bench_cases.c - the cases of bench, all families, and those that are of none */
#include "worker/bench_cases_parts.h"

#include <string.h>

void bench_set_in(struct bench_case *c, int i, int64_t n, float width)
{
    c->n_in[i] = n;
    c->width[i] = width;
}

void bench_count_bytes(struct bench_case *c)
{
    for (int i = 0; i < BENCH_TENSORS_MAX; i++)
        c->bytes += (double)sizeof(float) * (double)(c->n_in[i] + c->n_out[i]);
}

static void declare_combine(struct bench_case *c, struct device *dev)
{
    (void)dev;
    bench_set_in(c, 0, c->n * TOP_K * c->d, 1);
    bench_set_in(c, 1, c->n * TOP_K, 1);
    c->n_out[0] = c->n * c->d;
    c->flops = 2.0 * TOP_K * (double)(c->n * c->d);
    bench_count_bytes(c);
}

static void run_combine(const struct bench_case *c, struct device *dev, float *const *in,
                        float *const *out)
{
    dev->ops->combine(dev, out[0], in[0], in[1], c->n, TOP_K, c->d);
}

static void declare_router(struct bench_case *c, struct device *dev)
{
    (void)dev;
    bench_set_in(c, 0, c->n * c->d, 1);
    bench_set_in(c, 1, c->d, 0.1f);
    c->n_out[0] = c->n * c->d;
    c->n_out[1] = c->n * TOP_K;
    c->n_out[2] = c->n * TOP_K; /* ids, as bits */
    c->flops = 10.0 * (double)(c->n * c->d);
    bench_count_bytes(c);
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
        bench_set_in(c, i, c->n * c->d, 1);
    bench_set_in(c, 4, c->d, 0.1f);
    c->n_out[0] = c->n * c->d;
    c->n_out[1] = c->n * 4;
    c->flops = 4 * 6.0 * (double)(c->n * c->d);
    bench_count_bytes(c);
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
    bench_set_in(c, 0, c->n * c->d, 1);
    bench_set_in(c, 1, c->m * c->d, 0.1f);
    c->n_out[0] = c->n * c->d;
    c->n_out[1] = c->m * c->d;
    c->n_out[2] = c->n;                                   /* the labels, as bits */
    c->n_out[3] = sizeof(double) / sizeof(float);         /* the loss */
    c->is_own[2] = c->is_own[3] = true;
    c->flops = 6.0 * (double)(c->n * c->d * c->m);
    bench_count_bytes(c);
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
    bench_set_in(c, 0, c->n, 1);
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

static const struct bench_case cases[] = {
    CASE("attn_res", "4 rows of 2048 x 256", declare_attn_res, run_attn_res, 2048, 256),
    CASE("router", "2048 x 32, top 4", declare_router, run_router, 2048, EXPERTS),
    CASE("combine", "2048 x 4 x 256", declare_combine, run_combine, 2048, 256),
    CASE("linear_cross_entropy", "2048 x 256, vocabulary 256", declare_head, run_head, 2048, 256,
         256),
    CASE("adamw", "8450000", declare_adamw, run_adamw, 8450000),
};
static const struct bench_family others = {cases, sizeof cases / sizeof *cases};

/* ---- all of them, in the order in which they are told --------------------------------------- */

const struct bench_case *bench_case_at(size_t i)
{
    const struct bench_family *all[] = {&bench_products, &bench_rows, &bench_mixers, &others};
    for (size_t f = 0; f < sizeof all / sizeof *all; i -= all[f++]->n)
        if (i < all[f]->n)
            return &all[f]->cases[i];
    return NULL;
}

const struct bench_case *bench_case_of(const char *op)
{
    const struct bench_case *c;
    for (size_t i = 0; (c = bench_case_at(i)) && strcmp(c->op, op) != 0;)
        i++;
    return c;
}
