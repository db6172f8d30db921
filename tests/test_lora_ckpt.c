/* test_lora_ckpt.c - adapters on their way to PEFT folders and back, on any layout, bit by bit */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/bf16.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "kernels/packed.h"
#include "tests/folder.h"
#include "worker/ckpt.h"
#include "worker/peft.h"
#include "worker/stack.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define STEP 5

static struct model_spec small(void)
{
    return (struct model_spec){
        .family = FAMILY_DEEPSEEK_V3, .n_layers = 2,
        .layers = { { ATTENTION_MLA, MLP_DENSE }, { ATTENTION_MLA, MLP_MOE } },
        .residual = RESIDUAL_PLAIN, .hidden = 32, .vocab = 64, .norm_eps = 1e-5f,
        .latent_norm_eps = 1e-6f, .init_std = 0.02f, .heads = 2, .q_lora_rank = 16,
        .kv_lora_rank = 16, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 16,
        .activation = ACTIVATION_SWIGLU, .dense_inter = 48, .n_experts = 4, .top_k = 2,
        .expert_inter = 32, .n_shared_experts = 1, .latent = 32, .renormalize = true,
        .routed_scale = 1,
    };
}

static const char *const targets[] = { "o_proj", "gate_proj", "experts" };

/* One run: the adapters of seed, or those of a folder, and then what is done with them. */
struct job {
    struct lora_config lora;
    const char *path; /* of checkpoints */
    uint64_t seed, base_hash;
    const char *adapter; /* NULL: of seed */
    bool saves;          /* else it loads STEP */
    struct ckpt_state state;
    uint64_t digest;     /* of the adapters and their moments, on any layout */
    int rc;
    struct err err;
};

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 27);
}

/* Moments are a function of tensor and element, or, to compare, what is there. */
static void visit(struct stack *s, bool fills, uint64_t *out)
{
    uint64_t sum = 0;
    for (size_t t = 0; t < s->config->map->n_entries; t++) {
        struct shard_part p;
        if (s->config->map->entries[t].adapter == ADAPTER_NONE ||
            !shard_part(s->shard, &s->config->map->entries[t], &p))
            continue;
        for (uint64_t i = 0; i < p.count; i++) {
            uint64_t at = mix(mix(t + 1) + p.first + i);
            if (fills) {
                p.m[i] = (float)(at & 0xffff) - 3e4f;
                p.v[i] = (float)(at >> 32 & 0xffff);
            }
            float x[3] = { p.weights[i], p.m[i], p.v[i] };
            for (int k = 0; k < 3 && p.is_first; k++) {
                uint32_t bits;
                memcpy(&bits, &x[k], sizeof bits);
                sum += mix(at + bits + (uint64_t)k * 77);
            }
        }
    }
    __atomic_add_fetch(out, sum, __ATOMIC_RELAXED);
}

static int run(struct stack *s, void *arg, struct err *err)
{
    struct job *j = arg;
    struct ckpt_config c = {
        .path = j->path, .model_path = "/models/base", .spec = s->config->spec,
        .map = s->config->map, .lora = s->config->lora, .base_hash = j->base_hash,
        .shard = s->shard, .coll = s->coll,
    };
    uint64_t step = 0;
    int lock = -1, rc;
    if (j->adapter)
        rc = ckpt_load_adapters(j->adapter, s->shard, s->config->map, err);
    else
        ckpt_init_adapters(s->shard, s->config->map, j->seed), rc = 0;
    if (rc < 0 || (rc = ckpt_find(&c, 0, &lock, &step, err)) < 0)
        return rc;
    if (j->saves) {
        visit(s, true, &j->digest);
        rc = ckpt_save(&c, &(struct ckpt_state){ .step = STEP, .seed = 1 }, err);
    } else {
        struct ckpt_state state;
        if ((rc = ckpt_load(&c, STEP, &state, err)) == 0)
            visit(s, false, &j->digest);
        if (rc == 0 && s->rank == 0)
            j->state = state;
    }
    if (lock >= 0)
        close(lock);
    return rc;
}

