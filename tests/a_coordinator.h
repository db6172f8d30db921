/* a_coordinator.h - for tests of the client: the real program against a scripted coordinator
 *
 * The coordinator is a thread of the test that answers each method with what a test has put down,
 * so that every state, error and outage can be had at once. */
#ifndef TESTS_A_COORDINATOR_H
#define TESTS_A_COORDINATOR_H

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <uv.h>

#include "common/json.h"
#include "common/link.h"
#include "common/mem.h"
#include "proto/wire.h"
#include "tests/patience.h"

#define METHODS 64

/* ---- the scripted coordinator --------------------------------------------------------------- */

struct answer {
    const ProtobufCMessage *reply; /* NULL: the status below */
    const ProtobufCMessage *then;  /* not NULL: what every later request gets */
    unsigned n_first;              /* with then: how many more get reply */
    Ballast__Code code;
    const char   *reason, *message;
};

static struct fake {
    pthread_mutex_t lock;
    struct answer answers[METHODS];
    unsigned  n_requests[METHODS], n_all;
    unsigned  n_to_drop; /* requests that get no answer */
    uint8_t   asked[METHODS][2048]; /* the payload of the last request */
    size_t    n_asked[METHODS];
    uint8_t   keys[8][IDEMPOTENCY_KEY_BYTES];
    unsigned  n_keys;
    struct link *link;
    uv_loop_t   loop;
    uv_async_t  stop;
    pthread_t   thread;
    char folder[64], address[128];
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER};

static inline void answer(link_peer peer, const Ballast__Envelope *request)
{
    struct arena arena = {0};
    struct wire_bytes bytes[WIRE_FRAMES];
    struct link_frame frames[WIRE_FRAMES];
    Ballast__Envelope e = BALLAST__ENVELOPE__INIT;
    Ballast__Status status = BALLAST__STATUS__INIT;
    const struct answer *a = &fake.answers[request->method];
    e.kind = BALLAST__KIND__KIND_RESPONSE;
    e.method = request->method;
    e.request_id = request->request_id;
    e.status = &status;
    status.code = a->reply ? BALLAST__CODE__OK : a->code;
    status.reason = (char *)(a->reason ? a->reason : "");
    status.message = (char *)(a->message ? a->message : "");
    wire_pack(&e, a->reply, &arena, bytes);
    for (int i = 0; i < WIRE_FRAMES; i++)
        frames[i] = (struct link_frame){bytes[i].bytes, bytes[i].n_bytes};
    link_send(fake.link, peer, frames, WIRE_FRAMES);
    if (a->then && --fake.answers[request->method].n_first == 0)
        fake.answers[request->method].reply = a->then;
    arena_fini(&arena);
}

static inline void on_message(void *context, link_peer peer, const struct link_frame *frames,
                       size_t n_frames)
{
    (void)context;
    if (n_frames != WIRE_FRAMES || frames[0].n_bytes < WIRE_PRELUDE_BYTES)
        return;
    Ballast__Envelope *e = ballast__envelope__unpack(
        NULL, frames[0].n_bytes - WIRE_PRELUDE_BYTES,
        (const uint8_t *)frames[0].bytes + WIRE_PRELUDE_BYTES);
    if (!e)
        return;
    pthread_mutex_lock(&fake.lock);
    if (e->method < METHODS) {
        fake.n_requests[e->method]++;
        fake.n_asked[e->method] = frames[1].n_bytes < 2048 ? frames[1].n_bytes : 0;
        memcpy(fake.asked[e->method], frames[1].bytes, fake.n_asked[e->method]);
        fake.n_all++;
        if (e->idempotency_key.len == IDEMPOTENCY_KEY_BYTES && fake.n_keys < 8)
            memcpy(fake.keys[fake.n_keys++], e->idempotency_key.data, IDEMPOTENCY_KEY_BYTES);
        if (fake.n_to_drop)
            fake.n_to_drop--;
        else
            answer(peer, e);
    }
    pthread_mutex_unlock(&fake.lock);
    ballast__envelope__free_unpacked(e, NULL);
}

