/* test_safetensors.c - what is written is read again, and hostile files are one clear line */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/safetensors.h"
#include "tests/folder.h"

static char *path_of(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* header, then n_data bytes 0, 1, 2, ...; header_bytes is claimed. */
static void put_claiming(const char *name, uint64_t header_bytes, const char *header, size_t n,
                         size_t n_data)
{
    FILE *f = fopen(path_of(name), "w");
    assert_non_null(f);
    for (int i = 0; i < 8; i++)
        fputc((int)(header_bytes >> (8 * i) & 255), f);
    fwrite(header, 1, n, f);
    for (size_t i = 0; i < n_data; i++)
        fputc((int)(i & 255), f);
    assert_int_equal(fclose(f), 0);
}

static void put(const char *name, const char *header, size_t n_data)
{
    put_claiming(name, strlen(header), header, strlen(header), n_data);
}

/* ---- round trips ---------------------------------------------------------------------------- */

static const struct st_tensor declared[] = {
    { "b.matrix", ST_F32, 2, { 3, 5 } },
    { "a.scalar", ST_F32, 0, { 0 } },
    { "half", ST_BF16, 1, { 7 } },
    { "empty", ST_F32, 2, { 0, 9 } },
    { "quoted \" \\ \xc3\xa9", ST_BF16, 2, { 2, 2 } },
};
#define N_DECLARED (sizeof declared / sizeof *declared)

static float value_of(size_t tensor, uint64_t i)
{
    return (float)((double)(tensor + 1) * 0.37 - (double)i * 1.13);
}

/* As several ranks do: each opens the file and writes every second element. */
static void write_in_turns(const char *path, const struct st_layout *l, uint64_t n_writers)
{
    for (uint64_t r = 0; r < n_writers; r++) {
        struct st_writer *w;
        assert_int_equal(st_writer_open(path, l, &w, NULL), 0);
        for (size_t t = 0; t < l->n_tensors; t++) {
            uint64_t n = 1;
            for (uint32_t d = 0; d < l->tensors[t].n_dims; d++)
                n *= l->tensors[t].dims[d];
            for (uint64_t i = r; i < n; i += n_writers) {
                float x = value_of(t, i);
                assert_int_equal(st_write_f32(w, t, i, 1, &x, NULL), 0);
            }
        }
        assert_int_equal(st_writer_close(w, NULL), 0);
    }
}

static void slices_of_many_writers_make_one_file(void **state)
{
    (void)state;
    struct st_layout l;
    struct safetensors *st;
    struct err err = {0};
    assert_int_equal(st_layout_init(declared, N_DECLARED, &l, &err), 0);
    put("model.safetensors", "{}", 5000); /* an old file is replaced, not overwritten */
    assert_int_equal(st_create(path_of("model.safetensors"), &l, &err), 0);
    write_in_turns(path_of("model.safetensors"), &l, 3);

    struct stat s;
    assert_int_equal(stat(path_of("model.safetensors"), &s), 0);
    assert_int_equal(s.st_size, l.file_bytes);
    assert_int_equal(l.header_bytes % 64, 0);
    int rc = safetensors_open(folder, &st, &err);
    if (rc < 0)
        fail_msg("%s", err.text);
    assert_int_equal(safetensors_count(st), N_DECLARED);
    assert_string_equal(safetensors_at(st, 0)->tensor.name, "a.scalar");
    for (size_t t = 0; t < N_DECLARED; t++) {
        const struct st_view *v = safetensors_find(st, declared[t].name);
        assert_non_null(v);
        assert_int_equal(v->tensor.n_dims, declared[t].n_dims);
        assert_int_equal(v->tensor.dtype, declared[t].dtype);
        for (uint64_t i = 0; i < v->n_elements; i++) {
            float x = NAN, y = value_of(t, i);
            assert_int_equal(st_read_f32(v, i, 1, &x, &err), 0);
            assert_float_equal(x, y, declared[t].dtype == ST_BF16 ? fabsf(y) / 256 : 0);
        }
    }
    assert_int_equal(safetensors_find(st, "empty")->n_elements, 0);
    assert_null(safetensors_find(st, "none"));
    safetensors_close(st);
    st_layout_fini(&l);
}

static void an_empty_file_of_no_tensors_is_fine(void **state)
{
    (void)state;
    struct st_layout l;
    struct safetensors *st;
    assert_int_equal(st_layout_init(NULL, 0, &l, NULL), 0);
    assert_int_equal(st_create(path_of("none.safetensors"), &l, NULL), 0);
    assert_int_equal(safetensors_open(path_of("none.safetensors"), &st, NULL), 0);
    assert_int_equal(safetensors_count(st), 0);
    assert_null(safetensors_find(st, "x"));
    safetensors_close(st);
    st_layout_fini(&l);
}

/* n floats as a tensor of a half's dtype; what the writer said. */
static int halves_written(enum st_dtype dtype, const float *x, size_t n, uint16_t *out,
                          struct err *err)
{
    const struct st_tensor one[] = { { "x", dtype, 1, { n } } };
    struct st_layout l;
    struct st_writer *w;
    struct safetensors *st;
    assert_int_equal(st_layout_init(one, 1, &l, NULL), 0);
    assert_int_equal(st_create(path_of("x.safetensors"), &l, NULL), 0);
    assert_int_equal(st_writer_open(path_of("x.safetensors"), &l, &w, NULL), 0);
    int rc = st_write_f32(w, 0, 0, n, x, err);
    assert_int_equal(st_writer_close(w, NULL), 0);
    assert_int_equal(safetensors_open(path_of("x.safetensors"), &st, NULL), 0);
    memcpy(out, safetensors_at(st, 0)->data, 2 * n);
    safetensors_close(st);
    st_layout_fini(&l);
    return rc;
}

static void halves_round_to_nearest_even(void **state)
{
    (void)state;
    static const struct { enum st_dtype dtype; float x; uint16_t bits; } cases[] = {
        { ST_BF16, 1.0f, 0x3f80 },      { ST_BF16, -0.0f, 0x8000 },
        { ST_BF16, 0x1.01p0f, 0x3f80 }, /* a tie, down */
        { ST_BF16, 0x1.03p0f, 0x3f82 }, { ST_BF16, 0x1.010002p0f, 0x3f81 },
        { ST_BF16, INFINITY, 0x7f80 },  { ST_BF16, 0x1p-149f, 0x0000 },
        { ST_F16, 1.0f, 0x3c00 },       { ST_F16, -0.0f, 0x8000 },
        { ST_F16, 0x1.002p0f, 0x3c00 }, /* a tie, down */
        { ST_F16, 0x1.006p0f, 0x3c02 }, { ST_F16, 0x1.002002p0f, 0x3c01 },
        { ST_F16, 65519, 0x7bff },      { ST_F16, -INFINITY, 0xfc00 },
        { ST_F16, 0x1p-25f, 0x0000 },   /* a tie below the smallest */
        { ST_F16, 0x1.8p-24f, 0x0002 }, { ST_F16, -0x1.ffcp-15f, 0x8400 },
    };
    uint16_t bits = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(halves_written(cases[i].dtype, &cases[i].x, 1, &bits, NULL), 0);
        assert_int_equal(bits, cases[i].bits);
    }
    halves_written(ST_BF16, &(float){NAN}, 1, &bits, NULL);
    assert_true((bits & 0x7f80) == 0x7f80 && (bits & 0x7f));
    halves_written(ST_F16, &(float){NAN}, 1, &bits, NULL);
    assert_true((bits & 0x7c00) == 0x7c00 && (bits & 0x3ff));
    struct err err = {0};
    assert_int_equal(halves_written(ST_F16, (const float[]){1, 65520}, 2, (uint16_t[2]){0}, &err),
                     -ERANGE);
    assert_non_null(strstr(err.text, "tensor 'x', element 1: 65520 is beyond F16"));
    assert_int_equal(halves_written(ST_BF16, &(float){0x1.fffffep127f}, 1, &bits, &err), -ERANGE);
}

