/* sim_history.c - one random history: a rough time, then a calm one in which all must settle */
#include "tests/sim.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define ROUGH_S_MAX  120 /* faults happen for at most this long */
#define CALM_S_MAX   3000

static void coord_returns(struct sim *s, struct sim_event *e)
{
    (void)e;
    if (!s->coord) {
        sim_say(s, "coordinator: started");
        coord_sim_start(s);
    }
}

static void host_returns(struct sim *s, struct sim_event *e)
{
    host_start(s, (uint32_t)e->a);
}

static uint64_t soon(struct sim *s, uint64_t most_s)
{
    return s->now_ns + sim_random(s, most_s * NS_PER_S);
}

/* ---- faults ------------------------------------------------------------------------------- */

static void crash_coordinator(struct sim *s)
{
    size_t n_durable = sim_random(s, s->n_pending + 1);
    if (!s->coord)
        return;
    sim_say(s, "coordinator: killed, %zu of %zu turns durable but unsaid", n_durable,
            s->n_pending);
    coord_sim_crash(s, n_durable);
    sim_at(s, soon(s, sim_chance(s, 0.2) ? 40 : 3), coord_returns, 0, 0, NULL);
}

static void cut(struct sim *s, uint32_t host)
{
    uint64_t until_ns = soon(s, sim_chance(s, 0.3) ? 60 : 6);
    sim_say(s, "w%u: cut off until %.1f", host, (double)until_ns / NS_PER_S);
    s->endpoints[host].cut_until_ns = until_ns;
}

static void stall_coordinator(struct sim *s)
{
    s->stalled_until_ns = soon(s, 20);
    sim_say(s, "coordinator: stalled until %.1f", (double)s->stalled_until_ns / NS_PER_S);
}

static void stop_host(struct sim *s, uint32_t host, bool hard)
{
    if (hard)
        host_kill(s, host);
    else
        host_shut_down(s, host);
    sim_at(s, soon(s, sim_chance(s, 0.3) ? 30 : 2) + (hard ? 0 : 8 * NS_PER_S), host_returns,
           host, 0, NULL);
}

static void fault(struct sim *s, struct sim_event *e)
{
    if (s->now_ns > e->b)
        return;
    uint32_t host = (uint32_t)sim_random(s, s->n_hosts);
    switch (sim_random(s, 8)) {
    case 0: crash_coordinator(s); break;
    case 1: cut(s, host); break;
    case 2: stall_coordinator(s); break;
    case 3: stop_host(s, host, true); break;
    case 4: stop_host(s, host, false); break;
    case 5: host_kill_trainer(s, host, 11); break;
    case 6: /* everybody at once */
        for (uint32_t i = 0; sim_chance(s, 0.3) && i < s->n_hosts; i++)
            cut(s, i);
        break;
    case 7: /* the machine with the coordinator and a worker */
        if (sim_chance(s, 0.3)) {
            crash_coordinator(s);
            stop_host(s, host, true);
        }
        break;
    }
    sim_at(s, soon(s, e->a), fault, e->a, e->b, NULL);
}

/* ---- people ------------------------------------------------------------------------------- */

