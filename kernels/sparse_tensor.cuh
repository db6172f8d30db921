/* sparse_tensor.cuh - attention over chosen keys in bf16 on tensor cores: latent 512, rope 64
 *
 * A block has a query and 64 of its heads, and walks over tiles of 64 gathered keys. */
#ifndef KERNELS_SPARSE_TENSOR_CUH
#define KERNELS_SPARSE_TENSOR_CUH

#include "kernels/sparse_attention.cuh"
#include "kernels/wgmma.cuh"

#define SPARSE_ROWS    64 /* heads of a block, and keys of a tile */
#define SPARSE_LATENT  512
#define SPARSE_WIDTH   576
#define SPARSE_THREADS 256
#define SPARSE_PANEL   (SPARSE_ROWS * PANEL_ROW_BYTES)
#define SPARSE_KEYS    (SPARSE_ROWS * SPARSE_WIDTH * 2)  /* bytes of 64 rows of keys */
#define SPARSE_VALUES  (SPARSE_ROWS * SPARSE_LATENT * 2) /* and of values */
#define LOG2E          1.4426950408889634f

template <typename T>
static inline bool fits_tensor(const rows<T> &x)
{
    return is_aligned16(x.a) && is_aligned16(x.b) && is_aligned16(x.a_stride * 2) &&
           is_aligned16(x.b_stride * 2);
}

static inline bool sparse_fits(const sparse_operands<bf16> &x)
{
    return x.latent == SPARSE_LATENT && x.width == SPARSE_WIDTH && fits_tensor(x.q) &&
           fits_tensor(x.keys);
}

static inline unsigned head_groups(int32_t n_heads)
{
    return (unsigned)ceil_div(n_heads, SPARSE_ROWS);
}

/* Keys first .. first + 64 of the query's list of n, zeros from n on. Then copy_async_commit. */
__device__ __forceinline__ void gather_keys(char *to, const sparse_operands<bf16> &x,
                                            const key_lists &lists, int64_t t, int first, int n)
{
    int chunk = (int)threadIdx.x % 8, r = (int)threadIdx.x / 8;
#pragma unroll
    for (int pass = 0; pass < 2; pass++, r += 32) {
        bool valid = first + r < n;
        int64_t key = valid ? lists.selected[t * lists.n_max + first + r] : 0;
        const bf16 *latent = x.keys.a + key * SPARSE_LATENT + chunk * 8;
        char *row = to + panel_offset<SPARSE_ROWS>(r, chunk);
#pragma unroll
        for (int i = 0; i < SPARSE_LATENT / 64; i++)
            copy_async(row + i * SPARSE_PANEL, latent + i * 64, valid);
        copy_async(row + SPARSE_VALUES, x.keys.b + key * x.keys.b_stride + chunk * 8, valid);
    }
}

/* Rows of 64 heads of query t: 512 columns of from, which are (n heads, 512). */
__device__ __forceinline__ void load_heads(char *to, const bf16 *from, int64_t t, int head,
                                           int n_heads)
{
#pragma unroll
    for (int i = 0; i < SPARSE_LATENT / 64; i++)
        panel_load<SPARSE_ROWS, 8, SPARSE_THREADS>(to + i * SPARSE_PANEL, from + i * 64,
                                                   SPARSE_LATENT, t * n_heads + head,
                                                   (t + 1) * n_heads);
}

/* The same of q: 576 columns. */
__device__ __forceinline__ void load_queries(char *to, const sparse_operands<bf16> &x, int64_t t,
                                             int head)
{
    load_heads(to, x.q.a, t, head, x.n_heads);
    panel_load<SPARSE_ROWS, 8, SPARSE_THREADS>(to + SPARSE_VALUES, x.q.b, x.q.b_stride,
                                               t * x.n_heads + head, (t + 1) * x.n_heads);
}

/* s (64, 64) = a b^T over WIDTH columns, both 64 rows; committed and waited for. */
template <int WIDTH>
__device__ __forceinline__ void sparse_dots(float (&s)[32], const char *a, const char *b)
{
    uint64_t x = panel_by_rows(a), y = panel_by_rows(b);
#pragma unroll
    for (int i = 0; i < 32; i++)
        s[i] = 0;
    wgmma_keep(s);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++) {
        uint64_t step = panel_step((uint32_t)(i / 4 * SPARSE_PANEL + i % 4 * 32));
        wgmma<false, false>(s, x + step, y + step);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(s);
}

/* Where in a panel of 64 rows this thread's columns 8 j + 2 (lane % 4) + 0, 1 of a row lie. */
__device__ __forceinline__ uint32_t *panel_pair(char *panel, int row, int j)
{
    return (uint32_t *)(panel + panel_offset<SPARSE_ROWS>(row, j) + threadIdx.x % 4 * 4);
}

/* False where it does not fit, and nothing was launched. */
bool sparse_tensor_forward(struct device *dev, bf16 *o, float *lse,
                           const sparse_operands<bf16> &x, const key_lists &lists, int64_t n);

/* dq is assigned; acc (first + n, 576) float32 += the gradients of keys, latent with values, then
 * rope. */
bool sparse_tensor_backward(struct device *dev, float *acc, const rows<bf16> &dq, const bf16 *d_o,
                            const float *lse, const float *along, const sparse_operands<bf16> &x,
                            const key_lists &lists, int64_t first, int64_t n);

#endif
