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
