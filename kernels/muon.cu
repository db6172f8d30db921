/* muon.cu - momentum made orthogonal: Newton-Schulz on batches of blocks, and the step
 *
 * The iterates are elements: in bf16 the products run on tensor cores, and the quintic leaves
 * singular values less exact than bf16 does. Blocks go together in batches, as many as the scratch
 * of BATCH_BYTES holds; their norms stay on the device. */
#include "kernels/cuda_elem.cuh"
#include "kernels/cuda_products.h"
#include "kernels/cuda_sums.cuh"

#define THREADS     256
#define ROUNDS      5
#define BATCH_BYTES ((int64_t)1 << 30)
#define N_ACROSS    1024 /* blocks of threads over one block of x */

static const float quintic[3] = {3.4445f, -4.7750f, 2.0315f};

/* One batch of n_blocks. */
struct batch {
    int64_t rows, cols, m; /* m: the lesser */
    int32_t n_blocks;
    float  *x;             /* (n_blocks, rows, cols): what is orthogonalised */
    void   *now, *next;    /* the same in elements */
    void   *square, *poly; /* (n_blocks, m, m), elements */
    double *sums;          /* (n_blocks, n_chunks) of squares */
    float  *scales;        /* (n_blocks) */
};

static int64_t n_chunks_of(const batch *b)
{
    return ceil_div(b->rows * b->cols, SUM_CHUNK);
}

/* ---- kernels; blockIdx.y is the block of x ---- */

__global__ static void __launch_bounds__(THREADS)
    scale_of_block(float *scales, const double *sums, int64_t n_chunks)
{
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n_chunks; i += THREADS)
        sum += sums[blockIdx.x * n_chunks + i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        scales[blockIdx.x] = (float)(1 / (sqrt(sum) + 1e-7));
}

template <typename T>
__global__ static void __launch_bounds__(THREADS)
    scale_blocks(T *to, const float *x, const float *scales, int64_t n)
{
    float scale = scales[blockIdx.y];
    int64_t base = blockIdx.y * n;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS)
        store(to + base + i, x[base + i] * scale);
}

__global__ static void __launch_bounds__(THREADS)
    momentum(float *x, float *m, const float *grad, int64_t n, muon_config config)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS) {
        float g = grad[i] * config.grad_scale;
        float now = config.momentum * m[i] + g;
        m[i] = now;
        x[i] = config.nesterov ? g + config.momentum * now : now;
    }
}

/* w = keep w - step x; with keep 0 w is not read. */
template <typename T>
__global__ static void __launch_bounds__(THREADS)
    take_step(float *w, const T *x, int64_t n, float keep, float step)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS)
        w[i] = keep == 0 ? -step * load(x + i) : w[i] * keep - step * load(x + i);
}

/* ---- Newton-Schulz ---- */

static dim3 grid_of(const batch *b)
{
    return dim3(grid_blocks(b->rows * b->cols, THREADS, N_ACROSS), (unsigned)b->n_blocks);
}

static void normalise(struct device *dev, const batch *b)
{
    int64_t n = b->rows * b->cols, n_chunks = n_chunks_of(b);
    cudaStream_t stream = cuda_stream(dev);
    dim3 chunks((unsigned)n_chunks, (unsigned)b->n_blocks);
    sum_squares_of_chunks<<<chunks, SUM_THREADS, 0, stream>>>(b->sums, b->x, n);
    scale_of_block<<<(unsigned)b->n_blocks, THREADS, 0, stream>>>(b->scales, b->sums, n_chunks);
    ELEM_DISPATCH(dev, T, scale_blocks<<<grid_of(b), THREADS, 0, stream>>>(
                              (T *)b->now, b->x, b->scales, n));
}

/* A product of the batch; widths of c, a, b are their strides. */
static void multiply(struct device *dev, const batch *b, void *c, int64_t c_rows, int64_t c_cols,
                     const void *left, bool left_transposed, const void *right,
                     bool right_transposed, int64_t k, float alpha, float beta)
{
    struct cuda_product p = {};
    p.c = c, p.a = left, p.b = right;
    p.m = c_rows, p.n = c_cols, p.k = k;
    p.c_stride = c_cols;
    p.a_stride = left_transposed ? c_rows : k;
    p.b_stride = right_transposed ? k : c_cols;
    p.a_transposed = left_transposed, p.b_transposed = right_transposed;
    p.type = p.c_type = dev->elem;
    p.n_batches = b->n_blocks;
    p.c_batch = c_rows * c_cols, p.a_batch = c_rows * k, p.b_batch = k * c_cols;
    p.alpha = alpha, p.beta = beta;
    cuda_product(dev, "muon", &p);
}

/* With A = X X^T: X <- a X + (b A + c A^2) X, and alike from the right where X is tall. */
static void round_of(struct device *dev, batch *b)
{
    size_t elem_bytes = elem_size(dev), n = (size_t)b->n_blocks;
    bool tall = b->rows > b->cols;
    multiply(dev, b, b->square, b->m, b->m, b->now, tall, b->now, !tall, tall ? b->rows : b->cols,
             1, 0);
    dev->ops->copy(dev, b->poly, b->square, n * (size_t)(b->m * b->m) * elem_bytes);
    multiply(dev, b, b->poly, b->m, b->m, b->square, false, b->square, false, b->m, quintic[2],
             quintic[1]);
    dev->ops->copy(dev, b->next, b->now, n * (size_t)(b->rows * b->cols) * elem_bytes);
    multiply(dev, b, b->next, b->rows, b->cols, tall ? b->now : b->poly, false,
             tall ? b->poly : b->now, false, b->m, 1, quintic[0]);
    void *swap = b->now;
    b->now = b->next;
    b->next = swap;
}

