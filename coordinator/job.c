/* job.c - one job: its life, its gang, and the table of the jobs in memory */
#include "coordinator/job.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "proto/message.h"

#define S(state) BALLAST__JOB_STATE__JOB_##state
#define BIT(state) (1u << S(state))

static const uint32_t allowed[] = {
    [S(UNKNOWN)]    = BIT(QUEUED),
    [S(QUEUED)]     = BIT(STARTING) | BIT(CANCELLED) | BIT(PAUSED),
    [S(STARTING)]   = BIT(RUNNING) | BIT(RECOVERING) | BIT(STOPPING) | BIT(FAILED),
    [S(RUNNING)]    = BIT(DONE) | BIT(RECOVERING) | BIT(STOPPING) | BIT(FAILED),
    [S(RECOVERING)] = BIT(STARTING) | BIT(STOPPING) | BIT(FAILED) | BIT(CANCELLED) | BIT(PAUSED) |
                      BIT(QUEUED),
    [S(PREEMPTING)] = 0,
    [S(STOPPING)]   = BIT(DONE) | BIT(FAILED) | BIT(CANCELLED) | BIT(PAUSED) | BIT(QUEUED) |
                      BIT(STOPPING),
    [S(DONE)]       = BIT(QUEUED),
    [S(FAILED)]     = BIT(QUEUED),
    [S(CANCELLED)]  = BIT(QUEUED),
    [S(PAUSED)]     = BIT(QUEUED) | BIT(CANCELLED),
};

bool job_may_move(const struct job *j, Ballast__JobState next)
{
    return next > 0 && next <= JOB_STATE_MAX && (allowed[j->state] & (1u << next));
}

static void drop_start_spec(struct job *j)
{
    if (j->start_spec)
        ballast__job_spec__free_unpacked(j->start_spec, NULL);
    j->start_spec = NULL;
}

void job_move(struct job *j, Ballast__JobState next)
{
    assert(job_may_move(j, next));
    drop_start_spec(j);
    j->state = next;
    bool goes_on = next == S(STARTING) || next == S(RUNNING) || job_state_is_ended(next);
    j->states_seen = (goes_on ? j->states_seen : 0) | 1u << next;
}

void job_text(char **text, const char *new_text)
{
    char *copy = xstrdup(new_text ? new_text : ""); /* first: it may be the old one */
    free(*text);
    *text = copy;
}

/* A START that is repeated must say what the first one said. */
void job_change_spec(struct job *j, const Ballast__JobSpec *spec, uint32_t revision)
{
    if (j->state == S(STARTING) && !j->start_spec) {
        j->start_spec = j->spec;
        j->start_revision = j->settings_revision;
    } else {
        ballast__job_spec__free_unpacked(j->spec, NULL);
    }
    j->spec = message_copy(spec, NULL);
    j->settings_revision = revision;
}

struct job *job_create(job_id id, const Ballast__RecordSubmitted *submitted)
{
    struct job *j = xcalloc(1, sizeof *j);
    j->id = id;
    j->spec = message_copy(submitted->spec, NULL);
    job_text(&j->user, submitted->user);
    job_text(&j->reason, NULL);
    job_text(&j->warning, NULL);
    job_text(&j->exit, NULL);
    job_text(&j->hold_reason, NULL);
    job_text(&j->held_by, NULL);
    j->n_after = j->spec->n_scheduling_after;
    j->after = xmemdup(j->spec->scheduling_after, j->n_after * sizeof *j->after);
    j->summary = (struct job_summary){.loss = NAN, .validation_loss = NAN, .imbalance = NAN};
    rebalance_init(&j->rebalance, j->spec);
    job_move(j, S(QUEUED));
    return j;
}

void job_destroy(struct job *j)
{
    if (!j)
        return;
    ballast__job_spec__free_unpacked(j->spec, NULL);
    drop_start_spec(j);
    rebalance_fini(&j->rebalance);
    for (uint32_t r = 0; r < j->n_gang; r++)
        free(j->gang[r]);
    free(j->gang);
    free(j->gang_epochs);
    free(j->ranks);
    free(j->said);
    free(j->after);
    free(j->user);
    free(j->reason);
    free(j->warning);
    free(j->exit);
    free(j->hold_reason);
    free(j->held_by);
    free(j);
}

