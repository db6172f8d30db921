/* run_words.c - the job file's words as what the parts of a run are told */
#include "worker/run_words.h"

#include <errno.h>
#include <string.h>

#include "worker/run_lora.h"

int run_words(struct run *run, struct err *err)
{
    const Ballast__JobSpec *s = run->spec;
    int rc;
    run->schedule = (struct schedule){.lr = s->optimizer_lr, .min_lr = s->schedule_min_lr,
                                      .warmup_steps = s->schedule_warmup_steps,
                                      .steps = s->train_steps};
    run->optim = (struct optim_config){
        .beta1 = s->optimizer_betas[0], .beta2 = s->optimizer_betas[1], .eps = s->optimizer_eps,
        .weight_decay = s->optimizer_weight_decay, .clip_grad_norm = s->optimizer_clip_grad_norm,
        .momentum = s->optimizer_momentum,
    };
    if ((rc = schedule_parse(s->schedule_name, &run->schedule.kind, err)) < 0 ||
        (rc = optim_kind_parse(s->optimizer_name, &run->optim.kind, err)) < 0 ||
        (rc = optim_decay_parse(s->optimizer_decay, &run->optim.decay, err)) < 0 ||
        (rc = bias_rule_parse(s->moe_bias_update, &run->bias_rule, err)) < 0)
        return rc;
    run->rules = (struct moe_rules){
        .force_balance = s->moe_force_balance,
        .capacity_factor = s->moe_capacity_factor,
        .overflow = strcmp(s->moe_overflow, "reroute") == 0 ? OVERFLOW_REROUTE : OVERFLOW_DROP,
        .order = strcmp(s->moe_drop_by, "position") == 0 ? KEEP_FIRST_TOKENS
                                                         : KEEP_LARGEST_WEIGHTS,
        .aux_loss = (float)s->moe_aux_loss, .z_loss = (float)s->moe_z_loss,
        .aux_scope = strcmp(s->moe_aux_scope, "micro_batch") == 0 ? AUX_MICRO_BATCH
                     : strcmp(s->moe_aux_scope, "sequence") == 0  ? AUX_SEQUENCE
                                                                  : AUX_GLOBAL,
    };
    if (s->indexer_with_model) {
        run->index_stage = INDEX_SPARSE;
        run->index_joint = true;
    }
    if (strcmp(s->train_mode, "indexer") == 0) {
        run->index_stage = strcmp(s->indexer_stage, "dense") == 0 ? INDEX_DENSE : INDEX_SPARSE;
        run->bias_rule = BIAS_OFF; /* the router is frozen */
    }
    run_lora_read(run);
    run->nan_rule = strcmp(s->train_on_nan, "skip") == 0       ? NAN_SKIP
                    : strcmp(s->train_on_nan, "rollback") == 0 ? NAN_ROLLBACK
                                                               : NAN_STOP;
    return 0;
}

int run_words_check(const struct run *run, struct err *err)
{
    /* Margins are taken over all experts, of which a choice in groups leaves some out. */
    if (run->bias_rule != BIAS_QUANTILE || run->model_spec.n_expert_groups <= 1)
        return 0;
    return err_set(err, -ENOTSUP, "moe.bias_update: quantile does not go with the model's %u "
                   "groups of experts; expected sign or off", run->model_spec.n_expert_groups);
}
