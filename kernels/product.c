/* product.c - one matrix product on the calling thread, and one spread over all
 *
 * A tile of c, 8 rows by two vectors, stays in registers while k passes by. a is read where it
 * lies: each of its numbers is broadcast, so its order does not matter, unless it is stored as its
 * transpose with long rows, where every k would be on another page. b is read where it lies if
 * its rows are b's and short. Else a block of them is packed into panels first. Edges go through
 * the same tile with zeros in the place of what is missing, so an element's sum is the same chain
 * of fused multiply-adds wherever it is. */
#include "kernels/product.h"

#include <string.h>

#ifdef __AVX512F__
#define VEC 16
#else
#define VEC 8
#endif
#define TILE_ROWS 8
#define TILE_COLS (2 * VEC)

#define BLOCK_K    256 /* a panel of b fits the first cache */
#define BLOCK_COLS 512 /* a packed block of b the second */
#define BLOCK_ROWS 192 /* together with a block of a */

#define DIRECT_ROWS_MAX     128  /* more rows than this are worth packing b */
#define DIRECT_STRIDE_MAX   1024 /* floats between the rows of b */
#define DIRECT_A_STRIDE_MAX 512  /* the same of a transposed */

#define PIECE_FLOPS_MIN 500000 /* what a task of product_spread is worth */
#define SPREAD_STEP     64

typedef float vec __attribute__((vector_size(VEC * sizeof(float)), aligned(4), may_alias));
typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

size_t product_pack_floats(void)
{
    return (size_t)(BLOCK_COLS + BLOCK_ROWS) * BLOCK_K;
}

/* Where a tile reads and writes; strides in floats. */
struct tile {
    float *c;
    int64_t c_stride;
    const float *a;
    int64_t a_row, a_k; /* from row to row, from k to k */
    const float *b;
    int64_t b_k;
    int64_t k;
    float   alpha, beta;
};