static void every_half_that_is_read_is_written_back(void **state)
{
    (void)state;
    static uint16_t halves[65536], back[65536];
    static float x[65536];
    for (int k = 0; k < 2; k++) {
        enum st_dtype dtype = k ? ST_BF16 : ST_F16;
        uint16_t exponent = k ? 0x7f80 : 0x7c00;
        size_t n = 0;
        for (uint32_t i = 0; i < 65536; i++)
            if ((i & exponent) != exponent)
                halves[n++] = (uint16_t)i;
        struct st_view v = { .tensor = { "x", dtype, 1, { n } }, .n_elements = n, .n_bytes = 2 * n,
                             .data = (const uint8_t *)halves, .file = "f" };
        assert_int_equal(st_read_f32(&v, 0, n, x, NULL), 0);
        assert_int_equal(halves_written(dtype, x, n, back, NULL), 0);
        assert_memory_equal(back, halves, 2 * n);
    }
}

static void f16_of_every_kind_is_read(void **state)
{
    (void)state;
    static const struct { uint16_t bits; float x; } cases[] = {
        { 0x3c00, 1 }, { 0xc000, -2 }, { 0x7bff, 65504 }, { 0x0001, 0x1p-24f },
        { 0x83ff, -0x1.ff8p-15f }, { 0x7c00, INFINITY }, { 0x0400, 0x1p-14f },
        { 0x3555, 0.33325195f },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct st_view v = { .tensor = { "x", ST_F16, 1, { 1 } }, .n_elements = 1, .n_bytes = 2,
                             .data = (const uint8_t *)&cases[i].bits, .file = "f" };
        float x;
        assert_int_equal(st_read_f32(&v, 0, 1, &x, NULL), 0);
        assert_float_equal(x, cases[i].x, 0);
    }
}

