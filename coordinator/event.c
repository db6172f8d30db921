/* event.c - tells each kind of record in words */
#include "coordinator/event.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

static const char *word_of(const ProtobufCEnumDescriptor *words, int value, const char *prefix)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(words, value);
    return v ? v->name + strlen(prefix) : "UNKNOWN";
}

const char *event_job_state(Ballast__JobState state)
{
    return word_of(&ballast__job_state__descriptor, (int)state, "JOB_");
}

const char *event_worker_state(Ballast__WorkerState state)
{
    return word_of(&ballast__worker_state__descriptor, (int)state, "WORKER_");
}

bool event_throttle_reason(unsigned bit, const char **out_name)
{
    static const char *const names[] = {
        "idle", "application_clocks", "power_cap", "hardware_slowdown", "sync_boost",
        "software_thermal", "hardware_thermal", "hardware_power_brake", "display_clocks",
    };
    if (bit >= sizeof names / sizeof *names)
        return false;
    *out_name = names[bit];
    return true;
}

Ballast__JobState event_job_state_parse(const char *word)
{
    for (int s = BALLAST__JOB_STATE__JOB_QUEUED; s <= (int)JOB_STATE_MAX; s++)
        if (!strcmp(event_job_state((Ballast__JobState)s), word))
            return (Ballast__JobState)s;
    return BALLAST__JOB_STATE__JOB_UNKNOWN;
}

static void tell_submitted(Ballast__Event *e, const Ballast__RecordSubmitted *r, struct arena *a)
{
    e->kind = "JOB_SUBMITTED";
    e->text = arena_printf(a, "%s by %s: %" PRIu64 " steps on %u worker%s", r->spec->name, r->user,
                           r->spec->train_steps, r->spec->parallel_workers,
                           r->spec->parallel_workers == 1 ? "" : "s");
}

static void tell_assigned(Ballast__Event *e, const Ballast__RecordAssigned *r, struct arena *a)
{
    enum { SHOWN = 8 };
    char *names = arena_strdup(a, "");
    for (size_t i = 0; i < r->n_workers && i < SHOWN; i++)
        names = arena_printf(a, "%s%s%s", names, i ? ", " : "", r->workers[i]);
    e->kind = "JOB_ASSIGNED";
    e->text = r->n_workers > SHOWN
                  ? arena_printf(a, "attempt %u on %s and %zu more", r->attempt, names,
                                 r->n_workers - SHOWN)
                  : arena_printf(a, "attempt %u on %s", r->attempt, names);
}

static void tell_step(Ballast__Event *e, uint64_t step)
{
    e->has_step = true;
    e->step = step;
}

static void tell_running(Ballast__Event *e, const Ballast__RecordState *r, struct arena *a)
{
    tell_step(e, r->resumed_from_step);
    e->text = r->resumed_from_step
                  ? arena_printf(a, "attempt %u goes on from the checkpoint of step %" PRIu64,
                                 r->attempt, r->resumed_from_step)
                  : arena_printf(a, "attempt %u from the beginning", r->attempt);
}

static void tell_state(Ballast__Event *e, const Ballast__RecordState *r, struct arena *a)
{
    e->kind = arena_printf(a, "JOB_%s", event_job_state(r->state));
    if (r->attempt) {
        tell_running(e, r, a);
        return;
    }
    if (*r->exit && strcmp(r->exit, "0"))
        e->text = arena_printf(a, "%s%s(exit %s)", r->reason, *r->reason ? " " : "", r->exit);
    else
        e->text = arena_strdup(a, r->reason);
}

static void tell_worker(Ballast__Event *e, const Ballast__RecordWorker *r, struct arena *a)
{
    bool is_attached = r->state == BALLAST__WORKER_STATE__WORKER_IDLE;
    e->kind = is_attached ? r->drained ? "WORKER_DRAINED" : "WORKER_ATTACHED"
                          : arena_printf(a, "WORKER_%s", event_worker_state(r->state));
    e->text = *r->node ? arena_printf(a, "%s%snode %s", r->reason, *r->reason ? "; " : "", r->node)
                       : arena_strdup(a, r->reason);
}

/* "1.63", or "?" for what was not measured. */
static char *imbalance_text(double x, struct arena *a)
{
    return x > 0 ? arena_printf(a, "%.2f", x) : arena_strdup(a, "?");
}

static char *bytes_text(uint64_t n_bytes, struct arena *a)
{
    return n_bytes < 1u << 20 ? arena_printf(a, "%.1f KiB", (double)n_bytes / 1024)
                              : arena_printf(a, "%.1f MiB", (double)n_bytes / (1 << 20));
}

static const char *plural(uint32_t n)
{
    return n == 1 ? "" : "s";
}