/* c = alpha a b + beta c for rows by vecs vectors; both constants where this is inlined. */
static inline __attribute__((always_inline)) void tile_product(struct tile t, const int rows,
                                                               const int vecs)
{
    vec acc[TILE_ROWS][2];
    UNROLL
    for (int i = 0; i < rows; i++)
        acc[i][0] = acc[i][1] = (vec){0};
    for (int64_t l = 0; l < t.k; l++, t.a += t.a_k, t.b += t.b_k) {
        vec b0 = *(const vec *)t.b, b1 = vecs > 1 ? *(const vec *)(t.b + VEC) : b0;
        UNROLL
        for (int i = 0; i < rows; i++) {
            float a = t.a[i * t.a_row];
            acc[i][0] += a * b0;
            if (vecs > 1)
                acc[i][1] += a * b1;
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vecs; v++) {
            vec *c = (vec *)(t.c + i * t.c_stride + v * VEC);
            *c = t.beta == 0 ? t.alpha * acc[i][v] : t.alpha * acc[i][v] + t.beta * *c;
        }
}

#define CASE_ROWS(n)                  \
    case n:                           \
        if (vecs > 1)                 \
            tile_product(*t, n, 2);   \
        else                          \
            tile_product(*t, n, 1);   \
        break

static void tile_of(const struct tile *t, int64_t rows, int64_t vecs)
{
    switch (rows) {
        CASE_ROWS(1);
        CASE_ROWS(2);
        CASE_ROWS(3);
        CASE_ROWS(4);
        CASE_ROWS(5);
        CASE_ROWS(6);
        CASE_ROWS(7);
        CASE_ROWS(8);
    }
}

/* A tile of fewer columns than its vectors: c goes through a full one beside. */
static void edge_tile(const struct tile *t, int64_t rows, int64_t cols)
{
    float beside[TILE_ROWS * TILE_COLS];
    struct tile full = *t;
    full.c = beside;
    full.c_stride = TILE_COLS;
    memset(beside, 0, sizeof beside);
    for (int64_t i = 0; t->beta != 0 && i < rows; i++)
        memcpy(beside + i * TILE_COLS, t->c + i * t->c_stride, (size_t)cols * sizeof(float));
    tile_of(&full, rows, (cols + VEC - 1) / VEC);
    for (int64_t i = 0; i < rows; i++)
        memcpy(t->c + i * t->c_stride, beside + i * TILE_COLS, (size_t)cols * sizeof(float));
}

/* to[j][i] = from[i][j] for 8 by 8; strides in floats. */
static inline void transpose8(float *to, int64_t to_stride, const float *from, int64_t from_stride)
{
    vec8 r[8];
    UNROLL
    for (int i = 0; i < 8; i++)
        r[i] = *(const vec8 *)(from + i * from_stride);
    UNROLL
    for (int i = 0; i < 8; i += 2) { /* pairs of rows: single elements */
        vec8 a = r[i], b = r[i + 1];
        r[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
        r[i + 1] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    UNROLL
    for (int j = 0; j < 4; j++) { /* rows two apart: pairs */
        int i = j / 2 * 4 + j % 2;
        vec8 a = r[i], b = r[i + 2];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL
    for (int i = 0; i < 4; i++) { /* rows four apart: halves */
        vec8 a = r[i], b = r[i + 4];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    UNROLL
    for (int i = 0; i < 8; i++)
        *(vec8 *)(to + i * to_stride) = r[i];
}

/* panel[l][j] = x[j][l]: cols <= TILE_COLS columns of b stored as rows. */
static void pack_transposed(float *restrict panel, const float *restrict x, int64_t stride,
                            int64_t cols, int64_t k)
{
    int64_t whole_cols = cols / 8 * 8, whole_k = k / 8 * 8;
    for (int64_t j = 0; j < whole_cols; j += 8)
        for (int64_t l = 0; l < whole_k; l += 8)
            transpose8(panel + l * TILE_COLS + j, TILE_COLS, x + j * stride + l, stride);
    for (int64_t j = 0; j < cols; j++)
        for (int64_t l = j < whole_cols ? whole_k : 0; l < k; l++)
            panel[l * TILE_COLS + j] = x[j * stride + l];
}

/* Columns [0, cols) of b as a panel, the rest of it zero. */
static void pack_panel(float *restrict panel, struct matrix b, int64_t cols, int64_t k)
{
    if (cols < TILE_COLS)
        memset(panel, 0, (size_t)(TILE_COLS * k) * sizeof *panel);
    if (b.transposed)
        pack_transposed(panel, b.data, b.stride, cols, k);
    else
        for (int64_t l = 0; l < k; l++)
            memcpy(panel + l * TILE_COLS, b.data + l * b.stride, (size_t)cols * sizeof *panel);
}

/* A block of b as tiles read it: packed, or where it lies but for the last part of a panel. */
struct b_block {
    struct matrix b;
    const float *panels;
    bool direct;
};

static struct b_block pack_block(float *pack, struct matrix b, int64_t m, int64_t n, int64_t k)
{
    bool direct = !b.transposed && b.stride <= DIRECT_STRIDE_MAX && m <= DIRECT_ROWS_MAX;
    for (int64_t j = direct ? n / TILE_COLS * TILE_COLS : 0; j < n; j += TILE_COLS)
        pack_panel(pack + j * k, matrix_from(b, 0, j), min_i64(TILE_COLS, n - j), k);
    return (struct b_block){b, pack, direct};
}

/* Rows of a transposed a as panels of TILE_ROWS, k by k. */
static void pack_rows(float *restrict panels, struct matrix a, int64_t m, int64_t k)
{
    for (int64_t l = 0; l < k; l++) {
        const float *restrict from = a.data + l * a.stride;
        float *restrict to = panels + l * TILE_ROWS;
        int64_t i = 0;
        for (; i + TILE_ROWS <= m; i += TILE_ROWS)
            memcpy(to + i * k, from + i, TILE_ROWS * sizeof *to);
        if (i < m)
            memcpy(to + i * k, from + i, (size_t)(m - i) * sizeof *to);
    }
}

/* t.a is the first row's, and from tile to tile a_tile floats lie. */
static void block_product(struct tile t, int64_t a_tile, const struct b_block *b, int64_t m,
                          int64_t n)
{
    float *c = t.c;
    const float *a = t.a;
    for (int64_t j = 0; j < n; j += TILE_COLS) {
        int64_t cols = min_i64(TILE_COLS, n - j);
        bool direct = b->direct && cols == TILE_COLS;
        t.b = direct ? b->b.data + j : b->panels + j * t.k;
        t.b_k = direct ? b->b.stride : TILE_COLS;
        for (int64_t i = 0; i < m; i += TILE_ROWS) {
            int64_t rows = min_i64(TILE_ROWS, m - i);
            t.a = a + i / TILE_ROWS * a_tile;
            t.c = c + i * t.c_stride + j;
            if (cols == TILE_COLS)
                tile_of(&t, rows, 2);
            else
                edge_tile(&t, rows, cols);
        }
    }
}

/* Rows of c against one packed block of b. */
static void block_rows(struct tile t, float *pack, struct matrix a, const struct b_block *b,
                       int64_t m, int64_t n)
{
    int64_t a_tile = TILE_ROWS * (a.transposed ? 1 : a.stride);
    t.a = a.data;
    t.a_row = a.transposed ? 1 : a.stride;
    t.a_k = a.transposed ? a.stride : 1;
    if (a.transposed && a.stride > DIRECT_A_STRIDE_MAX) {
        pack_rows(pack, a, m, t.k);
        t.a = pack;
        t.a_k = TILE_ROWS;
        a_tile = TILE_ROWS * t.k;
    }
    block_product(t, a_tile, b, m, n);
}

void product(struct cpu_thread *thread, float *c, int64_t c_stride, struct matrix a,
             struct matrix b, int64_t m, int64_t n, int64_t k, float alpha, float beta)
{
    assert(k > 0);
    float *a_pack = thread->pack, *b_pack = a_pack + BLOCK_ROWS * BLOCK_K;
    struct tile t = {.c_stride = c_stride, .alpha = alpha};
    for (int64_t j = 0; j < n; j += BLOCK_COLS)
        for (int64_t l = 0; l < k; l += BLOCK_K) {
            int64_t cols = min_i64(BLOCK_COLS, n - j);
            t.k = min_i64(BLOCK_K, k - l);
            t.beta = l == 0 ? beta : 1;
            struct b_block block = pack_block(b_pack, matrix_from(b, l, j), m, cols, t.k);
            for (int64_t i = 0; i < m; i += BLOCK_ROWS) {
                t.c = c + i * c_stride + j;
                block_rows(t, a_pack, matrix_from(a, i, l), &block, min_i64(BLOCK_ROWS, m - i),
                           cols);
            }
        }
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
    int64_t grain = max_i64(1, max_i64(length / (2 * n_threads), PIECE_FLOPS_MIN / flops_each));
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
