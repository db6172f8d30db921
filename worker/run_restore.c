/* run_restore.c - the weights and the state that a run goes on with, or begins from */
#include "worker/run.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>

#include "worker/agree.h"
#include "worker/run_lora.h"

/* Weights that cannot be read are no reason to begin from nothing: that costs days, unseen. */
static int check_has_none(const char *path, struct err *err)
{
    DIR *folder = opendir(path);
    int rc = 0;
    for (struct dirent *e; folder && rc == 0 && (e = readdir(folder));) {
        if (fnmatch("*.safetensors", e->d_name, 0) == 0 ||
            fnmatch("pytorch_model*.bin", e->d_name, 0) == 0)
            rc = err_set(err, -EINVAL, "model.path %s holds %s, but neither model.safetensors nor "
                         "model.safetensors.index.json: complete it, or leave config.json alone "
                         "there to begin from model.init_seed", path, e->d_name);
    }
    if (folder)
        closedir(folder);
    return rc;
}

static int load_first_weights(struct run *run, struct err *err)
{
    const char *path = run->spec->model_path;
    bool has_weights = ckpt_has_weights(path);
    int rc;
    if (has_weights)
        rc = ckpt_load_weights(path, run->shard, &run->map, err);
    else if ((rc = check_has_none(path, err)) == 0)
        ckpt_init_weights(run->shard, &run->map, &run->model_spec, run->spec->model_init_seed);
    if (rc == 0 && run->coll->rank == 0)
        printf("weights: %s %s\n", has_weights ? "those in" : "from model.init_seed, none are in",
               path);
    run->state = (struct ckpt_state){.seed = run->spec->train_seed, .validation_loss = NAN};
    return agree(run->coll, rc, err);
}

int run_restore(struct run *run, struct err *err)
{
    int rc;
    if (run->lora) {
        rc = run_lora_restore(run, err);
    } else if (run->checkpoint_step == 0) {
        shard_zero_optimizer(run->shard);
        rc = load_first_weights(run, err);
    } else {
        rc = ckpt_load(&run->ckpt, run->checkpoint_step, &run->state, err);
        run->state.seed = run->spec->train_seed;
    }
    return rc < 0 ? rc : shard_refresh_all(run->shard, err);
}
