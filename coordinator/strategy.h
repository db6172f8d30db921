/* strategy.h - how a model is best trained on a cluster: memory, time, and a search over both
 *
 * Pure arithmetic over an outline's sums. memory_model says what the engine of today takes for the
 * families that it runs; this says what any model would take under any of the degrees, those that
 * the engine lacks included. Times are of one optimizer step. */
#ifndef COORDINATOR_STRATEGY_H
#define COORDINATOR_STRATEGY_H

#include "common/cluster.h"
#include "common/outline.h"
#include "common/packing.h"
#include "common/recompute.h"

enum base_precision { BASE_BF16, BASE_FP8, BASE_MXFP4, BASE_F32, BASE_PRECISIONS };
enum offload_kind { OFFLOAD_OFF, OFFLOAD_ACTIVATIONS, OFFLOAD_OPTIMIZER, OFFLOAD_KINDS };

extern const char *const base_names[], *const offload_names[];

/* What a model costs, summed over its layers for one sequence length. Floats are elements. */
struct costs {
    uint32_t n_layers, n_moe, hidden, top_k, n_experts;
    uint64_t dense, experts;        /* parameters outside and inside the routed experts */
    uint64_t embedding;             /* of dense: both matrices */
    uint64_t layer_dense_max, layer_experts_max;
    uint64_t adapters;              /* of LoRA with rank 1; times the rank */
    uint64_t active;                /* parameters that one token uses, without the look-up */
    double   dense_flops, expert_flops; /* products, forward, of one token */
    double   dense_slow, expert_slow;   /* the same over the means of the matrices' sides */
    double   core_flops, core_back_flops; /* attention over the sequence, of one token */
    double   core_besides, core_back_besides; /* and what a CPU does besides, in such operations */
    double   scan_units; /* recurrent mixers, of one token: heads of 128 x 128 */
    uint32_t n_calls;    /* operators of a forward pass */
    double   kept, kept_max, kept_some; /* elements of a token: all layers, the largest, without
                                         * what selective recomputation drops */
    double   row_kept;              /* elements of a row at its expert, of one layer */
    double   stream;                /* of a token: what stays between layers under recomputation */
    uint32_t row_width;             /* that travels to an expert */
    double   key_width, state;      /* of a token; of a sequence: what sequence ranks exchange */
};

void costs_init(const struct outline *o, uint32_t sequence_length, struct costs *out);

/* Of an expert, each as large as the others. */
#define EXPERT_MATRICES 3u
static inline double costs_expert_matrix(const struct costs *k)
{
    uint64_t n = (uint64_t)k->n_experts * k->n_moe * EXPERT_MATRICES;
    return n ? (double)k->experts / (double)n : 0;
}

struct job_shape {
    const struct costs   *costs;
    const struct cluster *cluster;
    bool     is_lora;
    uint32_t lora_rank, sequence_length;
    uint32_t global_batch; /* sequences of an optimizer step */
    bool     is_serial;    /* tokens travel before and after experts compute, not meanwhile */
};

struct plan_choice {
    uint32_t world, fsdp, ep, expert_shard, sp, tp, micro_batch, accumulation;
    enum recompute recompute;
    enum offload_kind   offload;
    enum base_precision base; /* of frozen weights; full training: BASE_BF16 or BASE_F32 */
    bool     is_f32;          /* activations and products */
};

/* What frozen experts are packed as. */
enum packing plan_packing(const struct job_shape *job, const struct plan_choice *c);

struct plan_memory { /* bytes of one GPU */
    uint64_t weights, gradients, optimizer, activations, buffers, total;
    uint64_t host; /* on its machine, beside total */
};

struct plan_time { /* seconds of one step */
    double compute, all_to_all, all_to_all_exposed, gather, gather_exposed, optimizer, total;
    double tokens_per_s, mfu;
};

struct strategy_plan {
    struct plan_choice choice;
    struct plan_memory memory;
    struct plan_time   time;
};

/* In how many chunks the n tokens of a pass of a rank go to experts (memory_chunks). */
uint32_t plan_chunks(const struct job_shape *job, const struct plan_choice *c, double n);
struct plan_memory plan_memory(const struct job_shape *job, const struct plan_choice *c);
struct plan_time   plan_time(const struct job_shape *job, const struct plan_choice *c);

/* The same of one device that trains the model in model_folder in float32, all sequences in one
 * pass: what a measurement is held against. Errors are outline_read's. */
int plan_time_alone(const char *model_folder, const struct cluster *l, uint32_t n_sequences,
                    uint32_t length, struct plan_time *out, struct err *err);

/* What may be chosen: all of it, or what an engine runs. */
struct strategy_limits {
    uint32_t sp_max, tp_max;
    bool     bf16, f32, recompute[RECOMPUTE_WAYS], offload[OFFLOAD_KINDS],
             base[BASE_PRECISIONS];
};

struct strategy_limits strategy_all(void);

#define STRATEGY_PLANS_MAX 512u

struct strategy {
    struct strategy_plan plans[STRATEGY_PLANS_MAX]; /* that fit, descending tokens/s; the best of
                                                     * each way to cut the weights */
    uint32_t n_plans;
    struct strategy_plan least; /* of all that were looked at, the least memory */
    uint64_t n_seen, n_fit;
};

/* On exactly `world` GPUs. limit_bytes: what one GPU may hold. */
void strategy_search(const struct job_shape *job, const struct strategy_limits *limits,
                     uint32_t world, struct strategy *out);

/* The fewest GPUs, of 1, 2, 4, ... and whole nodes up to most, on which anything fits; 0: none.
 * Where that is many nodes, some numbers between are left out. */
uint32_t strategy_fewest(const struct job_shape *job, const struct strategy_limits *limits,
                         uint32_t most, struct strategy_plan *out_plan);

/* Neighbours of a plan, each with one thing changed, and why it lost. */
#define NEIGHBOURS_MAX 24u
struct neighbour {
    char change[64], reason[160];
    struct strategy_plan plan;
};
uint32_t strategy_neighbours(const struct job_shape *job, const struct strategy_plan *winner,
                             struct neighbour out[NEIGHBOURS_MAX]);

/* Sequences of a step: about so many tokens, cut evenly by world where there are enough. */
uint32_t strategy_batch(uint64_t n_tokens, uint32_t sequence_length, uint32_t world);

/* Whether the plan's batch and degrees divide what they must; fills accumulation. */
bool plan_is_whole(const struct job_shape *job, struct plan_choice *c);

#endif
