/* store_counts.h - arrays of counts as blobs, each as narrow as its largest count allows
 *
 * Unsigned, little-endian, `width` bytes each: 1, 2, 4 or 8. A second of load of 92 layers of 896
 * experts is 165 KB at two bytes, half of what u32 takes. */
#ifndef COORDINATOR_STORE_COUNTS_H
#define COORDINATOR_STORE_COUNTS_H

#include <stddef.h>
#include <stdint.h>

uint32_t counts_width(const uint64_t *counts, size_t n);

/* out: n * width bytes. */
void counts_pack(const uint64_t *counts, size_t n, uint32_t width, uint8_t *out);

uint64_t counts_at(const uint8_t *bytes, uint32_t width, size_t i);

/* Adds n_rows rows of n counts onto sums (n). */
void counts_add(const uint8_t *bytes, uint32_t width, size_t n_rows, size_t n, uint64_t *sums);

/* Max over mean; 1 where there is nothing. */
double counts_imbalance(const uint64_t *counts, size_t n);

#endif
