/* simulate_trainer.c - a trainer that only counts: what it says, as true ones say it */
#include "worker/simulate_parts.h"

#include <signal.h>

#include "proto/check.h"

static void say_state(struct virtual *v, struct agent_turn *t, Ballast__RankPhase phase,
                      const char *text)
{
    const struct counter *c = &v->trainer;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    Ballast__RankState s = BALLAST__RANK_STATE__INIT;
    s.job_id = c->job;
    s.attempt = c->attempt;
    s.rank = c->rank;
    s.phase = phase;
    s.step = c->step;
    s.checkpoint_step = *simulated_checkpoint(v->all, c->job);
    s.resumed_from_step = c->resumed_from_step;
    s.settings_revision = c->settings_revision;
    s.text = (char *)text;
    if (c->crowd->experts) {
        virtual_experts_say(c->crowd->experts, c->rank, &s);
    } else if (c->arrived_epoch) {
        s.rejected_epoch = c->arrived_epoch;
        s.plan_text = "these virtual workers know of no experts";
    }
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = &s;
    agent_trainer_message(v->agent, t, c->job, c->attempt, &m);
}

static void say_load(struct virtual *v, struct agent_turn *t)
{
    const struct counter *c = &v->trainer;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    if (!c->crowd->last.load)
        return;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_LOAD;
    m.load = c->crowd->last.load;
    agent_trainer_message(v->agent, t, c->job, c->attempt, &m);
}

static void say_step(struct virtual *v, struct agent_turn *t)
{
    const struct counter *c = &v->trainer;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    Ballast__StepReport r = BALLAST__STEP_REPORT__INIT;
    Ballast__PhaseTime phases[CROWD_PHASES], *pointers[CROWD_PHASES];
    crowd_fill_step(c->crowd, &r);
    crowd_fill_phases(c->crowd, phases);
    for (int i = 0; i < CROWD_PHASES; i++)
        pointers[i] = &phases[i];
    r.phases = pointers;
    r.n_phases = CROWD_PHASES;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STEP;
    m.step = &r;
    agent_trainer_message(v->agent, t, c->job, c->attempt, &m);
}

static void end_trainer(struct virtual *v, struct agent_turn *t, int exit_code, int signal_number)
{
    struct counter ended = v->trainer;
    v->trainer = (struct counter){0};
    crowd_leave(&v->all->crowds, ended.crowd);
    agent_log_grown(v->agent, t, ended.job, ended.attempt, 0, 0, true);
    agent_trainer_exited(v->agent, t, ended.job, ended.attempt, exit_code, signal_number, NULL);
}

bool counter_is_due(const struct counter *c, uint64_t now_ns)
{
    return c->job && (c->is_killed || c->step < c->crowd->step ||
                      (!c->is_ready && now_ns >= c->ready_ns));
}

static void begin(struct virtual *v, struct agent_turn *t)
{
    struct counter *c = &v->trainer;
    if (c->crowd->failure.code < 0) {
        say_state(v, t, BALLAST__RANK_PHASE__RANK_FAILED, c->crowd->failure.text);
        end_trainer(v, t, 1, 0);
        return;
    }
    c->is_ready = true;
    crowd_ready(c->crowd, t->now_ns);
    say_state(v, t, BALLAST__RANK_PHASE__RANK_READY, "");
}

void counter_go_on(struct virtual *v, struct agent_turn *t)
{
    struct counter *c = &v->trainer;
    if (c->is_killed) {
        end_trainer(v, t, 0, SIGKILL);
        return;
    }
    if (!c->is_ready) {
        begin(v, t);
        return;
    }
    c->step = c->crowd->step;
    bool is_last = c->step >= c->crowd->n_steps;
    uint64_t *saved = simulated_checkpoint(v->all, c->job);
    bool saves = is_last || c->crowd->ends || (c->every_steps && c->step % c->every_steps == 0);
    if (saves && c->step > *saved)
        *saved = c->step;
    if (c->rank == 0) {
        say_load(v, t);
        say_step(v, t);
    }
    say_state(v, t, BALLAST__RANK_PHASE__RANK_RUNNING, "");
    if (!is_last && !c->crowd->ends)
        return;
    say_state(v, t, is_last ? BALLAST__RANK_PHASE__RANK_FINISHED
                            : BALLAST__RANK_PHASE__RANK_STOPPED, "");
    end_trainer(v, t, 0, 0);
}
