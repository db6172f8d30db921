/* step.h - one optimizer step of all ranks, and one validation */
#ifndef WORKER_STEP_H
#define WORKER_STEP_H

#include "worker/bad.h"
#include "worker/phases.h"
#include "worker/run.h"

/* The same on all ranks but for seconds, which are this rank's. */
struct step_result {
    double loss;      /* mean over the labels of all ranks */
    double grad_norm; /* before clipping */
    double lr, tokens_per_second;
    double imbalance; /* max over mean of served rows over the expert ranks, mean over layers */
    double aux_loss, z_loss; /* means over labels and layers; NaN: not asked for */
    double index_loss; /* of indexers beside the model, over layers; NaN: they rest */
    uint64_t n_rerouted, n_dropped; /* choices beyond the experts' capacity */
    double step_s;    /* of this rank, up to the boundary word */
    double busy_s, least_busy_s; /* of the step before: what the rank that was busy longest, and
                                  * shortest, did itself, without its waiting for others */
    uint32_t busiest; /* that rank */
    uint64_t memory_bytes; /* of the device, the largest rank's peak */
    double mfu;       /* the model's operations in step_s over what the devices could do; NaN: no
                       * device's rate is known */
    double seconds[PHASES]; /* those after the step are whole, the others without what is within */
    enum run_wish wish; /* the strongest of all ranks */
    uint32_t epoch;     /* of the plan that all ranks are ready for; 0: none */
    uint32_t ahead;     /* of the one whose frozen weights all have; 0: none */
    uint32_t settings;  /* revision that all ranks have; 0: none */
    bool is_bad;        /* loss or gradient is not a number; nothing was updated */
    struct bad bad;     /* and where that began */
};

/* Step number state.step + 1: gradients of global_batch samples, the update, and the boundary
 * word. Moves state.step and state.next_sample on, also past a bad step. Collective. */
int step_train(struct run *run, struct step_result *out, struct err *err);

/* The mean loss of the first validation_sequences windows, into state.validation_loss; nothing
 * without validation data. Collective. */
int step_validate(struct run *run, struct err *err);

#endif
