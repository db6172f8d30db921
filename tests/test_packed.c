/* test_packed.c - weights of four and eight bits: decoding, packing, and products over them */
#include "tests/oracle.h"

#include "kernels/fp8.h"
#include "kernels/mxfp4.h"
#include "kernels/packed.h"

static struct random rng;
static struct device *dev;

static const float numbers[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

static void every_byte_under_every_scale(void **state)
{
    (void)state;
    uint8_t packed[256], scales[16];
    float out[512];
    for (int i = 0; i < 256; i++)
        packed[i] = (uint8_t)i;
    for (int e = 0; e < 255; e++) {
        memset(scales, e, sizeof scales);
        mxfp4_decode(out, packed, scales, 512);
        for (int i = 0; i < 512; i++) {
            int code = i % 2 ? i / 2 >> 4 : i / 2 & 15;
            float want = (float)ldexp(code & 8 ? -numbers[code & 7] : numbers[code & 7], e - 127);
            if (out[i] != want || signbit(out[i]) != signbit(want))
                fail_msg("byte %d under scale %d: %g, not %g", i / 2, e, out[i], want);
        }
    }
}

static void a_scale_of_255_is_found(void **state)
{
    (void)state;
    uint8_t scales[3] = {254, 0, 255};
    assert_int_equal(mxfp4_find_nan(scales, 2), -1);
    assert_int_equal(mxfp4_find_nan(scales, 3), 2);
}

static void numbers_are_packed_by_rule(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        float first, second; /* of a group of zeros */
        uint8_t scale, codes;
    } rows[] = {
        {"zeros", 0, 0, 0, 0x00},
        {"six fits", 6, 1, 127, 0x27},
        {"saturated", 6.9f, 1, 127, 0x27},
        {"from seven a scale up", 7, 1, 128, 0x16},
        {"ties to even: a quarter", 4, 0.25f, 127, 0x06},
        {"ties to even: three quarters", 4, 0.75f, 127, 0x26},
        {"ties to even: five", 4, 5, 127, 0x66},
        {"a negative one that rounds to zero", 4, -0.1f, 127, 0x86},
        {"minus zero", 4, -0.0f, 127, 0x06},
        {"below the least scale", 0x1p-140f, 0, 0, 0x00},
        {"half of the least scale", 0x1p-128f, 0, 0, 0x01},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        float x[32] = {rows[i].first, rows[i].second};
        uint8_t packed[16], scale;
        mxfp4_encode(packed, &scale, x, 32);
        if (scale != rows[i].scale || packed[0] != rows[i].codes)
            fail_msg("%s: scale %d codes %02x, not %d %02x", rows[i].what, scale, packed[0],
                     rows[i].scale, rows[i].codes);
    }
}

static void what_was_decoded_packs_to_the_same_values(void **state)
{
    (void)state;
    enum { N = 32 * 200 };
    uint8_t packed[N / 2], scales[N / 32], again[N / 2], scales_again[N / 32];
    float *x = zeros(N), *y = zeros(N);
    for (int i = 0; i < N / 2; i++)
        packed[i] = (uint8_t)random_bits(&rng);
    for (int i = 0; i < N / 32; i++)
        scales[i] = (uint8_t)(random_bits(&rng) % 253);
    mxfp4_decode(x, packed, scales, N);
    mxfp4_encode(again, scales_again, x, N);
    mxfp4_decode(y, again, scales_again, N);
    for (int i = 0; i < N; i++)
        assert_true(x[i] == y[i]);
    free(x);
    free(y);
}

static void agrees_with_the_reference_file(void **state)
{
    (void)state;
    static const char *const names[] = {
        "decode", "decode-zero-scale", "encode-normal", "encode-ties", "encode-scale-edge",
        "encode-zero", "encode-range",
    };
    struct safetensors *st = oracle_open("mxfp4");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const struct st_view *packed = oracle_view(st, names[i], "packed");
        const struct st_view *scale = oracle_view(st, names[i], "scale");
        int64_t n = 0;
        float *value = oracle_floats(st, names[i], "value", &n), *got = zeros(n);
        float *weights = oracle_floats(st, names[i], "weights", NULL);
        mxfp4_decode(got, packed->data, scale->data, n);
        for (int64_t j = 0; j < n; j++)
            if (got[j] != value[j])
                fail_msg("%s: number %d is %g, not %g", names[i], (int)j, got[j], value[j]);
        if (weights) {
            uint8_t *codes = xcalloc((size_t)n / 2, 1), *scales = xcalloc((size_t)n / 32, 1);
            mxfp4_encode(codes, scales, weights, n);
            assert_memory_equal(codes, packed->data, (size_t)n / 2);
            assert_memory_equal(scales, scale->data, (size_t)n / 32);
            free(codes);
            free(scales);
        }
        free(value);
        free(got);
        free(weights);
    }
    safetensors_close(st);
}

