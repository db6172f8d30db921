/* server.c - the loop: what comes in, what comes back from the store, time, signals, the end */
#include "coordinator/server_parts.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/version.h"

#define RETRY_NS NS_PER_S
#define DESCRIPTORS_MAX 65536u
#define DESCRIPTORS_MIN 256u
#define REFUSED_SAY_NS (60 * NS_PER_S)

static void arm_timer(struct server *s);
static void begin_restore(struct server *s);

/* ---- messages -------------------------------------------------------------------------------- */

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
    arm_timer(s);
}

static void on_peer_gone(void *context, link_peer peer)
{
    struct server *s = context;
    if (s->n_gone == s->n_gone_alloc) {
        s->n_gone_alloc = s->n_gone_alloc ? 2 * s->n_gone_alloc : 64;
        s->gone = xrealloc(s->gone, s->n_gone_alloc * sizeof *s->gone);
    }
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

static void reload_keys(struct server *s)
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

/* ---- time ------------------------------------------------------------------------------------ */

static void on_time(uv_timer_t *timer)
{
    struct server *s = timer->data;
    uint64_t now_ns = clock_now_ns();
    if (s->state == SERVER_WAITING && now_ns >= s->retry_ns)
        begin_restore(s);
    if (s->core && (s->n_gone || now_ns >= coord_next_deadline_ns(s->core)) &&
        s->state == SERVER_SERVING)
        turn_get(s);
    query_expire(s, now_ns);
    if (s->open)
        turn_end(s);
    arm_timer(s);
}

static void arm_timer(struct server *s)
{
    if (uv_is_closing((uv_handle_t *)&s->timer))
        return;
    uint64_t at_ns = s->poll_deadline_ns, now_ns = clock_now_ns();
    if (s->state == SERVER_WAITING && s->retry_ns < at_ns)
        at_ns = s->retry_ns;
    if (s->state == SERVER_SERVING) {
        uint64_t core_ns = s->n_gone ? now_ns : coord_next_deadline_ns(s->core);
        at_ns = core_ns < at_ns ? core_ns : at_ns;
    }
    if (at_ns == UINT64_MAX) {
        uv_timer_stop(&s->timer);
        return;
    }
    uv_update_time(&s->loop);
    uv_timer_start(&s->timer, on_time,
                   at_ns > now_ns ? (at_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS : 0, 0);
}

/* ---- the end --------------------------------------------------------------------------------- */

static void close_all(struct server *s)
{
    if (uv_is_closing((uv_handle_t *)&s->timer))
        return;
    link_close(s->link);
    s->link = NULL;
    uv_close((uv_handle_t *)&s->timer, NULL);
    uv_close((uv_handle_t *)&s->done, NULL);
    for (size_t i = 0; i < sizeof s->signals / sizeof s->signals[0]; i++)
        uv_close((uv_handle_t *)&s->signals[i], NULL);
}

/* Accepted work is finished before the end: what is with the store comes back first. */
static void stop(struct server *s)
{
    if (s->state != SERVER_STOPPING)
        log_info("msg=\"stopping\" batches=%zu", s->n_out);
    if (s->open)
        turn_end(s);
    s->state = SERVER_STOPPING;
    if (s->link)
        query_stop_all(s);
    if (s->n_out == 0)
        close_all(s);
}

static void fail(struct server *s, int rc, const char *text)
{
    log_error("msg=\"%s\"", text);
    s->rc = err_set(s->err, rc, "%s", text);
    stop(s);
}

/* ---- beginning: read the state, say that we live, listen ------------------------------------- */

static void drop_core(struct server *s)
{
    assert(!s->open);
    coord_destroy(s->core);
    s->core = NULL;
    s->has_failed = false;
    s->restart = NULL;
}

static void begin_restore(struct server *s)
{
    struct query *q = xcalloc(1, sizeof *q);
    q->work.kind = WORK_RESTORE;
    q->read = (struct store_read){.kind = STORE_RESTORE, .wall_ns = clock_wall_ns(),
                                  .keep_ns = s->core_config.key_keep_ns};
    q->work.batch = (struct store_batch){.reads = &q->read, .n_reads = 1};
    s->state = SERVER_RESTORING;
    s->n_out++;
    store_resume(s->store);
    store_submit(s->store, &q->work.batch);
}

static int replay(struct server *s, const struct store_read *r, struct err *err)
{
    const struct store_restored *from = &r->restored;
    coord_restore_epoch(s->core, from->coordinator_epoch, from->last_seq, from->last_job);
    for (size_t i = 0; i < from->n_keys; i++) {
        const struct store_key *k = &from->keys[i];
        coord_restore_key(s->core, k->user, k->key, k->digest, k->job, k->age_ns);
    }
    for (size_t i = 0; i < r->n_records; i++) {
        int rc = coord_apply(s->core, r->records[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static void on_restored(struct server *s, struct query *q)
{
    struct err err = {0};
    int rc = q->read.rc;
    if (s->state == SERVER_STOPPING) {
        query_free(q);
        return;
    }
    if (rc < 0)
        err = q->read.err;
    s->core = coord_create(&s->core_config);
    if (rc == 0)
        rc = replay(s, &q->read, &err);
    size_t n_records = q->read.n_records;
    query_free(q);
    if (rc < 0) {
        fail(s, rc, err.text);
        return;
    }
    s->state = SERVER_STARTING;
    struct turn_work *w = turn_get(s);
    coord_start(s->core, &w->turn);
    s->restart = w;
    turn_end(s);
    log_info("epoch=%" PRIu64 " seq=%" PRIu64 " records=%zu msg=\"state restored\"",
             coord_epoch(s->core), coord_last_seq(s->core), n_records);
}

static int start_listening(struct server *s)
{
    struct link_handler handler = {s, on_message, on_turn_end, on_peer_gone, NULL,
                                   on_refused};
    struct err err = {0};
    struct link_keys keys = {.own = &s->auth.own, .admit = admit_key};
    int rc = link_listen(&s->loop, (const char *const *)s->config->listen, s->config->n_listen,
                         s->auth.has_keys ? &keys : NULL, &handler, &s->link, &err);
    if (rc < 0) {
        fail(s, rc, err.text);
        return rc;
    }
    for (size_t i = 0; i < s->config->n_listen; i++)
        log_info("address=%s msg=\"listening\"", s->config->listen[i]);
    return 0;
}

/* ---- what comes back from the store ---------------------------------------------------------- */

static void on_turn_back(struct server *s, struct turn_work *w)
{
    s->n_turns_out--;
    if (w->work.batch.rc < 0) {
        if (!s->has_failed) /* the first one says why, those after it only that they follow */
            s->store_err = w->work.batch.err;
        s->has_failed = true;
        if (s->link)
            turn_fail(s, &w->turn);
        return;
    }
    if (w->turn.n_records && s->core && !s->has_failed)
        coord_committed(s->core, w->turn.records[w->turn.n_records - 1]->seq);
    if (w == s->restart) {
        s->restart = NULL;
        if (s->state == SERVER_STARTING) {
            s->state = SERVER_SERVING;
            s->store_err = (struct err){0};
            if (!s->link && start_listening(s) < 0)
                return;
        }
    }
    if (!s->link)
        return;
    turn_send(s, &w->turn);
    query_wake(s, w);
}

/* A commit failed: everything decided since is void. */
static void recover(struct server *s)
{
    if (s->state != SERVER_STOPPING)
        s->state = s->state == SERVER_STARTING ? SERVER_WAITING : SERVER_RESTORING;
    if (s->n_turns_out)
        return; /* the rest of them fail too, and come first */
    bool was_starting = s->state == SERVER_WAITING;
    drop_core(s);
    if (s->state == SERVER_STOPPING)
        return;
    if (was_starting)
        s->retry_ns = clock_now_ns() + RETRY_NS;
    else
        begin_restore(s);
}

static void on_done(uv_async_t *async)
{
    struct server *s = async->data;
    struct turn_work *turns = NULL, **last_turn = &turns;
    struct query *answers = NULL, **last = &answers, *restored = NULL;
    for (struct store_batch *b = store_take_done(s->store), *next; b; b = next) {
        struct work *work = (struct work *)b;
        next = b->next;
        s->n_out--;
        s->n_sql -= work->kind == WORK_QUERY && ((struct query *)work)->read.kind == STORE_SQL;
        if (work->kind == WORK_TURN) {
            struct turn_work *w = (struct turn_work *)work;
            on_turn_back(s, w);
            *last_turn = w;
            last_turn = &w->next;
        } else if (work->kind == WORK_RESTORE) {
            restored = (struct query *)work;
        } else if (!s->link || !query_park(s, (struct query *)work)) {
            *last = (struct query *)work;
            last = &(*last)->next;
            *last = NULL;
        }
    }
    if (s->has_failed)
        recover(s);
    if (restored)
        on_restored(s, restored);
    for (struct turn_work *w = turns, *next; w; w = next) {
        next = w->next;
        for (size_t i = 0; s->state == SERVER_SERVING && i < w->n_logs; i++)
            coord_ack_log(s->core, &turn_get(s)->turn, w->logs[i].peer, w->logs[i].chunk,
                          w->logs[i].stored_offset);
        turn_free(w);
    }
    if (answers && s->state == SERVER_SERVING)
        turn_get(s);
    for (struct query *q = answers, *next; q; q = next) {
        next = q->next;
        if (s->link)
            query_answer(s, q);
        else
            query_free(q);
    }
    if (s->open)
        turn_end(s);
    if (s->state == SERVER_STOPPING)
        stop(s);
    else
        arm_timer(s);
}

/* On the writer's thread. */
static void notify(void *context)
{
    struct server *s = context;
    uv_async_send(&s->done);
}

/* ---- signals --------------------------------------------------------------------------------- */

static void log_state(struct server *s)
{
    struct link_stats l = s->link ? link_stats(s->link) : (struct link_stats){0};
    log_info("state=%d batches=%zu parked=%zu peers=%u connections=%u received=%" PRIu64
             " sent=%" PRIu64 " refused=%" PRIu64 " limited=%" PRIu64 " foreign=%" PRIu64
             " unreachable=%" PRIu64 " slow=%" PRIu64 " turned_away=%" PRIu64,
             (int)s->state, s->n_out, s->n_parked, l.n_peers, l.n_connections, l.n_received,
             l.n_sent, s->n_refused, s->n_limited, s->n_foreign, l.n_unreachable,
             l.n_dropped_slow, s->n_turned_away);
    char *text = s->core ? coord_dump(s->core) : NULL;
    for (char *save, *line = text ? strtok_r(text, "\n", &save) : NULL; line;
         line = strtok_r(NULL, "\n", &save))
        log_info("dump msg=\"%s\"", line);
    free(text);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct server *s = handle->data;
    if (number == SIGHUP) {
        if (s->reload)
            s->reload(s->reload_context);
        reload_keys(s);
        return;
    }
    if (number == SIGUSR1) {
        log_state(s);
        return;
    }
    if (s->state == SERVER_STOPPING) {
        log_warn("msg=\"asked to stop twice: leaving at once\"");
        _exit(1); /* a crash at any point is as good as a clean stop */
    }
    stop(s);
}

static void catch_signals(struct server *s)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is a full disk, not an end */
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        uv_signal_init(&s->loop, &s->signals[i]);
        s->signals[i].data = s;
        uv_signal_start(&s->signals[i], on_signal, numbers[i]);
    }
}

/* ---- all ------------------------------------------------------------------------------------- */

static struct coord_config core_config(const struct server_config *c)
{
    struct coord_config core = coord_config_default();
    core.heartbeat_floor_ns = c->heartbeat_interval_ns;
    core.heartbeats_per_s = c->heartbeats_per_second;
    core.lost_floor_ns = c->lost_after_ns;
    core.restart_grace_ns = c->restart_grace_ns;
    core.fence_ns = c->fence_after_ns;
    core.backoff_base_ns = c->backoff_base_ns;
    core.backoff_cap_ns = c->backoff_max_ns;
    core.start_timeout_ns = c->start_timeout_ns;
    core.stop_grace_ns = c->stop_grace_ns;
    core.checkpoint_grace_ns = c->checkpoint_grace_ns;
    core.pause_grace_ns = c->pause_grace_ns;
    core.key_keep_ns = c->idempotency_keep_ns;
    core.version = BALLAST_VERSION;
    core.commit = BALLAST_COMMIT;
    if (getrandom(&core.seed, sizeof core.seed, 0) != sizeof core.seed)
        core.seed = (uint64_t)clock_wall_ns() ^ (uint64_t)getpid();
    return core;
}

/* Each worker and each client takes a descriptor. */
static int raise_descriptors(uint32_t *out, struct err *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit))
        return err_set(err, -errno, "getrlimit: %s", strerror(errno));
    rlim_t wanted = limit.rlim_max < DESCRIPTORS_MAX ? limit.rlim_max : DESCRIPTORS_MAX;
    if (limit.rlim_cur < wanted) {
        limit.rlim_cur = wanted;
        setrlimit(RLIMIT_NOFILE, &limit);
        getrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur < DESCRIPTORS_MIN)
        return err_set(err, -EMFILE, "%llu files may be open at once (ulimit -n), but a "
                       "coordinator needs %u, and one more for each worker and client",
                       (unsigned long long)limit.rlim_cur, DESCRIPTORS_MIN);
    *out = limit.rlim_cur < DESCRIPTORS_MAX ? (uint32_t)limit.rlim_cur : DESCRIPTORS_MAX;
    return 0;
}

int server_run(const struct server_config *config, void (*reload)(void *context), void *context,
               struct err *err)
{
    struct server s = {
        .config = config, .core_config = core_config(config), .reload = reload,
        .reload_context = context, .state = SERVER_RESTORING, .poll_deadline_ns = UINT64_MAX,
        .err = err,
    };
    int raised = raise_descriptors(&s.n_descriptors_max, err);
    if (raised < 0)
        return raised;
    for (size_t i = 0; i < config->n_listen; i++) {
        int rc = link_address_check(config->listen[i], *config->key_file, err);
        if (rc < 0)
            return rc;
    }
    int opened = auth_open(config->key_file, config->authorized_keys, &s.auth, err);
    if (opened == 0)
        opened = link_loop_init(&s.loop, err);
    if (opened < 0) {
        auth_fini(&s.auth);
        return opened;
    }
    uv_async_init(&s.loop, &s.done, on_done);
    uv_timer_init(&s.loop, &s.timer);
    s.done.data = s.timer.data = &s;
    catch_signals(&s);
    if ((s.rc = store_open(config->state_dir, notify, &s, &s.store, err)) < 0)
        close_all(&s);
    else
        begin_restore(&s);
    uv_run(&s.loop, UV_RUN_DEFAULT);
    store_close(s.store);
    coord_destroy(s.core);
    arena_fini(&s.scratch);
    auth_fini(&s.auth);
    free(s.gone);
    int left = uv_loop_close(&s.loop);
    assert(left == 0);
    return s.rc;
}
