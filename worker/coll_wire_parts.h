/* coll_wire_parts.h - what the files of the wire share; nobody else includes it
 *
 * coll_wire.c          the thread, what callers post, life
 * coll_wire_in.c       what comes from one rank: met by what is expected, or set aside
 * coll_wire_socket.c   addresses, keys, sockets, who is let in
 * coll_wire_talk.c     what is said and heard on them */
#ifndef WORKER_COLL_WIRE_PARTS_H
#define WORKER_COLL_WIRE_PARTS_H

#include <pthread.h>

#include <zmq.h>

#include "worker/coll_wire.h"
#include "worker/coll_wire_in.h"

#define WIRE_PIECE_BYTES ((size_t)128 << 10)
#define WIRE_TEXT_BYTES  512
#define WIRE_LINGER_MS   200 /* for a goodbye; data were acknowledged before */

struct out {
    struct out *next;
    uint32_t to;
    uint64_t tag;
    const uint8_t *data;
    size_t n, at;
    struct wire_ticket *ticket;
};

struct peer {
    char     address[WIRE_ADDRESS_BYTES];
    uint8_t  key[WIRE_KEY_BYTES];
    void    *dealer; /* NULL: nothing was sent to it */
    struct out *first, **last;
    bool     is_full;      /* ZeroMQ takes no more now */
    uint64_t sent, acked, arrived; /* costs, see wire_cost; acked: it has been asked for */
    uint8_t  id[16];       /* of its connection to here */
    size_t   n_id;
    bool     is_gone, has_left;
    struct wire_in in;
};

struct wire {
    void *context, *listener, *zap, *monitor;
    char  address[WIRE_ADDRESS_BYTES];
    uint8_t key[WIRE_KEY_BYTES], secret[WIRE_KEY_BYTES];
    pthread_t thread;
    bool has_thread;
    int  wake; /* eventfd */
    atomic_bool is_ending, is_asleep;
    uint32_t rank, world;
    struct peer *peers;
    uint32_t *sent_to; /* ranks with a dealer */
    uint32_t n_sent_to;
    struct wire_events events;
    bool has_told;
    uint64_t ping_ns;
    zmq_pollitem_t *items;
    pthread_mutex_t lock; /* of what callers have posted */
    struct out *posted, **posted_last;
    struct wire_post *expected, **expected_last;
};

enum kind { KIND_DATA = 0x42570001, KIND_ACK, KIND_PING, KIND_ABORT, KIND_BYE, KIND_FLUSH };

struct header {
    uint32_t kind, unused;
    uint64_t tag, total, at; /* ACK: costs, total consumed so far and at arrived */
};

/* ---- coll_wire_socket.c: all return 0 or a negative errno ------------------------------------ */

void wire_set(void *socket, int option, int value);
int  wire_make_keys(struct wire *w, struct err *err);
int  wire_listen_at(struct wire *w, const char *address, struct err *err);
/* The connection to a rank, made if there is none; NULL with errno. */
void *wire_dealer_to(struct wire *w, uint32_t rank);
/* Answers one who asks to be let in. */
void wire_admit(struct wire *w);

/* ---- coll_wire_talk.c ------------------------------------------------------------------------ */

/* What waits for a rank, as far as it goes. */
void wire_send_waiting(struct wire *w, uint32_t rank);
void wire_say(void *socket, enum kind kind, const char *text);
/* Back on the connection from it. -EAGAIN: not now, -EHOSTUNREACH: that has ended. */
int  wire_answer(struct wire *w, struct peer *p, enum kind kind);
void wire_acknowledge(struct wire *w, struct peer *p);
void wire_look_for_ends(struct wire *w);
void wire_tell_abort(struct wire *w);
/* One message, if there is one. */
bool wire_listen_once(struct wire *w);
void wire_hear_answers(struct wire *w, uint32_t rank);

#endif
