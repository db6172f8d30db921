/* fake_nccl.h - NCCL's calls over the memory of one process, for ranks that are threads
 *
 * As NCCL's communicators that do not block, it takes up what is asked and gets on with it whenever
 * its state is asked for; a member that does not come keeps the others in progress. */
#ifndef TESTS_FAKE_NCCL_H
#define TESTS_FAKE_NCCL_H

#include <stdbool.h>

/* From now on communicators of that rank of a world say that a remote rank failed. -1: none. */
void fake_nccl_break(int rank);

/* From now on registering fails, or no longer. */
void fake_nccl_refuse(bool does);

/* Of all communicators since the last call: what was registered, what of it was deregistered, and
 * what an abort took along. Deregistering twice, of another communicator, or after an abort ends
 * the process. */
struct fake_nccl_memory {
    int n_registered, n_deregistered, n_aborted;
};
struct fake_nccl_memory fake_nccl_memory(void);

#endif
