/* test_pointwise.c - norms, gates, activations, the short convolution and the decay gate: values
 * against the formula in double, gradients against finite differences */
#include "tests/gradcheck.h"

static struct random rng;
static struct device *dev;

#define IN_MAX 4

/* One op under test: its inputs, outputs and sizes; what is not used stays NULL. */
struct op {
    const char *what;
    int64_t rows, d;
    const int32_t *cu_seqlens;
    int32_t n_docs, kernel, heads;
    bool    bounded;
    float  *in[IN_MAX];
    int64_t n_in[IN_MAX];
    float  *y, *kept, *c;
    float  *grad[IN_MAX];
    float   added[IN_MAX];
    int64_t n_y;
    void (*forward)(struct op *);
    void (*backward)(struct op *);
    double (*truth)(const struct op *, int64_t i); /* NULL: checked elsewhere */
};

static double op_loss(void *ctx)
{
    struct op *op = ctx;
    op->forward(op);
    return weighted_sum(op->y, op->c, op->n_y);
}

/* Runs one op through both checks. grad[i] accumulates where added[i] is set. */
static void check(struct op *op)
{
    static const char *const names[IN_MAX] = {"x0", "x1", "x2", "x3"};
    struct gradient gradients[IN_MAX];
    size_t n_inputs = 0;
    op->y = filled(op->n_y, NAN);
    op->kept = filled(op->n_y, NAN);
    op->c = random_floats(&rng, op->n_y, 1);
    for (; n_inputs < IN_MAX && op->n_in[n_inputs] > 0; n_inputs++) {
        size_t k = n_inputs;
        op->grad[k] = filled(op->n_in[k], op->added[k] != 0 ? op->added[k] : NAN);
    }
    op->forward(op);
    for (int64_t i = 0; op->truth && i < op->n_y; i++) {
        double truth = op->truth(op, i);
        if (!(fabs(op->y[i] - truth) <= 2e-6 * (fabs(truth) + 0.1)))
            fail_msg("%s: element %lld is %.9g, not %.9g", op->what, (long long)i, op->y[i], truth);
    }
    op->backward(op);
    for (size_t k = 0; k < n_inputs; k++)
        gradients[k] = (struct gradient){names[k], op->in[k], op->grad[k], op->n_in[k],
                                         op->added[k]};
    gradcheck(op->what, &rng, op_loss, op, gradients, n_inputs, 1e-2);
    for (size_t k = 0; k < n_inputs; k++) {
        free(op->in[k]);
        free(op->grad[k]);
    }
    free(op->y);
    free(op->kept);
    free(op->c);
}

static const struct {
    int64_t rows, d;
} sizes[] = {{1, 1}, {1, 17}, {3, 8}, {7, 33}, {300, 5}, {260, 64}, {2, 1000}};

#define N_SIZES (sizeof sizes / sizeof sizes[0])
#define EPS     1e-5f

/* An op over rows of d with n_full inputs of that shape and, last, w (d) if weighted. */
static struct op make(const char *what, size_t size, size_t n_full, bool weighted)
{
    struct op op = {.what = what, .rows = sizes[size].rows, .d = sizes[size].d};
    op.n_y = op.rows * op.d;
    for (size_t k = 0; k < n_full; k++) {
        op.n_in[k] = op.n_y;
        op.in[k] = random_floats(&rng, op.n_y, 1);
    }
    if (weighted) {
        op.n_in[n_full] = op.d;
        op.in[n_full] = random_floats(&rng, op.d, 1);
        op.added[n_full] = 0.5f;
    }
    return op;
}

