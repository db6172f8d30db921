/* test_export.c - adapters merged into tensors of every stored form, and what is refused before */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/bf16.h"
#include "common/hf_config.h"
#include "common/mem.h"
#include "common/mix.h"
#include "common/safetensors.h"
#include "kernels/fp8.h"
#include "kernels/mxfp4.h"
#include "tests/folder.h"
#include "worker/export.h"
#include "worker/peft.h"

/* One sparse layer; experts and projections are wide enough to be packed. */
static const char config_text[] =
    "{\"model_type\":\"deepseek_v3\",\"vocab_size\":48,\"hidden_size\":64,\"num_hidden_layers\":1,"
    "\"intermediate_size\":32,\"num_attention_heads\":2,\"q_lora_rank\":16,\"kv_lora_rank\":32,"
    "\"qk_nope_head_dim\":8,\"qk_rope_head_dim\":8,\"v_head_dim\":8,\"first_k_dense_replace\":0,"
    "\"n_routed_experts\":4,\"num_experts_per_tok\":2,\"n_shared_experts\":1,"
    "\"moe_intermediate_size\":32,\"n_group\":1,\"topk_group\":1,\"norm_topk_prob\":true,"
    "\"scoring_func\":\"sigmoid\",\"routed_scaling_factor\":1.0,\"hidden_act\":\"silu\","
    "\"rms_norm_eps\":1e-6,\"rope_theta\":10000}";
#define LAYER "model.layers.0."

static char *in_folder(const char *name)
{
    return xasprintf("%s/%s", folder, name);
}

static void write_text(const char *name, const char *text)
{
    char *path = in_folder(name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    free(path);
}

static float value(uint64_t tensor, uint64_t i)
{
    uint64_t z = (tensor * 1000003 + i) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 29) * 0xbf58476d1ce4e5b9ull;
    return (float)(mix_unit(z) - 0.5);
}

/* ---- a base of many forms ------------------------------------------------------------------- */

enum form { PLAIN, HALF, PACKED, BLOCKED };

/* q_b is BF16, experts 0 and 1 MXFP4, o_proj FP8; the rest F32. */
static enum form form_of(const struct tensor_entry *e)
{
    if (strstr(e->name, "q_b_proj"))
        return HALF;
    if (e->expert == 0 || e->expert == 1)
        return PACKED;
    return strstr(e->name, "o_proj") ? BLOCKED : PLAIN;
}

struct file {
    struct st_tensor tensors[64];
    uint8_t *bytes[64];
    char names[64][128];
    size_t n;
};

static uint8_t *add(struct file *f, const char *name, const char *ending, enum st_dtype dtype,
                    uint32_t n_dims, const uint64_t *dims, size_t n_bytes)
{
    struct st_tensor *t = &f->tensors[f->n];
    snprintf(f->names[f->n], sizeof f->names[0], "%s%s", name, ending);
    *t = (struct st_tensor){ .name = f->names[f->n], .dtype = dtype, .n_dims = n_dims };
    memcpy(t->dims, dims, n_dims * sizeof *dims);
    return f->bytes[f->n++] = xcalloc(n_bytes, 1);
}

