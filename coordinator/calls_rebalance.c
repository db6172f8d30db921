/* calls_rebalance.c - what clients ask for of the placement of experts
 *
 * PLAN changes nothing. APPLY carries the revision of the plan that a person has looked at, so
 * that nobody carries out another one; its key makes a repeated call harmless. */
#include "coordinator/core.h"

#include <inttypes.h>
#include <string.h>

static Ballast__RebalancePlanReply *new_reply(struct turn *t, const struct job *j)
{
    Ballast__RebalancePlanReply *reply = arena_alloc(&t->arena, sizeof *reply);
    ballast__rebalance_plan_reply__init(reply);
    reply->auto_on = j->rebalance.is_auto;
    return reply;
}

static Ballast__RebalancePlanReply *describe(struct turn *t, const struct job *j)
{
    const struct proposal *s = propose_now(j->rebalance.propose);
    Ballast__RebalancePlanReply *reply = new_reply(t, j);
    reply->revision = s->revision;
    reply->n_moves = propose_moves(j->rebalance.propose, &t->arena, &reply->moves);
    reply->bytes = s->n_bytes;
    reply->predicted_gain_s = s->gain_s;
    reply->predicted_cost_s = s->cost_s;
    reply->imbalance_before = s->imbalance_before;
    reply->imbalance_predicted = s->imbalance_predicted;
    reply->reason = arena_strdup(&t->arena, s->reason);
    return reply;
}

/* An APPLY that was answered before, but its answer was lost. */
static void reply_again(struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                        const struct job *j)
{
    const struct rebalance *r = &j->rebalance;
    Ballast__RebalancePlanReply *reply = new_reply(t, j);
    reply->epoch = r->apply_epoch;
    reply->reason = arena_printf(&t->arena, "this call has made plan %u", r->apply_epoch);
    if (r->plan && r->plan->placement->epoch == r->apply_epoch) {
        reply->bytes = r->plan->bytes;
        reply->predicted_gain_s = r->plan->predicted_gain_s;
        reply->predicted_cost_s = r->plan->predicted_cost_s;
        reply->imbalance_before = r->plan->imbalance_before;
        reply->imbalance_predicted = r->plan->imbalance_predicted;
    }
    turn_reply(t, peer, e, &reply->base);
}

static void propose(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                    const Ballast__Envelope *e, struct job *j, uint64_t revision)
{
    bool applies = e->method == BALLAST__METHOD__METHOD_REBALANCE_APPLY;
    Ballast__RebalancePlanReply *reply = describe(t, j);
    if (applies && revision && revision != reply->revision) {
        turn_refuse(t, peer, e, BALLAST__CODE__ABORTED, "REVISION",
                    "the load or the placement of job %" PRIu64 " has changed since revision %"
                    PRIu64 ", it is %" PRIu64 " now; look at the plan again", j->id, revision,
                    reply->revision);
        return;
    }
    if (applies && propose_now(j->rebalance.propose)->n_changed) {
        placing_begin(c, t, j, arena_printf(&t->arena, "asked for by %s; %s", user,
                                            reply->reason), &e->idempotency_key);
        reply->epoch = j->rebalance.newest_epoch;
    }
    turn_reply(t, peer, e, &reply->base);
}

static void plan_or_apply(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                          const Ballast__Envelope *e, struct job *j,
                          const Ballast__RebalanceRequest *request)
{
    bool applies = e->method == BALLAST__METHOD__METHOD_REBALANCE_APPLY;
    const ProtobufCBinaryData *key = &e->idempotency_key;
    const char *reason, *why;
    if (applies && j->rebalance.apply_epoch && key->len == IDEMPOTENCY_KEY_BYTES &&
        !memcmp(key->data, j->rebalance.apply_key, IDEMPOTENCY_KEY_BYTES)) {
        reply_again(t, peer, e, j);
        return;
    }
    if ((why = placing_obstacle(c, t, j, &reason))) {
        turn_refuse(t, peer, e, BALLAST__CODE__FAILED_PRECONDITION, reason, "%s", why);
        return;
    }
    const Ballast__Placement *given = applies ? request->placement : NULL;
    struct err err = {0};
    if (given && propose_given(j->rebalance.propose, given, &err) < 0) {
        turn_refuse(t, peer, e, BALLAST__CODE__INVALID_ARGUMENT, "PLACEMENT",
                    "the placement does not fit job %" PRIu64 ": %s", j->id, err.text);
        return;
    }
    propose(c, t, peer, user, e, j, request->revision);
    if (given)
        propose_forget(j->rebalance.propose);
}

static void set_auto(struct coord *c, struct turn *t, struct job *j, bool on, const char *user)
{
    if (j->rebalance.is_auto == on)
        return;
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_REBALANCE_AUTO);
    r->rebalance_auto = arena_alloc(&t->arena, sizeof *r->rebalance_auto);
    ballast__record_auto__init(r->rebalance_auto);
    r->rebalance_auto->on = on;
    emit_finish(c, t, r);
    if (!on)
        placing_give_up(c, t, j, arena_printf(&t->arena, "%s switched automatic rebalancing off",
                                              user));
}

void call_rebalance(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                    const Ballast__Envelope *e, const Ballast__RebalanceRequest *request)
{
    job_id id = request->job_id;
    struct job *j = job_table_find(&c->jobs, id);
    if (!id || id > c->last_job_id) {
        turn_refuse(t, peer, e, BALLAST__CODE__NOT_FOUND, "NO_SUCH_JOB",
                    "there is no job %" PRIu64, id);
    } else if (!j || job_has_ended(j)) {
        turn_refuse(t, peer, e, BALLAST__CODE__FAILED_PRECONDITION, "JOB_STATE",
                    "job %" PRIu64 " has ended; its experts stay where they are", id);
    } else if (e->method == BALLAST__METHOD__METHOD_REBALANCE_AUTO) {
        set_auto(c, t, j, request->on, user);
        reply_job(c, t, peer, e, j);
    } else {
        plan_or_apply(c, t, peer, user, e, j, request);
    }
}
