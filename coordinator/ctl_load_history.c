/* ctl_load_history.c - how even experts and devices were, window by window: table, plot, shades */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "coordinator/json_of.h"

#define WINDOWS_DEFAULT 60u
#define PLOT_ROWS       10u
#define MARGIN          6u /* of plot and heat map, left */

/* Over the layers of a window. */
struct evenness {
    double   mean, worst;
    uint32_t worst_layer;
};

static struct evenness evenness_of(const Ballast__LoadWindow *w, const double *imbalance)
{
    struct evenness out = {0, -1, 0};
    for (size_t i = 0; i < w->n_layers; i++) {
        out.mean += imbalance[i] / (double)w->n_layers;
        if (imbalance[i] > out.worst) {
            out.worst = imbalance[i];
            out.worst_layer = w->layers[i];
        }
    }
    return out;
}

static bool is_whole(const Ballast__ExpertsReply *r)
{
    for (size_t i = 0; i < r->n_windows; i++) {
        const Ballast__LoadWindow *w = r->windows[i];
        if (!w->n_layers || w->n_experts != w->n_layers || w->n_devices != w->n_layers)
            return false;
    }
    return true;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void add_evenness(struct ctl_table *t, const Ballast__LoadWindow *w, const double *imbalance)
{
    struct evenness e = evenness_of(w, imbalance);
    ctl_table_number(t, "%.2f", e.mean);
    if (e.worst >= 0)
        ctl_table_cell(t, "%.2f (%" PRIu32 ")", e.worst, e.worst_layer);
    else
        ctl_table_cell(t, "-");
}

static bool has_aux(const Ballast__ExpertsReply *r)
{
    bool has = false;
    for (size_t i = 0; i < r->n_windows; i++)
        has = has || isfinite(r->windows[i]->aux_loss);
    return has;
}

static void show_table(const struct ctl *c, const Ballast__ExpertsReply *r)
{
    /* The last only where the routers have such a loss. */
    static const struct ctl_column columns[] = {
        {"STEPS", false}, {"AT", false}, {"PLACEMENT", true}, {"EXPERTS", true}, {"WORST", true},
        {"DEVICES", true}, {"WORST", true}, {"RANKS", true}, {"AUX", true},
    };
    bool aux = has_aux(r);
    struct ctl_table t = {.columns = columns,
                          .n_columns = sizeof columns / sizeof *columns - !aux};
    for (size_t i = 0; i < r->n_windows; i++) {
        const Ballast__LoadWindow *w = r->windows[i];
        char at[CLOCK_STAMP_BYTES];
        clock_stamp(w->at_ns, at);
        ctl_table_cell(&t, "%" PRIu64 "-%" PRIu64, w->first_step, w->last_step);
        ctl_table_cell(&t, "%.5s %.8s", at + 5, at + 11); /* month, day and time */
        ctl_table_cell(&t, "%" PRIu32, w->placement_epoch);
        add_evenness(&t, w, w->experts);
        add_evenness(&t, w, w->devices);
        ctl_table_number(&t, "%.2f", w->measured);
        if (aux)
            ctl_table_number(&t, "%.4f", w->aux_loss);
    }
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
}

/* ---- over time: a column of the terminal is one window, or several --------------------------- */

static size_t n_cells_of(const Ballast__ExpertsReply *r)
{
    size_t n = ctl_terminal_width() - MARGIN - 1;
    return r->n_windows < n ? r->n_windows : n;
}

/* The windows that share a cell. */
static void share_of(const Ballast__ExpertsReply *r, size_t cell, size_t *out_from, size_t *out_to)
{
    size_t n = n_cells_of(r);
    *out_from = cell * r->n_windows / n;
    *out_to = (cell + 1) * r->n_windows / n;
}

/* Of the windows of a cell, the largest mean over layers; -1: not known. */
static double height_of(const Ballast__ExpertsReply *r, size_t cell, bool of_devices)
{
    size_t from, to;
    double most = -1;
    share_of(r, cell, &from, &to);
    for (size_t i = from; i < to; i++) {
        const Ballast__LoadWindow *w = r->windows[i];
        double x = evenness_of(w, of_devices ? w->devices : w->experts).mean;
        most = x > most ? x : most;
    }
    return most;
}

static size_t row_of(double x, double top)
{
    double row = (x - 1) / (top - 1) * (PLOT_ROWS - 1);
    return row > 0 ? (size_t)lround(row) : 0;
}

static bool moved_in(const Ballast__ExpertsReply *r, size_t cell)
{
    size_t from, to;
    bool moved = false;
    share_of(r, cell, &from, &to);
    for (size_t i = from > 0 ? from : 1; i < to; i++)
        moved = moved || r->windows[i]->placement_epoch != r->windows[i - 1]->placement_epoch;
    return moved;
}

static char mark_at(const Ballast__ExpertsReply *r, size_t cell, size_t row, double top)
{
    double experts = height_of(r, cell, false), devices = height_of(r, cell, true);
    bool e = experts >= 0 && row_of(experts, top) == row;
    bool d = devices >= 0 && row_of(devices, top) == row;
    return e && d ? '*' : e ? 'e' : d ? 'd' : ' ';
}

static void show_plot(const struct ctl *c, const Ballast__ExpertsReply *r)
{
    size_t n = n_cells_of(r);
    double top = 1.1;
    for (size_t i = 0; i < n; i++)
        top = fmax(top, fmax(height_of(r, i, false), height_of(r, i, true)));
    if (!c->no_header)
        printf("max over mean: e of experts, d of devices, * both; ^ placement changed\n");
    for (size_t row = PLOT_ROWS; row-- > 0;) {
        printf("%5.2f|", 1 + (top - 1) * (double)row / (PLOT_ROWS - 1));
        for (size_t i = 0; i < n; i++)
            putchar(mark_at(r, i, row, top));
        putchar('\n');
    }
    printf("%*s", (int)MARGIN, "");
    for (size_t i = 0; i < n; i++)
        putchar(moved_in(r, i) ? '^' : '-');
    putchar('\n');
}

/* A row is a device; a cell shows the heaviest of the windows that share it. */
static void show_map(const struct ctl *c, const Ballast__ExpertsReply *r)
{
    size_t n_devices = 0;
    for (size_t i = 0; i < r->n_windows; i++)
        n_devices = r->windows[i]->n_device_load > n_devices ? r->windows[i]->n_device_load
                                                             : n_devices;
    if (!c->no_header)
        printf("DEVICE steps %" PRIu64 " to %" PRIu64 ", its load over the mean%s\n",
               r->windows[0]->first_step, r->windows[r->n_windows - 1]->last_step,
               c->has_layer ? "" : ", all layers together");
    for (size_t d = 0; d < n_devices; d++) {
        printf("%5zu ", d);
        for (size_t cell = 0; cell < n_cells_of(r); cell++) {
            size_t from, to;
            double most = 0;
            share_of(r, cell, &from, &to);
            for (size_t i = from; i < to; i++)
                if (d < r->windows[i]->n_device_load)
                    most = fmax(most, r->windows[i]->device_load[d]);
            ctl_shade(c, most);
        }
        putchar('\n');
    }
    if (!c->no_header)
        ctl_shade_legend(c);
}

/* ---- all ------------------------------------------------------------------------------------- */

/* Only the sign rule goes by the rate. */
static void say_router(const struct ctl *c, const Ballast__ExpertsReply *r)
{
    char rate[32] = "", aux[128] = "no auxiliary loss";
    if (!strcmp(r->bias_update, "sign"))
        snprintf(rate, sizeof rate, " at %g", r->bias_update_rate);
    if (r->aux_loss_weight > 0)
        snprintf(aux, sizeof aux, "auxiliary loss %g (%s)", r->aux_loss_weight, r->aux_scope);
    ctl_hint(c, "router: bias %s%s, %s", r->bias_update, rate, aux);
}

static void show(const struct ctl *c, const Ballast__ExpertsReply *r)
{
    bool is_terminal = isatty(STDOUT_FILENO);
    if (c->plot || is_terminal)
        show_plot(c, r);
    if (c->heatmap)
        show_map(c, r);
    if (is_terminal)
        putchar('\n');
    if (is_terminal || !(c->plot || c->heatmap))
        show_table(c, r);
    say_router(c, r);
    if (r->truncated)
        ctl_hint(c, "older windows are left out; -c N shows up to %u, --window all coarser ones",
                 LOAD_WINDOWS_MAX);
}

int ctl_load_history(struct ctl *c, Ballast__ExpertsRequest *request)
{
    const ProtobufCMessage *message;
    uint64_t n = c->count ? c->count : WINDOWS_DEFAULT;
    request->history = n < LOAD_WINDOWS_MAX ? (uint32_t)n : LOAD_WINDOWS_MAX;
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_EXPERTS, &request->base, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__ExpertsReply *r = (const Ballast__ExpertsReply *)message;
    if (!r->n_windows || !is_whole(r))
        return ctl_fail(c, CTL_PROTOCOL, "the coordinator's answer has no windows, or some that "
                        "are not whole");
    if (ctl_is_json(c))
        ctl_json_one(c, "LoadHistory", 0, json_of_load_history(r));
    else
        show(c, r);
    return CTL_OK;
}