static void add_stored(struct file *f, const struct tensor_entry *e, uint64_t number)
{
    uint64_t n = e->stored_count, rows = e->dims[0], cols = e->dims[1];
    float *x = xcalloc(n, sizeof *x);
    for (uint64_t i = 0; i < n; i++)
        x[i] = value(number, i);
    switch (form_of(e)) {
    case PLAIN:
        memcpy(add(f, e->name, "", ST_F32, e->n_dims, e->dims, n * 4), x, n * sizeof *x);
        break;
    case HALF: {
        uint16_t *halves = (uint16_t *)(void *)add(f, e->name, "", ST_BF16, 2, e->dims, n * 2);
        for (uint64_t i = 0; i < n; i++)
            halves[i] = bf16_of(x[i]);
        break;
    }
    case PACKED: {
        uint8_t *packed = add(f, e->name, "_packed", ST_U8, 2, (uint64_t[]){ rows, cols / 2 },
                              n / 2);
        mxfp4_encode(packed, add(f, e->name, "_scale", ST_U8, 2,
                                 (uint64_t[]){ rows, cols / MXFP4_GROUP }, n / MXFP4_GROUP),
                     x, (int64_t)n);
        break;
    }
    case BLOCKED: {
        uint8_t *codes = add(f, e->name, "", ST_F8_E4M3, 2, e->dims, n);
        float *scale = (float *)(void *)add(f, e->name, "_scale_inv", ST_F32, 2,
                                            (uint64_t[]){ 1, 1 }, sizeof *scale);
        fp8_e4m3_encode(codes, scale, x, (int64_t)rows, (int64_t)cols);
        break;
    }
    }
    free(x);
}

static void write_file(const char *name, struct file *f)
{
    char *path = in_folder(name);
    struct st_writer *w;
    struct st_layout l;
    struct err err = {0};
    if (st_layout_init(f->tensors, f->n, &l, &err) < 0 || st_create(path, &l, &err) < 0 ||
        st_writer_open(path, &l, &w, &err) < 0)
        fail_msg("%s", err.text);
    for (size_t i = 0; i < f->n; i++) {
        assert_int_equal(st_write_bytes(w, i, f->bytes[i], &err), 0);
        free(f->bytes[i]);
    }
    assert_int_equal(st_writer_close(w, &err), 0);
    st_layout_fini(&l);
    free(path);
    f->n = 0;
}

static struct tensor_map map_of(const struct lora_config *c)
{
    struct model_spec *spec = xcalloc(1, sizeof *spec);
    struct tensor_map map = {0};
    char *base = in_folder("base");
    struct err err = {0};
    if (hf_config_read(base, spec, &err) < 0 || tensor_map_init(spec, &map, &err) < 0 ||
        (c && lora_map_add(&map, c, &err) < 0))
        fail_msg("%s", err.text);
    free(spec);
    free(base);
    return map;
}

/* In two files with an index. */
static void write_base(void)
{
    static struct file f;
    char *index = xstrdup("{\"metadata\":{},\"weight_map\":{");
    struct tensor_map map = map_of(NULL);
    for (size_t i = 0, part = 1; i < map.n_entries; i++) {
        size_t before = f.n;
        add_stored(&f, &map.entries[i], i);
        for (; before < f.n; before++) {
            char *more = xasprintf("%s%s\"%s\":\"model-0000%zu-of-00002.safetensors\"", index,
                                   index[strlen(index) - 1] == '{' ? "" : ",", f.names[before],
                                   part);
            free(index);
            index = more;
        }
        if (i == map.n_entries / 2 || i + 1 == map.n_entries) {
            char *name = xasprintf("base/model-0000%zu-of-00002.safetensors", part++);
            write_file(name, &f);
            free(name);
        }
    }
    char *whole = xasprintf("%s}}", index);
    write_text("base/model.safetensors.index.json", whole);
    write_text("base/tokenizer.json", "{}");
    free(whole);
    free(index);
    tensor_map_fini(&map);
}

static const char *const targets[] = { "q_b_proj", "o_proj", "kv_a_proj_with_mqa",
                                       "experts.gate_proj", "mlp.gate", "lm_head" };
static const struct lora_config lora = { 2, 3, false, targets, 6 };

/* Beside the adapter of a head PEFT stores the head itself. */
static void add_copy(struct file *f, float more)
{
    struct tensor_map map = map_of(NULL);
    for (size_t i = 0; i < map.n_entries; i++) {
        const struct tensor_entry *e = &map.entries[i];
        if (e->role != ROLE_HEAD)
            continue;
        float *x = (float *)(void *)add(f, "base_model.model.lm_head.base_layer.weight", "",
                                        ST_F32, 2, e->dims, e->count * 4);
        for (uint64_t k = 0; k < e->count; k++)
            x[k] = value(i, k);
        x[e->count - 1] += more;
    }
    tensor_map_fini(&map);
}

