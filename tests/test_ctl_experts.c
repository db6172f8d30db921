/* test_ctl_experts.c - the client about expert load, placements, the database; the live screen */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>

#include "common/clock.h"
#include "tests/a_coordinator.h"
#include "tests/patience.h"

#define M(NAME) BALLAST__METHOD__METHOD_##NAME

/* ---- what it is told ------------------------------------------------------------------------- */

static uint64_t tokens[2][8] = {
    {100, 10, 10, 10, 10, 10, 10, 0}, {20, 20, 20, 20, 20, 20, 20, 20},
};
static Ballast__LayerExperts layers[2], *layer_pointers[2];
static Ballast__ExpertsReply experts;

static void tell_experts(void)
{
    ballast__experts_reply__init(&experts);
    for (uint32_t i = 0; i < 2; i++) {
        ballast__layer_experts__init(&layers[i]);
        layers[i].layer = 1 + 2 * i;
        layers[i].window_steps = 40;
        layers[i].tokens = tokens[i];
        layers[i].n_tokens = 8;
        layers[i].imbalance_experts = i ? 1 : 5;
        layers[i].imbalance_devices = i ? 1 : 2.75;
        layer_pointers[i] = &layers[i];
    }
    experts.layers = layer_pointers;
    experts.n_layers = 2;
    experts.first_step = 21;
    experts.last_step = 60;
    experts.placement_epoch = 3;
    will_say(M(EXPERTS), &experts.base);
}

/* 2 devices x 2 slots, expert 0 on both. */
static int32_t  slots[4] = {0, 1, 2, 0};
static double   shares[4] = {0.25, 1, 1, 0.75};
static uint32_t homes[3] = {3, 1, 2};
static Ballast__PlacementLayer placement_layer, *placement_layers[] = {&placement_layer};
static Ballast__Placement placement;
static Ballast__RebalanceEntry entries[2], *entry_pointers[] = {&entries[0], &entries[1]};
static Ballast__PlacementReply placement_reply;
static Ballast__RebalanceHistoryReply history;

static void tell_placement(void)
{
    ballast__placement_layer__init(&placement_layer);
    placement_layer.layer = 1;
    placement_layer.experts = slots;
    placement_layer.share = shares;
    placement_layer.home = homes;
    placement_layer.n_experts = placement_layer.n_share = 4;
    placement_layer.n_home = 3;
    ballast__placement__init(&placement);
    placement.epoch = 2;
    placement.n_devices = placement.n_slots = 2;
    placement.layers = placement_layers;
    placement.n_layers = 1;
    for (uint32_t i = 0; i < 2; i++) {
        ballast__rebalance_entry__init(&entries[i]);
        entries[i].epoch = 1 + i;
        entries[i].state = i ? "DONE" : "ENDED";
        entries[i].at_ns = 1764424193123000000;
        entries[i].at_step = 100 * (1 + i);
        entries[i].automatic = i;
        entries[i].cause = "layer 1 is uneven";
        entries[i].reason = i ? "" : "rank 2 has no room";
        entries[i].n_moves = 3;
        entries[i].bytes = 3 << 20;
        entries[i].n_stages = i + 1;
        entries[i].pause_s = i ? 0.012 : NAN;
        entries[i].imbalance_before = 2.75;
        entries[i].imbalance_predicted = 1.25;
        entries[i].imbalance_after = i ? 1.31 : NAN;
        entries[i].predicted_gain_s = 0.004;
        entries[i].realised_gain_s = i ? 0.0035 : NAN;
    }
    ballast__placement_reply__init(&placement_reply);
    placement_reply.placement = &placement;
    placement_reply.history = entry_pointers;
    placement_reply.n_history = 2;
    will_say(M(PLACEMENT), &placement_reply.base);
    ballast__rebalance_history_reply__init(&history);
    history.entries = entry_pointers;
    history.n_entries = 2;
    will_say(M(REBALANCE_HISTORY), &history.base);
}

