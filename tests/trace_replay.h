/* trace_replay.h - a recorded trace of expert loads, lived through by one way to balance
 *
 * Virtual time: placed after window i, scored on window i + 1 with shares split anew. A window
 * that is not even costs what its heaviest device takes longer; moves cost their rounds. */
#ifndef TESTS_TRACE_REPLAY_H
#define TESTS_TRACE_REPLAY_H

#include "coordinator/balance.h"

struct trace {
    uint32_t n_windows, n_layers, n_experts;
    double  *load; /* (n_windows, n_layers, n_experts) */
};

/* CSV with the columns window, layer, expert, load, sorted, all from 0 but the layers. Ends the
 * program where the file is not like that. */
void trace_read(const char *path, struct trace *out);
void trace_fini(struct trace *t);

enum replay_kind { REPLAY_NONE, REPLAY_PEER, REPLAY_OURS, REPLAY_ORACLE, REPLAY_KINDS };

#define REPLAY_BORN 4 /* windows in which the routers of a new model find what they do */

struct replay {
    double   ratio;          /* max over mean, mean over windows and layers */
    double   ratio_born;     /* the same without the first REPLAY_BORN windows */
    uint32_t n_plans, n_moves;
    uint64_t n_bytes;
    double   uneven_s, move_s; /* of all layers */
    uint32_t n_losing;       /* windows in which a plan was behind what it replaced */
};

/* One spare slot per device; the oracle knows the next window and moves for nothing. */
void replay_run(const struct trace *t, enum replay_kind kind, uint32_t n_devices,
                const struct balance_policy *policy, struct replay *out);

#endif
