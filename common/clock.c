/* clock.c - reads the clocks and writes instants as people read them */
#include "common/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "common/types.h"

uint64_t clock_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

int64_t clock_wall_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * (int64_t)NS_PER_S + t.tv_nsec;
}

void clock_stamp(int64_t wall_ns, char out_text[CLOCK_STAMP_BYTES])
{
    int64_t ns = wall_ns % (int64_t)NS_PER_S;
    time_t seconds = (time_t)(wall_ns / (int64_t)NS_PER_S);
    if (ns < 0) {
        ns += (int64_t)NS_PER_S;
        seconds--;
    }
    struct tm utc;
    gmtime_r(&seconds, &utc);
    size_t n = strftime(out_text, CLOCK_STAMP_BYTES, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(out_text + n, CLOCK_STAMP_BYTES - n, ".%03dZ", (int)(ns / (int64_t)NS_PER_MS));
}

void clock_duration(uint64_t ns, char out_text[CLOCK_STAMP_BYTES])
{
    uint64_t s = ns / NS_PER_S, days = s / 86400;
    int n = days ? snprintf(out_text, CLOCK_STAMP_BYTES, "%" PRIu64 "-", days) : 0;
    snprintf(out_text + n, CLOCK_STAMP_BYTES - (size_t)n, "%02d:%02d:%02d", (int)(s / 3600 % 24),
             (int)(s / 60 % 60), (int)(s % 60));
}
