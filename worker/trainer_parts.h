/* trainer_parts.h - what the parts of the trainer share; all of it on the training thread */
#ifndef WORKER_TRAINER_PARTS_H
#define WORKER_TRAINER_PARTS_H

#include "worker/channel.h"
#include "worker/gang.h"
#include "worker/run.h"
#include "worker/step.h"

struct trainer {
    struct channel *channel;
    const Ballast__Start *start;
    struct run_wishes wishes;
    struct gang gang;
    const char *data_address; /* NULL: this rank need not tell */
    const uint8_t *data_key;
    struct plans *plans;
    struct settings settings;
    struct run run;
    uint64_t logged_ns;
    uint64_t n_rollbacks, n_skips, bad_step; /* of step bad_step; up to it, in a row */
    double   slowest_s;   /* of this attempt's steps */
    uint64_t n_timed;     /* of them */
    uint64_t patience_ns; /* until the daemon's next word from here is late; 0: no bound */
    uint64_t n_failed_saves, n_skipped; /* of this attempt; batches, also by rollback */
    char     warning[400]; /* of what people should look at while it runs; empty: all is well */
    uint32_t slow_rank, n_slow; /* that was the busiest by far, in so many steps in a row */
    char     slow[160];         /* a warning, too, of less weight; empty: none is slow */
};

/* ---- trainer_report: what the daemon hears --------------------------------------------------- */

void trainer_report_state(struct trainer *t, Ballast__RankPhase phase, const char *text,
                          bool retryable);
void trainer_report_running(struct trainer *t);
void trainer_report_step(struct trainer *t, const struct step_result *r, double validation_loss);

/* What comes lasts as long as disks and networks let it: other ranks wait long, and the daemon is
 * told that there is no bound. */
void trainer_take_time(struct trainer *t);

/* A step comes. One that takes many times as long as the slowest so far hangs; who waits in a
 * collective can say for whom, so it speaks before the daemon does. */
void trainer_expect_step(struct trainer *t);

/* It is done, and counts for those to come. */
void trainer_time_step(struct trainer *t, const struct step_result *r);

/* A rank that does much longer than others what is its own, step after step, holds up all. */
void trainer_look_for_slow(struct trainer *t, const struct step_result *r);

/* ---- trainer_step ---------------------------------------------------------------------------- */

/* One step and what is due after it. *out_is_over: all done, or a stop was granted. Collective; a
 * failure ends the attempt. */
int trainer_step(struct trainer *t, bool *out_is_over, struct err *err);

#endif
