/* control.h - the worker daemon's shell: loop, link, trainer processes, their output */
#ifndef WORKER_CONTROL_H
#define WORKER_CONTROL_H

#include "worker/config.h"

/* Runs the daemon until it is told to end (SIGTERM, SIGINT) or cannot start. config is borrowed.
 * Returns 0 after an orderly end. */
int control_run(const struct worker_config *config, struct err *err);

#endif
