/* look.c - what the shell may look at */
#include "coordinator/core.h"

#include <string.h>

Ballast__Job *coord_job(const struct coord *c, job_id job, struct arena *arena)
{
    const struct job *j = job_table_find(&c->jobs, job);
    return j && !job_has_ended(j) ? job_describe(j, c->now_ns, arena) : NULL;
}

const Ballast__JobSpec *coord_job_spec(const struct coord *c, job_id job)
{
    const struct job *j = job_table_find(&c->jobs, job);
    return j ? j->spec : NULL;
}

size_t coord_jobs(const struct coord *c, job_id after_id, const char *user, size_t limit,
                  struct arena *arena, Ballast__Job ***out_jobs)
{
    size_t first = job_table_above(&c->jobs, after_id), n = 0;
    size_t n_most = c->jobs.n - first < limit ? c->jobs.n - first : limit;
    Ballast__Job **jobs = arena_alloc(arena, n_most * sizeof *jobs);
    for (size_t i = first; i < c->jobs.n && n < n_most; i++) {
        const struct job *j = c->jobs.jobs[i];
        if (!job_has_ended(j) && (!user || !*user || !strcmp(user, j->user)))
            jobs[n++] = job_describe(j, c->now_ns, arena);
    }
    *out_jobs = jobs;
    return n;
}

size_t coord_workers(const struct coord *c, uint64_t now_ns, struct arena *arena,
                     Ballast__Worker ***out_workers)
{
    Ballast__Worker **workers = arena_alloc(arena, c->fleet.n * sizeof *workers);
    for (size_t i = 0; i < c->fleet.n; i++)
        workers[i] = fleet_describe(c->fleet.workers[i], now_ns, arena);
    *out_workers = workers;
    return c->fleet.n;
}

void coord_count(const struct coord *c, uint64_t now_ns, uint32_t out_jobs[JOB_STATE_MAX + 1],
                 struct coord_fleet_counts *out_fleet)
{
    memset(out_jobs, 0, (JOB_STATE_MAX + 1) * sizeof *out_jobs);
    *out_fleet = (struct coord_fleet_counts){0};
    for (size_t i = 0; i < c->jobs.n; i++)
        if (!job_has_ended(c->jobs.jobs[i]))
            out_jobs[c->jobs.jobs[i]->state]++;
    for (size_t i = 0; i < c->fleet.n; i++) {
        const struct worker *w = c->fleet.workers[i];
        uint64_t age_ns = now_ns > w->last_heard_ns ? now_ns - w->last_heard_ns : 0;
        out_fleet->n[fleet_state(w)]++;
        if (fleet_is_attached(w) && age_ns > out_fleet->heartbeat_age_max_ns)
            out_fleet->heartbeat_age_max_ns = age_ns;
    }
}

bool coord_accepts_log(const struct coord *c, uint64_t peer, const Ballast__LogChunk *chunk)
{
    return fleet_by_peer(&c->fleet, peer) && chunk->job_id && chunk->job_id <= c->last_job_id;
}

void coord_ack_log(struct coord *c, struct turn *t, uint64_t peer, const Ballast__LogChunk *chunk,
                   uint64_t log_offset)
{
    const struct worker *w = fleet_by_peer(&c->fleet, peer);
    Ballast__Ack *a = arena_alloc(&t->arena, sizeof *a);
    ballast__ack__init(a);
    a->job_id = chunk->job_id;
    a->attempt = chunk->attempt;
    a->rank = chunk->rank;
    a->log_offset = log_offset;
    if (w)
        turn_notice(t, peer, w->epoch, BALLAST__METHOD__METHOD_ACK, &a->base);
}

uint64_t coord_epoch(const struct coord *c)
{
    return c->epoch;
}

record_seq coord_last_seq(const struct coord *c)
{
    return c->last_seq;
}
