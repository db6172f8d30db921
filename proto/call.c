/* call.c - one call at a time over a link on a private loop */
#include "proto/call.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <uv.h>

#include "common/clock.h"
#include "common/link.h"
#include "proto/check.h"
#include "proto/wire.h"

#define RETRY_BASE_MS   100
#define RETRY_CAP_MS    10000
#define ATTEMPT_MS      5000 /* without an answer on a live connection: say it again */
#define OUTAGE_TELL_MS  300
#define STOP_LOOK_MS    100
#define HANDSHAKES_MAX  3 /* a coordinator that dies may break one off */

/* One call, from the first sending to its answer. */
struct call {
    Ballast__Method         method;
    const ProtobufCMessage *request;
    uint8_t  key[IDEMPOTENCY_KEY_BYTES];
    bool     has_key;
    uint64_t first_id;   /* request ids of its attempts are this and above */
    uint64_t end_ns;     /* its timeout */
    uint64_t next_ns;    /* when to send (again) */
    uint64_t retry_ms;   /* present backoff */
    bool     was_sent;
    struct arena *arena; /* borrowed: answers live there */

    bool     is_over;
    int      rc;
    const ProtobufCMessage *reply;
    Ballast__Status *status; /* borrowed */
};

struct caller {
    struct caller_options options;
    uv_loop_t    loop;
    uv_timer_t   timer;
    struct link *link;
    bool         is_up, was_told;
    uint32_t     n_denied; /* handshakes in a row that failed without a word */
    uint64_t     down_ns; /* since when there is no connection */
    uint64_t     last_id, seq;
    struct arena scratch; /* of one attempt */
    struct call *call;    /* the present one, or NULL */
};

/* Full jitter: anywhere between now and the backoff, which doubles. */
static void back_off(struct call *call, uint64_t at_least_ms)
{
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) < 0)
        random = clock_now_ns();
    uint64_t wait_ms = at_least_ms + random % (call->retry_ms + 1);
    call->next_ns = clock_now_ns() + wait_ms * NS_PER_MS;
    call->retry_ms = call->retry_ms * 2 < RETRY_CAP_MS ? call->retry_ms * 2 : RETRY_CAP_MS;
}

static void finish(struct call *call, int rc)
{
    call->is_over = true;
    call->rc = rc;
}

static bool asks_to_retry(const Ballast__Status *s)
{
    return s->code == BALLAST__CODE__UNAVAILABLE ||
           (s->code == BALLAST__CODE__RESOURCE_EXHAUSTED && s->retry_after_ms);
}

static void on_message(void *context, link_peer peer, const struct link_frame *frames,
                       size_t n_frames)
{
    struct caller *c = context;
    struct call *call = c->call;
    (void)peer;
    if (!call || call->is_over)
        return; /* late */
    struct wire_bytes bytes[LINK_FRAMES_MAX];
    for (size_t i = 0; i < n_frames && i < LINK_FRAMES_MAX; i++)
        bytes[i] = (struct wire_bytes){frames[i].bytes, frames[i].n_bytes};
    struct checked_message m;
    int rc = check_message(bytes, n_frames, CHECK_COORDINATOR, call->arena, &m, call->status);
    if (rc == -EPROTO) {
        finish(call, rc);
        return;
    }
    bool is_ours = m.envelope->request_id >= call->first_id || !m.envelope->request_id;
    if (m.envelope->kind != BALLAST__KIND__KIND_RESPONSE || !is_ours)
        return;
    if (rc < 0 || (m.payload && m.method->method != call->method)) {
        finish(call, -EPROTO);
        return;
    }
    if (m.payload) {
        call->reply = m.payload;
        finish(call, 0);
        return;
    }
    *call->status = *m.envelope->status;
    if (asks_to_retry(call->status))
        back_off(call, call->status->retry_after_ms);
    else
        finish(call, -EREMOTEIO);
}

static void on_connection(void *context, bool is_up)
{
    struct caller *c = context;
    c->is_up = is_up;
    if (is_up) {
        c->was_told = false;
        c->n_denied = 0;
        return;
    }
    c->down_ns = clock_now_ns();
    if (c->call)
        c->call->next_ns = c->down_ns; /* whatever was sent is lost or unknown: say it again */
}

