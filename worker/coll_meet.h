/* coll_meet.h - the ranks of one machine find each other and map the same memory */
#ifndef WORKER_COLL_MEET_H
#define WORKER_COLL_MEET_H

#include "worker/coll_shm.h"

/* The part of this machine's lowest rank, and everybody else's. s has rank, world and places; both
 * leave sockets and the mapping in it, ended with shm_close also after a failure. */
int coll_meet_first(const struct coll_host_config *c, struct shm *s, struct err *err);
int coll_meet_other(const struct coll_host_config *c, struct shm *s, struct err *err);

#endif
