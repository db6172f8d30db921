/* store_counts.c - packs, unpacks and adds arrays of counts */
#include "coordinator/store_counts.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "blobs are little-endian and are copied as they are"
#endif

uint32_t counts_width(const uint64_t *counts, size_t n)
{
    uint64_t all = 0;
    for (size_t i = 0; i < n; i++)
        all |= counts[i];
    return all <= UINT8_MAX ? 1 : all <= UINT16_MAX ? 2 : all <= UINT32_MAX ? 4 : 8;
}

void counts_pack(const uint64_t *counts, size_t n, uint32_t width, uint8_t *out)
{
    for (size_t i = 0; i < n; i++)
        memcpy(out + i * width, &counts[i], width);
}

uint64_t counts_at(const uint8_t *bytes, uint32_t width, size_t i)
{
    uint64_t x = 0;
    memcpy(&x, bytes + i * width, width);
    return x;
}

/* One loop per width, so that each is vectorised; blobs are not aligned. */
#define ADD(TYPE)                                                                              \
    for (size_t i = 0; i < n; i++) {                                                           \
        TYPE x;                                                                                \
        memcpy(&x, row + i * sizeof x, sizeof x);                                              \
        sums[i] += x;                                                                          \
    }

void counts_add(const uint8_t *bytes, uint32_t width, size_t n_rows, size_t n, uint64_t *sums)
{
    for (size_t r = 0; r < n_rows; r++) {
        const uint8_t *row = bytes + r * n * width;
        if (width == 1)
            ADD(uint8_t)
        else if (width == 2)
            ADD(uint16_t)
        else if (width == 4)
            ADD(uint32_t)
        else
            ADD(uint64_t)
    }
}

double counts_imbalance(const uint64_t *counts, size_t n)
{
    uint64_t most = 0;
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        most = counts[i] > most ? counts[i] : most;
        sum += (double)counts[i];
    }
    return sum > 0 ? (double)most * (double)n / sum : 1;
}
