/* ctl_follow.c - a job's progress as it happens: a line redrawn on a terminal, else lines
 *
 * Ctrl-C detaches, because the job belongs to the coordinator and not to this terminal; a second
 * one within two seconds asks for the cancel that some expect from the first. */
#include "coordinator/ctl.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/types.h"
#include "coordinator/event.h"

#define HOLD_MS          1000u
#define LINES_APART_NS   (2 * NS_PER_S) /* without a terminal */
#define SECOND_CTRL_C_NS (2 * NS_PER_S)

struct follow {
    struct ctl *c;
    uint64_t job_id, after_step, steps;
    Ballast__JobState state;
    char     reason[256];
    bool     is_terminal, has_line;
    uint64_t first_step, first_ns, last_line_ns; /* for the time left */
};

static void end_line(struct follow *f)
{
    if (f->has_line)
        fputc('\n', stderr);
    f->has_line = false;
}

static void show_state(struct follow *f, const Ballast__Job *job)
{
    if (job->state == f->state && !strcmp(job->reason, f->reason))
        return;
    f->state = job->state;
    snprintf(f->reason, sizeof f->reason, "%s", job->reason);
    end_line(f);
    ctl_hint(f->c, "job %" PRIu64 " %s%s%s", f->job_id, event_job_state(job->state),
             *job->reason ? ": " : "", job->reason);
}

/* "step 120/300  loss 2.3456  1234 tokens/s  imbalance 1.12  left 00:01:30" */
static void show_step(struct follow *f, const Ballast__StepReport *s)
{
    char line[256], left[CLOCK_STAMP_BYTES] = "";
    uint64_t now_ns = clock_now_ns();
    bool is_last = s->step >= f->steps, is_validated = isfinite(s->validation_loss);
    if (!f->first_ns) {
        f->first_ns = now_ns;
        f->first_step = s->step;
    }
    bool is_soon = !f->is_terminal && now_ns - f->last_line_ns < LINES_APART_NS;
    if (f->c->quiet || (is_soon && !is_last && !is_validated))
        return;
    f->last_line_ns = now_ns;
    int n = snprintf(line, sizeof line, "step %" PRIu64 "/%" PRIu64 "  loss %.4f", s->step,
                     f->steps, s->loss);
    if (is_validated)
        n += snprintf(line + n, sizeof line - (size_t)n, "  validation %.4f", s->validation_loss);
    n += snprintf(line + n, sizeof line - (size_t)n, "  %.0f tokens/s", s->tokens_per_second);
    if (isfinite(s->imbalance))
        n += snprintf(line + n, sizeof line - (size_t)n, "  imbalance %.2f", s->imbalance);
    if (s->step > f->first_step && !is_last) {
        double per_step = (double)(now_ns - f->first_ns) / (double)(s->step - f->first_step);
        clock_duration((uint64_t)(per_step * (double)(f->steps - s->step)), left);
        snprintf(line + n, sizeof line - (size_t)n, "  left %s", left);
    }
    /* A validation stays in sight; the line after it is a new one. */
    bool stays = !f->is_terminal || is_validated || is_last;
    fprintf(stderr, "%s%s%s", f->is_terminal ? "\r\033[K" : "", line, stays ? "\n" : "");
    f->has_line = !stays;
    fflush(stderr);
}

static int poll_steps(struct follow *f, uint32_t wait_ms)
{
    Ballast__MetricsRequest request = BALLAST__METRICS_REQUEST__INIT;
    const ProtobufCMessage *message;
    request.job_id = f->job_id;
    request.after_step = f->after_step;
    request.limit = 1000;
    request.wait_ms = wait_ms;
    int rc = ctl_poll(f->c, BALLAST__METHOD__METHOD_METRICS, &request.base, wait_ms, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__MetricsReply *reply = (const Ballast__MetricsReply *)message;
    for (size_t i = 0; i < reply->n_steps; i++) {
        f->after_step = reply->steps[i]->step;
        if (!f->is_terminal || i + 1 == reply->n_steps ||
            isfinite(reply->steps[i]->validation_loss))
            show_step(f, reply->steps[i]);
    }
    return CTL_OK;
}

static int poll_state(struct follow *f, const Ballast__Job **out_job)
{
    Ballast__JobWaitRequest request = BALLAST__JOB_WAIT_REQUEST__INIT;
    const ProtobufCMessage *message;
    request.job_id = f->job_id;
    int rc = ctl_poll(f->c, BALLAST__METHOD__METHOD_JOB_WAIT, &request.base, 0, &message);
    if (rc != CTL_OK)
        return rc;
    const Ballast__Job *job = ((const Ballast__JobReply *)message)->job;
    if (!job)
        return ctl_fail(f->c, CTL_PROTOCOL, "the coordinator's answer holds no job");
    f->steps = job->steps;
    show_state(f, job);
    *out_job = job;
    return CTL_OK;
}

/* After the first Ctrl-C: the job goes on, unless a second one comes soon. */
static int detach(struct follow *f)
{
    Ballast__JobRequest request = BALLAST__JOB_REQUEST__INIT;
    const ProtobufCMessage *message;
    uint64_t until_ns = clock_now_ns() + SECOND_CTRL_C_NS;
    end_line(f);
    fprintf(stderr, "detached; job %" PRIu64 " goes on (Ctrl-C again within 2 s cancels it)\n"
            "  ballast metrics %" PRIu64 " -f\n", f->job_id, f->job_id);
    while (ctl_interrupts < 2 && clock_now_ns() < until_ns)
        nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
    if (ctl_interrupts < 2)
        return CTL_OK;
    ctl_interrupts = 0;
    request.job_id = f->job_id;
    request.reason = "Ctrl-C in ballast submit --follow";
    int rc = ctl_call(f->c, BALLAST__METHOD__METHOD_JOB_CANCEL, &request.base, &message);
    if (rc == CTL_OK)
        fprintf(stderr, "job %" PRIu64 " is told to stop\n", f->job_id);
    return rc == CTL_OK ? CTL_SIGNAL + SIGINT : rc;
}

static void show_end(struct follow *f, const Ballast__Job *job)
{
    end_line(f);
    if (job->checkpoint_step)
        ctl_hint(f->c, "newest checkpoint: step %" PRIu64, job->checkpoint_step);
    if (job->state != BALLAST__JOB_STATE__JOB_DONE)
        ctl_hint(f->c, "what happened:  ballast events --job %" PRIu64 "\n"
                 "what it printed: ballast logs %" PRIu64, f->job_id, f->job_id);
}

int ctl_follow(struct ctl *c, job_id id)
{
    struct follow f = {.c = c, .job_id = id, .is_terminal = isatty(STDERR_FILENO)};
    const Ballast__Job *job = NULL;
    int rc;
    ctl_catch_interrupt();
    c->deadline_ns = c->timeout_ms ? clock_now_ns() + c->timeout_ms * NS_PER_MS : 0;
    do {
        arena_reset(&c->arena);
        rc = poll_state(&f, &job);
        if (rc == CTL_OK) /* steps that came with the end are shown too */
            rc = poll_steps(&f, job_state_is_ended(job->state) ? 0 : HOLD_MS);
    } while (rc == CTL_OK && !job_state_is_ended(job->state));
    if (ctl_interrupts)
        return detach(&f);
    end_line(&f);
    if (rc == CTL_WAIT_TIMEOUT)
        return ctl_fail(c, CTL_WAIT_TIMEOUT, "job %" PRIu64 " goes on; the time to follow it is "
                        "over", id);
    if (rc != CTL_OK)
        return rc;
    show_end(&f, job);
    return ctl_exit_of_job(job);
}
