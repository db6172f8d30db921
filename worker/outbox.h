/* outbox.h - reports that the coordinator has not stored yet, oldest first
 *
 * One box holds one kind: step reports, which travel in batches, or load reports, one by one.
 * One batch is under way at a time, so an acknowledged step means that all before it of the same
 * attempt are stored, whatever was lost. When the box is full the oldest report goes, and is
 * counted. */
#ifndef WORKER_OUTBOX_H
#define WORKER_OUTBOX_H

#include "common/mem.h"
#include "common/types.h"
#include "proto/ballast.pb-c.h"

struct outbox_item {
    job_id   job;
    uint32_t attempt;
    uint32_t n_bytes;
    uint64_t step, samples;
    uint8_t *bytes; /* the packed report */
};

struct outbox {
    uint32_t            n_max;
    size_t              bytes_max;
    struct outbox_item *items; /* a ring */
    size_t              head, n, n_alloc, n_bytes;
    uint64_t            n_dropped;
};

void outbox_init(struct outbox *o, uint32_t n_max, size_t bytes_max);
void outbox_fini(struct outbox *o);
/* Packs the report. step: of a step report, or the last one of a load report. samples: of a step
 * report, which grow also over a rollback; 0: not known, and then step grows. */
void outbox_add(struct outbox *o, job_id job, uint32_t attempt, uint64_t step, uint64_t samples,
                const ProtobufCMessage *report);

/* Stored: reports of that attempt up to so many samples, or up to that step where either side does
 * not know them. Returns how many left the box. */
size_t outbox_ack(struct outbox *o, job_id job, uint32_t attempt, uint64_t step,
                  uint64_t samples);

/* The oldest step reports, all of one attempt, as one message in the arena; NULL if there are
 * none. */
Ballast__StepReports *outbox_batch(const struct outbox *o, struct arena *arena);

/* The oldest load report, in the arena; NULL if there is none. */
Ballast__LoadReport *outbox_load(const struct outbox *o, struct arena *arena);

bool outbox_has(const struct outbox *o, job_id job, uint32_t attempt);

#endif
