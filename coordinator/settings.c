/* settings.c - changed settings of a job: asked for, recorded, told to its ranks
 *
 * A change is recorded first, whole, under a revision of its own. A job that waits starts with it.
 * The ranks of an attempt that lives are told until each has said that the revision is in force;
 * they take it at one step, whenever each of them came to hear of it. */
#include "coordinator/core.h"

#include <inttypes.h>
#include <stdlib.h>

#include "proto/job_live.h"
#include "proto/message.h"

/* ---- telling the ranks -------------------------------------------------------------------- */

static bool has_ranks(const struct job *j)
{
    return j->ranks && job_is_wanted(j);
}

static void tell(struct coord *c, struct turn *t, struct job *j, uint32_t rank)
{
    struct rank *r = &j->ranks[rank];
    const struct worker *w = c->fleet.workers[r->worker];
    uint64_t again_ns = r->settings_asked_ns + fleet_interval_ns(&c->fleet);
    if (!w->peer || r->fate != RANK_ALIVE || r->settings_revision >= j->settings_revision ||
        (r->settings_asked_ns && t->now_ns < again_ns))
        return;
    Ballast__Settings *s = arena_alloc(&t->arena, sizeof *s);
    ballast__settings__init(s);
    s->job_id = j->id;
    s->attempt = j->attempt;
    s->revision = j->settings_revision;
    s->spec = message_copy(j->spec, &t->arena);
    r->settings_asked_ns = t->now_ns;
    turn_notice(t, w->peer, w->epoch, BALLAST__METHOD__METHOD_SETTINGS, &s->base);
}

void settings_report(struct coord *c, struct turn *t, struct job *j,
                     const Ballast__RankState *state)
{
    struct rank *r = &j->ranks[state->rank];
    if (state->settings_revision > r->settings_revision)
        r->settings_revision = state->settings_revision;
    if (!rank_phase_has_ended(state->phase))
        tell(c, t, j, state->rank);
}

/* ---- the call ----------------------------------------------------------------------------- */

static void emit_settings(struct coord *c, struct turn *t, struct job *j, Ballast__JobSpec *spec,
                          char *text)
{
    Ballast__Record *r = emit_begin(c, t, j->id, BALLAST__RECORD__WHAT_SETTINGS);
    r->settings = arena_alloc(&t->arena, sizeof *r->settings);
    ballast__record_settings__init(r->settings);
    r->settings->spec = spec;
    r->settings->revision = j->settings_revision + 1;
    r->settings->text = text;
    emit_finish(c, t, r);
}

/* The job's specification with what is asked for, in the arena, or NULL after refusing it. */
static Ballast__JobSpec *changed_spec(struct turn *t, uint64_t peer, const Ballast__Envelope *e,
                                      const struct job *j, const Ballast__JobSetRequest *request)
{
    Ballast__JobSpec *spec = message_copy(j->spec, &t->arena);
    struct problems problems = {0};
    struct err err = {0};
    int rc = 0;
    for (size_t i = 0; i < request->n_assignments && rc == 0; i++)
        rc = job_live_set(spec, request->assignments[i], &err);
    if (rc == 0 && (rc = job_spec_check(spec, &problems)) < 0)
        problems_err(&problems, &err);
    problems_fini(&problems);
    if (rc == 0)
        return spec;
    turn_refuse(t, peer, e, BALLAST__CODE__INVALID_ARGUMENT, "BAD_SETTINGS", "%s", err.text);
    return NULL;
}

static void change(struct coord *c, struct turn *t, struct job *j, Ballast__JobSpec *spec,
                   const char *user)
{
    char *differences = job_live_differences(j->spec, spec);
    if (*differences) { /* else asked twice: as it is */
        emit_settings(c, t, j, spec, arena_printf(&t->arena, "%s, by %s", differences, user));
        core_wake_at(c, t->now_ns); /* a time limit may be due earlier */
        for (uint32_t r = 0; has_ranks(j) && r < j->n_gang; r++) {
            j->ranks[r].settings_asked_ns = 0;
            tell(c, t, j, r);
        }
    }
    free(differences);
}

void call_job_set(struct coord *c, struct turn *t, uint64_t peer, const char *user,
                  const Ballast__Envelope *e, const Ballast__JobSetRequest *request)
{
    struct job *j = job_table_find(&c->jobs, request->job_id);
    if (!j) {
        turn_refuse(t, peer, e, BALLAST__CODE__NOT_FOUND, "NO_SUCH_JOB",
                    "there is no job %" PRIu64, request->job_id);
        return;
    }
    if (job_has_ended(j)) {
        refuse_state(t, peer, e, j, "only settings of a job that has not ended can be changed");
        return;
    }
    Ballast__JobSpec *spec = changed_spec(t, peer, e, j, request);
    if (!spec)
        return;
    change(c, t, j, spec, user);
    reply_job(c, t, peer, e, j);
}
