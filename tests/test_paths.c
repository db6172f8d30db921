/* test_paths.c - what lies under the allowed roots, links and missing folders included */
#include "worker/paths.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/mem.h"

struct folder {
    char  path[64];
    char *allowed[1];
};

static void make(const struct folder *f, const char *name, bool is_folder)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", f->path, name);
    if (is_folder) {
        assert_int_equal(mkdir(path, 0700), 0);
        return;
    }
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
}

static int set_up(void **state)
{
    struct folder *f = xcalloc(1, sizeof *f);
    strcpy(f->path, "/tmp/test_paths.XXXXXX");
    assert_non_null(mkdtemp(f->path));
    make(f, "in", true);
    make(f, "in/model", true);
    make(f, "in/a.txt", false);
    make(f, "in/b.txt", false);
    make(f, "inside-not", true);
    make(f, "out", true);
    make(f, "out/c.txt", false);
    char from[128], to[128];
    snprintf(from, sizeof from, "%s/out", f->path);
    snprintf(to, sizeof to, "%s/in/link", f->path);
    assert_int_equal(symlink(from, to), 0);
    make(f, "in/m.idx", false);
    make(f, "in/m.bin", false);
    make(f, "in/n1.idx", false);
    snprintf(from, sizeof from, "%s/out/c.txt", f->path);
    snprintf(to, sizeof to, "%s/in/n1.bin", f->path);
    assert_int_equal(symlink(from, to), 0);
    f->allowed[0] = xasprintf("%s/in", f->path);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct folder *f = *state;
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", f->path);
    int rc = system(command);
    free(f->allowed[0]);
    free(f);
    return rc;
}

static void paths_under_the_roots(void **state)
{
    struct folder *f = *state;
    static const struct {
        const char *what, *model, *data, *checkpoint;
        int rc;
        const char *text; /* in the error */
        const char *format;
    } rows[] = {
        {"all inside", "in/model", "in/*.txt", "in/model", 0, NULL},
        {"a checkpoint to be made", "in/model", "in/a.txt", "in/new/deep", 0, NULL},
        {"dots in a name", "in/model", "in/a.txt", "in/new..er/..x", 0, NULL},
        {"dots that stay inside", "in/model/../model", "in/a.txt", "in/new", 0, NULL},
        {"a pattern without a match", "in/model", "in/*.none", "in/new", 0, NULL},
        {"the root itself", "in", "in/a.txt", "in/new", 0, NULL},
        {"model outside", "out", "in/a.txt", "in/new", -EACCES, "model.path"},
        {"a name that only begins alike", "inside-not", "in/a.txt", "in/new", -EACCES, "model"},
        {"dots that leave", "in/../out", "in/a.txt", "in/new", -EACCES, "allowed_roots"},
        {"data through a link", "in/model", "in/link/c.txt", "in/new", -EACCES, "out/c.txt"},
        {"data by pattern through a link", "in/model", "in/*/c.txt", "in/new", -EACCES, "data"},
        {"checkpoint outside", "in/model", "in/a.txt", "out/new", -EACCES, "checkpoint.path"},
        {"checkpoint through a link", "in/model", "in/a.txt", "in/link/new", -EACCES, "/out/new"},
        {"up to the machine's root", "in/model", "in/a.txt", "../../none/new", -EACCES,
         "checkpoint.path: '/none/new'"},
        {"up from a missing folder", "in/model", "in/a.txt", "in/no/../../out", -EACCES, "up"},
        {"a prefix of two files", "in/model", "in/m", "in/new", 0, NULL, "megatron"},
        {"one of which is a link", "in/model", "in/n*", "in/new", -EACCES, "out/c.txt", "megatron"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
        char *data = xasprintf("%s/%s", f->path, rows[i].data);
        spec.model_path = xasprintf("%s/%s", f->path, rows[i].model);
        spec.checkpoint_path = xasprintf("%s/%s", f->path, rows[i].checkpoint);
        spec.data_train = &data;
        spec.n_data_train = 1;
        spec.data_format = (char *)(rows[i].format ? rows[i].format : "bytes");
        struct err err = {0};
        int rc = paths_check(&spec, f->allowed, 1, &err);
        if (rc != rows[i].rc)
            fail_msg("%s: %d (%s)", rows[i].what, rc, err.text);
        if (rows[i].text && !strstr(err.text, rows[i].text))
            fail_msg("%s: '%s' is not in: %s", rows[i].what, rows[i].text, err.text);
        assert_int_equal(paths_check(&spec, NULL, 0, NULL), -EACCES);
        free(data);
        free(spec.model_path);
        free(spec.checkpoint_path);
    }
}

static void relative_paths_are_refused(void **state)
{
    struct folder *f = *state;
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    spec.model_path = (char *)"in/model";
    assert_int_equal(paths_check(&spec, f->allowed, 1, NULL), -EACCES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(paths_under_the_roots, set_up, tear_down),
        cmocka_unit_test_setup_teardown(relative_paths_are_refused, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
