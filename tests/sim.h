/* sim.h - a whole cluster in one process and in virtual time
 *
 * The real cores of the coordinator and of the workers, with everything between and around them
 * simulated: the store (a list of committed records; a commit takes time and may be cut off), the
 * network (loss, delay, reordering, duplication, partitions), trainer processes whose gangs make
 * steps together, clients that repeat a call with its key until it is answered. All chance comes
 * from one seed. Nothing here reads a clock.
 *
 * sim.c        events, chance, the trace
 * sim_net.c    packets between endpoints
 * sim_coord.c  the coordinator's shell and its store
 * sim_host.c   worker daemons, trainers, gangs
 * sim_plans.c  what trainers do with plans, and the loads they report
 * sim_client.c clients
 * sim_check.c  what must hold in every history
 *
 * A broken rule is remembered in sim.failure; the run goes on to the next event and stops. */
#ifndef TESTS_SIM_H
#define TESTS_SIM_H

#include "coordinator/coord.h"
#include "worker/agent.h"

#define SIM_HOSTS_MAX   8
#define SIM_CLIENTS_MAX 3
#define SIM_JOBS_MAX    64
#define SIM_OPS_MAX     256
#define SIM_ATTEMPTS_MAX 32 /* output of later ones is not looked at */

struct sim;

struct sim_event {
    uint64_t at_ns, order;
    void   (*run)(struct sim *s, struct sim_event *e);
    uint64_t a, b;
    void    *data; /* freed after the event */
};

/* ---- network ------------------------------------------------------------------------------ */

struct sim_endpoint {
    bool     is_up;
    uint32_t life;            /* grows with each process; packets for an older one are lost */
    uint64_t peer;            /* the coordinator's number for its connection; 0: none yet */
    uint64_t cut_until_ns;    /* partitioned */
};

struct sim_packet {
    uint32_t          endpoint, life; /* of the worker or client at the other end */
    uint32_t          n_envelope, n_payload;
    uint64_t          coord_life;
    const uint8_t    *envelope, *payload;
    uint8_t           bytes[];
};

struct sim_net {
    double   loss, duplicate, slow;   /* chances */
    uint64_t delay_ns, slow_delay_ns; /* usual and rare maximum */
};

/* ---- coordinator -------------------------------------------------------------------------- */

struct sim_pending {
    struct turn turn;
    uint64_t    coord_life;
};

struct sim_store {
    Ballast__Record **log;
    size_t            n_log, n_alloc;
    struct coord     *shadow; /* all committed records applied, nothing else */
    uint8_t          *steps[SIM_JOBS_MAX];  /* by job and step: the attempt that reported it */
    size_t            n_steps[SIM_JOBS_MAX];
    uint64_t          output[SIM_JOBS_MAX][SIM_ATTEMPTS_MAX][SIM_HOSTS_MAX]; /* stored bytes */
};

/* ---- hosts -------------------------------------------------------------------------------- */

/* Plans on one rank, as the real trainer has them: what arrives is looked at in a step boundary. */
struct sim_plans {
    Ballast__Placement *placement; /* in force; NULL: in order, epoch 0 */
    Ballast__Prepare   *arrived;
    Ballast__Placement *ready;     /* whole */
    uint32_t aborted_epoch, prepared_epoch, rejected_epoch;
};

struct sim_trainer {
    struct sim_trainer *next;
    uint32_t host, life, rank, n_ranks;
    job_id   job;
    uint32_t attempt;
    bool     is_alive, is_ready, wants_stop, is_closing;
    uint64_t id;
    uint64_t total_steps, every_steps, window_steps, output_bytes;
    uint32_t n_devices, n_slots; /* of its expert group; 0: no experts that move */
    struct sim_plans plans;
};

