/* gradcheck.h - random tensors, and gradients against finite differences
 *
 * An op is checked through the scalar L = sum of c_i y_i over all its outputs, c random. Along a
 * direction u the derivative is (8 (L(h) - L(-h)) - (L(2h) - L(-2h))) / 12h, wrong by O(h^4) and
 * by the rounding of y over h. With values of order 1 and h = 1/32 both stay below 1e-4 of
 * |gradient| |u|; the tolerance of 1e-3 leaves room, and a wrong formula misses by 1e-2 or more.
 * Directions are dense (every element at once) and single elements in turn. */
#ifndef TESTS_GRADCHECK_H
#define TESTS_GRADCHECK_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/mem.h"
#include "common/mix.h"
#include "kernels/device.h"
#include "tests/seed.h"

#define GRADCHECK_STEP      (1.0 / 32)
#define GRADCHECK_TOLERANCE 1e-3
#define GRADCHECK_DENSE     3 /* directions */
#define GRADCHECK_SINGLE    6

struct random {
    uint64_t state;
};

static inline uint64_t random_bits(struct random *r)
{
    return mix_next(&r->state);
}

/* In [0, 1). */
static inline double random_uniform(struct random *r)
{
    return mix_unit(random_bits(r));
}

/* About normal: twelve uniforms less 6. */
static inline float random_normal(struct random *r)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += random_uniform(r);
    return (float)sum;
}

/* n floats of mean 0 and the given width; freed with free(). */
static inline float *random_floats(struct random *r, int64_t n, float width)
{
    float *x = xcalloc((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = width * random_normal(r);
    return x;
}

static inline float *zeros(int64_t n)
{
    return xcalloc((size_t)n, sizeof(float));
}

static inline float *filled(int64_t n, float value)
{
    float *x = zeros(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = value;
    return x;
}

static inline double weighted_sum(const float *y, const float *c, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)y[i] * c[i];
    return sum;
}

/* |a - b| / |b|, or |a| where b is all zero. */
static inline double distance(const float *a, const float *b, int64_t n)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

/* An input that the loss reads at x and its gradient; added is what an accumulating gradient held
 * before. */
struct gradient {
    const char *name;
    float       *x;
    const float *dx;
    int64_t n;
    float   added;
};

typedef double (*loss_fn)(void *ctx);

static inline double loss_at(loss_fn loss, void *ctx, struct gradient *g, const float *start,
                             const float *direction, double at)
{
    for (int64_t i = 0; i < g->n; i++)
        g->x[i] = (float)(start[i] + at * direction[i]);
    return loss(ctx);
}

static inline void gradcheck_direction(const char *what, loss_fn loss, void *ctx,
                                       struct gradient *g, const float *direction, double scale)
{
    double h = GRADCHECK_STEP, expected = 0, size = 0, length = 0;
    float *start = xmemdup(g->x, (size_t)g->n * sizeof *start);
    for (int64_t i = 0; i < g->n; i++) {
        double dx = (double)g->dx[i] - g->added;
        expected += dx * direction[i];
        size += dx * dx;
        length += (double)direction[i] * direction[i];
    }
    double near = loss_at(loss, ctx, g, start, direction, h) -
                  loss_at(loss, ctx, g, start, direction, -h);
    double far = loss_at(loss, ctx, g, start, direction, 2 * h) -
                 loss_at(loss, ctx, g, start, direction, -2 * h);
    double numeric = (8 * near - far) / (12 * h);
    memcpy(g->x, start, (size_t)g->n * sizeof *start);
    free(start);
    /* A dense direction of n elements sees |gradient|, a single one its share of it. */
    double unit = sqrt(size) * sqrt(length) / sqrt((double)g->n) + scale;
    if (!(fabs(numeric - expected) <= GRADCHECK_TOLERANCE * unit))
        fail_msg("%s: gradient of %s: %.9g expected from differences, op says %.9g (unit %.3g)",
                 what, g->name, numeric, expected, unit);
}

/* Fails the test at the first gradient that is off. floor is an absolute size of derivatives that
 * counts as 1 in the tolerance: for gradients that are zero. */
static inline void gradcheck(const char *what, struct random *r, loss_fn loss, void *ctx,
                             struct gradient *gradients, size_t n_gradients, double floor)
{
    for (size_t k = 0; k < n_gradients; k++) {
        struct gradient *g = &gradients[k];
        float *direction = zeros(g->n);
        for (int j = 0; j < GRADCHECK_DENSE; j++) {
            for (int64_t i = 0; i < g->n; i++)
                direction[i] = random_normal(r) * 0.25f;
            gradcheck_direction(what, loss, ctx, g, direction, floor);
        }
        for (int j = 0; j < GRADCHECK_SINGLE && g->n > 1; j++) {
            memset(direction, 0, (size_t)g->n * sizeof *direction);
            direction[random_bits(r) % (uint64_t)g->n] = 1;
            gradcheck_direction(what, loss, ctx, g, direction, floor);
        }
        free(direction);
    }
}

static inline struct device *test_device(uint32_t n_threads, bool deterministic)
{
    struct device *dev = NULL;
    struct err err = {0};
    if (device_cpu_open(n_threads, deterministic, &dev, &err) < 0)
        fail_msg("%s", err.text);
    return dev;
}

/* What the accumulating ops say of one vector. */
static inline double sum_squares(struct device *dev, const float *x, int64_t n)
{
    double sum = 0;
    dev->ops->sum_squares(dev, &sum, x, n);
    return sum;
}

static inline bool all_finite(struct device *dev, const float *x, int64_t n)
{
    int32_t is_bad = 0;
    dev->ops->all_finite(dev, &is_bad, x, n);
    return !is_bad;
}

#endif
