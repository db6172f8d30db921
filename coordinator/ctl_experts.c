/* ctl_experts.c - tokens per expert: hot and cold ones as a table, all of them as a heat map */
#include "coordinator/ctl_list.h"
#include "coordinator/json_of.h"
#include "proto/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define SHOWN 3 /* hot and cold experts of a layer */

static double sum_of(const Ballast__LayerExperts *l)
{
    double sum = 0;
    for (size_t e = 0; e < l->n_tokens; e++)
        sum += (double)l->tokens[e];
    return sum;
}

/* ---- the table ------------------------------------------------------------------------------- */

/* The next expert in order of load, that was not taken yet. */
static size_t take_next(const Ballast__LayerExperts *l, bool *is_taken, bool hottest)
{
    size_t best = SIZE_MAX;
    for (size_t e = 0; e < l->n_tokens; e++)
        if (!is_taken[e] && (best == SIZE_MAX || (hottest ? l->tokens[e] > l->tokens[best]
                                                          : l->tokens[e] < l->tokens[best])))
            best = e;
    if (best != SIZE_MAX)
        is_taken[best] = true;
    return best;
}

/* "12 3.4x, 7 2.9x": the expert, and its tokens over the mean. */
static struct list_value extremes(struct arena *a, const Ballast__LayerExperts *l, bool hottest)
{
    double mean = l->n_tokens ? sum_of(l) / (double)l->n_tokens : 0;
    const char *text = "";
    bool *is_taken = xcalloc(l->n_tokens + 1, sizeof *is_taken);
    for (size_t i = 0; i < SHOWN && i < l->n_tokens; i++) {
        size_t e = take_next(l, is_taken, hottest);
        text = arena_printf(a, "%s%s%zu %.2fx", text, i ? ", " : "", e,
                            mean > 0 ? (double)l->tokens[e] / mean : 0);
    }
    free(is_taken);
    return list_text(text);
}

#define COLUMN(NAME, EXPRESSION)                                                               \
    static struct list_value layer_##NAME(const void *row, struct arena *a)                    \
    {                                                                                          \
        const Ballast__LayerExperts *l = row;                                                  \
        return EXPRESSION;                                                                     \
    }

COLUMN(layer, list_count(a, l->layer))
COLUMN(imbalance, list_real(a, "%.2f", l->imbalance_experts))
COLUMN(devices, list_real(a, "%.2f", l->imbalance_devices))
COLUMN(hot, extremes(a, l, true))
COLUMN(cold, extremes(a, l, false))
COLUMN(tokens, list_real(a, "%.0f", sum_of(l)))
COLUMN(rerouted, list_count(a, l->rerouted))
COLUMN(dropped, list_count(a, l->dropped))
COLUMN(steps, list_count(a, l->window_steps))
COLUMN(experts, list_count(a, l->n_tokens))

static struct json *layer_json(const void *row);

/* Rerouted and dropped only of a job whose experts have a capacity. */
static const struct list_column layer_columns[] = {
    {"LAYER", LIST_NUMBER, LIST_ALWAYS, layer_layer, 0, false, NULL},
    {"IMBAL", LIST_NUMBER, LIST_ALWAYS, layer_imbalance, 0, false, NULL},
    {"DEVICES", LIST_NUMBER, LIST_ALWAYS, layer_devices, 0, false, NULL},
    {"HOT", LIST_TEXT, LIST_ALWAYS, layer_hot, 0, false, NULL},
    {"COLD", LIST_TEXT, LIST_ALWAYS, layer_cold, 0, false, NULL},
    {"TOKENS", LIST_NUMBER, LIST_ALWAYS, layer_tokens, 0, false, NULL},
    {"REROUTED", LIST_NUMBER, LIST_IF_ANY, layer_rerouted, 0, false, NULL},
    {"DROPPED", LIST_NUMBER, LIST_IF_ANY, layer_dropped, 0, false, NULL},
    {"STEPS", LIST_NUMBER, LIST_WIDE, layer_steps, 0, false, NULL},
    {"EXPERTS", LIST_NUMBER, LIST_WIDE, layer_experts, 0, false, NULL},
};
const struct ctl_list ctl_layer_list = {
    .kind = "ExpertList", .rows = "layers", .columns = layer_columns,
    .n_columns = sizeof layer_columns / sizeof *layer_columns, .name = "layer", .order = "layer",
    .json = layer_json,
};

/* ---- the heat map ---------------------------------------------------------------------------- */

/* Tokens over the mean, from a quarter to four times, in nine steps of equal ratio. */
enum { SHADES = 9 };
static const char letters[SHADES + 1] = " .:-=+*#@";
static const int colors[SHADES] = {17, 18, 25, 31, 37, 143, 179, 208, 196};

static size_t shade_of(double over_mean)
{
    double step = over_mean > 0 ? (log2(over_mean) + 2) / 4 * (SHADES - 1) : 0;
    return step < 0 ? 0 : step > SHADES - 1 ? SHADES - 1 : (size_t)lround(step);
}

static void print_shade(bool has_color, size_t shade)
{
    if (has_color)
        printf("\033[48;5;%dm \033[0m", colors[shade]);
    else
        putchar(letters[shade]);
}

