/* server_message.c - what comes in: messages, connections, and who may
 *
 * A message is checked, then refused, read for by server_query, or handed to the core. */
#include "coordinator/server_parts.h"

#include <inttypes.h>

#include "common/clock.h"
#include "common/log.h"

#define REFUSED_SAY_NS (60 * NS_PER_S)

static bool refuses_all(const struct server *s, const Ballast__Envelope *e,
                        const ProtobufCMessage *payload, struct arena *arena,
                        Ballast__Status *out_status)
{
    if (s->state == SERVER_SERVING)
        return false;
    if (s->state == SERVER_STOPPING)
        check_status(out_status, arena, BALLAST__CODE__UNAVAILABLE, "STOPPING",
                     "the coordinator is stopping");
    else if (query_is_ours(e, payload))
        return false;
    else
        say_not_serving(s, arena, out_status);
    return true;
}

/* A checked message that is neither refused nor read from the databases: the core's. */
static void to_core(struct server *s, link_peer peer, const struct identity *who,
                    const struct wire_bytes *frames, const struct checked_message *m)
{
    struct turn_work *w = turn_get(s);
    if (m->method->method == BALLAST__METHOD__METHOD_LOG) {
        const Ballast__LogChunk *chunk = (const Ballast__LogChunk *)m->payload;
        if (coord_accepts_log(s->core, peer, chunk))
            turn_add_log(w, peer, chunk);
        return;
    }
    job_id ended = coord_wants_job(s->core, m->method->method, m->payload);
    w->turn.is_limited = auth_is_limited(who);
    if (ended)
        query_begin_recall(s, peer, who, frames, ended);
    else
        coord_message(s->core, &w->turn, peer, who->user, m->envelope, m->payload);
}

static void on_peer_gone(void *context, link_peer peer);

/* Its key was taken from the list, or its time is over, while it was connected: it is answered
 * once, then it might as well be gone. */
static void end_peer(struct server *s, link_peer peer, const struct wire_bytes *frames,
                     size_t n_frames)
{
    struct peer_state *p = peer_state_of(s, peer);
    struct arena arena = {0};
    struct checked_message m;
    Ballast__Status status;
    if (!p || p->is_ended)
        return;
    p->is_ended = true;
    log_warn("peer=%" PRIu64 " msg=\"its key is not valid any more\"", peer);
    if (check_message(frames, n_frames, CHECK_CLIENT | CHECK_WORKER, &arena, &m, &status) == 0 &&
        m.method->kind == BALLAST__KIND__KIND_REQUEST) {
        check_status(&status, &s->scratch, BALLAST__CODE__UNAUTHENTICATED, "KEY",
                     "this key is not among the coordinator's authorized_keys any more");
        refuse(s, peer, m.envelope, &status);
    }
    on_peer_gone(s, peer);
    arena_fini(&arena);
}

/* Whether its message is to be looked at. */
static bool is_known(struct server *s, link_peer peer, const struct wire_bytes *frames,
                     size_t n_frames, struct identity *out_who)
{
    if (!auth_identify(&s->auth, s->link, peer, out_who)) {
        end_peer(s, peer, frames, n_frames);
        return false;
    }
    struct peer_state *p = peer_state_of(s, peer);
    if (p)
        p->is_ended = false; /* its key is back */
    return true;
}

static void on_bad_message(struct server *s, link_peer peer, const struct checked_message *m,
                           const Ballast__Status *status)
{
    s->n_foreign++;
    log_debug("peer=%" PRIu64 " code=%s msg=\"%s\"", peer, check_code_name(status->code),
              status->message);
    if (!m->envelope || m->envelope->kind == BALLAST__KIND__KIND_REQUEST ||
        m->envelope->kind == BALLAST__KIND__KIND_UNKNOWN)
        refuse(s, peer, m->envelope, status);
}

