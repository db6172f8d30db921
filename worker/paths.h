/* paths.h - whether a job's paths lie under the folders that a worker's configuration allows
 *
 * Called by the trainer between START and READY, so that a slow file system never holds the
 * daemon's loop up. Symbolic links are resolved first; of a path that does not exist yet, the
 * part that does. */
#ifndef WORKER_PATHS_H
#define WORKER_PATHS_H

#include "common/err.h"
#include "proto/ballast.pb-c.h"

/* Model, data (every match of its patterns) and checkpoint. Returns -EACCES with the path and the
 * roots in the error: no other attempt would fare better. No roots: nothing is allowed. */
int paths_check(const Ballast__JobSpec *spec, char *const *roots, size_t n_roots,
                struct err *err);

#endif
