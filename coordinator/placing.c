/* placing.c - experts move: loads come in, plans are proposed, followed, recorded
 *
 * Reports of load become windows; a new window is looked at once, in the tick, one job a turn:
 * what the last migration brought is recorded, and where the job rebalances by itself the planner
 * thinks. A plan is recorded before the first rank hears of it. From then on every word of a rank
 * is compared with what it should say, and PREPARE or ABORT is repeated until they agree. */
#include "coordinator/core.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/placed.h"

#define CALM_AFTER_END  2u  /* windows without an automatic plan after one that ended */
#define CALM_AFTER_LOSS 4u  /* after a loss; doubles with each one in a row */
#define CALM_MAX        64u
#define STEPS_TO_PREPARE 10 /* that a plan may take, if they are long */

/* ---- loads --------------------------------------------------------------------------------- */

/* The newest window of j is to be looked at. */
static void list(struct coord *c, struct job *j)
{
    core_wake_at(c, c->now_ns);
    if (j->rebalance.is_listed)
        return;
    c->placing = xgrow(c->placing, c->n_placing, &c->n_placing_alloc, sizeof *c->placing);
    c->placing[c->n_placing++] = j->id;
    j->rebalance.is_listed = true;
}

static void unlist_first(struct coord *c)
{
    struct job *j = job_table_find(&c->jobs, c->placing[0]);
    c->n_placing--;
    memmove(c->placing, c->placing + 1, c->n_placing * sizeof *c->placing);
    if (j)
        j->rebalance.is_listed = false;
}

void placing_load(struct coord *c, struct job *j, const Ballast__LoadReport *report)
{
    struct rebalance *r = &j->rebalance;
    if (!r->load)
        r->load = load_create(j->spec->rebalance_window_steps);
    if (!load_add(r->load, report))
        return;
    r->is_new = true;
    r->n_calm -= r->n_calm > 0;
    list(c, j);
}

/* Nodes that the devices of an expert group are dealt to, evenly and in order; else 1. */
static uint32_t count_nodes(const struct coord *c, const struct job *j)
{
    uint32_t n_devices = j->spec->parallel_expert_parallel_degree, n_nodes = 1;
    const char *node = NULL;
    for (uint32_t r = 0; r < n_devices && r < j->n_gang; r++) {
        const char *own = c->fleet.workers[j->ranks[r].worker]->node;
        n_nodes += node && strcmp(node, own);
        node = own;
    }
    if (n_devices % n_nodes)
        return 1;
    for (uint32_t r = 0; r < n_devices && r < j->n_gang; r++) {
        uint32_t first = r - r % (n_devices / n_nodes);
        if (strcmp(c->fleet.workers[j->ranks[r].worker]->node,
                   c->fleet.workers[j->ranks[first].worker]->node))
            return 1;
    }
    return n_nodes;
}

static void make_planner(const struct coord *c, struct job *j)
{
    struct rebalance *r = &j->rebalance;
    uint32_t n_nodes = count_nodes(c, j);
    if (r->propose && r->n_nodes == n_nodes)
        return;
    propose_destroy(r->propose);
    r->n_nodes = n_nodes;
    r->propose = propose_create(&(struct propose_policy){
        .n_devices = j->spec->parallel_expert_parallel_degree, .n_ranks = j->n_gang,
        .n_spare = j->spec->rebalance_spare_slots_per_rank, .n_nodes = n_nodes,
        .horizon_steps = j->spec->rebalance_horizon_steps,
        .min_gain = j->spec->rebalance_min_gain});
}

static void emit_realised(struct coord *c, struct turn *t, struct job *j,
                          const struct load_window *w)
{
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_REALISED);
    r->realised = arena_alloc(&t->arena, sizeof *r->realised);
    ballast__record_realised__init(r->realised);
    r->realised->epoch = w->epoch;
    r->realised->imbalance_after = w->imbalance;
    r->realised->gain_s = j->rebalance.unseen.step_s - w->step_s;
    emit_finish(c, t, r);
    uint32_t n = j->rebalance.n_losses;
    if (n) {
        uint32_t calm = CALM_AFTER_LOSS << (n < 5 ? n - 1 : 4);
        j->rebalance.n_calm = calm < CALM_MAX ? calm : CALM_MAX;
    }
}

/* The newest window, if the placement in force served it in the present attempt. */
static const struct load_window *present_window(const struct job *j)
{
    const struct rebalance *r = &j->rebalance;
    const struct load_window *w = r->load ? load_newest(r->load) : NULL;
    bool is_present = w && w->attempt == j->attempt && w->epoch == rebalance_epoch(r);
    return is_present ? w : NULL;
}

