/* folder.c - makes a folder and those above it */
#include "common/folder.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/mem.h"

static int make_one(const char *path, mode_t mode, struct err *err)
{
    struct stat st;
    if (mkdir(path, mode) == 0)
        return 0;
    int error = errno;
    if (error == EEXIST && stat(path, &st) == 0)
        error = S_ISDIR(st.st_mode) ? 0 : ENOTDIR;
    return error ? err_set(err, -error, "%s: %s", path, strerror(error)) : 0;
}

int folder_make(const char *path, mode_t mode, struct err *err)
{
    char *part = xstrdup(path);
    int rc = 0;
    for (char *slash = part; rc == 0 && (slash = strchr(slash + 1, '/'));) {
        *slash = '\0';
        rc = make_one(part, mode, err);
        *slash = '/';
    }
    if (rc == 0)
        rc = make_one(path, mode, err);
    free(part);
    return rc;
}
