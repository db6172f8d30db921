/* test_ckpt_forms.c - what was read is written: dtypes, packed tensors, masters of the rounded */
#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>

#include "tests/folder.h"
#include "tests/ranks.h"

#include "common/mem.h"
#include "common/safetensors.h"
#include "worker/ckpt.h"

static char model_folder[64], path[64];
static struct model_spec spec;

/* ---- a model's folder ----------------------------------------------------------------------- */

/* Plain dtypes; packed experts; packed dense matrices; all experts of a layer in two tensors. */
enum kind { MIXED, MXFP4, FP8, FUSED };

static uint32_t random_of(uint64_t i)
{
    i = (i ^ (i >> 30)) * 0xbf58476d1ce4e5b9u;
    return (uint32_t)((i ^ (i >> 27)) * 0x94d049bb133111ebu >> 32);
}

struct stored {
    struct st_tensor tensor;
    uint8_t *bytes;
    char name[200];
};

static size_t bytes_of(const struct st_tensor *t)
{
    uint64_t n = st_dtype_bits(t->dtype) / 8;
    for (uint32_t i = 0; i < t->n_dims; i++)
        n *= t->dims[i];
    return n;
}

/* Bytes that are small finite numbers in every dtype; zeros in the padding of A_log. */
static void fill(struct stored *s, uint64_t n_live, uint64_t seed)
{
    size_t width = st_dtype_bits(s->tensor.dtype) / 8, n = bytes_of(&s->tensor);
    bool is_scale = strstr(s->name, "_scale") != NULL;
    s->bytes = xcalloc(1, n);
    for (size_t i = 0; i < n / width && i < n_live; i++) {
        uint32_t r = random_of(seed * 1000003 + i), word = (r & 0x80ffffffu) | 0x3d000000u;
        uint16_t half = (uint16_t)(s->tensor.dtype == ST_BF16 ? word >> 16
                                                              : (r & 0x83ff) | 0x2800);
        uint8_t byte = s->tensor.dtype == ST_F8_E4M3 ? (uint8_t)(r % 0x70)
                       : is_scale                    ? (uint8_t)(120 + r % 6)
                                                     : (uint8_t)r;
        float scale = ldexpf(1, (int)(r % 5) - 3);
        memcpy(s->bytes + i * width,
               width == 1 ? (void *)&byte : width == 2 ? (void *)&half
               : is_scale ? (void *)&scale : (void *)&word, width);
    }
}

static size_t add(struct stored *at, size_t n, const char *name, const char *suffix,
                  enum st_dtype dtype, uint32_t n_dims, const uint64_t *dims, uint64_t n_live)
{
    struct stored *s = &at[n];
    *s = (struct stored){.tensor = {.dtype = dtype, .n_dims = n_dims}};
    snprintf(s->name, sizeof s->name, "%s%s", name, suffix);
    memcpy(s->tensor.dims, dims, n_dims * sizeof *dims);
    fill(s, n_live, n);
    return n + 1;
}

/* The tensor that an expert's matrix is in, added with the first of them. */
static size_t add_fused(const struct tensor_entry *e, struct stored *out, size_t n)
{
    bool is_down = e->role == ROLE_EXPERT_DOWN;
    uint64_t dims[] = {spec.n_experts, e->dims[0] * (is_down ? 1 : 2), e->dims[1]};
    char name[200];
    if (e->expert > 0 || e->role == ROLE_EXPERT_UP)
        return n;
    snprintf(name, sizeof name, "%.*s%s", (int)(strstr(e->name, ".0.w") - e->name), e->name,
             is_down ? ".down_proj" : ".gate_up_proj");
    return add(out, n, name, "", is_down ? ST_BF16 : ST_F32, 3, dims, dims[0] * dims[1] * dims[2]);
}

