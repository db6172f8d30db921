/* attempts.c - one entry per attempt: its trainer while it lives, its output while it is wanted
 *
 * An entry goes when the agent has forgotten it and its process is gone, whichever is later. */
#include "worker/attempts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"
#include "proto/check.h"
#include "worker/child.h"
#include "worker/spool.h"

struct attempt {
    struct attempt *next;
    struct attempts *all;
    job_id job;
    uint32_t number, rank;
    struct child *child; /* NULL: it has ended, or could not be started */
    struct spool *spool; /* NULL: it could not be made */
    char *spawn_failure; /* to be told to the agent in the next turn */
    bool is_forgotten;   /* by the agent */
};

struct attempts {
    struct attempts_shell shell;
    struct attempt *first;
};

struct attempts *attempts_create(const struct attempts_shell *shell)
{
    struct attempts *all = xcalloc(1, sizeof *all);
    all->shell = *shell;
    return all;
}

static struct attempt *attempt_find(const struct attempts *all, job_id job, uint32_t number)
{
    for (struct attempt *a = all->first; a; a = a->next)
        if (a->job == job && a->number == number)
            return a;
    return NULL;
}

static void attempt_remove(struct attempt *a)
{
    struct attempt **at = &a->all->first;
    while (*at != a)
        at = &(*at)->next;
    *at = a->next;
    child_destroy(a->child);
    spool_close(a->spool);
    free(a->spawn_failure);
    free(a);
}

static void remove_if_over(struct attempt *a)
{
    if (a->is_forgotten && !a->child && !a->spawn_failure)
        attempt_remove(a);
}

void attempts_destroy(struct attempts *all)
{
    if (!all)
        return;
    while (all->first)
        attempt_remove(all->first);
    free(all);
}

/* ---- a trainer's events --------------------------------------------------------------------- */

static void on_message(void *context, const uint8_t *packed, size_t n_bytes)
{
    struct attempt *a = context;
    const struct attempts_shell *shell = &a->all->shell;
    struct agent_turn t;
    shell->turn_begin(shell->context, &t);
    Ballast__TrainerMessage *m;
    struct err err = {0};
    if (check_trainer_message(packed, n_bytes, &t.arena, &m, &err) < 0)
        agent_trainer_closed(shell->agent, &t, a->job, a->number, err.text);
    else
        agent_trainer_message(shell->agent, &t, a->job, a->number, m);
    shell->turn_end(shell->context, &t);
}

static void tell_output(struct attempt *a, struct agent_turn *t)
{
    if (a->spool && !a->is_forgotten)
        agent_log_grown(a->all->shell.agent, t, a->job, a->number, spool_bytes(a->spool),
                        spool_dropped_bytes(a->spool), !a->child);
}

static void on_output(void *context, const void *bytes, size_t n_bytes)
{
    struct attempt *a = context;
    const struct attempts_shell *shell = &a->all->shell;
    struct agent_turn t;
    shell->turn_begin(shell->context, &t);
    spool_write(a->spool, bytes, n_bytes, t.now_ns);
    tell_output(a, &t);
    shell->turn_end(shell->context, &t);
}

static void on_closed(void *context, const char *why)
{
    struct attempt *a = context;
    const struct attempts_shell *shell = &a->all->shell;
    struct agent_turn t;
    shell->turn_begin(shell->context, &t);
    agent_trainer_closed(shell->agent, &t, a->job, a->number, why);
    shell->turn_end(shell->context, &t);
}

static void on_exited(void *context, int exit_code, int exit_signal)
{
    struct attempt *a = context;
    const struct attempts_shell *shell = &a->all->shell;
    log_info("job=%" PRIu64 " attempt=%u rank=%u pid=%d exit=%d signal=%d msg=\"trainer ended\"",
             a->job, a->number, a->rank, (int)child_pid(a->child), exit_code, exit_signal);
    child_destroy(a->child);
    a->child = NULL;
    struct agent_turn t;
    shell->turn_begin(shell->context, &t);
    tell_output(a, &t);
    agent_trainer_exited(shell->agent, &t, a->job, a->number, exit_code, exit_signal, NULL);
    remove_if_over(a);
    shell->turn_end(shell->context, &t);
}

static const struct child_events trainer_events = {
    .message = on_message,
    .output = on_output,
    .closed = on_closed,
    .exited = on_exited,
};

/* ---- effects -------------------------------------------------------------------------------- */

static void send_output(const struct attempt *a, const struct effect *e)
{
    static uint8_t bytes[LOG_CHUNK_BYTES_MAX]; /* one loop, one thread */
    if (!a->spool)
        return;
    ssize_t n = spool_read(a->spool, e->offset, bytes, e->n_bytes);
    if (n < 0) {
        log_error("job=%" PRIu64 " attempt=%u offset=%" PRIu64 " msg=\"cannot read the trainer's "
                  "output back: %s\"", e->job, e->attempt, e->offset, strerror((int)-n));
        return;
    }
    Ballast__LogChunk chunk = BALLAST__LOG_CHUNK__INIT;
    chunk.job_id = e->job;
    chunk.attempt = e->attempt;
    chunk.rank = e->rank;
    chunk.offset = e->offset;
    chunk.bytes.data = bytes;
    chunk.bytes.len = (size_t)n;
    chunk.dropped_bytes = e->dropped_bytes;
    a->all->shell.send(a->all->shell.context, &e->envelope, &chunk.base);
}

