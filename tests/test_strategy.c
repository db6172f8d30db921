/* test_strategy.c - plans of memory and time, and the search over them
 *
 * Published configurations are read where the folder of reference data is given (BALLAST_SHARED).
 * What a plan of a family that runs takes is compared with memory_model. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "common/mem.h"
#include "common/memory_model.h"
#include "common/outline_config.h"
#include "coordinator/operators.h"
#include "coordinator/strategy.h"

#define TOLERANCE 0.10 /* of a plan's memory beside memory_model's */

static char *config_of(const char *model)
{
    const char *shared = getenv("BALLAST_SHARED"), *source = getenv("BALLAST_SOURCE");
    return shared && *shared
               ? xasprintf("%s/data/configs/%s/config.json", shared, model)
               : xasprintf("%s/../shared/data/configs/%s/config.json", source ? source : "..",
                           model);
}

static struct outline *outline_of(const char *model)
{
    struct outline *o;
    struct err err = {0};
    char *path = config_of(model);
    int rc = outline_read(path, &o, &err);
    free(path);
    if (rc == -ENOENT) {
        print_message("SKIPPED: no reference data\n");
        skip();
    }
    if (rc < 0)
        fail_msg("%s", err.text);
    return o;
}

static struct cluster h200(uint32_t n_nodes)
{
    struct cluster l;
    fields_init(&cluster_table, &l);
    l.nodes = n_nodes;
    return l;
}

struct fixture {
    struct outline *o;
    struct costs costs;
    struct cluster cluster;
    struct job_shape job;
    struct strategy *found;
};

static void open_fixture(struct fixture *f, const char *model, uint32_t n_nodes, bool is_lora,
                         uint32_t length)
{
    *f = (struct fixture){.o = outline_of(model), .cluster = h200(n_nodes)};
    costs_init(f->o, length, &f->costs);
    f->job = (struct job_shape){&f->costs, &f->cluster, is_lora, 16, length,
                                strategy_batch(4 << 20, length, 8 * n_nodes)};
    f->found = xcalloc(1, sizeof *f->found);
}

static void close_fixture(struct fixture *f)
{
    fields_fini(&cluster_table, &f->cluster);
    free(f->found);
    free(f->o);
}

/* ---- memory --------------------------------------------------------------------------------- */

static const struct {
    const char *model;
    struct layout_degrees degrees;
    uint32_t micro_batch;
    enum recompute recompute;
    bool is_f32;
} taken[] = {
    {"kimi-k3", {1024, 64, 128, 8}, 1, RECOMPUTE_FULL, false},
    {"kimi-k3", {1024, 128, 64, 16}, 2, RECOMPUTE_FULL, true},
    {"kimi-k3", {1024, 64, 128, 8}, 1, RECOMPUTE_SELECTIVE, false},
    {"kimi-linear-48b-a3b", {32, 8, 32, 1}, 2, RECOMPUTE_FULL, false},
    {"kimi-linear-48b-a3b", {32, 8, 16, 2}, 1, RECOMPUTE_OFF, false},
    {"kimi-linear-48b-a3b", {32, 8, 16, 2}, 2, RECOMPUTE_SELECTIVE, false},
    {"deepseek-v3", {256, 32, 128, 2}, 1, RECOMPUTE_FULL, false},
    {"deepseek-v3", {256, 32, 128, 2}, 1, RECOMPUTE_SELECTIVE, false},
    {"deepseek-v3", {256, 256, 256, 1}, 1, RECOMPUTE_OFF, true},
    {"kimi-k2-instruct", {256, 64, 128, 1}, 2, RECOMPUTE_FULL, false},
};

