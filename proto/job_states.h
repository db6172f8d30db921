/* job_states.h - what the states of jobs have in common, and how many of them there are */
#ifndef PROTO_JOB_STATES_H
#define PROTO_JOB_STATES_H

#include <stdbool.h>

#include "proto/ballast.pb-c.h"

#define JOB_STATE_MAX BALLAST__JOB_STATE__JOB_PAUSED /* the largest that is known */
#define WORKER_STATE_MAX BALLAST__WORKER_STATE__WORKER_SICK

/* Nothing comes after it, unless a person queues the job again. */
static inline bool job_state_is_ended(Ballast__JobState state)
{
    return state == BALLAST__JOB_STATE__JOB_DONE || state == BALLAST__JOB_STATE__JOB_FAILED ||
           state == BALLAST__JOB_STATE__JOB_CANCELLED;
}

#endif