static void other_dtypes_are_listed_but_not_numbers(void **state)
{
    (void)state;
    struct safetensors *st;
    struct err err = {0};
    float x;
    put("q.safetensors",
        "{\"p\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
        "\"f\":{\"dtype\":\"F4\",\"shape\":[2,3],\"data_offsets\":[4,7]},"
        "\"n\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[7,10]}}  ", 10);
    assert_int_equal(safetensors_open(path_of("q.safetensors"), &st, &err), 0);
    assert_int_equal(safetensors_find(st, "f")->n_elements, 6);
    assert_int_equal(safetensors_find(st, "p")->data[3], 3);
    assert_int_equal(st_read_f32(safetensors_find(st, "p"), 0, 1, &x, &err), -ENOTSUP);
    assert_non_null(strstr(err.text, "'p' is U8"));
    safetensors_close(st);
}

static void a_range_beyond_the_end_is_refused(void **state)
{
    (void)state;
    struct safetensors *st;
    struct err err = {0};
    float x[4];
    put("r.safetensors", "{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8);
    assert_int_equal(safetensors_open(path_of("r.safetensors"), &st, &err), 0);
    assert_int_equal(st_read_f32(safetensors_at(st, 0), 2, 0, x, &err), 0);
    assert_int_equal(st_read_f32(safetensors_at(st, 0), 1, 2, x, &err), -EINVAL);
    assert_int_equal(st_read_f32(safetensors_at(st, 0), UINT64_MAX, 2, x, &err), -EINVAL);
    safetensors_close(st);
}

/* ---- hostile headers ------------------------------------------------------------------------ */

#define T(name, dtype, shape, offsets)                                                             \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
    const char *shows, *header;
    size_t n_data;
    const char *says;
} bad[] = {
    { "no JSON", "{\"x\":", 0, "not JSON" },
    { "not an object", "[1,2,3]", 0, "does not begin with {" },
    { "blank before the object", " {}", 0, "does not begin with {" },
    { "a name twice", "{" T("x", "F32", "[1]", "[0,4]") "," T("x", "F32", "[1]", "[0,4]") "}", 4,
      "header: key 'x' is there twice" },
    { "a key twice inside", "{\"x\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],"
      "\"data_offsets\":[0,4]}}", 4, "header: key 'dtype' is there twice" },
    { "a hole", "{" T("x", "F32", "[1]", "[0,4]") "," T("y", "F32", "[1]", "[8,12]") "}", 12,
      "'y' leaves a hole before it at byte 8" },
    { "a hole at the start", "{" T("x", "F32", "[1]", "[4,8]") "}", 8, "leaves a hole" },
    { "an overlap", "{" T("x", "F32", "[2]", "[0,8]") "," T("y", "F32", "[2]", "[4,12]") "}", 12,
      "'y' overlaps the one before it" },
    { "bytes of nobody", "{" T("x", "F32", "[1]", "[0,4]") "}", 5, "last 1 bytes" },
    { "a file cut short", "{" T("x", "F32", "[4]", "[0,16]") "}", 12, "cut short" },
    { "a size that does not fit", "{" T("x", "F32", "[3]", "[0,16]") "}", 16,
      "span 16 bytes, dtype and shape need 12" },
    { "offsets backwards", "{" T("x", "F32", "[1]", "[4,0]") "}", 4, "lie outside" },
    { "offsets near the end of the range", "{" T("x", "F32", "[1]",
      "[18446744073709551612,18446744073709551615]") "}", 4, "'x'" },
    { "an unknown dtype", "{" T("x", "F33", "[1]", "[0,4]") "}", 4, "dtype 'F33' is unknown" },
    { "a shape that overflows", "{" T("x", "F32", "[4294967296,4294967296]", "[0,0]") "}", 0,
      "overflows" },
    { "bits that overflow", "{" T("x", "F32", "[1152921504606846976]", "[0,0]") "}", 0,
      "whole number of bytes" },
    { "half a byte", "{" T("x", "F4", "[3]", "[0,2]") "}", 2, "whole number of bytes" },
    { "a negative dimension", "{" T("x", "F32", "[-1]", "[0,4]") "}", 4, "dimension 0" },
    { "a fraction", "{" T("x", "F32", "[1.5]", "[0,4]") "}", 4, "dimension 0" },
    { "too many dimensions", "{" T("x", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4,
      "9 dimensions" },
    { "an empty name", "{" T("", "F32", "[1]", "[0,4]") "}", 4, "empty or unprintable" },
    { "a line break in a name", "{" T("a\\nb", "F32", "[1]", "[0,4]") "}", 4, "unprintable" },
    { "a NUL in a name", "{" T("a\\u0000b", "F32", "[1]", "[0,4]") "}", 4, "NUL" },
    { "metadata that is no text", "{\"__metadata__\":{\"a\":1}}", 0, "__metadata__" },
    { "a tensor that is a number", "{\"x\":1}", 0, "'x': it is not an object" },
    { "no shape", "{\"x\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape is missing" },
    { "three offsets", "{" T("x", "F32", "[1]", "[0,2,4]") "}", 4, "two whole numbers" },
};

static int open_bad(struct err *err)
{
    struct safetensors *st = NULL;
    int rc = safetensors_open(path_of("bad.safetensors"), &st, err);
    assert_null(st);
    return rc;
}

static void a_bad_header_is_one_clear_line(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct err err = {0};
        put("bad.safetensors", bad[i].header, bad[i].n_data);
        int rc = open_bad(&err);
        if (rc != -EINVAL || !strstr(err.text, bad[i].says) || strchr(err.text, '\n') ||
            !strstr(err.text, "bad.safetensors"))
            fail_msg("%s: %d \"%s\"", bad[i].shows, rc, err.text);
    }
}

