/* progress.h - whether this process comes on with its work, counted where others may look
 *
 * Who waits for a process cannot tell a long piece of work from one that hangs, unless it sees
 * that small pieces get done. All functions may be called by any thread; counts are approximate. */
#ifndef COMMON_PROGRESS_H
#define COMMON_PROGRESS_H

#include <stdatomic.h>
#include <stdint.h>

/* A piece of work is done: of seconds at most, on the slowest machine. */
void progress_made(void);
/* Nothing was done here, but others that are waited for come on. Not counted where others look:
 * two that wait for each other would keep each other alive. */
void progress_waited(void);

/* From now on work is counted there, too; NULL: not any more. Kept until then. */
void progress_show(_Atomic uint64_t *at);

/* Grows with either of the first two. */
uint64_t progress_count(void);

#endif
