/* sim_check.c - what must hold in every history */
#include "tests/sim.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/core.h"
#include "proto/check.h"

#define S(state) BALLAST__JOB_STATE__JOB_##state

/* Written down a second time, from the drawing, so that job.c is checked and not copied. */
static bool may_follow(Ballast__JobState from, Ballast__JobState to)
{
    static const Ballast__JobState moves[][2] = {
        {S(QUEUED), S(CANCELLED)}, {S(QUEUED), S(PAUSED)},
        {S(STARTING), S(RUNNING)}, {S(STARTING), S(RECOVERING)}, {S(STARTING), S(STOPPING)},
        {S(STARTING), S(FAILED)},
        {S(RUNNING), S(DONE)}, {S(RUNNING), S(RECOVERING)}, {S(RUNNING), S(STOPPING)},
        {S(RUNNING), S(FAILED)},
        {S(RECOVERING), S(STOPPING)}, {S(RECOVERING), S(FAILED)},
        {S(RECOVERING), S(CANCELLED)}, {S(RECOVERING), S(PAUSED)},
        {S(RECOVERING), S(QUEUED)},
        {S(STOPPING), S(DONE)}, {S(STOPPING), S(FAILED)}, {S(STOPPING), S(CANCELLED)},
        {S(STOPPING), S(STOPPING)}, {S(STOPPING), S(PAUSED)}, {S(STOPPING), S(QUEUED)},
        {S(PAUSED), S(QUEUED)}, {S(PAUSED), S(CANCELLED)},
        {S(DONE), S(QUEUED)}, {S(FAILED), S(QUEUED)}, {S(CANCELLED), S(QUEUED)},
    };
    for (size_t i = 0; i < sizeof moves / sizeof moves[0]; i++)
        if (moves[i][0] == from && moves[i][1] == to)
            return true;
    return false;
}

/* The state of a job after the records before the newest. */
static Ballast__JobState state_before(const struct sim *s, job_id job)
{
    Ballast__JobState state = S(UNKNOWN);
    for (size_t i = 0; i + 1 < s->store.n_log; i++) {
        const Ballast__Record *r = s->store.log[i];
        if (r->job_id != job)
            continue;
        if (r->what_case == BALLAST__RECORD__WHAT_SUBMITTED)
            state = S(QUEUED);
        else if (r->what_case == BALLAST__RECORD__WHAT_ASSIGNED)
            state = S(STARTING);
        else if (r->what_case == BALLAST__RECORD__WHAT_STATE)
            state = r->state->state;
    }
    return state;
}

static void check_key_is_new(struct sim *s, const Ballast__Record *r)
{
    for (size_t i = 0; i + 1 < s->store.n_log; i++) {
        const Ballast__Record *other = s->store.log[i];
        if (other->what_case != BALLAST__RECORD__WHAT_SUBMITTED)
            continue;
        if (other->job_id >= r->job_id)
            sim_fail(s, "job id %" PRIu64 " came after %" PRIu64, r->job_id, other->job_id);
        if (!memcmp(other->submitted->idempotency_key.data,
                    r->submitted->idempotency_key.data, IDEMPOTENCY_KEY_BYTES))
            sim_fail(s, "one key made jobs %" PRIu64 " and %" PRIu64, other->job_id, r->job_id);
    }
}

/* ---- placements ---------------------------------------------------------------------------- */

/* The newest placement of a job that was recorded before the newest record, or NULL. */
static const Ballast__Placement *placement_before(const struct sim *s, job_id job)
{
    const Ballast__Placement *p = NULL;
    for (size_t i = 0; i + 1 < s->store.n_log; i++)
        if (s->store.log[i]->job_id == job &&
            s->store.log[i]->what_case == BALLAST__RECORD__WHAT_PLACEMENT)
            p = s->store.log[i]->placement->placement;
    return p;
}

static const Ballast__Record *plan_before(const struct sim *s, job_id job)
{
    const Ballast__Record *plan = NULL;
    for (size_t i = 0; i + 1 < s->store.n_log; i++)
        if (s->store.log[i]->job_id == job &&
            s->store.log[i]->what_case == BALLAST__RECORD__WHAT_PLAN)
            plan = s->store.log[i];
    return plan;
}

static uint32_t attempt_before(const struct sim *s, job_id job)
{
    uint32_t attempt = 0;
    for (size_t i = 0; i + 1 < s->store.n_log; i++)
        if (s->store.log[i]->job_id == job &&
            s->store.log[i]->what_case == BALLAST__RECORD__WHAT_ASSIGNED)
            attempt = s->store.log[i]->assigned->attempt;
    return attempt;
}