/* Masters are weights there and the optimizer's here, so these three are compared as one. */
static void check_taken(size_t i)
{
    struct fixture f;
    struct model_spec *spec = xcalloc(1, sizeof *spec);
    open_fixture(&f, taken[i].model, taken[i].degrees.world / 8, false, 4096);
    f.cluster.gpu_reserve = 0;
    char *path = config_of(taken[i].model);
    assert_int_equal(hf_config_read(path, spec, NULL), 0);
    struct memory_plan real = memory_model(&(struct memory_input){
        .spec = spec, .degrees = taken[i].degrees, .elem_bytes = taken[i].is_f32 ? 4 : 2,
        .n_tokens = 4096ull * taken[i].micro_batch,
        .recompute = taken[i].recompute});
    struct plan_choice c = {
        .world = taken[i].degrees.world, .fsdp = taken[i].degrees.fsdp, .ep = taken[i].degrees.ep,
        .expert_shard = taken[i].degrees.expert_shard, .sp = 1, .tp = 1,
        .micro_batch = taken[i].micro_batch,
        .recompute = taken[i].recompute,
        .base = taken[i].is_f32 ? BASE_F32 : BASE_BF16, .is_f32 = taken[i].is_f32};
    struct plan_memory m = plan_memory(&f.job, &c);
    double states[] = {(double)(m.weights + m.gradients + m.optimizer),
                       (double)(real.weights + real.gradients + real.optimizer)};
    printf("%-20s state %.2f of %.2f GB, activations %.2f of %.2f, buffers %.2f of %.2f, "
           "total %.2f of %.2f\n", taken[i].model, states[0] / 1e9, states[1] / 1e9,
           (double)m.activations / 1e9, (double)real.activations / 1e9, (double)m.buffers / 1e9,
           (double)real.buffers / 1e9, (double)m.total / 1e9, (double)real.total / 1e9);
    assert_true(fabs(states[0] / states[1] - 1) < 0.01);
    assert_true(fabs((double)m.total / (double)real.total - 1) < TOLERANCE);
    free(path);
    free(spec);
    close_fixture(&f);
}

static void memory_is_near_what_the_engine_plans(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        check_taken(i);
}

/* ---- time ----------------------------------------------------------------------------------- */

/* The shape whose steps docs/performance.md has: 4 sequences of 4,096 tokens a GPU, bf16, every
 * activation kept, tokens in one chunk. */
static const char measured_config[] =
    "{\"model_type\": \"kimi_linear\", \"vocab_size\": 32768, \"hidden_size\": 1024,"
    " \"num_hidden_layers\": 8, \"intermediate_size\": 512, \"moe_intermediate_size\": 512,"
    " \"num_attention_heads\": 8, \"num_key_value_heads\": 8, \"q_lora_rank\": null,"
    " \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64,"
    " \"v_head_dim\": 128, \"mla_use_nope\": true, \"linear_attn_config\": {\"num_heads\": 8,"
    " \"head_dim\": 128, \"short_conv_kernel_size\": 4, \"kda_layers\": [1, 2, 3, 5, 6, 7],"
    " \"full_attn_layers\": [4, 8]}, \"first_k_dense_replace\": 0, \"moe_layer_freq\": 1,"
    " \"num_experts\": 64, \"num_experts_per_token\": 8, \"num_shared_experts\": 1,"
    " \"moe_router_activation_func\": \"sigmoid\", \"routed_scaling_factor\": 2.446,"
    " \"num_expert_group\": 1, \"topk_group\": 1, \"hidden_act\": \"silu\","
    " \"tie_word_embeddings\": false}";

static const struct {
    uint32_t world;
    double ms, ms_now; /* of a step without overlap and with it, on H200s of one node */
} measured[] = {{1, 73, 73}, {2, 87.5, 85.8}};

