/* test_ckpt_source.c - stored forms of a tensor: what is read from each, and what is refused */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/mem.h"
#include "kernels/packed.h"
#include "worker/ckpt_fp8.h"

#define NAME "model.layers.0.mlp.experts.0.up_proj.weight"

static char path[] = "/tmp/ckpt_sourceXXXXXX.safetensors";

static int make_path(void **state)
{
    (void)state;
    int fd = mkstemps(path, 12);
    return fd < 0 ? -1 : close(fd);
}

static int remove_path(void **state)
{
    (void)state;
    return unlink(path);
}

struct stored {
    const char *suffix, *dtype;
    uint64_t rows, cols;
    const void *bytes;
    size_t n_bytes;
};

/* A file of the tensors up to the first without a dtype, all named NAME and a suffix. */
static struct safetensors *stored(const struct stored *tensors)
{
    char header[4096] = "{";
    size_t at = 1, offset = 0;
    FILE *f = fopen(path, "w");
    struct safetensors *st;
    struct err err = {0};
    assert_non_null(f);
    for (const struct stored *t = tensors; t->dtype; offset += t++->n_bytes)
        at += (size_t)snprintf(header + at, sizeof header - at,
                               "%s\"" NAME "%s\":{\"dtype\":\"%s\",\"shape\":[%llu,%llu],"
                               "\"data_offsets\":[%zu,%zu]}", offset ? "," : "", t->suffix,
                               t->dtype, (unsigned long long)t->rows, (unsigned long long)t->cols,
                               offset, offset + t->n_bytes);
    snprintf(header + at, sizeof header - at, "}");
    uint64_t n = strlen(header);
    fwrite(&n, 1, sizeof n, f);
    fwrite(header, 1, n, f);
    for (const struct stored *t = tensors; t->dtype; t++)
        fwrite(t->bytes, 1, t->n_bytes, f);
    fclose(f);
    if (safetensors_open(path, &st, &err) < 0)
        fail_msg("%s", err.text);
    return st;
}

static struct tensor_entry matrix(uint64_t rows, uint64_t cols)
{
    return (struct tensor_entry){ .name = NAME, .n_dims = 2, .dims = { rows, cols },
                                  .count = rows * cols, .stored_count = rows * cols };
}

static void fp8_has_a_scale_for_each_block(void **state)
{
    (void)state;
    enum { SIDE = 130 };
    static uint8_t codes[SIDE * SIDE];
    const float scales[4] = { 1, 2, 3, 4 };
    float x[SIDE * SIDE];
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = i % 2 ? 0xb8 : 0x38; /* -1 and 1 */
    struct safetensors *st = stored((const struct stored[]){
        { "", "F8_E4M3", SIDE, SIDE, codes, sizeof codes },
        { "_scale_inv", "F32", 2, 2, scales, sizeof scales },
        { 0 },
    });
    struct tensor_entry e = matrix(SIDE, SIDE);
    struct ckpt_source s;
    assert_int_equal(ckpt_source_find(st, &e, path, &s, NULL), 0);
    assert_int_equal(ckpt_source_read(&s, 0, SIDE * SIDE, x, NULL), 0);
    for (size_t i = 0; i < SIDE * SIDE; i++)
        assert_true(x[i] == scales[i / SIDE / 128 * 2 + i % SIDE / 128] * (i % 2 ? -1 : 1));
    assert_int_equal(ckpt_source_read(&s, 127 * SIDE + 127, 4, x, NULL), 0); /* a rank's slice */
    assert_true(fabsf(x[0]) == 1 && fabsf(x[1]) == 2 && fabsf(x[2]) == 2 && fabsf(x[3]) == 3);
    safetensors_close(st);
}

static void mxfp4_is_read_from_any_element(void **state)
{
    (void)state;
    uint8_t codes[64], scales[4] = { 127, 128, 126, 0 };
    float whole[128], part[40];
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (uint8_t)(i * 37 + 5);
    struct safetensors *st = stored((const struct stored[]){
        { "_packed", "U8", 2, 32, codes, sizeof codes },
        { "_scale", "U8", 2, 2, scales, sizeof scales },
        { 0 },
    });
    struct tensor_entry e = matrix(2, 64);
    struct ckpt_source s;
    assert_int_equal(ckpt_source_find(st, &e, path, &s, NULL), 0);
    assert_int_equal(ckpt_source_read(&s, 0, 128, whole, NULL), 0);
    assert_true(whole[0] == 3 && whole[1] == 0); /* code 5, code 0 of byte 0x05 */
    for (uint64_t first = 0; first + 40 <= 128; first++) {
        assert_int_equal(ckpt_source_read(&s, first, 40, part, NULL), 0);
        assert_memory_equal(part, whole + first, sizeof part);
    }
    safetensors_close(st);
}

