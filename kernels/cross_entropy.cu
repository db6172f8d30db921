/* cross_entropy.cu - the head's product and the loss in one, a block of rows at a time
 *
 * The logits of all rows would be the largest tensor of a step; those of a block are elements in
 * scratch, become their own gradient in place and are used up at once. The more rows a block has,
 * the more seldom acc_dw, larger than they, is read and written. */
#include "kernels/ops_cuda.h"

#include "common/gpu_bytes.h"
#include "kernels/cuda_math.cuh"
#include "kernels/cuda_parts.h"
#include "kernels/cuda_products.h"
#include "kernels/cuda_rows.cuh"

#define LOGITS_BYTES_MAX ((int64_t)GPU_LOGITS_BYTES)
/* A tile of the products; row counts are multiples of it. */
#define BLOCK_ROWS_MIN   ((int64_t)GPU_LOGITS_ROWS_MIN)
#define LOSS_THREADS     512

/* A block a row. Rows without a label have no loss and no gradient. */
template <typename T, int V>
__global__ static void __launch_bounds__(LOSS_THREADS)
    loss_rows(T *__restrict__ logits, double *__restrict__ losses,
              const int32_t *__restrict__ labels, int64_t vocab, bool want_gradient)
{
    __shared__ float shared[32];
    int32_t label = labels[blockIdx.x];
    T *x = logits + blockIdx.x * vocab;
    float own_max = -INFINITY, own_sum = 0; /* of exponentials, relative to own_max */
    if (label < 0) {
        const float zero[V] = {};
        for (int64_t j = threadIdx.x * V; want_gradient && j < vocab; j += LOSS_THREADS * V)
            store_elems(x + j, zero);
        if (threadIdx.x == 0)
            losses[blockIdx.x] = 0;
        return;
    }
    float at_label = load(x + label); /* before it becomes a gradient */
#pragma unroll 2
    for (int64_t j = threadIdx.x * V; j < vocab; j += LOSS_THREADS * V) {
        float v[V], max, sum = 0;
        load_elems(x + j, v);
        max = v[0];
#pragma unroll
        for (int k = 1; k < V; k++)
            max = fmaxf(max, v[k]);
        float new_max = fmaxf(own_max, max);
#pragma unroll
        for (int k = 0; k < V; k++)
            sum += exp_of<T>(v[k] - new_max);
        own_sum = own_sum * exp_of<T>(own_max - new_max) + sum;
        own_max = new_max;
    }
    float max = block_max(own_max, shared);
    float sum = block_sum(own_sum * exp_of<T>(own_max - max), shared), inverse = 1 / sum;
    if (threadIdx.x == 0)
        losses[blockIdx.x] = log((double)sum) + max - at_label;
#pragma unroll 2
    for (int64_t j = threadIdx.x * V; want_gradient && j < vocab; j += LOSS_THREADS * V) {
        float v[V];
        load_elems(x + j, v);
#pragma unroll
        for (int k = 0; k < V; k++)
            v[k] = exp_of<T>(v[k] - max) * inverse - (j + k == label);
        store_elems(x + j, v);
    }
}

/* One block of rows: sizes, and where they lie. */
struct head_block {
    void *logits;
    const void *x, *w;
    int64_t rows, d, vocab;
    enum elem_type type;
};

static void logits_of(struct device *dev, const struct head_block *b)
{
    struct cuda_product p = {};
    p.c = b->logits, p.a = b->x, p.b = b->w;
    p.m = b->rows, p.n = b->vocab, p.k = b->d;
    p.c_stride = b->vocab, p.a_stride = p.b_stride = b->d;
    p.b_transposed = true;
    p.type = p.c_type = b->type;
    p.alpha = 1;
    cuda_product(dev, "linear_cross_entropy", &p);
}

/* logits += z b^T; of the rows from first on. */
static void logits_beside(struct device *dev, const struct head_block *b, int64_t first,
                          const struct low_rank *beside)
{
    struct cuda_product p = {};
    p.c = b->logits, p.b = beside->b;
    p.a = (const char *)beside->z + first * beside->r * (int64_t)elem_size(dev);
    p.m = b->rows, p.n = b->vocab, p.k = beside->r;
    p.c_stride = b->vocab, p.a_stride = p.b_stride = beside->r;
    p.b_transposed = true;
    p.type = p.c_type = b->type;
    p.alpha = p.beta = 1;
    cuda_product(dev, "linear_cross_entropy", &p);
}

