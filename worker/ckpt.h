/* ckpt.h - a model's weights and a run's state, from and to HuggingFace folders
 *
 * PATH/step-N/ holds config.json, the weights under their published names in the dtypes of
 * ckpt_forms.h, and ballast/ with the optimizer's state under the same names, the F32 weights of
 * those that their dtype rounds (masters/), and state.json. It is written as step-N.tmp by all
 * ranks and renamed by rank 0 when every byte is on disk: a crash leaves the old or the new. A run
 * resumes on any layout. Where adapters are trained, it holds these alone, as a PEFT folder, with
 * the hash of the base that they belong to. */
#ifndef WORKER_CKPT_H
#define WORKER_CKPT_H

#include "common/lora_map.h"
#include "common/model_spec.h"
#include "worker/ckpt_forms.h"
#include "worker/coll.h"
#include "worker/shard.h"

/* Initial weights, and adapters: a stream of random numbers per tensor, a function of seed, the
 * tensor's name and the element's index alone. */
void ckpt_init_adapters(struct shard *s, const struct tensor_map *map, uint64_t seed);
void ckpt_init_weights(struct shard *s, const struct tensor_map *map,
                       const struct model_spec *spec, uint64_t seed);

/* The weights of a HuggingFace folder; each rank reads its slices. Checks that every tensor is
 * there in its shape. */
int ckpt_load_weights(const char *model_path, struct shard *s, const struct tensor_map *map,
                      struct err *err);

/* The same of a base that is frozen: what the map keeps packed is that, and
 * other matrices are rounded to BF16 if rounds. What is stored as FP8 is not rounded again. */
int ckpt_load_base(const char *model_path, struct shard *s, const struct tensor_map *map,
                   bool rounds, struct err *err);

/* The adapters of a PEFT folder, which must be just those of the map. */
int ckpt_load_adapters(const char *path, struct shard *s, const struct tensor_map *map,
                       struct err *err);

/* Whether the folder holds weights, besides its config.json. */
bool ckpt_has_weights(const char *model_path);

struct ckpt_config { /* borrowed while it is used */
    const char *path;       /* the job's checkpoint.path */
    const char *model_path; /* where config.json is copied from */
    uint32_t keep;          /* newest N that stay; 0: all */
    uint64_t file_bytes_max; /* of one file of tensors; 0: 4 GiB */
    const struct model_spec *spec;
    const struct tensor_map *map;
    const struct ckpt_forms *forms; /* of the model's weights; NULL: all are written as F32 */
    const struct lora_config *lora; /* NULL: no adapters */
    uint64_t base_hash;             /* with adapters */
    struct shard *shard;
    struct coll *coll;

    /* On rank 0, when all is written and before the checkpoint counts; NULL is fine. */
    void (*before_commit)(void *context);
    void *context; /* borrowed */
};

/* What a run must know to go on; everything else is the job file. */
struct ckpt_state {
    uint64_t step;  /* optimizer steps done */
    uint64_t seed;  /* of data */
    uint64_t next_sample; /* global index */
    double   validation_loss; /* NaN: none was taken */
    uint64_t n_masters; /* given by ckpt_load: tensors that a checkpoint keeps in F32 besides */
};

/* Rank 0 makes the folder if it is missing, takes its lock (it waits patience_ns for a run that is
 * just ending, then fails with -EBUSY) and removes half-written checkpoints. *out_step is the
 * newest committed one, 0 if there is none. Gives *out_lock, to be closed after the last save; -1
 * on other ranks. Collective; once, before the others. */
int ckpt_find(const struct ckpt_config *c, uint64_t patience_ns, int *out_lock,
              uint64_t *out_step, struct err *err);

/* Weights, optimizer state and *out_state of that step. Collective. -EINVAL or -EIO for a damaged
 * one, with the command to type. */
int ckpt_load(const struct ckpt_config *c, uint64_t step, struct ckpt_state *out_state,
              struct err *err);

/* Writes step state->step, unless it is there already; then removes what is beyond keep.
 * Collective: all ranks get the same result. On failure nothing is left of it. */
int ckpt_save(const struct ckpt_config *c, const struct ckpt_state *state, struct err *err);

#endif
