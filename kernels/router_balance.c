/* router_balance.c - the next selection bias of the experts of one layer */
#include "kernels/router_balance.h"

#include <math.h>
#include <stdlib.h>

#include "common/mem.h"

void router_balance_range(const float *bias, int32_t n_experts, float *out_lo, float *out_hi)
{
    float lo = bias[0], hi = bias[0];
    for (int32_t e = 1; e < n_experts; e++) {
        lo = fminf(lo, bias[e]);
        hi = fmaxf(hi, bias[e]);
    }
    *out_lo = lo - 1;
    *out_hi = hi + 1;
}

/* Where in bins the cumulative count reaches target, linear inside the bin. */
static double quantile(const int64_t *bins, int32_t n_bins, double target)
{
    int64_t before = 0;
    int32_t bin = 0;
    for (; bin < n_bins - 1 && (double)(before + bins[bin]) < target; bin++)
        before += bins[bin];
    return bin + (bins[bin] ? (target - (double)before) / (double)bins[bin] : 0);
}

void router_balance_quantile(float *bias, const int64_t *histogram, int64_t n_tokens,
                             int32_t n_experts, int32_t top_k, int32_t n_bins, float lo, float hi)
{
    if (n_tokens == 0 || top_k >= n_experts)
        return;
    double *position = xcalloc((size_t)n_experts, sizeof *position), mean = 0;
    double width = ((double)hi - lo) / n_bins, target = (double)n_tokens * top_k / n_experts;
    for (int32_t e = 0; e < n_experts; e++) {
        position[e] = quantile(histogram + (int64_t)e * n_bins, n_bins, target);
        mean += position[e] / n_experts;
    }
    for (int32_t e = 0; e < n_experts; e++)
        bias[e] = (float)((position[e] - mean) * width);
    free(position);
}

void router_balance_sign(float *bias, const int64_t *counts, int32_t n_experts, float rate)
{
    int64_t total = 0;
    for (int32_t e = 0; e < n_experts; e++)
        total += counts[e];
    for (int32_t e = 0; e < n_experts; e++) {
        int64_t short_of = total - counts[e] * n_experts;
        bias[e] += rate * (float)((short_of > 0) - (short_of < 0));
    }
}
