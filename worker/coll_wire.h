/* coll_wire.h - tagged messages between the ranks of one attempt, sealed
 *
 * Private to the host collectives, and zmq.h's home there. Data go over a TCP connection for each
 * direction between two ranks (a link), sealed by AES-256-GCM straight from the sender's memory
 * and opened straight into the receiver's. Threads of the wire's own do that (lanes); callers post
 * what they send and what they expect, and wait for tickets.
 *
 * The secret of a link is made by its sender and told through ZeroMQ with CURVE: each rank has a
 * key pair of its own for this attempt, listens to those alone whose public keys wire_join names,
 * and talks to those alone that prove theirs. Until then nobody is let in. Who fails that, or
 * connects to the data's port and does not greet with a rank's secret, changes nothing; what is
 * changed on its way ends the attempt, as the end of the connection does.
 *
 * Memory is bounded: a rank keeps some MiB of what another sends and nobody here has asked for
 * yet, and reads on when somebody does. */
#ifndef WORKER_COLL_WIRE_H
#define WORKER_COLL_WIRE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define WIRE_KEY_BYTES     32u
#define WIRE_ADDRESS_BYTES 96u /* with the end */

struct wire;

struct wire_peer {
    const char    *address; /* tcp://IP:PORT */
    const uint8_t *key;     /* WIRE_KEY_BYTES, public */
};

/* Called on the wire's threads. */
struct wire_events {
    void *user;
    /* A rank said goodbye; a link with it has ended. */
    void (*left)(void *user, uint32_t rank);
    void (*gone)(void *user, uint32_t rank);
    /* A rank, or this one's own wire, says why all must end. */
    void (*aborted)(void *user, const char *text);
    /* Whether this rank's host has aborted: what the others are to be told. Asked every 100 ms. */
    bool (*is_aborted)(void *user, char *out_text, size_t n_bytes);
};

/* 0 for tcp://IP:PORT and tcp://IP:*, where IP is a number that others can reach; else -EINVAL.
 * PORT is of the handshakes; the data's is the next one, or any with *. */
int wire_address_check(const char *address, struct err *err);
/* Whether such an address is of this machine alone. */
bool wire_is_loopback(const char *address);

/* Listens at address; nobody is let in yet. Gives *out_wire, ended with wire_close. */
int wire_open(const char *address, struct wire **out_wire, struct err *err);
/* What the others must know; live until close. */
const char    *wire_address(const struct wire *w);
const uint8_t *wire_key(const struct wire *w);

/* From now on rank talks to the others of world; peers (world) and events are copied. */
void wire_join(struct wire *w, uint32_t rank, uint32_t world, const struct wire_peer *peers,
               const struct wire_events *events);

/* Counts what was posted with it and is not done. Zero at first, kept until done or stopped. What
 * is sent is done when its bytes are sealed. */
struct wire_ticket {
    _Atomic uint32_t n_open;
    _Atomic uint32_t n_wrong; /* arrived in another size than expected */
    _Atomic uint64_t done_ns; /* when one last was */
};

/* By one thread at a time. data is kept until the ticket is done. A message is met by tag, of which
 * there is one under way between two ranks; messages to one rank arrive in order. */
void wire_send(struct wire *w, uint32_t to, uint64_t tag, const void *data, size_t n_bytes,
               struct wire_ticket *t);
void wire_recv(struct wire *w, uint32_t from, uint64_t tag, void *data, size_t n_bytes,
               struct wire_ticket *t);
/* After some posts: the lanes look at them now. */
void wire_go(struct wire *w);

/* One of the ticket's is done: for the wire's own files. */
void wire_done(struct wire_ticket *t);
/* Waits for at most timeout_ns; true: nothing is open. */
bool wire_wait(struct wire_ticket *t, uint64_t timeout_ns);

/* Ask is_aborted now. By any thread. */
void wire_wake(struct wire *w);

/* Ends all traffic: afterwards no caller's memory is touched and no ticket changes. What is_aborted
 * says is told first; if nothing does, what was sent leaves first, for 30 s at most, where somebody
 * is left to take it. Once stopped, posts do nothing. */
void wire_stop(struct wire *w);
/* And forgets it; NULL is fine. */
void wire_close(struct wire *w);

#endif
