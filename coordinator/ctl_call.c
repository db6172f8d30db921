/* ctl_call.c - calls to the coordinator, and what a person is told when one fails */
#include "coordinator/ctl.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/field.h"
#include "proto/check.h"

#define CALL_TIMEOUT_MS 10000 /* without --timeout */
#define POLL_SLACK_MS   5000

volatile sig_atomic_t ctl_interrupts;

static void on_interrupt(int signal_number)
{
    (void)signal_number;
    ctl_interrupts++;
}

void ctl_catch_interrupt(void)
{
    struct sigaction action = {.sa_handler = on_interrupt};
    sigaction(SIGINT, &action, NULL);
}

/* ---- what is said --------------------------------------------------------------------------- */

static const char *code_name(enum ctl_exit code)
{
    switch (code) {
    case CTL_OK:              return "OK";
    case CTL_USAGE:           return "INVALID_ARGUMENT";
    case CTL_NOT_FOUND:       return "NOT_FOUND";
    case CTL_DENIED:          return "PERMISSION_DENIED";
    case CTL_CONFLICT:        return "FAILED_PRECONDITION";
    case CTL_LIMIT:           return "RESOURCE_EXHAUSTED";
    case CTL_UNREACHABLE:     return "UNAVAILABLE";
    case CTL_WAIT_TIMEOUT:
    case CTL_UNKNOWN_OUTCOME: return "DEADLINE_EXCEEDED";
    case CTL_PROTOCOL:        return "UNIMPLEMENTED";
    case CTL_FAILED:
    case CTL_CHANGES:
    case CTL_SIGNAL:          break;
    }
    return "UNKNOWN";
}

static void print_failure(const struct ctl *c, const char *code, const Ballast__Status *status,
                          const char *text)
{
    if (c->is_silent)
        return;
    if (c->format != CTL_JSON) {
        fputs("ballast: ", stderr);
        ctl_print_escaped(stderr, text, strlen(text), true);
        fputc('\n', stderr);
        return;
    }
    struct json *o = json_new_object(), *violations = json_new_array();
    json_put(o, "code", json_new_string(code));
    json_put(o, "reason", json_new_string(status && status->reason ? status->reason : ""));
    json_put(o, "message", json_new_string(text));
    json_put(o, "retry_after_ms", json_new_u64(status ? status->retry_after_ms : 0));
    for (size_t i = 0; status && i < status->n_violations; i++) {
        struct json *v = json_new_object();
        json_put(v, "field", json_new_string(status->violations[i]->field));
        json_put(v, "text", json_new_string(status->violations[i]->text));
        json_push(violations, v);
    }
    json_put(o, "violations", violations);
    char *line = json_text(o, false);
    fprintf(stderr, "%s\n", line);
    free(line);
    json_destroy(o);
}

int ctl_fail(const struct ctl *c, enum ctl_exit code, const char *format, ...)
{
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    print_failure(c, code_name(code), NULL, text);
    return code;
}

int ctl_fail_problems(const struct ctl *c, const struct problems *p)
{
    Ballast__FieldViolation fields[PROBLEMS_MAX], *pointers[PROBLEMS_MAX];
    Ballast__Status status = BALLAST__STATUS__INIT;
    if (c->format != CTL_JSON) {
        problems_print(p, stderr);
        return CTL_USAGE;
    }
    status.reason = "BAD_JOB_FILE";
    status.violations = pointers;
    status.n_violations = p->n;
    for (size_t i = 0; i < p->n; i++) {
        ballast__field_violation__init(&fields[i]);
        fields[i].field = p->items[i].key;
        fields[i].text = p->items[i].text;
        pointers[i] = &fields[i];
    }
    char *text = problems_text(p);
    print_failure(c, code_name(CTL_USAGE), &status, text);
    free(text);
    return CTL_USAGE;
}

void ctl_hint(const struct ctl *c, const char *format, ...)
{
    char text[1024];
    if (c->quiet)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ctl_print_escaped(stderr, text, strlen(text), true);
    fputc('\n', stderr);
}

int ctl_detached(const struct ctl *c, int code, const char *format, ...)
{
    char text[256];
    va_list args;
    if (code != CTL_SIGNAL + SIGINT)
        return code;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ctl_hint(c, "detached; %s", text);
    return code;
}

