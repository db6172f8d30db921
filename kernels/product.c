/* product.c - one matrix product on the calling thread
 *
 * Our own product packs a block of a and a block of b into panels and keeps a tile of c in
 * registers while it walks k. Edges are padded with zeros, so an element's sum is the same chain
 * in a full tile and at an edge. */
#include "kernels/product.h"

#include <cblas.h>
#include <string.h>

#ifdef __AVX512F__
#define VEC       16
#define TILE_ROWS 12
#else
#define VEC       8
#define TILE_ROWS 4
#endif
#define TILE_COLS  (2 * VEC)
#define BLOCK_ROWS (16 * TILE_ROWS)
#define BLOCK_COLS 256
#define BLOCK_K    256

#define PIECE_FLOPS_MIN 500000
#define SPREAD_STEP     48 /* whole tiles */

typedef float vec __attribute__((vector_size(VEC * sizeof(float)), aligned(4), may_alias));

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

size_t product_pack_floats(void)
{
    return (size_t)(BLOCK_ROWS + BLOCK_COLS) * BLOCK_K + TILE_ROWS * TILE_COLS;
}

void product_init(void)
{
    openblas_set_num_threads(1);
}

/* tile (TILE_ROWS, TILE_COLS) = the product of an a panel and a b panel, k long. */
static void tile_product(float *restrict tile, const float *restrict a, const float *restrict b,
                         int64_t k)
{
    vec acc[TILE_ROWS][2];
    UNROLL
    for (int i = 0; i < TILE_ROWS; i++)
        acc[i][0] = acc[i][1] = (vec){0};
    for (int64_t l = 0; l < k; l++, a += TILE_ROWS, b += TILE_COLS) {
        vec b0 = *(const vec *)b, b1 = *(const vec *)(b + VEC);
        UNROLL
        for (int i = 0; i < TILE_ROWS; i++) {
            acc[i][0] += a[i] * b0;
            acc[i][1] += a[i] * b1;
        }
    }
    UNROLL
    for (int i = 0; i < TILE_ROWS; i++) {
        *(vec *)(tile + i * TILE_COLS) = acc[i][0];
        *(vec *)(tile + i * TILE_COLS + VEC) = acc[i][1];
    }
}

/* One panel: panel[l * width + i] = element (first + i, l) of x seen as (rows, k). by_row says
 * that consecutive l lie side by side in memory. */
static void pack_panel(float *restrict panel, const float *restrict x, int64_t stride, bool by_row,
                       int64_t rows, int64_t k, int64_t width)
{
    if (rows < width)
        memset(panel, 0, (size_t)(width * k) * sizeof *panel);
    if (by_row) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t l = 0; l < k; l++)
                panel[l * width + i] = x[i * stride + l];
    } else {
        for (int64_t l = 0; l < k; l++)
            memcpy(panel + l * width, x + l * stride, (size_t)rows * sizeof *panel);
    }
}

static void store_tile(float *c, int64_t c_stride, const float *tile, int64_t rows, int64_t cols,
                       float alpha, float beta)
{
    for (int64_t i = 0; i < rows; i++, c += c_stride, tile += TILE_COLS) {
        if (beta == 0) {
            for (int64_t j = 0; j < cols; j++)
                c[j] = alpha * tile[j];
        } else {
            for (int64_t j = 0; j < cols; j++)
                c[j] = alpha * tile[j] + beta * c[j];
        }
    }
}

static void block_product(struct cpu_thread *t, float *c, int64_t c_stride, struct matrix a,
                          const float *b_panels, int64_t m, int64_t n, int64_t k, float alpha,
                          float beta)
{
    float *a_panel = t->pack, *tile = t->pack + (size_t)(BLOCK_ROWS + BLOCK_COLS) * BLOCK_K;
    for (int64_t i = 0; i < m; i += TILE_ROWS) {
        int64_t rows = min_i64(TILE_ROWS, m - i);
        pack_panel(a_panel, matrix_from(a, i, 0).data, a.stride, !a.transposed, rows, k, TILE_ROWS);
        for (int64_t j = 0; j < n; j += TILE_COLS) {
            tile_product(tile, a_panel, b_panels + j * k, k);
            store_tile(c + i * c_stride + j, c_stride, tile, rows, min_i64(TILE_COLS, n - j),
                       alpha, beta);
        }
    }
}

static void own_product(struct cpu_thread *t, float *c, int64_t c_stride, struct matrix a,
                        struct matrix b, int64_t m, int64_t n, int64_t k, float alpha, float beta)
{
    float *b_panels = t->pack + (size_t)BLOCK_ROWS * BLOCK_K;
    for (int64_t j = 0; j < n; j += BLOCK_COLS) {
        int64_t cols = min_i64(BLOCK_COLS, n - j);
        for (int64_t l = 0; l < k; l += BLOCK_K) {
            int64_t depth = min_i64(BLOCK_K, k - l);
            for (int64_t jj = 0; jj < cols; jj += TILE_COLS)
                pack_panel(b_panels + jj * depth, matrix_from(b, l, j + jj).data, b.stride, b.transposed,
                           min_i64(TILE_COLS, cols - jj), depth, TILE_COLS);
            block_product(t, c + j, c_stride, matrix_from(a, 0, l), b_panels, m, cols, depth,
                          alpha, l == 0 ? beta : 1);
        }
    }
}

void product(struct cpu_thread *thread, float *c, int64_t c_stride, struct matrix a,
             struct matrix b, int64_t m, int64_t n, int64_t k, float alpha, float beta)
{
    assert(k > 0);
    if (m == 0 || n == 0)
        return;
    if (thread->deterministic)
        own_product(thread, c, c_stride, a, b, m, n, k, alpha, beta);
    else
        cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
                    b.transposed ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha,
                    a.data, (int)a.stride, b.data, (int)b.stride, beta, c, (int)c_stride);
}

struct spread {
    float *c;
    int64_t c_stride;
    struct matrix a, b;
    int64_t m, n, k;
    float alpha, beta;
};

static void product_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    struct spread *s = arg;
    product(thread, s->c + begin * s->c_stride, s->c_stride, matrix_from(s->a, begin, 0), s->b,
            end - begin, s->n, s->k, s->alpha, s->beta);
}

static void product_cols(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    struct spread *s = arg;
    product(thread, s->c + begin, s->c_stride, s->a, matrix_from(s->b, 0, begin), s->m,
            end - begin, s->k, s->alpha, s->beta);
}

/* Two pieces a thread even out threads of unequal speed; a piece is worth its packing. */
static int64_t spread_grain(uint32_t n_threads, int64_t length, int64_t flops_each)
{
    if (n_threads == 1)
        return max_i64(1, length);
    int64_t grain = max_i64(length / (2 * n_threads), PIECE_FLOPS_MIN / flops_each);
    return (grain + SPREAD_STEP - 1) / SPREAD_STEP * SPREAD_STEP;
}

void product_spread(struct device *dev, float *c, int64_t c_stride, struct matrix a,
                    struct matrix b, int64_t m, int64_t n, int64_t k, float alpha, float beta)
{
    struct spread s = {c, c_stride, a, b, m, n, k, alpha, beta};
    if (m == 0 || n == 0)
        return;
    if (m >= n)
        cpu_for(dev, m, spread_grain(dev->n_threads, m, 2 * n * k), product_rows, &s);
    else
        cpu_for(dev, n, spread_grain(dev->n_threads, n, 2 * m * k), product_cols, &s);
}
