/* server_parts.h - what the parts of the shell share; the loop's thread alone touches it */
#ifndef COORDINATOR_SERVER_PARTS_H
#define COORDINATOR_SERVER_PARTS_H

#include <uv.h>

#include "common/link.h"
#include "coordinator/auth.h"
#include "coordinator/coord.h"
#include "coordinator/metrics.h"
#include "coordinator/server.h"
#include "coordinator/store.h"
#include "proto/check.h"

/*  RESTORING -> STARTING -> SERVING;  a failed commit: back to RESTORING, or to WAITING until
 *  the disk is better;  any -> STOPPING. Without SERVING only reads are answered. */
enum server_state { SERVER_RESTORING, SERVER_STARTING, SERVER_SERVING, SERVER_WAITING,
                    SERVER_STOPPING };

/* What the store has of ours. batch comes first: the store gives that back. */
enum work_kind { WORK_TURN, WORK_QUERY, WORK_RESTORE };
struct work {
    struct store_batch batch;
    enum work_kind     kind;
};

struct query;
struct http;
struct http_request;

struct turn_work {
    struct work       work;
    struct turn       turn;
    struct store_log *logs; /* in the turn's arena */
    size_t            n_logs;
    struct query     *answered; /* owned: their reads hold what the turn's answers point to */
    struct turn_work *next;
};

/* A request that the databases answer, perhaps after it has waited for news. */
struct query {
    struct work       work;
    struct store_read read;
    struct arena      arena; /* its envelope and payload */
    link_peer         peer;
    char             *user;  /* owned */
    bool              is_limited; /* to its own jobs */
    Ballast__Envelope      *envelope;
    const ProtobufCMessage *payload;
    struct http_request *http; /* it came over HTTP, from no peer; or NULL */
    uint64_t          submitted_ns;
    uint64_t          deadline_ns; /* of a long poll: then it is answered with nothing */
    struct query     *next, *previous; /* parked, or answered */
    struct query     *recalled; /* the reads of jobs that this one brings back; owned */
    bool              is_recall;
};

struct peer_state {
    uint64_t seq;         /* of what we sent */
    double   tokens;
    uint64_t refilled_ns;
    uint32_t n_queries;   /* read or parked */
    bool     is_ended;    /* its key is not valid any more, and it was told so */
    bool     is_excess;   /* came when descriptors were short; is told to come again */
};

struct server {
    const struct server_config *config; /* borrowed */
    struct coord_config core_config;
    void (*reload)(void *context);
    void  *reload_context;

    uv_loop_t   loop;
    uv_async_t  done;
    uv_timer_t  timer;
    uv_signal_t signals[4];
    struct auth  auth;
    struct link *link;
    struct store *store;

    enum server_state state;
    struct coord *core;       /* NULL while RESTORING and WAITING */
    struct turn_work *open;   /* the turn under way, or NULL */
    struct turn_work *restart; /* the turn that began this incarnation, until it is durable */
    size_t n_turns_out, n_out; /* with the store: turns; all of them */
    bool   has_failed;        /* a turn was not stored: the core knows what never happened */
    uint64_t retry_ns;        /* WAITING: when to try again */
    struct err store_err;     /* why the last turn was not stored; empty once SERVING again */

    struct query *parked;     /* doubly linked */
    size_t   n_parked;
    uint32_t n_sql;           /* people's SQL with the store: one at a time, so that commits come
                               * between any two */
    uint64_t poll_deadline_ns; /* no parked query is due before this */
    link_peer *gone;          /* peers the core has not been told about */
    size_t   n_gone, n_gone_alloc;

    struct arena scratch;     /* of one packed message, or one answer without a turn */
    uint32_t n_descriptors_max;
    struct metrics metrics;
    struct http *http;        /* NULL: none */
    uint32_t n_http_queries;  /* with the store */
    uv_timer_t pulse;         /* whose lateness is how busy the loop is */
    uint64_t pulse_ns;        /* when it is due */
    uint64_t backup_ns;       /* of the newest backup; 0: none */
    int64_t  started_wall_ns;
    uint64_t n_refused, n_limited, n_foreign;
    uint64_t n_turned_away, turned_away_said_ns; /* connections, for want of descriptors */
    uint64_t n_unknown, unknown_said_ns; /* connections with keys that are not in the list */
    int      rc;              /* why the loop ended */
    struct err *err;
};

/* ---- server: the loop ------------------------------------------------------------------------ */

/* For the next thing that is due. */
void server_arm_timer(struct server *s);
/* Stops for that reason, which is logged; work that was accepted is finished before. */
void server_fail(struct server *s, int rc, const char *text);

/* ---- server_message: what comes in ----------------------------------------------------------- */

