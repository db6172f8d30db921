/* memory_model.h - bytes of one rank's device for a training step, before anything is allocated
 *
 * Pure arithmetic over a model's counts, the degrees and the tokens of a pass, for training with
 * AdamW. The rows that the router sends to a rank are not known beforehand: a quarter more
 * than an even load is assumed. */
#ifndef COMMON_MEMORY_MODEL_H
#define COMMON_MEMORY_MODEL_H

#include "common/layout.h"
#include "common/model_spec.h"

struct memory_input {
    const struct model_spec *spec;
    struct layout_degrees degrees; /* valid: layout_init took them; auto resolved */
    uint64_t n_tokens;  /* of one pass of one rank: micro_batch x sequence_length */
    bool     recompute; /* each layer's activations are computed again in its backward */
    uint32_t elem_bytes; /* of activations and of the weights that they meet: 4 or 2 */
    uint32_t n_spare;   /* slots of each rank and layer for copies of experts */
    /* Numbers of adapters beside a frozen base: of all dense tensors, and of one expert. Both 0:
     * all weights are trained. */
    uint64_t dense_adapters, expert_adapters;
    bool     packed_experts; /* experts of a frozen base are MXFP4: 17 bytes for 32 numbers */
    bool     count_margins; /* quantile balancing keeps a histogram per expert and layer */
};

struct memory_plan {
    uint64_t weights, gradients, optimizer; /* the slices that this rank owns; weights with their
                                             * float32 masters, where they are narrower */
    uint64_t activations;
    uint64_t buffers; /* gathered layers, their gradients, rows that travel, the process */
    uint64_t total;
};

struct memory_plan memory_model(const struct memory_input *in);

#endif