static void submit_random(struct sim *s, uint32_t client)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__SubmitRequest request = BALLAST__SUBMIT_REQUEST__INIT;
    uint64_t after[1] = {0};
    spec.name = "job";
    spec.parallel_workers = 1 + (uint32_t)sim_random(s, s->n_hosts);
    if (sim_chance(s, 0.05))
        spec.parallel_workers = s->n_hosts + 1;
    spec.train_steps = 1 + sim_random(s, 20);
    spec.checkpoint_every_steps = 1 + sim_random(s, 6);
    spec.scheduling_max_restarts = (uint32_t)sim_random(s, 12);
    bool has_two_groups = spec.parallel_workers % 2 == 0 && sim_chance(s, 0.3);
    spec.parallel_expert_parallel_degree = spec.parallel_workers / (has_two_groups ? 2 : 1);
    spec.rebalance_auto = sim_chance(s, 0.8);
    spec.rebalance_spare_slots_per_rank = (uint32_t)sim_random(s, 3);
    spec.rebalance_window_steps = 1 + (uint32_t)sim_random(s, 3);
    spec.rebalance_horizon_steps = 200;
    spec.rebalance_min_gain = 0.01;
    spec.rebalance_layer_moves = (uint32_t)sim_random(s, 3);
    spec.scheduling_priority = (int32_t)sim_random(s, 3);
    spec.scheduling_time_limit_s = sim_chance(s, 0.1) ? 1 + sim_random(s, 10) : 0;
    if (s->store.n_log && sim_chance(s, 0.15)) {
        after[0] = 1 + sim_random(s, 4);
        spec.scheduling_after = after;
        spec.n_scheduling_after = 1;
    }
    request.spec = &spec;
    client_call(s, client, BALLAST__METHOD__METHOD_SUBMIT, &request.base);
}

static job_id some_job(struct sim *s)
{
    for (int i = 0; i < 8; i++) {
        const struct sim_op *op = &s->ops[sim_random(s, s->n_ops ? s->n_ops : 1)];
        if (s->n_ops && op->job)
            return op->job;
    }
    return 1;
}

/* Of a plan that somebody has looked at, or 0: whatever is best. */
static uint64_t some_revision(struct sim *s)
{
    return s->n_ops ? s->ops[sim_random(s, s->n_ops)].revision : 0;
}

static void person(struct sim *s, struct sim_event *e)
{
    if (s->now_ns > e->b || s->n_ops > SIM_OPS_MAX - 40)
        return;
    uint32_t client = (uint32_t)e->a;
    uint32_t host = (uint32_t)sim_random(s, s->n_hosts);
    switch (sim_random(s, 24)) {
    default:
        if (s->n_ops < 40)
            submit_random(s, client);
        break;
    case 0:
    case 1:
        client_job(s, client, BALLAST__METHOD__METHOD_JOB_CANCEL, some_job(s), "not needed");
        break;
    case 2:
        client_job(s, client, BALLAST__METHOD__METHOD_JOB_HOLD, some_job(s), "wait for me");
        break;
    case 3:
        client_job(s, client, BALLAST__METHOD__METHOD_JOB_RELEASE, some_job(s), "");
        break;
    case 4:
        client_job(s, client, BALLAST__METHOD__METHOD_JOB_REQUEUE, some_job(s), "");
        break;
    case 5:
        client_worker(s, client, BALLAST__METHOD__METHOD_WORKER_DRAIN, s->hosts[host].name);
        break;
    case 6:
        client_worker(s, client, BALLAST__METHOD__METHOD_WORKER_RESUME, s->hosts[host].name);
        break;
    case 7: {
        Ballast__JobWaitRequest wait = BALLAST__JOB_WAIT_REQUEST__INIT;
        wait.job_id = some_job(s);
        wait.wait_ms = (uint32_t)sim_random(s, 2000);
        client_call(s, client, BALLAST__METHOD__METHOD_JOB_WAIT, &wait.base);
        break;
    }
    case 8: {
        Ballast__JobListRequest list = BALLAST__JOB_LIST_REQUEST__INIT;
        client_call(s, client, BALLAST__METHOD__METHOD_JOB_LIST, &list.base);
        break;
    }
    case 9:
        client_rebalance(s, client, BALLAST__METHOD__METHOD_REBALANCE_PLAN, some_job(s), 0, false);
        break;
    case 10:
        client_rebalance(s, client, BALLAST__METHOD__METHOD_REBALANCE_APPLY, some_job(s),
                         some_revision(s), false);
        break;
    case 11:
    case 12:
        client_job(s, client, BALLAST__METHOD__METHOD_JOB_PAUSE, some_job(s), "for lunch");
        break;
    case 13:
    case 14:
        client_job(s, client, BALLAST__METHOD__METHOD_JOB_RESUME, some_job(s), "");
        break;
    case 15:
        client_rebalance(s, client, BALLAST__METHOD__METHOD_REBALANCE_AUTO, some_job(s), 0,
                         sim_chance(s, 0.7));
        break;
    }
    sim_at(s, soon(s, 8), person, client, e->b, NULL);
}

