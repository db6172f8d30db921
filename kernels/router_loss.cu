/* router_loss.cu - losses that pull a router towards an even load and small logits
 *
 * A warp a token; a token's part of a loss is a double of its own, added up in a fixed order. */
#include "kernels/ops_cuda.h"

#include "kernels/cuda_parts.h"
#include "kernels/cuda_router.cuh"

#define SHARE_THREADS 256

/* ---- Switch and sequence-wise ---- */

/* shares (n_segments, E): E f_e / (rows of the segment * segments that have rows); a block a
 * segment. */
__global__ static void fill_shares(float *__restrict__ shares, const int64_t *__restrict__ counts,
                                   const int32_t *__restrict__ cu_rows, int32_t n_filled,
                                   int32_t n_experts)
{
    __shared__ double shared[32];
    int64_t first = (int64_t)blockIdx.x * n_experts;
    double total = 0, rows = cu_rows[blockIdx.x + 1] - cu_rows[blockIdx.x];
    for (int32_t e = (int32_t)threadIdx.x; e < n_experts; e += SHARE_THREADS)
        total += (double)counts[first + e];
    total = block_sum(total, shared);
    double each = total > 0 && rows > 0 ? n_experts / (total * rows * n_filled) : 0;
    for (int32_t e = (int32_t)threadIdx.x; e < n_experts; e += SHARE_THREADS)
        shares[first + e] = (float)(each * (double)counts[first + e]);
}

struct aux_segments {
    const int32_t *cu_rows;
    int32_t n_segments;
    const float *shares;
};

/* With y = scores / S: d y = share, d score = (share - sum of share y) / S. A softmax has S = 1 and
 * its own backward takes the sum off, so both come to a factor times share less a mean. */
__global__ static void aux_tokens(double *__restrict__ losses, float *__restrict__ acc_d_logits,
                                  float weight, const float *__restrict__ scores,
                                  struct aux_segments segments, int64_t n_tokens, int32_t n_experts,
                                  bool is_sigmoid)
{
    int64_t token = token_of_warp(n_tokens);
    int32_t lane = (int32_t)threadIdx.x & 31, low = 0, high = segments.n_segments;
    if (token < 0)
        return;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (segments.cu_rows[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    const float *row = scores + token * n_experts;
    const float *shares = segments.shares + (int64_t)low * n_experts;
    float sum = 0, along = 0;
    for (int32_t e = lane; e < n_experts; e += 32) {
        sum += row[e];
        along += shares[e] * row[e];
    }
    sum = warp_sum(sum);
    along = warp_sum(along);
    float inverse = is_sigmoid ? 1 / (sum + 1e-20f) : 1;
    if (lane == 0)
        losses[token] = (double)along * inverse;
    if (!acc_d_logits)
        return;
    float mean = along * inverse, scale = weight * inverse;
    for (int32_t e = lane; e < n_experts; e += 32) {
        float of_score = is_sigmoid ? row[e] * (1 - row[e]) : row[e];
        acc_d_logits[token * n_experts + e] += scale * (shares[e] - mean) * of_score;
    }
}

void cuda_router_aux_loss(struct device *dev, double *acc_loss, float *acc_d_logits, float weight,
                          const float *scores, const int64_t *counts, const int32_t *cu_rows,
                          int32_t n_segments, const struct router_shape *shape)
{
    int64_t n = shape->n_tokens;
    int32_t n_experts = shape->n_experts, n_filled = 0;
    assert(cu_rows[n_segments] == n);
    if (n == 0)
        return;
    for (int32_t g = 0; g < n_segments; g++)
        n_filled += cu_rows[g + 1] > cu_rows[g];
    cuda_scratch_begin(dev);
    double *losses = (double *)cuda_scratch_take(dev, (size_t)n * sizeof *losses);
    size_t n_shares = (size_t)n_segments * (size_t)n_experts;
    float *shares = (float *)cuda_scratch_take(dev, n_shares * sizeof *shares);
    size_t n_bytes = (size_t)(n_segments + 1) * sizeof *cu_rows;
    const int32_t *cu = (const int32_t *)cuda_upload(dev, cu_rows, n_bytes);
    struct aux_segments segments = {cu, n_segments, shares};
    fill_shares<<<(unsigned)n_segments, SHARE_THREADS, 0, cuda_stream(dev)>>>(shares, counts, cu,
                                                                              n_filled, n_experts);
    aux_tokens<<<router_blocks(n), ROUTER_WARPS * 32, 0, cuda_stream(dev)>>>(
        losses, acc_d_logits, weight, scores, segments, n, n_experts,
        shape->kind == ROUTER_SIGMOID);
    cuda_add_losses(dev, acc_loss, 1, losses, n);
    cuda_check(dev, "router_aux_loss", "n=%lld experts=%d segments=%d", (long long)n, n_experts,
               n_segments);
}

/* ---- z-loss ---- */

/* With z = logsumexp(logits): d (z^2) = 2 z softmax(logits). */
__global__ static void z_tokens(double *__restrict__ losses, float *__restrict__ acc_d_logits,
                                float weight, const float *__restrict__ logits, int64_t n_tokens,
                                int32_t n_experts)
{
    int64_t token = token_of_warp(n_tokens);
    int32_t lane = (int32_t)threadIdx.x & 31;
    if (token < 0)
        return;
    const float *row = logits + token * n_experts;
    float max = -INFINITY, sum = 0;
    for (int32_t e = lane; e < n_experts; e += 32)
        max = fmaxf(max, row[e]);
    max = warp_max(max);
    for (int32_t e = lane; e < n_experts; e += 32)
        sum += expf(row[e] - max);
    sum = warp_sum(sum);
    double z = max + log((double)sum);
    if (lane == 0)
        losses[token] = z * z;
    if (!acc_d_logits)
        return;
    float scale = (float)(2 * z * weight / (double)n_tokens) / sum;
    for (int32_t e = lane; e < n_experts; e += 32)
        acc_d_logits[token * n_experts + e] += scale * expf(row[e] - max);
}

void cuda_router_z_loss(struct device *dev, double *acc_loss, float *acc_d_logits, float weight,
                        const float *logits, const struct router_shape *shape)
{
    int64_t n = shape->n_tokens;
    if (n == 0)
        return;
    cuda_scratch_begin(dev);
    double *losses = (double *)cuda_scratch_take(dev, (size_t)n * sizeof *losses);
    z_tokens<<<router_blocks(n), ROUTER_WARPS * 32, 0, cuda_stream(dev)>>>(
        losses, acc_d_logits, weight, logits, n, shape->n_experts);
    cuda_add_losses(dev, acc_loss, 1 / (double)n, losses, n);
    cuda_check(dev, "router_z_loss", "n=%lld experts=%d", (long long)n, shape->n_experts);
}
