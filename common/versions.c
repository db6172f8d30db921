/* versions.c - the one list of versions */
#include "common/versions.h"

#include <stdio.h>

#include "common/version.h"

const struct version_row version_rows[] = {
    {"version", BALLAST_VERSION},
    {"commit", sizeof BALLAST_COMMIT > 1 ? BALLAST_COMMIT : "unknown"},
    {"cuda", BALLAST_CUDA_VERSION},
    {"nccl", BALLAST_NCCL_VERSION},
    {"sqlite", BALLAST_SQLITE_VERSION},
    {"zeromq", BALLAST_ZMQ_VERSION},
    {"libuv", BALLAST_UV_VERSION},
};
const size_t n_version_rows = sizeof version_rows / sizeof *version_rows;

void version_print(const char *program)
{
    printf("%s %s (commit %s)\n", program, version_rows[0].text, version_rows[1].text);
    for (size_t i = 2; i < n_version_rows; i++)
        printf("%-9s %s\n", version_rows[i].name, version_rows[i].text);
}