/* copy_is_off: the copy of the head differs by it. */
static void write_adapter(float copy_is_off)
{
    static struct file f;
    struct tensor_map map = map_of(&lora);
    char *path = in_folder("adapter");
    for (size_t i = 0; i < map.n_entries; i++) {
        const struct tensor_entry *e = &map.entries[i];
        if (e->adapter == ADAPTER_NONE)
            continue;
        float *x = (float *)(void *)add(&f, e->name, "", ST_F32, 2, e->dims, e->count * 4);
        for (uint64_t k = 0; k < e->count; k++)
            x[k] = value(500 + i, k);
    }
    add_copy(&f, copy_is_off);
    write_file("adapter/" PEFT_TENSORS_FILE, &f);
    assert_int_equal(peft_write_config(path, &lora, &map, "base", NULL), 0);
    free(path);
    tensor_map_fini(&map);
}

static int make(void **state)
{
    if (make_folder(state) < 0)
        return -1;
    char *base = in_folder("base"), *adapter = in_folder("adapter");
    mkdir(base, 0777);
    mkdir(adapter, 0777);
    free(base);
    free(adapter);
    write_text("base/config.json", config_text);
    write_base();
    write_adapter(0);
    return 0;
}

/* ---- what comes out ------------------------------------------------------------------------- */

static int export_to(const char *adapter, const char *out, struct err *err)
{
    char *base = in_folder("base"), *from = in_folder(adapter), *to = in_folder(out);
    int rc = export_merged(base, from, to, err);
    free(base);
    free(from);
    free(to);
    return rc;
}

static struct safetensors *opened(const char *name)
{
    char *path = in_folder(name);
    struct safetensors *st;
    struct err err = {0};
    if (safetensors_open(path, &st, &err) < 0)
        fail_msg("%s", err.text);
    free(path);
    return st;
}

/* What the matrix should be, as floats: W, as it is read from its form, + alpha / r B A. */
static double expected(const struct tensor_map *map, const struct tensor_entry *e, float w,
                       uint64_t i)
{
    const struct tensor_entry *a = e + 1, *b = e + 2;
    uint64_t in = e->dims[1], na = 500 + (uint64_t)(a - map->entries), nb = na + 1;
    double sum = 0;
    for (uint64_t k = 0; k < lora.r; k++)
        sum += (double)value(nb, i / in * lora.r + k) * value(na, k * in + i % in);
    (void)b;
    return w + lora.alpha / lora.r * sum;
}

/* A stored matrix as floats. */
static float *decoded(const struct safetensors *st, const struct tensor_entry *e)
{
    float *x = xcalloc(e->count, sizeof *x);
    char name[160];
    const struct st_view *v = safetensors_find(st, e->name);
    switch (form_of(e)) {
    case PACKED: {
        snprintf(name, sizeof name, "%s_packed", e->name);
        v = safetensors_find(st, name);
        snprintf(name, sizeof name, "%s_scale", e->name);
        mxfp4_decode(x, v->data, safetensors_find(st, name)->data, (int64_t)e->count);
        break;
    }
    case BLOCKED: {
        float scale;
        snprintf(name, sizeof name, "%s_scale_inv", e->name);
        memcpy(&scale, safetensors_find(st, name)->data, sizeof scale);
        assert_int_equal(v->tensor.dtype, ST_F8_E4M3);
        fp8_e4m3_decode(x, v->data, &scale, (int64_t)e->dims[1], 0, (int64_t)e->dims[0], 0,
                        (int64_t)e->dims[1]);
        break;
    }
    default:
        assert_int_equal(v->tensor.dtype, form_of(e) == HALF ? ST_BF16 : ST_F32);
        assert_int_equal(st_read_f32(v, 0, e->count, x, NULL), 0);
    }
    return x;
}