struct sim_gang {
    struct sim_gang *next;
    job_id   job;
    uint32_t attempt, n_ranks, n_ready;
    uint64_t step, total_steps, every_steps;
    uint32_t stage;        /* of that plan, the next to be carried out; 0: none was */
    uint32_t agreed_epoch; /* the last boundary word: every rank is ready for that plan; 0: none */
    uint64_t window_step;  /* the window of load began after it */
    bool     is_broken, is_ended;
    struct sim_trainer *ranks[SIM_HOSTS_MAX];
};

struct sim_host {
    struct agent *agent;
    uint64_t      epoch, next_wake_ns;
    bool          is_leaving;
    char          name[16], node[16];
};

/* ---- clients ------------------------------------------------------------------------------ */

struct sim_op {
    uint32_t        client;
    Ballast__Method method;
    uint8_t         key[IDEMPOTENCY_KEY_BYTES];
    ProtobufCMessage *payload;
    uint32_t        n_tries;
    bool            is_done;
    Ballast__Code   code;
    job_id          job; /* of a submit that was answered */
    uint64_t        revision; /* of a plan that was looked at */
    Ballast__JobState state; /* of a wait or another call about a job that was answered */
};

struct sim {
    uint64_t          seed, random, now_ns, next_order;
    struct sim_event *heap;
    size_t            n_heap, n_heap_alloc;
    bool              keeps_trace;
    char             *trace;
    size_t            n_trace, n_trace_alloc;
    char              failure[512];

    struct sim_net      net;
    struct sim_endpoint endpoints[SIM_HOSTS_MAX + SIM_CLIENTS_MAX];
    uint64_t            next_peer;

    struct coord_config config;
    struct coord       *coord; /* NULL: down */
    uint64_t            coord_life, next_tick_ns, commit_free_ns, stalled_until_ns;
    uint64_t            commit_delay_ns;
    double              commit_fails;
    struct sim_packet **inbox;
    size_t              n_inbox, n_inbox_alloc;
    bool                has_turn_event;
    struct sim_pending **pending;
    size_t              n_pending, n_pending_alloc;
    struct sim_store    store;

    struct sim_host     hosts[SIM_HOSTS_MAX];
    uint32_t            n_hosts, n_clients;
    struct sim_trainer *trainers;
    struct sim_gang    *gangs;
    uint64_t            next_trainer_id, next_epoch;
    uint32_t            ready_attempt[SIM_JOBS_MAX]; /* newest attempt that had a ready trainer */
    uint64_t            checkpoint[SIM_JOBS_MAX];    /* on the shared file system */
    uint64_t            load_ns, step_ns;
    double              trainer_fails, spawn_fails, hangs, refuses;
    struct {
        uint32_t attempt, epoch;
    } carried_out[SIM_JOBS_MAX]; /* newest placement that all ranks of the attempt had */
    bool                had_daemon_kill;

    struct sim_op ops[SIM_OPS_MAX];
    size_t        n_ops;
    struct sim_counts {
        uint64_t n_events, n_packets, n_lost, n_crashes, n_kills, n_records, n_attempts, n_done;
        uint64_t n_plans, n_placements, n_plans_ended, n_late_wins;
    } counts;
};

/* ---- sim.c -------------------------------------------------------------------------------- */

/* A calm cluster: nothing is lost, every packet takes 1 ms, a trainer loads for 1 s and steps in
 * 1 s. Gives it; ended with sim_destroy. */
struct sim *sim_create(uint64_t seed, uint32_t n_hosts, uint32_t n_clients);
void sim_destroy(struct sim *s);

/* Runs what is due until then, or until a rule is broken. */
void sim_run_until(struct sim *s, uint64_t at_ns);

void sim_at(struct sim *s, uint64_t at_ns, void (*run)(struct sim *, struct sim_event *),
            uint64_t a, uint64_t b, void *data);

uint64_t sim_random(struct sim *s, uint64_t below);
bool     sim_chance(struct sim *s, double p);

