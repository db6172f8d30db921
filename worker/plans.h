/* plans.h - the life of a plan on one rank: it arrives, is prepared or refused, is carried out
 *
 * What arrives is only kept; the training thread looks at it at the step boundary, just before the
 * boundary word. A rank is ready for one plan at most, the newest. Epochs only grow, so a message
 * may be lost, repeated or late. */
#ifndef WORKER_PLANS_H
#define WORKER_PLANS_H

#include "worker/transfer.h"

struct plans;

/* Makes the transfer of a plan that has been found sound, with what transfer_create takes and
 * promises; place is where its experts are. */
typedef int plans_make(void *place, struct slots *slots, struct slots *to,
                       uint32_t *const *stage, struct transfer **out, struct err *err);

struct plans *plans_create(void);
void plans_destroy(struct plans *p);

/* Copy what they are given; by any thread. */
void plans_prepare(struct plans *p, const Ballast__Prepare *prepare);
void plans_abort(struct plans *p, const Ballast__AbortPlan *abort_plan);

/* Looks at what has arrived: checks it against what is in force, `slots`, and has its transfer
 * made, which keeps slots. Only with a PREPARE of this job and attempt. Never fails: a plan that
 * cannot be is refused. */
void plans_take(struct plans *p, job_id job, uint32_t attempt, plans_make *make, void *place,
                struct slots *slots);

/* The plan that this rank is ready for; 0: none. */
uint32_t plans_ready(const struct plans *p);

/* The same once nothing of it is left that may go ahead; 0: none, or something is. */
uint32_t plans_ahead(const struct plans *p);
/* At a boundary where all are ready for it: some of what may go ahead goes. Collective. */
int plans_go_ahead(struct plans *p, size_t n_bytes_max, double *out_seconds, struct err *err);

/* Carries out its next stage: what that makes of the placement is in force on all ranks, or an
 * error is on all of them and the stage has changed nothing. Collective. */
int plans_carry_out(struct plans *p, struct transfer_result *out, struct err *err);

/* Some of its stages have been carried out, and some not: it is, whatever arrives. */
bool plans_has_begun(const struct plans *p);

/* What a rank says of it, in its state. */
struct plans_facts {
    uint32_t prepared_epoch, rejected_epoch;
    const char *text; /* why the newest rejected one was; lives until plans_take */
    uint64_t moved_bytes; /* of the last one carried out */
    double   pause_s;     /* the longest that one of its boundaries held up a step */
};
struct plans_facts plans_facts(const struct plans *p);

#endif
