/* crowd.h - the virtual ranks of one attempt, which step together
 *
 * As true ranks do: nobody begins before all are ready, a step lasts as long as the busiest one
 * takes, and when one is gone the others stand still until they are told to stop. */
#ifndef WORKER_CROWD_H
#define WORKER_CROWD_H

#include "worker/virtual_experts.h"

struct crowd {
    struct crowd *next;
    job_id   job;
    uint32_t attempt;
    uint32_t n_here, n_joined, n_ready, n_gone; /* ranks; n_here: of this process, in all */
    uint64_t step, n_steps, next_ns;
    double   n_tokens;         /* of a step */
    bool     ends;             /* somebody was told to save and stop: after the next step all do */
    struct virtual_experts *experts; /* NULL: none that anybody knows of */
    struct virtual_step     last;    /* step; its load until a rank has sent it */
    double   step_s;                 /* of that step, without moves */
    struct err failure;              /* code 0: none; else every rank fails so */
};

/* The crowd of that attempt, or NULL. */
struct crowd *crowd_find(struct crowd *list, job_id job, uint32_t attempt);

/* The same, made with its first rank, who has joined; n_here counts then. A model that cannot be
 * read here is noted, and its ranks report no loads; nor do those of an attempt that are not all
 * in this process. */
struct crowd *crowd_join(struct crowd **list, const Ballast__Start *start, uint32_t n_here,
                         uint64_t step, const struct popularity *popularity,
                         const struct cluster *cluster);

/* One of its ranks has ended; the last one takes the crowd with it. */
void crowd_leave(struct crowd **list, struct crowd *c);

void crowd_ready(struct crowd *c, uint64_t now_ns);

/* All are ready and none has ended. */
static inline bool crowd_goes_on(const struct crowd *c)
{
    return c->n_ready >= c->n_here && c->n_gone == 0;
}

/* Steps if it is time to; true if it did. */
bool crowd_step(struct crowd *c, uint64_t now_ns);

/* What rank 0 reports of the last step. */
void crowd_fill_step(const struct crowd *c, Ballast__StepReport *r);
#define CROWD_PHASES 4
void crowd_fill_phases(const struct crowd *c, Ballast__PhaseTime out[CROWD_PHASES]);

#endif
