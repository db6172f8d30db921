/* test_tensor_map.c - the published names, and that blocks hold each tensor once
 *
 * Where the folder of reference data is given (BALLAST_SHARED), the map of Kimi K3 is compared
 * with the list of tensors of its real checkpoint. */
#include <errno.h>
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
#include "common/model_spec.h"
#include "common/safetensors.h"
#include "common/tensor_map.h"

/* KDA with a dense MLP, latent attention with experts. */
static struct model_spec two_layers(void)
{
    return (struct model_spec){
        .family = FAMILY_KIMI_K3, .n_layers = 2,
        .layers = { { ATTENTION_KDA, MLP_DENSE }, { ATTENTION_MLA, MLP_MOE } },
        .residual = RESIDUAL_ATTN_RES, .attn_res_block = 2, .hidden = 24, .vocab = 50,
        .kda_heads = 3, .kda_head_dim = 8, .conv_kernel = 4, .kda_gate_bounded = true,
        .kda_gate_full_rank = true, .heads = 2, .q_lora_rank = 12, .kv_lora_rank = 10,
        .qk_nope_dim = 8, .qk_rope_dim = 4, .v_dim = 6, .mla_output_gate = true,
        .dense_inter = 40, .n_experts = 4, .top_k = 2, .expert_inter = 9, .n_shared_experts = 1,
        .latent = 11, .latent_moe = true, .latent_norm = true,
    };
}

static const struct tensor_entry *found(const struct tensor_map *map, const char *name)
{
    const struct tensor_entry *e = tensor_map_find(map, name);
    if (!e)
        fail_msg("no tensor %s", name);
    return e;
}

/* Trained tensors, frozen ones and buffers, each kind one after another. */
static void check_blocks(const struct tensor_map *map, uint64_t total)
{
    uint64_t counted = 0, at[3] = {0};
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i], *before = e - 1;
        const struct tensor_block *b = e->expert < 0 ? &map->units[e->unit] : &map->expert;
        int kind = e->is_buffer ? 2 : tensor_is_trained(e) ? 0 : 1;
        uint64_t ends[3] = {b->trained, b->trained + b->frozen, map->n_buffers};
        if (i == 0 || before->unit != e->unit || before->expert != e->expert) {
            at[0] = 0;
            at[1] = b->trained;
        }
        assert_int_equal(e->offset % 16, 0);
        assert_true(e->offset >= at[kind] && e->offset < at[kind] + 16);
        at[kind] = e->offset + e->count;
        assert_true(at[kind] <= ends[kind]);
        counted += e->count;
    }
    assert_int_equal(counted, total);
    for (uint32_t u = 0; u < map->n_units; u++)
        assert_true(map->units[u].trained % 16 == 0 && map->units[u].frozen % 16 == 0);
}

static void tensors_fill_their_blocks_without_overlap(void **state)
{
    (void)state;
    struct model_spec m = two_layers();
    struct tensor_map map;
    assert_int_equal(tensor_map_init(&m, &map, NULL), 0);
    assert_int_equal(map.n_units, 4);
    check_blocks(&map, model_spec_count(&m).total);
    assert_int_equal(map.expert.trained, 3 * 112); /* 9 x 11 numbers, rounded up */
    assert_int_equal(map.expert.frozen, 0);
    for (size_t i = 0; i < map.n_entries; i++)
        if (map.entries[i].role == ROLE_EXPERT_GATE || i % 3 == 0)
            map.entries[i].is_unreached = map.entries[i].role != ROLE_EXPERT_UP &&
                                          map.entries[i].role != ROLE_EXPERT_DOWN;
    tensor_map_index(&map);
    check_blocks(&map, model_spec_count(&m).total);
    assert_int_equal(map.expert.trained, 2 * 112);
    assert_int_equal(map.expert.frozen, 112);
    tensor_map_fini(&map);
}

static void names_are_the_published_ones(void **state)
{
    (void)state;
    struct model_spec m = two_layers();
    struct tensor_map map;
    assert_int_equal(tensor_map_init(&m, &map, NULL), 0);

    const struct tensor_entry *e = found(&map, "language_model.model.layers.0.self_attn.A_log");
    assert_int_equal(e->count, 3);
    assert_int_equal(e->stored_count, 128);
    assert_int_equal(e->dims[0], 128);
    assert_true(e->keep_f32 && !e->is_matrix);

    e = found(&map, "language_model.model.layers.0.self_attn.q_conv1d.weight");
    assert_int_equal(e->n_dims, 3);
    assert_true(e->dims[0] == 24 && e->dims[1] == 1 && e->dims[2] == 4);
    assert_true(e->keep_f32 && !e->is_matrix);

    e = found(&map,
              "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias");
    assert_true(e->is_buffer && e->keep_f32 && !e->is_unreached);

    e = found(&map, "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight");
    assert_int_equal(e->expert, 3);
    assert_int_equal(e->unit, 2);
    assert_true(e->dims[0] == 11 && e->dims[1] == 9 && e->is_matrix);
    assert_int_equal(e->role, ROLE_EXPERT_DOWN);

    assert_true(found(&map, "language_model.model.layers.0.self_attention_res_proj.weight")
                    ->is_unreached);
    e = found(&map, "language_model.model.layers.1.self_attention_res_proj.weight");
    assert_true(!e->is_unreached && !e->is_matrix && e->dims[0] == 1);
    assert_int_equal(found(&map, "language_model.lm_head.weight")->unit, 3);
    assert_int_equal(found(&map, "language_model.model.embed_tokens.weight")->unit, 0);
    assert_null(tensor_map_find(&map, "language_model.model.embed_tokens"));
    assert_null(tensor_map_find(&map, ""));
    tensor_map_fini(&map);
}

