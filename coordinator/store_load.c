/* store_load.c - a report's rows, and the windows they become
 *
 * A window is summed up when its time is over, from the windows one level below: each count is
 * written about 1.1 times in all. Its parts are deleted later, all in one transaction with the
 * mark that it now stands for them, so that every token is always covered exactly once. */
#include "coordinator/store_load.h"

#include <stdlib.h>

#include "coordinator/store_bind.h"
#include "coordinator/store_counts.h"

#define HOUR_NS (3600 * (int64_t)NS_PER_S)

/* 0: single reports, and the sum of the job. */
static const uint32_t load_level_seconds[] = {
    [LOAD_RAW] = 0, [LOAD_10S] = 10, [LOAD_1M] = 60, [LOAD_1H] = 3600, [LOAD_JOB] = 0,
};

/* How long windows of a level are kept once they were summed up. */
static const int64_t kept_ns[] = {
    [LOAD_RAW] = HOUR_NS / 6, [LOAD_10S] = HOUR_NS, [LOAD_1M] = 24 * HOUR_NS,
    [LOAD_1H] = 90 * 24 * HOUR_NS,
};

/* A worker's clock that is a little off is not believed; what it kept while nobody listened is. */
#define CLOCK_OFF_NS (120 * (int64_t)NS_PER_S)

/* Of one transaction of load_tend. */
enum { SUMS_MAX = 8, ROWS_DROPPED_MAX = 5000 };

/* ---- sums ------------------------------------------------------------------------------------ */

/* Of a statement over LOAD_COLUMNS. */
static struct load_row load_row_at(sqlite3_stmt *s)
{
    return (struct load_row){
        .id = sqlite3_column_int64(s, 0), .at_ns = sqlite3_column_int64(s, 1),
        .first_step = int_at(s, 2), .last_step = int_at(s, 3), .n_steps = int_at(s, 4),
        .n_reports = int_at(s, 5), .attempt = (uint32_t)int_at(s, 6),
        .placement_epoch = (uint32_t)int_at(s, 7), .n_nodes = (uint32_t)int_at(s, 8),
        .n_experts = (uint32_t)int_at(s, 9), .device_imbalance = real_at(s, 10),
    };
}

int load_rows_read(sqlite3_stmt *s, struct load_row **out_rows, size_t *out_n, struct err *err)
{
    struct load_row *rows = NULL;
    size_t n = 0;
    int rc;
    while ((rc = db_next(s, err)) > 0) {
        rows = xrealloc(rows, (n + 1) * sizeof *rows);
        rows[n++] = load_row_at(s);
    }
    *out_rows = rows;
    *out_n = n;
    return rc;
}

int load_row_newest(struct store_tables *t, job_id job, struct load_row *out, struct err *err)
{
    struct binder b = bind(t, S_READ_LOAD_NEWEST);
    put_int(&b, job);
    int rc = db_next(b.s, err);
    if (rc <= 0)
        return rc;
    *out = load_row_at(b.s);
    sqlite3_reset(b.s);
    return 1;
}

static void add_counts(struct load_sums *sums, uint32_t layer, uint32_t n_rows, sqlite3_stmt *s)
{
    uint32_t width = (uint32_t)int_at(s, 1);
    double least = sqlite3_column_double(s, 2), most = sqlite3_column_double(s, 3);
    size_t n_bytes = (size_t)sqlite3_column_bytes(s, 4);
    if (n_bytes != (size_t)n_rows * sums->n_experts * width)
        return; /* a damaged row costs its counts */
    if (!sums->tokens[layer]) {
        sums->tokens[layer] = xcalloc(sums->n_experts, sizeof *sums->tokens[layer]);
        sums->imbalance_min[layer] = least;
        sums->imbalance_max[layer] = most;
    }
    if (least < sums->imbalance_min[layer])
        sums->imbalance_min[layer] = least;
    if (most > sums->imbalance_max[layer])
        sums->imbalance_max[layer] = most;
    counts_add(sqlite3_column_blob(s, 4), width, n_rows, sums->n_experts, sums->tokens[layer]);
    sums->rerouted[layer] += int_at(s, 5);
    sums->dropped[layer] += int_at(s, 6);
}