static void run_on(struct job *j, struct layout_degrees degrees)
{
    struct model_spec spec = small();
    struct tensor_map map;
    assert_int_equal(tensor_map_init(&spec, &map, NULL), 0);
    assert_int_equal(lora_map_add(&map, &j->lora, NULL), 0);
    struct stack_config config = { .spec = &spec, .map = &map, .lora = &j->lora,
                                   .degrees = degrees, .tokens_max = 16 };
    j->err = (struct err){0};
    j->rc = stack_run(&config, run, j, &j->err);
    tensor_map_fini(&map);
}

static const struct layout_degrees one = { 1, 1, 1, 0 }, two = { 2, 2, 2, 0 };
static const struct layout_degrees four = { 4, 2, 2, 2 };

static char *in_step(const struct job *j, const char *file)
{
    return xasprintf("%s/step-%d%s", j->path, STEP, file);
}

static struct job job_of(bool shared_a, const char *name)
{
    return (struct job){ .lora = { 3, 6, shared_a, targets, COUNT(targets) },
                         .path = xasprintf("%s/%s", folder, name), .seed = 7, .base_hash = 99 };
}

/* ---- there and back ------------------------------------------------------------------------- */

static void a_checkpoint_is_read_on_any_layout(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        struct job j = job_of(shared, shared ? "shared" : "own");
        j.saves = true;
        run_on(&j, two);
        if (j.rc < 0)
            fail_msg("%s", j.err.text);
        const struct layout_degrees layouts[] = { one, two, four };
        for (size_t i = 0; i < COUNT(layouts); i++) {
            struct job back = j;
            back.saves = false;
            back.digest = 0;
            back.seed = 1000 + i; /* what is there before */
            run_on(&back, layouts[i]);
            if (back.rc < 0)
                fail_msg("layout %zu: %s", i, back.err.text);
            assert_true(back.digest == j.digest && back.state.step == STEP);
        }
        free((char *)j.path);
    }
}

static struct safetensors *tensors_of(const struct job *j)
{
    char *path = in_step(j, "/" PEFT_TENSORS_FILE);
    struct safetensors *st;
    assert_int_equal(safetensors_open(path, &st, NULL), 0);
    free(path);
    return st;
}

/* Other tools know of no shared A: every expert has one, and they are the same. */
static void a_shared_a_is_stored_for_every_expert(void **state)
{
    (void)state;
    struct job shared = job_of(true, "shared"), own = job_of(false, "own");
    struct safetensors *a = tensors_of(&shared), *b = tensors_of(&own);
    assert_int_equal(safetensors_count(a), safetensors_count(b));
    const struct st_view *first = NULL;
    for (uint32_t e = 0; e < 4; e++) {
        char name[128];
        snprintf(name, sizeof name, "base_model.model.model.layers.1.mlp.experts.%u.up_proj."
                 "lora_A.weight", e);
        const struct st_view *x = safetensors_find(a, name), *y = safetensors_find(b, name);
        assert_non_null(x);
        assert_non_null(y);
        first = first ? first : x;
        assert_memory_equal(x->data, first->data, first->n_bytes);
        assert_true(e == 0 || memcmp(y->data, first->data, first->n_bytes) != 0);
    }
    safetensors_close(a);
    safetensors_close(b);
    free((char *)shared.path);
    free((char *)own.path);
}

static void an_adapter_that_is_read_and_written_is_the_same(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        struct job from = job_of(shared, shared ? "shared" : "own");
        struct job to = job_of(shared, shared ? "shared-again" : "own-again");
        char *adapter = in_step(&from, "");
        to.adapter = adapter;
        to.saves = true;
        run_on(&to, four);
        if (to.rc < 0)
            fail_msg("%s", to.err.text);
        struct safetensors *a = tensors_of(&from), *b = tensors_of(&to);
        assert_int_equal(safetensors_count(a), safetensors_count(b));
        for (size_t i = 0; i < safetensors_count(a); i++) {
            const struct st_view *x = safetensors_at(a, i), *y = safetensors_at(b, i);
            assert_string_equal(x->tensor.name, y->tensor.name);
            assert_int_equal(x->n_bytes, y->n_bytes);
            assert_memory_equal(x->data, y->data, x->n_bytes);
        }
        safetensors_close(a);
        safetensors_close(b);
        free(adapter);
        free((char *)from.path);
        free((char *)to.path);
    }
}

