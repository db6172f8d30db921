/* store_log.c - a rank's output in STATE_DIR/logs/JOB/RANK.log, over all attempts
 *
 * Chunks count bytes within their attempt, and come again after either side was away; so each
 * attempt's first byte has its place in the file noted (a segment), and a chunk is written where
 * it belongs or skipped. The note is durable before the bytes are: a crash between them leaves a
 * segment without bytes, which the next chunk fills. A segment also tells when its bytes came, so
 * what comes later begins another one. */
#include "coordinator/store_bind.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file.h"

#define LOG_FILE_BYTES_MAX (64u << 20) /* of one rank */
#define LATER_NS           (250 * (int64_t)NS_PER_MS)
#define TIMES_MAX          4096        /* of one answer */

static const char full_notice[] = "[ballast: this log has reached 64 MiB, the rest is not kept]\n";

struct segment {
    uint64_t file_offset, attempt_offset;
    uint32_t attempt; /* 0: none */
    int64_t  at_ns;
};

static char *log_path(const struct store_tables *t, job_id job, uint32_t rank)
{
    return xasprintf("%s/%" PRIu64 "/%u.log", t->logs_dir, job, rank);
}

static int find_last_segment(struct store_tables *t, job_id job, uint32_t rank,
                             struct segment *out, struct err *err)
{
    sqlite3_stmt *s = tables_statement(t, S_SEGMENT_LAST);
    sqlite3_bind_int64(s, 1, (sqlite3_int64)job);
    sqlite3_bind_int64(s, 2, rank);
    int rc = db_next(s, err);
    *out = (struct segment){0};
    if (rc <= 0)
        return rc;
    out->file_offset = (uint64_t)sqlite3_column_int64(s, 0);
    out->attempt = (uint32_t)sqlite3_column_int64(s, 1);
    out->attempt_offset = (uint64_t)sqlite3_column_int64(s, 2);
    out->at_ns = sqlite3_column_int64(s, 3);
    sqlite3_reset(s);
    return 0;
}

static int add_segment(struct store_tables *t, const Ballast__LogChunk *c,
                       const struct segment *added, struct err *err)
{
    struct binder b = bind(t, S_SEGMENT_NEW);
    put_int(&b, c->job_id);
    put_int(&b, c->rank);
    put_int(&b, added->file_offset);
    put_int(&b, added->attempt);
    put_int(&b, added->attempt_offset);
    put_int(&b, (uint64_t)added->at_ns);
    return db_run(b.s, err);
}

static int write_at(int fd, const void *bytes, size_t n_bytes, uint64_t offset, struct err *err)
{
    int rc = file_write_at(fd, bytes, n_bytes, offset);
    return rc < 0 ? err_set(err, rc, "rank log: %s", strerror(-rc)) : 0;
}

static int open_log(struct store_tables *t, const Ballast__LogChunk *c, int *out_fd,
                    uint64_t *out_size, struct err *err)
{
    char *path = log_path(t, c->job_id, c->rank);
    int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    int fd = open(path, flags, 0600);
    if (fd < 0 && errno == ENOENT) {
        char *slash = strrchr(path, '/');
        *slash = 0;
        mkdir(path, 0700); /* whatever is wrong with it, open will say */
        *slash = '/';
        fd = open(path, flags, 0600);
    }
    struct stat st;
    int rc = 0;
    if (fd < 0 || fstat(fd, &st))
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    free(path);
    if (rc < 0) {
        if (fd >= 0)
            close(fd);
        return rc;
    }
    *out_fd = fd;
    *out_size = (uint64_t)st.st_size;
    return 0;
}

/* Output that went missing before this chunk is told in the log itself. */
static int write_gap(int fd, uint64_t n_missing, uint64_t *size, struct err *err)
{
    char line[80];
    int n = snprintf(line, sizeof line, "[ballast: %" PRIu64 " bytes of output are missing here]\n",
                     n_missing);
    int rc = write_at(fd, line, (size_t)n, *size, err);
    *size += (size_t)n;
    return rc;
}

