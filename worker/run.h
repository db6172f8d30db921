/* run.h - everything that one rank holds while it trains */
#ifndef WORKER_RUN_H
#define WORKER_RUN_H

#include <stdatomic.h>

#include "common/data.h"
#include "common/layout.h"
#include "common/memory_model.h"
#include "common/tensor_map.h"
#include "proto/ballast.pb-c.h"
#include "worker/ckpt.h"
#include "worker/dispatch.h"
#include "worker/model.h"
#include "worker/optim.h"
#include "worker/plans.h"
#include "worker/settings.h"
#include "worker/trace.h"
#include "worker/usage.h"
#include "worker/window.h"

struct gang;

/* Set by the channel's thread, read by the training one. Wishes only grow. */
enum run_wish { WISH_NONE, WISH_CHECKPOINT, WISH_NOW };
struct run_wishes {
    atomic_uint wish;
    atomic_bool cancelled;   /* WISH_NOW, as coll_host_open wants it */
    atomic_bool is_training; /* before that there is nothing to save */
    _Atomic(struct coll *) coll;
    /* Of a run on several machines: tells the daemon where this rank listens; then peers arrive.
     * NULL: all ranks are on this machine. */
    void (*tell)(void *user, const char *address, const uint8_t *key);
    void *tell_user;
    struct gang *gang;
};

#define RUN_SUMS 8
#define RUN_PATIENCE_NS (600 * NS_PER_S) /* with a rank that lives but does not come */

enum nan_rule { NAN_STOP, NAN_SKIP, NAN_ROLLBACK };

struct run {
    const Ballast__Start   *start; /* kept from open */
    const Ballast__JobSpec *spec;  /* live_spec: START's, with the settings in force */
    Ballast__JobSpec   live_spec;  /* texts and lists are START's */
    uint32_t           settings_revision; /* in force */
    struct run_wishes *wishes;     /* kept from open */
    struct model_spec  model_spec;
    struct tensor_map  map;
    struct layout      layout;
    struct slots       slots;
    struct device     *dev;
    struct coll       *coll;
    struct shard      *shard;
    struct dispatch   *dispatch; /* NULL: no experts */
    struct model      *model;
    struct plans      *plans;    /* kept from open */
    struct settings   *settings; /* kept from open */
    struct window      window;
    struct data       *train, *validation; /* validation may be NULL */
    struct data_batch  batch;
    struct schedule    schedule;
    struct optim_config optim;
    struct lora_config lora_keys;   /* of the job file */
    const struct lora_config *lora; /* those; NULL: the job trains no adapters */
    bool               has_base;    /* the frozen weights are loaded */
    enum index_stage   index_stage; /* not frozen: the job trains the indexers */
    bool               index_joint; /* and everything else */
    enum bias_rule     bias_rule;
    struct moe_rules   rules;
    enum nan_rule      nan_rule;
    struct ckpt_config ckpt;
    struct ckpt_forms  forms;   /* of the weights in checkpoints */
    int                ckpt_lock;
    struct ckpt_state  state;
    uint64_t resumed_from_step, checkpoint_step; /* 0: none */
    double   rate; /* operations a second of all ranks' devices together; 0: not known */
    double   busy_s; /* what this rank did itself in the newest step, for the word after the next */
    struct trace *trace; /* NULL: the job wants none */
    struct memory_plan plan;  /* of this rank, made before anything was taken */
    struct usage       usage; /* and what it took so far */
    double  *sums; /* RUN_SUMS + n_layers * devices of an expert group, see step.c */
};

/* Device, collectives, data, model, and the newest checkpoint or the first weights. All ranks get
 * the same result once the collectives stand. run must be zero; ended with run_close also after a
 * failure. */
int  run_open(struct run *run, const Ballast__Start *start, struct run_wishes *wishes,
              struct plans *plans, struct settings *settings, struct err *err);
void run_close(struct run *run);

/* All ranks have looked at the same newer settings at this step boundary: they are in force. */
void run_change_settings(struct run *run);

/* Weights and state as they were at the newest checkpoint, or at the beginning if there is none.
 * Collective. */
int run_restore(struct run *run, struct err *err);

#endif