/* What is stored as e is packed comes byte for byte, anything else by way of its numbers. */
static void packed_matrices_are_taken_as_they_are_stored(void **state)
{
    (void)state;
    enum { ROWS = 130, COLS = 160 };
    static uint8_t codes[ROWS * COLS], out[ROWS * COLS + 64], again[ROWS * COLS + 64];
    static float x[ROWS * COLS];
    const float scales[4] = { 1, -2, 0.125f, 4 };
    for (size_t i = 0; i < sizeof codes; i++)
        codes[i] = (uint8_t)(i % 251 % 127 | i % 3 << 7);
    struct safetensors *st = stored((const struct stored[]){
        { "", "F8_E4M3", ROWS, COLS, codes, sizeof codes },
        { "_scale_inv", "F32", 2, 2, scales, sizeof scales },
        { 0 },
    });
    struct tensor_entry e = matrix(ROWS, COLS);
    struct ckpt_source s;
    assert_int_equal(ckpt_source_find(st, &e, path, &s, NULL), 0);
    e.packing = PACKING_FP8;
    assert_int_equal(ckpt_source_read_packed(&s, &e, out, NULL), 0);
    assert_memory_equal(out, codes, sizeof codes);
    assert_memory_equal(out + sizeof codes, scales, sizeof scales);
    e.packing = PACKING_MXFP4;
    assert_int_equal(ckpt_source_read(&s, 0, ROWS * COLS, x, NULL), 0);
    assert_int_equal(ckpt_source_read_packed(&s, &e, out, NULL), 0);
    packed_encode(again, PACKING_MXFP4, x, ROWS, COLS);
    assert_memory_equal(out, again, packing_bytes(PACKING_MXFP4, ROWS, COLS));
    safetensors_close(st);
}

/* The number of a code as the format has it: a sign, four bits of exponent, three of fraction. */
static double e4m3(uint8_t code)
{
    int exponent = code >> 3 & 15, fraction = code & 7;
    double size = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    return code & 0x80 ? -size : size;
}

enum { FORM_ROWS = 130, FORM_COLS = 160 };

/* compressed-tensors' strategies: which scale a number has. */
static const struct {
    const char *shows, *dtype;
    uint64_t rows, cols; /* of the scales */
    bool     is_kept;    /* packed, the codes stay */
} forms[] = {
    { "channel, a scale a row", "F32", FORM_ROWS, 1, false },
    { "channel in BF16", "BF16", FORM_ROWS, 1, false },
    { "tensor, one for all", "F32", 1, 1, true },
    { "tensor in BF16", "BF16", 1, 1, true },
    { "block", "F32", 2, 2, true },
    { "block in BF16", "BF16", 2, 2, true },
};

static size_t form_scale(size_t form, size_t row, size_t col)
{
    return forms[form].rows == FORM_ROWS ? row
           : forms[form].rows == 1       ? 0
                                         : row / 128 * 2 + col / 128;
}

