/* store.h - what is durable: the record log with its query tables, step reports, rank logs
 *
 * A writer thread owns both databases (STATE_DIR/state.db, STATE_DIR/stats.db) and the log files.
 * The loop hands it batches; all that wait are committed together; a batch comes back when it is
 * durable, and only then may the loop send what the batch promised. Reads travel in batches too,
 * so that they see every batch handed over before them. */
#ifndef COORDINATOR_STORE_H
#define COORDINATOR_STORE_H

#include "common/err.h"
#include "common/mem.h"
#include "common/types.h"
#include "coordinator/turn.h"
#include "proto/ballast.pb-c.h"

struct store;

/* ---- batches --------------------------------------------------------------------------------- */

/* Output of one rank. Bytes that are stored already are skipped, a gap is told in the log. */
struct store_log {
    const Ballast__LogChunk *chunk;  /* borrowed from the batch's owner */
    uint64_t peer;                   /* the caller's: who gets the Ack */
    uint64_t stored_offset;          /* out: bytes of the attempt below this need not come again */
};

enum store_read_kind {
    STORE_RESTORE, /* restored, records: what a core needs to go on */
    STORE_JOBS,    /* jobs: from an id above `from`, at most limit, of user or of all, by terms; by
                    * id or in `order` */
    STORE_JOB,     /* jobs[0], spec, events: the newest limit, oldest first */
    STORE_RECORDS, /* records of that job, all; jobs[0] if there is one */
    STORE_EVENTS,  /* events: from seq `from` (with is_newest: the newest limit below it, 0: of
                    * all), of job or all, by terms; oldest first. next: where to go on, with
                    * is_newest below it, 0: nowhere */
    STORE_STEPS,   /* steps: above step `from`, at most limit; of those the `last` (0: all) and not
                    * older than wall_ns; jobs[0] */
    STORE_OUTPUT,  /* bytes: of a rank's log, from byte `from`, at most limit; jobs[0] */
    STORE_REBUILD, /* nothing: makes the query tables again from the log, for repair and tests */
    STORE_LOADS,   /* loads: of `window`, one layer or all; placement, spec, jobs[0] */
    STORE_LOAD_HISTORY, /* windows: of `window`, the newest limit, newest last; spec, jobs[0] */
    STORE_PLACEMENT, /* placement: of epoch `from`, or the newest with is_newest; loads: the last
                      * window; entries: the newest limit; spec, jobs[0] */
    STORE_PLANS,   /* entries: the newest limit, newest last; is_auto_on, jobs[0] */
    STORE_SQL,     /* columns, rows: of a person's SELECT, at most limit. Runs on the writer's
                    * thread, so commits wait for it; hence its limits of time and memory */
    STORE_BACKUP,  /* total: bytes of the copy of state.db at path. Batches go on meanwhile */
};

enum store_window { STORE_LAST, STORE_1M, STORE_1H, STORE_ALL };

/* Tokens per expert of each layer in a window of steps. */
struct store_loads {
    Ballast__LayerExperts **layers; /* all but imbalance_devices */
    size_t   n_layers;
    uint64_t first_step, last_step; /* 0: no report is there */
    uint32_t n_experts, placement_epoch;
};

struct store_key {
    const char    *user;
    const uint8_t *key, *digest; /* 16 bytes each */
    job_id         job;
    uint64_t       age_ns;
};

struct store_restored {
    uint64_t   coordinator_epoch;
    record_seq last_seq;
    job_id     last_job;
    struct store_key *keys;
    size_t     n_keys;
};

