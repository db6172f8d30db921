/* store_schema.h - the tables of both databases, as forward-only steps
 *
 * Step n brings a file from version n to n + 1. A step that was ever released is never changed;
 * the next change is a new step. */
#ifndef COORDINATOR_STORE_SCHEMA_H
#define COORDINATOR_STORE_SCHEMA_H

#include <stdint.h>

struct schema {
    const char        *name;           /* for messages: state, stats */
    uint32_t           application_id; /* in the file's header */
    const char *const *steps;
    uint32_t           n_steps;
};

/* Jobs, workers and everything acknowledged. */
extern const struct schema schema_state;
/* Step reports, expert load, and where attempts begin in rank logs; losing it costs curves, never
 * a job. */
extern const struct schema schema_stats;

#endif