static void fp8_is_read_with_any_scales(void **state)
{
    enum { N = FORM_ROWS * FORM_COLS };
    static uint8_t codes[N], packed[N + 64];
    static float x[N], scales[FORM_ROWS], again[N];
    static uint16_t halves[FORM_ROWS];
    (void)state;
    for (size_t i = 0; i < N; i++)
        codes[i] = (uint8_t)(i * 7 % 251 % 127 | i % 3 << 7);
    for (size_t k = 0; k < FORM_ROWS; k++) { /* short fractions, which BF16 holds */
        scales[k] = ldexpf((float)(129 + k % 100), (int)(k % 9) - 12);
        uint32_t bits;
        memcpy(&bits, &scales[k], sizeof bits);
        halves[k] = (uint16_t)(bits >> 16);
    }
    for (size_t form = 0; form < sizeof forms / sizeof *forms; form++) {
        size_t n_scales = forms[form].rows * forms[form].cols;
        bool is_half = forms[form].dtype[0] == 'B';
        struct safetensors *st = stored((const struct stored[]){
            { "", "F8_E4M3", FORM_ROWS, FORM_COLS, codes, sizeof codes },
            { "_scale", forms[form].dtype, forms[form].rows, forms[form].cols,
              is_half ? (const void *)halves : scales, n_scales * (is_half ? 2 : 4) },
            { 0 },
        });
        struct tensor_entry e = matrix(FORM_ROWS, FORM_COLS);
        struct ckpt_source s;
        struct err err = { 0 };
        print_message("%s\n", forms[form].shows);
        if (ckpt_source_find(st, &e, path, &s, &err) < 0)
            fail_msg("%s", err.text);
        assert_int_equal(ckpt_source_packing(&s), PACKING_FP8);
        assert_int_equal(ckpt_source_read(&s, 0, N, x, NULL), 0);
        for (size_t i = 0; i < N; i++)
            assert_true(x[i] == (float)(e4m3(codes[i]) *
                                        scales[form_scale(form, i / FORM_COLS, i % FORM_COLS)]));
        for (uint64_t first = 90; first + 400 < N; first += 1999) { /* ranks' slices */
            assert_int_equal(ckpt_source_read(&s, first, 400, again, NULL), 0);
            assert_memory_equal(again, x + first, 400 * sizeof *x);
        }
        e.packing = PACKING_FP8;
        assert_int_equal(ckpt_source_read_packed(&s, &e, packed, NULL), 0);
        assert_int_equal(memcmp(packed, codes, N) == 0, forms[form].is_kept);
        const float *kept = (const float *)(const void *)(packed + packing_scales_at(PACKING_FP8,
                                                          FORM_ROWS, FORM_COLS));
        double most = 0, far = 0;
        for (size_t i = 0; i < N; i++) {
            double scale = kept[i / FORM_COLS / 128 * 2 + i % FORM_COLS / 128];
            double largest = 448 * scale, now = e4m3(packed[i]) * scale;
            far = fmax(far, fabs(now - x[i]) / fmax(fabs(x[i]) / 16, largest * 0x1p-18));
            most = fmax(most, fabs(now - x[i]));
        }
        assert_true(forms[form].is_kept ? most == 0 : far <= 1.001); /* else half a last bit */
        safetensors_close(st);
    }
}

/* What export writes back: as close as the codes are, and the same when it is written again. */
static void fp8_is_written_in_its_own_form(void **state)
{
    enum { N = FORM_ROWS * FORM_COLS };
    static uint8_t codes[N], made[N];
    static float x[N], scales[FORM_ROWS];
    static const float ones[FORM_ROWS] = { 1 };
    (void)state;
    for (size_t i = 0; i < N; i++)
        x[i] = (float)sin(0.37 * (double)i) * (1 + (float)(i / FORM_COLS));
    for (size_t form = 0; form < sizeof forms / sizeof *forms; form++) {
        bool is_half = forms[form].dtype[0] == 'B';
        struct safetensors *st = stored((const struct stored[]){
            { "", "F8_E4M3", FORM_ROWS, FORM_COLS, codes, sizeof codes },
            { "_scale", forms[form].dtype, forms[form].rows, forms[form].cols, ones,
              forms[form].rows * forms[form].cols * (is_half ? 2 : 4) },
            { 0 },
        });
        struct tensor_entry e = matrix(FORM_ROWS, FORM_COLS);
        struct ckpt_source s;
        assert_int_equal(ckpt_source_find(st, &e, path, &s, NULL), 0);
        ckpt_fp8_encode(&s, x, FORM_ROWS, made, scales);
        for (size_t i = 0; i < N; i++) {
            double scale = scales[form_scale(form, i / FORM_COLS, i % FORM_COLS)];
            double now = e4m3(made[i]) * scale;
            assert_true(fabs(now - x[i]) <= fmax(fabs(x[i]) / 16, scale * 0x1p-10) * 1.001);
        }
        for (size_t k = 0; is_half && k < forms[form].rows * forms[form].cols; k++) {
            uint32_t bits;
            memcpy(&bits, &scales[k], sizeof bits);
            assert_int_equal(bits & 0xffff, 0);
        }
        safetensors_close(st);
    }
}

static const uint8_t zeros[4096];
static const uint8_t nan8[4] = { 0x38, 0x7f }, nan_scale[1] = { 255 };
static const float one[4] = { 1, 1, 1, 1 }, infinite[4] = { 1, 1, INFINITY, 1 };
static const float enormous[1] = { 1e37f };

