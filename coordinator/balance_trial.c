/* balance_trial.c - what a plan really brings, and which kinds are barred for it */
#include "coordinator/balance_parts.h"

#include "common/split.h"

#define TRIAL_WINDOWS  3 /* after which a plan has won or lost */
#define BARRED_WINDOWS 8 /* for which a kind that lost is not proposed; doubles */

void trial_end(struct balance *b)
{
    split_destroy(b->trial.split);
    placement_fini(&b->trial.before);
    b->trial.split = NULL;
    b->trial.is_on = false;
}

void trial_watch(struct balance *b, const double *load, const struct placement *in_force)
{
    struct trial *t = &b->trial;
    double even = balance_even_time(b, load);
    if (!t->is_on || !(even > 0))
        return;
    t->realised += split_solve(t->split, load, NULL) / even -
                   balance_ratio(b, in_force, load, NULL);
    t->n_windows++;
    if (t->n_windows < TRIAL_WINDOWS)
        return;
    if (t->realised < 0) {
        b->barred[t->kind] = BARRED_WINDOWS << (b->n_losses[t->kind] < 8 ? b->n_losses[t->kind]++
                                                                         : 8);
    } else if (b->n_losses[t->kind]) {
        b->n_losses[t->kind]--;
    }
    trial_end(b);
}

void balance_applied(struct balance *b, const struct placement *before,
                     const struct balance_verdict *verdict)
{
    if (verdict->kind == BALANCE_STAY)
        return;
    trial_end(b);
    b->cooldown = b->policy.cooldown_windows;
    b->was_tried = true;
    b->trial = (struct trial){ .is_on = true, .kind = verdict->kind,
        .predicted_per_window = verdict->ratio_before - verdict->ratio_after };
    placement_init_like(&b->trial.before, before);
    b->trial.split = split_create(before, b->policy.speed);
}

bool balance_realised(const struct balance *b, double *out_realised, double *out_predicted)
{
    if (!b->was_tried || !b->trial.n_windows)
        return false;
    *out_realised = b->trial.realised;
    *out_predicted = b->trial.predicted_per_window * b->trial.n_windows;
    return true;
}