/* The cores of this machine among the ranks that the job has on it, unless the file says. */
static uint32_t threads_of(const struct worker_config *config, const Ballast__Start *start)
{
    if (config->cores)
        return config->cores;
    uint32_t n_here = 0;
    for (size_t i = 0; i < start->n_gang; i++)
        n_here += !strcmp(start->gang[i]->node, config->node);
    long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t n = (uint32_t)(n_cores > 0 ? n_cores : 1) / (n_here ? n_here : 1);
    return n ? n : 1;
}

static int start_trainer(struct attempt *a, const Ballast__Start *start, struct err *err)
{
    const struct attempts_shell *shell = &a->all->shell;
    const struct worker_config *config = shell->config;
    char *path = xasprintf("%s/" SPOOL_PREFIX "%" PRIu64 "-%u-%u", config->state_dir, a->job,
                           a->number, a->rank);
    int rc = spool_open(path, &a->spool, err);
    free(path);
    if (rc < 0)
        return rc;
    if (rc > 0)
        log_warn("job=%" PRIu64 " attempt=%u rank=%u msg=\"%s; it is kept in memory\"", a->job,
                 a->number, a->rank, err->text);
    Ballast__Start s = *start;
    s.allowed_roots = config->allowed_roots;
    s.n_allowed_roots = config->n_allowed_roots;
    s.n_threads = threads_of(config, start);
    s.device = config->device;
    s.collectives = config->collectives;
    s.data_address = config->data_address;
    char *label = xasprintf("job=%" PRIu64 ",attempt=%u,rank=%u", a->job, a->number, a->rank);
    bool has_folder = access(config->state_dir, X_OK) == 0;
    struct child_options options = {.label = label, .folder = has_folder ? config->state_dir : "/"};
    rc = child_spawn(shell->loop, &options, &trainer_events, a, &a->child, err);
    free(label);
    if (rc < 0)
        return rc;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &s;
    child_send(a->child, &m);
    log_info("job=%" PRIu64 " attempt=%u rank=%u pid=%d threads=%u msg=\"trainer started\"", a->job,
             a->number, a->rank, (int)child_pid(a->child), s.n_threads);
    return 0;
}

static void spawn(struct attempts *all, const struct effect *e)
{
    struct attempt *a = xcalloc(1, sizeof *a);
    a->all = all;
    a->job = e->job;
    a->number = e->attempt;
    a->rank = e->rank;
    a->next = all->first;
    all->first = a;
    struct err err = {0};
    if (start_trainer(a, e->start, &err) < 0)
        a->spawn_failure = xstrdup(err.text);
}

void attempts_carry_out(struct attempts *all, const struct effect *e)
{
    if (e->kind == EFFECT_SPAWN) {
        spawn(all, e);
        return;
    }
    struct attempt *a = attempt_find(all, e->job, e->attempt);
    if (!a)
        return; /* forgotten since */
    if (e->kind == EFFECT_FORWARD && a->child) {
        child_send(a->child, e->message);
    } else if (e->kind == EFFECT_KILL && a->child) {
        child_kill(a->child);
    } else if (e->kind == EFFECT_SEND_LOG) {
        send_output(a, e);
    } else if (e->kind == EFFECT_FORGET) {
        a->is_forgotten = true;
        remove_if_over(a);
    }
}

bool attempts_has_failed(const struct attempts *all)
{
    for (const struct attempt *a = all->first; a; a = a->next)
        if (a->spawn_failure)
            return true;
    return false;
}

void attempts_tell_failed(struct attempts *all, struct agent_turn *t)
{
    for (struct attempt *a = all->first, *next; a; a = next) {
        next = a->next;
        if (!a->spawn_failure)
            continue;
        log_error("job=%" PRIu64 " attempt=%u rank=%u msg=\"%s\"", a->job, a->number, a->rank,
                  a->spawn_failure);
        tell_output(a, t);
        agent_trainer_exited(all->shell.agent, t, a->job, a->number, 1, 0, a->spawn_failure);
        free(a->spawn_failure);
        a->spawn_failure = NULL;
        remove_if_over(a);
    }
}

void attempts_stored(struct attempts *all, const Ballast__Ack *ack)
{
    struct attempt *a = attempt_find(all, ack->job_id, ack->attempt);
    if (a && a->spool)
        spool_trim(a->spool, ack->log_offset);
}

/* ---- figures -------------------------------------------------------------------------------- */

static uint64_t resident_bytes(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    FILE *f = fopen(path, "re");
    unsigned long long n_pages_all, n_pages = 0;
    if (f && fscanf(f, "%llu %llu", &n_pages_all, &n_pages) != 2)
        n_pages = 0;
    if (f)
        fclose(f);
    return (uint64_t)n_pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

uint64_t attempts_resident_bytes(const struct attempts *all)
{
    uint64_t n_bytes = 0;
    for (const struct attempt *a = all->first; a; a = a->next)
        if (a->child)
            n_bytes += resident_bytes(child_pid(a->child));
    return n_bytes;
}

void attempts_log(const struct attempts *all)
{
    for (const struct attempt *a = all->first; a; a = a->next)
        log_info("job=%" PRIu64 " attempt=%u rank=%u pid=%d output_bytes=%" PRIu64
                 " dropped_bytes=%" PRIu64, a->job, a->number, a->rank,
                 a->child ? (int)child_pid(a->child) : 0, a->spool ? spool_bytes(a->spool) : 0,
                 a->spool ? spool_dropped_bytes(a->spool) : 0);
}