static const struct {
    const char *shows;
    uint64_t rows, cols;
    struct stored tensors[3];
    const char *says;
} bad[] = {
    { "another shape", 2, 2, { { "", "F32", 4, 1, one, 16 } }, "shape [4, 1], config.json makes "
      "it [2, 2]" },
    { "none at all", 2, 2, { { "x", "F32", 2, 2, one, 16 } }, "is missing" },
    { "a dtype of whole numbers", 2, 2, { { "", "I32", 2, 2, one, 16 } }, "I32" },
    { "an infinity", 2, 2, { { "", "F32", 2, 2, infinite, 16 } }, "element 2: an infinity" },
    { "fp8 without scales", 2, 2, { { "", "F8_E4M3", 2, 2, zeros, 4 } },
      "weight_scale' is there, the scales of" },
    { "fp8 in groups of a row", 2, 256, { { "", "F8_E4M3", 2, 256, zeros, 512 },
      { "_scale", "F32", 2, 2, one, 16 } }, "shape [2, 2]; expected [2, 1], a scale a row" },
    { "fp8 with scales that are exponents", 2, 2, { { "", "F8_E4M3", 2, 2, zeros, 4 },
      { "_scale", "U8", 2, 1, zeros, 2 } }, "scales of F8_E4M3 are F32 or BF16" },
    { "int8 with a scale a row", 2, 2, { { "", "I8", 2, 2, zeros, 4 },
      { "_scale", "F32", 2, 1, one, 8 } }, "is I8" },
    { "int4 packed in words", 2, 64, { { "_packed", "I32", 2, 8, zeros, 64 },
      { "_scale", "BF16", 2, 2, zeros, 8 } }, "whole numbers (INT4, INT8), which is not read" },
    { "nvfp4", 2, 32, { { "_packed", "U8", 2, 16, zeros, 32 },
      { "_scale", "F8_E4M3", 2, 2, zeros, 4 } }, "NVFP4, which is not read" },
    { "fp8 with too few scales", 129, 2, { { "", "F8_E4M3", 129, 2, zeros, 258 },
      { "_scale_inv", "F32", 1, 1, one, 4 } }, "config.json makes it [2, 1]" },
    { "fp8 with NaN", 2, 2, { { "", "F8_E4M3", 2, 2, nan8, 4 },
      { "_scale_inv", "F32", 1, 1, one, 4 } }, "element 1: NaN" },
    { "packed without scales", 2, 32, { { "_packed", "U8", 2, 16, zeros, 32 } },
      "weight_scale' is missing" },
    { "packed rows that do not divide", 2, 20, { { "_packed", "U8", 2, 10, zeros, 20 },
      { "_scale", "U8", 2, 1, zeros, 2 } }, "groups of 32" },
    { "packed of another dtype", 1, 32, { { "_packed", "I8", 1, 16, zeros, 16 },
      { "_scale", "U8", 1, 1, zeros, 1 } }, "is I8, expected U8" },
    { "a scale that is NaN", 1, 32, { { "_packed", "U8", 1, 16, zeros, 16 },
      { "_scale", "U8", 1, 1, nan_scale, 1 } }, "element 0: NaN" },
};

/* The same of what is taken without looking at its numbers. */
static const struct {
    enum packing packing;
    struct stored tensors[3];
    const char *says;
} bad_packed[] = {
    { PACKING_FP8, { { "", "F8_E4M3", 1, 2, nan8, 2 }, { "_scale_inv", "F32", 1, 1, one, 4 } },
      "weight', element 1 is no number" },
    { PACKING_FP8, { { "", "F8_E4M3", 1, 2, zeros, 2 },
      { "_scale_inv", "F32", 1, 1, enormous, 4 } },
      "weight_scale_inv', scale 0 is no number" },
    { PACKING_MXFP4, { { "_packed", "U8", 1, 16, zeros, 16 },
      { "_scale", "U8", 1, 1, nan_scale, 1 } }, "weight_scale', scale 0 is no number" },
};

static void what_is_wrong_in_packed_bytes_is_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_packed / sizeof *bad_packed; i++) {
        struct safetensors *st = stored(bad_packed[i].tensors);
        struct tensor_entry e = matrix(1, bad_packed[i].packing == PACKING_FP8 ? 2 : 32);
        struct ckpt_source s;
        struct err err = {0};
        uint8_t out[64];
        assert_int_equal(ckpt_source_find(st, &e, path, &s, NULL), 0);
        e.packing = bad_packed[i].packing;
        assert_int_equal(ckpt_source_read_packed(&s, &e, out, &err), -EINVAL);
        if (!strstr(err.text, bad_packed[i].says))
            fail_msg("row %zu: %s", i, err.text);
        safetensors_close(st);
    }
}