/* The chunk belongs to the newest attempt: put what is new of it where it belongs. */
static int write_chunk(struct store_tables *t, int fd, uint64_t size, const struct segment *last,
                       const Ballast__LogChunk *c, int64_t at_ns, struct err *err)
{
    int rc = 0;
    if (size < last->file_offset)
        size = last->file_offset;
    uint64_t stored = last->attempt_offset + (size - last->file_offset);
    uint64_t end = c->offset + c->bytes.len;
    bool is_first = last->attempt != c->attempt, is_gap = !is_first && c->offset > stored;
    bool is_later = size > last->file_offset &&
        (at_ns < last->at_ns || at_ns - last->at_ns >= LATER_NS);
    if (!is_first && end <= stored)
        return 0;
    if (is_gap && (rc = write_gap(fd, c->offset - stored, &size, err)) < 0)
        return rc;
    if (is_first || is_gap)
        stored = c->offset;
    if ((is_first || is_gap || is_later) &&
        (rc = add_segment(t, c, &(struct segment){size, stored, c->attempt, at_ns}, err)) < 0)
        return rc;
    uint64_t n_skip = stored - c->offset;
    rc = write_at(fd, c->bytes.data + n_skip, c->bytes.len - n_skip, size, err);
    size += c->bytes.len - n_skip;
    if (rc == 0 && size >= LOG_FILE_BYTES_MAX)
        rc = write_at(fd, full_notice, sizeof full_notice - 1, size, err);
    return rc;
}

int log_write(struct store_tables *t, struct store_log *log, int64_t at_ns, struct err *err)
{
    const Ballast__LogChunk *c = log->chunk;
    struct segment last;
    uint64_t size;
    int fd, rc = find_last_segment(t, c->job_id, c->rank, &last, err);
    if (rc < 0)
        return rc;
    if (c->attempt < last.attempt || !c->bytes.len) {
        log->stored_offset = c->offset + c->bytes.len; /* an older attempt's rest has no place */
        return 0;
    }
    if ((rc = open_log(t, c, &fd, &size, err)) < 0)
        return rc;
    if (size < LOG_FILE_BYTES_MAX)
        rc = write_chunk(t, fd, size, &last, c, at_ns, err);
    close(fd);
    if (rc == 0)
        log->stored_offset = c->offset + c->bytes.len;
    return rc;
}

static int read_times(struct store_tables *t, struct store_read *r)
{
    struct binder b = bind(t, S_SEGMENT_TIMES);
    int rc;
    put_int(&b, r->job);
    put_int(&b, r->rank);
    put_int(&b, r->from);
    put_int(&b, r->next);
    put_int(&b, TIMES_MAX);
    while ((rc = db_next(b.s, &r->err)) > 0) {
        Ballast__LogTime *time = arena_alloc(&r->arena, sizeof *time);
        ballast__log_time__init(time);
        time->offset = int_at(b.s, 0) > r->from ? int_at(b.s, 0) : r->from;
        time->at_ns = sqlite3_column_int64(b.s, 1);
        PUSH(&r->arena, r->times, r->n_times, time);
    }
    return rc;
}

int log_read(struct store_tables *t, struct store_read *r)
{
    char *path = log_path(t, r->job, r->rank);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    free(path);
    r->next = r->from;
    struct stat st;
    if (fd < 0)
        return errno == ENOENT ? 0 : err_set(&r->err, -errno, "rank log: %s", strerror(errno));
    if (fstat(fd, &st) == 0)
        r->total = (uint64_t)st.st_size;
    if (r->last)
        r->next = r->from = r->total > r->last ? r->total - r->last : 0;
    r->bytes = arena_alloc(&r->arena, r->limit);
    ssize_t n = pread(fd, r->bytes, r->limit, (off_t)r->from);
    int rc = n < 0 ? err_set(&r->err, -errno, "rank log: %s", strerror(errno)) : 0;
    close(fd);
    if (rc == 0) {
        r->n_bytes = (size_t)n;
        r->next = r->from + (uint64_t)n;
    }
    return rc == 0 && r->with_times && r->n_bytes ? read_times(t, r) : rc;
}
