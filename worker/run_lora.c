/* run_lora.c - loads the frozen base and the adapters that a run goes on with
 *
 * Which of both does not fit is told before a step is done. */
#include "worker/run_lora.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/job_map.h"
#include "worker/agree.h"
#include "worker/base_hash.h"
#include "worker/peft.h"

void run_lora_read(struct run *run)
{
    if (!job_trains_adapters(run->spec))
        return;
    run->lora_keys = job_lora(run->spec);
    run->lora = &run->lora_keys;
    run->bias_rule = BIAS_OFF; /* the router is frozen */
}

static int load_base(struct run *run, struct err *err)
{
    const Ballast__JobSpec *s = run->spec;
    int rc = 0;
    if (!ckpt_has_weights(s->model_path))
        rc = err_set(err, -EINVAL, "model.path %s holds no weights, but train.mode: lora trains "
                     "adapters beside those of a model; use train.mode: full", s->model_path);
    else
        rc = ckpt_load_base(s->model_path, run->shard, &run->map,
                            strcmp(s->model_base_precision, "f32") != 0, err);
    if ((rc = agree(run->coll, rc, err)) < 0 ||
        (rc = base_hash(s->model_path, run->coll, &run->ckpt.base_hash, err)) < 0)
        return rc;
    if (run->coll->rank == 0)
        printf("base: %s, hash %016" PRIx64 ", as %s\n", s->model_path, run->ckpt.base_hash,
               s->model_base_precision);
    run->has_base = true;
    return 0;
}

static int load_adapter(struct run *run, struct err *err)
{
    const char *path = run->spec->lora_adapter;
    struct peft p;
    int rc = peft_open(path, &p, err);
    if (rc < 0)
        return rc;
    rc = peft_check(&p, path, run->lora, err);
    if (rc == 0 && run->coll->rank == 0)
        rc = peft_check_copies(path, run->spec->model_path, err);
    peft_fini(&p);
    return rc < 0 ? rc : ckpt_load_adapters(path, run->shard, &run->map, err);
}

static int begin(struct run *run, struct err *err)
{
    const char *path = run->spec->lora_adapter;
    bool has_adapter = path && *path;
    int rc = 0;
    shard_zero_optimizer(run->shard);
    if (!has_adapter)
        ckpt_init_adapters(run->shard, &run->map, run->spec->train_seed);
    else if ((rc = load_adapter(run, err)) < 0)
        err_prefix(err, "train.lora.adapter");
    if (rc == 0 && run->coll->rank == 0)
        printf("adapters: %s\n", has_adapter ? path : "new, B is zero");
    run->state = (struct ckpt_state){.seed = run->spec->train_seed, .validation_loss = NAN};
    return agree(run->coll, rc, err);
}

int run_lora_restore(struct run *run, struct err *err)
{
    int rc = run->has_base ? 0 : load_base(run, err);
    if (rc < 0)
        return rc;
    if (run->checkpoint_step == 0)
        return begin(run, err);
    rc = ckpt_load(&run->ckpt, run->checkpoint_step, &run->state, err);
    run->state.seed = run->spec->train_seed;
    return rc;
}