uint64_t ctl_job_id(const struct ctl *c, const char *text)
{
    char quoted[FIELD_QUOTE_BYTES], *end;
    errno = 0;
    unsigned long long id = strtoull(text, &end, 10);
    if (*text >= '1' && *text <= '9' && !*end && !errno)
        return id;
    field_quote(text, quoted);
    ctl_fail(c, CTL_USAGE, "%s is not a job id, a whole number from 1 as 'ballast jobs' shows it",
             quoted);
    return 0;
}

/* ---- calls ---------------------------------------------------------------------------------- */

static void on_outage(void *context, bool was_sent)
{
    const struct ctl *c = context;
    if (c->is_mutating && was_sent)
        ctl_hint(c, "ballast: no answer from %s; unknown whether it was done, retrying with the "
                 "same key", c->connected_to);
    else
        ctl_hint(c, "ballast: reconnecting to %s (no coordinator answers there)", c->connected_to);
}

static int connect_once(struct ctl *c)
{
    struct err err;
    if (c->caller)
        return CTL_OK;
    ctl_disconnect(c); /* what is left of an attempt before */
    if (!ctl_find_place(c, &c->place))
        return CTL_USAGE;
    c->connected_to = c->place.address;
    struct caller_options options = {
        .address = c->place.address, .keys = link_trust_keys(&c->place.trust),
        .key_name = c->place.trust.own.name, .key_file = c->place.key_file,
        .server_file = c->place.server_file, .reconnecting = on_outage, .context = c,
        .stop = &ctl_interrupts,
    };
    if (caller_open(&options, &c->caller, &err) < 0)
        return ctl_fail(c, CTL_USAGE, "%s (from %s)", err.text, c->place.source);
    if (c->verbose)
        ctl_hint(c, "ballast: asking %s (from %s)", c->connected_to, c->place.source);
    return CTL_OK;
}

static enum ctl_exit exit_of_status(const Ballast__Status *s)
{
    switch (s->code) {
    case BALLAST__CODE__INVALID_ARGUMENT:    return CTL_USAGE;
    case BALLAST__CODE__OUT_OF_RANGE:
    case BALLAST__CODE__NOT_FOUND:           return CTL_NOT_FOUND;
    case BALLAST__CODE__PERMISSION_DENIED:
    case BALLAST__CODE__UNAUTHENTICATED:     return CTL_DENIED;
    case BALLAST__CODE__ALREADY_EXISTS:
    case BALLAST__CODE__ABORTED:             return CTL_CONFLICT;
    case BALLAST__CODE__FAILED_PRECONDITION:
        return s->reason && !strcmp(s->reason, "VERSION") ? CTL_PROTOCOL : CTL_CONFLICT;
    case BALLAST__CODE__RESOURCE_EXHAUSTED:  return CTL_LIMIT;
    case BALLAST__CODE__UNAVAILABLE:         return CTL_UNREACHABLE;
    case BALLAST__CODE__DEADLINE_EXCEEDED:   return CTL_UNKNOWN_OUTCOME;
    case BALLAST__CODE__UNIMPLEMENTED:       return CTL_PROTOCOL;
    default:                                 return CTL_FAILED;
    }
}

/* A socket that is there, but not for this user: then nobody seems to answer. */
static bool is_closed_to_us(const struct ctl *c)
{
    const char *path = strncmp(c->connected_to, "ipc://", 6) ? NULL : c->connected_to + 6;
    return path && access(path, W_OK) != 0 && errno == EACCES;
}

static int explain(struct ctl *c, int rc, const Ballast__Status *status, const struct err *err)
{
    const char *message = status->message && *status->message ? status->message : err->text;
    bool is_closed = rc == -EHOSTUNREACH && is_closed_to_us(c);
    enum ctl_exit code = is_closed           ? CTL_DENIED
                       : rc == -EHOSTUNREACH ? CTL_UNREACHABLE
                       : rc == -ETIMEDOUT    ? (c->is_mutating ? CTL_UNKNOWN_OUTCOME
                                                               : CTL_UNREACHABLE)
                       : rc == -EPROTO       ? CTL_PROTOCOL
                                             : exit_of_status(status);
    const char *name = rc == -EREMOTEIO ? check_code_name(status->code) : code_name(code);
    char text[2048];
    if (is_closed)
        snprintf(text, sizeof text, "%s is not open to you: its owner and group ('ls -l') say who "
                 "may use this coordinator", c->connected_to);
    else if (rc == -EHOSTUNREACH)
        snprintf(text, sizeof text, "%s; is it running? 'ballast doctor' says more", message);
    else if (rc == -ETIMEDOUT && c->is_mutating)
        snprintf(text, sizeof text, "%s; it may have been done: look before you ask again",
                 message);
    else if (rc == -EPROTO)
        snprintf(text, sizeof text, "what comes from %s is no coordinator's answer: %s",
                 c->connected_to, message);
    else
        snprintf(text, sizeof text, "%s", message);
    if (rc == -EREMOTEIO || rc == -EPROTO)
        c->failure = arena_strdup(&c->arena, text);
    print_failure(c, name, status, text);
    for (size_t i = 1; c->format != CTL_JSON && !c->is_silent && i < status->n_violations; i++) {
        fputs("ballast: ", stderr);
        ctl_print_escaped(stderr, status->violations[i]->text,
                          strlen(status->violations[i]->text), false);
        fputc('\n', stderr);
    }
    return code;
}

