/* test_err.c - the one line of an error */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/err.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prefix_goes_before_the_text),
        cmocka_unit_test(no_err_is_fine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
