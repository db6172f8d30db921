/* test_err.c - the one line of an error */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "common/err.h"
#include "common/tame.h"

static void a_prefix_goes_before_the_text(void **state)
{
    (void)state;
    struct err err = {0};
    assert_int_equal(err_set(&err, -EINVAL, "key '%s': unknown", "trian"), -EINVAL);
    assert_int_equal(err_prefix(&err, "%s:%d", "job.yaml", 3), -EINVAL);
    assert_string_equal(err.text, "job.yaml:3: key 'trian': unknown");
}

static void no_err_is_fine(void **state)
{
    (void)state;
    assert_int_equal(err_set(NULL, -ENOENT, "gone"), -ENOENT);
}

static void foreign_text_steers_no_terminal(void **state)
{
    (void)state;
    static const struct { const char *shows, *text, *expected; } rows[] = {
        {"letters of all kinds stay", "Gr\xc3\xb6\xc3\x9f" "e \xe6\xa8\xa1 \xf0\x9f\x98\x80",
         "Gr\xc3\xb6\xc3\x9f" "e \xe6\xa8\xa1 \xf0\x9f\x98\x80"},
        {"an error is one line", "a\nb\r\tc\x7f", "a?b??c?"},
        {"no sequence of the terminal's", "a\x1b[31m", "a?[31m"},
        {"nor one of the upper half", "a\xc2\x9b" "31m\xc2\xa0", "a??31m\xc2\xa0"},
        {"text goes on in its direction", "a\xe2\x80\xaegpj\xe2\x81\xa6", "a???gpj???"},
        {"what is no UTF-8, or cut short", "a\xff\xc0\x80 \xe6\xa8", "a??? ??"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct err err = {0};
        err_set(&err, -EINVAL, "%s", rows[i].text);
        if (strcmp(err.text, rows[i].expected))
            fail_msg("%s: got %s", rows[i].shows, err.text);
    }
    assert_int_equal(tame_printable("", 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prefix_goes_before_the_text),
        cmocka_unit_test(no_err_is_fine),
        cmocka_unit_test(foreign_text_steers_no_terminal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
