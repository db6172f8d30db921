/* fake_nccl.h - NCCL's calls over the memory of one process, for ranks that are threads
 *
 * As NCCL's communicators that do not block, it takes up what is asked and gets on with it whenever
 * its state is asked for; a member that does not come keeps the others in progress. */
#ifndef TESTS_FAKE_NCCL_H
#define TESTS_FAKE_NCCL_H

/* From now on communicators of that rank of a world say that a remote rank failed. -1: none. */
void fake_nccl_break(int rank);

#endif