static Ballast__PlanMove move, *moves[] = {&move};
static Ballast__RebalancePlanReply plan;

static void tell_plan(bool has_moves)
{
    ballast__plan_move__init(&move);
    move.layer = 1;
    move.expert = 5;
    move.to_device = 3;
    move.is_home = true;
    move.bytes = 2048;
    ballast__rebalance_plan_reply__init(&plan);
    plan.revision = UINT64_MAX;
    plan.moves = moves;
    plan.n_moves = has_moves;
    plan.bytes = 2048;
    plan.predicted_gain_s = 0.002;
    plan.predicted_cost_s = 0.015;
    plan.imbalance_before = 2.5;
    plan.imbalance_predicted = 1.2;
    plan.reason = has_moves ? "" : "the load is even";
    will_say(M(REBALANCE_PLAN), &plan.base);
    will_say(M(REBALANCE_APPLY), &plan.base);
}

/* ---- expert load ----------------------------------------------------------------------------- */

static void hot_and_cold_experts(void **state)
{
    (void)state;
    fake_forget();
    tell_experts();
    check("experts 7", 0, "LAYER  IMBAL  DEVICES  HOT", "steps 21 to 60, placement 3");
    check("experts 7", 0, "    1   5.00     2.75  0 5.00x, 1 0.50x, 2 0.50x  7 0.00x, 1 0.50x, "
          "2 0.50x     160", NULL);
    layers[1].rerouted = 12;
    layers[0].dropped = 7;
    check("experts 7", 0, "TOKENS  REROUTED  DROPPED\n", NULL);
    check("experts 7", 0, "2 0.50x     160         0        7\n", NULL);
    check("experts 7 --window day", 2, "", "--window: expected last, 1m, 1h or all");
    check("experts 7 --layer x", 2, "", "--layer: 'x' is not a whole number");
    struct json *v = run_json("experts 7 --json");
    const struct json *first = json_at(json_get(v, "items"), 0);
    double x;
    assert_string_equal(json_as_string(json_get(v, "kind")), "ExpertList");
    assert_int_equal(json_count(json_get(first, "tokens")), 8);
    assert_true(json_as_double(json_get(json_get(first, "imbalance"), "devices"), &x) && x == 2.75);
    assert_true(json_as_double(json_get(first, "window_steps"), &x) && x == 40);
    assert_true(json_as_double(json_get(first, "dropped"), &x) && x == 7);
    assert_true(json_as_double(json_get(first, "rerouted"), &x) && x == 0);
    json_destroy(v);
    will_refuse(M(EXPERTS), BALLAST__CODE__FAILED_PRECONDITION, "NO_LOAD", "job 7 has reported no "
                "expert load yet");
    check("experts 7", 5, "", "no expert load yet");
}

static void a_heat_map_of_shades(void **state)
{
    (void)state;
    fake_forget();
    tell_experts();
    check("experts 7 --heatmap", 0, "    1 @::::::  5.00\n", NULL);
    check("experts 7 --heatmap", 0, "    3 ========", NULL);
    check("experts 7 --heatmap", 0, "LAYER experts 0 to 7, and max over mean\n", NULL);
}

/* More experts than columns: a cell shows the hottest of those that share it. */
static void a_wide_layer_is_folded(void **state)
{
    (void)state;
    static uint64_t many[896];
    for (size_t i = 0; i < 896; i++)
        many[i] = 10;
    many[895] = 1000;
    fake_forget();
    tell_experts();
    layers[0].tokens = many;
    layers[0].n_tokens = 896;
    experts.n_layers = 1;
    struct result r = run("experts 7 --heatmap --no-header");
    assert_int_equal(r.code, 0);
    assert_true(strlen(r.out) <= 81);
    assert_non_null(strstr(r.out, "@ 5.00\n"));
    result_fini(&r);
}