/* Tells the planner of the newest window, once. */
static void observe(struct coord *c, struct turn *t, struct job *j)
{
    struct rebalance *r = &j->rebalance;
    const struct load_window *w = present_window(j);
    if (!r->is_new || !w || j->state != BALLAST__JOB_STATE__JOB_RUNNING)
        return;
    r->is_new = false;
    if (r->unseen.epoch && r->unseen.epoch == w->epoch)
        emit_realised(c, t, j, w);
    make_planner(c, j);
    propose_observe(r->propose, w, r->placement);
    r->is_thinking = true;
}

/* ---- asking the ranks ---------------------------------------------------------------------- */

static Ballast__Prepare *make_prepare(struct turn *t, const struct job *j)
{
    const Ballast__RecordPlan *plan = j->rebalance.plan;
    Ballast__Prepare *p = arena_alloc(&t->arena, sizeof *p);
    ballast__prepare__init(p);
    p->job_id = j->id;
    p->attempt = j->attempt;
    p->base_epoch = plan->base_epoch;
    size_t n_bytes = ballast__placement__get_packed_size(plan->placement);
    uint8_t *bytes = arena_alloc(&t->arena, n_bytes);
    ballast__placement__pack(plan->placement, bytes);
    p->placement = ballast__placement__unpack(arena_pb(&t->arena), n_bytes, bytes);
    assert(p->placement);
    return p;
}

static Ballast__AbortPlan *make_abort(struct turn *t, const struct job *j)
{
    Ballast__AbortPlan *a = arena_alloc(&t->arena, sizeof *a);
    ballast__abort_plan__init(a);
    a->job_id = j->id;
    a->attempt = j->attempt;
    a->epoch = j->rebalance.migration.epoch;
    return a;
}

/* Asks those of ranks first..last that must be asked and were not just asked. */
static void ask(struct coord *c, struct turn *t, struct job *j, uint32_t first, uint32_t last)
{
    const struct migration *m = &j->rebalance.migration;
    bool prepares = m->state == MIGRATION_PREPARING;
    const ProtobufCMessage *message = NULL;
    for (uint32_t r = first; r <= last; r++) {
        struct migration_rank *rank = &j->said[r];
        const struct worker *w = c->fleet.workers[j->ranks[r].worker];
        uint64_t again_ns = rank->asked_ns + 2 * fleet_interval_ns(&c->fleet);
        if (!w->peer || !migration_must_ask(m, rank) ||
            (rank->asked_ns && t->now_ns < again_ns))
            continue;
        if (!message)
            message = prepares ? &make_prepare(t, j)->base : &make_abort(t, j)->base;
        rank->asked_ns = t->now_ns;
        turn_notice(t, w->peer, w->epoch, prepares ? BALLAST__METHOD__METHOD_PREPARE
                                                   : BALLAST__METHOD__METHOD_ABORT_PLAN, message);
    }
}

static void ask_all(struct coord *c, struct turn *t, struct job *j)
{
    for (uint32_t r = 0; r < j->n_gang; r++)
        j->said[r].asked_ns = 0;
    ask(c, t, j, 0, j->n_gang - 1);
}

/* ---- a plan's life ------------------------------------------------------------------------- */

static uint64_t patience_ns(const struct coord *c, double step_s)
{
    uint64_t steps_ns = (uint64_t)(STEPS_TO_PREPARE * step_s * NS_PER_S);
    return steps_ns > c->config.prepare_timeout_ns ? steps_ns : c->config.prepare_timeout_ns;
}

static void wait_for_prepared(struct coord *c, struct job *j)
{
    struct migration *m = &j->rebalance.migration;
    m->late_ns = c->now_ns + patience_ns(c, j->rebalance.plan->step_s);
    core_wake_at(c, m->late_ns);
}

/* A plan is over before the next window is, so that it is not stale before it is carried out. */
static struct stages_budget stages_budget(const Ballast__JobSpec *s)
{
    uint32_t n_max = s->rebalance_window_steps;
    return (struct stages_budget){
        .boundary_bytes = (uint64_t)s->rebalance_boundary_mib << 20,
        .layer_moves = s->rebalance_layer_moves,
        .n_max = n_max < 1 ? 1 : n_max < STAGES_MAX ? n_max : STAGES_MAX};
}

