/* time_model.c - seconds of one step under a plan
 *
 * Of the engine as it is: products at measured rates that fall with few rows and narrow matrices;
 * attention and recurrences at rates of their own; everything between them at the speed of memory,
 * and no operator faster than it is started. Tokens travel to experts over the links between them,
 * in chunks behind the experts' products; layers are gathered behind the layer before. The busiest
 * rank sets the pace of the experts. */
#include "coordinator/strategy.h"

#include <math.h>
#include <stdlib.h>

#include "common/gpu_bytes.h"
#include "common/mem.h"
#include "common/memory_model.h"
#include "common/outline_config.h"

/* A CPU's products that decode their weights over those that need not. */
#define UNPACK_MXFP4_CPU 1.06
#define UNPACK_FP8_CPU   1.03
#define HIDDEN_MAX     0.9   /* of a gather that computing can hide */
#define IMBALANCE      1.10  /* of experts that are re-placed while training runs */
#define PASSES         4.0   /* that elementwise work makes over what a layer keeps */
#define ROW_PASSES     8.0   /* over rows on their way into and out of experts: each way, read and
                              * written, forward and backward */
#define SOME_AGAIN     0.5   /* of dense products, and of what lies between, that selective
                              * recomputation repeats; of experts' it repeats all, of cores none */
#define PIECE_AGAIN    (2 / 3.0) /* of experts' that full repeats once more, piece by piece */
#define STATE_BYTES    34.0  /* that the optimizer moves for a parameter, its norm counted */

struct work {
    const struct job_shape *job;
    const struct plan_choice *c;
    double tokens;          /* of one rank and pass */
    double element;         /* bytes */
    double forwards, backs; /* how often a pass does the work of one forward pass */
    double of_experts, of_cores; /* forwards, of these */
    bool   by_piece;        /* the experts' side is made again so */
    double narrow;          /* f32 products beside those of 16 bits */
};

static double min(double a, double b)
{
    return a < b ? a : b;
}

static double max(double a, double b)
{
    return a > b ? a : b;
}

static double base_size(const struct work *w)
{
    static const double bytes[] = {2, 1, 0.53, 4};
    return w->job->is_lora ? bytes[w->c->base] : w->element;
}

/* slow: flops over the matrices' widths. */
static double seconds(const struct cluster *l, double flops, double slow, double rate, double rows)
{
    return (flops + l->half_width * slow) / rate * (1 + l->half_rows / max(rows, 1));
}

static struct work work_of(const struct job_shape *job, const struct plan_choice *c)
{
    struct work w = {.job = job, .c = c, .element = c->is_f32 ? 4 : 2};
    w.tokens = (double)c->micro_batch * job->sequence_length / c->sp;
    w.forwards = c->recompute == RECOMPUTE_FULL ? 2 : c->recompute == RECOMPUTE_SELECTIVE
                 ? 1 + SOME_AGAIN : 1;
    w.by_piece = c->recompute != RECOMPUTE_OFF && plan_chunks(job, c, w.tokens) > 1;
    w.of_experts = c->recompute == RECOMPUTE_OFF ? 1 : 2;
    if (w.by_piece && c->recompute == RECOMPUTE_FULL)
        w.of_experts += PIECE_AGAIN;
    w.of_cores = c->recompute == RECOMPUTE_FULL ? 2 : 1;
    w.backs = job->is_lora ? 1 : 2; /* frozen weights have no gradient */
    w.narrow = c->is_f32 ? job->cluster->product_f32_tflops / job->cluster->product_tflops : 1;
    return w;
}

static double dense_seconds(const struct work *w)
{
    const struct costs *k = w->job->costs;
    const struct cluster *l = w->job->cluster;
    double times = (w->forwards + w->backs) / w->c->tp;
    return seconds(l, k->dense_flops * w->tokens * times, k->dense_slow * w->tokens * times,
                   l->product_tflops * 1e12 * w->narrow, w->tokens);
}

/* What it takes that experts are packed, of products that take plain seconds. A CPU decodes within
 * them, a GPU before each, for each chunk of tokens once more. */
