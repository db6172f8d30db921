/* test_job_fit.c - what is said of a job that does not fit, and that it would fit then */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/job_file.h"
#include "proto/job_fit.h"
#include "proto/job_spec.h"

static struct model_spec model(void)
{
    return (struct model_spec){
        .family = FAMILY_KIMI_K3, .n_layers = 4,
        .layers = {{ATTENTION_KDA, MLP_DENSE}, {ATTENTION_KDA, MLP_MOE}, {ATTENTION_KDA, MLP_MOE},
                   {ATTENTION_MLA, MLP_MOE}},
        .residual = RESIDUAL_ATTN_RES, .attn_res_block = 2, .hidden = 256, .vocab = 1024,
        .norm_eps = 1e-5f, .latent_norm_eps = 1e-6f, .init_std = 0.02f, .kda_heads = 4,
        .kda_head_dim = 64, .conv_kernel = 4, .kda_gate_bounded = true,
        .kda_gate_lower_bound = -5, .kda_gate_full_rank = true, .heads = 4, .q_lora_rank = 64,
        .kv_lora_rank = 32, .qk_nope_dim = 32, .qk_rope_dim = 16, .v_dim = 32,
        .mla_output_gate = true, .activation = ACTIVATION_SITU, .situ_beta = 4,
        .situ_linear_beta = 25, .dense_inter = 512, .n_experts = 32, .top_k = 4,
        .expert_inter = 128, .n_shared_experts = 1, .latent = 128, .latent_moe = true,
        .latent_norm = true, .renormalize = true, .routed_scale = 1,
    };
}

static Ballast__JobSpec *job(const char *parallel, const char *micro_batch)
{
    struct problems problems = {0};
    Ballast__JobSpec *spec = NULL;
    char text[600];
    snprintf(text, sizeof text, "name: a\nmodel: {path: m}\ndata: {train: [t], sequence_length: "
             "512}\ntrain: {steps: 9, global_batch: 64, micro_batch: %s}\nparallel: {%s}\n"
             "checkpoint: {path: c}\nmoe: {bias_update: off}\n", micro_batch, parallel);
    assert_int_equal(job_file_read_text("a", "/", text, strlen(text), &spec, &problems), 0);
    return spec;
}

static uint64_t needs(const Ballast__JobSpec *spec, const struct model_spec *m)
{
    struct layout layout;
    struct memory_plan plan;
    const char *key;
    assert_int_equal(layout_init(job_spec_degrees(spec), m->n_experts, 0, &layout, NULL), 0);
    assert_int_equal(job_memory(spec, m, layout.degrees, NULL, &plan, &key, NULL), 0);
    layout_fini(&layout);
    return plan.total;
}

static const struct row {
    const char *shows, *parallel, *micro_batch;
    double      room; /* of what it needs */
    const char *first, *never; /* what is said first, and what not at all */
} rows[] = {
    {"a finer cut costs less than anything else", "workers: 4", "4", 0.97,
     "parallel.fsdp_shard_degree: ", "parallel.workers"},
    {"where all is cut, smaller passes", "workers: 4, fsdp_shard_degree: 4, "
     "expert_parallel_degree: 4", "4", 0.7, "train.micro_batch: 2", "fsdp_shard_degree"},
    {"where a pass is one sequence, no overlap", "workers: 4, fsdp_shard_degree: 4, "
     "expert_parallel_degree: 4", "1", 0.96,
     "rebalance.spare_slots_per_rank: 0, parallel.overlap: false (", "micro_batch"},
    {"which is off already", "workers: 4, fsdp_shard_degree: 4, expert_parallel_degree: 4, "
     "overlap: false", "1", 0.95, "parallel.activation_checkpointing: selective", "overlap"},
    {"and saves nothing where nothing is cut", "workers: 1", "1", 0.97,
     "parallel.activation_checkpointing: selective", "overlap"},
    {"then recomputing some", "workers: 4, fsdp_shard_degree: 4, expert_parallel_degree: 4", "1",
     0.78, "parallel.activation_checkpointing: selective", "micro_batch"},
    {"and all", "workers: 4, fsdp_shard_degree: 4, expert_parallel_degree: 4, "
     "activation_checkpointing: selective", "1", 0.915, "parallel.activation_checkpointing: full",
     "micro_batch"},
    {"then more workers", "workers: 2, fsdp_shard_degree: 2, expert_parallel_degree: 2, "
     "activation_checkpointing: full", "1", 0.7, "parallel.workers: ", "checkpointing"},
    {"what can never fit", "workers: 1", "1", 0.01, "no cut over up to 8 workers fits", "any of"},
};

static void the_cheapest_changes_that_fit_are_named(void **state)
{
    (void)state;
    struct model_spec m = model();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Ballast__JobSpec *spec = job(rows[i].parallel, rows[i].micro_batch);
        uint64_t most = (uint64_t)((double)needs(spec, &m) * rows[i].room);
        char text[JOB_FIT_TEXT_MAX];
        job_fit_text(spec, &m, NULL, most, text);
        const char *list = strstr(text, "fits: ");
        const char *first = list ? list + strlen("fits: ") : text;
        if (strncmp(first, rows[i].first, strlen(rows[i].first)) || strstr(text, rows[i].never))
            fail_msg("%s: %s", rows[i].shows, text);
        for (const char *p = text; (p = strchr(p, '(')); p++) {
            if (strtoull(p + 1, NULL, 10) > most >> 20)
                fail_msg("%s: more than %llu MiB: %s", rows[i].shows,
                         (unsigned long long)(most >> 20), text);
        }
        job_file_free(spec);
    }
}

