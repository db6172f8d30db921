/* window.h - what the experts did over one window of steps, summed over all ranks
 *
 * Windows begin at multiples of their length, so that a window that is trained again after a
 * recovery is the same one. One is reported only if all of it was trained in this run and under
 * one placement. */
#ifndef WORKER_WINDOW_H
#define WORKER_WINDOW_H

#include "worker/model.h"
#include "worker/transfer.h"

struct window {
    uint32_t n_steps, n_layers, n_experts, n_devices, n_nodes, node, me;
    bool     is_whole;    /* so far */
    uint64_t n_added;     /* steps */
    int64_t *tokens;      /* (n_layers, n_experts) of this rank */
    int64_t *rerouted, *dropped; /* (n_layers), the same of choices beyond capacity */
    double   step_s, imbalance, expert_s, n_rows; /* sums over the steps */
    double   link_bytes, link_s; /* of all moves so far, of this rank */
    double  *sums;        /* what all ranks add up */
    double  *speed, *speed_before; /* (n_devices); before: of the window before, 0: not known */
    double  *agreed;      /* (n_devices) speeds that all ranks have; [0] 0: none stands out */
};

/* gang: the ranks' nodes. */
void window_init(struct window *w, const struct slots *slots, uint32_t n_steps,
                 const Ballast__Start *start);
void window_fini(struct window *w);

/* After step `step` (from 1). counters: of that step. */
void window_add(struct window *w, uint64_t step, const struct model_counters *counters,
                double step_s, double imbalance);
/* The steps from here to the next window's beginning are in no report. */
void window_break(struct window *w);
void window_moved(struct window *w, const struct transfer_result *moved);

/* Whether step ends a window that is to be reported. The same on all ranks. */
bool window_is_over(const struct window *w, uint64_t step);

/* bytes: of one expert. Sums over the ranks; *out on rank 0 has the window that ends with step,
 * freed with load_report__free_unpacked, and NULL elsewhere. Collective. coll NULL: what was added
 * is of all ranks already. */
int window_report(struct window *w, uint64_t step, const struct slots *slots, struct coll *coll,
                  struct shard_expert_bytes bytes, Ballast__LoadReport **out, struct err *err);

/* After window_report, the same on all ranks: (n_devices) relative speeds that stand out and last,
 * or NULL. Lives until the next window_report. */
const double *window_speeds(const struct window *w);

#endif
