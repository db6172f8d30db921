/* coll_wire_parts.h - what the files of the wire share; nobody else includes it
 *
 * coll_wire.c          what callers post and wait for, life
 * coll_wire_lane.c     the threads that carry data: links, and who waits for whom
 * coll_wire_door.c     who connects, and must greet first
 * coll_wire_out.c      what goes to one rank
 * coll_wire_in.c       what comes from one rank
 * coll_wire_talk.c     the thread of what is told through CURVE: secrets, ports, aborts
 * coll_wire_socket.c   addresses, CURVE's keys and sockets, who is let in */
#ifndef WORKER_COLL_WIRE_PARTS_H
#define WORKER_COLL_WIRE_PARTS_H

#include <pthread.h>

#include <zmq.h>

#include "worker/coll_wire.h"
#include "worker/coll_wire_in.h"
#include "worker/coll_wire_out.h"

#define WIRE_TEXT_BYTES  512
#define WIRE_LINGER_MS   200 /* for word of an abort */
#define WIRE_LANES_MAX   4
#define WIRE_GUESTS_MAX  256 /* who have connected and not greeted yet */

/* Of one rank. The talker's thread makes secrets and hears them, before the link begins that they
 * are of; then out and in belong to a lane each. */
struct peer {
    char     address[WIRE_ADDRESS_BYTES];
    uint8_t  key[WIRE_KEY_BYTES];
    void    *dealer; /* NULL: nothing was sent to it */
    atomic_bool is_wanted; /* something is to be sent to it */
    struct seal *out_seal; /* until the link is there, which takes it */
    uint8_t  in_secret[SEAL_SECRET_BYTES];
    struct wire_out out;
    struct wire_in in;
    atomic_bool may_greet, has_left; /* in_secret is there; it said goodbye */
    bool     has_tried, has_greeted, is_gone; /* a secret was made; its greeting was good */
    uint16_t out_port;
    _Atomic uint64_t ended_ns; /* when a link of it ended; 0: none has */
};

struct lane {
    struct wire *wire;
    pthread_t thread;
    bool has_thread;
    int  epoll, wake; /* wake: eventfd */
    atomic_bool is_asleep, has_posts;
    pthread_mutex_t lock; /* of what callers have posted */
    struct wire_out_post *outs, **outs_last;
    struct wire_in_post  *ins, **ins_last;
};

/* Who has connected to the door; the greeting so far. */
struct guest {
    int fd; /* -1: a free place */
    size_t n;
    struct greeting greeting;
};

struct wire {
    void *context, *listener, *zap;
    char  address[WIRE_ADDRESS_BYTES];
    uint8_t key[WIRE_KEY_BYTES], secret[WIRE_KEY_BYTES];
    pthread_t talker;
    bool has_talker;
    int  wake; /* of the talker: eventfd */
    atomic_bool is_ending, is_over; /* the lanes are to end; the talker is */
    uint32_t rank, world;
    struct peer *peers;
    struct wire_events events;
    bool has_told;
    uint32_t n_lanes;
    _Atomic uint32_t n_flushed;
    struct lane lanes[WIRE_LANES_MAX];
    int door; /* listens; lane 0's */
    uint16_t door_port;
    struct guest guests[WIRE_GUESTS_MAX];
    uint32_t next_guest;
    uint64_t n_refused;
};

enum kind { KIND_SECRET = 0x42570001, KIND_PORT, KIND_ABORT };

/* SECRET: of the link that the sender is about to make, with the secret itself; PORT: where to,
 * in answer; ABORT: with a text. */
struct header {
    uint32_t kind, port;
};

/* ---- coll_wire_socket.c: all return 0 or a negative errno ------------------------------------ */

int  wire_make_keys(struct wire *w, struct err *err);
int  wire_listen_at(struct wire *w, const char *address, struct err *err);
/* The connection to a rank, made if there is none; NULL with errno. */
void *wire_dealer_to(struct wire *w, uint32_t rank);
/* Answers one who asks to be let in. */
void wire_admit(struct wire *w);
/* Of an address, with another port: out is a struct sockaddr_storage. */
int  wire_socket_address(const char *address, uint16_t port, void *out, uint32_t *out_bytes);

/* ---- coll_wire_talk.c ------------------------------------------------------------------------ */

/* The talker's thread, until is_over. */
void *wire_talk(void *wire);
/* Fails the attempt: text says why. */
void wire_fail(struct wire *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- coll_wire_lane.c ------------------------------------------------------------------------ */

enum link_kind { LINK_WAKE, LINK_DOOR, LINK_GUEST, LINK_OUT, LINK_IN };

void wire_lanes_open(struct wire *w);
/* The threads end, once what was posted has gone, if somebody is left to take it. */
void wire_lanes_end(struct wire *w);
void wire_lanes_close(struct wire *w);
struct lane *wire_lane_out(struct wire *w, uint32_t rank);
struct lane *wire_lane_in(struct wire *w, uint32_t rank);
/* Begins to hear of fd; events are EPOLL's. */
void wire_lane_watch(struct lane *l, int fd, enum link_kind kind, uint32_t index, uint32_t events);
void wire_lane_wake(struct lane *l);

/* ---- coll_wire_door.c ------------------------------------------------------------------------ */

/* At the listener's address. Port 0: any. */
int  wire_door_open(struct wire *w, uint16_t port, struct err *err);
void wire_door_close(struct wire *w);
/* Somebody knocks; a guest says something. */
void wire_door_answer(struct wire *w);
void wire_door_hear(struct wire *w, uint32_t guest);
/* To the door of a rank; takes p->out_seal. */
int  wire_door_knock(struct wire *w, uint32_t rank, uint16_t port);

#endif
