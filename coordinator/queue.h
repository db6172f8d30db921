/* queue.h - which waiting jobs start now, and why the others do not: a pure function
 *
 * Order is priority, then first come. A job starts when its whole gang of free workers is there;
 * nothing overtakes a job that only waits for workers which others use now, so that a large job
 * is not starved by small ones. A job that the whole fleet, all idle, could not run holds nobody
 * up: it waits beside the line. A gang takes one node if one has enough free workers (the one
 * with the fewest), else the nodes with the most. */
#ifndef COORDINATOR_QUEUE_H
#define COORDINATOR_QUEUE_H

#include "coordinator/job.h"

/* One that may start, but for workers. */
struct queue_job {
    job_id   id;
    int32_t  priority;
    uint32_t n_workers;
    uint64_t memory_bytes; /* each worker must have; 0: any */
    uint64_t memory_bytes_spread; /* where n_together ranks lie on several nodes, if more */
    uint32_t n_together;   /* ranks in a row that had better be on one node: those that the experts
                            * lie over; 0: any */
};

/* One that is attached and not drained. */
struct queue_worker {
    uint32_t    index; /* the fleet's */
    bool        is_free;
    uint64_t    memory_bytes;
    const char *node, *name;
};

struct queue_decision {
    uint32_t          *workers; /* n_workers fleet indices in rank order: it starts; else NULL */
    struct wait_reason wait;
};

/* The memory that each worker must have for a gang of these, were all of them idle: more where
 * ranks that exchange tokens cannot be on one node. The workers are put in another order. */
uint64_t queue_memory_needed(const struct queue_job *job, struct queue_worker *workers,
                             size_t n_workers);

/* Whether a goes before b. */
bool queue_is_before(const struct queue_job *a, const struct queue_job *b);

/* Decides for jobs that are in order already. Fills out_decisions, one each; what they point to
 * lives in the arena. The workers are put in another order. */
void queue_decide(const struct queue_job *jobs, size_t n_jobs, struct queue_worker *workers,
                  size_t n_workers, struct arena *arena, struct queue_decision *out_decisions);

#endif