static void an_unknown_family_is_refused(void **state)
{
    (void)state;
    struct model_spec m = two_layers();
    struct tensor_map map;
    struct err err = {0};
    m.family = (enum model_family)77;
    assert_int_equal(tensor_map_init(&m, &map, &err), -ENOTSUP);
    assert_non_null(strstr(err.text, "kimi_k3"));
}

/* ---- against real files --------------------------------------------------------------------- */

static const char *shared(void)
{
    const char *folder = getenv("BALLAST_SHARED");
    if (!folder || !*folder) {
        print_message("SKIPPED: BALLAST_SHARED does not name the folder of reference data\n");
        skip();
    }
    return folder;
}

static const struct { const char *folder; uint64_t total, active; } fixtures[] = {
    { "kimi-k3-tiny", 808908, 513996 },
    { "kimi-linear-tiny", 445836, 224652 },
    { "deepseek-v3-tiny", 314064, 166608 },
    { "deepseek-v32-tiny", 327216, 179760 },
};

static void the_tiny_checkpoints_have_these_tensors(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof fixtures / sizeof *fixtures; f++) {
        char *folder = xasprintf("%s/oracle/%s", shared(), fixtures[f].folder);
        struct model_spec m;
        struct tensor_map map;
        struct safetensors *st;
        assert_int_equal(hf_config_read(folder, &m, NULL), 0);
        assert_int_equal(tensor_map_init(&m, &map, NULL), 0);
        assert_int_equal(safetensors_open(folder, &st, NULL), 0);
        assert_int_equal(model_spec_count(&m).total, fixtures[f].total);
        assert_int_equal(model_spec_count(&m).active, fixtures[f].active);
        assert_int_equal(safetensors_count(st), map.n_entries);
        for (size_t i = 0; i < safetensors_count(st); i++) {
            const struct st_view *v = safetensors_at(st, i);
            const struct tensor_entry *e = found(&map, v->tensor.name);
            assert_int_equal(e->n_dims, v->tensor.n_dims);
            assert_int_equal(e->stored_count, v->n_elements);
            assert_memory_equal(e->dims, v->tensor.dims, sizeof e->dims);
            assert_int_equal(&map.entries[map.by_name[i]], e);
        }
        safetensors_close(st);
        tensor_map_fini(&map);
        free(folder);
    }
}

/* A row of the list: "0-2,4,8-16/4" holds x? The step of a range defaults to 1. */
static bool range_holds(const char *ranges, long x)
{
    const char *at = ranges;
    while (*at) {
        char *end;
        long from = strtol(at, &end, 10), to = from, step = 1;
        if (*end == '-')
            to = strtol(end + 1, &end, 10);
        if (*end == '/')
            step = strtol(end + 1, &end, 10);
        if (x >= from && x <= to && (x - from) % step == 0)
            return true;
        at = *end == ',' ? end + 1 : end;
    }
    return false;
}

/* The name with layer and expert numbers replaced as the list writes them. */
static void pattern_of(const char *name, char out[256], long *layer, long *expert)
{
    static const struct { const char *before, *mark; } kinds[] = {
        { ".layers.", "{L}" }, { ".experts.", "{E}" },
    };
    long numbers[2] = { -1, -1 };
    snprintf(out, 256, "%s", name);
    for (int k = 0; k < 2; k++) {
        char *at = strstr(out, kinds[k].before), *end, rest[256];
        if (!at)
            continue;
        at += strlen(kinds[k].before);
        numbers[k] = strtol(at, &end, 10);
        snprintf(rest, sizeof rest, "%s", end);
        snprintf(at, 256 - (size_t)(at - out), "%s%s", kinds[k].mark, rest);
    }
    *layer = numbers[0];
    *expert = numbers[1];
}

struct row { char name[200], layers[1200], experts[64], dtype[16], shape[64]; };

static size_t read_list(const char *path, struct row *rows, size_t max)
{
    FILE *f = fopen(path, "r");
    char line[2048];
    size_t n = 0;
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        struct row *r = &rows[n];
        if (line[0] != '#' && strncmp(line, "name\t", 5) != 0 &&
            sscanf(line, "%199s %1199s %63s %15s %63s", r->name, r->layers, r->experts, r->dtype,
                   r->shape) == 5 && ++n == max)
            break;
    }
    fclose(f);
    return n;
}

