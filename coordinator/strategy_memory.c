/* strategy_memory.c - bytes of one GPU under a plan, part by part
 *
 * Weights, their gradients and the optimizer's state are what a rank owns of them. Gathered layers
 * are counted twice, as the next one comes while one computes. */
#include "coordinator/strategy.h"

#include "common/memory_model.h"

#define MXFP4_BYTES (17.0 / 32) /* two values a byte, and a scale for 32 */
#define FP8_BYTES   (1 + 4.0 / (128 * 128))
#define ROWS_SPREAD 1.25 /* rows of the fullest rank above an even load */
#define SCRATCH     0.55 /* of a layer's backward pass, as a share of what it keeps */
#define F32         4.0
#define BF16        2.0

const char *const base_names[] = {"bf16", "fp8", "mxfp4", "f32"};
const char *const offload_names[] = {"off", "activations", "optimizer"};

static const double base_bytes[] = {BF16, FP8_BYTES, MXFP4_BYTES, F32};

struct owned {
    double dense, experts; /* parameters of this rank */
};

static struct owned owned(const struct costs *k, const struct plan_choice *c)
{
    return (struct owned){(double)k->dense / c->fsdp / c->tp,
                          (double)k->experts / c->ep / c->expert_shard};
}

/* Weights are of the type of the activations that they meet; frozen experts may stay packed. */
static double dense_bytes(const struct plan_choice *c)
{
    return c->is_f32 || c->base == BASE_F32 ? F32 : BF16;
}

/* As FP8 layers outside the experts are packed, too. */
static double layer_bytes(const struct job_shape *job, const struct plan_choice *c)
{
    return job->is_lora && c->base == BASE_FP8 ? FP8_BYTES : dense_bytes(c);
}

static double expert_bytes(const struct job_shape *job, const struct plan_choice *c)
{
    return plan_packing(job, c) != PACKING_NONE ? base_bytes[c->base] : dense_bytes(c);
}

enum packing plan_packing(const struct job_shape *job, const struct plan_choice *c)
{
    static const enum packing of[BASE_PRECISIONS] = {[BASE_FP8] = PACKING_FP8,
                                                     [BASE_MXFP4] = PACKING_MXFP4};
    return job->is_lora ? of[c->base] : PACKING_NONE;
}

static void state(const struct job_shape *job, const struct plan_choice *c, struct plan_memory *m)
{
    const struct costs *k = job->costs;
    struct owned own = owned(k, c);
    double element = c->is_f32 ? F32 : BF16;
    double table = (double)k->embedding / c->fsdp / c->tp;
    double weights = table * dense_bytes(c) + (own.dense - table) * layer_bytes(job, c) +
                     own.experts * expert_bytes(job, c);
    double trained = own.dense + own.experts;
    if (job->is_lora) {
        trained = (double)k->adapters * job->lora_rank / c->fsdp;
        weights += trained * element;
    }
    /* f32 training has no second copy: the weight is the master. */
    double master = c->is_f32 && !job->is_lora ? 0 : F32;
    double optimizer = trained * (master + 2 * F32);
    m->weights = (uint64_t)weights;
    m->gradients = (uint64_t)(trained * F32);
    if (c->offload == OFFLOAD_OPTIMIZER)
        m->host = (uint64_t)optimizer;
    else
        m->optimizer = (uint64_t)optimizer;
}

static double pass_tokens(const struct job_shape *job, const struct plan_choice *c)
{
    return (double)c->micro_batch * job->sequence_length / c->sp;
}

uint32_t plan_chunks(const struct job_shape *job, const struct plan_choice *c, double n)
{
    const struct costs *k = job->costs;
    double flops = k->n_moe > 0 ? k->expert_flops / k->n_moe : 0;
    return memory_chunks((uint64_t)n, c->ep,
                         memory_chunk_tokens(flops, !cluster_is_cpu(job->cluster),
                                             c->recompute));
}

/* Rows of experts: that stay for a backward, that come at once, and that tokens send at once. */
struct rows {
    double kept, piece, sent;
};

static struct rows rows_of(const struct job_shape *job, const struct plan_choice *c)
{
    double n = pass_tokens(job, c) * job->costs->top_k, kept = n * ROWS_SPREAD;
    uint32_t n_chunks = plan_chunks(job, c, pass_tokens(job, c));
    double piece = (double)memory_piece_rows((uint64_t)kept, n_chunks, 0);
    return (struct rows){c->recompute == RECOMPUTE_OFF ? kept : piece, piece, n / n_chunks};
}

static void activations(const struct job_shape *job, const struct plan_choice *c,
                        struct plan_memory *m)
{
    const struct costs *k = job->costs;
    double element = c->is_f32 ? F32 : BF16, n = pass_tokens(job, c);
    struct rows rows = rows_of(job, c);
    double layer = n * k->kept_max / c->tp, all = n * k->kept / c->tp;
    double row = k->row_kept / c->tp;
    double stream = n * k->stream / c->tp, head = 4 * n * k->hidden;
    double kept = 0;
    if (c->recompute == RECOMPUTE_OFF)
        kept = all + rows.kept * row * k->n_moe;
    else if (c->recompute == RECOMPUTE_SELECTIVE)
        kept = n * k->kept_some / c->tp;
    if (c->offload == OFFLOAD_ACTIVATIONS) {
        m->host = (uint64_t)((stream + kept) * element);
        stream = 3 * n * k->hidden; /* those on their way */
        kept = 0;
    }
    /* The largest layer is whole in its backward pass, with scratch; of its experts a piece's rows
     * are, and as much for their gradients. */
    double peak = SCRATCH * layer + rows.piece * row;
    if (c->recompute != RECOMPUTE_OFF)
        peak += layer + rows.kept * row;
    m->activations = (uint64_t)((stream + kept + (peak > head ? peak : head)) * element);
}

static uint64_t buffers(const struct job_shape *job, const struct plan_choice *c)
{
    const struct costs *k = job->costs;
    double element = c->is_f32 ? F32 : BF16, n = 0;
    struct rows rows = rows_of(job, c);
    double table = (double)k->embedding / 2 / c->tp, layer = (double)k->layer_dense_max / c->tp;
    double experts = (double)k->layer_experts_max / c->ep;
    if (c->fsdp > 1)
        n += table * dense_bytes(c) + 2 * layer * layer_bytes(job, c);
    if (c->fsdp > 1 && !job->is_lora)
        n += (table + layer) * F32; /* sums of gradients before they are scattered */
    if (c->expert_shard > 1)
        n += 2 * experts * expert_bytes(job, c);
    if (c->expert_shard > 1 && !job->is_lora)
        n += experts * F32;
    if (c->ep > 1)
        n += 3 * (rows.sent + rows.piece) * k->row_width * element;
    return (uint64_t)n + job->cluster->gpu_reserve;
}

struct plan_memory plan_memory(const struct job_shape *job, const struct plan_choice *c)
{
    struct plan_memory m = {0};
    state(job, c, &m);
    activations(job, c, &m);
    m.buffers = buffers(job, c);
    m.total = m.weights + m.gradients + m.optimizer + m.activations + m.buffers;
    return m;
}