/* Experts need a pattern because of their numbers; PEFT takes one that fits a whole path. */
static void the_configuration_names_the_modules(void **state)
{
    (void)state;
    struct job j = job_of(false, "own");
    char *path = in_step(&j, "/" PEFT_CONFIG_FILE);
    struct json *o;
    assert_int_equal(json_read_file(path, 1 << 16, &o, NULL), 0);
    assert_string_equal(json_as_string(json_get(o, "target_modules")),
                        "(.*\\.)?(o_proj|gate_proj|experts\\.[0-9]+\\.gate_proj|"
                        "experts\\.[0-9]+\\.up_proj|experts\\.[0-9]+\\.down_proj)");
    assert_string_equal(json_as_string(json_get(o, "base_model_name_or_path")), "/models/base");
    json_destroy(o);
    free(path);
    free((char *)j.path);
}

/* ---- what does not fit ---------------------------------------------------------------------- */

static void expect_refusal(const struct job *j, const char *says)
{
    if (j->rc >= 0 || !strstr(j->err.text, says))
        fail_msg("%d, %s; expected %s", j->rc, j->err.text, says);
    assert_null(strchr(j->err.text, '\n'));
}

static void another_run_does_not_go_on_with_it(void **state)
{
    (void)state;
    struct job j = job_of(false, "own");
    j.base_hash = 100;
    run_on(&j, two);
    expect_refusal(&j, "belong to a base with the hash 0000000000000063");
    j.base_hash = 99;
    j.lora.alpha = 7;
    run_on(&j, two);
    expect_refusal(&j, "lora_alpha is 6, the job's train.lora.alpha is 7");
    j.lora.alpha = 6;
    j.lora.r = 4;
    run_on(&j, two);
    expect_refusal(&j, "r is 3, the job's train.lora.r is 4");
    j.lora.r = 3;
    j.lora.n_targets = 1;
    run_on(&j, two);
    expect_refusal(&j, "is an adapter that this job does not train");
    free((char *)j.path);
    j = job_of(true, "own");
    run_on(&j, two);
    expect_refusal(&j, "with train.lora.shared_a the experts of a layer have one A");
    free((char *)j.path);
}

/* ---- the base ------------------------------------------------------------------------------- */

static float number(size_t tensor, uint64_t i)
{
    return (float)(mix(mix(tensor + 500) + i) & 0xffffff) * 0x1p-24f - 0.5f;
}

static void write_base(const char *path)
{
    struct model_spec spec = small();
    struct tensor_map map;
    struct st_layout l;
    struct st_writer *w;
    assert_int_equal(tensor_map_init(&spec, &map, NULL), 0);
    struct st_tensor *tensors = xcalloc(map.n_entries, sizeof *tensors);
    for (size_t t = 0; t < map.n_entries; t++) {
        const struct tensor_entry *e = &map.entries[t];
        tensors[t] = (struct st_tensor){ e->name, ST_F32, e->n_dims, {0} };
        memcpy(tensors[t].dims, e->dims, sizeof e->dims);
    }
    assert_int_equal(st_layout_init(tensors, map.n_entries, &l, NULL), 0);
    assert_int_equal(st_create(path, &l, NULL), 0);
    assert_int_equal(st_writer_open(path, &l, &w, NULL), 0);
    for (size_t t = 0; t < map.n_entries; t++)
        for (uint64_t i = 0; i < map.entries[t].count; i++)
            assert_int_equal(st_write_f32(w, t, i, 1, (float[]){ number(t, i) }, NULL), 0);
    assert_int_equal(st_writer_close(w, NULL), 0);
    st_layout_fini(&l);
    free(tensors);
    tensor_map_fini(&map);
}

