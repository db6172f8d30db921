/* virtual_moves.h - how long moves of experts would take on a cluster's links */
#ifndef WORKER_VIRTUAL_MOVES_H
#define WORKER_VIRTUAL_MOVES_H

#include "common/cluster.h"
#include "worker/moves.h"
#include "worker/transfer.h"

struct virtual_links {
    const uint32_t       *node; /* (n_devices): equal numbers are one node */
    const struct cluster *rates;
};

/* Seconds of the rounds from `first` up to `last`, each of which takes as long as its slowest move.
 * Adds what each device sends to sent (n_devices), and to moved what window_moved wants. */
double virtual_rounds(const struct moves *m, const struct virtual_links *links, uint32_t first,
                      uint32_t last, uint64_t *sent, struct transfer_result *moved);

#endif