uint64_t job_gang_over_ns(const struct job *j)
{
    if (!j->ranks)
        return 0;
    if (j->n_alive)
        return UINT64_MAX;
    uint64_t confirmed_ns = 0, silent_ns = 0;
    bool is_confirmed = false;
    for (uint32_t r = 0; r < j->n_gang; r++) {
        const struct rank *k = &j->ranks[r];
        if (k->fate == RANK_SILENT) {
            if (k->over_ns > silent_ns)
                silent_ns = k->over_ns;
            continue;
        }
        is_confirmed = true;
        if (k->fate == RANK_ORPHAN && k->over_ns > confirmed_ns)
            confirmed_ns = k->over_ns;
    }
    /* A step needs every rank: with one surely gone, those that are silent are stuck. */
    return is_confirmed ? confirmed_ns : silent_ns;
}

uint64_t job_ran_ms(const struct job *j, uint64_t now_ns)
{
    if (j->state != S(RUNNING) || now_ns < j->running_since_ns)
        return j->ran_ms;
    return j->ran_ms + (now_ns - j->running_since_ns) / NS_PER_MS;
}

uint64_t job_backoff_ns(const struct job *j, uint64_t base_ns, uint64_t cap_ns)
{
    uint64_t wait_ns = base_ns;
    for (uint32_t i = 0; i < j->n_failures_in_row && wait_ns < cap_ns; i++)
        wait_ns *= 2;
    return wait_ns < cap_ns ? wait_ns : cap_ns;
}

void job_fold(struct job *j, uint32_t attempt, const Ballast__StepReports *reports)
{
    struct job_summary *s = &j->summary;
    for (size_t i = 0; i < reports->n_steps; i++) {
        const Ballast__StepReport *r = reports->steps[i];
        if (attempt < s->attempt || (attempt == s->attempt && r->step <= s->step))
            continue;
        s->attempt = attempt;
        s->step = r->step;
        s->loss = r->loss;
        s->tokens_per_second = r->tokens_per_second;
        s->imbalance = r->imbalance;
        s->memory_bytes = r->memory_bytes;
        s->memory_planned_bytes = r->memory_planned_bytes;
        if (!isnan(r->validation_loss))
            s->validation_loss = r->validation_loss;
        if (attempt == j->attempt && r->step > j->live_step)
            j->live_step = r->step;
    }
}

static const char *wait_text(const struct job *j, uint64_t now_ns, struct arena *arena)
{
    const struct wait_reason *w = &j->wait;
    const char *s = w->a == 1 ? "" : "s";
    switch (w->kind) {
    case WAIT_NONE:
        return "waits for the scheduler";
    case WAIT_HELD:
        return arena_printf(arena, "held%s%s%s%s; ballast job release %" PRIu64 " lets it start",
                            *j->held_by ? " by " : "", j->held_by, *j->hold_reason ? ": " : "",
                            j->hold_reason, j->id);
    case WAIT_AFTER:
        return arena_printf(arena, "waits until job %" PRIu64 " is DONE", w->a);
    case WAIT_BACKOFF: {
        uint64_t left_ns = j->not_before_ns > now_ns ? j->not_before_ns - now_ns : 0;
        return arena_printf(arena, "attempt %u may start in %.1f s", j->attempt + 1,
                            (double)left_ns / NS_PER_S);
    }
    case WAIT_GANG:
        for (uint32_t r = 0; j->ranks && r < j->n_gang; r++)
            if (j->ranks[r].fate != RANK_ENDED)
                return arena_printf(arena, "waits for rank %u on worker %s to end", r,
                                    j->gang[r]);
        return "waits for its ranks to end";
    case WAIT_WORKERS:
        return arena_printf(arena, "needs %" PRIu64 " worker%s, %" PRIu64 " attached, %" PRIu64
                            " free", w->a, s, w->b, w->c);
    case WAIT_MEMORY:
        return arena_printf(arena, "needs %" PRIu64 " worker%s with %" PRIu64 " MiB of memory, %"
                            PRIu64 " such attached, %" PRIu64 " free", w->a, s, w->d >> 20,
                            w->b, w->c);
    case WAIT_NODE:
        return arena_printf(arena, "waits until %" PRIu64 " workers of one node are free: where "
                            "its experts lie on several, ranks need more memory than they have",
                            w->a);
    case WAIT_BEHIND:
        return arena_printf(arena, "waits behind job %" PRIu64, w->a);
    }
    return "";
}

