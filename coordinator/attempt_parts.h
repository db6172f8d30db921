/* attempt_parts.h - what the attempt*.c files share; core.h has what others call */
#ifndef COORDINATOR_ATTEMPT_PARTS_H
#define COORDINATOR_ATTEMPT_PARTS_H

#include "coordinator/core.h"

/* ---- attempt_gang.c: the workers of an attempt -------------------------------------------- */

/* The job whose present attempt has that rank on w, or NULL. */
struct job *attempt_of(struct coord *c, const struct worker *w);

/* j has ranks to be watched, all alive until told otherwise; then each gets its worker. */
void attempt_watch(struct job *j);
void attempt_take(struct job *j, uint32_t rank, struct worker *w);

void attempt_set_fate(struct coord *c, struct job *j, uint32_t rank, enum rank_fate fate,
                      uint64_t over_ns);

/* The worker of one rank is free; those of the ranks that have ended; all, and no rank is watched
 * any more. Nothing where that is so already. */
void attempt_release(struct coord *c, struct job *j, uint32_t rank);
void attempt_release_ended(struct coord *c, struct job *j);
void attempt_release_all(struct coord *c, struct job *j);

/* ---- attempt.c: its life; each makes the records ------------------------------------------ */

void attempt_move_to_running(struct coord *c, struct turn *t, struct job *j,
                             uint64_t resumed_from_step);

/* Every rank has finished: DONE. */
void attempt_complete(struct coord *c, struct turn *t, struct job *j, uint64_t resumed_from_step);

/* Another attempt, from the newest checkpoint. */
void attempt_recover(struct coord *c, struct turn *t, struct job *j, const char *reason,
                     bool counts_as_restart);

/* The same, unless the failure would come again or the budget is used up: then FAILED. */
void attempt_fail(struct coord *c, struct turn *t, struct job *j, bool retryable,
                  const char *reason, const char *exit);

/* A rank was lost. If that was before the checkpoint of a pause, the others cannot write theirs
 * any more, so the job waits with the last one; a failure that would come again ends it. */
void attempt_hurry_pause(struct coord *c, struct turn *t, struct job *j, bool retryable,
                         const char *why, const char *exit);

/* What comes after RECOVERING or STOPPING, if no rank lives any more. */
void attempt_finish_if_over(struct coord *c, struct turn *t, struct job *j);

#endif