int load_sums_add(struct store_tables *t, const struct load_row *w, int32_t layer,
                  struct load_sums *sums, struct err *err)
{
    struct binder b = bind(t, S_READ_LOAD_COUNTS);
    int rc;
    put_int(&b, (uint64_t)w->id);
    put_int(&b, (uint64_t)(int64_t)layer);
    while ((rc = db_next(b.s, err)) > 0)
        add_counts(sums, (uint32_t)int_at(b.s, 0), w->n_nodes ? w->n_nodes : 1, b.s);
    return rc;
}

void load_sums_fini(struct load_sums *s)
{
    for (size_t i = 0; i < LAYERS_MAX; i++)
        free(s->tokens[i]);
    *s = (struct load_sums){0};
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* What a window is of, in the order of all statements that set it. */
static void put_extent(struct binder *b, const struct load_row *w)
{
    put_int(b, (uint64_t)w->at_ns);
    put_int(b, w->first_step);
    put_int(b, w->last_step);
    put_int(b, w->n_steps);
    put_int(b, w->n_reports);
    put_int(b, w->attempt);
    put_int(b, w->placement_epoch);
}

static int write_window(struct store_tables *t, job_id job, enum load_level level,
                        struct load_row *w, struct err *err)
{
    struct binder b = bind(t, S_LOAD_WINDOW);
    put_int(&b, job);
    put_int(&b, level);
    put_extent(&b, w);
    put_int(&b, w->n_nodes);
    put_int(&b, w->n_experts);
    put_real(&b, w->device_imbalance);
    put_int(&b, level == LOAD_RAW);
    int rc = db_run(b.s, err);
    w->id = sqlite3_last_insert_rowid(t->stats);
    return rc;
}

/* Of a layer in a window. */
struct layer_counts {
    const uint64_t *counts; /* n */
    size_t   n;
    double   least, most;   /* imbalance */
    uint64_t rerouted, dropped;
};

static int write_counts(struct store_tables *t, int64_t window, uint32_t layer,
                        const struct layer_counts *c, struct err *err)
{
    uint32_t width = counts_width(c->counts, c->n);
    uint8_t *bytes = xcalloc(c->n, width);
    counts_pack(c->counts, c->n, width, bytes);
    struct binder b = bind(t, S_LOAD_COUNTS);
    put_int(&b, (uint64_t)window * LAYERS_MAX + layer);
    put_int(&b, width);
    put_real(&b, c->least);
    put_real(&b, c->most);
    put_blob(&b, bytes, c->n * width);
    put_int(&b, c->rerouted);
    put_int(&b, c->dropped);
    int rc = db_run(b.s, err);
    free(bytes);
    return rc;
}

static int write_sums(struct store_tables *t, int64_t window, const struct load_sums *sums,
                      struct err *err)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < LAYERS_MAX; i++)
        if (sums->tokens[i])
            rc = write_counts(t, window, i,
                              &(struct layer_counts){sums->tokens[i], sums->n_experts,
                                                     sums->imbalance_min[i],
                                                     sums->imbalance_max[i], sums->rerouted[i],
                                                     sums->dropped[i]},
                              err);
    return rc;
}

/* ---- a report -------------------------------------------------------------------------------- */

static int write_layer(struct store_tables *t, int64_t window, const Ballast__LoadReport *r,
                       const Ballast__LayerLoad *layer, uint64_t *scratch, struct err *err)
{
    uint64_t *sums = scratch + layer->n_tokens;
    memset(sums, 0, r->n_experts * sizeof *sums);
    for (size_t i = 0; i < layer->n_tokens; i++) {
        scratch[i] = layer->tokens[i];
        sums[i % r->n_experts] += layer->tokens[i];
    }
    double imbalance = counts_imbalance(sums, r->n_experts);
    return write_counts(t, window, layer->layer,
                        &(struct layer_counts){scratch, layer->n_tokens, imbalance, imbalance,
                                               layer->rerouted, layer->dropped},
                        err);
}

