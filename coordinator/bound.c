/* bound.c - what no placement can beat, for tests and for people */
#include "coordinator/bound.h"

#include <math.h>
#include <stdlib.h>

#include "common/mem.h"

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* With target T an expert needs ceil(w / T) copies; all beyond the first must find spare slots. */
static bool is_enough(const double *load, uint32_t n_experts, uint32_t n_devices, uint64_t n_spare,
                      double target)
{
    double extra = 0;
    for (uint32_t e = 0; e < n_experts; e++) {
        double n = ceil(load[e] / target - 1e-12);
        if (n > n_devices)
            return false;
        extra += n > 1 ? n - 1 : 0;
    }
    return extra <= (double)n_spare;
}

double bound_ratio(const double *load, uint32_t n_experts, uint32_t n_devices, uint32_t n_slots)
{
    double sum = 0, max = 0;
    for (uint32_t e = 0; e < n_experts; e++) {
        sum += load[e];
        max = fmax(max, load[e]);
    }
    if (!(sum > 0))
        return 1;
    double even = sum / n_devices, low = even, high = fmax(even, max);
    uint64_t n_spare = (uint64_t)n_devices * n_slots - n_experts;
    if (!is_enough(load, n_experts, n_devices, n_spare, low))
        for (int i = 0; i < 60; i++) {
            double middle = (low + high) / 2;
            *(is_enough(load, n_experts, n_devices, n_spare, middle) ? &high : &low) = middle;
        }
    else
        high = low;
    if (n_spare == 0) {
        /* Every slot is taken: next to the heaviest expert stand the lightest. */
        double *sorted = xmemdup(load, n_experts * sizeof *sorted), least = max;
        qsort(sorted, n_experts, sizeof *sorted, by_size);
        for (uint32_t i = 0; i + 1 < n_slots; i++)
            least += sorted[i];
        high = fmax(high, least);
        free(sorted);
    }
    return high / even;
}
