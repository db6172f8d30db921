/* virtual_transfer.h - moves of experts that are nowhere: how long they would take on a cluster */
#ifndef WORKER_VIRTUAL_TRANSFER_H
#define WORKER_VIRTUAL_TRANSFER_H

#include "common/cluster.h"
#include "worker/shard_state.h"
#include "worker/transfer.h"

/* Of the devices between which experts would move. */
struct virtual_place {
    const uint32_t       *node;  /* (n_devices): equal numbers are one node */
    const struct cluster *rates; /* of links */
    size_t    part_bytes[SLOT_PARTS]; /* of what one rank holds of an expert */
    uint64_t *sent_bytes;        /* (n_devices) what each sent of the last plan that was done */
};

/* As transfer_create, for all ranks at once; place is kept. Its results are of all devices
 * together, and each of its seconds is of the slowest move of a round. Never fails. */
int virtual_transfer_create(struct virtual_place *place, struct slots *slots, struct slots *to,
                            uint32_t *const *stage, struct transfer **out);

#endif