/* 0, or after server_fail. */
int  server_listen(struct server *s);
void server_reload_keys(struct server *s);

/* ---- server_restore: the core and the store -------------------------------------------------- */

/* Begins to read the state, in RESTORING. */
void server_restore(struct server *s);
/* Takes what the store is done with: sends, answers, or begins anew. */
void server_take_stored(struct server *s);

/* ---- server_turn: turns and their way through the store -------------------------------------- */

/* The turn under way, begun now if there is none. Only while STARTING or SERVING. */
struct turn_work *turn_get(struct server *s);
/* Ends it: what it recorded goes to the store, or what it says leaves at once. */
void turn_end(struct server *s);
void turn_add_log(struct turn_work *w, link_peer peer, const Ballast__LogChunk *chunk);
/* Sends everything that the turn says. */
void turn_send(struct server *s, struct turn *t);
/* Why nobody is served but readers, while RESTORING, STARTING or WAITING. */
void say_not_serving(const struct server *s, struct arena *arena, Ballast__Status *out_status);
/* Answers its requests with UNAVAILABLE instead. */
void turn_fail(struct server *s, struct turn *t);
void turn_free(struct turn_work *w);

/* An answer by the turn under way, or at once without one. payload as turn_reply. */
void answer(struct server *s, link_peer peer, const Ballast__Envelope *request,
            const ProtobufCMessage *payload);
void refuse(struct server *s, link_peer peer, const Ballast__Envelope *request,
            const Ballast__Status *status);

/* ---- server_http: metrics, the dashboard ----------------------------------------------------- */

/* Listens if the configuration says so. */
int  server_http_open(struct server *s);
void http_look_around(const struct server *s, struct metrics_now *out);
/* server_http_api: a path below /api/v1/, and what the databases say to it. */
void http_api(struct server *s, struct http_request *r, const char *path);
void http_answer_query(struct server *s, struct query *q);

/* ---- server_query ---------------------------------------------------------------------------- */

/* Whether the shell, not the core, answers it. */
bool query_is_ours(const Ballast__Envelope *e, const ProtobufCMessage *payload);
/* Begins to read; frames are copied. */
void query_begin(struct server *s, link_peer peer, const struct identity *who,
                 const struct wire_bytes *frames);
/* One that came over HTTP; its payload is then made in its arena, and it is begun or freed. */
struct query *query_make_http(struct http_request *http, Ballast__Method method);
void query_begin_http(struct server *s, struct query *q);
/* Brings the ended job back that this request is about, then hands it to the core. */
void query_begin_recall(struct server *s, link_peer peer, const struct identity *who,
                        const struct wire_bytes *frames, job_id job);
/* Its read is done: true if it waits for news now, false if query_answer is due. */
bool query_park(struct server *s, struct query *q);
/* Its read goes to the store, again after more is to be read. */
void query_submit(struct server *s, struct query *q);
/* Of a read of one job. */
bool query_job_has_ended(const struct store_read *r);
/* What a durable turn is news for. */
void query_wake(struct server *s, const struct turn_work *w);
void query_expire(struct server *s, uint64_t now_ns);
void query_stop_all(struct server *s);
void query_forget_peer(struct server *s, link_peer peer);
void query_free(struct query *q);

/* ---- server_answer --------------------------------------------------------------------------- */

void query_answer(struct server *s, struct query *q);
/* What a read that is back says, in the query's arena: true if there is no answer, with why. */
bool query_refuses(struct query *q, Ballast__Status *out_status);
ProtobufCMessage *query_reply(struct server *s, struct query *q);

/* ---- server_balance: queries about expert load, placements and the database ------------------ */

bool balance_is_ours(Ballast__Method method);
void balance_plan_read(Ballast__Method method, const ProtobufCMessage *payload,
                       struct store_read *r);
ProtobufCMessage *balance_answer(const struct store_read *r, struct arena *arena);
/* True if there is no answer, with why. */
bool balance_refuses(const struct store_read *r, struct arena *arena, Ballast__Status *out_status);

/* ---- server_admit ---------------------------------------------------------------------------- */

/* With so many batches under way the class is refused. */
enum { WATCH_AT = 2000, LIST_AT = 4000, SUBMIT_AT = 8000 };

struct peer_state *peer_state_of(struct server *s, link_peer peer);
/* Counts a message; false: it is to be thrown away unread. */
bool admit_message(struct server *s, link_peer peer, uint64_t now_ns);
/* 0, or -EAGAIN, -EACCES with the refusal. */
int  admit_request(struct server *s, link_peer peer, const struct identity *who,
                   const Ballast__Envelope *e, Ballast__Status *out_status);

#endif