static int write_report(struct store_tables *t, const struct turn_load *load, int64_t at_ns,
                        struct err *err)
{
    const Ballast__LoadReport *r = load->report;
    struct load_row w = {
        .at_ns = at_ns, .first_step = r->first_step, .last_step = r->last_step,
        .n_steps = r->last_step - r->first_step + 1, .n_reports = 1, .attempt = r->attempt,
        .placement_epoch = r->placement_epoch, .n_nodes = r->n_nodes, .n_experts = r->n_experts,
        .device_imbalance = r->device_imbalance > 0 ? r->device_imbalance : (double)NAN,
    };
    int rc = write_window(t, load->job, LOAD_RAW, &w, err);
    uint64_t *scratch = xcalloc(((size_t)r->n_nodes + 1) * r->n_experts, sizeof *scratch);
    for (size_t i = 0; rc == 0 && i < r->n_layers; i++)
        rc = write_layer(t, w.id, r, r->layers[i], scratch, err);
    free(scratch);
    return rc;
}

int load_write(struct store_tables *t, const struct turn_load *load, int64_t now_ns,
               struct err *err)
{
    const Ballast__LoadReport *r = load->report;
    int64_t at_ns = r->at_ns > 0 && r->at_ns < now_ns - CLOCK_OFF_NS ? r->at_ns : now_ns;
    struct binder b = bind(t, S_READ_LOAD_MARK);
    put_int(&b, load->job);
    int rc = db_next(b.s, err);
    if (rc > 0) {
        uint64_t attempt = int_at(b.s, 0), last_step = int_at(b.s, 1);
        int64_t before_ns = sqlite3_column_int64(b.s, 2);
        sqlite3_reset(b.s);
        if (r->attempt < attempt || (r->attempt == attempt && r->last_step <= last_step))
            return 0;
        at_ns = at_ns > before_ns ? at_ns : before_ns;
    }
    if (rc < 0 || (rc = write_report(t, load, at_ns, err)) < 0)
        return rc;
    b = bind(t, S_LOAD_MARK);
    put_int(&b, load->job);
    put_int(&b, r->attempt);
    put_int(&b, r->last_step);
    put_int(&b, (uint64_t)at_ns);
    return db_run(b.s, err);
}

/* ---- summing up ------------------------------------------------------------------------------ */

static void add_window(struct load_row *to, const struct load_row *w)
{
    double reports = isnan(w->device_imbalance) ? 0 : (double)w->n_reports;
    double before = isnan(to->device_imbalance) ? 0 : (double)to->n_reports;
    if (reports + before > 0)
        to->device_imbalance = ((before > 0 ? before * to->device_imbalance : 0) +
                                (reports > 0 ? reports * w->device_imbalance : 0)) /
                               (reports + before);
    if (!to->n_reports || w->first_step < to->first_step)
        to->first_step = w->first_step;
    to->last_step = w->last_step > to->last_step ? w->last_step : to->last_step;
    to->at_ns = w->at_ns > to->at_ns ? w->at_ns : to->at_ns;
    to->n_steps += w->n_steps;
    to->n_reports += w->n_reports;
    to->attempt = w->attempt;
    to->placement_epoch = w->placement_epoch;
}

/* The job's own sum so far, if there is one. */
static int read_total(struct store_tables *t, job_id job, struct load_row *sum,
                      struct load_sums *sums, struct err *err)
{
    struct binder b = bind(t, S_READ_LOAD_TOTAL);
    put_int(&b, job);
    put_int(&b, sum->n_experts);
    int rc = db_next(b.s, err);
    if (rc <= 0)
        return rc;
    *sum = load_row_at(b.s);
    sqlite3_reset(b.s);
    return load_sums_add(t, sum, -1, sums, err);
}