static void on_message(void *context, link_peer peer, const struct link_frame *frames,
                       size_t n_frames)
{
    struct server *s = context;
    struct identity who;
    struct wire_bytes bytes[LINK_FRAMES_MAX];
    for (size_t i = 0; i < n_frames && i < LINK_FRAMES_MAX; i++)
        bytes[i] = (struct wire_bytes){frames[i].bytes, frames[i].n_bytes};
    if (!admit_message(s, peer, clock_now_ns()) || !is_known(s, peer, bytes, n_frames, &who))
        return;
    struct arena own = {0};
    bool has_core = s->state == SERVER_SERVING;
    struct arena *arena = has_core ? &turn_get(s)->turn.arena : &own;
    struct checked_message m;
    Ballast__Status status;
    int rc = check_message(bytes, n_frames, CHECK_CLIENT | CHECK_WORKER, arena, &m, &status);
    bool is_request = rc == 0 && m.method->kind == BALLAST__KIND__KIND_REQUEST;
    if (rc < 0)
        on_bad_message(s, peer, &m, &status);
    else if (m.envelope->kind == BALLAST__KIND__KIND_RESPONSE)
        s->n_foreign++; /* we never ask */
    else if (refuses_all(s, m.envelope, m.payload, arena, &status)) {
        if (is_request)
            refuse(s, peer, m.envelope, &status);
    } else if (is_request && admit_request(s, peer, &who, m.envelope, &status) < 0)
        refuse(s, peer, m.envelope, &status);
    else if (!auth_may(&who, m.envelope->method))
        s->n_foreign++; /* a notice */
    else if (query_is_ours(m.envelope, m.payload))
        query_begin(s, peer, &who, bytes);
    else
        to_core(s, peer, &who, bytes, &m);
    arena_fini(&own);
}

static void on_turn_end(void *context)
{
    struct server *s = context;
    if (s->open)
        turn_end(s);
    server_arm_timer(s);
}

static void on_peer_gone(void *context, link_peer peer)
{
    struct server *s = context;
    s->gone = xgrow(s->gone, s->n_gone, &s->n_gone_alloc, sizeof *s->gone);
    s->gone[s->n_gone++] = peer; /* the core hears it at the next turn */
    query_forget_peer(s, peer);
}

static void on_refused(void *context)
{
    struct server *s = context;
    uint64_t now_ns = clock_now_ns();
    s->n_turned_away++;
    if (s->turned_away_said_ns && now_ns - s->turned_away_said_ns < REFUSED_SAY_NS)
        return;
    s->turned_away_said_ns = now_ns;
    log_warn("connections=%" PRIu64 " msg=\"closed at once: of the %u files that may be open "
             "(ulimit -n, LimitNOFILE) %u are left\"", s->n_turned_away, s->n_descriptors_max,
             LINK_DESCRIPTORS_KEPT);
}

/* ZeroMQ asks before it lets a connection with a key in. */
static bool admit_key(void *context, const char *public_text)
{
    struct server *s = context;
    uint64_t now_ns = clock_now_ns();
    if (auth_admits(&s->auth, public_text))
        return true;
    s->n_unknown++;
    if (!s->unknown_said_ns || now_ns - s->unknown_said_ns >= REFUSED_SAY_NS) {
        s->unknown_said_ns = now_ns;
        log_warn("refused=%" PRIu64 " key='%s' msg=\"a key that is not in authorized_keys\"",
                 s->n_unknown, public_text);
    }
    return false;
}

static bool key_is_good(void *context, const char *public_text)
{
    return auth_admits(&((struct server *)context)->auth, public_text);
}

void server_reload_keys(struct server *s)
{
    struct err err = {0};
    if (!s->auth.has_keys)
        return;
    if (auth_reload(&s->auth, s->config->authorized_keys, &err) < 0) {
        log_error("msg=\"authorized_keys not read again, the old ones stay: %s\"", err.text);
        return;
    }
    if (s->link)
        link_forget_keys(s->link, key_is_good, s);
    log_info("keys=%zu msg=\"authorized_keys read again\"", s->auth.admitted.n);
}

int server_listen(struct server *s)
{
    struct link_handler handler = {s, on_message, on_turn_end, on_peer_gone, NULL,
                                   on_refused};
    struct err err = {0};
    struct link_keys keys = {.own = &s->auth.own, .admit = admit_key};
    int rc = link_listen(&s->loop, (const char *const *)s->config->listen, s->config->n_listen,
                         s->auth.has_keys ? &keys : NULL, &handler, &s->link, &err);
    if (rc < 0) {
        server_fail(s, rc, err.text);
        return rc;
    }
    for (size_t i = 0; i < s->config->n_listen; i++)
        log_info("address=%s msg=\"listening\"", s->config->listen[i]);
    return 0;
}