/* Two windows with a placement between them. */
static void tell_load_history(void)
{
    static uint32_t numbers[2] = {1, 3};
    static double of_experts[2][2] = {{3, 2}, {1.5, 1.25}}, of_devices[2][2] = {{2, 1.5}, {1, 1}};
    static double load[2][2] = {{1.75, 0.25}, {1, 1}};
    static Ballast__LoadWindow windows[2], *window_pointers[2];
    ballast__experts_reply__init(&experts);
    for (uint32_t i = 0; i < 2; i++) {
        Ballast__LoadWindow *w = window_pointers[i] = &windows[i];
        ballast__load_window__init(w);
        w->at_ns = 1764424193123000000;
        w->first_step = 1 + 20 * i;
        w->last_step = 20 + 20 * i;
        w->n_steps = 20;
        w->placement_epoch = i;
        w->layers = numbers;
        w->experts = of_experts[i];
        w->devices = of_devices[i];
        w->device_load = load[i];
        w->n_layers = w->n_experts = w->n_devices = w->n_device_load = 2;
        w->measured = i ? NAN : 2.125;
        w->aux_loss = NAN;
    }
    experts.windows = window_pointers;
    experts.n_windows = 2;
    experts.bias_update = "sign";
    experts.bias_update_rate = 0.001;
    experts.aux_scope = "sequence";
    will_say(M(EXPERTS), &experts.base);
}

static void evenness_over_time(void **state)
{
    (void)state;
    fake_forget();
    tell_load_history();
    check("experts 7 --history", 0,
          "STEPS  AT              PLACEMENT  EXPERTS     WORST  DEVICES     WORST  RANKS\n"
          "1-20   11-29 13:49:53          0     2.50  3.00 (1)     1.75  2.00 (1)   2.12\n"
          "21-40  11-29 13:49:53          1     1.38  1.50 (1)     1.00  1.00 (1)      -\n",
          "router: bias sign at 0.001, no auxiliary loss");
    experts.aux_loss_weight = 0.01;
    experts.windows[1]->aux_loss = 1.0625;
    check("experts 7 --history", 0, "RANKS     AUX\n", "auxiliary loss 0.01 (sequence)");
    check("experts 7 --history", 0, " -  1.0625\n", NULL);
    check("experts 7 --history --plot", 0, " 2.50|e \n", NULL);
    check("experts 7 --history --plot", 0, " 1.00| d\n      -^\n", NULL);
    check("experts 7 --history --heatmap", 0, "    0 *=\n    1  =\n", NULL);
    struct json *v = run_json("experts 7 --history --json");
    const struct json *first = json_at(json_get(v, "windows"), 0);
    double x;
    assert_string_equal(json_as_string(json_get(v, "kind")), "LoadHistory");
    assert_string_equal(json_as_string(json_get(json_get(v, "router"), "bias_update")), "sign");
    assert_int_equal(json_count(json_get(v, "windows")), 2);
    assert_int_equal(json_kind_of(json_get(first, "aux_loss")), JSON_NULL);
    const struct json *layer = json_at(json_get(first, "imbalance"), 1);
    assert_true(json_as_double(json_get(layer, "layer"), &x) && x == 3);
    assert_true(json_as_double(json_get(layer, "experts"), &x) && x == 2);
    assert_true(json_as_double(json_get(layer, "devices"), &x) && x == 1.5);
    assert_true(json_as_double(json_at(json_get(first, "device_load"), 1), &x) && x == 0.25);
    json_destroy(v);
    experts.bias_update = "quantile";
    check("experts 7 --history", 0, NULL, "router: bias quantile, auxiliary");
    experts.truncated = true;
    check("experts 7 --history -c 2", 0, NULL, "older windows are left out");
    check("experts 7 --plot", 2, "", "--plot goes with --history");
    experts.windows[1]->n_devices = 1;
    check("experts 7 --history", 9, "", "not whole");
    experts.n_windows = 0;
    check("experts 7 --history", 9, "", "no windows");
}

