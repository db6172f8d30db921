/* oracle.h - the reference files of single operations, where they are
 *
 * They lie in $BALLAST_SHARED/oracle/ops, or in ../shared beside the source tree; a test that
 * needs them and does not find them is skipped with a line that says so. */
#ifndef TESTS_ORACLE_H
#define TESTS_ORACLE_H

#include "common/safetensors.h"
#include "tests/gradcheck.h"

/* Skips the test if the file is not there, fails it if it cannot be read. */
static inline struct safetensors *oracle_open(const char *name)
{
    const char *shared = getenv("BALLAST_SHARED"), *source = getenv("BALLAST_SOURCE");
    char *path = shared && *shared
                     ? xasprintf("%s/oracle/ops/%s.safetensors", shared, name)
                     : xasprintf("%s/../shared/oracle/ops/%s.safetensors",
                                 source && *source ? source : ".", name);
    FILE *f = fopen(path, "rb");
    if (!f) {
        print_message("SKIPPED: no reference file %s (set BALLAST_SHARED)\n", path);
        free(path);
        skip();
    }
    fclose(f);
    struct safetensors *st = NULL;
    struct err err = {0};
    if (safetensors_open(path, &st, &err) < 0)
        fail_msg("%s", err.text);
    free(path);
    return st;
}

/* NULL where the case has no such tensor. */
static inline const struct st_view *oracle_view(const struct safetensors *st, const char *which,
                                                const char *tensor)
{
    char *name = xasprintf("%s/%s", which, tensor);
    const struct st_view *v = safetensors_find(st, name);
    free(name);
    return v;
}

/* The whole tensor; freed with free(). NULL where there is none. */
static inline float *oracle_floats(const struct safetensors *st, const char *which,
                                   const char *tensor, int64_t *out_n)
{
    const struct st_view *v = oracle_view(st, which, tensor);
    struct err err = {0};
    if (!v)
        return NULL;
    float *x = zeros((int64_t)v->n_elements);
    bool is_double = v->tensor.dtype == ST_F64;
    for (uint64_t i = 0; is_double && i < v->n_elements; i++) {
        double at;
        memcpy(&at, v->data + i * sizeof at, sizeof at);
        x[i] = (float)at;
    }
    if (!is_double && st_read_f32(v, 0, v->n_elements, x, &err) < 0)
        fail_msg("%s", err.text);
    if (out_n)
        *out_n = (int64_t)v->n_elements;
    return x;
}

static inline int32_t *oracle_ints(const struct safetensors *st, const char *which,
                                   const char *tensor, int64_t *out_n)
{
    const struct st_view *v = oracle_view(st, which, tensor);
    struct err err = {0};
    if (!v)
        return NULL;
    int32_t *x = xcalloc(v->n_elements, sizeof *x);
    if (st_read_i32(v, 0, v->n_elements, x, &err) < 0)
        fail_msg("%s", err.text);
    if (out_n)
        *out_n = (int64_t)v->n_elements;
    return x;
}

/* |got - want| <= tolerance |want| + floor sqrt(n), and got finite. With BALLAST_FIGURES set the
 * distances are printed. */
static inline void oracle_compare(const char *which, const char *tensor, const float *got,
                                  const float *want, int64_t n, double tolerance, double floor)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double off = (double)got[i] - want[i];
        difference += off * off;
        norm += (double)want[i] * want[i];
    }
    if (getenv("BALLAST_FIGURES"))
        printf("%s/%s %.2e\n", which, tensor, sqrt(difference) / (norm > 0 ? sqrt(norm) : 1));
    if (!(sqrt(difference) <= tolerance * sqrt(norm) + floor * sqrt((double)n)))
        fail_msg("%s: %s is off by %.3g of %.3g (allowed %.1g)", which, tensor, sqrt(difference),
                 sqrt(norm), tolerance);
}

#endif
