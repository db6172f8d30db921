/* attempt_gang.c - the workers of an attempt: what is known of their ranks, and who is free */
#include "coordinator/attempt_parts.h"

#include <assert.h>
#include <stdlib.h>

struct job *attempt_of(struct coord *c, const struct worker *w)
{
    if (!w->job)
        return NULL;
    struct job *j = job_table_find(&c->jobs, w->job);
    assert(j && j->ranks && j->attempt == w->attempt && w->rank < j->n_gang);
    assert(j->ranks[w->rank].worker == w->index);
    return j;
}

void attempt_watch(struct job *j)
{
    free(j->ranks);
    free(j->said);
    j->ranks = xcalloc(j->n_gang, sizeof *j->ranks);
    j->said = xcalloc(j->n_gang, sizeof *j->said);
    j->n_alive = j->n_gang;
    j->n_finished = 0;
}

void attempt_take(struct job *j, uint32_t rank, struct worker *w)
{
    j->ranks[rank].worker = w->index;
    w->job = j->id;
    w->attempt = j->attempt;
    w->rank = rank;
}

void attempt_set_fate(struct coord *c, struct job *j, uint32_t rank, enum rank_fate fate,
                      uint64_t over_ns)
{
    struct rank *r = &j->ranks[rank];
    j->n_alive += (fate == RANK_ALIVE) - (r->fate == RANK_ALIVE);
    r->fate = fate;
    r->over_ns = over_ns;
    core_wake_at(c, over_ns > c->now_ns ? over_ns : c->now_ns);
}

void attempt_release(struct coord *c, struct job *j, uint32_t rank)
{
    struct worker *w = c->fleet.workers[j->ranks[rank].worker];
    if (w->job == j->id && w->attempt == j->attempt) {
        w->job = 0;
        w->attempt = w->rank = 0;
        c->queue_is_stale = true;
    }
}

void attempt_release_all(struct coord *c, struct job *j)
{
    for (uint32_t r = 0; j->ranks && r < j->n_gang; r++)
        attempt_release(c, j, r);
    free(j->ranks);
    free(j->said);
    j->ranks = NULL;
    j->said = NULL;
    j->n_alive = j->n_finished = 0;
}

void attempt_release_ended(struct coord *c, struct job *j)
{
    for (uint32_t r = 0; j->ranks && r < j->n_gang; r++)
        if (j->ranks[r].fate == RANK_ENDED)
            attempt_release(c, j, r);
}