static void steps_take_what_was_measured(void **state)
{
    (void)state;
    struct outline *o;
    struct costs costs;
    struct cluster cluster = h200(1);
    const size_t n = strlen(measured_config);
    assert_int_equal(outline_parse("measured", measured_config, n, &o, NULL), 0);
    costs_init(o, 4096, &costs);
    for (size_t i = 0; i < sizeof measured / sizeof *measured; i++) {
        uint32_t world = measured[i].world;
        struct job_shape job = {.costs = &costs, .cluster = &cluster, .is_serial = true,
                                .sequence_length = 4096, .global_batch = 4 * world};
        struct plan_choice c = {.world = world, .fsdp = world, .ep = world, .expert_shard = 1,
                                .sp = 1, .tp = 1, .micro_batch = 4, .base = BASE_BF16};
        assert_true(plan_is_whole(&job, &c));
        struct plan_time t = plan_time(&job, &c);
        printf("%u GPUs: %.1f ms of %.1f measured; computing %.1f, dispatch %.1f, gathers %.1f, "
               "optimizer %.1f\n", world, 1e3 * t.total, measured[i].ms, 1e3 * t.compute,
               1e3 * t.all_to_all_exposed, 1e3 * t.gather_exposed, 1e3 * t.optimizer);
        assert_true(fabs(1e3 * t.total / measured[i].ms - 1) < 0.15);
        job.is_serial = false;
        struct plan_time now = plan_time(&job, &c);
        printf("with overlap %.1f ms of %.1f, dispatch %.1f\n", 1e3 * now.total, measured[i].ms_now,
               1e3 * now.all_to_all_exposed);
        assert_true(fabs(1e3 * now.total / measured[i].ms_now - 1) < 0.15);
        assert_int_equal(plan_chunks(&job, &c, 4 * 4096), 1);
        assert_true(now.all_to_all_exposed <= t.all_to_all_exposed);
        assert_true(world == 1 || now.all_to_all_exposed > 0);
    }
    fields_fini(&cluster_table, &cluster);
    free(o);
}

/* Experts that take long hide what travels, but for its ends. */
static void large_experts_hide_what_travels(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, "kimi-k3", 16, true, 4096);
    struct plan_choice c = {.world = 8, .fsdp = 8, .ep = 8, .expert_shard = 1, .sp = 1, .tp = 1,
                            .micro_batch = 4, .accumulation = 1, .base = BASE_BF16};
    assert_int_equal(plan_chunks(&f.job, &c, 4 * 4096), 4);
    struct plan_time hidden = plan_time(&f.job, &c);
    f.job.is_serial = true;
    struct plan_time serial = plan_time(&f.job, &c);
    printf("dispatch %.3f s, in chunks %.3f s of %.3f s\n", serial.all_to_all_exposed,
           hidden.all_to_all_exposed, hidden.all_to_all);
    assert_true(hidden.all_to_all_exposed < 0.7 * serial.all_to_all_exposed);
    assert_true(hidden.all_to_all_exposed > 0);
    close_fixture(&f);
}

/* ---- search --------------------------------------------------------------------------------- */

static const struct strategy_plan *find(const struct strategy *s, uint32_t fsdp, uint32_t ep,
                                        uint32_t shard, enum base_precision base)
{
    for (uint32_t i = 0; i < s->n_plans; i++) {
        const struct plan_choice *c = &s->plans[i].choice;
        if (c->fsdp == fsdp && c->ep == ep && c->expert_shard == shard && c->base == base)
            return &s->plans[i];
    }
    return NULL;
}

static void kimi_k3_fits_128_gpus_with_adapters(void **state)
{
    (void)state;
    struct fixture f;
    struct strategy_limits all = strategy_all();
    open_fixture(&f, "kimi-k3", 16, true, 4096);
    strategy_search(&f.job, &all, 128, f.found);
    const struct strategy_plan *bf16 = find(f.found, 2, 64, 2, BASE_BF16);
    const struct strategy_plan *mxfp4 = find(f.found, 2, 64, 2, BASE_MXFP4);
    assert_non_null(bf16);
    assert_non_null(mxfp4);
    /* Half of what is dense, and a 128th of the experts: 2 bytes, or 17 for 32 numbers. */
    double dense = 56743648000.0, experts = 2722740830208.0;
    assert_true(fabs((double)bf16->memory.weights / (dense + experts / 64) - 1) < 0.01);
    assert_true(fabs((double)mxfp4->memory.weights / (dense + experts / 128 * 17 / 32) - 1) < 0.01);
    close_fixture(&f);
}

static void a_million_tokens_need_sequence_ranks(void **state)
{
    (void)state;
    struct fixture f;
    struct strategy_limits all = strategy_all(), alone = all;
    open_fixture(&f, "kimi-k3", 16, true, 1 << 20);
    strategy_search(&f.job, &all, 128, f.found);
    assert_true(f.found->n_plans > 0 && f.found->plans[0].choice.sp > 1);
    alone.sp_max = 1;
    strategy_search(&f.job, &alone, 128, f.found);
    assert_int_equal(f.found->n_plans, 0);
    close_fixture(&f);
}

