/* export.h - the command `ballast-worker export`: a model with an adapter merged into it */
#ifndef WORKER_EXPORT_H
#define WORKER_EXPORT_H

#include "common/err.h"

/* argv[0] is the word `export`. 0: done; 1: it failed; 2: usage error. */
int export_main(int argc, char **argv);

/* Writes to out, a folder that is not there yet, what model_path holds, with W + (alpha / r) B A in
 * place of each W that has an adapter, in W's own dtype; all other bytes are those of model_path,
 * in files of the same names. On failure there is no folder. */
int export_merged(const char *model_path, const char *adapter_path, const char *out,
                  struct err *err);

#endif
