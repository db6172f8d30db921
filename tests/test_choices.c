/* test_choices.c - what a job file can choose is the same on any number of ranks and goes on */
#include "tests/trial.h"

/* ---- data ----------------------------------------------------------------------------------- */

/* Tasks of 2 to 40 tokens, of which the first third is a question without labels. */
static void put_tasks(const char *name, uint32_t seed, uint32_t n_tasks)
{
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (uint32_t k = 0; k < n_tasks; k++) {
        seed = seed * 1664525u + 1013904223u;
        uint32_t n = 2 + (seed >> 16) % 39, first = (seed >> 8) % 100;
        for (uint32_t list = 0; list < 2; list++) {
            fprintf(f, list == 0 ? "{\"input_ids\": [" : "], \"labels\": [");
            for (uint32_t i = 0; i < n; i++)
                fprintf(f, "%s%d", i > 0 ? ", " : "",
                        list == 1 && i < n / 3 ? -100 : (int)((first + 3 * i) % 100));
        }
        fprintf(f, "]}\n");
    }
    fclose(f);
    free(path);
}

static void put_indexed(const char *prefix, uint32_t n_documents)
{
    char *idx = xasprintf("%s/%s.idx", folder, prefix);
    char *bin = xasprintf("%s/%s.bin", folder, prefix);
    FILE *f = fopen(idx, "w"), *g = fopen(bin, "w");
    uint64_t version = 1, n = n_documents, n_bounds = n + 1;
    uint8_t u16 = 8;
    assert_true(f && g);
    fwrite("MMIDIDX\0", 9, 1, f);
    fwrite(&version, 8, 1, f);
    fwrite(&u16, 1, 1, f);
    fwrite(&n, 8, 1, f);
    fwrite(&n_bounds, 8, 1, f);
    for (uint32_t k = 0; k < n; k++)
        fwrite(&(uint32_t){5 + k % 50}, 4, 1, f);
    uint64_t at = 0;
    for (uint32_t k = 0; k < n; k++) {
        fwrite(&at, 8, 1, f);
        at += 2 * (5 + k % 50);
        for (uint32_t i = 0; i < 5 + k % 50; i++)
            fwrite(&(uint16_t){(uint16_t)((k + 5 * i) % 128)}, 2, 1, g);
    }
    for (uint64_t k = 0; k <= n; k++)
        fwrite(&k, 8, 1, f);
    fclose(f);
    fclose(g);
    free(idx);
    free(bin);
}

/* ---- choices -------------------------------------------------------------------------------- */

static const struct {
    const char *what, *data, *optimizer, *more; /* begun with a comma; more sections */
} rows[] = {
    {"tasks packed whole", "data: {train: [tasks*.jsonl], validation: [held-out.jsonl], "
     "format: jsonl, sequence_length: 48}\n", "", ""},
    {"tasks apart", "data: {train: [tasks*.jsonl], validation: [held-out.jsonl], format: jsonl, "
     "sequence_length: 24, pack: false}\n", "", ""},
    {"an indexed dataset", "data: {train: ['indexed*'], validation: [indexed], format: megatron, "
     "sequence_length: 24}\n", "", ""},
    {"a loss per micro-batch", DATA, "", "moe: {aux_loss: 0.5, aux_scope: micro_batch}\n"},
    {"a loss per sequence, small logits", DATA, "",
     "moe: {aux_loss: 0.5, aux_scope: sequence, z_loss: 0.1, bias_update: sign}\n"},
    {"a loss over the global batch", DATA, "", "moe: {aux_loss: 0.5, bias_update: off}\n"},
    {"a capacity, and what is small is dropped", DATA, "", "moe: {capacity_factor: 1}\n"},
    {"a capacity, and what is late is dropped", DATA, "",
     "moe: {capacity_factor: 0.5, drop_by: position}\n"},
    {"a capacity, and what is beyond goes elsewhere", DATA, "",
     "moe: {capacity_factor: 1, overflow: reroute}\n"},
    {"an indexer beside the model", DATA, "}, indexer: {with_model: true, loss_coefficient: 0.5",
     ""},
    {"matrices by Muon", DATA, ", name: muon", ""},
    {"head by head, all decaying", DATA, ", name: muon_per_head, decay: all, momentum: 0.9", ""},
};

/* The model of all trials, or one whose attention has an indexer that keeps four keys. */
static void put_model(bool has_indexer)
{
    static const char after[] = "\"attn_res_block_size\": 2,";
    const char *at = strstr(config_json, after) + strlen(after);
    char *text = xasprintf("%.*s%s%s", (int)(at - config_json), config_json,
                           has_indexer ? "\"index_n_heads\": 2, \"index_head_dim\": 8, "
                                         "\"index_topk\": 4," : "", at);
    put("model/config.json", text, strlen(text));
    free(text);
}

static const char *parallel = ""; /* more keys of that section */