static void plans_fit_divide_and_descend(void **state)
{
    (void)state;
    static const struct { const char *model; uint32_t n_nodes; bool is_lora; } cases[] = {
        {"kimi-k3", 128, false}, {"glm-4.5", 16, false}, {"qwen3-30b-a3b", 1, false},
        {"granite-3.1-1b-a400m", 1, false}, {"minimax-m1-80k", 32, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fixture f;
        struct strategy_limits all = strategy_all();
        open_fixture(&f, cases[i].model, cases[i].n_nodes, cases[i].is_lora, 4096);
        strategy_search(&f.job, &all, 8 * cases[i].n_nodes, f.found);
        assert_true(f.found->n_plans > 0);
        for (uint32_t p = 0; p < f.found->n_plans; p++) {
            struct strategy_plan plan = f.found->plans[p];
            struct plan_choice c = plan.choice;
            assert_true(plan_is_whole(&f.job, &c) && c.accumulation == plan.choice.accumulation);
            assert_true(plan.memory.total <= f.cluster.gpu_memory);
            assert_true(p == 0 || plan.time.tokens_per_s <=
                                      f.found->plans[p - 1].time.tokens_per_s);
            assert_ptr_equal(find(f.found, c.fsdp, c.ep, c.expert_shard, c.base),
                             &f.found->plans[p]);
            assert_true(plan.time.mfu > 0 && plan.time.mfu < 0.8);
        }
        close_fixture(&f);
    }
}

/* Seconds that a step computes more over packed experts than over plain ones. */
static double more_when_packed(struct fixture *f, enum base_precision base, uint32_t n_tokens)
{
    struct job_shape job = f->job;
    job.sequence_length = n_tokens;
    job.global_batch = 128;
    struct plan_choice c = {.world = 128, .fsdp = 2, .ep = 64, .expert_shard = 2, .sp = 1, .tp = 1,
                            .micro_batch = 1, .accumulation = 1, .recompute = RECOMPUTE_SELECTIVE};
    double plain = plan_time(&job, &c).compute;
    c.base = base;
    return plan_time(&job, &c).compute - plain;
}

/* Weights are unpacked before their products, however many rows there are in a chunk. */
static void unpacking_does_not_look_at_rows(void **state)
{
    (void)state;
    static const enum base_precision bases[] = {BASE_FP8, BASE_MXFP4};
    double more[2];
    struct fixture f;
    open_fixture(&f, "kimi-k3", 16, true, 4096);
    for (size_t i = 0; i < 2; i++) {
        double few = more_when_packed(&f, bases[i], 16), some = more_when_packed(&f, bases[i], 32);
        double many = more_when_packed(&f, bases[i], 4096 * 4);
        double most = more_when_packed(&f, bases[i], 4096 * 16);
        assert_true(few > 0 && fabs(some / few - 1) < 1e-6);
        assert_true(many > 1.5 * few && fabs(most / many - 1) < 1e-6); /* in chunks */
        more[i] = many;
    }
    assert_true(more[0] > more[1]); /* a byte a number, and about half of one */
    close_fixture(&f);
}

/* One node less holds nothing. Seven nodes are possible because 896 experts are 7 x 128. */
static void the_fewest_gpus_are_the_fewest(void **state)
{
    (void)state;
    static const struct { enum base_precision base; uint32_t world; } cases[] = {
        {BASE_BF16, 56}, {BASE_MXFP4, 16}};
    for (size_t i = 0; i < 2; i++) {
        struct fixture f;
        struct strategy_limits l = strategy_all();
        struct strategy_plan plan;
        open_fixture(&f, "kimi-k3", 16, true, 4096);
        memset(l.base, 0, sizeof l.base);
        l.base[cases[i].base] = true;
        assert_int_equal(strategy_fewest(&f.job, &l, 1024, &plan), cases[i].world);
        assert_true(plan.memory.total <= f.cluster.gpu_memory);
        strategy_search(&f.job, &l, cases[i].world - f.cluster.gpus_per_node, f.found);
        assert_int_equal(f.found->n_plans, 0);
        close_fixture(&f);
    }
}

static void neighbours_say_what_they_lacked(void **state)
{
    (void)state;
    struct fixture f;
    struct strategy_limits all = strategy_all();
    struct neighbour n[NEIGHBOURS_MAX];
    open_fixture(&f, "kimi-k3", 16, true, 4096);
    strategy_search(&f.job, &all, 128, f.found);
    uint32_t count = strategy_neighbours(&f.job, &f.found->plans[0], n), unfit = 0;
    assert_true(count >= 6);
    for (uint32_t i = 0; i < count; i++) {
        bool fits = n[i].plan.memory.total <= f.cluster.gpu_memory &&
                    n[i].plan.memory.host <= f.cluster.host_memory / f.cluster.gpus_per_node;
        assert_int_equal(strstr(n[i].reason, "does not fit") == NULL, fits);
        assert_true(!fits || n[i].plan.time.total >= f.found->plans[0].time.total * 0.999);
        unfit += !fits;
    }
    assert_true(unfit > 0);
    close_fixture(&f);
}

/* ---- time ----------------------------------------------------------------------------------- */

static void time_follows_what_changes(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, "kimi-linear-48b-a3b", 4, false, 4096);
    struct plan_choice c = {.world = 32, .fsdp = 8, .ep = 32, .expert_shard = 1, .sp = 1, .tp = 1,
                            .micro_batch = 1, .recompute = RECOMPUTE_OFF};
    assert_true(plan_is_whole(&f.job, &c));
    struct plan_time base = plan_time(&f.job, &c);
    assert_true(base.all_to_all_exposed <= base.all_to_all);
    assert_true(base.gather_exposed <= base.gather);

    c.recompute = RECOMPUTE_FULL;
    assert_true(plan_time(&f.job, &c).compute > base.compute * 1.2);
    c.recompute = RECOMPUTE_OFF;
    f.job.is_lora = true;
    assert_true(plan_time(&f.job, &c).compute < base.compute * 0.85);
    f.job.is_lora = false;
    f.cluster.network_gb_per_s *= 4;
    assert_true(plan_time(&f.job, &c).all_to_all < base.all_to_all * 0.6);
    f.cluster.network_gb_per_s /= 4;
    c.ep = 8; /* inside a node */
    c.expert_shard = 4;
    assert_true(plan_is_whole(&f.job, &c));
    assert_true(plan_time(&f.job, &c).all_to_all < base.all_to_all);
    close_fixture(&f);
}