static void tell_plan(Ballast__Event *e, const Ballast__RecordPlan *r, struct arena *a)
{
    e->kind = "PLAN_PROPOSED";
    e->text = arena_printf(a, "placement %u, %s: %u move%s, %s, imbalance %s to %s, gain %.3g s "
                           "a step for %.3g s%s%s%s", r->placement ? r->placement->epoch : 0,
                           r->automatic ? "automatic" : "by a person", r->n_moves,
                           plural(r->n_moves),
                           bytes_text(r->bytes, a), imbalance_text(r->imbalance_before, a),
                           imbalance_text(r->imbalance_predicted, a), r->predicted_gain_s,
                           r->predicted_cost_s, r->n_stages > 1
                               ? arena_printf(a, " in %u stages", r->n_stages) : "",
                           *r->cause ? "; " : "", r->cause);
}

static void tell_placement(Ballast__Event *e, const Ballast__RecordPlacement *r, struct arena *a)
{
    e->kind = "PLACEMENT";
    e->text = arena_printf(a, "placement %u at step %" PRIu64 ": %u move%s, %s in %.3g s, "
                           "imbalance was %s, predicted %s", r->epoch, r->at_step, r->n_moves,
                           plural(r->n_moves),
                           bytes_text(r->bytes, a), r->pause_s,
                           imbalance_text(r->imbalance_before, a),
                           imbalance_text(r->imbalance_predicted, a));
}

static void tell_realised(Ballast__Event *e, const Ballast__RecordRealised *r, struct arena *a)
{
    e->kind = "PLACEMENT_REALISED";
    e->text = arena_printf(a, "placement %u: imbalance is %s, gain %.3g s a step", r->epoch,
                           imbalance_text(r->imbalance_after, a), r->gain_s);
}

/* Who is to be told of a person's doing; some texts say it themselves. */
static void tell_by(Ballast__Event *e, const Ballast__Record *r, struct arena *a)
{
    const char *by = *r->by ? arena_printf(a, "by %s", r->by) : "";
    if (*by && !strstr(e->text, by))
        e->text = arena_printf(a, "%s%s%s", e->text, *e->text ? ", " : "", by);
}

static Ballast__Event *tell(const Ballast__Record *r, struct arena *arena)
{
    Ballast__Event *e = arena_alloc(arena, sizeof *e);
    ballast__event__init(e);
    e->seq = r->seq;
    e->at_ns = r->at_ns;
    e->job_id = r->job_id;
    e->worker = arena_strdup(arena, r->worker);
    e->kind = "RECORD";
    switch (r->what_case) {
    case BALLAST__RECORD__WHAT_SUBMITTED:
        tell_submitted(e, r->submitted, arena);
        break;
    case BALLAST__RECORD__WHAT_ASSIGNED:
        tell_assigned(e, r->assigned, arena);
        break;
    case BALLAST__RECORD__WHAT_STATE:
        tell_state(e, r->state, arena);
        break;
    case BALLAST__RECORD__WHAT_PROGRESS:
        e->kind = "JOB_CHECKPOINT";
        e->text = arena_printf(arena, "checkpoint of step %" PRIu64, r->progress->checkpoint_step);
        tell_step(e, r->progress->checkpoint_step);
        break;
    case BALLAST__RECORD__WHAT_HELD:
        e->kind = r->held->held ? "JOB_HELD" : "JOB_RELEASED";
        e->text = arena_strdup(arena, r->held->reason);
        break;
    case BALLAST__RECORD__WHAT_WORKER_CHANGED:
        tell_worker(e, r->worker_changed, arena);
        break;
    case BALLAST__RECORD__WHAT_EPOCH:
        e->kind = "COORDINATOR_STARTED";
        e->text = arena_printf(arena, "incarnation %" PRIu64, r->epoch->coordinator_epoch);
        break;
    case BALLAST__RECORD__WHAT_AFTER:
        e->kind = "JOB_DEPENDENCY_DONE";
        e->text = arena_printf(arena, "job %" PRIu64 " is DONE", r->after->done_job);
        break;
    case BALLAST__RECORD__WHAT_PLAN:
        tell_plan(e, r->plan, arena);
        break;
    case BALLAST__RECORD__WHAT_PLAN_ENDED:
        e->kind = "PLAN_ENDED";
        e->text = arena_printf(arena, "placement %u will not come about: %s",
                               r->plan_ended->epoch, r->plan_ended->reason);
        break;
    case BALLAST__RECORD__WHAT_PLACEMENT:
        tell_placement(e, r->placement, arena);
        break;
    case BALLAST__RECORD__WHAT_REBALANCE_AUTO:
        e->kind = "REBALANCE_AUTO";
        e->text = arena_strdup(arena, r->rebalance_auto->on ? "on" : "off");
        break;
    case BALLAST__RECORD__WHAT_REALISED:
        tell_realised(e, r->realised, arena);
        break;
    case BALLAST__RECORD__WHAT_SETTINGS:
        e->kind = "JOB_SETTINGS";
        e->text = arena_strdup(arena, r->settings->text);
        break;
    case BALLAST__RECORD__WHAT__NOT_SET:
    default:
        break;
    }
    return e;
}

Ballast__Event *event_of_record(const Ballast__Record *r, struct arena *arena)
{
    Ballast__Event *e = tell(r, arena);
    tell_by(e, r, arena);
    return e;
}
