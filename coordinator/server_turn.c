/* server_turn.c - a turn of the core: begun by what happens, ended into the store, then sent */
#include "coordinator/server_parts.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"

#define RETRY_AFTER_MS 500

struct turn_work *turn_get(struct server *s)
{
    if (s->open)
        return s->open;
    assert(s->core);
    struct turn_work *w = xcalloc(1, sizeof *w);
    w->work.kind = WORK_TURN;
    s->open = w;
    coord_begin(s->core, &w->turn, clock_now_ns(), clock_wall_ns());
    for (size_t i = 0; i < s->n_gone; i++)
        coord_peer_gone(s->core, &w->turn, s->gone[i]);
    s->n_gone = 0;
    return w;
}

void turn_add_log(struct turn_work *w, link_peer peer, const Ballast__LogChunk *chunk)
{
    w->logs = arena_grow(&w->turn.arena, w->logs, w->n_logs, sizeof *w->logs);
    w->logs[w->n_logs++] = (struct store_log){.chunk = chunk, .peer = peer};
}

void turn_free(struct turn_work *w)
{
    for (struct query *q = w->answered, *next; q; q = next) {
        next = q->next;
        query_free(q);
    }
    turn_fini(&w->turn);
    free(w);
}

void turn_end(struct server *s)
{
    struct turn_work *w = s->open;
    if (!w)
        return;
    coord_tick(s->core, &w->turn);
    s->open = NULL;
    for (size_t i = 0; i < w->turn.n_notes; i++)
        log_warn("%s", w->turn.notes[i]);
    bool has_to_be_stored = w->turn.n_records || w->turn.n_steps || w->turn.n_loads ||
                            w->n_logs;
    if (!has_to_be_stored && !s->n_turns_out) {
        turn_send(s, &w->turn);
        turn_free(w);
        return;
    }
    struct store_batch *b = &w->work.batch;
    b->records = w->turn.records;
    b->n_records = w->turn.n_records;
    b->steps = w->turn.steps;
    b->n_steps = w->turn.n_steps;
    b->loads = w->turn.loads;
    b->n_loads = w->turn.n_loads;
    b->wall_ns = w->turn.wall_ns;
    b->logs = w->logs;
    b->n_logs = w->n_logs;
    s->n_turns_out++;
    s->n_out++;
    store_submit(s->store, b);
}

/* ---- sending --------------------------------------------------------------------------------- */

#define BODY_BYTES_MIN (32u << 10) /* what is smaller is copied faster than it is counted */

/* What several messages in a row tell, packed once: a plan that goes to all ranks of a large job is
 * some MB, and so are gang and placement of each START. */
struct packed {
    const void *what;
    struct link_body *body;
    size_t n_bytes;
};

static void pack(struct packed *p, const void *what, const ProtobufCMessage *m)
{
    if (p->what == what)
        return;
    link_body_release(p->body);
    p->what = what;
    p->n_bytes = m ? protobuf_c_message_get_packed_size(m) : 0;
    p->body = p->n_bytes ? link_body_create(p->n_bytes) : NULL;
    if (p->body)
        protobuf_c_message_pack(m, link_body_bytes(p->body));
}

/* But for these all ranks of an attempt are told the same, from one gang's memory. */
static struct wire_bytes pack_start(struct packed *p, const Ballast__Start *start,
                                    struct arena *arena)
{
    Ballast__Start same = *start, own = BALLAST__START__INIT;
    same.rank = 0;
    same.heard_seq = 0;
    own.rank = start->rank;
    own.heard_seq = start->heard_seq;
    pack(p, start->gang, &same.base);
    uint8_t *bytes = arena_alloc(arena, ballast__start__get_packed_size(&own) + 1);
    return (struct wire_bytes){bytes, ballast__start__pack(&own, bytes)};
}

