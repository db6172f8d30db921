/* route.c - where rows are packed on their way to experts, and what ranks tell each other of them
 *
 * Stable sorts by place and by target, of which the host has made the blocks from counts alone. */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"

/* A number of pairs by chunk: those of the expert e are at chunk n_experts + e. */
static int32_t part_of(const struct route *r, const int32_t *ids, int64_t pair)
{
    int64_t chunk = pair / r->pairs_each;
    assert(ids[pair] >= -1 && ids[pair] < r->n_experts && chunk < r->n_chunks);
    return ids[pair] < 0 ? -1 : (int32_t)chunk * r->n_experts + ids[pair];
}

void cpu_route_counts(struct device *dev, int32_t *counts, const int32_t *ids,
                      const struct route *route)
{
    (void)dev;
    memset(counts, 0, (size_t)route->n_chunks * (size_t)route->n_experts * sizeof *counts);
    for (int64_t s = 0; s < route->n_pairs; s++) {
        int32_t x = part_of(route, ids, s);
        if (x >= 0)
            counts[x]++;
    }
}

void cpu_route_pairs(struct device *dev, int64_t *place_of, int64_t *pair_at, const int32_t *ids,
                     const struct route *route)
{
    size_t n = (size_t)route->n_chunks * (size_t)route->n_experts;
    int64_t *n_before = cpu_shared(dev, n * (sizeof *n_before + sizeof(int32_t))); /* of x */
    int32_t *part = (int32_t *)(n_before + n);
    memset(n_before, 0, n * sizeof *n_before);
    memcpy(part, route->first, n * sizeof *part);
    for (int64_t s = 0; s < route->n_pairs; s++) {
        int32_t x = part_of(route, ids, s);
        place_of[s] = -1;
        if (x < 0)
            continue;
        int64_t r = n_before[x]++;
        while (r >= route->end[part[x]])
            part[x]++;
        assert(part[x] < route->first[x + 1]);
        int64_t at = route->place[part[x]] + r;
        place_of[s] = at - route->chunk_at[s / route->pairs_each];
        pair_at[at] = s;
    }
}

/* The last of n that is not after `at`. */
static int32_t block_of(const int64_t *begin, int32_t n, int64_t at)
{
    int32_t low = 0, high = n;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (begin[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* For each pair of a token the number, by chunk and target, of its row's kind; -1: none. */
static void find_targets(int64_t *out, int64_t token, const int64_t *place_of,
                         const struct route_targets *t, const struct route *route)
{
    for (int32_t k = 0; k < route->top_k; k++) {
        int64_t s = token * route->top_k + k, chunk = s / route->pairs_each;
        const int64_t *begin = t->begin + chunk * (t->n_ranks + 1);
        out[k] = place_of[s] < 0 ? -1
                 : chunk * t->n_ranks + t->target[block_of(begin, t->n_ranks, place_of[s])];
    }
}

/* The first of a token's pairs with the number of pair k. */
static int32_t first_with(const int64_t *numbers, int32_t k)
{
    int32_t first = 0;
    while (numbers[first] != numbers[k])
        first++;
    return first;
}

void cpu_route_rows(struct device *dev, int32_t *counts, int64_t *row_of, int64_t *pair_at,
                    int64_t *token_at, const int64_t *place_of, const struct route_targets *targets,
                    const struct route *route)
{
    int32_t top_k = route->top_k, n = route->n_chunks * targets->n_ranks;
    int64_t *next = cpu_shared(dev, (size_t)(n + top_k) * sizeof *next), *numbers = next + n;
    int64_t at = 0;
    memset(counts, 0, (size_t)n * sizeof *counts);
    for (int64_t token = 0; token < route->n_pairs / top_k; token++) {
        find_targets(numbers, token, place_of, targets, route);
        for (int32_t k = 0; k < top_k; k++)
            if (numbers[k] >= 0 && first_with(numbers, k) == k)
                counts[numbers[k]]++;
    }
    for (int32_t i = 0; i < n; i++) {
        next[i] = at;
        at += counts[i];
    }
    for (int64_t token = 0; token < route->n_pairs / top_k; token++) {
        int64_t *row = row_of + token * top_k;
        find_targets(numbers, token, place_of, targets, route);
        for (int32_t k = 0; k < top_k; k++) {
            int32_t first = first_with(numbers, k);
            row[k] = numbers[k] < 0 ? -1 : first < k ? row[first] : next[numbers[k]]++;
            if (numbers[k] < 0 || first < k)
                continue;
            pair_at[row[k]] = token * top_k + k;
            token_at[row[k]] = token;
        }
    }
}

void cpu_route_write(struct device *dev, struct route_note *notes, const int64_t *pair_at,
                     const int64_t *row_of, const float *weights, int32_t top_k,
                     const struct route_notes *layout)
{
    (void)dev;
    for (int32_t b = 0; b < layout->n_blocks; b++)
        for (int64_t i = layout->begin[b]; i < layout->begin[b + 1]; i++) {
            int64_t s = pair_at[i], at = layout->add[b] + (row_of ? row_of[s] : s / top_k);
            assert(at >= 0 && at <= INT32_MAX);
            notes[layout->to[b] + i - layout->begin[b]] =
                (struct route_note){(int32_t)at, weights ? weights[s] : 0};
        }
}

void cpu_route_read(struct device *dev, int64_t *at, float *weights,
                    const struct route_note *notes, const int64_t *from, const int64_t *to,
                    int32_t n_blocks)
{
    (void)dev;
    for (int32_t b = 0; b < n_blocks; b++)
        for (int64_t i = from[b], k = to[b]; i < from[b + 1]; i++, k++) {
            at[k] = notes[i].at;
            if (weights)
                weights[k] = notes[i].weight;
        }
}

void cpu_route_blocks(struct device *dev, int64_t *to_of, const int64_t *from, const int64_t *to,
                      int32_t n_blocks)
{
    (void)dev;
    for (int32_t b = 0; b < n_blocks; b++)
        for (int64_t i = from[b], k = to[b]; i < from[b + 1]; i++, k++)
            to_of[i] = k;
}