static void a_length_is_never_believed(void **state)
{
    (void)state;
    static const struct { uint64_t claimed; int code; const char *says; } cases[] = {
        { UINT64_MAX, -EFBIG, "is it a safetensors file" },
        { (100u << 20) + 1, -EFBIG, "allowed up to 104857600" },
        { 100u << 20, -EINVAL, "cut short" },
        { 5000, -EINVAL, "cut short" },
        { 0, -EINVAL, "does not begin" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err err = {0};
        put_claiming("bad.safetensors", cases[i].claimed, "{}", 2, 0);
        assert_int_equal(open_bad(&err), cases[i].code);
        assert_non_null(strstr(err.text, cases[i].says));
    }
    struct err err = {0};
    assert_int_equal(truncate(path_of("bad.safetensors"), 7), 0);
    assert_int_equal(open_bad(&err), -EINVAL);
    assert_int_equal(truncate(path_of("bad.safetensors"), 0), 0);
    assert_int_equal(open_bad(&err), -EINVAL);
}

static void what_is_no_file_is_refused(void **state)
{
    (void)state;
    struct safetensors *st;
    struct err err = {0};
    assert_int_equal(mkdir(path_of("bare"), 0777), 0);
    assert_int_equal(safetensors_open(path_of("bare"), &st, &err), -ENOENT);
    assert_non_null(strstr(err.text, "holds neither"));
    assert_int_equal(safetensors_open(path_of("missing.safetensors"), &st, &err), -ENOENT);
    assert_int_equal(mkfifo(path_of("pipe"), 0666), 0);
    assert_int_equal(safetensors_open(path_of("pipe"), &st, &err), -EINVAL);
    assert_int_equal(safetensors_open("/dev/null", &st, &err), -EINVAL);
}

/* ---- shards --------------------------------------------------------------------------------- */

static void put_index(const char *map)
{
    FILE *f = fopen(path_of("s.safetensors.index.json"), "w");
    assert_non_null(f);
    fprintf(f, "{\"metadata\":{\"total_size\":8},\"weight_map\":%s}", map);
    assert_int_equal(fclose(f), 0);
}

static int open_index_file(struct safetensors **st, struct err *err)
{
    return safetensors_open(path_of("s.safetensors.index.json"), st, err);
}

static void an_index_joins_its_shards(void **state)
{
    (void)state;
    struct safetensors *st;
    struct err err = {0};
    put("s1.safetensors", "{" T("x", "F32", "[1]", "[0,4]") "}", 4);
    put("s2.safetensors", "{" T("y", "U8", "[3]", "[0,3]") "," T("z", "U8", "[1]", "[3,4]") "}", 4);
    put_index("{\"x\":\"s1.safetensors\",\"y\":\"s2.safetensors\",\"z\":\"s2.safetensors\"}");
    assert_int_equal(open_index_file(&st, &err), 0);
    assert_int_equal(safetensors_count(st), 3);
    assert_int_equal(safetensors_find(st, "z")->data[0], 3);
    assert_non_null(strstr(safetensors_find(st, "z")->file, "s2.safetensors"));
    safetensors_close(st);
}

static void a_bad_index_is_one_clear_line(void **state)
{
    (void)state;
    static const struct { const char *map; int code; const char *says; } cases[] = {
        { "{}", -EINVAL, "weight_map is missing, empty" },
        { "[]", -EINVAL, "weight_map" },
        { "{\"x\":\"../s1.safetensors\"}", -EINVAL, "not given a file of this folder" },
        { "{\"x\":\"/etc/passwd\"}", -EINVAL, "not given a file of this folder" },
        { "{\"x\":7}", -EINVAL, "not given a file of this folder" },
        { "{\"x\":\"gone.safetensors\"}", -ENOENT, "gone.safetensors" },
        { "{\"x\":\"s1.safetensors\",\"x\":\"s1.safetensors\"}", -EINVAL,
          "s.safetensors.index.json: key 'x' is there twice" },
        { "{\"w\":\"s1.safetensors\"}", -EINVAL, "'w' is not in s1.safetensors" },
        { "{\"x\":\"s2.safetensors\",\"y\":\"s1.safetensors\"}", -EINVAL, "is not in" },
        { "{\"x\":\"s1.safetensors\",\"y\":\"s3.safetensors\"}", -EINVAL, "is also in" },
    };
    put("s1.safetensors", "{" T("x", "F32", "[1]", "[0,4]") "}", 4);
    put("s2.safetensors", "{" T("y", "U8", "[3]", "[0,3]") "}", 3);
    put("s3.safetensors", "{" T("y", "U8", "[3]", "[0,3]") "," T("x", "U8", "[1]", "[3,4]") "}", 4);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct safetensors *st;
        struct err err = {0};
        put_index(cases[i].map);
        int rc = open_index_file(&st, &err);
        if (rc != cases[i].code || !strstr(err.text, cases[i].says))
            fail_msg("%s: %d \"%s\"", cases[i].map, rc, err.text);
    }
}

