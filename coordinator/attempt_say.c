/* attempt_say.c - what the ranks of an attempt are told: START, PEERS, STOP, and that an end is
 * known */
#include "coordinator/core.h"

#include <stdio.h>
#include <string.h>

#include "proto/message.h"

/* What all ranks are told, but for the rank. */
Ballast__Start *attempt_start_template(struct coord *c, struct turn *t, const struct job *j)
{
    struct arena *arena = &t->arena;
    Ballast__Start *s = arena_alloc(arena, sizeof *s);
    ballast__start__init(s);
    s->job_id = j->id;
    s->attempt = j->attempt;
    s->coll_id = (ProtobufCBinaryData){
        .len = COLL_ID_BYTES, .data = arena_memdup(arena, j->coll_id, COLL_ID_BYTES)};
    s->n_gang = j->n_gang;
    s->gang = arena_alloc(arena, j->n_gang * sizeof *s->gang);
    for (uint32_t r = 0; r < j->n_gang; r++) {
        Ballast__GangMember *m = arena_alloc(arena, sizeof *m);
        ballast__gang_member__init(m);
        m->worker = arena_strdup(arena, j->gang[r]);
        m->node = arena_strdup(arena, c->fleet.workers[j->ranks[r].worker]->node);
        m->machine = arena_strdup(arena, c->fleet.workers[j->ranks[r].worker]->machine);
        s->gang[r] = m;
    }
    s->spec = message_copy(j->start_spec ? j->start_spec : j->spec, arena);
    s->settings_revision = j->start_spec ? j->start_revision : j->settings_revision;
    if (j->rebalance.placement)
        s->placement = message_copy(j->rebalance.placement, arena);
    return s;
}

void attempt_say_start(struct turn *t, const struct worker *w, const Ballast__Start *template)
{
    Ballast__Start *s = arena_memdup(&t->arena, template, sizeof *s);
    s->rank = w->rank;
    s->heard_seq = w->beat_seq;
    if (w->peer)
        turn_notice(t, w->peer, w->epoch, BALLAST__METHOD__METHOD_START, &s->base);
}

/* What all ranks have told of themselves; NULL: one has not. */
static Ballast__Peers *all_peers(struct turn *t, const struct job *j)
{
    struct arena *arena = &t->arena;
    for (uint32_t r = 0; r < j->n_gang; r++)
        if (!*j->ranks[r].data_address)
            return NULL;
    Ballast__Peers *p = arena_alloc(arena, sizeof *p);
    ballast__peers__init(p);
    p->job_id = j->id;
    p->attempt = j->attempt;
    p->n_peers = j->n_gang;
    p->peers = arena_alloc(arena, j->n_gang * sizeof *p->peers);
    for (uint32_t r = 0; r < j->n_gang; r++) {
        Ballast__Peer *one = arena_alloc(arena, sizeof *one);
        ballast__peer__init(one);
        one->address = arena_strdup(arena, j->ranks[r].data_address);
        one->key = (ProtobufCBinaryData){
            .len = DATA_KEY_BYTES,
            .data = arena_memdup(arena, j->ranks[r].data_key, DATA_KEY_BYTES)};
        p->peers[r] = one;
    }
    return p;
}

static void send_peers(struct turn *t, const struct worker *w, const Ballast__Peers *p)
{
    if (w->peer)
        turn_notice(t, w->peer, w->epoch, BALLAST__METHOD__METHOD_PEERS, &p->base);
}

/* A rank tells where it listens: the last one's word is what all wait for. Said again as long as a
 * rank says it, because either may be lost. */
void attempt_relay_peers(struct coord *c, struct turn *t, struct job *j, const struct worker *w,
                         const Ballast__RankState *s)
{
    struct rank *rank = &j->ranks[s->rank];
    bool is_new = !*rank->data_address;
    if (!*s->data_address || s->data_key.len != DATA_KEY_BYTES ||
        s->phase >= BALLAST__RANK_PHASE__RANK_READY)
        return;
    snprintf(rank->data_address, sizeof rank->data_address, "%s", s->data_address);
    memcpy(rank->data_key, s->data_key.data, DATA_KEY_BYTES);
    const Ballast__Peers *p = all_peers(t, j);
    for (uint32_t r = 0; p && is_new && r < j->n_gang; r++)
        send_peers(t, c->fleet.workers[j->ranks[r].worker], p);
    if (p && !is_new)
        send_peers(t, w, p);
}

static Ballast__Stop *stop(struct turn *t, job_id job, uint32_t attempt, uint32_t rank,
                           Ballast__StopMode mode, const char *reason)
{
    Ballast__Stop *s = arena_alloc(&t->arena, sizeof *s);
    ballast__stop__init(s);
    s->job_id = job;
    s->attempt = attempt;
    s->rank = rank;
    s->mode = mode;
    s->reason = arena_strdup(&t->arena, reason);
    return s;
}

void attempt_say_stop(struct coord *c, struct turn *t, const struct job *j,
                      const struct worker *w)
{
    bool saves = j->state == BALLAST__JOB_STATE__JOB_STOPPING &&
        j->stop_mode == BALLAST__STOP_MODE__STOP_CHECKPOINT;
    Ballast__Stop *s = stop(t, j->id, j->attempt, w->rank,
                            saves ? BALLAST__STOP_MODE__STOP_CHECKPOINT
                                  : BALLAST__STOP_MODE__STOP_NOW, j->reason);
    s->grace_ms = (uint32_t)((!saves ? c->config.stop_grace_ns
                              : job_is_pausing(j) ? c->config.pause_grace_ns
                              : c->config.checkpoint_grace_ns) / NS_PER_MS);
    if (w->peer)
        turn_notice(t, w->peer, w->epoch, BALLAST__METHOD__METHOD_STOP, &s->base);
}

void attempt_fence(struct turn *t, uint64_t peer, uint64_t worker_epoch,
                   const Ballast__RankState *state, const char *reason)
{
    Ballast__Stop *s = stop(t, state->job_id, state->attempt, state->rank,
                            BALLAST__STOP_MODE__STOP_NOW, reason);
    turn_notice(t, peer, worker_epoch, BALLAST__METHOD__METHOD_STOP, &s->base);
}

void attempt_ack_ended(struct turn *t, const struct worker *w, const Ballast__RankState *state)
{
    Ballast__Ack *a = arena_alloc(&t->arena, sizeof *a);
    ballast__ack__init(a);
    a->job_id = state->job_id;
    a->attempt = state->attempt;
    a->rank = state->rank;
    a->ended = true;
    if (w->peer)
        turn_notice(t, w->peer, w->epoch, BALLAST__METHOD__METHOD_ACK, &a->base);
}
