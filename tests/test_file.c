/* test_file.c - what is no regular file is told in a line and never waited for, wherever somebody
 * may name it */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/conf.h"
#include "common/csv.h"
#include "common/file.h"
#include "common/json.h"
#include "common/keyring.h"
#include "common/safetensors.h"
#include "common/tensor_list.h"
#include "coordinator/server.h"
#include "worker/ckpt_beside.h"
#include "tests/folder.h"

static const char *path_of(const char *name)
{
    static char path[sizeof folder + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void make_things(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(at.sun_path, sizeof at.sun_path, "%s/socket", folder);
    assert_true(s >= 0 && bind(s, (struct sockaddr *)&at, sizeof at) == 0);
    close(s);
    assert_int_equal(mkfifo(path_of("pipe"), 0600), 0);
    assert_int_equal(mkfifo(path_of("tensors.tsv"), 0600), 0);
    assert_int_equal(symlink("pipe", path_of("link")), 0);
}

static void only_regular_files_are_opened(void **state)
{
    (void)state;
    struct err err = {0};
    static const struct { const char *shows, *path, *why; } rows[] = {
        {"a pipe that nobody writes", "pipe", "not a regular file"},
        {"a link to one", "link", "not a regular file"},
        {"a socket", "socket", "not a regular file"},
        {"a folder", ".", "Is a directory"},
        {"nothing", "nothing", "No such file or directory"},
    };
    make_things();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char expected[256];
        const char *path = path_of(rows[i].path);
        snprintf(expected, sizeof expected, "%s: %s", path, rows[i].why);
        assert_true(file_open(path, NULL, &err) < 0);
        if (strcmp(err.text, expected))
            fail_msg("%s: got %s", rows[i].shows, err.text);
        assert_null(file_stream(path, &err));
        assert_string_equal(err.text, expected);
    }
    assert_int_equal(file_open("/dev/zero", NULL, &err), -EINVAL);
    assert_string_equal(err.text, "/dev/zero: not a regular file");
}

static void a_regular_file_is_read(void **state)
{
    (void)state;
    struct err err;
    struct stat s;
    char text[8] = "";
    FILE *f = file_create(path_of("text"), &err);
    assert_non_null(f);
    fputs("four", f);
    assert_int_equal(fclose(f), 0);
    int fd = file_open(path_of("text"), &s, &err);
    assert_true(fd >= 0);
    assert_int_equal(s.st_size, 4);
    assert_int_equal(read(fd, text, sizeof text), 4);
    assert_string_equal(text, "four");
    close(fd);
}

static void a_pipe_is_written_if_somebody_reads_it(void **state)
{
    (void)state;
    struct err err;
    char expected[256];
    assert_null(file_create(path_of("pipe"), &err));
    snprintf(expected, sizeof expected, "%s: a pipe that nobody reads", path_of("pipe"));
    assert_string_equal(err.text, expected);
    int reader = open(path_of("pipe"), O_RDONLY | O_NONBLOCK);
    assert_true(reader >= 0);
    FILE *f = file_create(path_of("pipe"), &err);
    assert_non_null(f);
    assert_false(fcntl(fileno(f), F_GETFL) & O_NONBLOCK); /* a slow reader is waited for */
    fclose(f);
    close(reader);
}

/* Each would hang this test. */
static void whoever_opens_it_does_not_wait(void **state)
{
    (void)state;
    static const struct csv_column columns[] = {{.name = "layer"}};
    struct err err = {0};
    struct server_config config;
    struct csv csv;
    struct json *o;
    struct key key;
    struct safetensors *st;
    struct tensor_list list;
    const char *pipe = path_of("link");
    char copy[128];
    assert_int_equal(conf_read(pipe, &server_config_table, &config, &err), -EINVAL);
    assert_non_null(strstr(err.text, "link: not a regular file; - reads what is piped in"));
    assert_int_equal(csv_open(&csv, pipe, columns, 1, &err), -EINVAL);
    csv_close(&csv);
    assert_int_equal(json_read_file(pipe, 100, &o, &err), -EINVAL);
    assert_int_equal(key_read(pipe, &key, &err), -EINVAL);
    assert_int_equal(tensor_list_read(folder, &list, &err), -EINVAL);
    assert_non_null(strstr(err.text, "tensors.tsv: not a regular file"));
    snprintf(copy, sizeof copy, "%s", path_of("copy"));
    assert_int_equal(ckpt_copy_file(path_of("pipe"), copy, &err), -EINVAL);
    assert_int_equal(symlink("pipe", path_of("model.safetensors")), 0);
    assert_int_equal(safetensors_open(folder, &st, &err), -EINVAL);
    assert_non_null(strstr(err.text, "model.safetensors: not a regular file"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_regular_files_are_opened),
        cmocka_unit_test(a_regular_file_is_read),
        cmocka_unit_test(a_pipe_is_written_if_somebody_reads_it),
        cmocka_unit_test(whoever_opens_it_does_not_wait),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
