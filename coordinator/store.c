/* store.c - the writer thread: takes what waits, commits it together, gives it back
 *
 * Between groups it tends the expert load and copies a backup on. Step and load reports are
 * committed before records: a batch whose
 * records are durable then has them too, and a crash between both commits repeats reports, which
 * replace themselves or are known already. */
#include "coordinator/store.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "coordinator/store_backup.h"
#include "coordinator/store_load.h"
#include "coordinator/store_parts.h"

#define WAL_PAGES_IDLE 256  /* checkpointed when nothing has come for QUIET_NS */
#define WAL_PAGES_BUSY 4096 /* checkpointed in any case */
#define QUIET_NS       (100 * NS_PER_MS)
#define GROUP_MAX      256  /* batches in one commit */
#define TEND_NS        (2 * NS_PER_S) /* how often what is too old is looked for */

struct list {
    struct store_batch *first, *last;
};

struct store {
    char  *state_dir; /* owned */
    int    lock_fd;
    void (*notify)(void *context);
    void  *context;
    struct store_tables tables; /* the writer's while it runs, and so are these */
    int    state_wal_pages, stats_wal_pages; /* since the last checkpoint */
    pthread_t       writer;
    bool            has_writer;
    struct backup      *backup;       /* the writer's: the one under way */
    struct store_batch *backup_batch; /* that asked for it */
    uint64_t            tend_ns;      /* the writer's: when to tend the load again */

    pthread_mutex_t lock;       /* over the rest */
    pthread_cond_t  wake;
    struct list     waiting, done;
    bool            is_stopping, is_failed;
    bool            backup_is_over;
};

static void list_push(struct list *l, struct store_batch *b)
{
    b->next = NULL;
    if (l->last)
        l->last->next = b;
    else
        l->first = b;
    l->last = b;
}

/* ---- the writer ------------------------------------------------------------------------------ */

static int write_all_reports(struct store *s, struct store_batch *first, struct err *err)
{
    struct store_tables *t = &s->tables;
    bool has_begun = false;
    int rc = 0;
    for (struct store_batch *b = first; rc == 0 && b; b = b->next) {
        if ((b->n_steps || b->n_loads) && !has_begun) {
            rc = db_run(tables_statement(t, S_STATS_BEGIN), err);
            has_begun = rc == 0;
        }
        for (size_t i = 0; rc == 0 && i < b->n_steps; i++)
            rc = write_steps(t, &b->steps[i], err);
        for (size_t i = 0; rc == 0 && i < b->n_loads; i++)
            rc = load_write(t, &b->loads[i], b->wall_ns, err);
        if (b->n_loads && !s->tend_ns)
            s->tend_ns = clock_now_ns() + TEND_NS;
    }
    if (rc == 0 && has_begun)
        rc = db_run(tables_statement(t, S_STATS_COMMIT), err);
    if (rc < 0 && !sqlite3_get_autocommit(t->stats))
        db_run(tables_statement(t, S_STATS_ROLLBACK), NULL);
    return rc;
}

static int mark_seq(struct store_tables *t, record_seq seq, struct err *err)
{
    sqlite3_stmt *s = tables_statement(t, S_MARK);
    sqlite3_bind_text(s, 1, "seq", -1, SQLITE_STATIC);
    sqlite3_bind_int64(s, 2, (sqlite3_int64)seq);
    return db_run(s, err);
}

static int write_all_records(struct store *s, struct store_batch *first, struct err *err)
{
    struct store_tables *t = &s->tables;
    record_seq seq = 0;
    int rc = 0;
    for (struct store_batch *b = first; rc == 0 && b; b = b->next) {
        for (size_t i = 0; rc == 0 && i < b->n_records; i++) {
            if (!seq)
                rc = db_run(tables_statement(t, S_BEGIN), err);
            if (rc == 0)
                rc = write_record(t, b->records[i], err);
            seq = b->records[i]->seq;
        }
    }
    if (rc == 0 && seq && (rc = mark_seq(t, seq, err)) == 0)
        rc = db_run(tables_statement(t, S_COMMIT), err);
    if (rc < 0 && !sqlite3_get_autocommit(t->state))
        db_run(tables_statement(t, S_ROLLBACK), NULL);
    return rc;
}

/* All batches of a group share their fate. */
static void commit_group(struct store *s, struct store_batch *first)
{
    struct err err = {0};
    uint64_t begun_ns = clock_now_ns();
    pthread_mutex_lock(&s->lock);
    bool is_failed = s->is_failed;
    pthread_mutex_unlock(&s->lock);
    int rc = is_failed ? err_set(&err, -ECANCELED, "a batch before this one was not stored") : 0;
    if (rc == 0 && (rc = write_all_reports(s, first, &err)) == 0)
        rc = write_all_records(s, first, &err);
    if (rc < 0 && !is_failed) {
        log_error("msg=\"nothing was stored: %s\"", err.text);
        pthread_mutex_lock(&s->lock);
        s->is_failed = true;
        pthread_mutex_unlock(&s->lock);
    }
    bool has_written = false;
    for (struct store_batch *b = first; b; b = b->next) {
        has_written = has_written || b->n_records || b->n_steps || b->n_loads;
        b->rc = rc;
        b->err = err;
    }
    if (has_written)
        first->commit_ns = clock_now_ns() - begun_ns;
}

