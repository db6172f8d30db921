/* clock.h - the monotonic clock for every timeout, the wall clock for display only */
#ifndef COMMON_CLOCK_H
#define COMMON_CLOCK_H

#include <stdint.h>

uint64_t clock_now_ns(void);  /* CLOCK_MONOTONIC */
int64_t  clock_wall_ns(void); /* CLOCK_REALTIME, UTC */

#define CLOCK_STAMP_BYTES 32

/* "2026-11-29T13:49:53.123Z", ISO 8601 in UTC. */
void clock_stamp(int64_t wall_ns, char out_text[CLOCK_STAMP_BYTES]);

/* "D-HH:MM:SS" or "HH:MM:SS". */
void clock_duration(uint64_t ns, char out_text[CLOCK_STAMP_BYTES]);

#endif
