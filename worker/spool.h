/* spool.h - one attempt's output on the worker's disk until the coordinator has stored it
 *
 * Offsets count the bytes kept, from the attempt's start. A trainer that prints without end costs
 * neither disk nor network: beyond a rate and a size bytes are dropped and counted. */
#ifndef WORKER_SPOOL_H
#define WORKER_SPOOL_H

#include <sys/types.h>

#include "common/err.h"
#include "common/types.h"

#define SPOOL_PREFIX "output-" /* of every spool's file in a worker's state_dir */

#define SPOOL_BYTES_MAX (64u << 20)   /* kept and not stored elsewhere yet */
#define SPOOL_RATE_BYTES_PER_S (1u << 20)
#define SPOOL_BURST_BYTES (8u << 20)

struct spool;

/* Makes the file, or empties one that an earlier life left; gives *out_spool. Where there can be
 * no file (the folder is gone, the disk is full or read-only) the output is kept in memory, with
 * the same bounds, so that no job fails for its output: then it returns 1, and err says why. */
int spool_open(const char *path, struct spool **out_spool, struct err *err);

/* Appends what rate and size allow, drops the rest. A full disk drops, too. */
void spool_write(struct spool *s, const void *bytes, size_t n_bytes, uint64_t now_ns);

/* Up to n_bytes from offset; returns how many there were, or a negative errno. */
ssize_t spool_read(const struct spool *s, uint64_t offset, void *out_bytes, size_t n_bytes);

/* Bytes below offset are stored elsewhere: their disk space is given back. */
void spool_trim(struct spool *s, uint64_t offset);

uint64_t spool_bytes(const struct spool *s);
uint64_t spool_dropped_bytes(const struct spool *s);

/* Removes the file. NULL is fine. */
void spool_close(struct spool *s);

#endif