static double row_squares(const struct op *op, int64_t i)
{
    const float *x = op->in[0] + i / op->d * op->d;
    double sum = 0;
    for (int64_t j = 0; j < op->d; j++)
        sum += (double)x[j] * x[j];
    return sum;
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static void rms_forward(struct op *op)
{
    dev->ops->rms_norm(dev, op->y, op->kept, op->in[0], op->in[1], op->rows, op->d, EPS);
}

static void rms_backward(struct op *op)
{
    dev->ops->rms_norm_backward(dev, op->grad[0], op->grad[1], op->c, op->in[0], op->in[1],
                                op->kept, op->rows, op->d, op->added[0] != 0);
}

static double rms_truth(const struct op *op, int64_t i)
{
    return op->in[0][i] / sqrt(row_squares(op, i) / (double)op->d + EPS) * op->in[1][i % op->d];
}

static void gated_forward(struct op *op)
{
    dev->ops->gated_rms_norm(dev, op->y, op->kept, op->in[0], op->in[1], op->in[2], op->rows, op->d,
                             EPS);
}

static void gated_backward(struct op *op)
{
    dev->ops->gated_rms_norm_backward(dev, op->grad[0], op->grad[1], op->grad[2], op->c, op->in[0],
                                      op->in[1], op->in[2], op->kept, op->rows, op->d);
}

static double gated_truth(const struct op *op, int64_t i)
{
    return op->in[0][i] / sqrt(row_squares(op, i) / (double)op->d + EPS) * op->in[2][i % op->d] *
           sigmoid(op->in[1][i]);
}

static void l2_forward(struct op *op)
{
    dev->ops->l2_norm(dev, op->y, op->kept, op->in[0], op->rows, op->d, EPS);
}

static void l2_backward(struct op *op)
{
    dev->ops->l2_norm_backward(dev, op->grad[0], op->c, op->y, op->kept, op->rows, op->d);
}

static double l2_truth(const struct op *op, int64_t i)
{
    return op->in[0][i] / sqrt(row_squares(op, i) + EPS);
}

static void norms(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_SIZES; i++)
        for (int added = 0; added < 2; added++) {
            struct op op = make("rms_norm", i, 1, true);
            op.forward = rms_forward;
            op.backward = rms_backward;
            op.truth = rms_truth;
            op.added[0] = added ? 0.25f : 0;
            check(&op);
        }
    for (size_t i = 0; i < N_SIZES; i++) {
        struct op op = make("gated_rms_norm", i, 2, true);
        op.forward = gated_forward;
        op.backward = gated_backward;
        op.truth = gated_truth;
        check(&op);
    }
    for (size_t i = 0; i < N_SIZES; i++) {
        struct op op = make("l2_norm", i, 1, false);
        op.forward = l2_forward;
        op.backward = l2_backward;
        op.truth = l2_truth;
        check(&op);
    }
}

static void sigmoid_forward(struct op *op)
{
    dev->ops->sigmoid(dev, op->y, op->in[0], op->n_y);
}

static void sigmoid_backward(struct op *op)
{
    dev->ops->sigmoid_backward(dev, op->grad[0], op->c, op->y, op->n_y);
}

static double sigmoid_truth(const struct op *op, int64_t i)
{
    return sigmoid(op->in[0][i]);
}

static void gate_forward(struct op *op)
{
    dev->ops->sigmoid_gate(dev, op->y, op->in[0], op->in[1], op->n_y);
}

static void gate_backward(struct op *op)
{
    dev->ops->sigmoid_gate_backward(dev, op->grad[0], op->grad[1], op->c, op->in[0], op->in[1],
                                    op->n_y);
}

static double gate_truth(const struct op *op, int64_t i)
{
    return op->in[0][i] * sigmoid(op->in[1][i]);
}

#define B1 4.0f
#define B2 25.0f

static void situ_forward(struct op *op)
{
    dev->ops->situ(dev, op->y, op->in[0], op->in[1], op->n_y, B1, B2);
}

static void situ_backward(struct op *op)
{
    dev->ops->situ_backward(dev, op->grad[0], op->grad[1], op->c, op->in[0], op->in[1], op->n_y, B1,
                            B2);
}

static double situ_truth(const struct op *op, int64_t i)
{
    double a = op->in[0][i], u = op->in[1][i];
    return B1 * tanh(a / B1) * sigmoid(a) * B2 * tanh(u / B2);
}

static void swiglu_forward(struct op *op)
{
    dev->ops->swiglu(dev, op->y, op->in[0], op->in[1], op->n_y);
}

static void swiglu_backward(struct op *op)
{
    dev->ops->swiglu_backward(dev, op->grad[0], op->grad[1], op->c, op->in[0], op->in[1], op->n_y);
}

static double swiglu_truth(const struct op *op, int64_t i)
{
    return op->in[0][i] * sigmoid(op->in[0][i]) * op->in[1][i];
}

static const struct {
    const char *what;
    size_t n_inputs;
    void (*forward)(struct op *);
    void (*backward)(struct op *);
    double (*truth)(const struct op *, int64_t);
} activations[] = {
    {"sigmoid", 1, sigmoid_forward, sigmoid_backward, sigmoid_truth},
    {"sigmoid_gate", 2, gate_forward, gate_backward, gate_truth},
    {"situ", 2, situ_forward, situ_backward, situ_truth},
    {"swiglu", 2, swiglu_forward, swiglu_backward, swiglu_truth},
};

static void gates_and_activations(void **state)
{
    (void)state;
    for (size_t a = 0; a < sizeof activations / sizeof activations[0]; a++)
        for (size_t i = 0; i < N_SIZES; i++)
            for (int wide = 0; wide < 2; wide++) {
                struct op op = make(activations[a].what, i, activations[a].n_inputs, false);
                for (size_t k = 0; wide && k < activations[a].n_inputs; k++)
                    for (int64_t j = 0; j < op.n_y; j++)
                        op.in[k][j] *= 8; /* into the bends of tanh and sigmoid */
                op.forward = activations[a].forward;
                op.backward = activations[a].backward;
                op.truth = activations[a].truth;
                check(&op);
            }
}

