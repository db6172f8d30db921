/* turn.c - what one loop turn produced: records to commit, then messages to send */
#include "coordinator/turn.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void turn_fini(struct turn *t)
{
    arena_fini(&t->arena);
    *t = (struct turn){0};
}

static struct outgoing *add_outgoing(struct turn *t, uint64_t peer)
{
    t->out = arena_grow(&t->arena, t->out, t->n_out, sizeof *t->out);
    struct outgoing *o = &t->out[t->n_out++];
    *o = (struct outgoing){.peer = peer};
    ballast__envelope__init(&o->envelope);
    o->envelope.coordinator_epoch = t->coordinator_epoch;
    return o;
}

static Ballast__Status *add_response(struct turn *t, uint64_t peer,
                                     const Ballast__Envelope *request,
                                     const ProtobufCMessage *payload)
{
    struct outgoing *o = add_outgoing(t, peer);
    o->envelope.kind = BALLAST__KIND__KIND_RESPONSE;
    o->envelope.method = request->method;
    o->envelope.request_id = request->request_id;
    o->envelope.worker_epoch = request->worker_epoch;
    o->envelope.trace_id = request->trace_id;
    Ballast__Status *status = arena_alloc(&t->arena, sizeof *status);
    ballast__status__init(status);
    o->envelope.status = status;
    o->payload = payload;
    return status;
}

void turn_reply(struct turn *t, uint64_t peer, const Ballast__Envelope *request,
                const ProtobufCMessage *payload)
{
    add_response(t, peer, request, payload);
}

void turn_refuse(struct turn *t, uint64_t peer, const Ballast__Envelope *request,
                 Ballast__Code code, const char *reason, const char *format, ...)
{
    Ballast__Status *status = add_response(t, peer, request, NULL);
    char text[2 * REASON_BYTES_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    status->code = code;
    status->reason = arena_strdup(&t->arena, reason);
    status->message = arena_strdup(&t->arena, text);
}

void turn_notice(struct turn *t, uint64_t peer, uint64_t worker_epoch, Ballast__Method method,
                 const ProtobufCMessage *payload)
{
    struct outgoing *o = add_outgoing(t, peer);
    o->envelope.kind = BALLAST__KIND__KIND_NOTICE;
    o->envelope.method = method;
    o->envelope.worker_epoch = worker_epoch;
    o->payload = payload;
}

void turn_record(struct turn *t, Ballast__Record *record)
{
    t->records = arena_grow(&t->arena, t->records, t->n_records, sizeof *t->records);
    t->records[t->n_records++] = record;
}

void turn_store_steps(struct turn *t, job_id job, const Ballast__StepReports *reports)
{
    t->steps = arena_grow(&t->arena, t->steps, t->n_steps, sizeof *t->steps);
    t->steps[t->n_steps++] = (struct turn_steps){.job = job, .reports = reports};
}

void turn_store_load(struct turn *t, job_id job, const Ballast__LoadReport *report)
{
    t->loads = arena_grow(&t->arena, t->loads, t->n_loads, sizeof *t->loads);
    t->loads[t->n_loads++] = (struct turn_load){.job = job, .report = report};
}

void turn_note(struct turn *t, const char *format, ...)
{
    char text[2 * REASON_BYTES_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    t->notes = arena_grow(&t->arena, t->notes, t->n_notes, sizeof *t->notes);
    t->notes[t->n_notes++] = arena_strdup(&t->arena, text);
}