void placing_begin(struct coord *c, struct turn *t, struct job *j, const char *cause,
                   const ProtobufCBinaryData *key)
{
    struct rebalance *r = &j->rebalance;
    const struct proposal *s = propose_now(r->propose);
    const struct load_window *w = load_newest(r->load);
    Ballast__Record *record = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_PLAN);
    Ballast__RecordPlan *p = arena_alloc(&t->arena, sizeof *p);
    assert(s->n_changed);
    ballast__record_plan__init(p);
    p->n_stages = propose_stages(r->propose, stages_budget(j->spec));
    /* Whole where nothing is recorded yet, so that records alone always tell the placement. */
    p->placement = propose_placement(r->propose, r->newest_epoch + 1, !r->placement, &t->arena);
    p->base_epoch = rebalance_epoch(r);
    p->n_moves = s->n_moves;
    p->bytes = s->n_bytes;
    p->predicted_gain_s = s->gain_s;
    p->predicted_cost_s = s->cost_s;
    /* Measured, as what comes after will be; the planner's own measure, of whole windows, does not
     * see how uneven single steps are, so it tells the change only. */
    p->imbalance_before = isnan(w->imbalance) ? s->imbalance_before : w->imbalance;
    p->imbalance_predicted =
        fmax(1, p->imbalance_before * s->imbalance_predicted / s->imbalance_before);
    p->automatic = !key;
    p->cause = arena_strdup(&t->arena, cause);
    p->at_step = j->live_step;
    p->step_s = s->step_s;
    if (key)
        p->idempotency_key = (ProtobufCBinaryData){
            .len = key->len, .data = arena_memdup(&t->arena, key->data, key->len)};
    record->plan = p;
    emit_finish(c, t, record);
    wait_for_prepared(c, j);
    ask_all(c, t, j);
}

static void end_plan(struct coord *c, struct turn *t, struct job *j, const char *reason)
{
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_PLAN_ENDED);
    r->plan_ended = arena_alloc(&t->arena, sizeof *r->plan_ended);
    ballast__record_plan_ended__init(r->plan_ended);
    r->plan_ended->epoch = j->rebalance.migration.epoch;
    char *text = arena_strdup(&t->arena, reason);
    text[strnlen(text, REASON_BYTES_MAX - 1)] = '\0';
    r->plan_ended->reason = text;
    emit_finish(c, t, r);
    j->rebalance.n_calm = CALM_AFTER_END;
}

static void record_placement(struct coord *c, struct turn *t, struct job *j)
{
    struct rebalance *b = &j->rebalance;
    const Ballast__RecordPlan *plan = b->plan;
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_PLACEMENT);
    Ballast__RecordPlacement *p = arena_alloc(&t->arena, sizeof *p);
    ballast__record_placement__init(p);
    p->epoch = plan->placement->epoch;
    for (uint32_t i = 0; i < j->n_gang; i++) {
        const struct migration_rank *rank = &j->said[i];
        p->bytes += rank->moved_bytes;
        p->pause_s = fmax(p->pause_s, rank->pause_s);
    }
    p->at_step = j->live_step;
    p->n_moves = plan->n_moves;
    p->imbalance_before = plan->imbalance_before;
    p->imbalance_predicted = plan->imbalance_predicted;
    /* In the arena whole: the record outlives what it was made of. */
    Ballast__Placement *merged = placed_merge(b->placement, plan->placement, &t->arena);
    size_t n_bytes = ballast__placement__get_packed_size(merged);
    uint8_t *bytes = arena_alloc(&t->arena, n_bytes);
    ballast__placement__pack(merged, bytes);
    p->placement = ballast__placement__unpack(arena_pb(&t->arena), n_bytes, bytes);
    assert(p->placement);
    for (size_t i = 0; i < p->placement->n_layers; i++)
        p->placement->layers[i]->n_stage = 0; /* they are over */
    r->placement = p;
    emit_finish(c, t, r);
    if (b->propose)
        propose_applied(b->propose);
    if (b->is_new)
        list(c, j); /* a window of the new placement has come already */
}

static const char *refusal_text(struct turn *t, const struct job *j, uint32_t rank,
                                const Ballast__RankState *said)
{
    const char *why = said && said->rank == rank && *said->plan_text ? said->plan_text
                                                                     : "it is not prepared for it";
    return arena_printf(&t->arena, "rank %u on worker %s: %s", rank, j->gang[rank], why);
}

