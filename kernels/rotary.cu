/* rotary.cu - pairs of a row turn by an angle that grows with the position in the document
 *
 * A block a token, so that its row of the table is read from near. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_columns.cuh"

#define ROTARY_THREADS 128

/* A thread turns P pairs at a time: neighbours fill one vector, halves one of each half. */
template <typename T, int V, bool INTERLEAVED>
__global__ static void
turn_tokens(T *x, int32_t n_heads, int64_t stride, const float *__restrict__ table, float sign,
            const int32_t *__restrict__ cu_seqlens, int32_t n_docs, int32_t dim)
{
    constexpr int P = INTERLEAVED && V > 1 ? V / 2 : V;
    int64_t token = blockIdx.x;
    int64_t position = token - cu_seqlens[document_of(cu_seqlens, n_docs, token)];
    int32_t n_pairs = dim / 2, per_row = n_pairs / P;
    const float *cosine = table + position * dim, *sine = cosine + n_pairs;
    T *rows = x + token * n_heads * stride;
    for (int64_t u = threadIdx.x; u < (int64_t)n_heads * per_row; u += ROTARY_THREADS) {
        int32_t pair = (int32_t)(u % per_row) * P;
        T *row = rows + u / per_row * stride;
        float in[2][V]; /* interleaved vectors: the first one alone, a b a b ... */
        if constexpr (INTERLEAVED && V > 1) {
            load_elems(row + 2 * pair, in[0]);
        } else if constexpr (INTERLEAVED) {
            in[0][0] = load(row + 2 * pair);
            in[1][0] = load(row + 2 * pair + 1);
        } else {
            load_elems(row + pair, in[0]);
            load_elems(row + pair + n_pairs, in[1]);
        }
#pragma unroll
        for (int p = 0; p < P; p++) {
            float &a = INTERLEAVED && V > 1 ? in[0][2 * p] : in[0][p];
            float &b = INTERLEAVED && V > 1 ? in[0][2 * p + 1] : in[1][p];
            float c = cosine[pair + p], s = sign * sine[pair + p];
            float turned = a * c - b * s;
            b = b * c + a * s;
            a = turned;
        }
        if constexpr (INTERLEAVED && V > 1) {
            store_elems(row + 2 * pair, in[0]);
        } else if constexpr (INTERLEAVED) {
            store(row + 2 * pair, in[0][0]);
            store(row + 2 * pair + 1, in[1][0]);
        } else {
            store_elems(row + pair, in[0]);
            store_elems(row + pair + n_pairs, in[1]);
        }
    }
}

static void turn(struct device *dev, const char *op, elem_ptr x, int32_t n_heads, int64_t stride,
                 const float *table, float sign, const struct rotary_shape *shape)
{
    assert(shape->dim % 2 == 0);
    assert(shape->cu_seqlens[shape->n_docs] == shape->n_tokens);
    if (shape->n_tokens == 0 || n_heads == 0 || shape->dim == 0)
        return;
    int32_t whole = shape->interleaved ? shape->dim : shape->dim / 2; /* cut into vectors */
    bool vectors = rows_are_aligned(dev, stride, {x}) && rows_are_aligned(dev, whole, {});
    size_t n_bytes = (size_t)(shape->n_docs + 1) * sizeof *shape->cu_seqlens;
    const int32_t *cu = (const int32_t *)cuda_upload(dev, shape->cu_seqlens, n_bytes);
    unsigned n_blocks = (unsigned)shape->n_tokens;
    VECTOR_DISPATCH(
        dev, vectors, T, V,
        if (shape->interleaved) {
            turn_tokens<T, V, true><<<n_blocks, ROTARY_THREADS, 0, cuda_stream(dev)>>>(
                (T *)x, n_heads, stride, table, sign, cu, shape->n_docs, shape->dim);
        } else {
            turn_tokens<T, V, false><<<n_blocks, ROTARY_THREADS, 0, cuda_stream(dev)>>>(
                (T *)x, n_heads, stride, table, sign, cu, shape->n_docs, shape->dim);
        });
    cuda_check(dev, op, "n=%lld heads=%d dim=%d", (long long)shape->n_tokens, n_heads, shape->dim);
}

void cuda_rotary(struct device *dev, elem_ptr x, int32_t n_heads, int64_t stride,
                 const float *table, const struct rotary_shape *shape)
{
    turn(dev, "rotary", x, n_heads, stride, table, 1, shape);
}

void cuda_rotary_backward(struct device *dev, elem_ptr dx, int32_t n_heads, int64_t stride,
                          const float *table, const struct rotary_shape *shape)
{
    turn(dev, "rotary_backward", dx, n_heads, stride, table, -1, shape);
}