/* A shape that was measured on one GPU: other frameworks reach 158,000 tokens/s, and what its parts
 * allow is 320,000. */
static void a_measured_shape_is_timed_between_its_bounds(void **state)
{
    (void)state;
    static const char text[] =
        "{\"model_type\": \"kimi_linear\", \"vocab_size\": 32768, \"hidden_size\": 1024,"
        "\"num_hidden_layers\": 8, \"intermediate_size\": 2048, \"num_attention_heads\": 8,"
        "\"num_key_value_heads\": 8, \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128,"
        "\"qk_rope_head_dim\": 64, \"v_head_dim\": 128, \"mla_use_nope\": true,"
        "\"num_experts\": 64, \"num_experts_per_token\": 8, \"num_shared_experts\": 1,"
        "\"moe_intermediate_size\": 512, \"hidden_act\": \"silu\", \"linear_attn_config\": {"
        "\"kda_layers\": [1, 2, 3, 5, 6, 7], \"full_attn_layers\": [4, 8], \"head_dim\": 128,"
        "\"num_heads\": 8, \"short_conv_kernel_size\": 4}}";
    struct outline *o;
    struct costs costs;
    struct cluster one = h200(1);
    one.gpus_per_node = 1;
    assert_int_equal(outline_parse("c.json", text, sizeof text - 1, &o, NULL), 0);
    costs_init(o, 4096, &costs);
    struct job_shape job = {&costs, &one, false, 16, 4096, 4};
    struct plan_choice c = {.world = 1, .fsdp = 1, .ep = 1, .expert_shard = 1, .sp = 1, .tp = 1,
                            .micro_batch = 4, .recompute = RECOMPUTE_OFF};
    assert_true(plan_is_whole(&job, &c));
    struct plan_time t = plan_time(&job, &c);
    printf("%.0f tokens/s\n", t.tokens_per_s);
    assert_true(t.tokens_per_s > 158000 && t.tokens_per_s < 320000);
    fields_fini(&cluster_table, &one);
    free(o);
}

