/* unpack.cu - rows of packed matrices as elements */
#include "kernels/cuda_packed.cuh"
#include "kernels/cuda_packed.h"
#include "kernels/ops_cuda.h"

#define THREADS  256
#define EIGHT    8
#define N_BLOCKS (132 * 32) /* that walk over all matrices */

template <packing P>
__device__ __forceinline__ void put_eight(float *to, const uint8_t *codes, const void *scales,
                                          int64_t row, int64_t col, int64_t n_cols, int n, bool)
{
    for (int j = 0; j < n; j++)
        to[j] = unpack_one<P>(codes, scales, row, col + j, n_cols);
}

template <packing P>
__device__ __forceinline__ void put_eight(bf16 *to, const uint8_t *codes, const void *scales,
                                          int64_t row, int64_t col, int64_t n_cols, int n,
                                          bool in_vectors)
{
    uint4 words = unpack_eight<P>(codes, scales, row, col, n_cols, n);
    if (in_vectors) {
        *(uint4 *)to = words;
        return;
    }
    for (int j = 0; j < n; j++)
        to[j] = ((const bf16 *)&words)[j];
}

/* Of matrix blockIdx.y, and out of all one after another. in_vectors: eight numbers that are stored
 * always exist and start on 16 bytes. */
template <typename T, packing P>
__global__ static void __launch_bounds__(THREADS)
    unpack_rows(T *out, const uint8_t *const *w, uint64_t scales_at, int64_t first, int64_t n_rows,
                int64_t n_cols, bool in_vectors)
{
    const uint8_t *codes = w[blockIdx.y], *scales = codes + scales_at;
    int64_t per_row = (n_cols + EIGHT - 1) / EIGHT, step = (int64_t)gridDim.x * THREADS;
    out += blockIdx.y * n_rows * n_cols;
    for (int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x; e < n_rows * per_row; e += step) {
        int64_t row = e / per_row, col = e % per_row * EIGHT;
        int n = n_cols - col < EIGHT ? (int)(n_cols - col) : EIGHT;
        put_eight<P>(out + row * n_cols + col, codes, scales, first + row, col, n_cols, n,
                     in_vectors);
    }
}

extern "C" void cuda_unpack_matrices(struct device *dev, void *out, const uint8_t *const *w,
                                     int32_t n, enum packing packing, int64_t rows, int64_t cols,
                                     int64_t first, int64_t n_rows)
{
    int64_t n_eights = n_rows * ceil_div(cols, EIGHT);
    uint64_t scales_at = packing_scales_at(packing, (uint64_t)rows, (uint64_t)cols);
    bool in_vectors = cols % EIGHT == 0 && is_aligned16(out);
    if (n_eights <= 0 || n <= 0)
        return;
    const uint8_t *const *on_device =
        (const uint8_t *const *)cuda_upload(dev, w, (size_t)n * sizeof *w);
    int most = N_BLOCKS / n;
    dim3 grid(grid_blocks(n_eights, THREADS, most > 1 ? most : 1), (unsigned)n);
    ELEM_DISPATCH(dev, T, {
        auto kernel = packing == PACKING_FP8 ? unpack_rows<T, PACKING_FP8>
                                             : unpack_rows<T, PACKING_MXFP4>;
        kernel<<<grid, THREADS, 0, cuda_stream(dev)>>>((T *)out, on_device, scales_at, first,
                                                       n_rows, cols, in_vectors);
    });
    cuda_check(dev, "unpack", "matrices=%d rows=%lld cols=%lld", n, (long long)n_rows,
               (long long)cols);
}

extern "C" void cuda_unpack(struct device *dev, void *out, const uint8_t *w, enum packing packing,
                            int64_t rows, int64_t cols, int64_t first, int64_t n_rows)
{
    cuda_unpack_matrices(dev, out, &w, 1, packing, rows, cols, first, n_rows);
}
