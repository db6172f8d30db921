/* test_json.c - what is read, what is refused, and that what is written reads back */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"
#include "common/mem.h"

static const struct {
    const char *shows, *text;
    int rc;
    const char *message;
} documents[] = {
    {"an object", "{\"a\": 1}", 0, NULL},
    {"white space around it, as in a padded header", " \n{\"a\":1}   ", 0, NULL},
    {"a number alone", "42", 0, NULL},
    {"bare Infinity", "{\"a\": Infinity, \"b\": -Infinity, \"c\": NaN}", 0, NULL},
    {"nothing", "", -EINVAL, "ends too early"},
    {"a cut object", "{\"a\": [1, 2", -EINVAL, "ends too early"},
    {"null as the document", "null", -EINVAL, "null"},
    {"something after the end", "{} x", -EINVAL, "byte 3"},
    {"two documents", "{} {}", -EINVAL, "byte 3"},
    {"a comma too many", "{\"a\": 1,}", -EINVAL, "byte 8"},
    {"single quotes", "{\"a\": 'x'}", -EINVAL, "byte 6"},
    {"a comment", "/* x */ {}", -EINVAL, "not JSON"},
    {"a key twice", "{\"a\": 1, \"b\": 2, \"a\": 1}", -EINVAL, "key 'a' is there twice"},
    {"a key twice, one of them escaped", "{\"a\": 1, \"\\u0061\": 1}", -EINVAL, "key 'a' is"},
    {"a key twice deep down", "[1, {\"x\": [null, {\"k\": 1.5, \"s\": \"}:\\\"\", \"k\": {}}]}]",
     -EINVAL, "key 'k' is there twice"},
    {"a key twice that would break the line", "{\"a\\n\": 1, \"a\\n\": 1}", -EINVAL, "key 'a?' is"},
    {"the same key in two objects", "{\"a\": {\"a\": 1}, \"b\": {\"a\": \":\"}}", 0, NULL},
    {"bytes that are no UTF-8", "{\"a\": \"\xff\xfe\"}", -EINVAL, "utf-8"},
};

static void documents_are_read_or_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof documents / sizeof *documents; i++) {
        struct json *v = NULL;
        struct err err = {0};
        const char *text = documents[i].text;
        int rc = json_parse(text, strlen(text), 1000, &v, &err);
        if (rc != documents[i].rc ||
            (documents[i].message && !strstr(err.text, documents[i].message)))
            fail_msg("%s: rc %d, '%s'", documents[i].shows, rc, err.text);
        json_destroy(v);
    }
}

static void infinities_are_read_and_written_as_null(void **state)
{
    (void)state;
    const char *text = "{\"up\": Infinity, \"down\": -Infinity, \"none\": NaN, \"x\": 0.5}";
    struct json *v;
    double x = 0;
    assert_int_equal(json_parse(text, strlen(text), 1000, &v, NULL), 0);
    assert_int_equal(json_get_double(v, "up", &x, NULL), 0);
    assert_true(isinf(x) && x > 0);
    assert_int_equal(json_get_double(v, "down", &x, NULL), 0);
    assert_true(isinf(x) && x < 0);
    assert_int_equal(json_get_double(v, "none", &x, NULL), 0);
    assert_true(isnan(x));
    json_destroy(v);

    struct json *o = json_new_object();
    json_put(o, "up", json_new_double(INFINITY));
    char *out = json_text(o, false);
    assert_string_equal(out, "{\"up\":null}");
    free(out);
    json_destroy(o);
}

static void limits_hold(void **state)
{
    (void)state;
    struct json *v = NULL;
    struct err err = {0};
    assert_int_equal(json_parse("[1,2,3]", 7, 6, &v, &err), -EFBIG);

    size_t depth = JSON_DEPTH_MAX + 1;
    char *deep = xcalloc(1, 2 * depth + 1);
    memset(deep, '[', depth);
    memset(deep + depth, ']', depth);
    assert_int_equal(json_parse(deep, 2 * depth, 1000, &v, &err), -EINVAL);
    assert_non_null(strstr(err.text, "deep"));
    free(deep);
    assert_int_equal(json_parse("{}\0{}", 5, 1000, &v, &err), -EINVAL);
    assert_null(v);
}

