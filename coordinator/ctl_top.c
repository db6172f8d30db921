/* ctl_top.c - a live screen: jobs with their imbalance, the queue, workers, the last moves */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "coordinator/ctl_screen.h"
#include "coordinator/event.h"

#define REFRESH_MS    1000
#define CALL_MS       2000 /* a screen that stands still for longer says why */
#define EVENTS_LOOKED 300u
#define MOVES_SHOWN   8u
#define ONCE_WIDTH    120

/* What the coordinator said last; in the arena of the call. */
struct view {
    const Ballast__PingReply       *ping;
    const Ballast__JobListReply    *jobs;
    const Ballast__WorkerListReply *workers;
    const Ballast__EventsReply     *events;
};

static int fetch(struct ctl *c, struct view *v)
{
    Ballast__PingRequest ping = BALLAST__PING_REQUEST__INIT;
    Ballast__JobListRequest jobs = BALLAST__JOB_LIST_REQUEST__INIT;
    Ballast__WorkerListRequest workers = BALLAST__WORKER_LIST_REQUEST__INIT;
    Ballast__EventsRequest events = BALLAST__EVENTS_REQUEST__INIT;
    const ProtobufCMessage *m[4] = {NULL};
    events.last = EVENTS_LOOKED;
    arena_reset(&c->arena);
    *v = (struct view){0};
    int rc = ctl_call(c, BALLAST__METHOD__METHOD_PING, &ping.base, &m[0]);
    if (rc == CTL_OK)
        rc = ctl_call(c, BALLAST__METHOD__METHOD_JOB_LIST, &jobs.base, &m[1]);
    if (rc == CTL_OK)
        rc = ctl_call(c, BALLAST__METHOD__METHOD_WORKER_LIST, &workers.base, &m[2]);
    if (rc == CTL_OK)
        rc = ctl_call(c, BALLAST__METHOD__METHOD_EVENTS, &events.base, &m[3]);
    if (rc != CTL_OK)
        return rc;
    *v = (struct view){
        (const Ballast__PingReply *)m[0], (const Ballast__JobListReply *)m[1],
        (const Ballast__WorkerListReply *)m[2], (const Ballast__EventsReply *)m[3],
    };
    return CTL_OK;
}

/* ---- parts of the page ----------------------------------------------------------------------- */

static bool is_waiting(const Ballast__Job *j)
{
    return j->state == BALLAST__JOB_STATE__JOB_QUEUED;
}

static void add_title(struct page *p, const struct view *v)
{
    char up[CLOCK_STAMP_BYTES], now[CLOCK_STAMP_BYTES];
    size_t n_waiting = 0;
    for (size_t i = 0; i < v->jobs->n_jobs; i++)
        n_waiting += is_waiting(v->jobs->jobs[i]);
    clock_duration(v->ping->uptime_ms * NS_PER_MS, up);
    clock_stamp(clock_wall_ns(), now);
    page_add(p, PAGE_TITLE, "ballast %s  up %s  jobs %zu, %zu waiting  workers %" PRIu32 "/%"
             PRIu32 "  %.8s", v->ping->version, up, v->jobs->n_jobs, n_waiting,
             v->ping->n_workers_alive, v->ping->n_workers, now + 11);
}

/* Ten places from 1, all even, to 3 and more. */
static void bar_text(double imbalance, char out_text[11])
{
    int n = imbalance > 1 ? (int)lround((imbalance - 1) / 2 * 10) : 0;
    memset(out_text, ' ', 10);
    memset(out_text, '#', (size_t)(n < 10 ? n : 10));
    out_text[10] = '\0';
}

static enum page_style style_of_job(const Ballast__Job *j)
{
    if (j->state == BALLAST__JOB_STATE__JOB_RECOVERING || j->held)
        return PAGE_WARN;
    return j->state == BALLAST__JOB_STATE__JOB_RUNNING ? PAGE_GOOD : PAGE_PLAIN;
}

static void number_text(char out_text[16], const char *format, double x)
{
    snprintf(out_text, 16, "-");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    if (isfinite(x))
        snprintf(out_text, 16, format, x);
#pragma GCC diagnostic pop
}

