/* coll_copy.h - copies of what may be larger than caches */
#ifndef WORKER_COLL_COPY_H
#define WORKER_COLL_COPY_H

#include <stddef.h>

/* A piece of a result of all bytes, from memory that does not overlap it. Where the result is so
 * large that its first bytes would have left the caches before anybody reads them, it is written
 * past them: then memory need not be read to be overwritten. */
void copy_piece(void *to, const void *from, size_t n_bytes, size_t all);

#endif