/* ---- operators ------------------------------------------------------------------------------ */

/* Of one thread of a CPU, forward and backward: a head's token beside one of 128 x 128. */
static void recurrences_cost_what_was_measured(void **state)
{
    static const struct {
        double dim, measured;
    } row[] = {{16, 0.211}, {32, 0.214}, {48, 0.395}, {64, 0.407}, {96, 0.678}, {128, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        double dim = row[i].dim;
        double ratio = cluster_scan_work(dim, dim) / cluster_scan_work(128, 128);
        print_message("heads of %.0f: %.3f, measured %.3f\n", dim, ratio, row[i].measured);
        assert_true(fabs(ratio / row[i].measured - 1) < 0.05);
    }
}

/* What a key costs besides products is a CPU's; the rates of a GPU are of its heads. */
static void narrow_heads_are_slower_on_a_cpu(void **state)
{
    struct costs k = {.core_flops = 1e6, .core_back_flops = 2.5e6, .core_besides = 1e6,
                      .core_back_besides = 1e6, .n_layers = 1, .hidden = 64};
    struct plan_choice c = {.world = 1, .fsdp = 1, .ep = 1, .expert_shard = 1, .sp = 1, .tp = 1,
                            .micro_batch = 1, .accumulation = 1};
    double seconds[2][2];
    (void)state;
    for (int cpu = 0; cpu < 2; cpu++)
        for (int besides = 0; besides < 2; besides++) {
            struct cluster l;
            struct costs now = k;
            struct job_shape job = {.costs = &now, .cluster = &l, .sequence_length = 256,
                                    .global_batch = 1};
            fields_init(&cluster_table, &l);
            free(l.device);
            l.device = xstrdup(cpu ? "cpu" : "cuda");
            if (!besides)
                now.core_besides = now.core_back_besides = 0;
            seconds[cpu][besides] = plan_time(&job, &c).compute;
            fields_fini(&cluster_table, &l);
        }
    assert_true(seconds[0][0] == seconds[0][1]);
    assert_true(seconds[1][1] > 1.3 * seconds[1][0]);
}

static void operators_are_mapped(void **state)
{
    (void)state;
    static const struct { const char *model; bool complete; } cases[] = {
        {"kimi-k3", true}, {"kimi-linear-48b-a3b", true}, {"deepseek-v3", true},
        {"deepseek-v3.2", true}, {"kimi-k2-instruct", true}, {"mixtral-8x7b", false},
        {"qwen3-next-80b-a3b", false}, {"nemotron-3-super-120b-a12b", false},
        {"gpt-oss-20b", false}, {"deepseek-v4-flash", false}, {"granite-3.1-1b-a400m", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct outline *o = outline_of(cases[i].model);
        if ((operators_missing(o) == 0) != cases[i].complete)
            fail_msg("%s: %u operators missing", cases[i].model, operators_missing(o));
        free(o);
    }
    for (int op = 0; op < OUTLINE_OPS; op++) {
        const struct operator_fact *fact = operator_fact((enum outline_op)op);
        assert_non_null(fact->name);
        assert_non_null(fact->note);
        assert_int_equal(fact->status == OPERATOR_MISSING, fact->formula && fact->source);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_near_what_the_engine_plans),
        cmocka_unit_test(steps_take_what_was_measured),
        cmocka_unit_test(large_experts_hide_what_travels),
        cmocka_unit_test(kimi_k3_fits_128_gpus_with_adapters),
        cmocka_unit_test(a_million_tokens_need_sequence_ranks),
        cmocka_unit_test(plans_fit_divide_and_descend),
        cmocka_unit_test(unpacking_does_not_look_at_rows),
        cmocka_unit_test(the_fewest_gpus_are_the_fewest),
        cmocka_unit_test(neighbours_say_what_they_lacked),
        cmocka_unit_test(time_follows_what_changes),
        cmocka_unit_test(a_measured_shape_is_timed_between_its_bounds),
        cmocka_unit_test(operators_are_mapped),
        cmocka_unit_test(recurrences_cost_what_was_measured),
        cmocka_unit_test(narrow_heads_are_slower_on_a_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
