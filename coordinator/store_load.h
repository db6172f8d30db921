/* store_load.h - expert load over time: reports in, coarser windows out of them, old ones away
 *
 * Raw reports are kept for 10 min, sums of 10 s for 1 h, of 1 min for 1 day, of 1 h for 90 days,
 * and one sum of the whole job. Coarser windows keep the sum of every expert, and the least and
 * the most imbalance of a report in them; the least and most tokens of an expert add nothing that
 * a plan or a person would use, and would triple the file. */
#ifndef COORDINATOR_STORE_LOAD_H
#define COORDINATOR_STORE_LOAD_H

#include "coordinator/store_parts.h"

enum load_level { LOAD_RAW, LOAD_10S, LOAD_1M, LOAD_1H, LOAD_JOB };

/* A row of load_windows, without its counts. */
struct load_row {
    int64_t  id, at_ns; /* of its newest report */
    uint64_t first_step, last_step, n_steps, n_reports;
    uint32_t attempt, placement_epoch, n_nodes, n_experts;
    double   device_imbalance; /* mean of its reports; NaN: not known */
};

/* The rows of a statement over LOAD_COLUMNS; gives *out_rows, freed with free() also on failure. */
int load_rows_read(sqlite3_stmt *s, struct load_row **out_rows, size_t *out_n, struct err *err);

/* The job's newest report. 1: it is in *out; 0: there is none; negative: failed. */
int load_row_newest(struct store_tables *t, job_id job, struct load_row *out, struct err *err);

/* Sums of counts, per layer. All zero is empty; ended with load_sums_fini. */
struct load_sums {
    uint32_t  n_experts; /* set it first */
    uint64_t *tokens[LAYERS_MAX]; /* (n_experts), NULL: the layer was in no window */
    double    imbalance_min[LAYERS_MAX], imbalance_max[LAYERS_MAX];
    uint64_t  rerouted[LAYERS_MAX], dropped[LAYERS_MAX];
};

/* Adds a window's counts; layer -1: of all. */
int  load_sums_add(struct store_tables *t, const struct load_row *w, int32_t layer,
                   struct load_sums *sums, struct err *err);
void load_sums_fini(struct load_sums *s);

/* Inside a transaction of the caller: a report's row and counts, unless one as new is there. Its
 * time is kept within what was stored before and now. */
int load_write(struct store_tables *t, const struct turn_load *load, int64_t now_ns,
               struct err *err);

/* Sums up what is complete by now and deletes what is too old, a bounded part of it in one
 * transaction. *out_more: there was more to do than that; *out_any: time alone will make work. */
int load_tend(struct store_tables *t, int64_t now_ns, bool *out_more, bool *out_any,
              struct err *err);

#endif
