/* metrics.h - what the coordinator counts about itself, in the text form that Prometheus reads
 *
 * Counters are of this process's life. Units are seconds, bytes and ratios; labels are words of
 * small closed sets, but for the two lists per job and per worker, which are scraped apart. */
#ifndef COORDINATOR_METRICS_H
#define COORDINATOR_METRICS_H

#include "common/types.h"
#include "coordinator/coord.h"

/* Upper bounds of buckets rise by factors; what is larger than all is counted, too. */
enum metrics_timing {
    METRICS_TURN,       /* from a turn's first message until what it says has left */
    METRICS_COMMIT,     /* one commit of the store */
    METRICS_QUERY,      /* a read of the databases, its wait for the writer included */
    METRICS_LAG,        /* how late the loop's own pulse came */
    METRICS_QUEUE_WAIT, /* of jobs, from submit until the first gang is assigned */
    METRICS_JOB_RUN,    /* RUNNING, of jobs that have ended */
    METRICS_PAUSE,      /* steps that moved experts, the longest rank's */
    METRICS_TIMINGS
};
#define METRICS_BUCKETS 12

struct metrics_histogram {
    uint64_t counts[METRICS_BUCKETS + 1], n;
    double   sum_s;
};

#define METRICS_METHODS 64 /* numbers of methods below this are counted */
#define METRICS_CODES   32

struct metrics {
    struct metrics_histogram timings[METRICS_TIMINGS];
    uint64_t n_answers[METRICS_METHODS][METRICS_CODES];
    uint64_t n_jobs_submitted, n_jobs_ended[JOB_STATE_MAX + 1], n_restarts;
    uint64_t n_plans[2];  /* by a person, automatic */
    uint64_t n_plans_done, n_plans_given_up, n_moves, moved_bytes;
    uint64_t n_records;
};

/* What is so at the moment of a scrape. */
struct metrics_now {
    const char *version, *commit;
    bool     is_serving;
    uint64_t coordinator_epoch;
    uint32_t n_jobs[JOB_STATE_MAX + 1];
    struct coord_fleet_counts fleet;
    uint64_t n_batches, n_watches, n_peers, n_connections;
    uint64_t n_received, n_sent, n_unreachable, n_dropped_slow, n_bad_frames;
    uint64_t n_refused, n_limited, n_foreign, n_turned_away, n_unknown_keys;
    uint64_t state_bytes, state_wal_bytes, stats_bytes, stats_wal_bytes, free_bytes;
    double   backup_s;        /* since the newest backup of this life; < 0: none */
    double   cpu_s, start_s;  /* start_s: seconds of the wall clock */
    uint64_t resident_bytes, n_descriptors, n_descriptors_max;
};

void metrics_observe(struct metrics *m, enum metrics_timing timing, uint64_t ns);

/* One answer that has left. */
void metrics_answer(struct metrics *m, Ballast__Method method, Ballast__Code code);

/* A record that is durable now. job: as it is at present, or NULL. */
void metrics_record(struct metrics *m, const Ballast__Record *record, const Ballast__Job *job);

/* Texts, freed with free(). */
char *metrics_text(const struct metrics *m, const struct metrics_now *now);
char *metrics_jobs_text(Ballast__Job *const *jobs, size_t n_jobs);
char *metrics_workers_text(Ballast__Worker *const *workers, size_t n_workers);

#endif