/* ---- products ---- */

#define GROUPS 5

struct product_case {
    enum packing packing;
    int64_t in, out, offsets[GROUPS + 1];
};

/* y and dx over packed weights beside those over what these decode to: the same bits. */
static void compare_products(const struct product_case *c)
{
    int64_t in = c->in, out = c->out, n = c->offsets[GROUPS];
    uint8_t *packed[GROUPS];
    float *w[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
        float *x = random_floats(&rng, in * out, 1);
        packed[g] = xcalloc(packing_bytes(c->packing, (uint64_t)out, (uint64_t)in), 1);
        w[g] = zeros(in * out);
        packed_encode(packed[g], c->packing, x, out, in);
        packed_decode(w[g], &(struct packed){c->packing, packed[g], out, in}, 0, out, 0, in);
        free(x);
    }
    float *x = random_floats(&rng, n * in, 1), *dy = random_floats(&rng, n * out, 1);
    float *y = filled(n * out, NAN), *y_want = filled(n * out, NAN);
    float *dx = filled(n * in, 1), *dx_want = filled(n * in, 1);
    const uint8_t *const *p = (const uint8_t *const *)packed;
    const float *const *q = (const float *const *)w;
    dev->ops->grouped_linear_packed(dev, y, x, p, c->packing, c->offsets, GROUPS, in, out);
    dev->ops->grouped_linear(dev, y_want, x, q, c->offsets, GROUPS, in, out);
    dev->ops->grouped_linear_packed_dx(dev, dx, dy, p, c->packing, c->offsets, GROUPS, in, out, 1);
    dev->ops->grouped_linear_dx(dev, dx_want, dy, q, c->offsets, GROUPS, in, out, 1);
    assert_memory_equal(y, y_want, (size_t)(n * out) * sizeof *y);
    assert_memory_equal(dx, dx_want, (size_t)(n * in) * sizeof *dx);
    for (int g = 0; g < GROUPS; g++) {
        free(packed[g]);
        free(w[g]);
    }
    float *all[] = {x, dy, y, y_want, dx, dx_want};
    for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
        free(all[k]);
}

