/* test_bench.c - what bench prints, and that every case it knows can run */
#include "tests/gradcheck.h"

#include <errno.h>
#include <getopt.h>

#include "common/json.h"
#include "worker/bench.h"
#include "worker/bench_cases.h"

/* The output of one bench, freed with free(). */
static char *bench_text(const struct bench_options *o, int *out_rc, struct err *err)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *f = open_memstream(&text, &n_bytes);
    assert_non_null(f);
    *out_rc = bench_run(o, f, err);
    fclose(f);
    return text;
}

static void one_object_a_line(void **state)
{
    (void)state;
    struct bench_options o = {.op = "rms_norm", .n_threads = 1, .json = true};
    struct err err = {0};
    struct json *v = NULL;
    double ms, floor_ms, error;
    const char *op;
    int rc;
    char *text = bench_text(&o, &rc, &err);
    assert_int_equal(rc, 0);
    assert_int_equal(text[strlen(text) - 1], '\n');
    assert_int_equal(json_parse(text, strlen(text) - 1, 4096, &v, &err), 0);
    assert_int_equal(json_get_string(v, "op", &op, &err), 0);
    assert_string_equal(op, "rms_norm");
    assert_int_equal(json_get_double(v, "ms", &ms, &err), 0);
    assert_int_equal(json_get_double(v, "floor_ms", &floor_ms, &err), 0);
    assert_int_equal(json_get_double(v, "error_vs_reference", &error, &err), 0);
    assert_true(ms > 0 && floor_ms > 0 && error == 0);
    json_destroy(v);
    free(text);
}

static void unknown_names_are_refused(void **state)
{
    (void)state;
    static const struct {
        struct bench_options options;
        const char *text;
    } rows[] = {
        {{.op = "matmul"}, "op 'matmul': unknown"},
        {{.device = "tpu"}, "device 'tpu': expected cpu or cuda:N"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct err err = {0};
        int rc;
        char *text = bench_text(&rows[i].options, &rc, &err);
        assert_int_equal(rc, -EINVAL);
        assert_non_null(strstr(err.text, rows[i].text));
        assert_string_equal(text, "");
        free(text);
    }
}

/* The buffers that a case declares are the ones it uses: the sanitizers watch this. */
static void every_case_leaves_finite_numbers(void **state)
{
    (void)state;
    struct random r = {test_seed()};
    struct device *dev = test_device(2, false);
    const struct bench_case *found;
    for (size_t i = 0; (found = bench_case_at(i)); i++) {
        struct bench_case c = *found;
        float *in[BENCH_TENSORS_MAX], *out[BENCH_TENSORS_MAX];
        c.declare(&c, dev);
        assert_true(c.flops > 0 && c.bytes > 0);
        for (int k = 0; k < BENCH_TENSORS_MAX; k++) {
            in[k] = random_floats(&r, c.n_in[k], c.width[k] / 4);
            out[k] = zeros(c.n_out[k]);
        }
        c.run(&c, dev, in, out);
        for (int k = 0; k < BENCH_TENSORS_MAX; k++) {
            if (!all_finite(dev, out[k], c.n_out[k]))
                fail_msg("%s: output %d is not finite", c.op, k);
            free(in[k]);
            free(out[k]);
        }
    }
    dev->ops->close(dev);
}

static void wrong_options_are_usage_errors(void **state)
{
    static const char *const rows[][4] = {
        {"bench", "--ranks", "2"},   {"bench", "--cluster", "--ranks", "65"},
        {"bench", "--ranks", "0"},   {"bench", "--threads", "-1"},
        {"bench", "--threads", "x"}, {"bench", "rms_norm"},
        {"bench", "--fast"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *argv[5] = {NULL};
        int argc = 0;
        while (argc < 4 && rows[i][argc]) {
            argv[argc] = xstrdup(rows[i][argc]);
            argc++;
        }
        optind = 0; /* getopt begins anew */
        assert_int_equal(bench_main(argc, argv), 2);
        while (argc)
            free(argv[--argc]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_object_a_line),
        cmocka_unit_test(unknown_names_are_refused),
        cmocka_unit_test(every_case_leaves_finite_numbers),
        cmocka_unit_test(wrong_options_are_usage_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
