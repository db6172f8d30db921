/* crowd.c - one clock for all virtual ranks of an attempt */
#include "worker/crowd.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "worker/phases.h"

#define LATE_NS NS_PER_S /* beyond it steps that were missed are not made up for */

static void drop_load(struct crowd *c)
{
    if (c->last.load)
        ballast__load_report__free_unpacked(c->last.load, NULL);
    c->last.load = NULL;
}

/* What is wrong with the file of loads or with a placement fails the job; a model that is not here
 * need not be. */
static void open_experts(struct crowd *c, const Ballast__Start *s,
                         const struct popularity *popularity, const struct cluster *cluster)
{
    struct err err = {0};
    if (c->n_here < s->n_gang) {
        log_info("job=%" PRIu64 " ranks_here=%u ranks=%zu msg=\"no loads: not all of its ranks are "
                 "in this process\"", c->job, c->n_here, s->n_gang);
        return;
    }
    int rc = virtual_experts_create(s, popularity, cluster, &c->experts, &err);
    if (rc == -ENOENT || rc == -EACCES)
        log_info("job=%" PRIu64 " msg=\"no loads: %s\"", c->job, err.text);
    else if (rc < 0)
        c->failure = err;
}

struct crowd *crowd_find(struct crowd *list, job_id job, uint32_t attempt)
{
    while (list && (list->job != job || list->attempt != attempt))
        list = list->next;
    return list;
}

struct crowd *crowd_join(struct crowd **list, const Ballast__Start *s, uint32_t n_here,
                         uint64_t step, const struct popularity *popularity,
                         const struct cluster *cluster)
{
    struct crowd *c = crowd_find(*list, s->job_id, s->attempt);
    if (!c) {
        c = xcalloc(1, sizeof *c);
        *c = (struct crowd){
            .next = *list, .job = s->job_id, .attempt = s->attempt, .n_here = n_here,
            .step = step, .n_steps = s->spec->train_steps, .step_s = VIRTUAL_STEP_S,
            .last.imbalance = 1,
            .n_tokens = (double)s->spec->train_global_batch * s->spec->data_sequence_length,
        };
        open_experts(c, s, popularity, cluster);
        *list = c;
    }
    c->n_joined++;
    return c;
}

void crowd_leave(struct crowd **list, struct crowd *c)
{
    if (++c->n_gone < c->n_joined)
        return;
    while (*list != c)
        list = &(*list)->next;
    *list = c->next;
    drop_load(c);
    virtual_experts_destroy(c->experts);
    free(c);
}

void crowd_ready(struct crowd *c, uint64_t now_ns)
{
    c->n_ready++;
    c->next_ns = now_ns + (uint64_t)(c->step_s * NS_PER_S);
}

bool crowd_step(struct crowd *c, uint64_t now_ns)
{
    if (!crowd_goes_on(c) || now_ns < c->next_ns || c->step >= c->n_steps)
        return false;
    drop_load(c);
    c->step++;
    if (c->experts) {
        virtual_experts_step(c->experts, c->step, &c->last);
        c->step_s = (1 - VIRTUAL_EXPERT_PART) * VIRTUAL_STEP_S + c->last.busiest_s;
    }
    c->next_ns += (uint64_t)((c->step_s + c->last.pause_s) * NS_PER_S);
    if (c->next_ns + LATE_NS < now_ns)
        c->next_ns = now_ns;
    return true;
}

void crowd_fill_step(const struct crowd *c, Ballast__StepReport *r)
{
    r->step = c->step;
    r->attempt = c->attempt;
    r->loss = 2 + 4 / sqrt((double)c->step);
    r->validation_loss = r->aux_loss = r->z_loss = r->index_loss = NAN;
    r->tokens_per_second = c->n_tokens / c->step_s;
    r->imbalance = c->last.imbalance;
    r->at_ns = clock_wall_ns();
}

/* A mean rank's: what it waits for the busiest one is waited for in dispatch. */
void crowd_fill_phases(const struct crowd *c, Ballast__PhaseTime out[CROWD_PHASES])
{
    const double seconds[CROWD_PHASES] = {c->step_s - c->last.busiest_s, c->last.mean_s,
                                          c->last.busiest_s - c->last.mean_s, c->last.pause_s};
    static const enum phase phases[CROWD_PHASES] = {PHASE_OTHER, PHASE_EXPERTS, PHASE_DISPATCH,
                                                    PHASE_MIGRATION};
    for (int i = 0; i < CROWD_PHASES; i++) {
        ballast__phase_time__init(&out[i]);
        out[i].name = (char *)phase_names[phases[i]];
        out[i].seconds = seconds[i];
    }
}