static inline void on_stop(uv_async_t *stop)
{
    link_close(fake.link);
    uv_close((uv_handle_t *)stop, NULL);
}

static inline void *serve(void *arg)
{
    (void)arg;
    uv_run(&fake.loop, UV_RUN_DEFAULT);
    return NULL;
}

static inline int fake_start(void **state)
{
    (void)state;
    struct link_handler handler = {NULL, on_message, NULL, NULL, NULL};
    struct err err = {0};
    strcpy(fake.folder, "/tmp/test_ctl.XXXXXX");
    if (!mkdtemp(fake.folder))
        return -1;
    snprintf(fake.address, sizeof fake.address, "ipc://%s/coordinator.sock", fake.folder);
    const char *addresses[] = {fake.address};
    uv_loop_init(&fake.loop);
    if (link_listen(&fake.loop, addresses, 1, NULL, &handler, &fake.link, &err) < 0)
        fail_msg("%s", err.text);
    uv_async_init(&fake.loop, &fake.stop, on_stop);
    return pthread_create(&fake.thread, NULL, serve, NULL);
}

static inline int fake_stop(void **state)
{
    (void)state;
    uv_async_send(&fake.stop);
    pthread_join(fake.thread, NULL);
    int rc = uv_loop_close(&fake.loop);
    char *command = xasprintf("rm -r %s", fake.folder);
    rc |= system(command);
    free(command);
    return rc;
}

static inline void fake_forget(void)
{
    pthread_mutex_lock(&fake.lock);
    memset(fake.answers, 0, sizeof fake.answers);
    memset(fake.n_requests, 0, sizeof fake.n_requests);
    fake.n_all = fake.n_keys = fake.n_to_drop = 0;
    pthread_mutex_unlock(&fake.lock);
}

/* Nothing is being answered: what replies are made of may have changed before, and may after. No
 * tool sees that a client lies between the threads, so they meet here. */
static inline void fake_settle(void)
{
    pthread_mutex_lock(&fake.lock);
    pthread_mutex_unlock(&fake.lock);
}

/* The next n requests get no answer. */
static inline void will_drop(unsigned n)
{
    pthread_mutex_lock(&fake.lock);
    fake.n_to_drop = n;
    pthread_mutex_unlock(&fake.lock);
}

static inline void will_say(Ballast__Method method, const ProtobufCMessage *reply)
{
    pthread_mutex_lock(&fake.lock);
    fake.answers[method] = (struct answer){.reply = reply};
    pthread_mutex_unlock(&fake.lock);
}

/* reply n_first times, then the other. */
static inline void will_say_in_turn(Ballast__Method method, const ProtobufCMessage *reply,
                                    unsigned n_first, const ProtobufCMessage *then)
{
    pthread_mutex_lock(&fake.lock);
    fake.answers[method] = (struct answer){.reply = reply, .then = then, .n_first = n_first};
    pthread_mutex_unlock(&fake.lock);
}

static inline void will_say_then(Ballast__Method method, const ProtobufCMessage *reply,
                                 const ProtobufCMessage *then)
{
    will_say_in_turn(method, reply, 1, then);
}

static inline void will_refuse(Ballast__Method method, Ballast__Code code, const char *reason,
                        const char *message)
{
    pthread_mutex_lock(&fake.lock);
    fake.answers[method] = (struct answer){.code = code, .reason = reason, .message = message};
    pthread_mutex_unlock(&fake.lock);
}

static inline unsigned n_requests(Ballast__Method method)
{
    pthread_mutex_lock(&fake.lock);
    unsigned n = fake.n_requests[method];
    pthread_mutex_unlock(&fake.lock);
    return n;
}

/* Whether two requests with a key have come, which had the same one. */
static inline bool came_twice(void)
{
    pthread_mutex_lock(&fake.lock);
    bool is_so = fake.n_keys == 2 &&
                 memcmp(fake.keys[0], fake.keys[1], IDEMPOTENCY_KEY_BYTES) == 0;
    pthread_mutex_unlock(&fake.lock);
    return is_so;
}

