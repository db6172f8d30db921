/* kda_chunk.c - one chunk of one head of KDA: its rows and its decays */
#include "kernels/kda_chunk.h"

#include <string.h>

#include "kernels/ops_cpu.h"
#include "kernels/vmath.h"

size_t kda_chunk_floats(int32_t d)
{
    return (size_t)(11 * KDA_CHUNK + KDA_BLOCKS) * d + KDA_CHUNK * KDA_CHUNK;
}

void kda_chunk_carve(struct kda_chunk *c, float *scratch, int32_t d)
{
    size_t size = (size_t)KDA_CHUNK * d;
    float **all[] = {&c->q, &c->k, &c->step, &c->from_block, &c->to_block, &c->from_start,
                     &c->to_end, &c->reach, &c->near};
    c->d = d;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++, scratch += size)
        *all[i] = scratch;
    c->kq = scratch;
    c->solve = c->kq + 2 * size;
    c->total = c->solve + KDA_CHUNK * KDA_CHUNK;
}

/* Chunks that are no document's first begin 64 rows or more after another's begin, and the earliest
 * of them at row 64: no two in the same 64 rows of all. */
static int64_t n_states(int64_t n_tokens)
{
    return n_tokens > 0 ? (n_tokens - 1) / KDA_CHUNK : 0;
}

static size_t head_floats(const struct kda_shape *shape)
{
    size_t d = (size_t)shape->head_dim;
    return (size_t)n_states(shape->n_tokens) * d * d +
           (size_t)shape->n_tokens * (2 * KDA_CHUNK + 2 * d);
}

size_t cpu_kda_saved_floats(struct device *dev, const struct kda_shape *shape)
{
    (void)dev;
    return (size_t)shape->n_heads * head_floats(shape);
}

struct kda_saved kda_saved_at(float *saved, const struct kda_shape *shape, int32_t head,
                              int64_t row, bool is_first)
{
    int64_t d = shape->head_dim, n = shape->n_tokens;
    float *states = saved + (size_t)head * head_floats(shape);
    float *kk = states + n_states(n) * d * d, *qk = kk + n * KDA_CHUNK;
    float *residual = qk + n * KDA_CHUNK, *value = residual + n * d;
    return (struct kda_saved){
        .state = is_first ? NULL : states + (row / KDA_CHUNK - 1) * d * d,
        .kk = kk + row * KDA_CHUNK, .qk = qk + row * KDA_CHUNK,
        .residual = residual + row * d, .value = value + row * d,
    };
}

void kda_rows_in(float *dense, const float *x, const struct kda_shape *shape, int32_t head,
                 int64_t row, int32_t rows)
{
    int64_t d = shape->head_dim, stride = shape->n_heads * d;
    x += row * stride + head * d;
    for (int32_t i = 0; i < rows; i++)
        memcpy(dense + i * d, x + i * stride, (size_t)d * sizeof *dense);
}

void kda_rows_out(float *x, const float *dense, const struct kda_shape *shape, int32_t head,
                  int64_t row, int32_t rows)
{
    int64_t d = shape->head_dim, stride = shape->n_heads * d;
    x += row * stride + head * d;
    for (int32_t i = 0; i < rows; i++)
        memcpy(x + i * stride, dense + i * d, (size_t)d * sizeof *dense);
}

static void multiply(float *restrict y, const float *restrict a, const float *restrict b, int32_t d)
{
#pragma omp simd
    for (int32_t j = 0; j < d; j++)
        y[j] = a[j] * b[j];
}

static void ones(float *y, int32_t d)
{
#pragma omp simd
    for (int32_t j = 0; j < d; j++)
        y[j] = 1;
}

static void block_decays(struct kda_chunk *c, int32_t b)
{
    int32_t d = c->d, first = b * KDA_BLOCK;
    int32_t last = (int32_t)min_i64(first + KDA_BLOCK, c->rows) - 1;
    memcpy(c->from_block + first * d, c->step + first * d, (size_t)d * sizeof(float));
    for (int32_t r = first + 1; r <= last; r++)
        multiply(c->from_block + r * d, c->from_block + (r - 1) * d, c->step + r * d, d);
    ones(c->to_block + last * d, d);
    for (int32_t i = last - 1; i >= first; i--)
        multiply(c->to_block + i * d, c->to_block + (i + 1) * d, c->step + (i + 1) * d, d);
    memcpy(c->total + b * d, c->from_block + last * d, (size_t)d * sizeof(float));
}

/* From the chunk's start to each row, and from each row to the chunk's end. */
static void chunk_decays(struct kda_chunk *c)
{
    int32_t d = c->d, n_blocks = (c->rows + KDA_BLOCK - 1) / KDA_BLOCK;
    float *outside = c->near; /* (d): all blocks before, then all blocks after */
    for (int32_t b = 0; b < n_blocks; b++)
        block_decays(c, b);
    ones(outside, d);
    for (int32_t r = 0; r < c->rows; r++) {
        multiply(c->from_start + r * d, c->from_block + r * d, outside, d);
        if (r % KDA_BLOCK == KDA_BLOCK - 1)
            memcpy(outside, c->from_start + r * d, (size_t)d * sizeof(float));
    }
    ones(outside, d);
    for (int32_t r = c->rows - 1; r >= 0; r--) {
        multiply(c->to_end + r * d, c->to_block + r * d, outside, d);
        if (r % KDA_BLOCK == 0)
            multiply(outside, c->to_end + r * d, c->step + r * d, d);
    }
}

void kda_chunk_load(struct kda_chunk *c, const struct kda_shape *shape, int32_t head, int64_t row,
                    const float *q, const float *k, const float *g, const float *beta)
{
    int32_t d = c->d;
    kda_rows_in(c->q, q, shape, head, row, c->rows);
    kda_rows_in(c->k, k, shape, head, row, c->rows);
    kda_rows_in(c->step, g, shape, head, row, c->rows);
#pragma omp simd
    for (int32_t i = 0; i < c->rows * d; i++)
        c->step[i] = vm_exp(c->step[i]);
    for (int32_t r = 0; r < c->rows; r++)
        c->beta[r] = beta[(row + r) * shape->n_heads + head];
    chunk_decays(c);
    multiply(c->kq, c->k, c->from_start, c->rows * d);
    float *qs = c->kq + c->rows * d;
#pragma omp simd
    for (int32_t i = 0; i < c->rows * d; i++)
        qs[i] = shape->scale * c->q[i] * c->from_start[i];
}

void kda_chunk_reach(struct kda_chunk *c, int32_t b)
{
    int32_t d = c->d, size = KDA_BLOCK * d, previous = (b - 1) * KDA_BLOCK;
    for (int32_t i = 0; i < previous; i++)
#pragma omp simd
        for (int32_t j = 0; j < d; j++)
            c->reach[i * d + j] *= c->total[(b - 1) * d + j];
    memcpy(c->reach + previous * d, c->to_block + previous * d, (size_t)size * sizeof(float));
    multiply(c->near, c->k, c->reach, b * size);
}

void kda_chunk_solver(struct kda_chunk *c, const float *kk)
{
    for (int32_t r = 0; r < c->rows; r++)
        for (int32_t i = 0; i < r; i++)
            c->solve[r * KDA_CHUNK + i] = c->beta[r] * kk[r * KDA_CHUNK + i];
}
