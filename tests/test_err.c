/* test_err.c - the one line of an error */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/clock.h"
#include "common/err.h"
#include "common/log.h"
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

/* What a second's warnings may come to, and that what is left out is told in the next. */
static void warnings_fill_no_disk(void **state)
{
    (void)state;
    char line[256];
    int n_lines = 0, own = dup(STDERR_FILENO);
    unsigned n_left_out = 0;
    FILE *out = tmpfile();
    assert_non_null(out);
    dup2(fileno(out), STDERR_FILENO);
    uint64_t from_ns = clock_now_ns();
    for (int i = 0; i < 5000; i++)
        log_warn("peer=%d msg=\"refused\"", i);
    log_error("msg=\"no warning, and always said\"");
    uint64_t seconds = (clock_now_ns() - from_ns) / 1000000000 + 2;
    usleep(1100 * 1000);
    log_warn("msg=\"of the next second\"");
    dup2(own, STDERR_FILENO);
    close(own);
    rewind(out);
    bool has_error = false, has_next = false;
    while (fgets(line, sizeof line, out)) {
        const char *left = strstr(line, "left_out=");
        n_lines++;
        n_left_out += left ? (unsigned)atoi(left + 9) : 0;
        has_error = has_error || strstr(line, "always said");
        has_next = has_next || strstr(line, "next second");
    }
    fclose(out);
    assert_true(has_error && has_next && n_left_out > 0);
    assert_true(n_lines <= (int)(101 * seconds) + 3);
}

/* A pipe, or a socket as of a service, that nobody reads: this test would hang. */
static void a_full_log_stops_nobody(void **state)
{
    (void)state;
    for (int is_socket = 0; is_socket < 2; is_socket++) {
        static char text[1 << 20];
        int ends[2], own = dup(STDERR_FILENO);
        assert_int_equal(is_socket ? socketpair(AF_UNIX, SOCK_STREAM, 0, ends) : pipe(ends), 0);
        dup2(ends[1], STDERR_FILENO);
        log_init("test", LOG_INFO);
        for (int i = 0; i < 20000; i++)
            log_info("n=%d msg=\"a line that is in nobody's way and long enough to matter\"", i);
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        size_t n = 0;
        for (ssize_t got; (got = read(ends[0], text + n, sizeof text - 1 - n)) > 0;)
            n += (size_t)got;
        text[n] = '\0';
        bool was_shared = fcntl(ends[1], F_GETFL) & O_NONBLOCK;
        int n_lines = 0;
        for (const char *at = text; (at = strchr(at, '\n')) != NULL; at++)
            n_lines++;
        log_info("msg=\"it is read again\"");
        ssize_t got = read(ends[0], text, sizeof text - 1);
        dup2(own, STDERR_FILENO);
        log_init("test", LOG_INFO);
        close(own);
        close(ends[0]);
        close(ends[1]);
        assert_false(was_shared);
        assert_true(n_lines > 0 && n_lines < 20000 && got > 0);
        text[got] = '\0';
        const char *left = strstr(text, "left_out=");
        assert_non_null(left);
        assert_int_equal(atoi(left + 9), 20000 - n_lines);
        assert_non_null(strstr(left, "it is read again"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prefix_goes_before_the_text),
        cmocka_unit_test(no_err_is_fine),
        cmocka_unit_test(foreign_text_steers_no_terminal),
        cmocka_unit_test(warnings_fill_no_disk),
        cmocka_unit_test(a_full_log_stops_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
