/* ctl_given.h - a job's placement to a file, and back as one to have */
#ifndef COORDINATOR_CTL_GIVEN_H
#define COORDINATOR_CTL_GIVEN_H

#include "coordinator/ctl.h"

/* Writes p to --placement-out as CSV. Prints what fails and returns its exit code. */
int ctl_given_write(const struct ctl *c, const Ballast__Placement *p);

/* Reads --placement for a job, whose shape the coordinator tells: the layers that the file names.
 * In the arena. Prints what fails and returns its exit code. */
int ctl_given_read(struct ctl *c, uint64_t job, Ballast__Placement **out);

#endif