static void run_passes(struct trial *t, size_t row, uint32_t world, uint32_t micro_batch,
                       const char *checkpoint, uint32_t steps)
{
    static const char *const layouts[] = {
        [1] = "", [2] = "  fsdp_shard_degree: 2\n  expert_parallel_degree: 1\n",
        [4] = "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n",
    };
    char *keys = xasprintf("%s%s%strain: {steps: %u, global_batch: 8, micro_batch: %u, "
                           "deterministic: true, optimizer: {lr: 2e-3, eps: 1e-4%s}, "
                           "schedule: {name: constant}}\n"
                           "%s", layouts[world], parallel, rows[row].data, steps, micro_batch,
                           rows[row].optimizer, rows[row].more);
    put_model(strstr(keys, "with_model") != NULL);
    start(t, world, checkpoint, keys);
    finish(t);
    free(keys);
    assert_all(t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
}

static void run(struct trial *t, size_t row, uint32_t world, const char *checkpoint, uint32_t steps)
{
    run_passes(t, row, world, 2, checkpoint, steps);
}

/* Passes with more labels than others weigh more: the loss is by tokens of the whole batch. */
static void any_number_of_passes_is_the_same(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2; i++) { /* tasks, whose labels are masked unevenly */
        struct trial whole, t;
        new_folder(NULL);
        run_passes(&whole, i, 1, 8, "run-8", 8);
        for (uint32_t micro = 4; micro > 0; micro /= 2) {
            char *path = xasprintf("run-%u", micro);
            run_passes(&t, i, 1, micro, path, 8);
            for (uint32_t s = 1; s <= 8; s++)
                if (!(fabs(t.loss[s] / whole.loss[s] - 1) < 1e-4))
                    fail_msg("%s: %u passes, step %u: loss %.7g, one pass has %.7g", rows[i].what,
                             8 / micro, s, t.loss[s], whole.loss[s]);
            free(path);
        }
    }
}

/* Eight sequences of 24 tokens are three segments of one rank, and two of each of two. */
static void layers_in_segments_are_the_same(void **state)
{
    (void)state;
    size_t row = 0;
    while (!strstr(rows[row].optimizer, "with_model"))
        row++;
    for (uint32_t world = 1; world <= 2; world++) {
        struct trial whole, cut;
        new_folder(NULL);
        run_passes(&whole, row, world, 8 / world, "run-whole", 8);
        parallel = "  activation_checkpointing: full\n  segment_tokens: 64\n";
        run_passes(&cut, row, world, 8 / world, "run-cut", 8);
        parallel = "";
        for (uint32_t s = 1; s <= 8; s++)
            if (!(fabs(cut.loss[s] / whole.loss[s] - 1) < 1e-4))
                fail_msg("%u ranks, step %u: loss %.7g, at once %.7g", world, s, cut.loss[s],
                         whole.loss[s]);
        assert_true(fabs(cut.index / whole.index - 1) < 1e-3);
        assert_true(fabs(cut.validation[8] / whole.validation[8] - 1) < 1e-4);
    }
}

static void any_number_of_ranks_is_the_same(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct trial one, t;
        new_folder(NULL);
        run(&one, i, 1, "run-1", 8);
        for (uint32_t world = 2; world <= 4; world += 2) {
            run(&t, i, world, world == 2 ? "run-2" : "run-4", 8);
            for (uint32_t s = 1; s <= 8; s++)
                if (!(fabs(t.loss[s] / one.loss[s] - 1) < 1e-4))
                    fail_msg("%s: %u ranks, step %u: loss %.7g, one rank has %.7g", rows[i].what,
                             world, s, t.loss[s], one.loss[s]);
            assert_true(fabs(t.validation[8] / one.validation[8] - 1) < 1e-4);
            assert_true(t.rerouted == one.rerouted && t.dropped == one.dropped);
            assert_true(isnan(one.aux) ? isnan(t.aux) : fabs(t.aux / one.aux - 1) < 1e-4);
            assert_true(isnan(one.index) ? isnan(t.index) : fabs(t.index / one.index - 1) < 1e-3);
            assert_true(isnan(one.z) ? isnan(t.z) : fabs(t.z / one.z - 1) < 1e-4);
        }
        const char *said = rows[i].more;
        assert_int_equal(!isnan(one.aux), strstr(said, "aux_loss") != NULL);
        assert_int_equal(!isnan(one.z), strstr(said, "z_loss") != NULL);
        assert_int_equal(!isnan(one.index), strstr(rows[i].optimizer, "with_model") != NULL);
        assert_int_equal(one.rerouted > 0, strstr(said, "reroute") != NULL);
        if (!strstr(said, "reroute")) /* else what finds no room is dropped, too */
            assert_int_equal(one.dropped > 0, strstr(said, "capacity") != NULL);
        assert_true(one.loss[8] < one.loss[1]);
        run(&t, i, 4, "run-part", 4);
        struct trial rest;
        run(&rest, i, 4, "run-part", 8);
        assert_int_equal(rest.resumed_from, 4);
        assert_same_file("run-4/step-8/model.safetensors", "run-part/step-8/model.safetensors");
    }
}

int main(void)
{
    if (!make_folder())
        return 1;
    put_tasks("tasks-a.jsonl", 1, 60);
    put_tasks("tasks-b.jsonl", 2, 30);
    put_tasks("held-out.jsonl", 3, 20);
    put_indexed("indexed", 70);
    put_indexed("indexed-2", 20);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(any_number_of_passes_is_the_same, new_folder),
        cmocka_unit_test_setup(layers_in_segments_are_the_same, new_folder),
        cmocka_unit_test_setup(any_number_of_ranks_is_the_same, new_folder),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
