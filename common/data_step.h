/* data_step.h - which samples a step reads, and which rank reads each of them
 *
 * Sample i of a step goes to rank (i / micro_batch) % world, so a step reads the same samples on
 * any number of ranks. The trainer's batches and what is told of them come from here alone. */
#ifndef COMMON_DATA_STEP_H
#define COMMON_DATA_STEP_H

#include "common/data.h"

struct data_step {
    uint64_t step;  /* from 1 */
    uint64_t first; /* global index of its first sample */
    uint32_t global_batch, micro_batch, world;
};

/* Micro-batches of a rank. */
uint64_t data_step_passes(const struct data_step *s);
/* Global index of the first of the micro_batch samples of a rank's micro-batch, numbered from 0. */
uint64_t data_step_sample(const struct data_step *s, uint32_t rank, uint64_t pass);

/* A document of a sequence of a step. */
struct data_read {
    uint64_t step, sample;  /* global index */
    uint64_t epoch, window; /* which lap, from 0; which sequence in the order of the files */
    uint64_t pass;          /* micro-batch of the rank */
    uint32_t sequence, rank; /* sequence: of the step's, from 0 */
    struct data_piece piece;
    uint64_t n_labels;
};

/* Appends what the ranks read in a step: sequence by sequence, document by document. *reads is n
 * long and grows; freed with free(). Its paths live as long as d. On failure what is there is
 * whole. */
int data_step_reads(const struct data *d, const struct data_step *s, struct data_read **reads,
                    size_t *n, struct err *err);

#endif
