/* ctl_hostlist.h - names as Slurm writes many of them: node[01-08,11],login */
#ifndef COORDINATOR_CTL_HOSTLIST_H
#define COORDINATOR_CTL_HOSTLIST_H

#include "common/err.h"
#include "common/mem.h"

#define HOSTLIST_MAX 16384u

/* Sorted, each once. In the arena. */
char *hostlist_pack(struct arena *a, const char *const *names, size_t n);

/* Gives *out_names in the arena: "w[0-2],x" is w0, w1, w2, x. -EINVAL: it is none, -E2BIG: more
 * than HOSTLIST_MAX names. */
int hostlist_expand(struct arena *a, const char *text, char ***out_names, size_t *out_n,
                    struct err *err);

#endif