static void send_one(struct server *s, struct outgoing *out, struct packed *packed)
{
    struct peer_state *p = peer_state_of(s, out->peer);
    struct wire_bytes own = {0};
    if (!p)
        return; /* it has gone meanwhile */
    out->envelope.seq = ++p->seq;
    if (out->envelope.kind == BALLAST__KIND__KIND_RESPONSE)
        metrics_answer(&s->metrics, out->envelope.method,
                       out->envelope.status ? out->envelope.status->code : BALLAST__CODE__OK);
    if (out->payload && out->payload->descriptor == &ballast__start__descriptor)
        own = pack_start(packed, (const Ballast__Start *)out->payload, &s->scratch);
    else
        pack(packed, out->payload, out->payload);
    size_t n_bytes = packed->n_bytes + own.n_bytes;
    struct wire_bytes head = wire_pack_head(&out->envelope, n_bytes, &s->scratch);
    struct link_frame frames[WIRE_FRAMES_MAX] = {
        {head.bytes, head.n_bytes},
        {packed->body ? link_body_bytes(packed->body) : NULL, packed->n_bytes,
         packed->n_bytes < BODY_BYTES_MIN ? NULL : packed->body},
        {own.bytes, own.n_bytes},
    };
    if (n_bytes > BULK_BYTES_MAX - WIRE_HEAD_BYTES_MAX)
        log_error("peer=%" PRIu64 " bytes=%zu msg=\"an answer is too large to be sent\"", out->peer,
                  n_bytes);
    else /* who is gone is told by peer_gone */
        link_send(s->link, out->peer, frames, own.n_bytes ? WIRE_FRAMES_MAX : WIRE_FRAMES);
    arena_reset(&s->scratch);
}

void turn_send(struct server *s, struct turn *t)
{
    struct packed packed = {0};
    for (size_t i = 0; i < t->n_out; i++)
        send_one(s, &t->out[i], &packed);
    link_body_release(packed.body);
    if (t->now_ns)
        metrics_observe(&s->metrics, METRICS_TURN, clock_now_ns() - t->now_ns);
}

void say_not_serving(const struct server *s, struct arena *arena, Ballast__Status *out_status)
{
    if (s->store_err.code)
        check_status(out_status, arena, BALLAST__CODE__UNAVAILABLE, "STORE",
                     "the coordinator can store nothing and tries again every second: %s",
                     s->store_err.text);
    else
        check_status(out_status, arena, BALLAST__CODE__UNAVAILABLE, "STARTING",
                     "the coordinator reads its state again");
    out_status->retry_after_ms = RETRY_AFTER_MS;
}

void turn_fail(struct server *s, struct turn *t)
{
    struct packed packed = {0};
    for (size_t i = 0; i < t->n_out; i++) {
        struct outgoing *out = &t->out[i];
        if (out->envelope.kind != BALLAST__KIND__KIND_RESPONSE)
            continue;
        Ballast__Status *status = arena_alloc(&t->arena, sizeof *status);
        check_status(status, &t->arena, BALLAST__CODE__UNAVAILABLE, "STORE",
                     "the coordinator cannot store anything at present (is its disk full?)");
        status->retry_after_ms = RETRY_AFTER_MS;
        out->envelope.status = status;
        out->payload = NULL;
        send_one(s, out, &packed);
    }
    link_body_release(packed.body);
}

void answer(struct server *s, link_peer peer, const Ballast__Envelope *request,
            const ProtobufCMessage *payload)
{
    if (s->open) {
        turn_reply(&s->open->turn, peer, request, payload);
        return;
    }
    struct turn t = {.coordinator_epoch = s->core ? coord_epoch(s->core) : 0};
    turn_reply(&t, peer, request, payload);
    turn_send(s, &t);
    turn_fini(&t);
}

void refuse(struct server *s, link_peer peer, const Ballast__Envelope *request,
            const Ballast__Status *status)
{
    static const Ballast__Envelope unknown = BALLAST__ENVELOPE__INIT;
    struct turn now = {.coordinator_epoch = s->core ? coord_epoch(s->core) : 0};
    struct turn *t = s->open ? &s->open->turn : &now;
    s->n_refused++;
    turn_refuse(t, peer, request ? request : &unknown, status->code, status->reason, "%s",
                status->message);
    Ballast__Status *sent = t->out[t->n_out - 1].envelope.status;
    sent->retry_after_ms = status->retry_after_ms;
    sent->n_violations = status->n_violations;
    sent->violations = status->violations;
    if (t == &now) {
        turn_send(s, t);
        turn_fini(t);
    }
}