static void members_say_what_was_expected(void **state)
{
    (void)state;
    const char *text = "{\"n\": 70000, \"neg\": -1, \"f\": 2.5, \"whole\": 8.0, \"s\": \"x\","
                       " \"big\": 18446744073709551615, \"b\": true, \"nil\": null}";
    struct json *v;
    struct err err = {0};
    uint32_t u = 7;
    uint64_t big = 0;
    bool b = false;
    const char *s = NULL;
    assert_int_equal(json_parse(text, strlen(text), 1000, &v, NULL), 0);
    assert_int_equal(json_get_u32(v, "n", 0, 65535, &u, &err), -EINVAL);
    assert_string_equal(err.text, "key 'n' is 70000, expected a whole number from 0 to 65535");
    assert_int_equal(json_get_u32(v, "neg", 0, 9, &u, &err), -EINVAL);
    assert_int_equal(json_get_u32(v, "f", 0, 9, &u, &err), -EINVAL);
    assert_int_equal(json_get_u32(v, "s", 0, 9, &u, &err), -EINVAL);
    assert_int_equal(json_get_u32(v, "gone", 0, 9, &u, &err), -ENOENT);
    assert_int_equal(json_get_u32(v, "nil", 0, 9, &u, &err), -ENOENT);
    assert_int_equal(u, 7); /* untouched by all of these */
    assert_int_equal(json_get_u32(v, "whole", 0, 9, &u, &err), 0);
    assert_int_equal(u, 8);
    assert_int_equal(json_get_u64(v, "big", 0, UINT64_MAX, &big, &err), 0);
    assert_true(big == UINT64_MAX);
    assert_int_equal(json_get_bool(v, "b", &b, &err), 0);
    assert_true(b);
    assert_int_equal(json_get_bool(v, "n", &b, &err), -EINVAL);
    assert_int_equal(json_get_string(v, "s", &s, &err), 0);
    assert_string_equal(s, "x");
    assert_int_equal(json_get_string(v, "n", &s, &err), -EINVAL);
    json_destroy(v);
}

static void members_come_in_the_order_of_the_file(void **state)
{
    (void)state;
    const char *text = "{\"z\": 1, \"a\": {\"y\": 2}, \"m\": [3]}";
    struct json *v;
    char keys[8] = "";
    assert_int_equal(json_parse(text, strlen(text), 1000, &v, NULL), 0);
    for (struct json_iter i = json_iter(v); json_next(&i);)
        strcat(keys, i.key);
    assert_string_equal(keys, "zam");
    assert_int_equal(json_count(v), 3);
    assert_int_equal(json_count(json_get(v, "m")), 1);
    assert_null(json_at(json_get(v, "m"), 1));
    struct json_iter none = json_iter(json_get(v, "m"));
    assert_false(json_next(&none));
    json_destroy(v);
}

static void members_move_to_the_end(void **state)
{
    (void)state;
    struct json *to = json_new_object(), *from = json_new_object();
    json_put(to, "a", json_new_u64(1));
    json_put(from, "b", json_new_string("x"));
    json_put(from, "c", NULL);
    json_put_all(to, from);
    char *text = json_text(to, false);
    assert_string_equal(text, "{\"a\":1,\"b\":\"x\",\"c\":null}");
    free(text);
    json_destroy(to);
}

static void doubles_are_written_short_and_read_back_the_same(void **state)
{
    (void)state;
    static const double numbers[] = {0.1, 3e-3, 1.0 / 3, 1e300, -0.0, 2, DBL_MIN, DBL_MAX};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct json *v = json_new_double(numbers[i]);
        char *text = json_text(v, false);
        assert_true(strtod(text, NULL) == numbers[i]);
        if (i == 0)
            assert_string_equal(text, "0.1");
        free(text);
        json_destroy(v);
    }
}

static void foreign_bytes_become_valid_text(void **state)
{
    (void)state;
    struct json *v = json_new_array();
    json_push(v, json_new_string("a\xff" "b\n\x1b[2J \xc3\xa9 \xed\xa0\x80 \xe2\x82"));
    char *text = json_text(v, false);
    struct json *again;
    struct err err;
    assert_int_equal(json_parse(text, strlen(text), 1000, &again, &err), 0);
    assert_null(strchr(text, 0x1b));
    assert_string_equal(json_as_string(json_at(again, 0)), "a?b\n\x1b[2J \xc3\xa9 ??? ??");
    json_destroy(again);
    json_destroy(v);
    free(text);
}

static void files_are_named_in_errors(void **state)
{
    (void)state;
    struct json *v = NULL;
    struct err err;
    assert_int_equal(json_read_file("/nonexistent/x.json", 100, &v, &err), -ENOENT);
    assert_string_equal(err.text, "/nonexistent/x.json: No such file or directory");
    assert_int_equal(json_read_file("/tmp", 100, &v, &err), -EISDIR);
    assert_string_equal(err.text, "/tmp: Is a directory");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(documents_are_read_or_refused),
        cmocka_unit_test(infinities_are_read_and_written_as_null),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(members_say_what_was_expected),
        cmocka_unit_test(members_come_in_the_order_of_the_file),
        cmocka_unit_test(members_move_to_the_end),
        cmocka_unit_test(doubles_are_written_short_and_read_back_the_same),
        cmocka_unit_test(foreign_bytes_become_valid_text),
        cmocka_unit_test(files_are_named_in_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