/* ---- placements and plans -------------------------------------------------------------------- */

static void which_expert_is_where(void **state)
{
    (void)state;
    fake_forget();
    tell_placement();
    check("placement 7", 0, "placement 2: 2 devices with 2 slots\n", "");
    check("placement 7", 0, "    1       0  0 25%, 1\n    1       1  2, 0 75%*\n", "");
    check("placement 7 --epoch 2", 0, "rank 2 has no room", "");
    check("placement 7 --layer 1", 0, "    1       0  0 25%, 1\n", "");
    check("placement 7 --layer 9", 3, "", "layer 9 of job 7 has no experts");
    struct json *v = run_json("placement 7 --json");
    const struct json *layer = json_at(json_get(v, "layers"), 0);
    double x;
    assert_true(json_as_double(json_at(json_at(json_get(layer, "placement"), 1), 1), &x) && x == 0);
    assert_true(json_as_double(json_at(json_at(json_get(layer, "shares"), 0), 0), &x) && x == 0.25);
    assert_int_equal(json_count(json_get(v, "history")), 2);
    json_destroy(v);
    v = run_json("placement 7 --layer 1 --json");
    assert_int_equal(json_count(json_get(v, "layers")), 1);
    json_destroy(v);
    check("rebalance history 7", 0, "    2  DONE   2025-11-29T13:49:53.123Z   200  auto        3  "
          "3.00 MiB       2  12 ms    2.75       1.25   1.31     3.5 ms  layer 1 is uneven",
          "automatic rebalancing is off");
    v = run_json("rebalance history 7 --json");
    assert_int_equal(json_kind_of(json_get(json_at(json_get(v, "items"), 0), "pause_seconds")),
                     JSON_NULL);
    json_destroy(v);
}

static void plans_are_shown_and_applied(void **state)
{
    (void)state;
    fake_forget();
    tell_plan(true);
    check("rebalance plan 7", 10, "    1       5     0   3  home  2.00 KiB",
          "ballast rebalance apply 7 --revision 18446744073709551615");
    check("rebalance plan 7", 10, "gain 2.00 ms a step, cost 15.00 ms once: pays after 8 steps",
          NULL);
    check("rebalance plan 7 --json", 10, "\"revision\": \"18446744073709551615\"", "");
    plan.epoch = 4;
    check("rebalance apply 7 --revision 18446744073709551615", 0, "placement 4 is proposed", NULL);
    check("rebalance apply 7 --revision 99999999999999999999", 2, "", "--revision");
    check("rebalance apply 7 --revision -1", 2, "", "--revision");
    tell_plan(false);
    check("rebalance plan 7", 0, "nothing to do: the load is even", "");
    check("rebalance apply 7", 0, "nothing to do: the load is even", "");
    plan.reason = "nothing to do; layer 3 is the least even";
    check("rebalance plan 7", 0, "nothing to do; layer 3", "");
    will_refuse(M(REBALANCE_APPLY), BALLAST__CODE__ABORTED, "MOVED", "the plan is of revision 3, "
                "now it is 4");
    check("rebalance apply 7 --revision 3", 5, "", "now it is 4");

    Ballast__Job job = BALLAST__JOB__INIT;
    Ballast__JobReply reply = BALLAST__JOB_REPLY__INIT;
    job.id = 7;
    reply.job = &job;
    will_say(M(REBALANCE_AUTO), &reply.base);
    check("rebalance auto off 7", 0, "automatic rebalancing of job 7 is off", "");
    check("rebalance auto maybe 7", 2, "", "expected on or off");
    check("rebalance auto on", 2, "", "usage: ballast rebalance auto on|off ID");
    check("rebalance pla 7", 2, "", "did you mean 'ballast rebalance plan'?");
}

