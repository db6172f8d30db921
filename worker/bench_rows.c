/* bench_rows.c - cases of bench: n rows of d; three full inputs and two full outputs at most */
#include "worker/bench_cases_parts.h"

static void declare_rows(struct bench_case *c, int n_inputs, int n_outputs, double flops_each)
{
    for (int i = 0; i < n_inputs; i++)
        bench_set_in(c, i, c->n * c->d, 1);
    for (int i = 0; i < n_outputs; i++)
        c->n_out[i] = c->n * c->d;
    c->flops = flops_each * (double)(c->n * c->d);
    bench_count_bytes(c);
    bench_set_in(c, n_inputs, c->d, 1);   /* a weight */
    bench_set_in(c, n_inputs + 1, c->n, 1); /* a number a row */
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

static const struct bench_case cases[] = {
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
};
const struct bench_family bench_rows = {cases, sizeof cases / sizeof *cases};
