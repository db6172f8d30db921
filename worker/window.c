/* window.c - counts and prices of a window, one reduction at its end
 *
 * Counts are whole numbers and doubles hold them exactly. Prices are means: of a step over the
 * ranks, of a row over all rows. A device's speed is told only when it stands out and did so in
 * the window before as well, because a busy neighbour makes a noise of that size. */
#include "worker/window.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"

#define SPEED_SECONDS_MIN 0.2  /* of expert work of each device, in a window */
#define SPEED_SAME        0.05 /* two windows agree */
#define SPEED_SPREAD      0.10 /* below, devices are called equally fast */

enum { SUM_STEP_S, SUM_EXPERT_S, SUM_ROWS, SUM_LINK_BYTES, SUM_LINK_S, SUM_DEVICES };

static size_t n_counts(const struct window *w)
{
    return (size_t)w->n_layers * w->n_experts;
}

/* The five sums, (devices) seconds, (devices) rows, (layers) rerouted, (layers) dropped, then
 * (nodes, layers, experts) tokens. */
static size_t n_sums(const struct window *w)
{
    return SUM_DEVICES + 2 * (size_t)w->n_devices + 2 * (size_t)w->n_layers +
           w->n_nodes * n_counts(w);
}

static double *device_seconds(const struct window *w)
{
    return w->sums + SUM_DEVICES;
}

static double *device_rows(const struct window *w)
{
    return device_seconds(w) + w->n_devices;
}

static double *layers_rerouted(const struct window *w)
{
    return device_rows(w) + w->n_devices;
}

static double *layers_dropped(const struct window *w)
{
    return layers_rerouted(w) + w->n_layers;
}

static double *tokens_of(const struct window *w, uint32_t node)
{
    return layers_dropped(w) + w->n_layers + node * n_counts(w);
}

/* Nodes in the order in which the ranks name them. A report must fit a frame; where it would not
 * with all nodes, they count as one. */
static void find_nodes(struct window *w, const Ballast__Start *s)
{
    uint32_t *node = xcalloc(s->n_gang, sizeof *node);
    for (size_t i = 0; i < s->n_gang; i++) {
        size_t same = 0;
        while (strcmp(s->gang[same]->node, s->gang[i]->node) != 0)
            same++;
        node[i] = same < i ? node[same] : w->n_nodes++;
    }
    w->node = node[s->rank];
    free(node);
    if (w->n_nodes * n_counts(w) * 5 > BULK_BYTES_MAX / 2) {
        w->n_nodes = 1;
        w->node = 0;
    }
}

void window_init(struct window *w, const struct slots *slots, uint32_t n_steps,
                 const Ballast__Start *start)
{
    *w = (struct window){.n_steps = n_steps, .n_layers = slots->n_layers,
                         .n_experts = slots->n_experts, .n_devices = slots->n_devices,
                         .me = slots->me};
    find_nodes(w, start);
    w->tokens = xcalloc(n_counts(w), sizeof *w->tokens);
    w->rerouted = xcalloc(w->n_layers, sizeof *w->rerouted);
    w->dropped = xcalloc(w->n_layers, sizeof *w->dropped);
    w->sums = xcalloc(n_sums(w), sizeof *w->sums);
    w->speed = xcalloc(w->n_devices, sizeof *w->speed);
    w->speed_before = xcalloc(w->n_devices, sizeof *w->speed_before);
    w->agreed = xcalloc(w->n_devices, sizeof *w->agreed);
}

void window_fini(struct window *w)
{
    free(w->tokens);
    free(w->rerouted);
    free(w->dropped);
    free(w->sums);
    free(w->speed);
    free(w->speed_before);
    free(w->agreed);
    *w = (struct window){0};
}

static void begin(struct window *w)
{
    w->is_whole = true;
    w->n_added = 0;
    w->step_s = w->imbalance = w->expert_s = w->n_rows = 0;
    memset(w->tokens, 0, n_counts(w) * sizeof *w->tokens);
    memset(w->rerouted, 0, w->n_layers * sizeof *w->rerouted);
    memset(w->dropped, 0, w->n_layers * sizeof *w->dropped);
}

void window_add(struct window *w, uint64_t step, const struct model_counters *counters,
                double step_s, double imbalance)
{
    if (w->n_experts == 0)
        return;
    if ((step - 1) % w->n_steps == 0)
        begin(w);
    w->n_added++;
    w->step_s += step_s;
    w->imbalance += imbalance;
    w->expert_s += counters->expert_s;
    w->n_rows += (double)counters->n_rows;
    for (size_t i = 0; i < n_counts(w); i++)
        w->tokens[i] += counters->served[i];
    for (uint32_t l = 0; l < w->n_layers; l++) {
        w->rerouted[l] += counters->rerouted[l];
        w->dropped[l] += counters->dropped[l];
    }
}

void window_break(struct window *w)
{
    w->is_whole = false;
}

void window_moved(struct window *w, const struct transfer_result *moved)
{
    w->link_bytes += (double)moved->sent_bytes;
    w->link_s += moved->link_seconds;
}

bool window_is_over(const struct window *w, uint64_t step)
{
    return w->n_experts > 0 && w->is_whole && w->n_added == w->n_steps && step % w->n_steps == 0;
}

/* ---- the report ----------------------------------------------------------------------------- */