/* ---- the database ---------------------------------------------------------------------------- */

static void rows_as_table_csv_and_json(void **state)
{
    (void)state;
    static char *names[] = {"id", "name"};
    static char *cells[2][2] = {{"7", "a \"b\",\nc"}, {"12", ""}};
    static protobuf_c_boolean is_null[2][2] = {{0, 0}, {0, 1}};
    Ballast__DbRow rows[2], *row_pointers[] = {&rows[0], &rows[1]};
    Ballast__DbQueryReply reply = BALLAST__DB_QUERY_REPLY__INIT;
    for (size_t i = 0; i < 2; i++) {
        ballast__db_row__init(&rows[i]);
        rows[i].cells = cells[i];
        rows[i].is_null = is_null[i];
        rows[i].n_cells = rows[i].n_is_null = 2;
    }
    reply.columns = names;
    reply.n_columns = 2;
    reply.rows = row_pointers;
    reply.n_rows = 2;
    fake_forget();
    will_say(M(DB_QUERY), &reply.base);
    check("db query 'SELECT 1'", 0, "id  name\n 7  a \"b\",\\x0ac\n12  -\n", "");
    check("db query --csv 'SELECT 1'", 0, "id,name\n7,\"a \"\"b\"\",\nc\"\n12,\n", "");
    check("db query --csv --json 'SELECT 1'", 2, "", "exclude each other");
    struct json *v = run_json("db query --json 'SELECT 1'");
    const struct json *last = json_at(json_get(v, "items"), 1);
    double x;
    assert_true(json_as_double(json_get(last, "id"), &x) && x == 12);
    assert_int_equal(json_kind_of(json_get(last, "name")), JSON_NULL);
    json_destroy(v);
    reply.truncated = true;
    check("db query 'SELECT 1'", 0, NULL, "only the first 2 rows; -c N gives more");
    check("db query ''", 0, NULL, NULL); /* what is asked is the coordinator's to refuse */
    rows[1].n_cells = 1;
    check("db query 'SELECT 1'", 9, "", "rows of different widths");
    will_refuse(M(DB_QUERY), BALLAST__CODE__INVALID_ARGUMENT, "SQL",
                "near \"SELEC\": syntax error");
    check("db query 'SELEC 1'", 2, "", "near \"SELEC\": syntax error");
    will_refuse(M(DB_QUERY), BALLAST__CODE__CANCELLED, "LIMIT", "the query took longer than 2 s");
    check("db query 'SELECT 1'", 1, "", "longer than 2 s");
}

static void a_copy_of_the_database(void **state)
{
    (void)state;
    Ballast__DbBackupReply reply = BALLAST__DB_BACKUP_REPLY__INIT;
    reply.path = "/backups/a.db";
    reply.bytes = 4096;
    fake_forget();
    will_say(M(DB_BACKUP), &reply.base);
    check("db backup a.db", 0, "/backups/a.db\n", "4096 bytes, checked");
    struct json *v = run_json("db backup /backups/a.db --json");
    assert_string_equal(json_as_string(json_get(v, "path")), "/backups/a.db");
    json_destroy(v);
    will_refuse(M(DB_BACKUP), BALLAST__CODE__ALREADY_EXISTS, "BACKUP", "/backups/a.db: exists");
    check("db backup /backups/a.db", 5, "", "exists");
}

/* ---- top ------------------------------------------------------------------------------------- */

static Ballast__Job top_jobs[40], *top_job_pointers[40];
static Ballast__Worker top_workers[20], *top_worker_pointers[20];
static Ballast__Event top_events[3], *top_event_pointers[3];
static char top_names[20][8];
static Ballast__PingReply ping;
static Ballast__JobListReply job_list;
static Ballast__WorkerListReply worker_list;
static Ballast__EventsReply event_list;

