/* event.h - a record as people read it: its kind in upper case and one line of text */
#ifndef COORDINATOR_EVENT_H
#define COORDINATOR_EVENT_H

#include "common/mem.h"
#include "proto/job_states.h"

/* Lives in the arena. */
Ballast__Event *event_of_record(const Ballast__Record *record, struct arena *arena);

/* "RUNNING", as in JSON and in the tables. */
const char *event_job_state(Ballast__JobState state);
const char *event_worker_state(Ballast__WorkerState state);
/* The reverse; UNKNOWN for a word that is none. */
Ballast__JobState event_job_state_parse(const char *word);
/* What a bit of GpuHealth.throttle_reasons means; false beyond the last. */
bool event_throttle_reason(unsigned bit, const char **out_name);

#endif
