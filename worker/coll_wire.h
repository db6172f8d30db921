/* coll_wire.h - tagged messages between the ranks of one attempt, through ZeroMQ
 *
 * Private to the host collectives, and zmq.h's home there. A rank listens at one address (ROUTER)
 * and connects to another when it first sends there (DEALER), so a connection carries one way.
 * A thread of the wire's own does all that; callers post what they send and what they expect, and
 * wait for tickets.
 *
 * Every connection is CURVE: each rank has a key pair of its own for this attempt, listens to
 * those alone whose public keys wire_join names, and talks to those alone that prove theirs. Until
 * then nobody is let in; who fails the handshake, or sends what is no ZeroMQ, changes nothing.
 *
 * Memory is bounded: large messages travel in pieces straight from the caller's memory, and a rank
 * sends another at most WINDOW_BYTES that nobody there has asked for yet. */
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

/* Called on the wire's thread, or by whoever closes. */
struct wire_events {
    void *user;
    /* A rank said goodbye; its connection has ended. */
    void (*left)(void *user, uint32_t rank);
    void (*gone)(void *user, uint32_t rank);
    /* A rank, or this one's own wire, says why all must end. */
    void (*aborted)(void *user, const char *text);
    /* Whether this rank's host has aborted: what the others are to be told. Asked every 100 ms. */
    bool (*is_aborted)(void *user, char *out_text, size_t n_bytes);
};

/* 0 for tcp://IP:PORT and tcp://IP:*, where IP is a number that others can reach; else -EINVAL. */
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

/* Counts what was posted with it and is not done. Zero at first, kept until done or stopped. */
struct wire_ticket {
    _Atomic uint32_t n_open;
    _Atomic uint32_t n_wrong; /* arrived in another size than expected */
};

/* By one thread at a time. data is kept until the ticket is done. A message is met by tag, of which
 * there is one under way between two ranks; messages to one rank arrive in order. */
void wire_send(struct wire *w, uint32_t to, uint64_t tag, const void *data, size_t n_bytes,
               struct wire_ticket *t);
void wire_recv(struct wire *w, uint32_t from, uint64_t tag, void *data, size_t n_bytes,
               struct wire_ticket *t);
/* After some posts: the thread looks at them now. */
void wire_go(struct wire *w);

/* Waits for at most timeout_ns; true: nothing is open. */
bool wire_wait(struct wire_ticket *t, uint64_t timeout_ns);

/* Ask is_aborted now. By any thread. */
void wire_wake(struct wire *w);

/* Ends all traffic: afterwards no caller's memory is touched and no ticket changes. What is_aborted
 * says is told first. Once stopped, posts do nothing. */
void wire_stop(struct wire *w);
/* And forgets it; NULL is fine. Unless all were aborted it first waits, 30 s at most, for what was
 * sent to arrive where somebody is left to take it. */
void wire_close(struct wire *w);

#endif
