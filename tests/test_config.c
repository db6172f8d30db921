/* test_config.c - a worker's file: defaults from the machine, and what is refused */
#include "worker/config.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/version.h"

#define BASE "coordinator: ipc:///tmp/c.sock\nstate_dir: /tmp/w\nallowed_roots: [/srv, data]\n"

static int read_text(const char *text, const char *device, struct worker_config *out_config,
                     struct err *err)
{
    char path[] = "/tmp/test_config.XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    int rc = worker_config_read(path, device, out_config, err);
    unlink(path);
    return rc;
}

static void what_is_not_said_comes_from_the_machine(void **unused)
{
    (void)unused;
    struct worker_config c;
    assert_int_equal(read_text(BASE, NULL, &c, NULL), 0);
    assert_string_equal(c.device, "cpu");
    assert_string_equal(c.log_level, "info");
    assert_int_equal(c.cores, 0);
    assert_true(strlen(c.node) > 0);
    assert_non_null(strstr(c.name, c.node));
    assert_non_null(strstr(c.name, "-cpu"));
    assert_int_equal(c.n_allowed_roots, 2);
    assert_string_equal(c.allowed_roots[1], "/tmp/data"); /* against the file's folder */
    worker_config_fini(&c);

    assert_int_equal(read_text(BASE "name: w7\nnode: n1\ncores: 3\n", "cpu", &c, NULL), 0);
    assert_string_equal(c.name, "w7");
    assert_string_equal(c.node, "n1");
    assert_int_equal(c.cores, 3);
    worker_config_fini(&c);
}

static void what_is_wrong_is_one_line(void **unused)
{
    (void)unused;
    static const struct {
        const char *what, *text, *device, *expected;
    } rows[] = {
        {"a key is missing", "coordinator: ipc:///tmp/c\nstate_dir: /tmp\n", NULL, "allowed_roots"},
        {"no roots", "coordinator: ipc:///tmp/c\nstate_dir: /tmp\nallowed_roots: []\n", NULL,
         "allowed_roots"},
        {"a typo", BASE "devise: cpu\n", NULL, "device"},
        {"a name with spaces", BASE "name: my worker\n", NULL, "my worker"},
        {"an address without keys",
         "coordinator: tcp://10.0.0.1:5\nstate_dir: /t\nallowed_roots: [/]\n", NULL, "coordinator"},
        {"no such device", BASE, "gpu", "cpu or cuda:N"},
        {"a device without a number", BASE, "cuda:", "cpu or cuda:N"},
        {"a device with letters", BASE "device: cuda:x\n", NULL, "cpu or cuda:N"},
        {"a level that is none", BASE "log_level: loud\n", NULL, "log_level"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct worker_config c;
        struct err err = {0};
        if (read_text(rows[i].text, rows[i].device, &c, &err) >= 0)
            fail_msg("%s: accepted", rows[i].what);
        if (!strstr(err.text, rows[i].expected) || strchr(err.text, '\n'))
            fail_msg("%s: '%s' is not in: %s", rows[i].what, rows[i].expected, err.text);
    }
}

static void a_gpu_needs_a_build_with_gpu_code(void **unused)
{
    (void)unused;
    struct worker_config c;
    struct err err = {0};
    int rc = read_text(BASE, "cuda:0", &c, &err);
    if (BALLAST_HAS_CUDA) {
        assert_int_equal(rc, 0);
        worker_config_fini(&c);
        return;
    }
    assert_int_equal(rc, -ENOTSUP);
    assert_non_null(strstr(err.text, "BALLAST_CUDA=on"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_not_said_comes_from_the_machine),
        cmocka_unit_test(what_is_wrong_is_one_line),
        cmocka_unit_test(a_gpu_needs_a_build_with_gpu_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