static double packed_seconds(const struct work *w, double plain)
{
    static const double on_cpu[] = {[PACKING_NONE] = 1, [PACKING_MXFP4] = UNPACK_MXFP4_CPU,
                                    [PACKING_FP8] = UNPACK_FP8_CPU};
    const struct costs *k = w->job->costs;
    const struct cluster *l = w->job->cluster;
    enum packing packing = plan_packing(w->job, w->c);
    if (packing == PACKING_NONE || cluster_is_cpu(l))
        return plain * (on_cpu[packing] - 1);
    double n_chunks = plan_chunks(w->job, w->c, w->tokens), of_rank = 1.0 / w->c->ep;
    double bytes = (double)k->experts * of_rank * (base_size(w) + w->element);
    double n_runs = ceil(k->n_experts * of_rank * costs_expert_matrix(k) * w->element /
                         GPU_UNPACK_BYTES);
    double once = bytes / (l->pointwise_tb_per_s * 1e12) +
                  n_runs * k->n_moe * EXPERT_MATRICES * l->launch_us * 1e-6;
    return (w->of_experts + w->backs) * n_chunks * once;
}

/* Every rank's experts get the rows of all ranks of its group. */
static double expert_seconds(const struct work *w)
{
    const struct costs *k = w->job->costs;
    const struct cluster *l = w->job->cluster;
    double rows = k->n_experts ? w->tokens * k->top_k * w->c->ep / k->n_experts : 0;
    double times = w->tokens * (w->of_experts + w->backs);
    if (k->expert_flops == 0)
        return 0;
    double plain = seconds(l, k->expert_flops * times, k->expert_slow * times,
                           l->grouped_tflops * 1e12 * w->narrow, rows) *
                   (w->c->ep > 1 ? IMBALANCE : 1);
    return plain + packed_seconds(w, plain);
}

static double core_seconds(const struct work *w)
{
    const struct costs *k = w->job->costs;
    const struct cluster *l = w->job->cluster;
    double forward = k->core_flops, back = k->core_back_flops;
    if (cluster_is_cpu(l)) {
        forward += k->core_besides;
        back += k->core_back_besides;
    }
    double soft = forward * w->of_cores / l->attention_tflops + back / l->attention_back_tflops;
    double scan = k->scan_units * (l->scan_ns * w->of_cores + l->scan_back_ns) * 1e-9;
    return w->tokens * (soft * 1e-12 / w->narrow + scan) / w->c->tp;
}

static double memory_seconds(const struct work *w)
{
    const struct costs *k = w->job->costs;
    double rows = k->top_k * k->n_moe;
    double passes = PASSES * (w->forwards + 1) / 2;
    double numbers = passes * (k->kept + rows * k->row_kept) + ROW_PASSES * rows * k->row_width;
    return w->tokens * numbers * w->element / w->c->tp /
           (w->job->cluster->pointwise_tb_per_s * 1e12);
}

/* Backward starts twice as many operators as forward. */
static double launch_seconds(const struct work *w)
{
    return w->job->costs->n_calls * (w->forwards + 2) * w->job->cluster->launch_us * 1e-6;
}

/* ---- links ---------------------------------------------------------------------------------- */

/* Consecutive ranks: bytes that each of a group must receive, over the links that they share. */
static double gather_time(const struct cluster *l, double bytes, uint32_t n, uint32_t stride)
{
    uint32_t on_node = l->gpus_per_node / (stride < l->gpus_per_node ? stride
                                                                     : l->gpus_per_node);
    if (n <= 1)
        return 0;
    if (n <= on_node)
        return bytes * (n - 1) / n / (l->node_gb_per_s * 1e9) + l->call_us * 1e-6;
    /* The members on a node share what comes from outside, and pass it on inside. */
    double outside = bytes * (n - on_node) / n / on_node / (l->network_gb_per_s * 1e9);
    double inside = on_node > 1 ? bytes / (l->node_gb_per_s * 1e9) : 0;
    return max(outside, inside) + (l->call_us + l->latency_us) * 1e-6;
}

/* How many of n places k choices meet. */
static double distinct(double n, double k)
{
    return n * (1 - pow(1 - 1 / n, k));
}

