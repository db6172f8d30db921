/* agent.c - the worker daemon's core: its life, and what is due by time
 *
 * ENDED is said again in every heartbeat until the coordinator has recorded it; the attempt is
 * forgotten when its reports and output are stored too. A STOP for an attempt that never came
 * makes an ENDED one, and attempts up to the newest one seen of a job are refused from then on:
 * so an end that was reported stays true, however late a START arrives. */
#include "worker/agent_parts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define STOP_GRACE_NS (5 * NS_PER_S) /* where the agent itself decides to stop */
#define LEAVE_GRACE_NS (20 * NS_PER_S) /* the same, with time for a checkpoint of all ranks */

struct agent_config agent_config_default(void)
{
    return (struct agent_config){
        .name = "", .node = "", .machine = "", .device = "", .version = "",
        .hello_base_ns = 200 * NS_PER_MS,
        .hello_cap_ns = 5 * NS_PER_S,
        .closed_grace_ns = 5 * NS_PER_S,
        .steps_max = 100000,
        .step_bytes_max = 16u << 20,
        .loads_max = 256,
        .load_bytes_max = 32u << 20,
        .log_window_bytes = 512u << 10,
    };
}

struct agent *agent_create(const struct agent_config *config)
{
    struct agent *a = xcalloc(1, sizeof *a);
    a->config = *config;
    a->config.name = xstrdup(config->name);
    a->config.node = xstrdup(config->node);
    a->config.machine = xstrdup(config->machine);
    a->config.device = xstrdup(config->device);
    a->config.version = xstrdup(config->version);
    a->hello_wait_ns = config->hello_base_ns;
    outbox_init(&a->steps, config->steps_max, config->step_bytes_max);
    outbox_init(&a->loads, config->loads_max, config->load_bytes_max);
    return a;
}

void agent_destroy(struct agent *a)
{
    if (!a)
        return;
    for (size_t i = 0; i < a->n_attempts; i++)
        agent_attempt_fini(&a->attempts[i]);
    outbox_fini(&a->steps);
    outbox_fini(&a->loads);
    free((char *)a->config.name);
    free((char *)a->config.node);
    free((char *)a->config.machine);
    free((char *)a->config.device);
    free((char *)a->config.version);
    gpu_free(a->gpu);
    free(a->leave_reason);
    free(a);
}

/* ---- time ---------------------------------------------------------------------------------- */

void agent_begin(struct agent *a, struct agent_turn *t, uint64_t now_ns)
{
    (void)a;
    t->now_ns = now_ns;
}

void agent_shut_down(struct agent *a, struct agent_turn *t, const char *reason)
{
    if (a->is_leaving)
        return;
    a->is_leaving = true;
    a->leave_reason = xstrdup(reason);
    struct attempt *waiting = agent_in_life(a, LIFE_PENDING);
    if (waiting) {
        agent_end(a, t, waiting, BALLAST__RANK_PHASE__RANK_STOPPED, reason, true);
        waiting->is_log_closed = true;
    }
    struct attempt *live = agent_in_life(a, LIFE_LIVE);
    if (live)
        agent_stop(a, t, live, BALLAST__STOP_MODE__STOP_CHECKPOINT, LEAVE_GRACE_NS, reason);
}

bool agent_may_exit(const struct agent *a)
{
    return a->has_said_goodbye;
}

static void tick_trainers(struct agent *a, struct agent_turn *t)
{
    struct attempt *x = agent_in_life(a, LIFE_LIVE);
    if (!x)
        return;
    /* From here on the coordinator may count on it that this trainer is gone. */
    if (a->fence_ns && t->now_ns >= a->lease_from_ns + a->fence_ns &&
        x->stop_mode < BALLAST__STOP_MODE__STOP_NOW) {
        char *why = arena_printf(&t->arena, "no word from the coordinator for %" PRIu64 " s",
                                 (t->now_ns - a->lease_from_ns) / (uint64_t)NS_PER_S);
        agent_note(t, arena_printf(&t->arena, "job=%" PRIu64 " attempt=%u msg=\"%s, stopping the "
                                   "trainer\"", x->job, x->attempt, why));
        agent_stop(a, t, x, BALLAST__STOP_MODE__STOP_NOW, STOP_GRACE_NS, why);
    }
    agent_look_for_hang(t, x);
    if (t->now_ns >= x->kill_ns)
        agent_kill(t, x);
}

static void tick_coordinator(struct agent *a, struct agent_turn *t)
{
    if (a->is_attached && t->now_ns >= a->answered_ns + a->lease_ns)
        agent_detach(a, t->now_ns);
    if (!a->is_attached && t->now_ns >= a->next_hello_ns)
        agent_say_hello(a, t);
    else if (a->is_attached && t->now_ns >= a->next_beat_ns)
        agent_beat(a, t);
}