static void tell_cluster(size_t n_jobs, size_t n_workers)
{
    static const char *const kinds[] = {"JOB_RUNNING", "PLAN_PROPOSED", "PLACEMENT"};
    for (size_t i = 0; i < n_jobs; i++) {
        Ballast__Job *j = top_job_pointers[i] = &top_jobs[i];
        ballast__job__init(j);
        j->id = i + 1;
        j->name = i ? "another" : "hybrid \xce\xb1";
        j->state = i % 2 ? BALLAST__JOB_STATE__JOB_QUEUED : BALLAST__JOB_STATE__JOB_RUNNING;
        j->reason = i % 2 ? "Resources: needs 4 workers, 0 are free" : "";
        j->gang_size = 4;
        j->step = 120;
        j->steps = 300;
        j->loss = 2.25;
        j->tokens_per_second = 12345;
        j->imbalance = 1.63;
    }
    for (size_t i = 0; i < n_workers; i++) {
        Ballast__Worker *w = top_worker_pointers[i] = &top_workers[i];
        ballast__worker__init(w);
        snprintf(top_names[i], sizeof top_names[i], "w%zu", i);
        w->name = top_names[i];
        w->state = BALLAST__WORKER_STATE__WORKER_BUSY;
        w->device = "cpu";
        w->job_id = 1;
        w->rank = (uint32_t)i;
    }
    for (size_t i = 0; i < 3; i++) {
        ballast__event__init(&top_events[i]);
        top_events[i].seq = i + 1;
        top_events[i].at_ns = 1764424193123000000;
        top_events[i].job_id = 1;
        top_events[i].kind = (char *)kinds[i];
        top_events[i].text = "placement 2: 12 moves";
        top_event_pointers[i] = &top_events[i];
    }
    ballast__ping_reply__init(&ping);
    ping.version = "0.1.0";
    ping.n_workers = ping.n_workers_alive = (uint32_t)n_workers;
    ballast__job_list_reply__init(&job_list);
    job_list.jobs = top_job_pointers;
    job_list.n_jobs = n_jobs;
    ballast__worker_list_reply__init(&worker_list);
    worker_list.workers = top_worker_pointers;
    worker_list.n_workers = n_workers;
    ballast__events_reply__init(&event_list);
    event_list.events = top_event_pointers;
    event_list.n_events = 3;
    will_say(M(PING), &ping.base);
    will_say(M(JOB_LIST), &job_list.base);
    will_say(M(WORKER_LIST), &worker_list.base);
    will_say(M(EVENTS), &event_list.base);
}

static void one_page_for_a_pipe(void **state)
{
    (void)state;
    fake_forget();
    tell_cluster(2, 4);
    check("top --once", 0, "ballast 0.1.0  up 00:00:00  jobs 2, 1 waiting  workers 4/4", "");
    check("top", 0, "     1 hybrid \xce\xb1       R     4     120/300   2.2500    12345  1.63 |###",
          "");
    check("top", 0, "Resources: needs 4 workers", "");
    check("top", 0, "13:49:53      1 PLACEMENT           placement 2: 12 moves", "");
    check("top", 0, "w3               BUSY", "");
    check("top --json", 2, "", "--json does not belong to 'top'");
    struct result r = run("top --once");
    assert_null(strchr(r.out, 27)); /* no escape sequences in a pipe */
    assert_null(strstr(r.out, "JOB_RUNNING"));
    result_fini(&r);
    will_refuse(M(PING), BALLAST__CODE__INTERNAL, "BUG", "a bug");
    check("top --once", 1, "", "a bug");
}

struct screen {
    pid_t pid;
    int   fd;
    char  text[1 << 16];
    size_t n;
};