/* The fewest workers, no fewer than now's, with which some set of changes fits; 0: none. */
static uint32_t fewest_workers(const struct model_spec *m, uint64_t most)
{
    for (uint32_t workers = 2; workers <= 16; workers *= 2)
        for (uint32_t i = 0; i < 5 * 5 * 3; i++) {
            uint32_t fsdp = 2u << i % 5, ep = 2u << i / 5 % 5, micro = 4u >> i / 25;
            if (fsdp > workers || ep > workers)
                continue;
            char parallel[200], batch[8];
            snprintf(parallel, sizeof parallel, "workers: %u, fsdp_shard_degree: %u, "
                     "expert_parallel_degree: %u, overlap: false, activation_checkpointing: full",
                     workers, fsdp, ep);
            snprintf(batch, sizeof batch, "%u", micro);
            Ballast__JobSpec *spec = job(parallel, batch);
            spec->rebalance_spare_slots_per_rank = 0;
            uint64_t bytes = needs(spec, m);
            job_file_free(spec);
            if (bytes <= most)
                return workers;
        }
    return 0;
}

/* More workers cost more than everything else together. */
static void no_more_workers_than_it_takes(void **state)
{
    (void)state;
    struct model_spec m = model();
    for (int percent = 95; percent > 5; percent -= 5) {
        Ballast__JobSpec *spec = job("workers: 2, fsdp_shard_degree: 2, "
                                     "expert_parallel_degree: 2", "4");
        uint64_t most = needs(spec, &m) * (uint64_t)percent / 100;
        uint32_t fewest = fewest_workers(&m, most), said = 2;
        char text[JOB_FIT_TEXT_MAX];
        job_fit_text(spec, &m, NULL, most, text);
        job_file_free(spec);
        const char *list = strstr(text, "fits: ");
        if (list)
            sscanf(list, "fits: parallel.workers: %u", &said);
        if (list ? said != fewest : fewest != 0)
            fail_msg("%d %%: with %u workers it fits: %s", percent, fewest, text);
    }
}

/* Layers in segments, where that is allowed and the training stays what it is. */
static void segments_are_proposed_where_they_may_be(void **state)
{
    (void)state;
    static const struct {
        const char *shows;
        bool has_indexer, has_kda_only;
        const char *more; /* of the job */
        bool proposed;
    } cuts[] = {
        {"attention over all keys needs them at once", false, false, "", false},
        {"an indexer chooses them", true, false, "", true},
        {"no attention but KDA", false, true, "", true},
        {"capacities would be of a segment", true, false, ", capacity_factor: 1.5", false},
        {"the balance loss, too", true, false, ", aux_loss: 0.01, aux_scope: micro_batch", false},
        {"which is of documents", true, false, ", aux_loss: 0.01, aux_scope: sequence", false},
    };
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        struct model_spec m = model();
        struct problems problems = {0};
        Ballast__JobSpec *spec = NULL;
        char text[JOB_FIT_TEXT_MAX];
        if (cuts[i].has_kda_only)
            m.layers[3].attention = ATTENTION_KDA;
        if (cuts[i].has_indexer) {
            m.index_heads = 4;
            m.index_head_dim = 32;
            m.index_top_k = 64;
            m.index_norm_eps = 1e-6f;
        }
        snprintf(text, sizeof text, "name: a\nmodel: {path: m}\ndata: {train: [t], "
                 "sequence_length: 16384}\ntrain: {steps: 9, global_batch: 4}\nparallel: "
                 "{workers: 4, fsdp_shard_degree: 4, expert_parallel_degree: 4, "
                 "activation_checkpointing: full, overlap: false}\ncheckpoint: {path: c}\n"
                 "rebalance: {spare_slots_per_rank: 0}\n"
                 "moe: {bias_update: off%s}\n", cuts[i].more);
        assert_int_equal(job_file_read_text("a", "/", text, strlen(text), &spec, &problems), 0);
        uint64_t most = needs(spec, &m) * 17 / 20;
        job_fit_text(spec, &m, NULL, most, text);
        const char *at = strstr(text, "parallel.segment_tokens: ");
        if (!at != !cuts[i].proposed)
            fail_msg("%s: %s", cuts[i].shows, text);
        if (at) { /* which is true, and the next longer one would not do */
            uint32_t n = (uint32_t)strtoul(at + 25, NULL, 10);
            if (strncmp(at - 6, "fits: ", 6) || n < 512 || n >= 16384)
                fail_msg("%s: %s", cuts[i].shows, text);
            spec->parallel_segment_tokens = n;
            assert_true(needs(spec, &m) <= most);
            spec->parallel_segment_tokens = 2 * n;
            assert_true(needs(spec, &m) > most);
        }
        job_file_free(spec);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_cheapest_changes_that_fit_are_named),
        cmocka_unit_test(no_more_workers_than_it_takes),
        cmocka_unit_test(segments_are_proposed_where_they_may_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
