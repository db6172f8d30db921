/* pin.h - a program keeps to one of the cores that it may use */
#ifndef TESTS_PIN_H
#define TESTS_PIN_H

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* This thread, and those that it starts, to the nth core of its own; counts on from the first where
 * there are fewer. Needs _GNU_SOURCE. */
static inline void pin_to(uint32_t nth)
{
    cpu_set_t all, one;
    CPU_ZERO(&all);
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof all, &all) == 0) {
        int left = (int)(nth % (uint32_t)CPU_COUNT(&all)), core = 0;
        while (!CPU_ISSET(core, &all) || left-- > 0)
            core++;
        CPU_SET(core, &one);
    }
    if (sched_setaffinity(0, sizeof one, &one) < 0)
        fprintf(stderr, "pinning to core %u: %s\n", nth, strerror(errno));
}

#endif