const char *job_reason(const struct job *j, uint64_t now_ns, struct arena *arena)
{
    switch (j->state) {
    case S(QUEUED):
        return wait_text(j, now_ns, arena);
    case S(STARTING): {
        uint32_t n_ready = 0;
        for (uint32_t r = 0; j->ranks && r < j->n_gang; r++)
            n_ready += j->ranks[r].phase >= BALLAST__RANK_PHASE__RANK_READY;
        return arena_printf(arena, "%u of %u ranks are ready", n_ready, j->n_gang);
    }
    case S(RUNNING):
        return arena_strdup(arena, *j->warning ? j->warning : j->reason);
    case S(RECOVERING):
    case S(STOPPING):
        return arena_printf(arena, "%s; %s", j->reason, wait_text(j, now_ns, arena));
    default:
        return arena_strdup(arena, j->reason);
    }
}

Ballast__Job *job_describe(const struct job *j, uint64_t now_ns, struct arena *arena)
{
    Ballast__Job *out = arena_alloc(arena, sizeof *out);
    const struct job_summary *s = &j->summary;
    ballast__job__init(out);
    out->id = j->id;
    out->name = arena_strdup(arena, j->spec->name);
    out->user = arena_strdup(arena, j->user);
    out->state = j->state;
    out->reason = arena_strdup(arena, job_reason(j, now_ns, arena));
    out->priority = j->spec->scheduling_priority;
    out->gang_size = j->spec->parallel_workers;
    out->attempt = j->attempt;
    out->step = j->live_step;
    out->steps = j->spec->train_steps;
    out->loss = s->loss;
    out->validation_loss = s->validation_loss;
    out->tokens_per_second = s->tokens_per_second;
    out->imbalance = s->imbalance;
    out->memory_bytes = s->memory_bytes;
    out->memory_planned_bytes = s->memory_planned_bytes;
    out->submitted_at_ns = j->submitted_at_ns;
    out->started_at_ns = j->started_at_ns;
    out->ended_at_ns = j->ended_at_ns;
    out->exit = arena_strdup(arena, j->exit);
    out->checkpoint_step = j->checkpoint_step;
    out->n_restarts = j->n_restarts;
    out->held = j->held;
    out->n_workers = j->n_gang;
    out->workers = arena_alloc(arena, j->n_gang * sizeof *out->workers);
    for (uint32_t r = 0; r < j->n_gang; r++)
        out->workers[r] = arena_strdup(arena, j->gang[r]);
    return out;
}

/* ---- the table ---------------------------------------------------------------------------- */

size_t job_table_above(const struct job_table *t, job_id id)
{
    size_t low = 0, high = t->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (t->jobs[middle]->id <= id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct job *job_table_find(const struct job_table *t, job_id id)
{
    size_t i = job_table_above(t, id);
    return i && t->jobs[i - 1]->id == id ? t->jobs[i - 1] : NULL;
}

void job_table_add(struct job_table *t, struct job *j)
{
    t->jobs = xgrow(t->jobs, t->n, &t->n_alloc, sizeof *t->jobs);
    size_t i = job_table_above(t, j->id);
    memmove(t->jobs + i + 1, t->jobs + i, (t->n - i) * sizeof *t->jobs);
    t->jobs[i] = j;
    t->n++;
}

bool job_table_forget_ended(struct job_table *t, record_seq committed)
{
    size_t n = 0;
    bool some_left = false;
    for (size_t i = 0; i < t->n; i++) {
        struct job *j = t->jobs[i];
        if (job_has_ended(j) && j->last_seq <= committed) {
            job_destroy(j);
            continue;
        }
        some_left |= job_has_ended(j);
        t->jobs[n++] = j;
    }
    t->n = n;
    return some_left;
}

void job_table_fini(struct job_table *t)
{
    for (size_t i = 0; i < t->n; i++)
        job_destroy(t->jobs[i]);
    free(t->jobs);
    *t = (struct job_table){0};
}
