/* route.c - where rows are packed on their way to experts, and how their blocks change order
 *
 * A stable sort by place, of which the host has made the blocks from the counts alone. */
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/cpu.h"

void cpu_route_counts(struct device *dev, int32_t *counts, const int32_t *ids, int64_t n_pairs,
                      int32_t n_experts)
{
    (void)dev;
    memset(counts, 0, (size_t)n_experts * sizeof *counts);
    for (int64_t s = 0; s < n_pairs; s++) {
        assert(ids[s] >= -1 && ids[s] < n_experts);
        if (ids[s] >= 0)
            counts[ids[s]]++;
    }
}

void cpu_route_pairs(struct device *dev, int64_t *place_of, int64_t *pair_at, int64_t *token_at,
                     const int32_t *ids, const struct route *route)
{
    size_t n = (size_t)route->n_experts;
    int64_t *n_before = cpu_shared(dev, n * (sizeof *n_before + sizeof(int32_t))); /* by expert */
    int32_t *part = (int32_t *)(n_before + n);
    memset(n_before, 0, n * sizeof *n_before);
    memcpy(part, route->first, n * sizeof *part);
    for (int64_t s = 0; s < route->n_pairs; s++) {
        int32_t e = ids[s];
        place_of[s] = -1;
        if (e < 0)
            continue;
        int64_t r = n_before[e]++;
        while (r >= route->end[part[e]])
            part[e]++;
        assert(part[e] < route->first[e + 1]);
        int64_t at = route->place[part[e]] + r;
        place_of[s] = at;
        pair_at[at] = s;
        token_at[at] = s / route->top_k;
    }
}

void cpu_route_blocks(struct device *dev, int64_t *to_of, int64_t *from_of, const int64_t *from,
                      const int64_t *to, int32_t n_blocks)
{
    (void)dev;
    for (int32_t b = 0; b < n_blocks; b++)
        for (int64_t i = from[b], k = to[b]; i < from[b + 1]; i++, k++) {
            to_of[i] = k;
            from_of[k] = i;
        }
}
