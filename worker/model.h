/* model.h - the whole model on one rank: forward, loss and hand-written backward
 *
 * Parameters come from shard just in time, one unit at a time, and gradients are added into its
 * blocks and sent home after each unit. All ranks of a job call the same functions in the same
 * order, also with no tokens of their own, because gathering weights and dispatching tokens are
 * collectives.
 *
 * Memory is planned by activations.h and taken at open: a step allocates nothing unless it holds
 * more tokens than any step before, in however many documents. */
#ifndef WORKER_MODEL_H
#define WORKER_MODEL_H

#include "common/layout.h"
#include "common/tensor_map.h"
#include "worker/dispatch.h"
#include "worker/layer.h"
#include "worker/lora.h"
#include "worker/moe.h"
#include "worker/shard.h"

struct model;

struct model_config { /* all borrowed until model_close */
    const struct model_spec *spec;
    const struct tensor_map *map;
    const struct layout *layout;
    const struct slots *slots;
    struct shard *shard;
    const struct lora_config *lora; /* NULL: the map has no adapters */
    struct dispatch *dispatch; /* NULL where the model has no experts */
    struct device *dev;
    int64_t tokens_max; /* planned for; a larger batch grows the plan */
    enum recompute recompute;
    int64_t segment_rows; /* with full recomputation, layers take so many at once; 0: all. Attention
                           * must be KDA or over chosen keys */
    bool count_margins; /* keep the histograms of quantile balancing */
    struct moe_rules rules; /* what a step with backward adds to the routers */
    enum index_stage index_stage; /* not frozen: the indexers train, and nothing else */
    bool index_joint; /* index_stage sparse: they train beside everything else */
    float index_weight;
};

/* Gives *out. -ENOMEM with the bytes when the device lacks them. */
int  model_open(const struct model_config *config, struct model **out, struct err *err);
void model_close(struct model *m);

/* Bytes that the activations take on the device. */
size_t model_activation_bytes(const struct model *m);

/* One micro-batch of this rank: the rows of all documents, one after another. Host memory. */
struct model_batch {
    const int32_t *tokens;     /* n_tokens, each 0 .. vocab - 1 */
    const int32_t *labels;     /* n_tokens, already shifted; negative: no loss here */
    const int32_t *cu_seqlens; /* n_docs + 1, from 0 to n_tokens; NULL when n_tokens is 0 */
    int64_t n_tokens;
    int32_t n_docs;
};

struct model_loss {
    double  sum;      /* over this rank's labels */
    int64_t n_labels;
    double  index;  /* of indexers that train beside the model, over layers; else 0 */
    double  aux, z; /* of the routers, added over layers, times n_labels; 0 where there is none */
};

/* Forward and, where wanted, backward: gradients of the *sum* over labels are added to what the
 * shard holds. *out is this rank's part. Where indexers train, loss and gradients are theirs: the
 * divergence from the main attention, summed over layers and tokens, and n_labels is the number of
 * tokens. Collective. -EINVAL for a token outside the vocabulary
 * or unordered documents (found before anything is sent); errors of the collectives as they are. */
int model_step(struct model *m, const struct model_batch *batch, bool backward,
               struct model_loss *out, struct err *err);

/* The same without a backward, for a batch that gave what is not a number: *out_first is the first
 * output with such: 0 the embedding's, 1 + l of layer l, 1 + n_layers the loss; -1: none. What
 * routing did is not counted. Collective. */
int model_find_bad(struct model *m, const struct model_batch *batch, struct model_loss *out,
                   int64_t *out_first, struct err *err);

/* The forward alone; out_logits (n_tokens, vocab) in host memory. Collective. */
int model_logits(struct model *m, const struct model_batch *batch, float *out_logits,
                 struct err *err);

/* A forward for the loss over the global batch: adds to the choices, (n_layers, n_experts), which a
 * step with backward takes as they are. Collective. */
int  model_survey(struct model *m, const struct model_batch *batch, struct err *err);
void model_choices(struct model *m, int64_t *out);
void model_set_choices(struct model *m, const int64_t *choices); /* NULL: zeros */

/* What routing did since the last reset, on this rank, in forwards of steps with backward (never
 * in a recomputation or an evaluation). Host memory, lives until the next call that takes m. */
#define MARGIN_BINS 1000
struct model_counters {
    const int64_t *tokens;  /* (n_layers, n_experts), as routed; zeros for dense layers */
    const int64_t *served;  /* the same within the capacity */
    const int64_t *rerouted, *dropped; /* n_layers: choices beyond it */
    const int64_t *margins; /* (n_layers, n_experts, MARGIN_BINS), NULL unless count_margins */
    const float *margin_lo, *margin_hi; /* n_layers: the histogram's span, min b - 1, max b + 1 */
    int64_t n_rows;         /* (token, expert) rows that this rank served */
    const int64_t *layer_rows; /* n_layers: the same */
    double  expert_s;       /* seconds in the experts' products, backward and recomputation too,
                             * since spans_reset; 0 where the device is not measured */
};
const struct model_counters *model_counters(struct model *m);
void model_counters_reset(struct model *m);

#endif
