/* rotary.c - pairs of a row turn by an angle that grows with the position in the document
 *
 * a' = a cos - b sin, b' = b cos + a sin; the gradient turns back, by the same cosines and sines,
 * attention factor included. */
#include "kernels/ops_cpu.h"

#include "kernels/cpu.h"

struct rotary {
    float *x;
    int32_t n_heads;
    int64_t stride;
    const float *table;
    float   sign; /* of the sine: 1 forward, -1 backward */
    const struct rotary_shape *shape;
};

static void turn_halves(float *restrict x, const float *restrict cosine, int32_t n_pairs,
                        float sign)
{
    const float *restrict sine = cosine + n_pairs;
    for (int32_t i = 0; i < n_pairs; i++) {
        float a = x[i], b = x[i + n_pairs], s = sign * sine[i];
        x[i] = a * cosine[i] - b * s;
        x[i + n_pairs] = b * cosine[i] + a * s;
    }
}

static void turn_neighbours(float *restrict x, const float *restrict cosine, int32_t n_pairs,
                            float sign)
{
    const float *restrict sine = cosine + n_pairs;
    for (int32_t i = 0; i < n_pairs; i++) {
        float a = x[2 * i], b = x[2 * i + 1], s = sign * sine[i];
        x[2 * i] = a * cosine[i] - b * s;
        x[2 * i + 1] = b * cosine[i] + a * s;
    }
}

static void turn_tokens(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct rotary *r = arg;
    const struct rotary_shape *s = r->shape;
    int32_t doc = 0;
    for (int64_t t = begin; t < end; t++) {
        while (t >= s->cu_seqlens[doc + 1])
            doc++;
        const float *cosine = r->table + (t - s->cu_seqlens[doc]) * s->dim;
        for (int32_t h = 0; h < r->n_heads; h++) {
            float *row = r->x + (t * r->n_heads + h) * r->stride;
            if (s->interleaved)
                turn_neighbours(row, cosine, s->dim / 2, r->sign);
            else
                turn_halves(row, cosine, s->dim / 2, r->sign);
        }
    }
}

static void turn(struct device *dev, float *x, int32_t n_heads, int64_t stride, const float *table,
                 float sign, const struct rotary_shape *shape)
{
    assert(shape->dim % 2 == 0);
    assert(shape->cu_seqlens[shape->n_docs] == shape->n_tokens);
    struct rotary r = {x, n_heads, stride, table, sign, shape};
    cpu_for(dev, shape->n_tokens, cpu_grain((int64_t)n_heads * shape->dim), turn_tokens, &r);
}

void cpu_rotary(struct device *dev, float *x, int32_t n_heads, int64_t stride, const float *table,
                const struct rotary_shape *shape)
{
    turn(dev, x, n_heads, stride, table, 1, shape);
}

void cpu_rotary_backward(struct device *dev, float *dx, int32_t n_heads, int64_t stride,
                         const float *table, const struct rotary_shape *shape)
{
    turn(dev, dx, n_heads, stride, table, -1, shape);
}