static int update_total(struct store_tables *t, const struct load_row *w, struct err *err)
{
    struct binder b = bind(t, S_LOAD_TOTAL);
    put_int(&b, (uint64_t)w->id);
    put_extent(&b, w);
    put_real(&b, w->device_imbalance);
    return db_run(b.s, err);
}

static int set_parent(struct store_tables *t, int64_t window, int64_t parent, struct err *err)
{
    struct binder b = bind(t, S_LOAD_PARENT);
    put_int(&b, (uint64_t)window);
    put_int(&b, (uint64_t)parent);
    return db_run(b.s, err);
}

/* Makes the window of that level out of its parts, or adds them to the job's own. */
static int sum_up(struct store_tables *t, job_id job, enum load_level level,
                  const struct load_row *parts, size_t n_parts, struct err *err)
{
    struct load_row sum = {.n_experts = parts[0].n_experts, .device_imbalance = (double)NAN};
    struct load_sums *sums = xcalloc(1, sizeof *sums);
    sums->n_experts = sum.n_experts;
    int rc = level == LOAD_JOB ? read_total(t, job, &sum, sums, err) : 0;
    for (size_t i = 0; rc == 0 && i < n_parts; i++) {
        add_window(&sum, &parts[i]);
        rc = load_sums_add(t, &parts[i], -1, sums, err);
    }
    if (rc == 0)
        rc = sum.id ? update_total(t, &sum, err) : write_window(t, job, level, &sum, err);
    if (rc == 0)
        rc = write_sums(t, sum.id, sums, err);
    for (size_t i = 0; rc == 0 && i < n_parts; i++)
        rc = set_parent(t, parts[i].id, sum.id, err);
    load_sums_fini(sums);
    free(sums);
    return rc;
}

/* The oldest windows below `level` whose time is over become one: 1, or 0 if there are none. */
static int sum_up_next(struct store_tables *t, enum load_level level, int64_t now_ns,
                       struct err *err)
{
    int64_t bucket_ns = level == LOAD_JOB ? INT64_MAX
                                          : load_level_seconds[level] * (int64_t)NS_PER_S;
    struct binder b = bind(t, S_READ_LOAD_OPEN);
    put_int(&b, level - 1);
    put_int(&b, (uint64_t)(level == LOAD_JOB ? INT64_MAX : now_ns / bucket_ns * bucket_ns));
    int rc = db_next(b.s, err);
    if (rc <= 0)
        return rc;
    job_id job = int_at(b.s, 0);
    int64_t from_ns = sqlite3_column_int64(b.s, 1) / bucket_ns * bucket_ns;
    uint64_t n_experts = int_at(b.s, 2);
    sqlite3_reset(b.s);
    b = bind(t, S_READ_LOAD_BUCKET);
    put_int(&b, level - 1);
    put_int(&b, job);
    put_int(&b, (uint64_t)from_ns);
    put_int(&b, (uint64_t)(level == LOAD_JOB ? INT64_MAX : from_ns + bucket_ns));
    put_int(&b, n_experts);
    struct load_row *parts;
    size_t n_parts;
    if ((rc = load_rows_read(b.s, &parts, &n_parts, err)) == 0)
        rc = sum_up(t, job, level, parts, n_parts, err);
    free(parts);
    return rc < 0 ? rc : 1;
}

/* ---- retention ------------------------------------------------------------------------------- */

static int drop_window(struct store_tables *t, int64_t id, size_t *n_rows, struct err *err)
{
    struct binder b = bind(t, S_LOAD_DROP_COUNTS);
    put_int(&b, (uint64_t)id);
    int rc = db_run(b.s, err);
    *n_rows += 1 + (size_t)sqlite3_changes(t->stats);
    b = bind(t, S_LOAD_DROP);
    put_int(&b, (uint64_t)id);
    return rc < 0 ? rc : db_run(b.s, err);
}

