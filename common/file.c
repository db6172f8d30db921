/* file.c - opens what a person named without waiting for it
 *
 * It is opened before it is looked at, so that what has the name a moment later does not matter;
 * O_NONBLOCK keeps the opening of a pipe, or of a line without a carrier, from waiting. */
#include "common/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

int file_open(const char *path, struct stat *out_stat, struct err *err)
{
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK), rc = 0;
    if (fd < 0 && errno != ENXIO)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    if (fd >= 0 && fstat(fd, &s) < 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    else if (fd >= 0 && S_ISDIR(s.st_mode))
        rc = err_set(err, -EISDIR, "%s: %s", path, strerror(EISDIR));
    else if (fd < 0 || !S_ISREG(s.st_mode)) /* ENXIO: a socket */
        rc = err_set(err, -EINVAL, "%s: not a regular file", path);
    if (rc < 0) {
        if (fd >= 0)
            close(fd);
        return rc;
    }
    if (out_stat)
        *out_stat = s;
    return fd;
}

static FILE *stream_of(int fd, const char *path, const char *mode, struct err *err)
{
    FILE *f = fdopen(fd, mode);
    if (f)
        return f;
    err_set(err, -errno, "%s: %s", path, strerror(errno));
    close(fd);
    return NULL;
}

FILE *file_stream(const char *path, struct err *err)
{
    int fd = file_open(path, NULL, err);
    return fd < 0 ? NULL : stream_of(fd, path, "r", err);
}

FILE *file_create(const char *path, struct err *err)
{
    int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    int fd = open(path, flags, 0666);
    if (fd < 0) {
        err_set(err, -errno, "%s: %s", path, errno == ENXIO ? "a pipe that nobody reads"
                                                             : strerror(errno));
        return NULL;
    }
    int now = fcntl(fd, F_GETFL); /* writing may wait again */
    if (now >= 0)
        fcntl(fd, F_SETFL, now & ~O_NONBLOCK);
    return stream_of(fd, path, "w", err);
}

ssize_t file_read(int fd, void *out, size_t n)
{
    size_t at = 0;
    while (at < n) {
        ssize_t got = read(fd, (char *)out + at, n - at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0)
            break;
        at += (size_t)got;
    }
    return (ssize_t)at;
}

int file_write_at(int fd, const void *bytes, size_t n, uint64_t offset)
{
    for (size_t at = 0; at < n;) {
        ssize_t did = pwrite(fd, (const char *)bytes + at, n - at, (off_t)(offset + at));
        if (did < 0 && errno == EINTR)
            continue;
        if (did <= 0)
            return did < 0 ? -errno : -EIO;
        at += (size_t)did;
    }
    return 0;
}