static void what_is_wrong_is_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct safetensors *st = stored(bad[i].tensors);
        struct tensor_entry e = matrix(bad[i].rows, bad[i].cols);
        struct ckpt_source s;
        struct err err = {0};
        float x[512];
        int rc = ckpt_source_find(st, &e, path, &s, &err);
        if (rc == 0)
            rc = ckpt_source_read(&s, 0, e.count, x, &err);
        if (rc >= 0 || !strstr(err.text, bad[i].says) || !strstr(err.text, path))
            fail_msg("%s: %d \"%s\"", bad[i].shows, rc, err.text);
        safetensors_close(st);
    }
}

/* ---- names ---------------------------------------------------------------------------------- */

static struct tensor_map map_of(uint32_t n_mtp_layers)
{
    struct model_spec m = {
        .family = FAMILY_DEEPSEEK_V3, .n_layers = 1, .layers = { { ATTENTION_MLA, MLP_MOE } },
        .hidden = 8, .vocab = 8, .heads = 1, .kv_lora_rank = 4, .qk_nope_dim = 4,
        .qk_rope_dim = 2, .v_dim = 4, .n_experts = 2, .top_k = 1, .expert_inter = 4, .latent = 8,
        .n_mtp_layers = n_mtp_layers,
    };
    struct tensor_map map;
    assert_int_equal(tensor_map_init(&m, &map, NULL), 0);
    return map;
}

static void next_token_layers_and_vision_are_carried(void **state)
{
    (void)state;
    struct tensor_map map = map_of(1);
    assert_true(tensor_map_is_carried(&map, "model.layers.1.eh_proj.weight"));
    assert_true(tensor_map_is_carried(&map, "vision_tower.encoder.blocks.0.wo.weight"));
    assert_true(tensor_map_is_carried(&map, "mm_projector.proj.0.weight"));
    assert_true(tensor_map_is_carried(&map, "model.layers.0.self_attn.rotary_emb.inv_freq"));
    assert_false(tensor_map_is_carried(&map, "model.layers.2.eh_proj.weight"));
    assert_false(tensor_map_is_carried(&map, "model.layers.0.eh_proj.weight"));
    assert_false(tensor_map_is_carried(&map, "model.layers.-1.x"));
    assert_false(tensor_map_is_carried(&map, "model.layers.1"));
    assert_false(tensor_map_is_carried(&map, ""));
    tensor_map_fini(&map);
}

static void a_tensor_of_another_model_is_named(void **state)
{
    (void)state;
    struct tensor_map map = map_of(0);
    struct safetensors *st = stored((const struct stored[]){
        { "_packed", "F32", 2, 2, one, 16 }, { 0 } });
    assert_int_equal(ckpt_source_check_names(st, &map, NULL), 0);
    safetensors_close(st);
    st = stored((const struct stored[]){ { "_other", "F32", 2, 2, one, 16 }, { 0 } });
    struct err err = {0};
    assert_int_equal(ckpt_source_check_names(st, &map, &err), -EINVAL);
    assert_non_null(strstr(err.text, "weight_other' is none of the model"));
    safetensors_close(st);
    tensor_map_fini(&map);
}

/* ---- fused experts -------------------------------------------------------------------------- */

enum { HIDDEN = 8, INTER = 4 }; /* of map_of */

/* A file of n tensors of the layer's experts, their numbers 1, 2, 3, ... in order. */
struct fused {
    const char *name;
    uint32_t n_dims;
    uint64_t dims[3];
};

