/* bench_move.c - what a migration brings, against what a plan says it will:
 * bench_move [TOKENS STEPS]
 *
 * Two ranks, each on one core of its own; the router's bias sends every token to expert 0, which
 * lies on rank 0. A plan gives rank 1 a copy of it in its spare slot. Predicted gain of a step:
 * rows that the heavier rank has less, times the measured seconds of a row, over the layers. Needs
 * a machine with two idle cores (or, with few tokens and many steps, moments in which they are);
 * exit code 1 if the gain is off by more than 20 %. */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "kernels/spans.h"
#include "worker/agree.h"
#include "worker/ckpt.h"
#include "worker/optim.h"
#include "worker/stack.h"
#include "worker/transfer.h"

#define TOKENS_MAX 4096
#define WARM_STEPS 5
#define TOLERANCE  0.2

struct figures {
    double step_s, row_s; /* of the quickest step; of a row where rows were quickest */
    double rows[2];       /* of the last step, by rank, over the layers */
};

struct bench {
    int32_t  n_tokens; /* of each rank */
    uint64_t n_steps;  /* measured; the quickest counts, because a busy neighbour only adds */
    struct figures before, after;
    double pause_s, sent_bytes;
};

static struct model_spec bench_spec(void)
{
    return (struct model_spec){
        .family = FAMILY_KIMI_K3, .n_layers = 4,
        .layers = {{ATTENTION_KDA, MLP_DENSE}, {ATTENTION_MLA, MLP_MOE}, {ATTENTION_KDA, MLP_MOE},
                   {ATTENTION_KDA, MLP_MOE}},
        .residual = RESIDUAL_ATTN_RES, .attn_res_block = 2, .hidden = 256, .vocab = 512,
        .norm_eps = 1e-5f, .latent_norm_eps = 1e-6f, .init_std = 0.02f, .kda_heads = 2,
        .kda_head_dim = 64, .conv_kernel = 4, .kda_gate_bounded = true,
        .kda_gate_lower_bound = -5.0f, .kda_gate_full_rank = true, .heads = 2, .q_lora_rank = 64,
        .kv_lora_rank = 64, .qk_nope_dim = 32, .qk_rope_dim = 16, .v_dim = 32,
        .mla_output_gate = true, .activation = ACTIVATION_SITU, .situ_beta = 4.0f,
        .situ_linear_beta = 25.0f, .dense_inter = 64, .n_experts = 4, .top_k = 1,
        .expert_inter = 512, .n_shared_experts = 1, .latent = 256, .latent_moe = true,
        .latent_norm = true, .renormalize = true, .routed_scale = 1.0f,
    };
}

static void pin(uint32_t core)
{
    cpu_set_t set, mine;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof mine, &mine) < 0)
        return;
    for (int i = 0, n = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &mine) && n++ == (int)core)
            CPU_SET(i, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

/* Expert 0 wins whatever the scores, which lie in 0..1. */
static void make_hot(struct stack *s)
{
    const struct tensor_map *map = s->config->map;
    for (size_t i = 0; i < map->n_entries; i++) {
        struct shard_part p;
        if (map->entries[i].role == ROLE_ROUTER_BIAS && shard_part(s->shard, &map->entries[i], &p))
            for (uint64_t k = 0; k < p.count; k++)
                p.weights[k] = p.first + k == 0 ? 2 : 0;
    }
}

static int one_step(struct stack *s, int32_t n, uint64_t step, struct err *err)
{
    static const struct optim_config optim = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    static _Thread_local int32_t tokens[TOKENS_MAX], labels[TOKENS_MAX];
    int32_t cu_seqlens[2] = {0, n};
    struct model_batch b = {.tokens = tokens, .labels = labels, .cu_seqlens = cu_seqlens,
                            .n_tokens = n, .n_docs = 1};
    struct model_loss loss;
    double norm;
    int rc;
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)(((uint64_t)i * 7919 + step * 104729 + s->rank * 31) % 512);
        labels[i] = (tokens[i] + 1) % 512;
    }
    shard_zero_gradients(s->shard);
    if ((rc = model_step(s->model, &b, true, &loss, err)) < 0 ||
        (rc = optim_norm(s->shard, s->config->map, s->coll, s->dev, 2 * n, &norm, err)) < 0)
        return rc;
    optim_step(s->shard, s->config->map, s->dev, &optim, step, 1e-5, 2 * n, norm);
    return shard_refresh(s->shard, err);
}

