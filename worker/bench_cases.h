/* bench_cases.h - what bench runs: ops with their shapes, inputs and costs */
#ifndef WORKER_BENCH_CASES_H
#define WORKER_BENCH_CASES_H

#include "kernels/device.h"

#define BENCH_TENSORS_MAX 12

/* One op at one shape. Buffers are declared by the case and made by the caller. */
struct bench_case {
    const char *op;
    const char *shape; /* as printed */
    /* Sizes on that device, costs and the width of the random inputs. */
    void (*declare)(struct bench_case *c, struct device *dev);
    /* One call; in and out are the device's buffers. */
    void (*run)(const struct bench_case *c, struct device *dev, float *const *in,
                float *const *out);
    int64_t n, d, m; /* of the shape; what they mean is the case's own */

    int64_t n_in[BENCH_TENSORS_MAX], n_out[BENCH_TENSORS_MAX]; /* floats, 0 ends */
    float   width[BENCH_TENSORS_MAX];                          /* of the inputs */
    bool    is_own[BENCH_TENSORS_MAX]; /* outputs whose content is the device's own affair */
    double  flops, bytes;
};

/* The i-th case; NULL after the last. The caller copies before declare. */
const struct bench_case *bench_case_at(size_t i);
/* The first of that op, or NULL. */
const struct bench_case *bench_case_of(const char *op);

#endif