/* One way of the tokens of one layer. To experts a token's row travels once to each rank that
 * serves one of its choices, between nodes once to each node; back comes a row for each choice.
 * Each on its own, a row travels for every choice both ways. */
static double travel_seconds(const struct work *w, bool is_back)
{
    const struct cluster *l = w->job->cluster;
    const struct costs *k = w->job->costs;
    double row = w->tokens * k->row_width * w->element, n = w->c->ep;
    double on_node = min(n, l->gpus_per_node), nodes = n / on_node;
    if (n <= 1)
        return 0;
    bool each = is_back || w->job->is_serial;
    double rows = each ? k->top_k : distinct(n, k->top_k);
    double inside = row * rows * (n - 1) / n / (l->node_gb_per_s * 1e9);
    double met = is_back ? k->top_k : distinct(nodes, k->top_k);
    double outside = nodes > 1 ? row * met * (nodes - 1) / nodes / (l->network_gb_per_s * 1e9) : 0;
    return max(inside, outside);
}

/* In chunks: while the experts compute one, the next travels and the results of the one before. */
static double exposed(const struct work *w, double travel, double computing)
{
    double n = plan_chunks(w->job, w->c, w->tokens);
    double rest = travel * (n - 1) / n, cover = computing * (n - 1) / n;
    if (w->job->is_serial)
        return travel;
    return travel / n + (rest > cover ? rest - cover : 0);
}

/* There and back, forward and backward; rows are sent again where experts compute again. */
static void add_all_to_all(const struct work *w, double *out_all, double *out_exposed)
{
    const struct costs *k = w->job->costs;
    const struct cluster *l = w->job->cluster;
    double out = travel_seconds(w, false), back = travel_seconds(w, true);
    double call = (l->call_us + (w->c->ep > l->gpus_per_node ? l->latency_us : 0)) * 1e-6;
    double work = k->n_moe ? expert_seconds(w) / (w->of_experts + w->backs) / k->n_moe : 0;
    double once = out + back, again = w->c->recompute == RECOMPUTE_FULL ? once
                                     : w->c->recompute == RECOMPUTE_SELECTIVE ? out : 0;
    bool third = w->by_piece && again > out; /* rows come once more, with the gradients */
    double n_trips = 4 + (again > 0) + (again > out) + third;
    if (w->c->ep <= 1)
        return;
    if (third)
        again += out;
    *out_all = k->n_moe * (2 * once + again + n_trips * call);
    *out_exposed = k->n_moe * (exposed(w, once, work) + exposed(w, once, w->backs * work) +
                               exposed(w, again, work) + n_trips * call);
}

static void add_gathers(const struct work *w, double compute, double *out_all, double *out_exposed)
{
    const struct costs *k = w->job->costs;
    const struct plan_choice *c = w->c;
    const struct cluster *l = w->job->cluster;
    double layers = w->job->is_lora && c->base == BASE_FP8 ? 1 : w->element;
    double dense = ((double)k->embedding * w->element +
                    (double)(k->dense - k->embedding) * layers) / c->tp;
    double experts = (double)k->experts / c->ep * base_size(w);
    double all = 2 * (gather_time(l, dense, c->fsdp, 1) +
                      gather_time(l, experts, c->expert_shard, c->ep));
    if (!w->job->is_lora) /* gradients go back, in f32 */
        all += gather_time(l, (double)k->dense * 4 / c->tp, c->fsdp, 1) +
               gather_time(l, (double)k->experts / c->ep * 4, c->expert_shard, c->ep);
    /* Behind the layer before, so not the first; and never wholly. */
    double hidden = min(compute, all * HIDDEN_MAX) * (k->n_layers - 1) / k->n_layers;
    *out_all = all;
    *out_exposed = all - hidden;
    if (c->sp > 1) { /* keys of all, states of all before */
        double keys = w->tokens * c->sp * k->key_width * w->element + k->state * 4 * c->sp;
        *out_all += 3 * gather_time(l, keys, c->sp, c->tp);
        *out_exposed += 3 * gather_time(l, keys, c->sp, c->tp);
    }
    if (c->tp > 1) { /* two sums a layer, each way */
        double sums = 4 * w->forwards * k->n_layers * w->tokens * k->hidden * w->element;
        *out_all += gather_time(l, 2 * sums, c->tp, 1);
        *out_exposed += gather_time(l, 2 * sums, c->tp, 1);
    }
}

