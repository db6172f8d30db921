/* model_parts.h - what the parts of the model share */
#ifndef WORKER_MODEL_PARTS_H
#define WORKER_MODEL_PARTS_H

#include "worker/decoder_cut.h"
#include "worker/model.h"
#include "worker/positions.h"

struct model {
    struct model_config config;
    uint64_t (*at)[TENSOR_ROLES]; /* offsets by unit and role */
    uint32_t (*packed_rows)[TENSOR_ROLES];
    struct adapters_at *adapters; /* by unit; NULL: there are none */
    struct activations act;
    struct moe moe;
    struct positions positions;
    struct residuals residuals;
    struct decoder_saved *layers;
    struct decoder_cut *cuts; /* n_layers, of layers in segments; NULL: they take all at once */
    struct segments segments; /* of the present batch */
    uint32_t n_blocks;
    float   *host_ones;           /* uploaded for sums over slots */
    int64_t  n_host_ones;
    struct model_counters counters;
    int64_t *host_tokens, *host_margins;
    bool     knows_counts; /* the two are the device's */
    double  *acc_loss; /* on the device: of the micro-batch, of the model and of its indexers */

    /* of the current step */
    struct pass pass;
    bool is_learning; /* indexers get gradients in this forward */
    bool has_head, has_backward; /* what comes after the layers of the forward */
    const int32_t *tokens, *labels; /* on the device */
};

/* ---- model_batch: a micro-batch on the device ------------------------------------------------ */

/* Checks b, forgets the batch before it and uploads it: the pass of m is its. Fails as model_step
 * does for a bad batch. */
int  model_begin(struct model *m, const struct model_batch *b, struct err *err);

/* What is uploaded for sums over n slots. */
void model_grow_ones(struct model *m, int64_t n);

/* What of it planning does, too. All ranks cut a batch alike, however many tokens each has. */
void model_cut_batch(struct model *m, const int32_t *cu_seqlens, int32_t n_docs);
void model_carve_inputs(struct model *m, const struct model_batch *b);
/* What a backward needs beside them. */
void model_carve_gradients(struct model *m);

/* ---- model_walk: the units one after another ------------------------------------------------- */

/* What is carved of a layer whose backward will come. */
enum carve model_kept(const struct model *m);

/* All collective. keep: for a backward without recomputation. */
int  model_forward(struct model *m, bool keep, struct err *err);
int  model_head_loss(struct model *m, bool backward, struct err *err);
int  model_head_logits(struct model *m, float *out_logits, struct err *err);
int  model_backward(struct model *m, struct err *err);

/* A walk that failed between the two halves of a layer leaves plans behind. */
void model_drop_plans(struct model *m);

#endif