static void products_equal_those_of_decoded_weights(void **state)
{
    (void)state;
    static const struct product_case cases[] = {
        {PACKING_MXFP4, 32, 1, {0, 1, 1, 1, 1, 1}},
        {PACKING_MXFP4, 64, 70, {0, 3, 3, 20, 21, 90}},
        {PACKING_MXFP4, 160, 130, {0, 0, 150, 151, 200, 200}},
        {PACKING_FP8, 1, 1, {0, 1, 1, 1, 1, 1}},
        {PACKING_FP8, 33, 70, {0, 3, 3, 20, 21, 90}},
        {PACKING_FP8, 301, 130, {0, 0, 150, 151, 200, 200}},
        {PACKING_FP8, 128, 256, {0, 7, 7, 9, 40, 41}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        compare_products(&cases[i]);
}

/* As many as 256 MiB hold, and one at least. */
static void room_is_bounded(void **state)
{
    (void)state;
    uint64_t k3 = 2 * 3584 * 3072;
    assert_int_equal(packing_room(14, k3), 12 * k3);
    assert_int_equal(packing_room(3, k3), 3 * k3);
    assert_int_equal(packing_room(14, 1ull << 30), 1ull << 30);
    assert_int_equal(packing_room(4, 0), 0);
}

/* ---- eight bits ---- */

static void eight_bits_by_rule(void **state)
{
    (void)state;
    static const struct {
        uint8_t code;
        float   value;
    } rows[] = {
        {0x00, 0}, {0x01, 0x1p-9f}, {0x07, 7 * 0x1p-9f}, {0x08, 0x1p-6f}, {0x38, 1},
        {0x39, 1.125f}, {0x40, 2}, {0x7e, 448}, {0xfe, -448}, {0xb8, -1}, {0x81, -0x1p-9f},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        assert_true(fp8_e4m3_value(rows[i].code) == rows[i].value);
    assert_true(signbit(fp8_e4m3_value(0x80)) && fp8_e4m3_value(0x80) == 0);
    assert_true(isnan(fp8_e4m3_value(0x7f)) && isnan(fp8_e4m3_value(0xff)));
    uint8_t bytes[3] = {0x7e, 0xfe, 0xff};
    assert_int_equal(fp8_e4m3_find_nan(bytes, 2), -1);
    assert_int_equal(fp8_e4m3_find_nan(bytes, 3), 2);
    for (int code = 0; code < 0x7e; code++) /* ascending, as the bits are */
        assert_true(fp8_e4m3_value((uint8_t)code) < fp8_e4m3_value((uint8_t)(code + 1)));
}

static void every_code_decodes_to_its_number(void **state)
{
    (void)state;
    uint8_t bytes[256];
    float one = 1, out[256];
    for (int code = 0; code < 256; code++)
        bytes[code] = (uint8_t)((code & 0x7f) == 0x7f ? 0 : code);
    for (int part = 0; part < 2; part++) /* a block each */
        fp8_e4m3_decode(out + part * 128, bytes + part * 128, &one, 128, 0, 1, 0, 128);
    for (int code = 0; code < 256; code++) {
        float want = fp8_e4m3_value(bytes[code]);
        if (out[code] != want || signbit(out[code]) != signbit(want))
            fail_msg("code %d: %g, not %g", code, out[code], want);
    }
}

/* All of the matrix, and a part of it that begins and ends within blocks. */
static void every_block_has_its_scale(void **state)
{
    (void)state;
    enum { ROWS = 131, COLS = 270, FIRST_ROW = 100, FIRST_COL = 120, N_COLS = 140 };
    static uint8_t bytes[ROWS * COLS];
    static float out[ROWS * COLS];
    float scales[2 * 3] = {1, 2, 3, 4, 5, 6};
    for (int i = 0; i < ROWS * COLS; i++)
        bytes[i] = (uint8_t)(random_bits(&rng) % 0x7f);
    for (int is_part = 0; is_part < 2; is_part++) {
        int row0 = is_part ? FIRST_ROW : 0, col0 = is_part ? FIRST_COL : 0;
        int n_rows = ROWS - row0, n_cols = is_part ? N_COLS : COLS;
        fp8_e4m3_decode(out, bytes, scales, COLS, row0, n_rows, col0, n_cols);
        for (int i = 0; i < n_rows * n_cols; i++) {
            int row = row0 + i / n_cols, col = col0 + i % n_cols;
            float want = fp8_e4m3_value(bytes[row * COLS + col]) *
                         scales[row / FP8_BLOCK * 3 + col / FP8_BLOCK];
            assert_true(out[i] == want);
        }
    }
}

/* Codes, and from a multiple of four bytes on the scales. */
static void a_packed_matrix_is_one_run_of_bytes(void **state)
{
    (void)state;
    assert_int_equal(packing_scales_at(PACKING_MXFP4, 3, 64), 96);
    assert_int_equal(packing_bytes(PACKING_MXFP4, 3, 64), 102);
    assert_int_equal(packing_scales_at(PACKING_FP8, 5, 129), 648);
    assert_int_equal(packing_bytes(PACKING_FP8, 5, 129), 656);
    assert_int_equal(packing_bytes(PACKING_FP8, 256, 128), 256 * 128 + 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_byte_under_every_scale),
        cmocka_unit_test(a_scale_of_255_is_found),
        cmocka_unit_test(numbers_are_packed_by_rule),
        cmocka_unit_test(what_was_decoded_packs_to_the_same_values),
        cmocka_unit_test(agrees_with_the_reference_file),
        cmocka_unit_test(products_equal_those_of_decoded_weights),
        cmocka_unit_test(room_is_bounded),
        cmocka_unit_test(eight_bits_by_rule),
        cmocka_unit_test(every_code_decodes_to_its_number),
        cmocka_unit_test(every_block_has_its_scale),
        cmocka_unit_test(a_packed_matrix_is_one_run_of_bytes),
    };
    rng.state = test_seed();
    dev = test_device(2, false);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dev->ops->close(dev);
    return failed;
}
