/* store_folder.c - the state folder is one process's: a lock with its number in it */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "coordinator/store_parts.h"
#include "common/folder.h"

static int lock_file(const char *state_dir, int fd, const char *path, struct err *err)
{
    char pid[32] = "";
    if (flock(fd, LOCK_EX | LOCK_NB)) {
        if (pread(fd, pid, sizeof pid - 1, 0) < 0)
            pid[0] = 0;
        return err_set(err, -EBUSY, "state_dir '%s': in use by another coordinator%s%s", state_dir,
                       *pid ? ", process " : "", pid);
    }
    int n = snprintf(pid, sizeof pid, "%d", (int)getpid());
    if (ftruncate(fd, 0) || pwrite(fd, pid, (size_t)n, 0) != n)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    return 0;
}

int folder_take(const char *state_dir, int *out_fd, struct err *err)
{
    if (folder_make(state_dir, 0700, err) < 0)
        return err_prefix(err, "state_dir '%s': cannot be made", state_dir);
    char *path = xasprintf("%s/lock", state_dir);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    int rc = fd < 0 ? err_set(err, -errno, "%s: %s", path, strerror(errno))
                    : lock_file(state_dir, fd, path, err);
    if (rc == 0)
        *out_fd = fd;
    else if (fd >= 0)
        close(fd);
    free(path);
    return rc;
}