static struct safetensors *stored_fused(const struct fused *tensors, size_t n)
{
    struct st_tensor list[4] = {{0}};
    char names[4][100];
    float *values[4];
    struct st_layout l;
    struct st_writer *w;
    struct safetensors *st;
    for (size_t i = 0; i < n; i++) {
        uint64_t count = 1;
        list[i] = (struct st_tensor){.name = names[i], .dtype = ST_F32,
                                     .n_dims = tensors[i].n_dims};
        snprintf(names[i], sizeof names[i], "model.layers.0.mlp.experts.%s", tensors[i].name);
        for (uint32_t d = 0; d < tensors[i].n_dims; d++)
            count *= list[i].dims[d] = tensors[i].dims[d];
        values[i] = xcalloc(count, sizeof *values[i]);
        for (uint64_t k = 0; k < count; k++)
            values[i][k] = (float)(k + 1);
    }
    assert_int_equal(st_layout_init(list, n, &l, NULL), 0);
    assert_int_equal(st_create(path, &l, NULL), 0);
    assert_int_equal(st_writer_open(path, &l, &w, NULL), 0);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(st_write_bytes(w, i, (const uint8_t *)values[i], NULL), 0);
        free(values[i]);
    }
    assert_int_equal(st_writer_close(w, NULL), 0);
    st_layout_fini(&l);
    assert_int_equal(safetensors_open(path, &st, NULL), 0);
    return st;
}

/* Gate rows of an expert, then its up rows, expert after expert; and the downs. */
static void experts_may_lie_in_one_tensor(void **state)
{
    (void)state;
    struct tensor_map map = map_of(0);
    struct safetensors *st = stored_fused((const struct fused[]){
        { "gate_up_proj", 3, { 2, 2 * INTER, HIDDEN } }, { "down_proj", 3, { 2, HIDDEN, INTER } },
    }, 2);
    static const float first[2][3] = {
        { 1, INTER * HIDDEN + 1, 1 },
        { 2 * INTER * HIDDEN + 1, 3 * INTER * HIDDEN + 1, INTER * HIDDEN + 1 },
    };
    int n = 0;
    for (size_t i = 0; i < map.n_entries; i++) {
        const struct tensor_entry *e = &map.entries[i];
        struct ckpt_source s;
        float x[3];
        if (e->expert < 0)
            continue;
        assert_int_equal(ckpt_source_find(st, e, "folder", &s, NULL), 0);
        assert_int_equal(ckpt_source_read(&s, 2, 3, x, NULL), 0);
        float at = first[e->expert][e->role - ROLE_EXPERT_GATE];
        assert_true(x[0] == at + 2 && x[1] == at + 3 && x[2] == at + 4);
        n++;
    }
    assert_int_equal(n, 6);
    assert_int_equal(ckpt_source_check_names(st, &map, NULL), 0);
    safetensors_close(st);
    tensor_map_fini(&map);
}

static void fused_experts_that_are_not_the_models_are_named(void **state)
{
    (void)state;
    static const struct {
        struct fused tensors[2];
        size_t n;
        const char *says;
    } rows[] = {
        { { { "gate_up_proj", 3, { 3, 2 * INTER, HIDDEN } } }, 1,
          "experts.gate_up_proj' has the shape [3, 8, 8], config.json makes it [2, 8, 8]" },
        { { { "down_proj", 3, { 1, HIDDEN, INTER } } }, 1, "[1, 8, 4], config.json makes it [2" },
        { { { "down_proj", 3, { 2, INTER, HIDDEN } } }, 1, "[2, 4, 8], config.json makes it [2" },
        { { { "down_proj", 2, { 2 * HIDDEN, INTER } } }, 1, "has the shape [16, 4], " },
        { { { "down_proj", 3, { 2, HIDDEN, INTER } },
            { "1.down_proj.weight", 2, { HIDDEN, INTER } } }, 2, "holds what " },
    };
    struct tensor_map map = map_of(0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct safetensors *st = stored_fused(rows[i].tensors, rows[i].n);
        struct err err = {0};
        assert_int_equal(ckpt_source_check_names(st, &map, &err), -EINVAL);
        if (!strstr(err.text, rows[i].says))
            fail_msg("row %zu: %s", i, err.text);
        safetensors_close(st);
    }
    tensor_map_fini(&map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_has_a_scale_for_each_block),
        cmocka_unit_test(mxfp4_is_read_from_any_element),
        cmocka_unit_test(packed_matrices_are_taken_as_they_are_stored),
        cmocka_unit_test(fp8_is_read_with_any_scales),
        cmocka_unit_test(fp8_is_written_in_its_own_form),
        cmocka_unit_test(what_is_wrong_in_packed_bytes_is_named),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(next_token_layers_and_vision_are_carried),
        cmocka_unit_test(a_tensor_of_another_model_is_named),
        cmocka_unit_test(experts_may_lie_in_one_tensor),
        cmocka_unit_test(fused_experts_that_are_not_the_models_are_named),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
