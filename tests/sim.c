/* sim.c - events, chance, the trace */
#include "tests/sim.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mix.h"

uint64_t sim_random(struct sim *s, uint64_t below)
{
    uint64_t z = mix_next(&s->random);
    return below ? z % below : z;
}

bool sim_chance(struct sim *s, double p)
{
    return p > 0 && mix_unit(sim_random(s, 0)) < p;
}

void sim_say(struct sim *s, const char *format, ...)
{
    if (!s->keeps_trace)
        return;
    char line[512];
    int n = snprintf(line, sizeof line, "[%8.3f] ", (double)s->now_ns / NS_PER_S);
    va_list args;
    va_start(args, format);
    vsnprintf(line + n, sizeof line - (size_t)n - 1, format, args);
    va_end(args);
    strcat(line, "\n");
    size_t length = strlen(line);
    while (s->n_trace + length + 1 > s->n_trace_alloc) {
        s->n_trace_alloc = s->n_trace_alloc ? 2 * s->n_trace_alloc : 4096;
        s->trace = xrealloc(s->trace, s->n_trace_alloc);
    }
    memcpy(s->trace + s->n_trace, line, length + 1);
    s->n_trace += length;
}

void sim_fail(struct sim *s, const char *format, ...)
{
    if (*s->failure)
        return; /* the first one counts */
    va_list args;
    va_start(args, format);
    vsnprintf(s->failure, sizeof s->failure, format, args);
    va_end(args);
    sim_say(s, "FAILURE: %s", s->failure);
}

/* ---- events: a heap by time, then by the order in which they were made -------------------- */

static bool is_before(const struct sim_event *a, const struct sim_event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void swap(struct sim_event *a, struct sim_event *b)
{
    struct sim_event t = *a;
    *a = *b;
    *b = t;
}

void sim_at(struct sim *s, uint64_t at_ns, void (*run)(struct sim *, struct sim_event *),
            uint64_t a, uint64_t b, void *data)
{
    s->heap = xgrow(s->heap, s->n_heap, &s->n_heap_alloc, sizeof *s->heap);
    size_t i = s->n_heap++;
    s->heap[i] = (struct sim_event){
        .at_ns = at_ns > s->now_ns ? at_ns : s->now_ns, .order = s->next_order++, .run = run,
        .a = a, .b = b, .data = data};
    for (; i && is_before(&s->heap[i], &s->heap[(i - 1) / 2]); i = (i - 1) / 2)
        swap(&s->heap[i], &s->heap[(i - 1) / 2]);
}

static struct sim_event pop(struct sim *s)
{
    struct sim_event first = s->heap[0];
    s->heap[0] = s->heap[--s->n_heap];
    for (size_t i = 0;;) {
        size_t least = i;
        for (size_t child = 2 * i + 1; child <= 2 * i + 2 && child < s->n_heap; child++)
            if (is_before(&s->heap[child], &s->heap[least]))
                least = child;
        if (least == i)
            break;
        swap(&s->heap[i], &s->heap[least]);
        i = least;
    }
    return first;
}

void sim_run_until(struct sim *s, uint64_t at_ns)
{
    while (!*s->failure && s->n_heap && s->heap[0].at_ns <= at_ns) {
        struct sim_event e = pop(s);
        s->now_ns = e.at_ns;
        s->counts.n_events++;
        e.run(s, &e);
        free(e.data);
    }
    if (!*s->failure)
        s->now_ns = at_ns;
}

/* ---- life --------------------------------------------------------------------------------- */

static struct coord_config quick_config(void)
{
    struct coord_config c = coord_config_default();
    c.lost_floor_ns = 4 * NS_PER_S;
    c.restart_grace_ns = 6 * NS_PER_S;
    c.fence_ns = 15 * NS_PER_S;
    c.backoff_cap_ns = 8 * NS_PER_S;
    c.start_timeout_ns = 60 * NS_PER_S;
    c.stop_grace_ns = 2 * NS_PER_S;
    c.prepare_timeout_ns = 3 * NS_PER_S;
    c.checkpoint_grace_ns = 5 * NS_PER_S;
    c.pause_grace_ns = 10 * NS_PER_S;
    c.version = "sim";
    return c;
}

struct sim *sim_create(uint64_t seed, uint32_t n_hosts, uint32_t n_clients)
{
    struct sim *s = xcalloc(1, sizeof *s);
    s->seed = s->random = seed;
    s->now_ns = NS_PER_S; /* no time is 0 */
    s->config = quick_config();
    s->net = (struct sim_net){.delay_ns = NS_PER_MS};
    s->commit_delay_ns = NS_PER_MS;
    s->load_ns = s->step_ns = NS_PER_S;
    s->n_hosts = n_hosts;
    s->n_clients = n_clients;
    s->next_peer = s->next_epoch = 1;
    s->store.shadow = coord_create(&s->config);
    for (uint32_t i = 0; i < n_hosts; i++) {
        snprintf(s->hosts[i].name, sizeof s->hosts[i].name, "w%u", i);
        snprintf(s->hosts[i].node, sizeof s->hosts[i].node, "n%u", i / 3);
    }
    for (uint32_t i = 0; i < n_clients; i++)
        s->endpoints[SIM_HOSTS_MAX + i] = (struct sim_endpoint){.is_up = true, .life = 1};
    return s;
}

void sim_destroy(struct sim *s)
{
    if (!s)
        return;
    coord_sim_fini(s);
    host_sim_fini(s);
    for (size_t i = 0; i < s->n_heap; i++)
        free(s->heap[i].data);
    for (size_t i = 0; i < s->n_ops; i++)
        protobuf_c_message_free_unpacked(s->ops[i].payload, NULL);
    free(s->heap);
    free(s->trace);
    free(s);
}
