/* run_hosts.h - the ranks of a run that are on several machines find each other */
#ifndef WORKER_RUN_HOSTS_H
#define WORKER_RUN_HOSTS_H

#include "worker/coll.h"
#include "worker/run.h"

struct run_hosts {
    uint32_t *hosts;         /* (world) */
    struct wire_peer *peers; /* (world), of what wishes->gang keeps */
    uint32_t  n_hosts;
    struct coll_hosts coll;  /* for coll_host_open, which takes its wire */
};

/* Where the ranks are; if on several machines, this one listens, tells so and waits to hear where
 * the others do. Ended with run_hosts_fini also after a failure. */
int  run_hosts_open(struct run *run, uint64_t timeout_ns, struct run_hosts *out, struct err *err);
void run_hosts_fini(struct run_hosts *h);

#endif