static int measure(struct stack *s, const struct bench *b, uint64_t first, struct figures *out,
                   struct err *err)
{
    struct figures f = {.step_s = INFINITY, .row_s = INFINITY};
    for (uint64_t i = 0; i < WARM_STEPS + b->n_steps; i++) {
        double sums[4] = {0};
        uint64_t began = clock_now_ns();
        model_counters_reset(s->model);
        spans_reset(s->dev, NULL, NULL);
        int rc = one_step(s, b->n_tokens, first + i, err);
        if (rc < 0)
            return rc;
        double seconds = (double)(clock_now_ns() - began) / NS_PER_S;
        const struct model_counters *c = model_counters(s->model);
        sums[0] = c->expert_s;
        sums[1] = (double)c->n_rows;
        sums[2 + s->rank] = (double)c->n_rows;
        rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_SUM, sums, 4, err);
        if (rc < 0)
            return rc;
        if (i < WARM_STEPS)
            continue;
        f = (struct figures){fmin(f.step_s, seconds), fmin(f.row_s, sums[0] / sums[1]),
                             {sums[2], sums[3]}};
    }
    if (s->rank == 0)
        *out = f;
    return 0;
}

/* A copy of expert 0 in rank 1's spare slot. */
static int migrate(struct stack *s, struct bench *b, struct err *err)
{
    struct transfer_result r;
    struct transfer *t = NULL;
    struct slots to;
    slots_init_like(&to, &s->slots);
    for (uint32_t l = 1; l < s->config->spec->n_layers; l++) {
        struct placement *map = &to.layers[l].map;
        map->expert[2 * map->n_slots - 1] = 0;
        placement_share_evenly(map);
    }
    to.epoch = 1;
    slots_index(&to);
    int rc = transfer_create(s->shard, &s->slots, &to, NULL, &t, err);
    if ((rc = agree(s->coll, rc, err)) == 0)
        rc = transfer_run(t, &r, err);
    if (rc == 0 && s->rank == 0) {
        b->pause_s = r.seconds;
        b->sent_bytes = (double)r.sent_bytes;
    }
    transfer_destroy(t);
    return rc;
}

static int rank_run(struct stack *s, void *arg, struct err *err)
{
    struct bench *b = arg;
    int rc;
    pin(s->rank);
    ckpt_init_weights(s->shard, s->config->map, s->config->spec, 1);
    make_hot(s);
    if ((rc = measure(s, b, 1, &b->before, err)) < 0 || (rc = migrate(s, b, err)) < 0)
        return rc;
    return measure(s, b, WARM_STEPS + b->n_steps + 1, &b->after, err);
}

static void print(const char *when, const struct figures *f)
{
    printf("%-7s step %.2f ms, rows %.0f and %.0f, row %.2f us\n", when, 1e3 * f->step_s,
           f->rows[0], f->rows[1], 1e6 * f->row_s);
}

int main(int argc, char **argv)
{
    struct model_spec spec = bench_spec();
    struct tensor_map map;
    struct err err = {0};
    struct bench b = {.n_tokens = argc > 1 ? atoi(argv[1]) : 512,
                      .n_steps = argc > 2 ? strtoull(argv[2], NULL, 10) : 20};
    struct stack_config config = {.spec = &spec, .map = &map, .degrees = {2, 2, 2, 0}, .n_spare = 1,
                                  .tokens_max = b.n_tokens};
    if (b.n_tokens < 1 || b.n_tokens > TOKENS_MAX || b.n_steps < 1) {
        fprintf(stderr, "usage: bench_move [TOKENS STEPS]\n");
        return 2;
    }
    if (tensor_map_init(&spec, &map, &err) < 0 || stack_run(&config, rank_run, &b, &err) < 0) {
        fprintf(stderr, "bench_move: %s\n", err.text);
        return 2;
    }
    double predicted = (fmax(b.before.rows[0], b.before.rows[1]) -
                        fmax(b.after.rows[0], b.after.rows[1])) * b.before.row_s;
    double gain = b.before.step_s - b.after.step_s, off = gain / predicted - 1;
    print("before", &b.before);
    print("after", &b.after);
    printf("the move: %.2f MiB, %.2f ms\n", b.sent_bytes / (1 << 20), 1e3 * b.pause_s);
    printf("gain    predicted %.2f ms, measured %.2f ms (%+.0f %%)\n", 1e3 * predicted, 1e3 * gain,
           100 * off);
    tensor_map_fini(&map);
    return fabs(off) <= TOLERANCE ? 0 : 1;
}