/* What was sent, if anything, was sent over an earlier connection. */
static void deny(struct caller *c, const char *text)
{
    struct call *call = c->call;
    if (!call || call->is_over)
        return;
    check_status(call->status, call->arena, BALLAST__CODE__UNAUTHENTICATED, "KEY", "%s", text);
    finish(call, -EREMOTEIO);
}

static void on_denied(void *context, enum link_denial why)
{
    struct caller *c = context;
    const struct caller_options *o = &c->options;
    char text[1024];
    size_t n_servers = o->keys ? o->keys->n_servers : 1;
    if (why == LINK_NOT_ADMITTED)
        snprintf(text, sizeof text, "the coordinator at %s does not know the key of %s (%s): the "
                 "line of its .pub must be in the coordinator's authorized_keys", o->address,
                 o->key_name, o->key_file);
    else if (why == LINK_OTHER_SECURITY && o->keys)
        snprintf(text, sizeof text, "the coordinator at %s speaks without keys there, so it is "
                 "not the one of %s", o->address, o->server_file);
    else if (why == LINK_OTHER_SECURITY)
        snprintf(text, sizeof text, "the coordinator at %s wants a key: --key FILE and "
                 "--coordinator-key FILE; 'ballast keygen' makes one", o->address);
    else if (!o->keys || ++c->n_denied < HANDSHAKES_MAX * n_servers)
        return;
    else
        snprintf(text, sizeof text, "the coordinator at %s has another key than %s says",
                 o->address, o->server_file);
    deny(c, text);
}

static void on_timer(uv_timer_t *timer)
{
    (void)timer; /* it only wakes the loop */
}

int caller_open(const struct caller_options *options, struct caller **out_caller, struct err *err)
{
    struct caller *c = xcalloc(1, sizeof *c);
    c->options = *options;
    c->down_ns = clock_now_ns();
    int rc = link_loop_init(&c->loop, err);
    if (rc < 0) {
        free(c);
        return rc;
    }
    uv_timer_init(&c->loop, &c->timer);
    struct link_handler handler = {.context = c, .message = on_message,
                                   .connection = on_connection, .denied = on_denied};
    rc = link_connect(&c->loop, options->address, options->keys, &handler, &c->link, err);
    if (rc < 0) {
        caller_close(c);
        return rc;
    }
    *out_caller = c;
    return 0;
}

void caller_close(struct caller *c)
{
    if (!c)
        return;
    link_close(c->link);
    uv_close((uv_handle_t *)&c->timer, NULL);
    uv_run(&c->loop, UV_RUN_DEFAULT);
    uv_loop_close(&c->loop);
    arena_fini(&c->scratch);
    free(c);
}

/* How long the coordinator may hold a long poll. */
static uint32_t wait_ms_of(const ProtobufCMessage *request)
{
    const ProtobufCFieldDescriptor *f =
        protobuf_c_message_descriptor_get_field_by_name(request->descriptor, "wait_ms");
    return f ? *(const uint32_t *)((const uint8_t *)request + f->offset) : 0;
}

static void send_attempt(struct caller *c, struct call *call, uint64_t now_ns)
{
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    struct wire_bytes bytes[WIRE_FRAMES];
    struct link_frame frames[WIRE_FRAMES];
    uint64_t left_ms = (call->end_ns - now_ns) / NS_PER_MS;
    e.kind = BALLAST__KIND__KIND_REQUEST;
    e.method = call->method;
    e.request_id = ++c->last_id;
    e.deadline_ms = left_ms < 1 ? 1 : left_ms > DEADLINE_MS_MAX ? DEADLINE_MS_MAX
                                                                : (uint32_t)left_ms;
    e.seq = ++c->seq;
    if (call->has_key)
        e.idempotency_key = (ProtobufCBinaryData){sizeof call->key, call->key};
    wire_pack(&e, call->request, &c->scratch, bytes);
    for (int i = 0; i < WIRE_FRAMES; i++)
        frames[i] = (struct link_frame){bytes[i].bytes, bytes[i].n_bytes};
    if (link_send(c->link, LINK_SERVER, frames, WIRE_FRAMES) == 0) {
        call->was_sent = true;
        call->next_ns = now_ns + (ATTEMPT_MS + (uint64_t)wait_ms_of(call->request)) * NS_PER_MS;
    } else {
        back_off(call, 0);
    }
    arena_reset(&c->scratch);
}

