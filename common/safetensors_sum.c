/* safetensors_sum.c - checksums that ranks can take of their slices and add
 *
 * A bit that flips changes the plain sum; words that change places, the weighted one. */
#include "common/safetensors_sum.h"

#include <string.h>

#define ADD(type)                                                                                  \
    for (uint64_t i = 0; i < n; i++) {                                                             \
        type x;                                                                                    \
        memcpy(&x, (const uint8_t *)words + i * sizeof x, sizeof x); /* perhaps unaligned */       \
        plain += x;                                                                                \
        weighted += (first + i + 1) * x;                                                           \
    }

void st_sum_add(struct st_sum *s, enum st_dtype dtype, uint64_t first, const void *words,
                uint64_t n)
{
    uint64_t plain = 0, weighted = 0;
    switch (st_dtype_bits(dtype)) {
    case 16:
        ADD(uint16_t)
        break;
    case 32:
        ADD(uint32_t)
        break;
    case 64:
        ADD(uint64_t)
        break;
    default:
        ADD(uint8_t)
    }
    s->plain += plain;
    s->weighted += weighted;
}

struct st_sum st_sum(const struct st_view *v)
{
    struct st_sum s = {0};
    uint32_t bits = st_dtype_bits(v->tensor.dtype);
    st_sum_add(&s, v->tensor.dtype, 0, v->data, bits < 8 ? v->n_bytes : v->n_elements);
    return s;
}