/* A line of the trace, with the time. */
void sim_say(struct sim *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A rule is broken. */
void sim_fail(struct sim *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- sim_net.c ---------------------------------------------------------------------------- */

void net_to_coord(struct sim *s, uint32_t endpoint, const Ballast__Envelope *e,
                  const ProtobufCMessage *payload);
void net_to_peer(struct sim *s, uint64_t peer, const Ballast__Envelope *e,
                 const ProtobufCMessage *payload);

/* Unpacks into the arena. */
Ballast__Envelope *net_open(const struct sim_packet *p, struct arena *arena,
                            ProtobufCMessage **out_payload);

/* ---- sim_coord.c -------------------------------------------------------------------------- */

void coord_sim_start(struct sim *s);

/* Of the turns that wait for their commit the first n are durable, but their messages never
 * leave; the rest is lost. */
void coord_sim_crash(struct sim *s, size_t n_durable);
void coord_sim_receive(struct sim *s, struct sim_packet *p); /* takes p */
void coord_sim_peer_gone(struct sim *s, uint64_t peer);
void coord_sim_fini(struct sim *s);

/* ---- sim_host.c --------------------------------------------------------------------------- */

void host_start(struct sim *s, uint32_t host);
void host_kill(struct sim *s, uint32_t host);      /* kill -9 of the daemon */
void host_shut_down(struct sim *s, uint32_t host); /* SIGTERM */
void host_receive(struct sim *s, uint32_t host, const struct sim_packet *p);
bool host_is_idle(const struct sim *s, uint32_t host);

/* A living trainer dies of a signal; false if there is none there. */
bool host_kill_trainer(struct sim *s, uint32_t host, int signal_number);
void host_sim_fini(struct sim *s);

/* ---- sim_plans.c -------------------------------------------------------------------------- */

void plans_init(struct sim_trainer *t, const Ballast__Start *start);
void plans_fini(struct sim_trainer *t);
void plans_receive(struct sim_trainer *t, const Ballast__TrainerMessage *m);
void plans_say(const struct sim_trainer *t, Ballast__RankState *state);
uint32_t plans_epoch(const struct sim_trainer *t);

/* The step boundary of a whole gang: carries out what was agreed one step ago, looks at what has
 * arrived, agrees anew. Where experts move and `dies` is a rank, that one is lost in the middle:
 * those before it have the new placement, the others do not. */
void plans_boundary(struct sim *s, struct sim_gang *g, uint32_t dies);

/* The load of the window that ends here, or NULL; in the arena. */
Ballast__LoadReport *plans_load(struct sim *s, struct sim_gang *g, struct arena *arena);

/* ---- sim_client.c ------------------------------------------------------------------------- */

/* Gives the op's number. The payload is packed at once. */
size_t client_call(struct sim *s, uint32_t client, Ballast__Method method,
                   const ProtobufCMessage *payload);
size_t client_submit(struct sim *s, uint32_t client, uint32_t n_workers, uint64_t steps,
                     uint64_t every_steps);
size_t client_job(struct sim *s, uint32_t client, Ballast__Method method, job_id job,
                  const char *reason);
size_t client_rebalance(struct sim *s, uint32_t client, Ballast__Method method, job_id job,
                        uint64_t revision, bool on);
size_t client_worker(struct sim *s, uint32_t client, Ballast__Method method, const char *name);
void   client_receive(struct sim *s, uint32_t client, const struct sim_packet *p);
bool   clients_are_done(const struct sim *s);

/* ---- sim_check.c -------------------------------------------------------------------------- */

void check_record(struct sim *s, const Ballast__Record *r);
void check_replay(struct sim *s);     /* live core against the committed log, if nothing waits */
void check_submitted(struct sim *s);  /* every acknowledged submit is in the log */
void check_from_scratch(struct sim *s);

/* Every job has ended or says why it waits, and nothing is left over. False: not yet. */
bool check_is_settled(struct sim *s, char *out_why, size_t n_why);

/* ---- sim_history.c ------------------------------------------------------------------------ */

/* One random history of that seed; 0, or -1 with s->failure. */
int sim_history(struct sim *s);

#endif