static void tell_outage(struct caller *c, const struct call *call, uint64_t now_ns)
{
    if (c->was_told || c->is_up || now_ns - c->down_ns < OUTAGE_TELL_MS * NS_PER_MS)
        return;
    c->was_told = true;
    if (c->options.reconnecting)
        c->options.reconnecting(c->options.context, call->was_sent);
}

static void run_out(struct caller *c, struct call *call)
{
    bool has_status = call->status->code != BALLAST__CODE__OK; /* the last refusal stands */
    if (has_status) {
        finish(call, -EREMOTEIO);
    } else if (call->was_sent) {
        check_status(call->status, call->arena, BALLAST__CODE__DEADLINE_EXCEEDED, "NO_ANSWER",
                     "%s did not answer in time", c->options.address);
        finish(call, -ETIMEDOUT);
    } else {
        check_status(call->status, call->arena, BALLAST__CODE__UNAVAILABLE, "UNREACHABLE",
                     "no coordinator answers at %s", c->options.address);
        finish(call, -EHOSTUNREACH);
    }
}

/* Does what is due and sleeps until something else is. */
static void turn(struct caller *c, struct call *call)
{
    uint64_t now_ns = clock_now_ns();
    if (c->options.stop && *c->options.stop) {
        check_status(call->status, call->arena, BALLAST__CODE__CANCELLED, "STOPPED", "stopped");
        finish(call, -EINTR);
        return;
    }
    if (now_ns >= call->end_ns) {
        run_out(c, call);
        return;
    }
    tell_outage(c, call, now_ns);
    if (c->is_up && now_ns >= call->next_ns)
        send_attempt(c, call, now_ns);
    uint64_t wake_ns = call->end_ns;
    if (c->is_up && call->next_ns < wake_ns)
        wake_ns = call->next_ns;
    if (!c->is_up && !c->was_told && c->down_ns + OUTAGE_TELL_MS * NS_PER_MS < wake_ns)
        wake_ns = c->down_ns + OUTAGE_TELL_MS * NS_PER_MS;
    uint64_t wait_ms = wake_ns > now_ns ? (wake_ns - now_ns) / NS_PER_MS + 1 : 0;
    if (c->options.stop && wait_ms > STOP_LOOK_MS)
        wait_ms = STOP_LOOK_MS;
    uv_update_time(&c->loop);
    uv_timer_start(&c->timer, on_timer, wait_ms, 0);
    uv_run(&c->loop, UV_RUN_ONCE);
}

int caller_call(struct caller *c, Ballast__Method method, const ProtobufCMessage *request,
                uint32_t timeout_ms, struct arena *arena, const ProtobufCMessage **out_reply,
                Ballast__Status *out_status, struct err *err)
{
    const struct check_method *m = check_method(method);
    struct call call = {
        .method = method, .request = request, .first_id = c->last_id + 1, .arena = arena,
        .retry_ms = RETRY_BASE_MS, .status = out_status,
    };
    ballast__status__init(out_status);
    call.next_ns = clock_now_ns();
    call.end_ns = call.next_ns + timeout_ms * NS_PER_MS;
    call.has_key = m && m->needs_key;
    if (call.has_key && getrandom(call.key, sizeof call.key, 0) != sizeof call.key)
        return err_set(err, -EIO, "getrandom: %s", strerror(errno));
    if (!c->is_up)
        c->down_ns = c->was_told ? c->down_ns : call.next_ns;

    c->call = &call;
    while (!call.is_over)
        turn(c, &call);
    c->call = NULL;
    if (call.rc < 0)
        return err_set(err, call.rc, "%s", out_status->message);
    ballast__status__init(out_status);
    *out_reply = call.reply;
    return 0;
}