/* ---- short convolution ---- */

static void conv_forward(struct op *op)
{
    dev->ops->short_conv(dev, op->y, op->kept, op->in[0], op->in[1], op->cu_seqlens, op->n_docs,
                         op->d, op->kernel);
}

static void conv_backward(struct op *op)
{
    dev->ops->short_conv_backward(dev, op->grad[0], op->grad[1], op->c, op->kept, op->in[0],
                                  op->in[1], op->cu_seqlens, op->n_docs, op->d, op->kernel);
}

static double conv_truth(const struct op *op, int64_t i)
{
    int64_t row = i / op->d, channel = i % op->d, begin = 0;
    for (int32_t doc = 0; doc < op->n_docs; doc++)
        if (op->cu_seqlens[doc] <= row)
            begin = op->cu_seqlens[doc];
    double sum = 0;
    for (int64_t back = 0; back < op->kernel && row - back >= begin; back++)
        sum += (double)op->in[1][channel * op->kernel + op->kernel - 1 - back] *
               op->in[0][(row - back) * op->d + channel];
    return sum * sigmoid(sum);
}

static const struct {
    const char *what;
    int32_t n_docs, cu_seqlens[6], kernel;
    int64_t channels;
} conv_cases[] = {
    {"short_conv: one token", 1, {0, 1}, 4, 3},
    {"short_conv: shorter than the window", 1, {0, 3}, 4, 16},
    {"short_conv: documents of 1, 2, 9 and an empty one", 4, {0, 1, 3, 3, 12}, 4, 7},
    {"short_conv: a window of one", 2, {0, 5, 8}, 1, 9},
    {"short_conv: documents over several tasks", 3, {0, 63, 130, 200}, 4, 40},
};

static void short_convolution(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof conv_cases / sizeof conv_cases[0]; i++) {
        int64_t channels = conv_cases[i].channels, kernel = conv_cases[i].kernel;
        struct op op = {
            .what = conv_cases[i].what, .d = channels, .cu_seqlens = conv_cases[i].cu_seqlens,
            .n_docs = conv_cases[i].n_docs, .kernel = (int32_t)kernel,
            .forward = conv_forward, .backward = conv_backward, .truth = conv_truth,
        };
        op.rows = op.cu_seqlens[op.n_docs];
        op.n_y = op.n_in[0] = op.rows * channels;
        op.n_in[1] = channels * kernel;
        op.in[0] = random_floats(&rng, op.n_in[0], 1);
        op.in[1] = random_floats(&rng, op.n_in[1], 1);
        op.added[1] = 0.5f;
        check(&op);
    }
}

/* ---- KDA's decay gate: z, dt_bias, a_log ---- */

#define BOUND -5.0f

static void decay_forward(struct op *op)
{
    dev->ops->kda_gate(dev, op->y, op->in[0], op->in[1], op->in[2], op->rows, op->heads,
                       (int32_t)op->d, op->bounded, BOUND);
}

static void decay_backward(struct op *op)
{
    dev->ops->kda_gate_backward(dev, op->grad[0], op->grad[1], op->grad[2], op->c, op->in[0],
                                op->in[1], op->in[2], op->rows, op->heads, (int32_t)op->d,
                                op->bounded, BOUND);
}

static double decay_truth(const struct op *op, int64_t i)
{
    int64_t head = i / op->d % op->heads;
    double z = (double)op->in[0][i] + op->in[1][i % (op->heads * op->d)];
    double rate = exp(op->in[2][head]);
    return op->bounded ? BOUND * sigmoid(rate * z) : -rate * log1p(exp(z));
}

static void decay_gate(void **state)
{
    (void)state;
    static const struct {
        int64_t rows, d;
        int32_t heads;
    } shapes[] = {{1, 1, 1}, {5, 7, 3}, {70, 16, 2}, {130, 32, 4}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int bounded = 0; bounded < 2; bounded++) {
            struct op op = {
                .what = bounded ? "kda_gate, bounded" : "kda_gate, softplus",
                .rows = shapes[i].rows, .d = shapes[i].d, .heads = shapes[i].heads,
                .bounded = bounded, .forward = decay_forward, .backward = decay_backward,
                .truth = decay_truth,
            };
            int64_t width = op.heads * op.d;
            op.n_y = op.n_in[0] = op.rows * width;
            op.n_in[1] = width;
            op.n_in[2] = op.heads;
            op.added[1] = op.added[2] = 0.5f;
            for (int k = 0; k < 3; k++)
                op.in[k] = random_floats(&rng, op.n_in[k], k == 2 ? 0.5f : 1);
            check(&op);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms),
        cmocka_unit_test(gates_and_activations),
        cmocka_unit_test(short_convolution),
        cmocka_unit_test(decay_gate),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