void ctl_shade(const struct ctl *c, double over_mean)
{
    print_shade(ctl_wants_color(c), shade_of(over_mean));
}

void ctl_shade_legend(const struct ctl *c)
{
    printf("      1/4 of the mean ");
    for (size_t i = 0; i < SHADES; i++)
        print_shade(ctl_wants_color(c), i);
    printf(" 4 times the mean\n");
}

size_t ctl_terminal_width(void)
{
    struct winsize size;
    const char *columns_text = getenv("COLUMNS");
    long n = columns_text ? strtol(columns_text, NULL, 10) : 0;
    if (n <= 0 && isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0)
        n = size.ws_col;
    return n >= 40 && n <= 1000 ? (size_t)n : 80;
}

/* One row: a cell shows the hottest of the experts that share it. */
static void print_layer(const Ballast__LayerExperts *l, size_t n_cells, bool has_color)
{
    double mean = l->n_tokens ? sum_of(l) / (double)l->n_tokens : 0;
    printf("%5" PRIu32 " ", l->layer);
    for (size_t i = 0; i < n_cells && i < l->n_tokens; i++) {
        size_t from = i * l->n_tokens / n_cells, to = (i + 1) * l->n_tokens / n_cells;
        uint64_t most = 0;
        if (n_cells >= l->n_tokens) {
            from = i;
            to = i + 1;
        }
        for (size_t e = from; e < to; e++)
            most = l->tokens[e] > most ? l->tokens[e] : most;
        print_shade(has_color, shade_of(mean > 0 ? (double)most / mean : 0));
    }
    printf(" %.2f\n", l->imbalance_experts);
}

static void show_map(const struct ctl *c, const void *const *layers, size_t n)
{
    const Ballast__LayerExperts *first = n ? layers[0] : NULL;
    size_t width = ctl_terminal_width(), n_cells = width - 6 - 6;
    bool has_color = ctl_wants_color(c);
    size_t n_experts = first ? first->n_tokens : 0;
    if (!c->no_header) {
        printf("LAYER experts 0 to %zu%s, and max over mean\n", n_experts ? n_experts - 1 : 0,
               n_experts > n_cells ? ", the hottest of those that share a cell" : "");
    }
    for (size_t i = 0; i < n; i++)
        print_layer(layers[i], n_cells, has_color);
    if (!c->no_header)
        ctl_shade_legend(c);
}

/* ---- all ------------------------------------------------------------------------------------- */

static struct json *layer_json(const void *row)
{
    return json_of_layer_load(row);
}

static void show(const struct ctl *c, struct list_query *q, const Ballast__ExpertsReply *r)
{
    bool is_terminal = isatty(STDOUT_FILENO) && c->format == CTL_TABLE, was_cut;
    const void **rows = arena_alloc(&q->arena, (r->n_layers + 1) * sizeof *rows);
    for (size_t i = 0; i < r->n_layers; i++)
        rows[i] = r->layers[i];
    size_t n = list_choose(q, rows, r->n_layers, &was_cut);
    if (c->heatmap || is_terminal)
        show_map(c, rows, n);
    if (is_terminal)
        putchar('\n');
    if (!c->heatmap || is_terminal)
        list_show(c, q, rows, n, 0, was_cut);
    ctl_hint(c, "steps %" PRIu64 " to %" PRIu64 ", placement %" PRIu32, r->first_step,
             r->last_step, r->placement_epoch);
}

static int list_layers(struct ctl *c, const Ballast__ExpertsRequest *request)
{
    struct list_query *q = xcalloc(1, sizeof *q);
    const ProtobufCMessage *message;
    int rc = list_begin(c, &ctl_layer_list, q);
    if (rc == CTL_OK && c->heatmap && c->format != CTL_TABLE)
        rc = ctl_fail(c, CTL_USAGE, "--heatmap does not go with -o or --json");
    if (rc == CTL_OK)
        rc = ctl_call(c, BALLAST__METHOD__METHOD_EXPERTS, &request->base, &message);
    if (rc == CTL_OK)
        show(c, q, (const Ballast__ExpertsReply *)message);
    list_fini(q);
    free(q);
    return rc;
}

int ctl_experts(struct ctl *c)
{
    Ballast__ExpertsRequest request = BALLAST__EXPERTS_REQUEST__INIT;
    if (!(request.job_id = ctl_job_id(c, c->args[0])))
        return CTL_USAGE;
    if (c->window && !check_is_window(c->window))
        return ctl_fail(c, CTL_USAGE, "--window: expected last, 1m, 1h or all");
    if (!c->history && c->plot)
        return ctl_fail(c, CTL_USAGE, "--plot goes with --history");
    if (c->history && (c->sort || c->n_filters || c->columns || c->format == CTL_WIDE ||
                       c->format == CTL_NAME))
        return ctl_fail(c, CTL_USAGE, "--history has windows, not layers: of --sort, --filter and "
                        "-o only -o json and yaml go with it");
    request.layer = c->has_layer ? (int32_t)c->layer : -1;
    request.window = (char *)(c->window ? c->window : c->history ? "1h" : "1m");
    if (c->history)
        return ctl_load_history(c, &request);
    return list_layers(c, &request);
}
