/* spool.c - a file whose stored part is punched out, and a bucket of bytes that fills with time */
#include "worker/spool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/mem.h"

#define PAGE_BYTES 4096u

struct spool {
    int fd;
    char *path;
    uint64_t n_bytes, n_trimmed, n_dropped;
    uint64_t n_allowed; /* in the bucket */
    uint64_t filled_ns; /* when it was last filled */
};

int spool_open(const char *path, struct spool **out_spool, struct err *err)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), rc = 0;
    if (fd < 0) {
        err_set(err, -errno, "cannot make '%s' for a trainer's output: %s", path, strerror(errno));
        if ((fd = memfd_create("output", MFD_CLOEXEC)) < 0)
            return -errno;
        rc = 1;
    }
    struct spool *s = xcalloc(1, sizeof *s);
    s->fd = fd;
    s->path = xstrdup(path);
    s->n_allowed = SPOOL_BURST_BYTES;
    *out_spool = s;
    return rc;
}

static void spool_fill(struct spool *s, uint64_t now_ns)
{
    if (s->filled_ns && now_ns > s->filled_ns) {
        double more = (double)(now_ns - s->filled_ns) / NS_PER_S * SPOOL_RATE_BYTES_PER_S;
        double all = (double)s->n_allowed + more;
        s->n_allowed = all < SPOOL_BURST_BYTES ? (uint64_t)all : SPOOL_BURST_BYTES;
    }
    s->filled_ns = now_ns;
}

void spool_write(struct spool *s, const void *bytes, size_t n_bytes, uint64_t now_ns)
{
    spool_fill(s, now_ns);
    uint64_t n_free = SPOOL_BYTES_MAX - (s->n_bytes - s->n_trimmed);
    size_t n = n_bytes;
    if (n > n_free)
        n = n_free;
    if (n > s->n_allowed)
        n = s->n_allowed;
    ssize_t n_written = n ? pwrite(s->fd, bytes, n, (off_t)s->n_bytes) : 0;
    if (n_written < 0)
        n_written = 0;
    s->n_bytes += (size_t)n_written;
    s->n_allowed -= (size_t)n_written;
    s->n_dropped += n_bytes - (size_t)n_written;
}

ssize_t spool_read(const struct spool *s, uint64_t offset, void *out_bytes, size_t n_bytes)
{
    ssize_t n = pread(s->fd, out_bytes, n_bytes, (off_t)offset);
    return n < 0 ? -errno : n;
}

void spool_trim(struct spool *s, uint64_t offset)
{
    uint64_t until = (offset < s->n_bytes ? offset : s->n_bytes) / PAGE_BYTES * PAGE_BYTES;
    if (until <= s->n_trimmed)
        return;
    /* Where holes cannot be punched the file keeps its space and so its bound. */
    if (fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)s->n_trimmed,
                  (off_t)(until - s->n_trimmed)) == 0)
        s->n_trimmed = until;
}

uint64_t spool_bytes(const struct spool *s)
{
    return s->n_bytes;
}

uint64_t spool_dropped_bytes(const struct spool *s)
{
    return s->n_dropped;
}

void spool_close(struct spool *s)
{
    if (!s)
        return;
    close(s->fd);
    unlink(s->path); /* of one in memory there is none */
    free(s->path);
    free(s);
}