static void tick_steps(struct agent *a, struct agent_turn *t)
{
    if (!a->is_attached || !a->steps.n || (a->steps_resend_ns && t->now_ns < a->steps_resend_ns))
        return;
    Ballast__StepReports *batch = outbox_batch(&a->steps, &t->arena);
    agent_say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_STEPS, &batch->base);
    a->steps_resend_ns = t->now_ns + 2 * a->interval_ns;
}

static void tick_loads(struct agent *a, struct agent_turn *t)
{
    if (!a->is_attached || !a->loads.n || (a->loads_resend_ns && t->now_ns < a->loads_resend_ns))
        return;
    agent_say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_LOAD,
              &outbox_load(&a->loads, &t->arena)->base);
    a->loads_resend_ns = t->now_ns + 2 * a->interval_ns;
}

static void tick_log(struct agent *a, struct agent_turn *t, struct attempt *x)
{
    if (x->log_sent > x->log_acked && t->now_ns >= x->log_resend_ns)
        x->log_sent = x->log_acked;
    if (x->log_sent == x->log_acked)
        x->log_resend_ns = t->now_ns + 2 * a->interval_ns;
    while (x->log_sent < x->log_spooled &&
           x->log_sent - x->log_acked < a->config.log_window_bytes) {
        uint64_t left = x->log_spooled - x->log_sent;
        struct effect *e = agent_effect(t, EFFECT_SEND_LOG, x);
        agent_fill_envelope(a, &e->envelope, BALLAST__KIND__KIND_NOTICE,
                            BALLAST__METHOD__METHOD_LOG);
        e->offset = x->log_sent;
        e->n_bytes = left < LOG_CHUNK_BYTES_MAX ? (uint32_t)left : LOG_CHUNK_BYTES_MAX;
        e->dropped_bytes = x->log_dropped;
        x->log_sent += e->n_bytes;
    }
}

static void tick_logs(struct agent *a, struct agent_turn *t)
{
    for (size_t i = 0; a->is_attached && i < a->n_attempts; i++)
        if (a->attempts[i].life != LIFE_PENDING)
            tick_log(a, t, &a->attempts[i]);
}

static void forget_settled(struct agent *a, struct agent_turn *t)
{
    for (size_t i = a->n_attempts; i-- > 0;) {
        struct attempt *x = &a->attempts[i];
        bool is_log_stored = !x->has_spool || (x->is_log_closed && x->log_acked == x->log_spooled);
        if (x->life == LIFE_ENDED && x->is_acked && is_log_stored &&
            !outbox_has(&a->steps, x->job, x->attempt) &&
            !outbox_has(&a->loads, x->job, x->attempt))
            agent_forget(a, t, x);
    }
}

void agent_tick(struct agent *a, struct agent_turn *t)
{
    if (a->has_said_goodbye)
        return;
    tick_trainers(a, t);
    tick_coordinator(a, t);
    tick_steps(a, t);
    tick_loads(a, t);
    tick_logs(a, t);
    forget_settled(a, t);
    if (a->is_leaving && !agent_in_life(a, LIFE_LIVE)) {
        Ballast__Goodbye *g = arena_alloc(&t->arena, sizeof *g);
        ballast__goodbye__init(g);
        g->reason = arena_strdup(&t->arena, a->leave_reason);
        agent_say(a, t, BALLAST__KIND__KIND_NOTICE, BALLAST__METHOD__METHOD_GOODBYE, &g->base);
        a->has_said_goodbye = true;
    }
}

static uint64_t min_u64(uint64_t x, uint64_t y)
{
    return x < y ? x : y;
}

uint64_t agent_next_deadline_ns(const struct agent *a)
{
    uint64_t next_ns = a->is_attached ? min_u64(a->next_beat_ns, a->answered_ns + a->lease_ns)
                                      : a->next_hello_ns;
    if (a->has_said_goodbye)
        next_ns = UINT64_MAX;
    for (size_t i = 0; i < a->n_attempts; i++) {
        const struct attempt *x = &a->attempts[i];
        if (x->life == LIFE_LIVE) {
            next_ns = min_u64(next_ns, min_u64(x->kill_ns, x->late_ns));
            if (a->fence_ns && x->stop_mode < BALLAST__STOP_MODE__STOP_NOW)
                next_ns = min_u64(next_ns, a->lease_from_ns + a->fence_ns);
        }
        if (a->is_attached && x->log_sent > x->log_acked)
            next_ns = min_u64(next_ns, x->log_resend_ns);
    }
    if (a->is_attached && a->steps.n)
        next_ns = min_u64(next_ns, a->steps_resend_ns);
    if (a->is_attached && a->loads.n)
        next_ns = min_u64(next_ns, a->loads_resend_ns);
    return next_ns;
}

uint64_t agent_n_reports_dropped(const struct agent *a)
{
    return a->steps.n_dropped + a->loads.n_dropped;
}

bool agent_is_idle(const struct agent *a)
{
    return !a->n_attempts && !a->steps.n && !a->loads.n;
}

bool agent_is_attached(const struct agent *a)
{
    return a->is_attached;
}