/* ---- the history -------------------------------------------------------------------------- */

static void be_rough(struct sim *s)
{
    s->net = (struct sim_net){
        .loss = (double)sim_random(s, 20) / 100, .duplicate = (double)sim_random(s, 20) / 100,
        .slow = 0.01 + (double)sim_random(s, 20) / 100,
        .delay_ns = (1 + sim_random(s, 50)) * NS_PER_MS,
        .slow_delay_ns = (1 + sim_random(s, 2000)) * NS_PER_MS};
    s->commit_delay_ns = (1 + sim_random(s, 200)) * NS_PER_MS;
    s->commit_fails = sim_chance(s, 0.3) ? 0.003 : 0;
    s->trainer_fails = sim_chance(s, 0.5) ? 0.02 : 0;
    s->spawn_fails = sim_chance(s, 0.3) ? 0.05 : 0;
    s->hangs = sim_chance(s, 0.5) ? 0.2 : 0;
    s->refuses = sim_chance(s, 0.5) ? 0.2 : 0;
    s->load_ns = (1 + sim_random(s, 3000)) * NS_PER_MS;
    s->step_ns = (50 + sim_random(s, 2000)) * NS_PER_MS;
    s->config.prepare_timeout_ns = (200 + sim_random(s, 4000)) * NS_PER_MS;
    s->config.backoff_base_ns = (50 + sim_random(s, 1000)) * NS_PER_MS;
}

static void be_calm(struct sim *s)
{
    s->net = (struct sim_net){.delay_ns = NS_PER_MS};
    s->commit_delay_ns = NS_PER_MS;
    s->commit_fails = s->trainer_fails = s->spawn_fails = s->hangs = s->refuses = 0;
    s->load_ns = s->step_ns = 500 * NS_PER_MS;
    for (uint32_t i = 0; i < SIM_HOSTS_MAX; i++)
        s->endpoints[i].cut_until_ns = 0;
    s->stalled_until_ns = 0;
    sim_say(s, "all faults end");
}

int sim_history(struct sim *s)
{
    be_rough(s);
    uint64_t until_ns = s->now_ns + (20 + sim_random(s, ROUGH_S_MAX - 20)) * NS_PER_S;
    coord_sim_start(s);
    for (uint32_t i = 0; i < s->n_hosts; i++)
        sim_at(s, soon(s, sim_chance(s, 0.2) ? 20 : 2), host_returns, i, 0, NULL);
    for (uint32_t i = 0; i < s->n_clients; i++)
        sim_at(s, soon(s, 5), person, i, until_ns, NULL);
    uint64_t pace_s = 1 + sim_random(s, 30);
    if (!sim_chance(s, 0.1)) /* some histories have only a bad network */
        sim_at(s, soon(s, pace_s), fault, pace_s, until_ns, NULL);
    sim_run_until(s, until_ns);

    be_calm(s);
    sim_run_until(s, s->now_ns + 45 * NS_PER_S); /* what fell returns */
    for (uint32_t i = 0; i < s->n_hosts; i++) {
        host_start(s, i);
        client_worker(s, 0, BALLAST__METHOD__METHOD_WORKER_RESUME, s->hosts[i].name);
    }
    char why[256] = "";
    uint64_t limit_ns = s->now_ns + CALM_S_MAX * NS_PER_S;
    while (!*s->failure && !check_is_settled(s, why, sizeof why)) {
        if (s->now_ns >= limit_ns)
            sim_fail(s, "not settled after %d s without faults: %s", CALM_S_MAX, why);
        sim_run_until(s, s->now_ns + 937 * NS_PER_MS); /* not in step with heartbeats */
    }
    return *s->failure ? -1 : 0;
}
