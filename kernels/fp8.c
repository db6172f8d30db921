/* fp8.c - numbers of eight bits (e4m3, without infinities), with a scale for each square block */
#include "kernels/fp8.h"

#include <math.h>

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
    float size = fminf(fabsf(x), 448);
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
    float scale = largest > 0 ? largest / 448 : 1;
    for (int64_t i = 0; i < n_rows * n_cols; i++) {
        int64_t at = i / n_cols * stride + i % n_cols;
        out[at] = fp8_e4m3_of(x[at] / scale);
    }
    *out_scale = scale;
}

void fp8_e4m3_encode(uint8_t *out_bytes, float *out_scales, const float *x, int64_t rows,
                     int64_t cols, int64_t block)
{
    for (int64_t i = 0; i < rows; i += block)
        for (int64_t j = 0; j < cols; j += block)
            encode_block(out_bytes + i * cols + j, out_scales++, x + i * cols + j,
                         rows - i < block ? rows - i : block, cols - j < block ? cols - j : block,
                         cols);
}

void fp8_e4m3_decode(float *out, const uint8_t *bytes, const float *scales, int64_t first_row,
                     int64_t n_rows, int64_t cols, int64_t block)
{
    float values[256];
    int64_t blocks_per_row = (cols + block - 1) / block;
    for (int code = 0; code < 256; code++)
        values[code] = fp8_e4m3_value((uint8_t)code);
    for (int64_t i = 0; i < n_rows; i++) {
        int64_t row = first_row + i;
        const uint8_t *from = bytes + row * cols;
        const float *row_scales = scales + row / block * blocks_per_row;
        float *to = out + i * cols;
        for (int64_t b = 0; b < blocks_per_row; b++) {
            int64_t end = (b + 1) * block < cols ? (b + 1) * block : cols;
            for (int64_t j = b * block; j < end; j++)
                to[j] = values[from[j]] * row_scales[b];
        }
    }
}

int64_t fp8_e4m3_find_nan(const uint8_t *bytes, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if ((bytes[i] & 0x7f) == 0x7f)
            return i;
    return -1;
}
