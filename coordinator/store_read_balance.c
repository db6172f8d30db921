/* store_read_balance.c - expert load over a window, the placement of an epoch, what plans became */
#include <errno.h>
#include <stdlib.h>

#include "coordinator/store_bind.h"
#include "coordinator/store_counts.h"
#include "coordinator/store_load.h"

/* ---- load ------------------------------------------------------------------------------------ */

static void push_layer(struct store_read *r, const struct load_sums *sums, uint32_t layer,
                       uint64_t n_steps)
{
    Ballast__LayerExperts *out = arena_alloc(&r->arena, sizeof *out);
    ballast__layer_experts__init(out);
    out->layer = layer;
    out->window_steps = n_steps;
    out->n_tokens = sums->n_experts;
    out->tokens = arena_memdup(&r->arena, sums->tokens[layer],
                               sums->n_experts * sizeof *out->tokens);
    out->imbalance_experts = counts_imbalance(out->tokens, out->n_tokens);
    out->rerouted = sums->rerouted[layer];
    out->dropped = sums->dropped[layer];
    PUSH(&r->arena, r->loads.layers, r->loads.n_layers, out);
}

/* Windows that cover every token since then once, none finer than that level where a coarser one
 * will do. */
static int sum_since(struct store_tables *t, struct store_read *r, const struct load_row *last,
                     int64_t from_ns, enum load_level level, struct load_sums *sums,
                     uint64_t *n_steps)
{
    struct load_row *windows;
    size_t n;
    struct binder b = bind(t, S_READ_LOAD_SINCE);
    int rc;
    put_int(&b, r->job);
    put_int(&b, (uint64_t)from_ns);
    put_int(&b, last->n_experts);
    put_int(&b, level);
    rc = load_rows_read(b.s, &windows, &n, &r->err);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        rc = load_sums_add(t, &windows[i], r->layer, sums, &r->err);
        *n_steps += windows[i].n_steps;
        if (windows[i].first_step < r->loads.first_step)
            r->loads.first_step = windows[i].first_step;
    }
    free(windows);
    return rc;
}

static int sum_window(struct store_tables *t, struct store_read *r, enum store_window window)
{
    struct load_row last;
    int rc = load_row_newest(t, r->job, &last, &r->err);
    if (rc <= 0)
        return rc;
    struct load_sums *sums = xcalloc(1, sizeof *sums);
    uint64_t n_steps = 0;
    sums->n_experts = r->loads.n_experts = last.n_experts;
    r->loads.first_step = last.first_step;
    r->loads.last_step = last.last_step;
    r->loads.placement_epoch = last.placement_epoch;
    if (window == STORE_LAST) {
        n_steps = last.n_steps;
        rc = load_sums_add(t, &last, r->layer, sums, &r->err);
    } else if (window == STORE_1M) {
        rc = sum_since(t, r, &last, last.at_ns - 60 * (int64_t)NS_PER_S, LOAD_RAW, sums, &n_steps);
    } else if (window == STORE_1H) {
        rc = sum_since(t, r, &last, last.at_ns - 3600 * (int64_t)NS_PER_S, LOAD_1M, sums,
                       &n_steps);
    } else {
        rc = sum_since(t, r, &last, -1, LOAD_JOB, sums, &n_steps);
    }
    for (uint32_t i = 0; rc == 0 && i < LAYERS_MAX; i++)
        if (sums->tokens[i])
            push_layer(r, sums, i, n_steps);
    load_sums_fini(sums);
    free(sums);
    return rc;
}

/* ---- placements ------------------------------------------------------------------------------ */

int read_placement_of(struct store_tables *t, job_id job, int64_t epoch, struct arena *a,
                      Ballast__Placement **out, struct err *err)
{
    struct binder b = bind(t, S_READ_PLACEMENT);
    put_int(&b, job);
    put_int(&b, (uint64_t)epoch);
    int rc = db_next(b.s, err);
    if (rc < 0)
        return rc;
    *out = NULL;
    if (rc == 0)
        return 0;
    Ballast__Record *record = read_record_at(b.s, a);
    sqlite3_reset(b.s);
    if (!record || record->what_case != BALLAST__RECORD__WHAT_PLACEMENT ||
        !record->placement->placement)
        return err_set(err, -EBADMSG, "a placement of the log is not readable");
    *out = record->placement->placement;
    return 0;
}

int read_loads(struct store_tables *t, struct store_read *r)
{
    int rc = sum_window(t, r, r->window);
    if (rc == 0)
        rc = read_placement_of(t, r->job, -1, &r->arena, &r->placement, &r->err);
    return rc < 0 ? rc : read_spec(t, r);
}

/* ---- plans ----------------------------------------------------------------------------------- */

static Ballast__RebalanceEntry *entry_at(sqlite3_stmt *s, struct arena *a)
{
    Ballast__RebalanceEntry *e = arena_alloc(a, sizeof *e);
    ballast__rebalance_entry__init(e);
    e->epoch = (uint32_t)int_at(s, 0);
    e->state = text_at(s, 1, a);
    e->at_ns = sqlite3_column_int64(s, 2);
    e->at_step = int_at(s, 3);
    e->automatic = sqlite3_column_int(s, 4);
    e->cause = text_at(s, 5, a);
    e->n_moves = (uint32_t)int_at(s, 6);
    e->bytes = int_at(s, 7);
    e->pause_s = real_at(s, 8);
    e->imbalance_before = real_at(s, 9);
    e->imbalance_predicted = real_at(s, 10);
    e->imbalance_after = real_at(s, 11);
    e->predicted_gain_s = real_at(s, 12);
    e->realised_gain_s = real_at(s, 13);
    e->reason = text_at(s, 14, a);
    e->n_stages = (uint32_t)int_at(s, 15);
    return e;
}

int read_plans(struct store_tables *t, struct store_read *r)
{
    struct binder b = bind(t, S_READ_PLANS);
    int rc;
    put_int(&b, r->job);
    put_int(&b, r->limit);
    while ((rc = db_next(b.s, &r->err)) > 0) {
        Ballast__RebalanceEntry *e = entry_at(b.s, &r->arena);
        PUSH(&r->arena, r->entries, r->n_entries, e);
    }
    if (rc < 0)
        return rc;
    b = bind(t, S_READ_AUTO);
    put_int(&b, r->job);
    if ((rc = db_next(b.s, &r->err)) > 0) {
        r->is_auto_on = sqlite3_column_int(b.s, 0);
        sqlite3_reset(b.s);
    }
    return rc < 0 ? rc : 0;
}

int read_placement(struct store_tables *t, struct store_read *r)
{
    int64_t epoch = r->is_newest ? -1 : (int64_t)r->from;
    int rc = read_placement_of(t, r->job, epoch, &r->arena, &r->placement, &r->err);
    if (rc == 0 && epoch > 0 && !r->placement)
        return err_set(&r->err, -ENOENT, "job %lu never had placement %ld", (unsigned long)r->job,
                       (long)epoch);
    r->layer = -1;
    if (rc == 0)
        rc = sum_window(t, r, STORE_LAST); /* which layers are sparse, and how many experts */
    if (rc == 0)
        rc = read_plans(t, r);
    return rc < 0 ? rc : read_spec(t, r);
}