/* Compares what the ranks have said with the plan. said: the newest word, or NULL. */
static void look(struct coord *c, struct turn *t, struct job *j, const Ballast__RankState *said)
{
    struct rebalance *b = &j->rebalance;
    uint32_t rank = 0;
    enum migration_state before = b->migration.state;
    switch (migration_look(&b->migration, j->said, j->n_gang, t->now_ns, &rank)) {
    case MIGRATION_NO_NEWS:
        break;
    case MIGRATION_REFUSED:
        end_plan(c, t, j, refusal_text(t, j, rank, said));
        migration_look(&b->migration, j->said, j->n_gang, t->now_ns, &rank);
        ask_all(c, t, j);
        break;
    case MIGRATION_LATE:
        end_plan(c, t, j, arena_printf(&t->arena, "rank %u on worker %s was not prepared after %"
                                       PRIu64 " s", rank, j->gang[rank],
                                       patience_ns(c, b->plan->step_s) / (uint64_t)NS_PER_S));
        ask_all(c, t, j);
        break;
    case MIGRATION_COMPLETE:
        record_placement(c, t, j);
        break;
    }
    if (before == MIGRATION_ABORTING && b->migration.state == MIGRATION_MIGRATING)
        turn_note(t, "job=%" PRIu64 " plan=%u msg=\"given up too late, the ranks carry it out\"",
                  j->id, b->migration.epoch);
}

void placing_report(struct coord *c, struct turn *t, struct job *j,
                    const Ballast__RankState *state)
{
    const struct migration *m = &j->rebalance.migration;
    migration_hear(&j->said[state->rank], state);
    if (m->state == MIGRATION_NONE || m->state == MIGRATION_DONE)
        return;
    if (migration_is_open(m))
        look(c, t, j, state);
    if (!rank_phase_has_ended(state->phase))
        ask(c, t, j, state->rank, state->rank);
}

void placing_over(struct coord *c, struct turn *t, struct job *j, const char *why)
{
    if (rebalance_has_plan(&j->rebalance))
        end_plan(c, t, j, why);
}

void placing_give_up(struct coord *c, struct turn *t, struct job *j, const char *why)
{
    const struct rebalance *r = &j->rebalance;
    if (!rebalance_has_plan(r) || !r->plan->automatic ||
        r->migration.state != MIGRATION_PREPARING)
        return;
    end_plan(c, t, j, why);
    ask_all(c, t, j);
}

uint64_t placing_tick(struct coord *c, struct turn *t, struct job *j)
{
    const struct migration *m = &j->rebalance.migration;
    if (m->state != MIGRATION_PREPARING)
        return UINT64_MAX;
    look(c, t, j, NULL);
    return m->state == MIGRATION_PREPARING ? m->late_ns : UINT64_MAX;
}

void placing_adopt(struct coord *c, struct job *j)
{
    if (rebalance_has_plan(&j->rebalance))
        wait_for_prepared(c, j);
}

/* ---- proposing ----------------------------------------------------------------------------- */

const char *placing_obstacle(struct coord *c, struct turn *t, struct job *j,
                             const char **out_reason)
{
    const struct rebalance *r = &j->rebalance;
    const struct migration *m = &r->migration;
    struct arena *arena = &t->arena;
    *out_reason = "JOB_STATE";
    if (j->state != BALLAST__JOB_STATE__JOB_RUNNING)
        return arena_printf(arena, "job %" PRIu64 " is %s; experts move only while a job is "
                            "RUNNING", j->id, event_job_state(j->state));
    *out_reason = "ONE_DEVICE";
    if (j->spec->parallel_expert_parallel_degree < 2)
        return arena_printf(arena, "the experts of job %" PRIu64 " are all on each device: "
                            "parallel.expert_parallel_degree is 1", j->id);
    *out_reason = "PLAN_OPEN";
    if (!migration_is_settled(m, j->said, j->n_gang))
        return arena_printf(arena, "plan %u of job %" PRIu64 " is under way (%s)", m->epoch, j->id,
                            migration_state_name(m->state));
    observe(c, t, j);
    *out_reason = "NO_LOADS";
    if (!r->propose || !present_window(j))
        return arena_printf(arena, "no load of job %" PRIu64 " is known under placement %u in "
                            "attempt %u; a window has %u steps, and a model without experts "
                            "reports none", j->id, rebalance_epoch(r), j->attempt,
                            j->spec->rebalance_window_steps);
    return NULL;
}

void placing_think(struct coord *c, struct turn *t)
{
    struct job *j = job_table_find(&c->jobs, c->placing[0]);
    const char *reason;
    if (!j || job_has_ended(j)) {
        unlist_first(c);
        return;
    }
    observe(c, t, j);
    struct rebalance *r = &j->rebalance;
    bool may_plan = r->is_auto && !r->n_calm && r->is_thinking &&
        !placing_obstacle(c, t, j, &reason);
    if (may_plan && !propose_think(r->propose)) {
        core_wake_at(c, t->now_ns + 1);
        return; /* further in the next turn */
    }
    r->is_thinking = false;
    unlist_first(c);
    if (c->n_placing)
        core_wake_at(c, t->now_ns + 1);
    if (may_plan && propose_now(r->propose)->n_changed)
        placing_begin(c, t, j, propose_now(r->propose)->reason, NULL);
}
