/* safetensors_sum.h - adds slices of tensors up; private to safetensors */
#ifndef COMMON_SAFETENSORS_SUM_H
#define COMMON_SAFETENSORS_SUM_H

#include "common/safetensors.h"

/* Words first .. first + n of a tensor; of dtypes narrower than a byte, bytes. */
void st_sum_add(struct st_sum *s, enum st_dtype dtype, uint64_t first, const void *words,
                uint64_t n);

#endif
