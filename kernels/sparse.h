/* sparse.h - the keys that one query looks at, and sums over queries for each key
 *
 * A gradient of keys collects from many queries. Queries go in blocks: first each query of a block
 * by itself, then each range of keys by itself, which adds the block's queries in order. So no two
 * threads add to one row, and the order does not depend on them. */
#ifndef KERNELS_SPARSE_H
#define KERNELS_SPARSE_H

#include <string.h>

#include "kernels/product.h"

#define SPARSE_FLOATS_MAX  (8 << 20) /* that a block of queries keeps between its two passes */
#define SPARSE_QUERIES_MAX 64
#define SPARSE_KEY_RANGES  16

/* Row numbers ids[0 .. n), ascending, or first .. first + n where ids is NULL. */
struct key_list {
    const int32_t *ids;
    int64_t first, n;
};

/* What is before the first -1. */
static inline struct key_list key_list_selected(const int32_t *selected, int64_t query,
                                                int32_t top_k)
{
    struct key_list l = {.ids = selected + query * top_k};
    while (l.n < top_k && l.ids[l.n] >= 0)
        l.n++;
    assert(l.n > 0);
    return l;
}

/* How many of the list's keys are below key. */
static inline int64_t key_list_below(const struct key_list *l, int64_t key)
{
    if (!l->ids)
        return max_i64(0, min_i64(l->n, key - l->first));
    int64_t low = 0, high = l->n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (l->ids[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The list's rows of x (d wide, stride apart) one after the other: in to, or where they lie. */
static inline struct matrix key_list_rows(const struct key_list *l, float *to, const float *x,
                                          int64_t stride, int64_t d)
{
    if (!l->ids)
        return as_is(x + l->first * stride, stride);
    for (int64_t j = 0; j < l->n; j++)
        memcpy(to + j * d, x + l->ids[j] * stride, (size_t)d * sizeof *to);
    return as_is(to, d);
}

/* acc's rows of the list's keys from .. to += sums (to - from, d). */
static inline void key_list_add(const struct key_list *l, int64_t from, int64_t to, float *acc,
                                int64_t stride, const float *sums, int64_t d)
{
    for (int64_t j = from; j < to; j++, sums += d) {
        float *restrict row = acc + (l->ids ? l->ids[j] : l->first + j) * stride;
        for (int64_t c = 0; c < d; c++)
            row[c] += sums[c];
    }
}

/* Queries of a block that keeps n_floats for each. */
static inline int64_t sparse_block(int64_t n_floats)
{
    return max_i64(1, min_i64(SPARSE_QUERIES_MAX, SPARSE_FLOATS_MAX / n_floats));
}

/* Keys of a range, given how many there are. */
static inline int64_t sparse_key_range(int64_t n_keys)
{
    int64_t range = cpu_n_tasks(n_keys, SPARSE_KEY_RANGES);
    return max_i64(64, cpu_n_tasks(range, 64) * 64);
}

#endif
