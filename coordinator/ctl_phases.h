/* ctl_phases.h - where the time of steps goes, in few numbers and in all */
#ifndef COORDINATOR_CTL_PHASES_H
#define COORDINATOR_CTL_PHASES_H

#include "coordinator/ctl.h"

/* What phases are added up to for a line that fits a screen. All but HIDDEN make up STEP; REST is
 * what few steps have. A phase that is none of those known counts as COMPUTE. */
enum phases_part {
    PHASES_COMPUTE, PHASES_GATHER, PHASES_DISPATCH, PHASES_REDUCE, PHASES_AGREE, PHASES_DATA,
    PHASES_OPTIMIZER, PHASES_REST, PHASES_HIDDEN, PHASES_STEP
};

/* In milliseconds; NaN where the step tells of no phases. */
double phases_ms(const Ballast__StepReport *step, enum phases_part part);

/* A line for each phase: its mean and share over the steps (StepReport), and its longest. */
void ctl_print_phases(const struct ctl *c, const void *const *steps, size_t n_steps);

#endif
