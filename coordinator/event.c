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

Ballast__JobState event_job_state_parse(const char *word)
{
    for (int s = BALLAST__JOB_STATE__JOB_QUEUED; s <= BALLAST__JOB_STATE__JOB_CANCELLED; s++)
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

static void tell_state(Ballast__Event *e, const Ballast__RecordState *r, struct arena *a)
{
    e->kind = arena_printf(a, "JOB_%s", event_job_state(r->state));
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

Ballast__Event *event_of_record(const Ballast__Record *r, struct arena *arena)
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
    case BALLAST__RECORD__WHAT__NOT_SET:
    default:
        break;
    }
    return e;
}
