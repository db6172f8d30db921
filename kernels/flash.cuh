/* flash.cuh - attention in bf16 on tensor cores, for the usual widths */
#ifndef KERNELS_FLASH_CUH
#define KERNELS_FLASH_CUH

#include "kernels/attention.cuh"

/* Key parts of 128 and no or 64 shared columns, values of 128, rows that 16-byte accesses fit. */
template <typename T>
static inline bool flash_fits(const attention_view<T> &x)
{
    const void *pointers[] = {x.q, x.kv, x.rope ? x.k_rope : x.kv};
    bool fits = sizeof(T) == 2 && x.nope == 128 && x.v == 128 && (x.rope == 0 || x.rope == 64);
    for (const void *p : pointers)
        fits = fits && is_aligned16(p);
    return fits && (x.rope == 0 || is_aligned16(x.k_rope_stride * (int64_t)sizeof(T)));
}

void flash_forward(struct device *dev, bf16 *o, float *lse, const attention_view<bf16> &x);

/* As attention_gradients: dk_rope_heads (heads, n, rope) is what each head gives to the shared part
 * of keys; along (n, heads) is o . d_o. */
void flash_backward(struct device *dev, bf16 *dq, bf16 *dkv, float *dk_rope_heads,
                    const bf16 *d_o, const float *lse, const float *along,
                    const attention_view<bf16> &x);

#endif