/* Every tensor of the model in the dtypes of kind, and a vision tower. */
static size_t plan(const struct tensor_map *map, enum kind kind, struct stored *out)
{
    static const enum st_dtype plain[] = {ST_F32, ST_BF16, ST_F16};
    size_t n = 0;
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        uint64_t rows = e->dims[0], cols = e->dims[1];
        if (kind == FUSED && e->expert >= 0) {
            n = add_fused(e, out, n);
        } else if (kind == MXFP4 && e->expert >= 0) {
            uint64_t packed[] = {rows, cols / 2}, scales[] = {rows, cols / 32};
            n = add(out, n, e->name, "_packed", ST_U8, 2, packed, rows * cols);
            n = add(out, n, e->name, "_scale", ST_U8, 2, scales, rows * cols);
        } else if (kind == FP8 && e->is_matrix && e->expert < 0) {
            n = add(out, n, e->name, "", ST_F8_E4M3, 2, e->dims, rows * cols);
            n = add(out, n, e->name, "_scale_inv", ST_F32, 2,
                    (uint64_t[]){(rows + 127) / 128, (cols + 127) / 128}, rows * cols);
        } else {
            enum st_dtype dtype = e->keep_f32 ? ST_F32 : kind == MIXED ? plain[i % 3] : ST_BF16;
            n = add(out, n, e->name, "", dtype, e->n_dims, e->dims, e->count);
        }
    }
    return add(out, n, "vision_tower.patch.weight", "", ST_BF16, 2, (uint64_t[]){2, 3}, 6);
}

static void put_config(void)
{
    char *file = xasprintf("%s/config.json", model_folder);
    FILE *f = fopen(file, "w");
    assert_non_null(f);
    fputs("{\"text_config\": {\"quantization_config\": {\"bits\": 4}}}\n", f);
    fclose(f);
    free(file);
}

static size_t put_model(const struct tensor_map *map, enum kind kind, struct stored *out)
{
    size_t n = plan(map, kind, out);
    struct st_tensor *tensors = xcalloc(n, sizeof *tensors);
    char *file = xasprintf("%s/model.safetensors", model_folder);
    struct st_layout l;
    struct st_writer *w;
    for (size_t i = 0; i < n; i++) {
        tensors[i] = out[i].tensor;
        tensors[i].name = out[i].name;
    }
    assert_int_equal(st_layout_init(tensors, n, &l, NULL), 0);
    assert_int_equal(st_create(file, &l, NULL), 0);
    assert_int_equal(st_writer_open(file, &l, &w, NULL), 0);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(st_write_bytes(w, i, out[i].bytes, NULL), 0);
    assert_int_equal(st_writer_close(w, NULL), 0);
    st_layout_fini(&l);
    free(tensors);
    free(file);
    return n;
}

/* ---- what ranks do -------------------------------------------------------------------------- */

struct job {
    enum ckpt_dtype choice;
    float  moved;       /* what training added to every trained weight */
    const char *expect; /* of the error */
};

static void import_and_export(struct test_rank *r)
{
    struct job *job = r->user;
    struct ckpt_forms forms = {0};
    struct ckpt_state state = {.step = 1, .validation_loss = NAN};
    RANK_CHECK(r, ckpt_forms_open(model_folder, true, r->map, job->choice, &forms, &r->err) == 0);
    struct ckpt_config c = {.path = path, .model_path = model_folder, .spec = r->spec,
                            .map = r->map, .shard = r->shard, .coll = r->coll, .forms = &forms,
                            .file_bytes_max = 100000};
    uint64_t newest;
    int lock = -1;
    RANK_CHECK(r, ckpt_load_weights(model_folder, r->shard, r->map, &r->err) == 0);
    for (size_t i = 0; i < r->map->n_entries; i++) {
        struct shard_part p;
        if (tensor_is_trained(&r->map->entries[i]) && shard_part(r->shard, &r->map->entries[i], &p))
            for (uint64_t k = 0; k < p.count; k++)
                p.weights[k] += job->moved;
    }
    RANK_CHECK(r, ckpt_find(&c, NS_PER_S, &lock, &newest, &r->err) == 0);
    int rc = ckpt_save(&c, &state, &r->err);
    if (job->expect)
        RANK_CHECK(r, rc < 0 && strstr(r->err.text, job->expect));
    else
        RANK_CHECK(r, rc == 0);
    if (lock >= 0)
        close(lock);
    ckpt_forms_close(&forms);
}

static float *copy_of(const struct shard_part *p)
{
    return xmemdup(p->weights, p->count * sizeof *p->weights);
}