static void check_plan(struct sim *s, const Ballast__Record *r)
{
    const Ballast__Record *last = plan_before(s, r->job_id);
    const Ballast__Placement *p = placement_before(s, r->job_id);
    struct err err = {0};
    s->counts.n_plans++;
    if (last && last->plan->placement->epoch >= r->plan->placement->epoch)
        sim_fail(s, "job %" PRIu64 ": plan %u after plan %u", r->job_id,
                 r->plan->placement->epoch, last->plan->placement->epoch);
    if (r->plan->base_epoch != (p ? p->epoch : 0))
        sim_fail(s, "job %" PRIu64 ": plan %u starts from placement %u, in force is %u",
                 r->job_id, r->plan->placement->epoch, r->plan->base_epoch, p ? p->epoch : 0);
    if (!r->plan->n_moves || !(r->plan->predicted_gain_s > 0))
        sim_fail(s, "job %" PRIu64 ": plan %u has no moves or no gain", r->job_id,
                 r->plan->placement->epoch);
    if (check_placement(r->plan->placement, &err) < 0)
        sim_fail(s, "job %" PRIu64 ": %s", r->job_id, err.text);
}

/* A placement is recorded only when every rank of the attempt has it. */
static void check_in_force(struct sim *s, const Ballast__Record *r)
{
    uint32_t attempt = attempt_before(s, r->job_id);
    bool had_ended = false;
    s->counts.n_placements++;
    if (r->job_id < SIM_JOBS_MAX && (s->carried_out[r->job_id].attempt != attempt ||
                                     s->carried_out[r->job_id].epoch != r->placement->epoch))
        sim_fail(s, "job %" PRIu64 ": placement %u is recorded, attempt %u has %u of attempt %u",
                 r->job_id, r->placement->epoch, attempt, s->carried_out[r->job_id].epoch,
                 s->carried_out[r->job_id].attempt);
    for (size_t i = 0; i + 1 < s->store.n_log; i++)
        had_ended |= s->store.log[i]->job_id == r->job_id &&
            s->store.log[i]->what_case == BALLAST__RECORD__WHAT_PLAN_ENDED &&
            s->store.log[i]->plan_ended->epoch == r->placement->epoch;
    s->counts.n_late_wins += had_ended;
}

/* A job that ran to its end has the placement that its ranks had. */
static void check_last_placement(struct sim *s, const Ballast__Record *r)
{
    const Ballast__Placement *p = placement_before(s, r->job_id);
    if (r->job_id >= SIM_JOBS_MAX ||
        s->carried_out[r->job_id].attempt != attempt_before(s, r->job_id))
        return;
    if (s->carried_out[r->job_id].epoch != (p ? p->epoch : 0))
        sim_fail(s, "job %" PRIu64 " is DONE with placement %u, recorded is %u", r->job_id,
                 s->carried_out[r->job_id].epoch, p ? p->epoch : 0);
}

void check_record(struct sim *s, const Ballast__Record *r)
{
    if (r->seq != s->store.n_log)
        sim_fail(s, "record %" PRIu64 " is the %zuth", r->seq, s->store.n_log);
    if (r->what_case == BALLAST__RECORD__WHAT_SUBMITTED)
        check_key_is_new(s, r);
    if (r->what_case == BALLAST__RECORD__WHAT_STATE) {
        Ballast__JobState before = state_before(s, r->job_id);
        if (!may_follow(before, r->state->state))
            sim_fail(s, "job %" PRIu64 " went from %s to %s", r->job_id, event_job_state(before),
                     event_job_state(r->state->state));
        s->counts.n_done += r->state->state == S(DONE);
    }
    if (r->what_case == BALLAST__RECORD__WHAT_STATE && r->state->state == S(DONE) &&
        state_before(s, r->job_id) == S(RUNNING))
        check_last_placement(s, r);
    if (r->what_case == BALLAST__RECORD__WHAT_PLAN)
        check_plan(s, r);
    if (r->what_case == BALLAST__RECORD__WHAT_PLACEMENT)
        check_in_force(s, r);
    s->counts.n_plans_ended += r->what_case == BALLAST__RECORD__WHAT_PLAN_ENDED;
    if (r->what_case == BALLAST__RECORD__WHAT_ASSIGNED) {
        Ballast__JobState before = state_before(s, r->job_id);
        if (before != S(QUEUED) && before != S(RECOVERING))
            sim_fail(s, "job %" PRIu64 " was assigned when %s", r->job_id,
                     event_job_state(before));
    }
}