/* The parts of one window of that level, if they are too old: 1, or 0 if there is none such. */
static int drop_parts(struct store_tables *t, enum load_level level, int64_t now_ns,
                      size_t *n_rows, struct err *err)
{
    struct load_row *parts = NULL;
    size_t n_parts = 0;
    struct binder b = bind(t, S_READ_LOAD_OLD);
    put_int(&b, level);
    put_int(&b, (uint64_t)(now_ns - kept_ns[level - 1]));
    int rc = db_next(b.s, err);
    if (rc <= 0)
        return rc;
    int64_t id = sqlite3_column_int64(b.s, 0);
    sqlite3_reset(b.s);
    b = bind(t, S_READ_LOAD_CHILDREN);
    put_int(&b, (uint64_t)id);
    while ((rc = db_next(b.s, err)) > 0) {
        parts = xrealloc(parts, (n_parts + 1) * sizeof *parts);
        parts[n_parts++] = (struct load_row){.id = sqlite3_column_int64(b.s, 0)};
    }
    for (size_t i = 0; rc == 0 && i < n_parts; i++)
        rc = drop_window(t, parts[i].id, n_rows, err);
    free(parts);
    b = bind(t, S_LOAD_COVER);
    put_int(&b, (uint64_t)id);
    return rc < 0 || (rc = db_run(b.s, err)) < 0 ? rc : 1;
}

static int drop_expired(struct store_tables *t, int64_t now_ns, size_t *n_rows, struct err *err)
{
    struct binder b = bind(t, S_READ_LOAD_EXPIRED);
    put_int(&b, (uint64_t)(now_ns - kept_ns[LOAD_1H]));
    int rc = db_next(b.s, err);
    if (rc <= 0)
        return rc;
    int64_t id = sqlite3_column_int64(b.s, 0);
    sqlite3_reset(b.s);
    return (rc = drop_window(t, id, n_rows, err)) < 0 ? rc : 1;
}

/* ---- tending --------------------------------------------------------------------------------- */

static int tend(struct store_tables *t, int64_t now_ns, bool *out_more, struct err *err)
{
    size_t n_sums = 0, n_rows = 0;
    int rc = 0;
    for (int level = LOAD_10S; rc >= 0 && level <= LOAD_JOB; level++)
        while (n_sums < SUMS_MAX && (rc = sum_up_next(t, level, now_ns, err)) > 0)
            n_sums++;
    for (int level = LOAD_10S; rc >= 0 && level <= LOAD_1H; level++)
        while (n_rows < ROWS_DROPPED_MAX && (rc = drop_parts(t, level, now_ns, &n_rows, err)) > 0)
            ;
    while (rc >= 0 && n_rows < ROWS_DROPPED_MAX &&
           (rc = drop_expired(t, now_ns, &n_rows, err)) > 0)
        ;
    *out_more = n_sums >= SUMS_MAX || n_rows >= ROWS_DROPPED_MAX;
    return rc < 0 ? rc : 0;
}

int load_tend(struct store_tables *t, int64_t now_ns, bool *out_more, bool *out_any,
              struct err *err)
{
    *out_more = *out_any = false;
    int rc = db_run(tables_statement(t, S_STATS_BEGIN), err);
    if (rc < 0)
        return rc;
    if ((rc = tend(t, now_ns, out_more, err)) == 0)
        rc = db_run(tables_statement(t, S_STATS_COMMIT), err);
    if (rc < 0) {
        db_run(tables_statement(t, S_STATS_ROLLBACK), NULL);
        return rc;
    }
    sqlite3_stmt *s = tables_statement(t, S_READ_LOAD_ANY);
    if ((rc = db_next(s, err)) > 0) {
        *out_any = true;
        sqlite3_reset(s);
    }
    return rc < 0 ? rc : 0;
}