/* True if speeds are worth telling, in w->speed. */
static bool find_speeds(struct window *w)
{
    double mean = 0, slowest = INFINITY, fastest = 0;
    bool is_same = true;
    for (uint32_t g = 0; g < w->n_devices; g++) {
        bool is_known = device_seconds(w)[g] >= SPEED_SECONDS_MIN && device_rows(w)[g] > 0;
        w->speed[g] = is_known ? device_rows(w)[g] / device_seconds(w)[g] : 0;
        mean += w->speed[g] / w->n_devices;
    }
    for (uint32_t g = 0; g < w->n_devices; g++) {
        double speed = mean > 0 ? w->speed[g] / mean : 0;
        is_same = is_same && speed > 0 && fabs(w->speed_before[g] / speed - 1) <= SPEED_SAME;
        w->speed[g] = w->speed_before[g] = speed;
        slowest = fmin(slowest, speed);
        fastest = fmax(fastest, speed);
    }
    return is_same && fastest > (1 + SPEED_SPREAD) * slowest;
}

static void add_layers(const struct window *w, const struct slots *slots, Ballast__LoadReport *r)
{
    r->layers = xcalloc(w->n_layers, sizeof *r->layers);
    for (uint32_t l = 0; l < w->n_layers; l++) {
        if (!slots_is_sparse(slots, l))
            continue;
        Ballast__LayerLoad *load = xcalloc(1, sizeof *load);
        ballast__layer_load__init(load);
        load->layer = l;
        load->rerouted = (uint64_t)layers_rerouted(w)[l];
        load->dropped = (uint64_t)layers_dropped(w)[l];
        load->n_tokens = (size_t)w->n_nodes * w->n_experts;
        load->tokens = xcalloc(load->n_tokens, sizeof *load->tokens);
        for (uint32_t node = 0; node < w->n_nodes; node++)
            for (uint32_t e = 0; e < w->n_experts; e++) {
                double n = tokens_of(w, node)[(size_t)l * w->n_experts + e];
                load->tokens[(size_t)node * w->n_experts + e] = n < UINT32_MAX ? (uint32_t)n
                                                                               : UINT32_MAX;
            }
        r->layers[r->n_layers++] = load;
    }
}

static Ballast__LoadReport *make_report(struct window *w, uint64_t step, const struct slots *slots,
                                        uint32_t world, struct shard_expert_bytes bytes)
{
    Ballast__LoadReport *r = xcalloc(1, sizeof *r);
    ballast__load_report__init(r);
    r->first_step = step - w->n_steps + 1;
    r->last_step = step;
    r->n_nodes = w->n_nodes;
    r->n_experts = w->n_experts;
    r->placement_epoch = slots->epoch;
    r->step_s = w->sums[SUM_STEP_S] / ((double)world * w->n_steps);
    r->row_s = w->sums[SUM_ROWS] > 0 ? w->sums[SUM_EXPERT_S] / w->sums[SUM_ROWS] : 0;
    r->expert_bytes = bytes.weights;
    r->state_bytes = bytes.state;
    r->frozen_bytes = bytes.frozen;
    r->link_bytes_per_s = w->sums[SUM_LINK_S] > 0 ? w->sums[SUM_LINK_BYTES] / w->sums[SUM_LINK_S]
                                                  : 0;
    r->device_imbalance = w->imbalance / w->n_steps;
    r->at_ns = clock_wall_ns();
    if (find_speeds(w)) {
        r->n_speed = w->n_devices;
        r->speed = xmemdup(w->speed, w->n_devices * sizeof *r->speed);
    }
    add_layers(w, slots, r);
    return r;
}

/* Sums may differ in their last bits from rank to rank, shares must not: what rank 0 found is added
 * to zeros. */
static int agree_on_speeds(struct window *w, struct coll *coll, bool is_told, struct err *err)
{
    for (uint32_t g = 0; g < w->n_devices; g++)
        w->sums[g] = is_told ? w->speed[g] : 0;
    int rc = coll->ops->all_reduce_f64(coll, &coll->world_group, COLL_SUM, w->sums, w->n_devices,
                                       err);
    if (rc == 0)
        memcpy(w->agreed, w->sums, w->n_devices * sizeof *w->agreed);
    return rc;
}

static void fill_sums(struct window *w)
{
    memset(w->sums, 0, n_sums(w) * sizeof *w->sums);
    w->sums[SUM_STEP_S] = w->step_s;
    w->sums[SUM_EXPERT_S] = device_seconds(w)[w->me] = w->expert_s;
    w->sums[SUM_ROWS] = device_rows(w)[w->me] = w->n_rows;
    w->sums[SUM_LINK_BYTES] = w->link_bytes;
    w->sums[SUM_LINK_S] = w->link_s;
    for (size_t i = 0; i < n_counts(w); i++)
        tokens_of(w, w->node)[i] = (double)w->tokens[i];
    for (uint32_t l = 0; l < w->n_layers; l++) {
        layers_rerouted(w)[l] = (double)w->rerouted[l];
        layers_dropped(w)[l] = (double)w->dropped[l];
    }
}

int window_report(struct window *w, uint64_t step, const struct slots *slots, struct coll *coll,
                  struct shard_expert_bytes bytes, Ballast__LoadReport **out, struct err *err)
{
    fill_sums(w);
    if (!coll) {
        *out = make_report(w, step, slots, 1, bytes);
        return 0;
    }
    coll->layer = -1;
    int rc = coll->ops->all_reduce_f64(coll, &coll->world_group, COLL_SUM, w->sums, n_sums(w), err);
    if (rc < 0)
        return rc;
    Ballast__LoadReport *r = coll->rank == 0 ? make_report(w, step, slots, coll->world, bytes)
                                             : NULL;
    if ((rc = agree_on_speeds(w, coll, r && r->n_speed, err)) < 0) {
        if (r)
            ballast__load_report__free_unpacked(r, NULL);
        return rc;
    }
    *out = r;
    return 0;
}

const double *window_speeds(const struct window *w)
{
    return w->agreed[0] > 0 ? w->agreed : NULL;
}
