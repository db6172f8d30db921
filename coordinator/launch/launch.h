/* launch.h - the parts of launch files that are the same for every model, as texts of the shell
 *
 * Each begins where its head ends, which sets `here` (the folder of job.yaml), `roots` (a YAML
 * list's content), `device` (cuda or cpu) and whatever else a part's first lines say. */
#ifndef COORDINATOR_LAUNCH_H
#define COORDINATOR_LAUNCH_H

extern const char launch_keep[]; /* a function that starts a daemon again; needs one, tell */
extern const char launch_slurm[];
extern const char launch_ssh[];

#endif