/* ---- plans that cannot be written ----------------------------------------------------------- */

static void a_bad_plan_is_refused(void **state)
{
    (void)state;
    static const struct {
        struct st_tensor tensors[2];
        const char *says;
    } cases[] = {
        { { { "x", ST_F32, 1, { 1 } }, { "x", ST_F32, 1, { 2 } } }, "declared twice" },
        { { { "x", ST_F32, 1, { 1 } }, { "", ST_F32, 1, { 2 } } }, "no name" },
        { { { "x", ST_F32, 1, { 1 } }, { "a\nb", ST_F32, 1, { 2 } } }, "unprintable" },
        { { { "x", ST_F32, 1, { 1 } }, { "y", ST_F32, 2, { 1ull << 40, 1ull << 40 } } },
          "overflows" },
        { { { "x", ST_F32, 1, { 1ull << 58 } }, { "y", ST_F32, 1, { 1ull << 58 } } }, "large" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct st_layout l;
        struct err err = {0};
        int rc = st_layout_init(cases[i].tensors, 2, &l, &err);
        if (rc != -EINVAL || !strstr(err.text, cases[i].says))
            fail_msg("case %zu: %d \"%s\"", i, rc, err.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slices_of_many_writers_make_one_file),
        cmocka_unit_test(an_empty_file_of_no_tensors_is_fine),
        cmocka_unit_test(halves_round_to_nearest_even),
        cmocka_unit_test(every_half_that_is_read_is_written_back),
        cmocka_unit_test(f16_of_every_kind_is_read),
        cmocka_unit_test(other_dtypes_are_listed_but_not_numbers),
        cmocka_unit_test(a_range_beyond_the_end_is_refused),
        cmocka_unit_test(a_bad_header_is_one_clear_line),
        cmocka_unit_test(a_length_is_never_believed),
        cmocka_unit_test(what_is_no_file_is_refused),
        cmocka_unit_test(an_index_joins_its_shards),
        cmocka_unit_test(a_bad_index_is_one_clear_line),
        cmocka_unit_test(a_bad_plan_is_refused),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
