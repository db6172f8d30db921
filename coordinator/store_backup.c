/* store_backup.c - copies, checks, syncs and names a backup */
#include "coordinator/store_backup.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"

#define PAGES_PER_STEP 64

struct backup {
    char           *path, *part, *folder; /* owned */
    sqlite3        *copy;
    sqlite3_backup *transfer; /* NULL: the copying is over */
    void          (*finished)(void *context);
    void           *context;
    pthread_t       thread;
    bool            has_thread;
    uint64_t        n_bytes;
    int             rc;
    struct err      err;
};

/* ---- where it may lie ------------------------------------------------------------------------ */

static bool is_within(const char *folder, const char *parent)
{
    size_t n = strlen(parent);
    return !strncmp(folder, parent, n) && (!folder[n] || folder[n] == '/');
}

static int check_path(struct backup *b, const char *state_dir, struct err *err)
{
    struct stat st;
    char *copy = xstrdup(b->path), *state = realpath(state_dir, NULL);
    b->folder = realpath(dirname(copy), NULL);
    int rc = 0;
    if (!b->folder)
        rc = err_set(err, -errno, "%s: its folder: %s", b->path, strerror(errno));
    else if (state && is_within(b->folder, state))
        rc = err_set(err, -EINVAL, "%s: lies in state_dir; choose another folder, best on another "
                     "disk", b->path);
    else if (lstat(b->path, &st) == 0)
        rc = err_set(err, -EEXIST, "%s: exists; choose another name", b->path);
    free(copy);
    free(state);
    return rc;
}

static int make_part(struct backup *b, struct err *err)
{
    b->part = xasprintf("%s.part-XXXXXX", b->path);
    int fd = mkostemp(b->part, O_CLOEXEC); /* ours alone, mode 0600 */
    if (fd < 0) {
        int code = errno;
        free(b->part);
        b->part = NULL;
        return err_set(err, -code, "%s: cannot be made: %s", b->path, strerror(code));
    }
    close(fd);
    return 0;
}

static int fail(struct backup *b, const char *doing)
{
    b->rc = err_set(&b->err, sqlite3_errcode(b->copy) == SQLITE_FULL ? -ENOSPC : -EIO,
                    "%s: %s: %s", b->path, doing, sqlite3_errmsg(b->copy));
    return b->rc;
}

int backup_begin(sqlite3 *source, const char *state_dir, const char *path,
                 void (*finished)(void *context), void *context, struct backup **out_backup,
                 struct err *err)
{
    struct backup *b = xcalloc(1, sizeof *b);
    b->path = xstrdup(path);
    b->finished = finished;
    b->context = context;
    int rc = check_path(b, state_dir, err);
    if (rc == 0)
        rc = make_part(b, err);
    if (rc == 0 && sqlite3_open_v2(b->part, &b->copy, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX,
                                   NULL) != SQLITE_OK)
        rc = fail(b, "open");
    if (rc == 0 && !(b->transfer = sqlite3_backup_init(b->copy, "main", source, "main")))
        rc = fail(b, "begin");
    if (rc < 0) {
        struct err first = b->rc < 0 ? b->err : err ? *err : (struct err){0};
        uint64_t n_bytes;
        b->rc = rc;
        backup_end(b, &n_bytes, NULL);
        if (err)
            *err = first;
        return rc;
    }
    *out_backup = b;
    return 0;
}

/* ---- checked, synced, named: on the other thread --------------------------------------------- */

static int check_copy(struct backup *b)
{
    sqlite3_stmt *s = NULL;
    if (sqlite3_open_v2(b->part, &b->copy, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL) ||
        sqlite3_exec(b->copy, "PRAGMA locking_mode = EXCLUSIVE", NULL, NULL, NULL) ||
        sqlite3_prepare_v2(b->copy, "PRAGMA quick_check(1)", -1, &s, NULL))
        return fail(b, "check");
    int rc = sqlite3_step(s) == SQLITE_ROW ? 0 : fail(b, "check");
    const char *verdict = rc == 0 ? (const char *)sqlite3_column_text(s, 0) : "";
    if (rc == 0 && strcmp(verdict, "ok"))
        rc = b->rc = err_set(&b->err, -EBADMSG, "%s: the copy is damaged: %s", b->path, verdict);
    sqlite3_finalize(s);
    /* One file that stands alone, without a write-ahead log beside it. */
    if (rc == 0 && sqlite3_exec(b->copy, "PRAGMA journal_mode = DELETE", NULL, NULL, NULL))
        rc = fail(b, "close");
    sqlite3_close(b->copy);
    b->copy = NULL;
    return rc;
}

static int sync_path(struct backup *b, const char *path, int flags)
{
    struct stat st;
    int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0 || fsync(fd) || fstat(fd, &st))
        b->rc = err_set(&b->err, -errno, "%s: %s", path, strerror(errno));
    else if (S_ISREG(st.st_mode))
        b->n_bytes = (uint64_t)st.st_size;
    if (fd >= 0)
        close(fd);
    return b->rc;
}

static int give_name(struct backup *b)
{
    int rc = renameat2(AT_FDCWD, b->part, AT_FDCWD, b->path, RENAME_NOREPLACE);
    if (rc && errno == EINVAL && !(rc = link(b->part, b->path))) /* an old file system */
        unlink(b->part);
    if (rc)
        return b->rc = err_set(&b->err, -errno, "%s: cannot get its name: %s", b->path,
                               strerror(errno));
    free(b->part);
    b->part = NULL;
    return sync_path(b, b->folder, O_RDONLY | O_DIRECTORY);
}

static void *run(void *context)
{
    struct backup *b = context;
    pthread_setname_np(pthread_self(), "backup");
    if (check_copy(b) == 0 && sync_path(b, b->part, O_RDONLY) == 0)
        give_name(b);
    b->finished(b->context);
    return NULL;
}

/* ---- the copying ----------------------------------------------------------------------------- */

bool backup_is_copying(const struct backup *b)
{
    return b && b->transfer;
}

static void end_transfer(struct backup *b)
{
    if (b->transfer && sqlite3_backup_finish(b->transfer) != SQLITE_OK && b->rc == 0)
        fail(b, "copy");
    b->transfer = NULL;
    sqlite3_close(b->copy);
    b->copy = NULL;
}

void backup_step(struct backup *b)
{
    int rc = sqlite3_backup_step(b->transfer, PAGES_PER_STEP);
    if (rc == SQLITE_OK || rc == SQLITE_BUSY || rc == SQLITE_LOCKED)
        return;
    end_transfer(b);
    if (b->rc == 0 && pthread_create(&b->thread, NULL, run, b))
        b->rc = err_set(&b->err, -EAGAIN, "%s: no thread to check it", b->path);
    else if (b->rc == 0)
        b->has_thread = true;
    if (!b->has_thread)
        b->finished(b->context);
}

int backup_end(struct backup *b, uint64_t *out_bytes, struct err *err)
{
    if (b->transfer) {
        end_transfer(b);
        b->rc = err_set(&b->err, -ECANCELED, "%s: given up, the coordinator stops", b->path);
    }
    if (b->has_thread)
        pthread_join(b->thread, NULL);
    sqlite3_close(b->copy);
    if (b->part) {
        char *journal = xasprintf("%s-journal", b->part);
        unlink(b->part);
        unlink(journal);
        free(journal);
    }
    int rc = b->rc;
    *out_bytes = b->n_bytes;
    if (rc < 0 && err)
        *err = b->err;
    free(b->part);
    free(b->path);
    free(b->folder);
    free(b);
    return rc;
}