/* The checkpoint gives what the folder gives, moved as training did. */
static void resume(struct test_rank *r)
{
    struct job *job = r->user;
    struct ckpt_forms forms = {0};
    RANK_CHECK(r, ckpt_forms_open(model_folder, true, r->map, job->choice, &forms, &r->err) == 0);
    struct ckpt_config c = {.path = path, .model_path = model_folder, .spec = r->spec,
                            .map = r->map, .shard = r->shard, .coll = r->coll, .forms = &forms};
    struct ckpt_state state;
    float **were = xcalloc(r->map->n_entries, sizeof *were);
    struct shard_part p;
    RANK_CHECK(r, ckpt_load_weights(model_folder, r->shard, r->map, &r->err) == 0);
    for (size_t i = 0; i < r->map->n_entries; i++)
        if (shard_part(r->shard, &r->map->entries[i], &p)) {
            were[i] = copy_of(&p);
            for (uint64_t k = 0; k < p.count; k++)
                p.weights[k] = -1;
        }
    RANK_CHECK(r, ckpt_load(&c, 1, &state, &r->err) == 0);
    for (size_t i = 0; i < r->map->n_entries; i++)
        if (shard_part(r->shard, &r->map->entries[i], &p)) {
            float moved = tensor_is_trained(&r->map->entries[i]) ? job->moved : 0;
            for (uint64_t k = 0; k < p.count; k++)
                RANK_CHECK(r, p.weights[k] == were[i][k] + moved);
            free(were[i]);
        }
    free(were);
    ckpt_forms_close(&forms);
}

/* ---- what must hold ------------------------------------------------------------------------- */

static int empty_path(void **state)
{
    (void)state;
    remove_tree(path);
    return 0;
}

static bool config_calls_it_packed(void)
{
    char text[300] = "", *file = xasprintf("%s/step-1/config.json", path);
    FILE *f = fopen(file, "r");
    assert_non_null(f);
    assert_true(fread(text, 1, sizeof text - 1, f) > 0);
    fclose(f);
    free(file);
    return strstr(text, "quantization_config") != NULL;
}

static bool has_masters(void)
{
    char *file = xasprintf("%s/step-1/ballast/masters", path);
    bool has = access(file, F_OK) == 0;
    free(file);
    return has;
}

static struct safetensors *exported(void)
{
    struct safetensors *st = NULL;
    struct err err = {0};
    char *file = xasprintf("%s/step-1", path);
    if (safetensors_open(file, &st, &err) < 0)
        fail_msg("%s", err.text);
    free(file);
    return st;
}

static void assert_same_bytes(const struct stored *tensors, size_t n)
{
    struct safetensors *st = exported();
    assert_int_equal(safetensors_count(st), n);
    for (size_t i = 0; i < n; i++) {
        const struct st_view *v = safetensors_find(st, tensors[i].name);
        if (!v || v->tensor.dtype != tensors[i].tensor.dtype || v->n_bytes !=
            bytes_of(&tensors[i].tensor) || memcmp(v->data, tensors[i].bytes, v->n_bytes) != 0)
            fail_msg("%s: another tensor", tensors[i].name);
    }
    safetensors_close(st);
}

static void assert_dtypes(const struct tensor_map *map, enum st_dtype dtype)
{
    struct safetensors *st = exported();
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        const struct st_view *v = safetensors_find(st, e->name);
        assert_non_null(v);
        assert_int_equal(v->tensor.dtype, e->keep_f32 ? ST_F32 : dtype);
    }
    safetensors_close(st);
}

struct model {
    struct tensor_map map;
    struct stored *tensors;
    size_t n;
};

static struct model new_model(enum kind kind, bool is_frozen)
{
    struct model m = {0};
    assert_int_equal(tensor_map_init(&spec, &m.map, NULL), 0);
    for (size_t i = 0; i < m.map.n_entries && is_frozen; i++)
        m.map.entries[i].is_unreached = m.map.entries[i].role != ROLE_FINAL_NORM;
    tensor_map_index(&m.map);
    m.tensors = xcalloc(2 * m.map.n_entries + 1, sizeof *m.tensors);
    m.n = put_model(&m.map, kind, m.tensors);
    return m;
}

static void end_model(struct model *m)
{
    for (size_t i = 0; i < m->n; i++)
        free(m->tensors[i].bytes);
    free(m->tensors);
    tensor_map_fini(&m->map);
}

static void run(const struct model *m, struct layout_degrees d, void (*body)(struct test_rank *),
                struct job job)
{
    test_ranks_run(d, &spec, &m->map, body, &job);
}