/* suffix: after the names of experts; packed ones stand there as weight_packed and weight_scale. */
static const struct row *row_of(const struct row *rows, size_t n, const struct tensor_entry *e,
                                const char *suffix)
{
    char pattern[256];
    long layer, expert;
    pattern_of(e->name, pattern, &layer, &expert);
    if (e->expert >= 0)
        snprintf(pattern + strlen(pattern), 256 - strlen(pattern), "%s", suffix);
    for (size_t i = 0; i < n; i++)
        if (strcmp(rows[i].name, e->name) == 0 || /* a row of one layer spells its number out */
            (strcmp(rows[i].name, pattern) == 0 && range_holds(rows[i].layers, layer) &&
             (expert < 0 || range_holds(rows[i].experts, expert))))
            return &rows[i];
    return NULL;
}

static uint64_t elements_of(const struct row *r)
{
    uint64_t count = 1;
    for (const char *at = r->shape; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        count *= strtoull(at, NULL, 10);
    return count;
}

static void kimi_k3_has_the_tensors_of_its_checkpoint(void **state)
{
    (void)state;
    char *config = xasprintf("%s/data/configs/kimi-k3/config.json", shared());
    char *list = xasprintf("%s/data/configs/kimi-k3/tensors.tsv", shared());
    struct model_spec m;
    struct tensor_map map;
    assert_int_equal(hf_config_read(config, &m, NULL), 0);
    assert_int_equal(model_spec_count(&m).total, 2779484476000ull);
    assert_int_equal(tensor_map_init(&m, &map, NULL), 0);

    uint64_t total = 0, stored = 0, n_files_tensors = 0;
    for (size_t i = 0; i < map.n_entries; i++) {
        total += map.entries[i].count;
        stored += map.entries[i].stored_count;
        n_files_tensors += map.entries[i].expert >= 0 ? 2 : 1; /* packed and scale */
    }
    assert_int_equal(total, 2779484476000ull);
    assert_int_equal(stored, 2779484478208ull);
    assert_int_equal(n_files_tensors + 168, 497220); /* with the vision tower and its projector */

    struct row *rows = xcalloc(400, sizeof *rows);
    size_t n_rows = read_list(list, rows, 400);
    assert_true(n_rows > 40);
    for (size_t i = 0; i < map.n_entries; i++) {
        const struct tensor_entry *e = &map.entries[i];
        if (e->expert > 1 && e->unit > 3)
            continue; /* 90 more layers of the same */
        const struct row *r = row_of(rows, n_rows, e, "_packed");
        if (!r)
            fail_msg("the checkpoint has no %s", e->name);
        assert_int_equal(elements_of(r) * (e->expert >= 0 ? 2 : 1), e->stored_count);
        if (e->expert < 0)
            assert_string_equal(r->dtype, e->keep_f32 ? "F32" : "BF16");
    }
    free(rows);
    tensor_map_fini(&map);
    free(config);
    free(list);
}

static const struct { const char *folder; uint64_t total, active; bool has_list; } published[] = {
    { "kimi-linear-48b-a3b", 49122681728, 3484459904, true },
    { "deepseek-v3", 671026419200, 37552297472, false },
    { "deepseek-v3.2", 671877944064, 38403822336, true },
    { "kimi-k2-instruct", 1026408232448, 32861500928, true },
};

static void published_models_have_their_counts_and_tensors(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof published / sizeof *published; k++) {
        char *folder = xasprintf("%s/data/configs/%s", shared(), published[k].folder);
        char *list = xasprintf("%s/tensors.tsv", folder);
        struct row *rows = xcalloc(400, sizeof *rows);
        size_t n_rows = published[k].has_list ? read_list(list, rows, 400) : 0;
        struct model_spec m;
        struct tensor_map map;
        uint64_t total = 0;
        assert_int_equal(hf_config_read(folder, &m, NULL), 0);
        assert_int_equal(tensor_map_init(&m, &map, NULL), 0);
        for (size_t i = 0; i < map.n_entries; i++) {
            const struct tensor_entry *e = &map.entries[i];
            total += e->count;
            if (n_rows == 0 || (e->expert > 1 && e->unit > 5))
                continue;
            const struct row *r = row_of(rows, n_rows, e, "");
            if (!r)
                fail_msg("%s: the checkpoint has no %s", folder, e->name);
            assert_int_equal(elements_of(r), e->stored_count);
        }
        assert_int_equal(total, published[k].total);
        assert_int_equal(model_spec_count(&m).total, published[k].total);
        assert_int_equal(model_spec_count(&m).active, published[k].active);
        tensor_map_fini(&map);
        free(rows);
        free(list);
        free(folder);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_fill_their_blocks_without_overlap),
        cmocka_unit_test(names_are_the_published_ones),
        cmocka_unit_test(an_unknown_family_is_refused),
        cmocka_unit_test(the_tiny_checkpoints_have_these_tensors),
        cmocka_unit_test(kimi_k3_has_the_tensors_of_its_checkpoint),
        cmocka_unit_test(published_models_have_their_counts_and_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
