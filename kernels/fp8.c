/* fp8.c - numbers of eight bits (e4m3, without infinities), with a scale for each square block */
#include "kernels/fp8.h"

#include <math.h>

#include "kernels/vmath.h"

float fp8_e4m3_value(uint8_t code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent == 15 && mantissa == 7)
        return NAN;
    float size = exponent ? ldexpf((float)(8 + mantissa), exponent - 10)
                          : ldexpf((float)mantissa, -9);
    return code & 0x80 ? -size : size;
}

uint8_t fp8_e4m3_of(float x)
{
    uint8_t sign = signbit(x) ? 0x80 : 0;
    float size = fminf(fabsf(x), FP8_LARGEST);
    int exponent;
    if (size < 0x1p-6f) /* multiples of 2^-9; eight of them are the first larger number */
        return sign | (uint8_t)rintf(size * 0x1p9f);
    frexpf(size, &exponent); /* size is in [2^(exponent - 1), 2^exponent) */
    int eighths = (int)rintf(ldexpf(size, 4 - exponent));
    return sign | (uint8_t)((exponent + 6) * 8 + eighths - 8); /* 16 of them carry over */
}

static void encode_block(uint8_t *out, float *out_scale, const float *x, int64_t n_rows,
                         int64_t n_cols, int64_t stride)
{
    float largest = 0;
    for (int64_t i = 0; i < n_rows * n_cols; i++)
        largest = fmaxf(largest, fabsf(x[i / n_cols * stride + i % n_cols]));
    float scale = largest > 0 ? largest / FP8_LARGEST : 1;
    for (int64_t i = 0; i < n_rows * n_cols; i++) {
        int64_t at = i / n_cols * stride + i % n_cols;
        out[at] = fp8_e4m3_of(x[at] / scale);
    }
    *out_scale = scale;
}

void fp8_e4m3_encode(uint8_t *out_bytes, float *out_scales, const float *x, int64_t rows,
                     int64_t cols)
{
    for (int64_t i = 0; i < rows; i += FP8_BLOCK)
        for (int64_t j = 0; j < cols; j += FP8_BLOCK)
            encode_block(out_bytes + i * cols + j, out_scales++, x + i * cols + j,
                         rows - i < FP8_BLOCK ? rows - i : FP8_BLOCK,
                         cols - j < FP8_BLOCK ? cols - j : FP8_BLOCK, cols);
}

/* A code's number, which is not NaN, without a table, so that a loop vectorises: a float with the
 * same three bits of fraction. Below 2^-6 there is no leading one: it is taken off again. */
static inline float value_of(uint32_t code)
{
    uint32_t size = code & 127, is_normal = size > 7;
    float x = vm_from_bits((size << 20) + ((121 - is_normal) << 23));
    x -= is_normal ? 0 : 0x1p-6f;
    return vm_from_bits(vm_bits(x) | (code & 128) << 24);
}

void fp8_e4m3_decode(float *out, const uint8_t *bytes, const float *scales, int64_t cols,
                     int64_t first_row, int64_t n_rows, int64_t first_col, int64_t n_cols)
{
    int64_t across = (cols + FP8_BLOCK - 1) / FP8_BLOCK, last_col = first_col + n_cols;
    for (int64_t row = first_row; row < first_row + n_rows; row++)
        for (int64_t at = first_col; at < last_col;) {
            int64_t block = at / FP8_BLOCK, end = (block + 1) * FP8_BLOCK;
            int64_t n = (end < last_col ? end : last_col) - at;
            float scale = scales[row / FP8_BLOCK * across + block];
            const uint8_t *restrict from = bytes + row * cols + at;
            float *restrict to = out + (row - first_row) * n_cols + at - first_col;
#pragma omp simd
            for (int64_t j = 0; j < n; j++)
                to[j] = scale * value_of(from[j]);
            at += n;
        }
}

int64_t fp8_e4m3_find_nan(const uint8_t *bytes, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if ((bytes[i] & 0x7f) == 0x7f)
            return i;
    return -1;
}
