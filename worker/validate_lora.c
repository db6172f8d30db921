/* validate_lora.c - trains a fixture's adapter as its reference did
 *
 * On a map of its own: beside adapters all else is frozen. */
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "worker/agree.h"
#include "worker/ckpt.h"
#include "worker/validate.h"

struct job {
    struct validation *v;
    struct lora_validation *l;
    const char *adapter;
};

static int load(struct stack *s, const struct job *j, struct err *err)
{
    int rc = ckpt_load_weights(j->v->model_path, s->shard, s->config->map, err);

    if (rc == 0)
        rc = ckpt_load_adapters(j->adapter, s->shard, s->config->map, err);
    if ((rc = agree(s->coll, rc, err)) == 0 && j->v->rounding > 0)
        validation_round_start(s, j->v->rounding);
    return rc;
}

/* every: steps from move to move of experts; 0: they rest. */
static int step(struct stack *s, const struct job *j, uint32_t i, uint32_t every, double *out_loss,
                struct err *err)
{
    const struct curve *curve = &j->v->fixture->lora;
    double norm, n_labels;
    int rc = validation_loss(s, &j->v->fixture->steps[i], i, true, out_loss, &norm, &n_labels, err);

    if (rc < 0)
        return rc;
    optim_step(s->shard, s->config->map, s->dev, &curve->optim, i + 1, curve->lr, n_labels, norm);
    if ((rc = shard_refresh(s->shard, err)) == 0 && every > 0 &&
        (i + 1) % every == 0)
        rc = validation_migrate(s, j->v, i + 1, err);
    return rc;
}

/* Owners write their slices side by side. */
static void collect(const struct stack *s, struct lora_validation *l)
{
    for (size_t i = 0; i < l->map.n_entries; i++) {
        struct shard_part part;
        if (l->adapters[i] && shard_part(s->shard, &l->map.entries[i], &part) && part.is_first)
            shard_part_read(s->shard, &part, 0, part.count, l->adapters[i] + part.first);
    }
}

static int run_curve(struct stack *s, const struct job *j, uint32_t every, double *losses,
                     struct err *err)
{
    int rc = shard_refresh_all(s->shard, err);

    shard_zero_optimizer(s->shard);
    for (uint32_t i = 0; rc == 0 && i < j->v->n_steps; i++) {
        double value;
        rc = step(s, j, i, every, &value, err);
        if (rc == 0 && s->rank == 0)
            losses[i] = value;
    }
    return rc;
}

static int rank_run(struct stack *s, void *arg, struct err *err)
{
    const struct job *j = arg;
    int rc = load(s, j, err);

    if (rc == 0 && (rc = run_curve(s, j, j->v->moves.every, j->l->losses, err)) == 0)
        collect(s, j->l);
    for (uint32_t k = 0; rc == 0 && k < LORA_TWINS && !j->v->rounding; k++)
        if ((rc = load(s, j, err)) == 0) {
            validation_move_start(s, k, LORA_TWIN_MOVE);
            rc = run_curve(s, j, 0, j->l->twins[k], err);
        }
    return rc;
}

static int open_map(const struct model_spec *spec, struct lora_validation *l, struct err *err)
{
    struct lora_config c = peft_lora(&l->peft);
    int rc = tensor_map_init(spec, &l->map, err);

    if (rc < 0 || (rc = lora_map_add(&l->map, &c, err)) < 0)
        return rc;
    l->adapters = xcalloc(l->map.n_entries, sizeof *l->adapters);
    for (size_t i = 0; i < l->map.n_entries; i++)
        if (l->map.entries[i].adapter != ADAPTER_NONE)
            l->adapters[i] = xcalloc(l->map.entries[i].count, sizeof **l->adapters);
    return 0;
}

int validation_lora(const struct stack_config *config, const char *adapter, struct validation *v,
                    struct err *err)
{
    struct lora_validation *l = xcalloc(1, sizeof *l);
    struct job job = { v, l, adapter };
    struct stack_config with = *config;
    struct lora_config lora;
    int rc = peft_open(adapter, &l->peft, err);

    if (rc == 0)
        rc = peft_check_copies(adapter, v->model_path, err);
    if (rc == 0)
        rc = open_map(config->spec, l, err);
    if (rc == 0) {
        lora = peft_lora(&l->peft);
        with.map = &l->map;
        with.lora = &lora;
        l->losses = xcalloc(v->n_steps, sizeof *l->losses);
        for (uint32_t k = 0; k < LORA_TWINS; k++)
            l->twins[k] = xcalloc(v->n_steps, sizeof *l->twins[k]);
        rc = stack_run(&with, rank_run, &job, err);
    }
    if (rc < 0)
        lora_validation_destroy(l);
    else
        v->lora = l;
    return rc;
}

void lora_validation_destroy(struct lora_validation *l)
{
    if (!l)
        return;
    for (size_t i = 0; l->adapters && i < l->map.n_entries; i++)
        free(l->adapters[i]);
    free(l->adapters);
    free(l->losses);
    for (uint32_t k = 0; k < LORA_TWINS; k++)
        free(l->twins[k]);
    tensor_map_fini(&l->map);
    peft_fini(&l->peft);
    free(l);
}