static bool is_mutating(Ballast__Method method)
{
    const struct check_method *m = check_method(method);
    return m && m->needs_key;
}

int ctl_call(struct ctl *c, Ballast__Method method, const ProtobufCMessage *request,
             const ProtobufCMessage **out_reply)
{
    Ballast__Status status;
    struct err err = {0};
    int rc = connect_once(c);
    if (rc != CTL_OK)
        return rc;
    c->is_mutating = is_mutating(method);
    uint64_t timeout_ms = c->timeout_ms ? c->timeout_ms : CALL_TIMEOUT_MS;
    uint64_t begun_ns = clock_now_ns();
    rc = caller_call(c->caller, method, request,
                     timeout_ms > UINT32_MAX ? UINT32_MAX : (uint32_t)timeout_ms, &c->arena,
                     out_reply, &status, &err);
    if (rc == -EINTR)
        return CTL_SIGNAL + SIGINT;
    c->was_answered |= rc == 0;
    if (c->verbose && check_method(method))
        ctl_hint(c, "ballast: %s took %.1f ms", check_method(method)->name,
                 (double)(clock_now_ns() - begun_ns) / NS_PER_MS);
    return rc < 0 ? explain(c, rc, &status, &err) : CTL_OK;
}

int ctl_who(struct ctl *c, struct arena *a, const char **out_user)
{
    Ballast__PingRequest request = BALLAST__PING_REQUEST__INIT;
    const ProtobufCMessage *message;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_PING, &request.base, &message);
    if (rc == CTL_OK)
        *out_user = arena_strdup(a, ((const Ballast__PingReply *)message)->user);
    return rc;
}

/* How long the next attempt of a poll may take; 0: the deadline is over. */
static uint32_t poll_timeout_ms(const struct ctl *c, uint32_t wait_ms)
{
    uint64_t timeout_ms = (uint64_t)wait_ms + POLL_SLACK_MS, now_ns = clock_now_ns();
    if (!wait_ms && c->timeout_ms && c->timeout_ms < timeout_ms)
        timeout_ms = c->timeout_ms;
    if (!c->deadline_ns)
        return (uint32_t)timeout_ms;
    uint64_t left_ms = c->deadline_ns > now_ns ? (c->deadline_ns - now_ns) / NS_PER_MS : 0;
    return (uint32_t)(left_ms < timeout_ms ? left_ms : timeout_ms);
}

int ctl_poll(struct ctl *c, Ballast__Method method, const ProtobufCMessage *request,
             uint32_t wait_ms, const ProtobufCMessage **out_reply)
{
    Ballast__Status status;
    struct err err = {0};
    bool away;
    int rc = connect_once(c);
    if (rc != CTL_OK)
        return rc;
    c->is_mutating = false;
    do {
        uint32_t timeout_ms = poll_timeout_ms(c, wait_ms);
        if (!timeout_ms)
            return CTL_WAIT_TIMEOUT;
        rc = caller_call(c->caller, method, request, timeout_ms, &c->arena, out_reply, &status,
                         &err);
        away = rc == -EHOSTUNREACH || rc == -ETIMEDOUT ||
               (rc == -EREMOTEIO && status.code == BALLAST__CODE__UNAVAILABLE);
    } while (away && (c->was_answered || c->deadline_ns));
    if (rc == -EINTR)
        return CTL_SIGNAL + SIGINT;
    c->was_answered |= rc == 0;
    return rc < 0 ? explain(c, rc, &status, &err) : CTL_OK;
}

void ctl_disconnect(struct ctl *c)
{
    caller_close(c->caller);
    c->caller = NULL;
    ctl_place_fini(&c->place);
    c->connected_to = NULL;
}