static void add_job(struct page *p, const Ballast__Job *j)
{
    char step[32], loss[16], speed[16], imbalance[16], bar[11], *name = ctl_fitted(j->name, 14);
    snprintf(step, sizeof step, "%" PRIu64 "/%" PRIu64, j->step, j->steps);
    number_text(loss, "%.4f", j->loss);
    number_text(speed, "%.0f", j->tokens_per_second > 0 ? j->tokens_per_second : (double)NAN);
    number_text(imbalance, "%.2f", j->imbalance);
    bar_text(j->imbalance, bar);
    page_add(p, style_of_job(j), "%6" PRIu64 " %s %-2s %4" PRIu32 " %11s %8s %8s %5s |%s| %s",
             j->id, name, ctl_state_short(j), j->gang_size, step, loss, speed, imbalance, bar,
             j->reason);
    free(name);
}

static void add_more(struct page *p, size_t n_left)
{
    if (n_left)
        page_add(p, PAGE_DIM, "       and %zu more", n_left);
}

/* Those of one kind, the queue or the others, in `room` lines with the head. */
static void add_jobs(struct page *p, const struct view *v, bool waiting, size_t room)
{
    size_t n = 0, n_shown = 0;
    for (size_t i = 0; i < v->jobs->n_jobs; i++)
        n += is_waiting(v->jobs->jobs[i]) == waiting;
    if (waiting && !n)
        return;
    page_add(p, PAGE_HEAD, "%6s %-14s %-2s %4s %11s %8s %8s %5s  %-10s  %s", waiting ? "QUEUE"
             : "JOB", "NAME", "ST", "W", "STEP", "LOSS", "TOKENS/S", "IMBAL", "1        3",
             "REASON");
    size_t n_max = room > 2 ? room - 1 : 1;
    n_max = n > n_max && n_max > 1 ? n_max - 1 : n_max;
    for (size_t i = 0; i < v->jobs->n_jobs && n_shown < n_max; i++)
        if (is_waiting(v->jobs->jobs[i]) == waiting) {
            add_job(p, v->jobs->jobs[i]);
            n_shown++;
        }
    if (!n)
        page_add(p, PAGE_DIM, "       no job runs");
    add_more(p, n - n_shown);
}

static enum page_style style_of_worker(Ballast__WorkerState state)
{
    switch (state) {
    case BALLAST__WORKER_STATE__WORKER_BUSY:    return PAGE_GOOD;
    case BALLAST__WORKER_STATE__WORKER_IDLE:    return PAGE_PLAIN;
    case BALLAST__WORKER_STATE__WORKER_LATE:
    case BALLAST__WORKER_STATE__WORKER_SUSPECT: return PAGE_WARN;
    case BALLAST__WORKER_STATE__WORKER_LOST:    return PAGE_BAD;
    default:                                    return PAGE_DIM;
    }
}

static int by_name(const void *a, const void *b)
{
    return strverscmp((*(Ballast__Worker *const *)a)->name, (*(Ballast__Worker *const *)b)->name);
}

static void add_workers(struct page *p, const struct view *v, size_t room)
{
    size_t n = v->workers->n_workers, n_max = room > 2 ? room - 1 : 1;
    n_max = n > n_max && n_max > 1 ? n_max - 1 : n_max;
    qsort(v->workers->workers, n, sizeof *v->workers->workers, by_name);
    page_add(p, PAGE_HEAD, "%-16s %-8s %-16s %6s %5s %6s  %s", "WORKER", "STATE", "DEVICE", "JOB",
             "RANK", "HB", "REASON");
    for (size_t i = 0; i < n && i < n_max; i++) {
        const Ballast__Worker *w = v->workers->workers[i];
        char job[24] = "-", rank[16] = "-";
        if (w->job_id) {
            snprintf(job, sizeof job, "%" PRIu64, w->job_id);
            snprintf(rank, sizeof rank, "%" PRIu32, w->rank);
        }
        page_add(p, style_of_worker(w->state), "%-16.16s %-8s %-16.16s %6s %5s %5.1fs  %s", w->name,
                 event_worker_state(w->state), w->device, job, rank,
                 (double)w->heartbeat_age_ms / 1e3, w->reason);
    }
    if (!n)
        page_add(p, PAGE_DIM, "no worker has come yet");
    add_more(p, n > n_max ? n - n_max : 0);
}

