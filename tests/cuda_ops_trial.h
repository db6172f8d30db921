/* cuda_ops_trial.h - a case's tensors on one device, as cuda_ops.c looks at them */
#ifndef TESTS_CUDA_OPS_TRIAL_H
#define TESTS_CUDA_OPS_TRIAL_H

#include "tests/cuda_ops.h"

#include "common/version.h"
#if BALLAST_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#define TENSORS_MAX 64
#define GUARD_BYTES 256  /* behind each tensor */
#define POISON      0xff /* NaN in float32, bfloat16 and double */
#define REPEATS     15   /* timed runs */
#define FLUSH_BYTES ((size_t)256 << 20) /* more than any cache; written between them */

enum number { NUMBER_NONE, NUMBER_ELEM, NUMBER_F32, NUMBER_F64, NUMBER_I32, NUMBER_I64 };

struct tensor {
    const char *name;
    enum number number;
    char   *block, *at; /* of the device */
    size_t  n_bytes;    /* without the guard */
    int64_t n;
    double  allowed; /* share of integers that may differ */
    double  scale;   /* the least that errors are relative to; 0: the numbers alone */
    bool    is_compared;
};

struct trial_state {
    uint64_t random;
    enum elem_type elem; /* inputs are rounded to it, on the cpu too */
    int      displacement; /* of elements and floats */
    struct tensor tensors[TENSORS_MAX];
    int      n_tensors;
    void    *host[TENSORS_MAX]; /* trial_host's */
    int      n_host;
    int      n_runs;
    struct timing *timing; /* NULL: one run */
};

struct timing {
    double ms[REPEATS];
    void  *flush;
#if BALLAST_HAS_CUDA
    cudaEvent_t before, after;
#endif
    uint64_t before_ns;
    bool     is_cuda;
};

/* Ends the program with one line. */
void trial_fail(const char *text);

/* Makes the case's tensors, from the seed, and calls the op. */
void trial_run_case(const struct op_case *c, struct trial *t, uint64_t seed);

/* What is in x now, as doubles, freed with free(). */
double *trial_values(struct trial *t, const struct tensor *x);

/* Whether the bytes around x are as they were. */
bool trial_guards_are_whole(struct trial *t, const struct tensor *x);

/* Frees all of the case. */
void trial_clear(struct trial *t);

#endif
