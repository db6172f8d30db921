/* call.h - a client's calls to the coordinator, one at a time: send, wait, retry, answer
 *
 * A call is repeated with the same idempotency key (100 ms, doubling to 10 s, full jitter, or as
 * the coordinator asks) while the coordinator is away or says UNAVAILABLE or RESOURCE_EXHAUSTED,
 * until its timeout. So a mutating call happens once however often it is sent. */
#ifndef PROTO_CALL_H
#define PROTO_CALL_H

#include <signal.h>
#include <stdbool.h>

#include "common/err.h"
#include "common/mem.h"
#include "proto/ballast.pb-c.h"

struct caller;
struct link_keys;

struct caller_options {
    const char *address; /* as link.h */
    const struct link_keys *keys; /* as link.h, or NULL; the caller's until caller_close */
    const char *key_name, *key_file, *server_file; /* for messages, with keys */

    /* Told once per outage, when a call waits for the coordinator to come (back). was_sent: the
     * call had left, so that it may have been done. */
    void (*reconnecting)(void *context, bool was_sent);
    void *context;

    /* Where not NULL: a call ends with -EINTR soon after it became non-zero (a signal handler
     * may set it). */
    const volatile sig_atomic_t *stop;
};

/* Connects in the background; gives *out_caller. -EINVAL: an address that is not allowed. */
int  caller_open(const struct caller_options *options, struct caller **out_caller,
                 struct err *err);
void caller_close(struct caller *c);

/* Calls and waits for the answer; for a long poll give a timeout_ms above its wait_ms.
 *  0             *out_reply is the method's response; lives in the arena
 *  -EREMOTEIO    the coordinator refused, perhaps already the connection (UNAUTHENTICATED):
 *                out_status says why; err has its message
 *  -EHOSTUNREACH no coordinator was there: the request was never sent
 *  -ETIMEDOUT    it was sent, but no answer came: a mutating call may have happened
 *  -EPROTO       another protocol version, or an answer that is none
 *  -EINTR        stop was set
 * out_status is filled in every case but the first; it lives in the arena and may not be NULL. */
int caller_call(struct caller *c, Ballast__Method method, const ProtobufCMessage *request,
                uint32_t timeout_ms, struct arena *arena, const ProtobufCMessage **out_reply,
                Ballast__Status *out_status, struct err *err);

#endif