/* Ended with protobuf_c_message_free_unpacked. */
static inline ProtobufCMessage *last_request(Ballast__Method method,
                                             const ProtobufCMessageDescriptor *type)
{
    pthread_mutex_lock(&fake.lock);
    ProtobufCMessage *m = protobuf_c_message_unpack(type, NULL, fake.n_asked[method],
                                                    fake.asked[method]);
    pthread_mutex_unlock(&fake.lock);
    assert_non_null(m);
    return m;
}

static inline unsigned n_all_requests(void)
{
    pthread_mutex_lock(&fake.lock);
    unsigned n = fake.n_all;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

/* ---- the client ------------------------------------------------------------------------------ */

struct result {
    int   code;
    char *out, *err;
};

static inline char *read_back(const char *path)
{
    FILE *in = fopen(path, "r");
    char *text = xcalloc(1, 1 << 20);
    assert_non_null(in);
    size_t n = fread(text, 1, (1 << 20) - 1, in);
    text[n] = '\0';
    fclose(in);
    return text;
}

static const char *search_path; /* PATH of the client; NULL: ours */

static inline pid_t start(const char *line)
{
    const char *bin = getenv("BALLAST_BIN");
    fake_settle();
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    char *out = xasprintf("%s/out", fake.folder), *err = xasprintf("%s/err", fake.folder);
    char *command = xasprintf("exec '%s/ballast' %s", bin ? bin : "build/bin", line);
    if (chdir(fake.folder) < 0 || !freopen(out, "w", stdout) || !freopen(err, "w", stderr) ||
        !freopen("/dev/null", "r", stdin))
        _exit(126);
    setenv("BALLAST_ADDRESS", fake.address, 1);
    setenv("HOME", fake.folder, 1);
    unsetenv("XDG_CONFIG_HOME");
    if (search_path)
        setenv("PATH", search_path, 1);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
}

static inline struct result finish(pid_t pid)
{
    int status;
    char *out = xasprintf("%s/out", fake.folder), *err = xasprintf("%s/err", fake.folder);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    fake_settle();
    struct result r = {
        .code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status),
        .out = read_back(out), .err = read_back(err),
    };
    free(out);
    free(err);
    return r;
}

static inline struct result run(const char *line)
{
    return finish(start(line));
}

static inline void result_fini(struct result *r)
{
    free(r->out);
    free(r->err);
}

/* Runs and compares; texts that are NULL are not looked at, "" means nothing was written. */
static inline void check(const char *line, int code, const char *out, const char *err)
{
    struct result r = run(line);
    if (r.code != code || (out && (*out ? !strstr(r.out, out) : *r.out)) ||
        (err && (*err ? !strstr(r.err, err) : *r.err)))
        fail_msg("ballast %s: exit %d\nstdout: %s\nstderr: %s\nexpected exit %d, '%s', '%s'", line,
                 r.code, r.out, r.err, code, out ? out : "(any)", err ? err : "(any)");
    result_fini(&r);
}

/* The same of a command that gives up after some time: longer where the machine was so busy that
 * it could not ask within it. */
static inline void check_gives_up(const char *line, double seconds, int code, const char *err)
{
    for (;; seconds *= 2) {
        char *whole = xasprintf("%s --timeout %g", line, seconds);
        struct result r = run(whole);
        bool came_to_it = r.code != 7 || seconds > 2 * PATIENCE;
        if (came_to_it && (r.code != code || *r.out || (err && !strstr(r.err, err))))
            fail_msg("ballast %s: exit %d\nstdout: %s\nstderr: %s\nexpected exit %d, '%s'", whole,
                     r.code, r.out, r.err, code, err ? err : "(any)");
        result_fini(&r);
        free(whole);
        if (came_to_it)
            return;
    }
}

static inline struct json *run_json(const char *line)
{
    struct result r = run(line);
    struct json *v = NULL;
    struct err err = {0};
    if (r.code != 0 || json_parse(r.out, strlen(r.out), 1 << 20, &v, &err) < 0)
        fail_msg("ballast %s: exit %d, %s\n%s%s", line, r.code, err.text, r.out, r.err);
    result_fini(&r);
    return v;
}

#endif