static void orthogonalise(struct device *dev, batch *b, int32_t n_rounds)
{
    normalise(dev, b);
    for (int32_t i = 0; i < n_rounds; i++)
        round_of(dev, b);
}

/* Blocks of a batch, of n_blocks in all. */
static int32_t batch_size(struct device *dev, int32_t n_blocks, int64_t rows, int64_t cols)
{
    int64_t m = rows < cols ? rows : cols;
    int64_t bytes = rows * cols * (4 + 2 * (int64_t)elem_size(dev)) +
                    2 * m * m * (int64_t)elem_size(dev);
    int64_t n = BATCH_BYTES / bytes;
    n = n < 1 ? 1 : n > 65535 ? 65535 : n;
    return n < n_blocks ? (int32_t)n : n_blocks;
}

/* Scratch for batches of up to n_blocks; x where the op itself must hold it. */
static batch batch_take(struct device *dev, int32_t n_blocks, int64_t rows, int64_t cols,
                        bool with_x)
{
    batch b = {};
    size_t n = (size_t)n_blocks, elem_bytes = elem_size(dev);
    b.rows = rows, b.cols = cols, b.m = rows < cols ? rows : cols;
    cuda_scratch_begin(dev);
    b.now = cuda_scratch_take(dev, n * (size_t)(rows * cols) * elem_bytes);
    b.next = cuda_scratch_take(dev, n * (size_t)(rows * cols) * elem_bytes);
    b.square = cuda_scratch_take(dev, n * (size_t)(b.m * b.m) * elem_bytes);
    b.poly = cuda_scratch_take(dev, n * (size_t)(b.m * b.m) * elem_bytes);
    b.sums = (double *)cuda_scratch_take(dev, n * (size_t)n_chunks_of(&b) * sizeof(double));
    b.scales = (float *)cuda_scratch_take(dev, n * sizeof(float));
    if (with_x)
        b.x = (float *)cuda_scratch_take(dev, n * (size_t)(rows * cols) * sizeof(float));
    return b;
}

static void step_of(struct device *dev, const batch *b, float *w, float keep, float step)
{
    int64_t n = b->n_blocks * b->rows * b->cols;
    unsigned n_blocks = grid_blocks(n, THREADS, 16 * cuda_n_multiprocessors(dev));
    ELEM_DISPATCH(dev, T, take_step<<<n_blocks, THREADS, 0, cuda_stream(dev)>>>(
                              w, (const T *)b->now, n, keep, step));
}

extern "C" void cuda_newton_schulz(struct device *dev, float *x, int32_t n_blocks, int64_t rows,
                                   int64_t cols, int32_t n_steps)
{
    if (n_blocks <= 0 || rows * cols == 0)
        return;
    int32_t at_once = batch_size(dev, n_blocks, rows, cols);
    batch b = batch_take(dev, at_once, rows, cols, false);
    for (int32_t i = 0; i < n_blocks; i += at_once) {
        b.x = x + i * rows * cols;
        b.n_blocks = at_once < n_blocks - i ? at_once : n_blocks - i;
        orthogonalise(dev, &b, n_steps);
        step_of(dev, &b, b.x, 0, -1);
    }
    cuda_check(dev, "newton_schulz", "blocks=%d rows=%lld cols=%lld", n_blocks, (long long)rows,
               (long long)cols);
}

extern "C" void cuda_muon(struct device *dev, float *w, float *m, const float *grad,
                          int32_t n_heads, int64_t rows, int64_t cols,
                          const struct muon_config *config)
{
    if (n_heads <= 0 || rows * cols == 0)
        return;
    int32_t at_once = batch_size(dev, n_heads, rows, cols);
    batch b = batch_take(dev, at_once, rows, cols, true);
    double larger = (double)(rows > cols ? rows : cols);
    float step = (float)(config->lr * (double)config->rms * sqrt(larger));
    float keep = (float)(1 - (double)config->lr * config->weight_decay);
    for (int32_t i = 0; i < n_heads; i += at_once) {
        b.n_blocks = at_once < n_heads - i ? at_once : n_heads - i;
        int64_t first = i * rows * cols, n = b.n_blocks * rows * cols;
        unsigned n_blocks = grid_blocks(n, THREADS, 16 * cuda_n_multiprocessors(dev));
        momentum<<<n_blocks, THREADS, 0, cuda_stream(dev)>>>(b.x, m + first, grad + first, n,
                                                             *config);
        orthogonalise(dev, &b, ROUNDS);
        step_of(dev, &b, w + first, keep, step);
    }
    cuda_check(dev, "muon", "heads=%d rows=%lld cols=%lld", n_heads, (long long)rows,
               (long long)cols);
}
