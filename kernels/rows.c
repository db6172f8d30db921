/* rows.c - rows moved by index; embedding is a gather by token
 *
 * Adding rows goes in ascending i for every column, so equal indices add in a fixed order; the
 * threads share the columns. */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"

#define COLS_MIN 64 /* of one thread's part of a row */

struct rows {
    float *out;
    const float *in;
    const int64_t *index; /* one of the two */
    const int32_t *tokens;
    const float *scale; /* of a gather; NULL: 1 */
    int64_t n, d;
};

static int64_t row_at(const struct rows *s, int64_t i)
{
    return s->index ? s->index[i] : s->tokens[i];
}

static void scale_row(float *restrict out, const float *restrict in, float scale, int64_t d)
{
    for (int64_t j = 0; j < d; j++)
        out[j] = scale * in[j];
}

static void gather_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct rows *s = arg;
    size_t n_bytes = (size_t)s->d * sizeof(float);
    for (int64_t i = begin; i < end; i++) {
        int64_t from = row_at(s, i);
        if (from < 0)
            memset(s->out + i * s->d, 0, n_bytes);
        else if (s->scale)
            scale_row(s->out + i * s->d, s->in + from * s->d, s->scale[i], s->d);
        else
            memcpy(s->out + i * s->d, s->in + from * s->d, n_bytes);
    }
}

static void scatter_add_cols(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct rows *s = arg;
    for (int64_t i = 0; i < s->n; i++) {
        float *restrict to = s->out + row_at(s, i) * s->d;
        const float *restrict from = s->in + i * s->d;
        for (int64_t j = begin; j < end; j++)
            to[j] += from[j];
    }
}

static void gather(struct device *dev, struct rows s)
{
    cpu_for(dev, s.n, cpu_grain(s.d), gather_range, &s);
}

static void scatter_add(struct device *dev, struct rows s)
{
    cpu_for(dev, s.d, max_i64(COLS_MIN, s.d / (2 * dev->n_threads)), scatter_add_cols, &s);
}

void cpu_gather_rows(struct device *dev, float *out, const float *in, const int64_t *index,
                     const float *scale, int64_t n, int64_t d)
{
    gather(dev, (struct rows){.out = out, .in = in, .index = index, .scale = scale, .n = n,
                              .d = d});
}

void cpu_scatter_add_rows(struct device *dev, float *acc, const float *in, const int64_t *index,
                          int64_t n, int64_t d)
{
    scatter_add(dev, (struct rows){.out = acc, .in = in, .index = index, .n = n, .d = d});
}

void cpu_embedding(struct device *dev, float *y, const float *table, const int32_t *tokens,
                   int64_t n, int64_t d)
{
    gather(dev, (struct rows){.out = y, .in = table, .tokens = tokens, .n = n, .d = d});
}

void cpu_embedding_backward(struct device *dev, float *acc_table, const float *dy,
                            const int32_t *tokens, int64_t n, int64_t d)
{
    scatter_add(dev, (struct rows){.out = acc_table, .in = dy, .tokens = tokens, .n = n, .d = d});
}