static void write_logs(struct store *s, struct store_batch *b)
{
    for (size_t i = 0; i < b->n_logs; i++) {
        struct err err = {0};
        if (log_write(&s->tables, &b->logs[i], b->wall_ns, &err) < 0) {
            b->logs[i].stored_offset = b->logs[i].chunk->offset;
            log_warn("job=%" PRIu64 " rank=%u msg=\"output not stored, the worker will say it "
                     "again: %s\"", b->logs[i].chunk->job_id, b->logs[i].chunk->rank, err.text);
        }
    }
}

/* ---- backups --------------------------------------------------------------------------------- */

/* On the backup's thread, or the writer's. */
static void on_backup_over(void *context)
{
    struct store *s = context;
    pthread_mutex_lock(&s->lock);
    s->backup_is_over = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

/* True if the batch is kept until its copy is there. */
static bool begin_backup(struct store *s, struct store_batch *b)
{
    struct store_read *r = b->reads;
    if (s->backup)
        r->rc = err_set(&r->err, -EBUSY, "another backup is under way");
    else
        r->rc = backup_begin(s->tables.state, s->state_dir, r->path, on_backup_over, s,
                             &s->backup, &r->err);
    if (r->rc == 0)
        s->backup_batch = b;
    return r->rc == 0;
}

static bool backup_was_told(struct store *s)
{
    pthread_mutex_lock(&s->lock);
    bool is_over = s->backup_is_over;
    pthread_mutex_unlock(&s->lock);
    return is_over;
}

/* Hands back the batch that asked for it. */
static void end_backup(struct store *s)
{
    struct store_read *r = s->backup_batch->reads;
    r->rc = backup_end(s->backup, &r->total, &r->err);
    if (r->rc < 0)
        log_warn("msg=\"backup: %s\"", r->err.text);
    else
        log_info("bytes=%" PRIu64 " path=%s msg=\"backup written\"", r->total, r->path);
    s->backup = NULL;
    pthread_mutex_lock(&s->lock);
    s->backup_is_over = false;
    list_push(&s->done, s->backup_batch);
    s->backup_batch = NULL;
    pthread_mutex_unlock(&s->lock);
    s->notify(s->context);
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* Takes the batch out of the group if it is not served yet. */
static void serve_group(struct store *s, struct list *group)
{
    struct list served = {0};
    commit_group(s, group->first);
    for (struct store_batch *b = group->first, *next; b; b = next) {
        bool is_kept = false;
        next = b->next;
        write_logs(s, b);
        for (size_t i = 0; i < b->n_reads; i++)
            if (b->reads[i].kind == STORE_BACKUP)
                is_kept = begin_backup(s, b);
            else
                read_run(&s->tables, &b->reads[i]);
        if (!is_kept)
            list_push(&served, b);
    }
    *group = served;
}

static void tend_loads(struct store *s)
{
    struct err err = {0};
    bool has_more, has_any;
    if (!s->tend_ns || clock_now_ns() < s->tend_ns)
        return;
    if (load_tend(&s->tables, clock_wall_ns(), &has_more, &has_any, &err) < 0) {
        log_warn("msg=\"old expert load is not tidied up: %s\"", err.text);
        has_more = false;
        has_any = true;
    }
    s->tend_ns = has_more ? 1 : has_any ? clock_now_ns() + TEND_NS : 0;
}

/* ---- checkpoints: on our own schedule, because SQLite's would come in the middle of a commit - */

static int count_wal_pages(void *n_pages, sqlite3 *db, const char *name, int n)
{
    (void)db;
    (void)name;
    *(int *)n_pages = n;
    return SQLITE_OK;
}

static void checkpoint(struct store *s)
{
    db_checkpoint(s->tables.state);
    db_checkpoint(s->tables.stats);
    s->state_wal_pages = s->stats_wal_pages = 0;
}

static bool wal_has(const struct store *s, int n_pages)
{
    return s->state_wal_pages >= n_pages || s->stats_wal_pages >= n_pages;
}

static bool has_work(const struct store *s)
{
    return s->waiting.first || s->is_stopping || s->backup_is_over ||
           backup_is_copying(s->backup) || (s->tend_ns && s->tend_ns <= clock_now_ns());
}

/* Waits for work; a quiet moment is good for a checkpoint. Called with the lock held. */
static void wait_for_work(struct store *s)
{
    while (!has_work(s)) {
        bool has_pages = wal_has(s, WAL_PAGES_IDLE);
        uint64_t quiet_ns = has_pages ? clock_now_ns() + QUIET_NS : UINT64_MAX;
        uint64_t until_ns = s->tend_ns && s->tend_ns < quiet_ns ? s->tend_ns : quiet_ns;
        struct timespec until = {.tv_sec = (time_t)(until_ns / NS_PER_S),
                                 .tv_nsec = (long)(until_ns % NS_PER_S)};
        if (until_ns == UINT64_MAX) {
            pthread_cond_wait(&s->wake, &s->lock);
            continue;
        }
        if (pthread_cond_timedwait(&s->wake, &s->lock, &until) != ETIMEDOUT ||
            until_ns < quiet_ns)
            continue;
        pthread_mutex_unlock(&s->lock);
        checkpoint(s);
        pthread_mutex_lock(&s->lock);
    }
}

/* The next group, in order, which may be empty; false when stopping and nothing is left. */
static bool take_group(struct store *s, struct list *out_group)
{
    pthread_mutex_lock(&s->lock);
    wait_for_work(s);
    *out_group = s->waiting;
    struct store_batch *b = s->waiting.first;
    for (int n = 1; b && b->next && n < GROUP_MAX; n++)
        b = b->next;
    if (b) {
        out_group->last = b;
        s->waiting.first = b->next;
        if (!b->next)
            s->waiting.last = NULL;
        b->next = NULL;
    }
    bool is_over = s->is_stopping && !out_group->first;
    pthread_mutex_unlock(&s->lock);
    return !is_over;
}

static void give_back(struct store *s, struct list *group)
{
    if (!group->first)
        return;
    pthread_mutex_lock(&s->lock);
    if (s->done.last)
        s->done.last->next = group->first;
    else
        s->done.first = group->first;
    s->done.last = group->last;
    pthread_mutex_unlock(&s->lock);
    s->notify(s->context);
}

static void *run_writer(void *context)
{
    struct store *s = context;
    struct list group;
    pthread_setname_np(pthread_self(), "store");
    while (take_group(s, &group)) {
        serve_group(s, &group);
        give_back(s, &group);
        tend_loads(s);
        if (backup_is_copying(s->backup))
            backup_step(s->backup);
        else if (s->backup && backup_was_told(s))
            end_backup(s);
        if (wal_has(s, WAL_PAGES_BUSY))
            checkpoint(s);
    }
    if (s->backup)
        end_backup(s);
    return NULL;
}

/* ---- the loop's side ------------------------------------------------------------------------- */

int store_open(const char *state_dir, void (*notify)(void *context), void *context,
               struct store **out_store, struct err *err)
{
    /* Nobody reads SQLite's memory statistics, and every allocation would take a lock for them. */
    sqlite3_config(SQLITE_CONFIG_MEMSTATUS, 0);
    struct store *s = xcalloc(1, sizeof *s);
    s->state_dir = xstrdup(state_dir);
    s->lock_fd = -1;
    s->notify = notify;
    s->context = context;
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    s->tend_ns = 1; /* what was left untidied when the last one ended */
    int rc = folder_take(state_dir, &s->lock_fd, err);
    if (rc == 0)
        rc = tables_open(&s->tables, state_dir, err);
    if (rc == 0) {
        sqlite3_wal_hook(s->tables.state, count_wal_pages, &s->state_wal_pages);
        sqlite3_wal_hook(s->tables.stats, count_wal_pages, &s->stats_wal_pages);
        s->has_writer = pthread_create(&s->writer, NULL, run_writer, s) == 0;
        if (!s->has_writer)
            rc = err_set(err, -EAGAIN, "the writer thread cannot be started");
    }
    if (rc < 0) {
        store_close(s);
        return rc;
    }
    *out_store = s;
    return 0;
}

void store_close(struct store *s)
{
    if (!s)
        return;
    if (s->has_writer) {
        pthread_mutex_lock(&s->lock);
        s->is_stopping = true;
        pthread_cond_signal(&s->wake);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->writer, NULL);
    }
    tables_close(&s->tables);
    if (s->lock_fd >= 0)
        close(s->lock_fd);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    free(s->state_dir);
    free(s);
}

void store_submit(struct store *s, struct store_batch *b)
{
    pthread_mutex_lock(&s->lock);
    list_push(&s->waiting, b);
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

struct store_batch *store_take_done(struct store *s)
{
    pthread_mutex_lock(&s->lock);
    struct store_batch *first = s->done.first;
    s->done = (struct list){0};
    pthread_mutex_unlock(&s->lock);
    return first;
}

void store_resume(struct store *s)
{
    pthread_mutex_lock(&s->lock);
    s->is_failed = false;
    pthread_mutex_unlock(&s->lock);
}

uint64_t store_free_bytes(const struct store *s)
{
    struct statvfs v;
    if (statvfs(s->state_dir, &v))
        return UINT64_MAX;
    return (uint64_t)v.f_bavail * v.f_frsize;
}

static uint64_t file_bytes(const struct store *s, const char *name)
{
    struct stat st;
    char *path = xasprintf("%s/%s", s->state_dir, name);
    uint64_t n = stat(path, &st) ? 0 : (uint64_t)st.st_size;
    free(path);
    return n;
}

struct store_sizes store_sizes(const struct store *s)
{
    return (struct store_sizes){
        .state_bytes = file_bytes(s, "state.db"), .state_wal_bytes = file_bytes(s, "state.db-wal"),
        .stats_bytes = file_bytes(s, "stats.db"), .stats_wal_bytes = file_bytes(s, "stats.db-wal"),
    };
}