static void dz_of(struct device *dev, const struct head_block *b, int64_t first,
                  const struct low_rank *beside)
{
    struct cuda_product p = {};
    p.c = (char *)beside->dz + first * beside->r * (int64_t)elem_size(dev);
    p.a = b->logits, p.b = beside->b;
    p.m = b->rows, p.n = beside->r, p.k = b->vocab;
    p.c_stride = p.b_stride = beside->r, p.a_stride = b->vocab;
    p.type = p.c_type = b->type;
    p.alpha = 1;
    cuda_product(dev, "linear_cross_entropy", &p);
}

static void db_of(struct device *dev, const struct head_block *b, int64_t first,
                  const struct low_rank *beside)
{
    struct cuda_product p = {};
    p.c = beside->acc_db, p.a = b->logits;
    p.b = (const char *)beside->z + first * beside->r * (int64_t)elem_size(dev);
    p.m = b->vocab, p.n = beside->r, p.k = b->rows;
    p.c_stride = p.b_stride = beside->r, p.a_stride = b->vocab;
    p.a_transposed = true;
    p.type = b->type, p.c_type = ELEM_F32;
    p.alpha = p.beta = 1;
    cuda_product(dev, "linear_cross_entropy", &p);
}

static void dx_of(struct device *dev, void *dx, const struct head_block *b)
{
    struct cuda_product p = {};
    p.c = dx, p.a = b->logits, p.b = b->w;
    p.m = b->rows, p.n = b->d, p.k = b->vocab;
    p.c_stride = p.b_stride = b->d, p.a_stride = b->vocab;
    p.type = p.c_type = b->type;
    p.alpha = 1;
    cuda_product(dev, "linear_cross_entropy", &p);
}

static void dw_of(struct device *dev, float *acc_dw, const struct head_block *b)
{
    struct cuda_product p = {};
    p.c = acc_dw, p.a = b->logits, p.b = b->x;
    p.m = b->vocab, p.n = b->d, p.k = b->rows;
    p.c_stride = p.b_stride = b->d, p.a_stride = b->vocab;
    p.a_transposed = true;
    p.type = b->type, p.c_type = ELEM_F32;
    p.alpha = p.beta = 1;
    cuda_product(dev, "linear_cross_entropy", &p);
}

static int64_t block_rows(const struct device *dev, int64_t n, int64_t vocab)
{
    int64_t rows = LOGITS_BYTES_MAX / (vocab * (int64_t)elem_size(dev));
    rows = rows / BLOCK_ROWS_MIN * BLOCK_ROWS_MIN;
    rows = rows > BLOCK_ROWS_MIN ? rows : BLOCK_ROWS_MIN;
    return rows < n ? rows : n;
}

void cuda_linear_cross_entropy(struct device *dev, double *acc_loss, elem_ptr dx, float *acc_dw,
                               const_elem_ptr x, const_elem_ptr w, const struct low_rank *beside,
                               const int32_t *labels, int64_t n, int64_t d, int64_t vocab)
{
    assert(dx || !acc_dw);
    if (n == 0)
        return;
    int64_t block = block_rows(dev, n, vocab), size = (int64_t)elem_size(dev);
    cuda_scratch_begin(dev);
    double *losses = (double *)cuda_scratch_take(dev, (size_t)n * sizeof *losses);
    void *logits = cuda_scratch_take(dev, (size_t)(block * vocab * size));
    bool vectors = rows_are_aligned(dev, vocab, {logits});
    for (int64_t first = 0; first < n; first += block) {
        int64_t rows = n - first < block ? n - first : block;
        struct head_block b = {logits,   (const char *)x + first * d * size, w, rows, d, vocab,
                               dev->elem};
        logits_of(dev, &b);
        if (beside)
            logits_beside(dev, &b, first, beside);
        VECTOR_DISPATCH(dev, vectors, T, V,
                        loss_rows<T, V><<<(unsigned)rows, LOSS_THREADS, 0, cuda_stream(dev)>>>(
                            (T *)logits, losses + first, labels + first, vocab, dx != NULL));
        if (!dx)
            continue;
        dx_of(dev, (char *)dx + first * d * size, &b);
        if (beside) {
            dz_of(dev, &b, first, beside);
            db_of(dev, &b, first, beside);
        }
        if (acc_dw)
            dw_of(dev, acc_dw, &b);
    }
    cuda_add_losses(dev, acc_loss, 1, losses, n);
    cuda_check(dev, "linear_cross_entropy", "n=%lld d=%lld vocab=%lld", (long long)n, (long long)d,
               (long long)vocab);
}
