/* cuda_ops.h - how a family of ops says what to compare between a device and the cpu
 *
 * A case is a function that makes its tensors and calls the op within TRIAL_RUN. It runs twice from
 * the same seed, on the cpu (the definition) and on the device under test, and what it declared as
 * outputs is compared in the order of declaration. It must not look at t->dev to choose shapes or
 * numbers. Example:
 *
 *     static void linear(struct trial *t)
 *     {
 *         int64_t n = t->d[0], in = t->d[1], out = t->d[2];
 *         const elem *x = in_elems(t, n * in, 1), *w = in_elems(t, out * in, 0.1f);
 *         elem *y = out_elems(t, "y", n * out);
 *         TRIAL_RUN(t)
 *             t->dev->ops->linear(t->dev, y, x, w, n, in, out, 0);
 *     }
 *     static const struct op_case cases[] = {{"linear", linear, {1, 33, 7}}, ...};
 *     OP_FAMILY(products, cases)
 *
 * Inputs are random; with bf16 elements the cpu gets the rounded numbers as float32. Outputs start
 * as NaN. Behind every tensor lie bytes that must not change. Small cases run once with aligned
 * tensors and once with all elements and floats displaced by one, as views into blocks are. */
#ifndef TESTS_CUDA_OPS_H
#define TESTS_CUDA_OPS_H

#include "kernels/device.h"

#define TRIAL_DIMS_MAX 9

struct trial {
    struct device *dev;
    const int64_t *d; /* the case's shape */

    /* A case may set these: tolerances of the worst relative error, 0 for the usual ones, and what
     * --bench counts. */
    double tolerance_f32, tolerance_bf16;
    double flops, bytes;

    struct trial_state *state; /* the harness's */
};

enum case_size {
    CASE_SMALL, /* in the self-test, too */
    CASE_LARGE, /* compared on a GPU only: a model's own shapes */
    CASE_BENCH, /* only timed, by --bench */
};

struct op_case {
    const char *op;
    void (*run)(struct trial *t);
    int64_t d[TRIAL_DIMS_MAX];
    enum case_size size;
};

struct op_family {
    const struct op_case *cases;
    size_t n_cases;
    struct op_family *next;
};

void op_family_add(struct op_family *f);

/* At the end of a family's file. */
#define OP_FAMILY(name, table)                                                                     \
    __attribute__((constructor)) static void add_##name(void)                                      \
    {                                                                                              \
        static struct op_family family = {table, sizeof(table) / sizeof(table)[0], NULL};          \
        op_family_add(&family);                                                                    \
    }

/* The calls that are compared, and timed by --bench, which repeats them. */
#define TRIAL_RUN(t) for (trial_begin(t); trial_again(t);)
void trial_begin(struct trial *t);
bool trial_again(struct trial *t);

/* ---- inputs on t->dev: normal random numbers of the given width ---- */
elem  *in_elems(struct trial *t, int64_t n, float width);
float *in_floats(struct trial *t, int64_t n, float width);
/* The given ones: elements are rounded. */
elem  *in_elems_of(struct trial *t, const float *host, int64_t n);
float *in_floats_of(struct trial *t, const float *host, int64_t n);
void  *in_bytes(struct trial *t, const void *host, size_t n_bytes);

/* ---- outputs: NaN, or all ones in integers, before the op ---- */
elem    *out_elems(struct trial *t, const char *name, int64_t n);
float   *out_floats(struct trial *t, const char *name, int64_t n);
/* At most n * allowed may differ; 0: all are equal. */
int32_t *out_i32(struct trial *t, const char *name, int64_t n, double allowed);
int64_t *out_i64(struct trial *t, const char *name, int64_t n, double allowed);

/* ---- read and written: random before the op ---- */
elem   *inout_elems(struct trial *t, const char *name, int64_t n, float width);
float  *inout_floats(struct trial *t, const char *name, int64_t n, float width);
/* One double, as acc_loss. */
double *inout_double(struct trial *t, const char *name, double before);
int32_t *inout_i32(struct trial *t, const char *name, const int32_t *before, int64_t n,
                   double allowed);
int64_t *inout_i64(struct trial *t, const char *name, const int64_t *before, int64_t n,
                   double allowed);

/* Of an output whose true numbers cancel: they are as close to the definition as sums of numbers of
 * this size can be, so errors are taken relative to it where the numbers themselves are smaller. */
void out_scale(struct trial *t, const void *out, double scale);

/* What no one compares: NaN before the op, as saved states. */
void *scratch_bytes(struct trial *t, size_t n_bytes);

/* ---- random numbers of the case, the same in both runs ---- */
double  trial_uniform(struct trial *t);               /* in [0, 1) */
float   trial_normal(struct trial *t);
int64_t trial_below(struct trial *t, int64_t n);      /* in [0, n) */
/* n_docs + 1 row numbers from 0 to n, n_docs <= n; lives until the case's end. */
const int32_t *trial_documents(struct trial *t, int64_t n, int32_t n_docs);
/* Host memory, zeroed, that lives until the case's end. */
void *trial_host(struct trial *t, size_t n_bytes);

#endif
