/* store_read_history.c - how even the load of experts and devices was, window by window
 *
 * Worked out beside the rows that it comes from: what an answer needs of a window is a few numbers
 * a layer, its counts would be megabytes. Commits wait meanwhile, hence the bounds. */
#include <stdlib.h>

#include "coordinator/device_load.h"
#include "coordinator/store_bind.h"
#include "coordinator/store_counts.h"
#include "coordinator/store_load.h"

/* Layers over all windows of one answer, each solved once; and its numbers. 5000 layers of 896
 * experts on 64 devices take 0.15 s, the reading of their counts included. */
enum { SOLVES_MAX = 5000, NUMBERS_MAX = 50000 };

struct history {
    struct store_tables *t;
    struct store_read *r;
    uint32_t n_experts;
    Ballast__Placement *placement; /* of `epoch`, in `arena`; NULL: experts are in order */
    int64_t  epoch;                /* -1: none was read yet */
    struct arena arena;
    size_t   n_solves, n_numbers;
};

static int by_time(const void *a, const void *b)
{
    const struct load_row *x = a, *y = b;
    return x->at_ns != y->at_ns ? (x->at_ns > y->at_ns ? 1 : -1)
         : x->id != y->id       ? (x->id > y->id ? 1 : -1) : 0;
}

/* Those of the asked span, oldest first; gives *out, freed with free(). */
static int list_windows(struct history *h, struct load_row **out, size_t *out_n)
{
    static const struct { int64_t seconds; enum load_level level; } spans[] = {
        [STORE_1M] = {60, LOAD_RAW}, [STORE_1H] = {3600, LOAD_1M}, [STORE_ALL] = {0, LOAD_1H},
    };
    struct store_read *r = h->r;
    struct load_row last;
    int rc = load_row_newest(h->t, r->job, &last, &r->err);
    if (rc <= 0)
        return rc;
    h->n_experts = last.n_experts;
    r->loads.last_step = last.last_step;
    if (r->window == STORE_LAST) {
        *out = xcalloc(1, sizeof **out);
        (*out)[(*out_n)++] = last;
        return 0;
    }
    int64_t seconds = spans[r->window].seconds;
    struct binder b = bind(h->t, S_READ_LOAD_SINCE);
    put_int(&b, r->job);
    put_int(&b, (uint64_t)(seconds ? last.at_ns - seconds * (int64_t)NS_PER_S : -1));
    put_int(&b, last.n_experts);
    put_int(&b, spans[r->window].level);
    rc = load_rows_read(b.s, out, out_n, &r->err);
    if (*out_n)
        qsort(*out, *out_n, sizeof **out, by_time);
    return rc;
}

static int placement_at(struct history *h, uint32_t epoch)
{
    if (h->epoch == (int64_t)epoch)
        return 0;
    arena_reset(&h->arena);
    h->placement = NULL;
    h->epoch = epoch;
    return epoch ? read_placement_of(h->t, h->r->job, epoch, &h->arena, &h->placement, &h->r->err)
                 : 0;
}

static int aux_loss_of(struct history *h, const struct load_row *w, double *out)
{
    struct binder b = bind(h->t, S_READ_AUX_LOSS);
    put_int(&b, h->r->job);
    put_int(&b, w->first_step);
    put_int(&b, w->last_step);
    int rc = db_next(b.s, &h->r->err);
    if (rc <= 0)
        return rc;
    *out = real_at(b.s, 0);
    sqlite3_reset(b.s);
    return 0;
}

static void fill_layers(struct history *h, const struct load_sums *sums, Ballast__LoadWindow *out)
{
    struct arena *a = &h->r->arena;
    uint32_t n_devices = device_load_n_devices(h->placement, h->r->spec);
    size_t n_layers = 0;
    for (uint32_t i = 0; i < LAYERS_MAX; i++)
        n_layers += sums->tokens[i] != NULL;
    out->layers = arena_alloc(a, n_layers * sizeof *out->layers);
    out->experts = arena_alloc(a, n_layers * sizeof *out->experts);
    out->devices = arena_alloc(a, n_layers * sizeof *out->devices);
    out->device_load = arena_alloc(a, n_devices * sizeof *out->device_load);
    for (uint32_t i = 0; i < LAYERS_MAX; i++) {
        if (!sums->tokens[i])
            continue;
        out->layers[out->n_layers++] = i;
        out->experts[out->n_experts++] = counts_imbalance(sums->tokens[i], h->n_experts);
        out->devices[out->n_devices++] =
            device_load_imbalance(h->placement, h->r->spec, i, sums->tokens[i], h->n_experts,
                                  out->device_load);
    }
    out->n_device_load = n_devices;
    double sum = 0;
    for (uint32_t d = 0; d < n_devices; d++)
        sum += out->device_load[d];
    for (uint32_t d = 0; d < n_devices; d++)
        out->device_load[d] = sum > 0 ? out->device_load[d] * n_devices / sum : 1;
    h->n_solves += n_layers;
    h->n_numbers += 3 * n_layers + n_devices;
}

static int push_window(struct history *h, const struct load_row *w)
{
    struct store_read *r = h->r;
    Ballast__LoadWindow *out = arena_alloc(&r->arena, sizeof *out);
    ballast__load_window__init(out);
    out->at_ns = w->at_ns;
    out->first_step = w->first_step;
    out->last_step = w->last_step;
    out->n_steps = w->n_steps;
    out->placement_epoch = w->placement_epoch;
    out->attempt = w->attempt;
    out->measured = w->device_imbalance;
    int rc = placement_at(h, w->placement_epoch);
    if (rc == 0)
        rc = aux_loss_of(h, w, &out->aux_loss);
    struct load_sums *sums = xcalloc(1, sizeof *sums);
    sums->n_experts = h->n_experts;
    if (rc == 0)
        rc = load_sums_add(h->t, w, r->layer, sums, &r->err);
    if (rc == 0)
        fill_layers(h, sums, out);
    load_sums_fini(sums);
    free(sums);
    if (rc == 0 && out->n_layers)
        PUSH(&r->arena, r->windows, r->n_windows, out);
    return rc;
}

static void reverse(struct store_read *r)
{
    for (size_t i = 0, j = r->n_windows; i + 1 < j; i++) {
        Ballast__LoadWindow *w = r->windows[i];
        r->windows[i] = r->windows[--j];
        r->windows[j] = w;
    }
}

int read_load_history(struct store_tables *t, struct store_read *r)
{
    struct history h = {.t = t, .r = r, .epoch = -1};
    struct load_row *windows = NULL;
    size_t n = 0;
    int rc = read_spec(t, r);
    if (rc == 0)
        rc = list_windows(&h, &windows, &n);
    while (rc == 0 && n && r->n_windows < r->limit && h.n_solves < SOLVES_MAX &&
           h.n_numbers < NUMBERS_MAX)
        rc = push_window(&h, &windows[--n]);
    r->is_truncated = n > 0;
    reverse(r);
    free(windows);
    arena_fini(&h.arena);
    return rc;
}
