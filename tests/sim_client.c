/* sim_client.c - clients: a call is repeated with the same key until it is answered */
#include "tests/sim.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRIES_MAX 300

static void try_call(struct sim *s, struct sim_event *e)
{
    struct sim_op *op = &s->ops[e->a];
    if (op->is_done)
        return;
    if (op->n_tries++ == TRIES_MAX) {
        sim_fail(s, "call %" PRIu64 " (method %d) was never answered", e->a, op->method);
        return;
    }
    Ballast__Envelope env = BALLAST__ENVELOPE__INIT;
    env.kind = BALLAST__KIND__KIND_REQUEST;
    env.method = op->method;
    env.request_id = e->a << 16 | op->n_tries;
    env.idempotency_key = (ProtobufCBinaryData){.len = sizeof op->key, .data = op->key};
    net_to_coord(s, SIM_HOSTS_MAX + op->client, &env, op->payload);
    sim_at(s, s->now_ns + NS_PER_S + sim_random(s, 2 * NS_PER_S), try_call, e->a, 0, NULL);
}

size_t client_call(struct sim *s, uint32_t client, Ballast__Method method,
                   const ProtobufCMessage *payload)
{
    assert(s->n_ops < SIM_OPS_MAX);
    struct sim_op *op = &s->ops[s->n_ops];
    size_t n_bytes = protobuf_c_message_get_packed_size(payload);
    uint8_t *bytes = xcalloc(1, n_bytes);
    protobuf_c_message_pack(payload, bytes);
    *op = (struct sim_op){.client = client, .method = method};
    op->payload = protobuf_c_message_unpack(payload->descriptor, NULL, n_bytes, bytes);
    free(bytes);
    uint64_t key[2] = {sim_random(s, 0), s->n_ops};
    memcpy(op->key, key, sizeof op->key);
    sim_at(s, s->now_ns, try_call, s->n_ops, 0, NULL);
    return s->n_ops++;
}

size_t client_submit(struct sim *s, uint32_t client, uint32_t n_workers, uint64_t steps,
                     uint64_t every_steps)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__SubmitRequest request = BALLAST__SUBMIT_REQUEST__INIT;
    spec.name = "job";
    spec.parallel_workers = n_workers;
    spec.train_steps = steps;
    spec.checkpoint_every_steps = every_steps;
    spec.scheduling_max_restarts = 3;
    request.spec = &spec;
    return client_call(s, client, BALLAST__METHOD__METHOD_SUBMIT, &request.base);
}

size_t client_job(struct sim *s, uint32_t client, Ballast__Method method, job_id job,
                  const char *reason)
{
    Ballast__JobRequest request = BALLAST__JOB_REQUEST__INIT;
    request.job_id = job;
    request.reason = (char *)reason;
    return client_call(s, client, method, &request.base);
}

size_t client_rebalance(struct sim *s, uint32_t client, Ballast__Method method, job_id job,
                        uint64_t revision, bool on)
{
    Ballast__RebalanceRequest request = BALLAST__REBALANCE_REQUEST__INIT;
    request.job_id = job;
    request.revision = revision;
    request.on = on;
    return client_call(s, client, method, &request.base);
}

size_t client_worker(struct sim *s, uint32_t client, Ballast__Method method, const char *name)
{
    Ballast__WorkerDrainRequest request = BALLAST__WORKER_DRAIN_REQUEST__INIT;
    request.name = (char *)name;
    request.reason = "by a person";
    return client_call(s, client, method, &request.base);
}

static void on_submitted(struct sim *s, struct sim_op *op, const Ballast__SubmitReply *reply)
{
    if (op->job && op->job != reply->job_id)
        sim_fail(s, "one key made jobs %" PRIu64 " and %" PRIu64, op->job, reply->job_id);
    op->job = reply->job_id;
}

void client_receive(struct sim *s, uint32_t client, const struct sim_packet *p)
{
    struct arena arena = {0};
    ProtobufCMessage *payload;
    const Ballast__Envelope *e = net_open(p, &arena, &payload);
    size_t i = e->request_id >> 16;
    assert(i < s->n_ops && s->ops[i].client == client);
    struct sim_op *op = &s->ops[i];
    if (e->status->code == BALLAST__CODE__OK && e->method == BALLAST__METHOD__METHOD_SUBMIT)
        on_submitted(s, op, (const Ballast__SubmitReply *)payload);
    else if (e->status->code == BALLAST__CODE__OK && payload->descriptor ==
             &ballast__job_reply__descriptor)
        op->state = ((const Ballast__JobReply *)payload)->job->state;
    else if (e->status->code == BALLAST__CODE__OK && payload->descriptor ==
             &ballast__rebalance_plan_reply__descriptor)
        op->revision = ((const Ballast__RebalancePlanReply *)payload)->revision;
    if (!op->is_done) {
        op->is_done = true;
        op->code = e->status->code;
        sim_say(s, "client: call %zu answered %d%s%s", i, op->code,
                op->code ? " " : "", op->code ? e->status->message : "");
    }
    arena_fini(&arena);
}

bool clients_are_done(const struct sim *s)
{
    for (size_t i = 0; i < s->n_ops; i++)
        if (!s->ops[i].is_done)
            return false;
    return true;
}