struct store_read {
    enum store_read_kind kind;
    job_id      job;
    uint64_t    from;
    uint32_t    limit, rank;
    bool        is_newest, with_times; /* times: of STORE_OUTPUT */
    const char *user;        /* NULL or "": all; borrowed */
    Ballast__ListTerm *const *terms; /* borrowed, as order is */
    size_t      n_terms;
    Ballast__ListOrder *const *order;
    size_t      n_order;
    bool        is_live;     /* STORE_JOBS: only those that have not ended */
    uint32_t    last;
    uint64_t    limit_ns;    /* of STORE_JOBS with terms or order, then -ETIME, and of
                              * STORE_SQL, then -ETIMEDOUT; 0: their own */
    int64_t     wall_ns;     /* STORE_RESTORE: now; keys older than keep_ns are left */
    uint64_t    keep_ns;
    enum store_window window;
    int32_t     layer;       /* -1: all */
    const char *sql, *path;  /* borrowed */

    /* Out; all in the read's own arena, until store_read_fini. */
    struct arena arena;
    int         rc;          /* 0, -ENOENT: no such job, or a failure that err tells */
    struct err  err;
    struct store_restored restored;
    Ballast__Job        **jobs;
    size_t                n_jobs;
    bool                  is_truncated; /* there is more */
    Ballast__JobSpec     *spec;
    Ballast__Record     **records;
    size_t                n_records;
    Ballast__Event      **events;
    size_t                n_events;
    Ballast__StepReport **steps;
    size_t                n_steps;
    uint8_t              *bytes;
    size_t                n_bytes;
    Ballast__LogTime    **times;
    size_t                n_times;
    struct store_loads    loads;
    Ballast__LoadWindow **windows;
    size_t                n_windows;
    Ballast__Placement   *placement;   /* NULL: experts are in order */
    Ballast__RebalanceEntry **entries;
    size_t                n_entries;
    bool                  is_auto_on;
    char                **columns;
    size_t                n_columns;
    Ballast__DbRow      **rows;
    size_t                n_rows;
    uint64_t              next;  /* where to go on: the next seq or byte, the last step read */
    uint64_t              total; /* bytes that the rank's log has, or the copy; the newest seq */
};

void store_read_fini(struct store_read *r);

struct store_batch {
    struct store_batch *next; /* the store's, while it has the batch */

    Ballast__Record  *const *records; /* borrowed until the batch is back, as all of these */
    size_t                   n_records;
    const struct turn_steps *steps;
    size_t                   n_steps;
    const struct turn_load  *loads;
    size_t                   n_loads;
    int64_t                  wall_ns; /* of the turn; loads and output cannot be later */
    struct store_log        *logs;
    size_t                   n_logs;
    struct store_read       *reads;
    size_t                   n_reads;

    uint64_t   commit_ns; /* out: how long the commit took that this batch was the first of */
    int        rc; /* out: 0, or why nothing of records, steps and loads was stored */
    struct err err;
};

/* ---- life ------------------------------------------------------------------------------------ */

/* Opens or makes the databases, takes the folder for this process alone (-EBUSY with who has it)
 * and starts the writer. notify is called on the writer's thread when batches are back. Gives
 * *out_store, ended with store_close. */
int store_open(const char *state_dir, void (*notify)(void *context), void *context,
               struct store **out_store, struct err *err);

/* Finishes what was handed over, checkpoints, closes. Batches that are back are still the
 * caller's and are given by a last store_take_done before this. */
void store_close(struct store *s);

/* Hands a batch over. After a batch has failed, every later one fails too (-ECANCELED), because
 * it was decided on what never became durable; reads are still served. */
void store_submit(struct store *s, struct store_batch *b);

/* The batches that are back, oldest first, as a list by next; NULL if there are none. */
struct store_batch *store_take_done(struct store *s);

/* Accept batches again; call it when the failed one and all after it are back. */
void store_resume(struct store *s);

/* Sizes of the databases and their write-ahead logs; 0 where a file is not there. */
struct store_sizes {
    uint64_t state_bytes, state_wal_bytes, stats_bytes, stats_wal_bytes;
};
struct store_sizes store_sizes(const struct store *s);

/* Free bytes in the file system of the state folder. */
uint64_t store_free_bytes(const struct store *s);

#endif
