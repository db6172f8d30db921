/* optim.h - what happens between the last backward of a step and the next forward
 *
 * AdamW over the owned slices with the exact global norm, and the router's correction bias. All
 * functions that say so are collective; every rank computes the same numbers. */
#ifndef WORKER_OPTIM_H
#define WORKER_OPTIM_H

#include "worker/model.h"
#include "worker/shard.h"

/* ---- the learning rate -------------------------------------------------------------------- */

enum schedule_kind { SCHEDULE_CONSTANT, SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_WSD };

struct schedule {
    enum schedule_kind kind;
    double   lr, min_lr;
    uint64_t warmup_steps, steps;
};

/* -EINVAL names the words that are known. */
int schedule_parse(const char *word, enum schedule_kind *out, struct err *err);

/* The rate of step (from 1). Warmup rises linearly and reaches lr at step warmup_steps; what
 * follows falls to min_lr at the last step (wsd: over the last tenth of the steps). */
double schedule_lr(const struct schedule *s, uint64_t step);

/* ---- AdamW and Muon ----------------------------------------------------------------------- */

enum optim_kind { OPTIM_ADAMW, OPTIM_MUON, OPTIM_MUON_PER_HEAD };
enum optim_decay { DECAY_MATRICES, DECAY_ALL, DECAY_NONE };

struct optim_config {
    enum optim_kind kind; /* Muon: of matrices, muon.h; the others are AdamW's */
    double momentum;      /* of Muon */
    double beta1, beta2, eps, weight_decay;
    enum optim_decay decay;
    double clip_grad_norm; /* 0: none */
};

/* -EINVAL names the words that are known. */
int optim_kind_parse(const char *word, enum optim_kind *out, struct err *err);
int optim_decay_parse(const char *word, enum optim_decay *out, struct err *err);

/* Sums the replicas' gradients and takes the norm of gradient / n_tokens over the whole model,
 * each parameter counted once. Collective. Not finite if any gradient is not. */
int optim_norm(struct shard *s, const struct tensor_map *map, struct coll *coll,
               struct device *dev, double n_tokens, double *out_norm, struct err *err);

/* AdamW's update of step (from 1) with gradients / n_tokens, clipped by norm as optim_norm gave it,
 * of master weights and of what is read of them. Buffers and tensors that the loss does not reach
 * are left alone, decay included. */
void optim_step(struct shard *s, const struct tensor_map *map, struct device *dev,
                const struct optim_config *config, uint64_t step, double lr, double n_tokens,
                double norm);
/* And Muon's, of what AdamW leaves to it. Collective. */
int optim_muon(struct shard *s, const struct tensor_map *map, const struct model_spec *spec,
               const struct optim_config *config, double lr, double n_tokens, double norm,
               struct err *err);

/* ---- the router's correction bias --------------------------------------------------------- */

enum bias_rule { BIAS_OFF, BIAS_SIGN, BIAS_QUANTILE };

int bias_rule_parse(const char *word, enum bias_rule *out, struct err *err);

/* Moves the correction bias of every layer by what all ranks counted in this step; the owners'
 * slices hold the new one. rate is the sign rule's. Collective. */
int optim_balance(struct shard *s, const struct tensor_map *map, const struct model_spec *spec,
                  struct coll *coll, struct device *dev, const struct model_counters *counters,
                  enum bias_rule rule, double rate, struct err *err);

#endif