static void every_form_stays_and_holds_the_sum(void **state)
{
    (void)state;
    /* Of the largest of 32 or of a block; four bits round 5 to 4 or 6 */
    static const double allowed[] = { [PLAIN] = 1e-6, [HALF] = 4e-3, [PACKED] = 0.26,
                                      [BLOCKED] = 0.04 };
    struct err err = {0};
    size_t n_merged[4] = {0};
    if (export_to("adapter", "merged", &err) < 0)
        fail_msg("%s", err.text);
    struct safetensors *base = opened("base"), *merged = opened("merged");
    struct tensor_map map = map_of(&lora);
    assert_int_equal(safetensors_count(base), safetensors_count(merged));
    for (size_t i = 0; i < map.n_entries; i++) {
        const struct tensor_entry *e = &map.entries[i];
        if (e->adapter != ADAPTER_NONE || e->n_dims != 2)
            continue;
        bool has = i + 2 < map.n_entries && e[1].adapter == ADAPTER_A;
        float *before = decoded(base, e), *after = decoded(merged, e);
        double largest = 0, worst = 0;
        for (uint64_t k = 0; has && k < e->count; k++)
            largest = fmax(largest, fabs(expected(&map, e, before[k], k)));
        for (uint64_t k = 0; has && k < e->count; k++)
            worst = fmax(worst, fabs(after[k] - expected(&map, e, before[k], k)) / largest);
        if (!(worst <= allowed[form_of(e)]))
            fail_msg("%s: %.2e off", e->name, worst);
        if (!has)
            assert_memory_equal(before, after, e->count * sizeof *before);
        n_merged[form_of(e)] += has;
        free(before);
        free(after);
    }
    assert_true(n_merged[PLAIN] == 5 && n_merged[HALF] == 1 && n_merged[PACKED] == 2 &&
                n_merged[BLOCKED] == 1);
    tensor_map_fini(&map);
    safetensors_close(base);
    safetensors_close(merged);
}

static void what_has_no_adapter_is_the_same_byte_for_byte(void **state)
{
    (void)state;
    struct safetensors *base = opened("base"), *merged = opened("merged");
    size_t n_same = 0;
    for (size_t i = 0; i < safetensors_count(base); i++) {
        const struct st_view *x = safetensors_at(base, i), *y = safetensors_at(merged, i);
        assert_string_equal(x->tensor.name, y->tensor.name);
        assert_string_equal(strrchr(x->file, '/'), strrchr(y->file, '/'));
        assert_int_equal(x->tensor.dtype, y->tensor.dtype);
        assert_int_equal(x->n_bytes, y->n_bytes);
        n_same += memcmp(x->data, y->data, x->n_bytes) == 0;
    }
    /* 5 plain, 1 half, 2 packed with scales, 1 blocked with a scale have changed; scales may not */
    assert_true(n_same >= safetensors_count(base) - 12 && n_same <= safetensors_count(base) - 9);
    char *tokenizer = in_folder("merged/tokenizer.json");
    assert_int_equal(access(tokenizer, F_OK), 0);
    free(tokenizer);
    safetensors_close(base);
    safetensors_close(merged);
}

static void nothing_is_left_of_what_is_refused(void **state)
{
    (void)state;
    struct err err = {0};
    char *out = in_folder("other"), *tmp = in_folder("other.tmp");
    assert_int_equal(export_to("adapter", "merged", &err), -EEXIST);
    assert_non_null(strstr(err.text, "nothing is overwritten"));
    assert_true(export_to("nowhere", "other", &err) < 0);
    write_adapter(0.5f);
    assert_int_equal(export_to("adapter", "other", &err), -EINVAL);
    assert_non_null(strstr(err.text, "lm_head.base_layer.weight' is not the matrix of the model"));
    write_adapter(0);
    write_text("adapter/adapter_config.json", "{\"peft_type\":\"LORA\",\"r\":3,\"lora_alpha\":1}");
    assert_int_equal(export_to("adapter", "other", &err), -EINVAL);
    assert_non_null(strstr(err.text, "has the shape [2, "));
    assert_true(access(out, F_OK) < 0 && access(tmp, F_OK) < 0);
    free(out);
    free(tmp);
}