struct base_job {
    const char  *path;
    enum packing packing;
    bool         rounds;
};

/* A tensor as it should be held: its floats, or where it is packed its bytes. */
static void *expected(const struct tensor_entry *e, size_t tensor, const struct base_job *j)
{
    uint64_t n = e->stored_count;
    struct packed w = {j->packing, NULL, (int64_t)e->dims[0], (int64_t)e->dims[1]};
    bool is_fp8 = j->packing == PACKING_FP8 && tensor_is_projection(e->role);
    float *x = xcalloc(n, sizeof *x);
    for (uint64_t i = 0; i < n; i++)
        x[i] = number(tensor, i);
    if (!e->packing && !is_fp8) {
        for (uint64_t i = 0; e->is_matrix && j->rounds && i < n; i++)
            x[i] = bf16_value(bf16_of(x[i]));
        return x;
    }
    uint8_t *bytes = xcalloc(packing_bytes(j->packing, e->dims[0], e->dims[1]) + sizeof *x, 1);
    packed_encode(bytes, j->packing, x, w.rows, w.cols);
    w.bytes = bytes;
    packed_decode(x, &w, 0, w.rows, 0, w.cols);
    free(e->packing ? (void *)x : bytes);
    return e->packing ? (void *)bytes : x;
}

static int load_base(struct stack *s, void *arg, struct err *err)
{
    const struct base_job *j = arg;
    const struct tensor_map *map = s->config->map;
    int rc = ckpt_load_base(j->path, s->shard, map, j->rounds, err);
    for (size_t t = 0, number_of = 0; rc == 0 && t < map->n_entries; t++) {
        const struct tensor_entry *e = &map->entries[t];
        struct shard_part p;
        if (e->adapter != ADAPTER_NONE)
            continue;
        if (shard_part(s->shard, e, &p)) {
            void *whole = expected(e, number_of, j);
            const void *mine = e->is_buffer ? (const void *)p.weights : (const void *)p.elements;
            if (memcmp(mine, (float *)whole + p.first, p.count * sizeof(float)) != 0)
                rc = err_set(err, -EBADMSG, "%s is not as it should be", e->name);
            free(whole);
        }
        number_of++;
    }
    return rc;
}

static void a_base_is_held_in_its_precision(void **state)
{
    (void)state;
    struct base_job jobs[] = {
        { folder, PACKING_NONE, false },
        { folder, PACKING_NONE, true },
        { folder, PACKING_FP8, true },
        { folder, PACKING_MXFP4, true },
    };
    const struct layout_degrees layouts[] = { one, two, four };
    char *path = xasprintf("%s/model.safetensors", folder);
    struct lora_config lora = { 3, 6, false, targets, COUNT(targets) };
    write_base(path);
    for (size_t k = 0; k < COUNT(jobs); k++)
        for (size_t i = 0; i < COUNT(layouts); i++) {
            struct model_spec spec = small();
            struct tensor_map map;
            struct err err = {0};
            assert_int_equal(tensor_map_init(&spec, &map, NULL), 0);
            assert_int_equal(lora_map_add(&map, &lora, NULL), 0);
            assert_int_equal(tensor_map_pack(&map, jobs[k].packing, sizeof(float), &err), 0);
            struct stack_config config = { .spec = &spec, .map = &map, .lora = &lora,
                                           .degrees = layouts[i], .tokens_max = 16 };
            if (stack_run(&config, load_base, &jobs[k], &err) < 0)
                fail_msg("row %zu layout %zu: %s", k, i, err.text);
            tensor_map_fini(&map);
        }
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_checkpoint_is_read_on_any_layout),
        cmocka_unit_test(a_shared_a_is_stored_for_every_expert),
        cmocka_unit_test(an_adapter_that_is_read_and_written_is_the_same),
        cmocka_unit_test(the_configuration_names_the_modules),
        cmocka_unit_test(another_run_does_not_go_on_with_it),
        cmocka_unit_test(a_base_is_held_in_its_precision),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