/* Once a step: copies of a slice add their gradients, and every rank updates what it owns. */
static double step_end(const struct work *w)
{
    const struct costs *k = w->job->costs;
    const struct plan_choice *c = w->c;
    const struct cluster *l = w->job->cluster;
    double dense = (double)k->dense / c->fsdp / c->tp;
    double experts = (double)k->experts / c->ep / c->expert_shard;
    if (w->job->is_lora) {
        dense = (double)k->adapters * w->job->lora_rank / c->fsdp;
        experts = 0;
    }
    uint32_t copies = c->world / c->fsdp / c->tp, expert_copies = c->world / c->ep /
                      c->expert_shard;
    double sum = gather_time(l, 8 * dense, copies ? copies : 1, c->fsdp) +
                 gather_time(l, 8 * experts, expert_copies, c->ep * c->expert_shard);
    double moved = (dense + experts) * STATE_BYTES;
    double rate = c->offload == OFFLOAD_OPTIMIZER ? l->host_gb_per_s * 1e9
                                                 : l->optimizer_tb_per_s * 1e12;
    return sum + moved / rate;
}

/* What is kept goes to the host and comes back. */
static double offload_seconds(const struct work *w)
{
    const struct costs *k = w->job->costs;
    double kept = w->c->recompute == RECOMPUTE_OFF ? k->kept + k->top_k * k->row_kept * k->n_moe
                : w->c->recompute == RECOMPUTE_SELECTIVE ? k->kept_some : 0;
    double bytes = 2 * w->tokens * (kept + k->stream) * w->element;
    return w->c->offload == OFFLOAD_ACTIVATIONS ? bytes / (w->job->cluster->host_gb_per_s * 1e9)
                                                : 0;
}

struct plan_time plan_time(const struct job_shape *job, const struct plan_choice *c)
{
    struct work w = work_of(job, c);
    struct plan_time t = {0};
    double compute = dense_seconds(&w) + expert_seconds(&w) + core_seconds(&w) +
                     max(memory_seconds(&w), launch_seconds(&w));
    double passes = c->accumulation, tokens = (double)job->global_batch * job->sequence_length;
    add_all_to_all(&w, &t.all_to_all, &t.all_to_all_exposed);
    add_gathers(&w, compute, &t.gather, &t.gather_exposed);
    double away = offload_seconds(&w);
    t.compute = passes * compute;
    t.all_to_all *= passes;
    t.all_to_all_exposed *= passes;
    t.gather *= passes;
    t.gather_exposed = passes * (t.gather_exposed + (away > compute ? away - compute : 0));
    t.optimizer = step_end(&w);
    t.total = t.compute + t.all_to_all_exposed + t.gather_exposed + t.optimizer;
    t.tokens_per_s = tokens / t.total;
    double flops = (1 + w.backs) * (2.0 * (double)job->costs->active + job->costs->core_flops);
    t.mfu = t.tokens_per_s * flops / (job->cluster->peak_tflops * 1e12) / c->world;
    return t;
}

int plan_time_alone(const char *model_folder, const struct cluster *l, uint32_t n_sequences,
                    uint32_t length, struct plan_time *out, struct err *err)
{
    char *config = xasprintf("%s/config.json", model_folder);
    struct outline *o = NULL;
    struct costs costs;
    int rc = outline_read(config, &o, err);
    free(config);
    if (rc < 0)
        return rc;
    costs_init(o, length, &costs);
    struct job_shape job = {.costs = &costs, .cluster = l, .sequence_length = length,
                            .global_batch = n_sequences};
    struct plan_choice c = {.world = 1, .fsdp = 1, .ep = 1, .expert_shard = 1, .sp = 1, .tp = 1,
                            .micro_batch = n_sequences, .accumulation = 1, .base = BASE_F32,
                            .is_f32 = true};
    *out = plan_time(&job, &c);
    free(o);
    return 0;
}
