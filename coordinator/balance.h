/* balance.h - when and how experts move: (loads, placement in force, costs) -> plan or nothing
 *
 * One layer at a time; layers do not wait for each other. Pure: no clock, no I/O, and the same
 * calls give the same plans. */
#ifndef COORDINATOR_BALANCE_H
#define COORDINATOR_BALANCE_H

#include "common/placement.h"
#include "coordinator/forecast.h"
#include "coordinator/plan.h"

struct balance_policy {
    uint32_t n_nodes;          /* devices are dealt to nodes in order; divides their number */
    const double *speed;       /* (n_devices) measured, relative; NULL for equal ones; kept */
    double   horizon_windows;  /* how long a placement is expected to last */
    double   min_gain;         /* of the layer's time, below which nothing moves */
    uint32_t cooldown_windows; /* after a change of the layer */
    double   risk;             /* standard errors by which the gain must be sure */
    double   window_s;         /* time of a window in this layer's experts, if all were even */
    double   hidden_share;     /* of a move's time that training does not feel, 0..1 */
    struct plan_costs costs;
    bool     is_known;         /* the newest window is what comes again: balance it exactly */
    bool     is_brief;         /* layers are many and large: what seldom wins is not tried */
    uint32_t effort_us;        /* about; counted in work, not by a clock */
    uint64_t seed;
};

/* What holds where nothing is said: costs of a 33 M parameter expert in bf16. */
struct balance_policy balance_defaults(void);

enum balance_kind {
    BALANCE_STAY,
    BALANCE_COPIES, /* homes stay, other copies come, go or move */
    BALANCE_STEPS,  /* single swaps, each of which pays */
    BALANCE_FRESH,  /* placed anew, then renamed to stay near */
    BALANCE_GIVEN,  /* a person's */
    BALANCE_KINDS
};

struct balance_verdict {
    enum balance_kind kind;
    double   ratio_before, ratio_after; /* max over mean time expected, staying and with the plan */
    double   gain, cost, risk; /* over the horizon, in windows of the layer's even time */
    uint32_t n_moves, n_rounds;
    uint64_t n_bytes;
    char     reason[192];      /* in words, also of staying */
};

struct balance;

/* Of one layer. policy is copied, its speed kept. */
struct balance *balance_create(uint32_t n_experts, uint32_t n_devices, uint32_t n_slots,
                               const struct balance_policy *policy);
void balance_destroy(struct balance *b);

/* What was measured since: see the policy's fields of these names. */
void balance_reprice(struct balance *b, double window_s, double horizon_windows,
                     const struct plan_costs *costs);

/* A window's tokens per expert, finite and >= 0, under the placement that was in force. Also tells
 * what the last plan really brought: a kind that lost is not proposed again for a while. */
void balance_observe(struct balance *b, const double *load, const struct placement *in_force);

/* Fills out (of the same shape, not in_force itself) with the placement to have from now on; it
 * equals in_force where the verdict is BALANCE_STAY, except that shares fit the forecast (if the
 * policy is brief that is left to balance_share). is_free:
 * nothing is in the slots yet, moves cost nothing. The caller says with balance_applied when the
 * placement came into force. */
void balance_propose(struct balance *b, const struct placement *in_force, bool is_free,
                     struct placement *out, struct balance_verdict *verdict);
void balance_applied(struct balance *b, const struct placement *before,
                     const struct balance_verdict *verdict);

/* Shares that fit the forecast, which is after a window at least. */
void balance_share(const struct balance *b, struct placement *p);

/* What becomes of a placement from outside, of the same shape: slots and homes stay as in in_force
 * where its devices allow it, shares fit the forecast. The verdict is BALANCE_GIVEN, or
 * BALANCE_STAY where nothing differs. After a window at least. */
void balance_weigh(const struct balance *b, const struct placement *in_force,
                   struct placement *given, struct balance_verdict *verdict);

/* Gain of the last applied plan as far as seen, in windows of even time; false before the first
 * window after it. predicted: what the plan had promised for as many windows. */
bool balance_realised(const struct balance *b, double *out_realised, double *out_predicted);

const struct forecast *balance_forecast(const struct balance *b);

#endif