/* ---- configurations ------------------------------------------------------------------------- */

static void what_our_adapters_are_not_is_refused_by_its_key(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says; /* says NULL: fine */
    } rows[] = {
        { "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":3,\"lora_dropout\":0.1}", NULL },
        { "{\"r\":2,\"lora_alpha\":3,\"rank_pattern\":{},\"use_dora\":false,"
          "\"modules_to_save\":null,\"target_parameters\":[]}", NULL },
        { "{\"peft_type\":\"IA3\",\"r\":2,\"lora_alpha\":3}", "'peft_type'" },
        { "{\"r\":2,\"lora_alpha\":3,\"bias\":\"all\"}", "'bias'" },
        { "{\"r\":2,\"lora_alpha\":3,\"use_dora\":true}", "'use_dora' is set" },
        { "{\"r\":2,\"lora_alpha\":3,\"use_rslora\":true}", "'use_rslora' is set" },
        { "{\"r\":2,\"lora_alpha\":3,\"rank_pattern\":{\"q\":4}}", "'rank_pattern' is set" },
        { "{\"r\":2,\"lora_alpha\":3,\"modules_to_save\":[\"lm_head\"]}", "'modules_to_save'" },
        { "{\"r\":2,\"lora_alpha\":3,\"target_parameters\":[\"x\"]}", "'target_parameters'" },
        { "{\"r\":0,\"lora_alpha\":3}", "r" },
        { "{\"r\":1e9,\"lora_alpha\":3}", "r" },
        { "{\"r\":2,\"lora_alpha\":0}", "'lora_alpha' is 0" },
        { "{\"r\":2,\"lora_alpha\":-1}", "'lora_alpha' is -1" },
        { "{\"r\":2}", "lora_alpha" },
        { "[]", "" },
        { "{", "" },
        { "", "" },
    };
    char *path = in_folder("adapter");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct peft p;
        struct err err = {0};
        write_text("adapter/adapter_config.json", rows[i].text);
        int rc = peft_open(path, &p, &err);
        if (rows[i].says ? rc >= 0 || !strstr(err.text, rows[i].says) : rc < 0)
            fail_msg("%s: %d, %s", rows[i].text, rc, err.text);
        if (rc >= 0)
            peft_fini(&p);
    }
    free(path);
}

static void fp8_codes_are_the_nearest(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++)
        if ((code & 0x7f) != 0x7f)
            assert_int_equal(fp8_e4m3_of(fp8_e4m3_value((uint8_t)code)), code);
    for (int code = 0; code < 0x7e; code++) { /* ties go to the even code */
        float low = fp8_e4m3_value((uint8_t)code), high = fp8_e4m3_value((uint8_t)(code + 1));
        float middle = (low + high) / 2;
        assert_int_equal(fp8_e4m3_of(middle), code % 2 ? code + 1 : code);
        assert_int_equal(fp8_e4m3_of(-nextafterf(middle, 0)), 0x80 | code);
        assert_int_equal(fp8_e4m3_of(nextafterf(middle, 1000)), code + 1);
    }
    assert_int_equal(fp8_e4m3_of(1e9f), 0x7e);
    assert_int_equal(fp8_e4m3_of(-INFINITY), 0xfe);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_form_stays_and_holds_the_sum),
        cmocka_unit_test(what_has_no_adapter_is_the_same_byte_for_byte),
        cmocka_unit_test(nothing_is_left_of_what_is_refused),
        cmocka_unit_test(what_our_adapters_are_not_is_refused_by_its_key),
        cmocka_unit_test(fp8_codes_are_the_nearest),
    };
    return cmocka_run_group_tests(tests, make, remove_folder);
}