static void compare(struct sim *s, char *live, char *replayed, const char *what)
{
    if (strcmp(live, replayed)) {
        sim_fail(s, "%s differs from the live state", what);
        sim_say(s, "live:\n%s", live);
        sim_say(s, "replayed:\n%s", replayed);
        if (s->keeps_trace)
            fprintf(stderr, "live:\n%sreplayed:\n%s", live, replayed);
    }
    free(live);
    free(replayed);
}

void check_replay(struct sim *s)
{
    if (s->coord && !s->n_pending)
        compare(s, coord_dump(s->coord), coord_dump(s->store.shadow), "the replayed log");
}

void check_from_scratch(struct sim *s)
{
    struct coord *c = coord_create(&s->config);
    struct err err = {0};
    for (size_t i = 0; i < s->store.n_log; i++)
        if (coord_apply(c, s->store.log[i], &err) < 0)
            sim_fail(s, "replay from scratch: %s", err.text);
    if (s->coord && !s->n_pending)
        compare(s, coord_dump(s->coord), coord_dump(c), "the log replayed from scratch");
    coord_destroy(c);
}

void check_submitted(struct sim *s)
{
    for (size_t i = 0; i < s->n_ops; i++) {
        const struct sim_op *op = &s->ops[i];
        if (!op->job)
            continue;
        bool exists = false;
        for (size_t k = 0; k < s->store.n_log && !exists; k++) {
            const Ballast__Record *r = s->store.log[k];
            exists = r->what_case == BALLAST__RECORD__WHAT_SUBMITTED && r->job_id == op->job &&
                !memcmp(r->submitted->idempotency_key.data, op->key, sizeof op->key);
        }
        if (!exists)
            sim_fail(s, "the submit of job %" PRIu64 " was acknowledged and is lost", op->job);
    }
}

/* With no daemon killed, no report was lost: all steps of a finished job are stored. */
static void check_steps(struct sim *s)
{
    for (size_t i = 0; i < s->store.n_log && !s->had_daemon_kill; i++) {
        const Ballast__Record *r = s->store.log[i];
        if (r->what_case != BALLAST__RECORD__WHAT_STATE || r->state->state != S(DONE))
            continue;
        const Ballast__JobSpec *spec = NULL;
        for (size_t k = 0; k < i && !spec; k++)
            if (s->store.log[k]->job_id == r->job_id &&
                s->store.log[k]->what_case == BALLAST__RECORD__WHAT_SUBMITTED)
                spec = s->store.log[k]->submitted->spec;
        for (uint64_t step = 1; spec && step <= spec->train_steps; step++)
            if (step >= s->store.n_steps[r->job_id] || !s->store.steps[r->job_id][step])
                sim_fail(s, "job %" PRIu64 " is DONE but the report of step %" PRIu64
                         " was lost", r->job_id, step);
    }
}

static bool may_wait(const struct job *j, uint32_t n_hosts)
{
    return j->held || j->n_after || j->state == S(PAUSED) ||
        (j->state == S(QUEUED) && j->spec->parallel_workers > n_hosts);
}

bool check_is_settled(struct sim *s, char *out_why, size_t n_why)
{
    if (!s->coord || s->n_pending || !clients_are_done(s)) {
        snprintf(out_why, n_why, "calls or commits are open");
        return false;
    }
    struct arena arena = {0};
    bool is_settled = true;
    for (size_t i = 0; i < s->coord->jobs.n && is_settled; i++) {
        const struct job *j = s->coord->jobs.jobs[i];
        const char *reason = job_reason(j, s->now_ns, &arena);
        if (!job_has_ended(j) && j->state != S(RUNNING) && !*reason)
            sim_fail(s, "job %" PRIu64 " is %s and does not say why", j->id,
                     event_job_state(j->state));
        is_settled = job_has_ended(j) || (may_wait(j, s->n_hosts) && !j->ranks);
        snprintf(out_why, n_why, "job %" PRIu64 " is %s: %s", j->id, event_job_state(j->state),
                 reason);
    }
    for (uint32_t h = 0; h < s->n_hosts && is_settled; h++) {
        is_settled = host_is_idle(s, h);
        snprintf(out_why, n_why, "worker w%u still holds something", h);
    }
    arena_fini(&arena);
    if (is_settled) {
        check_replay(s);
        check_from_scratch(s);
        check_submitted(s);
        check_steps(s);
    }
    return is_settled;
}