static void what_is_untouched_keeps_every_bit(void **state)
{
    (void)state;
    static const struct { enum kind kind; bool is_frozen; } rows[] = {
        {MIXED, false}, {MIXED, true}, {MXFP4, true}, {FP8, true}, {FUSED, false}, {FUSED, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t l = 0; l < N_TEST_LAYOUTS; l += 5) {
            struct model m = new_model(rows[i].kind, rows[i].is_frozen);
            struct job job = {.choice = CKPT_DTYPE_SOURCE};
            empty_path(NULL);
            run(&m, test_layouts[l], import_and_export, job);
            assert_same_bytes(m.tensors, m.n);
            assert_int_equal(config_calls_it_packed(),
                             rows[i].kind == MXFP4 || rows[i].kind == FP8);
            assert_true(has_masters());
            run(&m, test_layouts[(l * 7 + 3) % N_TEST_LAYOUTS], resume, job);
            end_model(&m);
        }
}

static void a_resumed_run_goes_on_from_what_was_rounded(void **state)
{
    (void)state;
    for (int kind = MIXED; kind <= FUSED; kind++)
        for (int choice = CKPT_DTYPE_SOURCE; choice <= CKPT_DTYPE_F16; choice++) {
            struct model m = new_model((enum kind)kind, false);
            struct job job = {.choice = (enum ckpt_dtype)choice, .moved = 0x1.2345p-6f};
            static const enum st_dtype dtypes[] = {ST_BF16, ST_F32, ST_BF16, ST_F16};
            empty_path(NULL);
            run(&m, (struct layout_degrees){2, 2, 2, 0}, import_and_export, job);
            run(&m, (struct layout_degrees){4, 2, 4, 0}, resume, job);
            if (kind != FUSED && (kind != MIXED || choice != CKPT_DTYPE_SOURCE))
                assert_dtypes(&m.map, dtypes[choice]);
            assert_false(config_calls_it_packed());
            assert_int_equal(has_masters(), choice != CKPT_DTYPE_F32);
            end_model(&m);
        }
}

static void unpacked_experts_keep_their_values(void **state)
{
    (void)state;
    struct model m = new_model(MXFP4, false);
    run(&m, (struct layout_degrees){2, 2, 2, 0}, import_and_export, (struct job){0});
    struct safetensors *st = exported();
    for (size_t i = 0; i < m.map.n_entries; i++)
        assert_null(strstr(safetensors_at(st, i)->tensor.name, "_packed"));
    safetensors_close(st);
    /* As a model of its own it is the same. */
    char *command = xasprintf("rm -r %s/model.safetensors %s/step-1/ballast && mv %s/step-1/* %s",
                              model_folder, path, path, model_folder);
    assert_int_equal(system(command), 0);
    free(command);
    empty_path(NULL);
    run(&m, (struct layout_degrees){1, 1, 1, 0}, import_and_export, (struct job){0});
    run(&m, (struct layout_degrees){2, 1, 2, 0}, resume, (struct job){0});
    end_model(&m);
    put_config();
    command = xasprintf("rm %s/model*", model_folder);
    assert_int_equal(system(command), 0);
    free(command);
}

static void what_has_no_room_is_named(void **state)
{
    (void)state;
    struct model m = new_model(MIXED, false);
    run(&m, (struct layout_degrees){2, 2, 2, 0}, import_and_export,
        (struct job){.choice = CKPT_DTYPE_F16, .moved = 70000, .expect = "is beyond F16"});
    end_model(&m);
    enum ckpt_dtype choice;
    struct err err = {0};
    assert_int_equal(ckpt_dtype_parse("fp8", &choice, &err), -EINVAL);
}

int main(void)
{
    spec = test_spec();
    spec.latent = spec.expert_inter = 32;
    if (make_folder(NULL) < 0)
        return 1;
    snprintf(model_folder, sizeof model_folder, "%s/model", folder);
    snprintf(path, sizeof path, "%s/run", folder);
    mkdir(model_folder, 0777);
    put_config();
#define CASE(name) cmocka_unit_test_setup(name, empty_path)
    const struct CMUnitTest tests[] = {
        CASE(what_is_untouched_keeps_every_bit),
        CASE(a_resumed_run_goes_on_from_what_was_rounded),
        CASE(unpacked_experts_keep_their_values),
        CASE(what_has_no_room_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