static bool is_move(const Ballast__Event *e)
{
    return !strncmp(e->kind, "PLAN", 4) || !strncmp(e->kind, "PLACEMENT", 9) ||
           !strncmp(e->kind, "REBALANCE", 9);
}

/* The newest last, as many as there is room for. */
static void add_moves(struct page *p, const struct view *v, size_t room)
{
    size_t n = 0, first = v->events->n_events;
    while (first > 0 && n + 1 < room && n < MOVES_SHOWN)
        n += is_move(v->events->events[--first]);
    if (!n)
        return;
    page_add(p, PAGE_HEAD, "%-8s %6s %-19s", "TIME", "JOB", "LAST MOVES");
    for (size_t i = first; i < v->events->n_events; i++) {
        const Ballast__Event *e = v->events->events[i];
        char stamp[CLOCK_STAMP_BYTES];
        if (!is_move(e))
            continue;
        clock_stamp(e->at_ns, stamp);
        page_add(p, !strcmp(e->kind, "PLAN_ENDED") ? PAGE_WARN : PAGE_PLAIN,
                 "%.8s %6" PRIu64 " %-19s %s", stamp + 11, e->job_id, e->kind, e->text);
    }
}

/* Half of it for jobs, a quarter for workers and for moves each; what one leaves the next gets. */
static void make_page(struct page *p, const struct view *v, size_t height)
{
    page_clear(p);
    add_title(p, v);
    add_jobs(p, v, false, (height - 1) / 3);
    add_jobs(p, v, true, (height - 1) / 5);
    size_t left = height > p->n_lines ? height - p->n_lines : 0;
    add_workers(p, v, left > MOVES_SHOWN + 4 ? left - MOVES_SHOWN - 2 : left / 2);
    left = height > p->n_lines + 1 ? height - p->n_lines - 1 : 0;
    add_moves(p, v, left);
}

/* ---- all ------------------------------------------------------------------------------------- */

static int show_once(struct ctl *c)
{
    struct page p = {0};
    struct view v;
    int rc = fetch(c, &v);
    if (rc == CTL_OK) {
        make_page(&p, &v, 10000);
        page_print(&p, ONCE_WIDTH);
    }
    page_fini(&p);
    return rc;
}

/* Puts one line in the place of the first, so that what was last known stays. */
static void say_outage(struct page *p, const struct ctl *c)
{
    struct page first = {0};
    page_add(&first, PAGE_BAD, "no answer from %s: trying again", c->connected_to
             ? c->connected_to : "the coordinator");
    if (!p->n_lines)
        page_add(p, PAGE_BAD, "%s", "");
    free(p->lines[0].text);
    p->lines[0] = first.lines[0];
    free(first.lines);
}

static int show_live(struct ctl *c)
{
    struct page p = {0};
    enum screen_key key = SCREEN_AGAIN;
    ctl_catch_interrupt();
    c->quiet = c->is_silent = true; /* the screen is ours */
    c->timeout_ms = c->timeout_ms ? c->timeout_ms : CALL_MS;
    if (!screen_open(ctl_wants_color(c))) {
        c->is_silent = false;
        return ctl_fail(c, CTL_FAILED, "this terminal (TERM) is not known; --once prints the page");
    }
    while (key != SCREEN_QUIT && !ctl_interrupts) {
        struct view v;
        size_t width, height;
        if (fetch(c, &v) == CTL_OK) {
            screen_size(&width, &height);
            make_page(&p, &v, height);
            if (p.n_lines < height)
                page_add(&p, PAGE_DIM, "q quits");
        } else {
            say_outage(&p, c);
        }
        screen_show(&p);
        key = screen_wait(REFRESH_MS);
    }
    screen_close();
    page_fini(&p);
    return CTL_OK;
}

int ctl_top(struct ctl *c)
{
    return c->once || !isatty(STDOUT_FILENO) || !isatty(STDIN_FILENO) ? show_once(c)
                                                                      : show_live(c);
}
