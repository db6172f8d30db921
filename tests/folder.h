/* folder.h - a folder of a test program's own, there while a group of tests runs
 *
 * make and remove are for cmocka_run_group_tests(tests, make_folder, remove_folder). */
#ifndef TESTS_FOLDER_H
#define TESTS_FOLDER_H

#include <stdlib.h>

#include "common/mem.h"

static inline void remove_tree(const char *path)
{
    char *command = xasprintf("rm -rf '%s'", path);
    if (system(command) != 0)
        abort();
    free(command);
}

static char folder[] = "/tmp/ballast-test-XXXXXX";

static inline int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static inline int remove_folder(void **state)
{
    (void)state;
    remove_tree(folder);
    return 0;
}

#endif
