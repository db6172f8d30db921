/* sim_net.c - packets between endpoints: lost, late, twice, in another order */
#include "tests/sim.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static const struct method_row {
    Ballast__Method                   method;
    const ProtobufCMessageDescriptor *request, *response;
} rows[] = {
#define M(x) BALLAST__METHOD__METHOD_##x
    {M(PING), &ballast__ping_request__descriptor, &ballast__ping_reply__descriptor},
    {M(SUBMIT), &ballast__submit_request__descriptor, &ballast__submit_reply__descriptor},
    {M(JOB_LIST), &ballast__job_list_request__descriptor, &ballast__job_list_reply__descriptor},
    {M(JOB_CANCEL), &ballast__job_request__descriptor, &ballast__job_reply__descriptor},
    {M(JOB_HOLD), &ballast__job_request__descriptor, &ballast__job_reply__descriptor},
    {M(JOB_RELEASE), &ballast__job_request__descriptor, &ballast__job_reply__descriptor},
    {M(JOB_PAUSE), &ballast__job_request__descriptor, &ballast__job_reply__descriptor},
    {M(JOB_RESUME), &ballast__job_request__descriptor, &ballast__job_reply__descriptor},
    {M(JOB_REQUEUE), &ballast__job_request__descriptor, &ballast__job_reply__descriptor},
    {M(JOB_WAIT), &ballast__job_wait_request__descriptor, &ballast__job_reply__descriptor},
    {M(WORKER_LIST), &ballast__worker_list_request__descriptor,
     &ballast__worker_list_reply__descriptor},
    {M(WORKER_DRAIN), &ballast__worker_drain_request__descriptor,
     &ballast__worker_reply__descriptor},
    {M(WORKER_RESUME), &ballast__worker_drain_request__descriptor,
     &ballast__worker_reply__descriptor},
    {M(REBALANCE_PLAN), &ballast__rebalance_request__descriptor,
     &ballast__rebalance_plan_reply__descriptor},
    {M(REBALANCE_APPLY), &ballast__rebalance_request__descriptor,
     &ballast__rebalance_plan_reply__descriptor},
    {M(REBALANCE_AUTO), &ballast__rebalance_request__descriptor, &ballast__job_reply__descriptor},
    {M(HELLO), &ballast__hello__descriptor, &ballast__welcome__descriptor},
    {M(HEARTBEAT), &ballast__heartbeat__descriptor, NULL},
    {M(RANK_STATE), &ballast__rank_state__descriptor, NULL},
    {M(STEPS), &ballast__step_reports__descriptor, NULL},
    {M(LOG), &ballast__log_chunk__descriptor, NULL},
    {M(GOODBYE), &ballast__goodbye__descriptor, NULL},
    {M(START), &ballast__start__descriptor, NULL},
    {M(STOP), &ballast__stop__descriptor, NULL},
    {M(ACK), &ballast__ack__descriptor, NULL},
    {M(LOAD), &ballast__load_report__descriptor, NULL},
    {M(PREPARE), &ballast__prepare__descriptor, NULL},
    {M(ABORT_PLAN), &ballast__abort_plan__descriptor, NULL},
#undef M
};

static struct sim_packet *pack(const Ballast__Envelope *e, const ProtobufCMessage *payload)
{
    size_t n_envelope = ballast__envelope__get_packed_size(e);
    size_t n_payload = payload ? protobuf_c_message_get_packed_size(payload) : 0;
    struct sim_packet *p = xcalloc(1, sizeof *p + n_envelope + n_payload);
    ballast__envelope__pack(e, p->bytes);
    if (payload)
        protobuf_c_message_pack(payload, p->bytes + n_envelope);
    p->n_envelope = (uint32_t)n_envelope;
    p->n_payload = (uint32_t)n_payload;
    return p;
}

Ballast__Envelope *net_open(const struct sim_packet *p, struct arena *arena,
                            ProtobufCMessage **out_payload)
{
    Ballast__Envelope *e = ballast__envelope__unpack(arena_pb(arena), p->n_envelope, p->bytes);
    assert(e);
    *out_payload = NULL;
    bool is_response = e->kind == BALLAST__KIND__KIND_RESPONSE;
    if (is_response && e->status && e->status->code != BALLAST__CODE__OK)
        return e;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].method == e->method)
            *out_payload = protobuf_c_message_unpack(
                is_response ? rows[i].response : rows[i].request, arena_pb(arena), p->n_payload,
                p->bytes + p->n_envelope);
    assert(*out_payload);
    return e;
}

static uint64_t draw_delay_ns(struct sim *s)
{
    if (sim_chance(s, s->net.slow))
        return 1 + sim_random(s, s->net.slow_delay_ns);
    return s->net.slow > 0 ? 1 + sim_random(s, s->net.delay_ns) : s->net.delay_ns;
}

static bool is_cut(const struct sim *s, uint32_t endpoint)
{
    return s->now_ns < s->endpoints[endpoint].cut_until_ns;
}

/* Once, twice or never. */
static void post(struct sim *s, struct sim_packet *p, void (*arrive)(struct sim *,
                                                                    struct sim_event *))
{
    s->counts.n_packets++;
    if (is_cut(s, p->endpoint) || sim_chance(s, s->net.loss)) {
        s->counts.n_lost++;
        free(p);
        return;
    }
    if (sim_chance(s, s->net.duplicate)) {
        struct sim_packet *twin = xmemdup(p, sizeof *p + p->n_envelope + p->n_payload);
        sim_at(s, s->now_ns + draw_delay_ns(s), arrive, 0, 0, twin);
    }
    sim_at(s, s->now_ns + draw_delay_ns(s), arrive, 0, 0, p);
}

static void arrive_at_coord(struct sim *s, struct sim_event *e)
{
    struct sim_packet *p = e->data;
    if (!s->coord || is_cut(s, p->endpoint) || p->coord_life != s->coord_life)
        return;
    e->data = NULL;
    coord_sim_receive(s, p);
}

void net_to_coord(struct sim *s, uint32_t endpoint, const Ballast__Envelope *e,
                  const ProtobufCMessage *payload)
{
    if (!s->coord)
        return; /* not connected: cannot be sent */
    struct sim_packet *p = pack(e, payload);
    p->endpoint = endpoint;
    p->life = s->endpoints[endpoint].life;
    p->coord_life = s->coord_life;
    post(s, p, arrive_at_coord);
}

static void arrive_at_peer(struct sim *s, struct sim_event *e)
{
    const struct sim_packet *p = e->data;
    const struct sim_endpoint *to = &s->endpoints[p->endpoint];
    if (!to->is_up || to->life != p->life || is_cut(s, p->endpoint))
        return;
    if (p->endpoint < SIM_HOSTS_MAX)
        host_receive(s, p->endpoint, p);
    else
        client_receive(s, p->endpoint - SIM_HOSTS_MAX, p);
}

void net_to_peer(struct sim *s, uint64_t peer, const Ballast__Envelope *e,
                 const ProtobufCMessage *payload)
{
    for (uint32_t i = 0; i < SIM_HOSTS_MAX + SIM_CLIENTS_MAX; i++) {
        if (s->endpoints[i].peer != peer || !peer)
            continue;
        struct sim_packet *p = pack(e, payload);
        p->endpoint = i;
        p->life = s->endpoints[i].life;
        post(s, p, arrive_at_peer);
        return;
    }
    if (sim_chance(s, 0.5))
        coord_sim_peer_gone(s, peer); /* else the connection only looks alive */
}