static void screen_start(struct screen *s, unsigned short width, unsigned short height)
{
    const char *bin = getenv("BALLAST_BIN");
    struct winsize size = {.ws_row = height, .ws_col = width};
    *s = (struct screen){0};
    s->pid = forkpty(&s->fd, NULL, NULL, &size);
    assert_true(s->pid >= 0);
    if (s->pid)
        return;
    char *program = xasprintf("%s/ballast", bin ? bin : "build/bin");
    setenv("BALLAST_ADDRESS", fake.address, 1);
    setenv("HOME", fake.folder, 1);
    setenv("TERM", "xterm-256color", 1);
    execl(program, "ballast", "top", (char *)NULL);
    _exit(127);
}

/* Reads until the text was seen; what came before is forgotten with it. */
static bool screen_sees(struct screen *s, const char *text)
{
    uint64_t until_ns = patience_end_ns(4);
    for (;;) {
        char *found = strstr(s->text, text);
        if (found)
            return true;
        struct pollfd p = {.fd = s->fd, .events = POLLIN};
        if (clock_now_ns() > until_ns || poll(&p, 1, 1000) < 0)
            return false;
        if (s->n > sizeof s->text / 2)
            s->n = 0;
        ssize_t n = p.revents ? read(s->fd, s->text + s->n, sizeof s->text - s->n - 1) : 0;
        if (n < 0)
            return false;
        for (ssize_t i = 0; i < n; i++)
            if (!s->text[s->n + (size_t)i])
                s->text[s->n + (size_t)i] = ' ';
        s->n += (size_t)n;
        s->text[s->n] = '\0';
    }
}

static int screen_end(struct screen *s)
{
    int status;
    while (read(s->fd, s->text, sizeof s->text) > 0)
        ;
    assert_int_equal(waitpid(s->pid, &status, 0), s->pid);
    close(s->fd);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void a_live_screen(void **state)
{
    (void)state;
    struct screen s;
    fake_forget();
    tell_cluster(40, 20); /* more than fits into 24 lines */
    screen_start(&s, 80, 24);
    assert_true(screen_sees(&s, "jobs 40, 20 waiting"));
    assert_true(screen_sees(&s, "QUEUE"));
    assert_true(screen_sees(&s, "WORKER"));
    assert_true(screen_sees(&s, "LAST MOVES"));
    assert_true(screen_sees(&s, "more"));
    s.n = 0;
    s.text[0] = '\0';
    struct winsize larger = {.ws_row = 90, .ws_col = 132};
    assert_int_equal(ioctl(s.fd, TIOCSWINSZ, &larger), 0);
    assert_true(screen_sees(&s, "w19")); /* now there is room */
    assert_int_equal(write(s.fd, "q", 1), 1);
    assert_int_equal(screen_end(&s), 0);

    screen_start(&s, 20, 5); /* nothing fits, nothing breaks */
    assert_true(screen_sees(&s, "ballast 0.1.0"));
    assert_int_equal(write(s.fd, "q", 1), 1);
    assert_int_equal(screen_end(&s), 0);

    screen_start(&s, 80, 24);
    assert_true(screen_sees(&s, "LAST MOVES"));
    will_refuse(M(PING), BALLAST__CODE__INTERNAL, "BUG", "a bug");
    assert_true(screen_sees(&s, "no answer from"));
    tell_cluster(2, 4);
    s.n = 0;
    s.text[0] = '\0';
    assert_true(screen_sees(&s, "jobs 2"));
    kill(s.pid, SIGINT);
    assert_int_equal(screen_end(&s), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hot_and_cold_experts),
        cmocka_unit_test(a_heat_map_of_shades),
        cmocka_unit_test(a_wide_layer_is_folded),
        cmocka_unit_test(evenness_over_time),
        cmocka_unit_test(which_expert_is_where),
        cmocka_unit_test(plans_are_shown_and_applied),
        cmocka_unit_test(rows_as_table_csv_and_json),
        cmocka_unit_test(a_copy_of_the_database),
        cmocka_unit_test(one_page_for_a_pipe),
        cmocka_unit_test(a_live_screen),
    };
    return cmocka_run_group_tests(tests, fake_start, fake_stop);
}
