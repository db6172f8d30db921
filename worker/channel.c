/* channel.c - frames of the socketpair, and the trainer's thread that reads and writes them
 *
 * The step loop only ever copies into memory: the newest state has one place, reports of
 * steps and loads a bounded ring each. The thread alone touches the socket. Reports go out before
 * the state, so that the daemon has heard of a step before it hears that the rank has finished. */
#include "worker/channel.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/progress.h"

#define LENGTH_BYTES 4
#define STEPS_WAITING_MAX 256u
#define LOADS_WAITING_MAX 8u
#define REPEAT_MS 1000 /* between two words that all goes on */
#define SETTLE_MS 1000

/* ---- frames ----------------------------------------------------------------------------- */

size_t channel_pack(const Ballast__TrainerMessage *m, uint8_t **out_bytes)
{
    size_t n = ballast__trainer_message__get_packed_size(m);
    assert(n <= BULK_BYTES_MAX);
    uint8_t *bytes = xcalloc(1, LENGTH_BYTES + n);
    for (int i = 0; i < LENGTH_BYTES; i++)
        bytes[i] = (uint8_t)(n >> (8 * i));
    ballast__trainer_message__pack(m, bytes + LENGTH_BYTES);
    *out_bytes = bytes;
    return LENGTH_BYTES + n;
}

void channel_reader_add(struct channel_reader *r, const void *bytes, size_t n_bytes)
{
    if (n_bytes == 0)
        return;
    if (r->n_taken) {
        memmove(r->bytes, r->bytes + r->n_taken, r->n_bytes - r->n_taken);
        r->n_bytes -= r->n_taken;
        r->n_taken = 0;
    }
    if (r->n_bytes + n_bytes > r->n_alloc) {
        r->n_alloc = 2 * (r->n_bytes + n_bytes);
        r->bytes = xrealloc(r->bytes, r->n_alloc);
    }
    memcpy(r->bytes + r->n_bytes, bytes, n_bytes);
    r->n_bytes += n_bytes;
}

int channel_reader_next(struct channel_reader *r, const uint8_t **out_bytes, size_t *out_n_bytes,
                        struct err *err)
{
    size_t n_here = r->n_bytes - r->n_taken;
    if (n_here < LENGTH_BYTES)
        return 0;
    const uint8_t *p = r->bytes + r->n_taken;
    uint32_t n = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    if (n > BULK_BYTES_MAX)
        return err_set(err, -EPROTO, "a frame of %u bytes between daemon and trainer; at most %u",
                       n, BULK_BYTES_MAX);
    if (n_here - LENGTH_BYTES < n)
        return 0;
    r->n_taken += LENGTH_BYTES + n;
    *out_bytes = p + LENGTH_BYTES;
    *out_n_bytes = n;
    return 1;
}

void channel_reader_fini(struct channel_reader *r)
{
    free(r->bytes);
    memset(r, 0, sizeof *r);
}

/* ---- the trainer's end ------------------------------------------------------------------- */

struct frame {
    uint8_t *bytes;
    size_t   n_bytes;
};

/* The oldest go first when it is full. */
struct ring {
    struct frame *frames; /* n_max */
    size_t n_max, first, n, n_dropped;
};

struct channel {
    int fd, wake_fd;
    pthread_t thread;
    const struct channel_events *events;
    void *user;

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    Ballast__TrainerMessage *start;
    struct frame state; /* no bytes: none waits */
    struct frame last;  /* the newest state, sent or not */
    bool     is_repeating;
    uint64_t progress, repeated_ns; /* when last was sent again */
    struct frame step_frames[STEPS_WAITING_MAX], load_frames[LOADS_WAITING_MAX];
    struct ring steps, loads;
    struct frame out;   /* the one being sent */
    size_t out_sent;
    bool is_gone, is_closing;
};

static void ring_put(struct ring *r, struct frame f)
{
    if (r->n == r->n_max) {
        free(r->frames[r->first].bytes);
        r->first = (r->first + 1) % r->n_max;
        r->n--;
        r->n_dropped++;
    }
    r->frames[(r->first + r->n++) % r->n_max] = f;
}

static struct frame ring_take(struct ring *r)
{
    struct frame f = r->frames[r->first];
    r->first = (r->first + 1) % r->n_max;
    r->n--;
    return f;
}

static void channel_wake(struct channel *c)
{
    uint64_t one = 1;
    /* Full means that a wake-up is pending already. */
    if (write(c->wake_fd, &one, sizeof one) < 0)
        assert(errno == EAGAIN);
}

/* With the lock held: the next frame to send, if any, becomes c->out. */
static bool channel_pick(struct channel *c)
{
    if (c->out.bytes)
        return true;
    if (c->steps.n || c->loads.n) {
        c->out = ring_take(c->steps.n ? &c->steps : &c->loads);
    } else {
        c->out = c->state;
        c->state = (struct frame){0};
    }
    c->out_sent = 0;
    return c->out.bytes != NULL;
}

/* With the lock held; the socket never blocks. Returns false when the daemon is gone. */
static bool channel_flush(struct channel *c)
{
    while (channel_pick(c)) {
        ssize_t n = send(c->fd, c->out.bytes + c->out_sent, c->out.n_bytes - c->out_sent,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0)
            return errno == EAGAIN || errno == EINTR;
        c->out_sent += (size_t)n;
        if (c->out_sent == c->out.n_bytes) {
            free(c->out.bytes);
            c->out = (struct frame){0};
        }
    }
    pthread_cond_broadcast(&c->changed);
    return true;
}

/* With the lock held. */
static void channel_repeat(struct channel *c)
{
    uint64_t now = clock_now_ns(), progress = progress_count();
    if (!c->is_repeating || !c->last.bytes || progress == c->progress ||
        now - c->repeated_ns < REPEAT_MS * NS_PER_MS)
        return;
    c->progress = progress;
    c->repeated_ns = now;
    if (!c->state.bytes)
        c->state = (struct frame){xmemdup(c->last.bytes, c->last.n_bytes), c->last.n_bytes};
}

static bool channel_take(struct channel *c, const uint8_t *packed, size_t n_bytes)
{
    Ballast__TrainerMessage *m = ballast__trainer_message__unpack(NULL, n_bytes, packed);
    if (!m)
        return false;
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STOP) {
        c->events->stop(c->user, m->stop);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_PREPARE) {
        c->events->prepare(c->user, m->prepare);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_ABORT_PLAN) {
        c->events->abort_plan(c->user, m->abort_plan);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_SETTINGS) {
        c->events->settings(c->user, m->settings);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_PEERS) {
        c->events->peers(c->user, m->peers);
    } else if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_START) {
        pthread_mutex_lock(&c->lock);
        if (!c->start) {
            c->start = m;
            m = NULL;
            pthread_cond_broadcast(&c->changed);
        }
        pthread_mutex_unlock(&c->lock);
    }
    ballast__trainer_message__free_unpacked(m, NULL);
    return true;
}

/* Returns false when nothing more can come. */
static bool channel_read(struct channel *c, struct channel_reader *reader)
{
    uint8_t bytes[4096];
    ssize_t n = recv(c->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    if (n == 0)
        return false;
    channel_reader_add(reader, bytes, (size_t)n);
    const uint8_t *packed = NULL;
    size_t n_packed = 0;
    int rc;
    while ((rc = channel_reader_next(reader, &packed, &n_packed, NULL)) > 0)
        if (!channel_take(c, packed, n_packed))
            rc = -EPROTO;
    if (rc < 0)
        log_error("msg=\"what came from the daemon is no message\"");
    return rc == 0;
}

/* The daemon is gone: nobody would ever stop this process, so it stops itself, even if the step
 * loop hangs in a collective. Once it says that it is gone, what the events look at may be
 * freed. */
static void channel_orphaned(struct channel *c)
{
    c->events->stop(c->user, NULL);
    pthread_mutex_lock(&c->lock);
    c->is_gone = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    poll(NULL, 0, CHANNEL_ORPHAN_MS);
    _exit(EXIT_FAILURE);
}

static void *channel_run(void *arg)
{
    struct channel *c = arg;
    struct channel_reader reader = {0};
    for (;;) {
        pthread_mutex_lock(&c->lock);
        channel_repeat(c);
        bool is_there = channel_flush(c);
        bool is_closing = c->is_closing, wants_out = c->out.bytes != NULL;
        int timeout_ms = c->is_repeating ? REPEAT_MS : -1;
        pthread_mutex_unlock(&c->lock);
        if (is_closing)
            break;
        struct pollfd fds[] = {
            {.fd = c->fd, .events = (short)(POLLIN | (wants_out ? POLLOUT : 0))},
            {.fd = c->wake_fd, .events = POLLIN},
        };
        if (is_there && poll(fds, 2, timeout_ms) < 0)
            continue; /* a signal */
        uint64_t n_wakes;
        if (fds[1].revents && read(c->wake_fd, &n_wakes, sizeof n_wakes) < 0)
            assert(errno == EAGAIN);
        if (!is_there || (fds[0].revents && !channel_read(c, &reader)))
            channel_orphaned(c);
    }
    channel_reader_fini(&reader);
    return NULL;
}

int channel_open(int fd, const struct channel_events *events, void *user,
                 struct channel **out_channel, struct err *err)
{
    int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd < 0)
        return err_set(err, -errno, "eventfd: %s", strerror(errno));
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
        int code = -errno;
        close(wake_fd);
        return err_set(err, code, "descriptor %d is no channel to a daemon: %s", fd,
                       strerror(-code));
    }
    struct channel *c = xcalloc(1, sizeof *c);
    c->fd = fd;
    c->wake_fd = wake_fd;
    c->events = events;
    c->steps = (struct ring){.frames = c->step_frames, .n_max = STEPS_WAITING_MAX};
    c->loads = (struct ring){.frames = c->load_frames, .n_max = LOADS_WAITING_MAX};
    c->user = user;
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);

    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals belong to the main thread */
    int rc = pthread_create(&c->thread, NULL, channel_run, c);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc) {
        pthread_cond_destroy(&c->changed);
        pthread_mutex_destroy(&c->lock);
        close(wake_fd);
        free(c);
        return err_set(err, -rc, "no thread for the channel: %s", strerror(rc));
    }
    *out_channel = c;
    return 0;
}

int channel_wait_start(struct channel *c, const Ballast__Start **out_start, struct err *err)
{
    pthread_mutex_lock(&c->lock);
    while (!c->start && !c->is_gone)
        pthread_cond_wait(&c->changed, &c->lock);
    const Ballast__Start *start = c->start ? c->start->start : NULL;
    pthread_mutex_unlock(&c->lock);
    if (!start)
        return err_set(err, -ECONNRESET, "the daemon went away before it said what to train");
    *out_start = start;
    return 0;
}

void channel_send_state(struct channel *c, const Ballast__RankState *state)
{
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = (Ballast__RankState *)state;
    struct frame f;
    f.n_bytes = channel_pack(&m, &f.bytes);
    pthread_mutex_lock(&c->lock);
    free(c->state.bytes);
    c->state = f;
    free(c->last.bytes);
    c->last = (struct frame){xmemdup(f.bytes, f.n_bytes), f.n_bytes};
    pthread_mutex_unlock(&c->lock);
    channel_wake(c);
}

void channel_repeat_state(struct channel *c, bool is_on)
{
    pthread_mutex_lock(&c->lock);
    bool is_news = c->is_repeating != is_on;
    c->is_repeating = is_on;
    pthread_mutex_unlock(&c->lock);
    if (is_news)
        channel_wake(c);
}

static void send_report(struct channel *c, struct ring *ring, const Ballast__TrainerMessage *m)
{
    struct frame f;
    f.n_bytes = channel_pack(m, &f.bytes);
    pthread_mutex_lock(&c->lock);
    ring_put(ring, f);
    pthread_mutex_unlock(&c->lock);
    channel_wake(c);
}

void channel_send_step(struct channel *c, const Ballast__StepReport *step)
{
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STEP;
    m.step = (Ballast__StepReport *)step;
    send_report(c, &c->steps, &m);
}

void channel_send_load(struct channel *c, const Ballast__LoadReport *load)
{
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_LOAD;
    m.load = (Ballast__LoadReport *)load;
    send_report(c, &c->loads, &m);
}

/* Until all is sent, the daemon is gone or SETTLE_MS are over. With the lock. */
static void wait_settled(struct channel *c)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += SETTLE_MS / 1000;
    while (!c->is_gone && (c->out.bytes || c->state.bytes || c->steps.n || c->loads.n))
        if (pthread_cond_timedwait(&c->changed, &c->lock, &until) == ETIMEDOUT)
            break;
}

void channel_settle(struct channel *c)
{
    pthread_mutex_lock(&c->lock);
    wait_settled(c);
    pthread_mutex_unlock(&c->lock);
}

/* Returns whether the daemon is gone. */
static bool channel_drain(struct channel *c)
{
    pthread_mutex_lock(&c->lock);
    wait_settled(c);
    bool is_gone = c->is_gone;
    c->is_closing = true;
    if (c->steps.n_dropped || c->loads.n_dropped)
        log_warn("steps=%zu loads=%zu msg=\"the daemon read too slowly: reports were dropped\"",
                 c->steps.n_dropped, c->loads.n_dropped);
    pthread_mutex_unlock(&c->lock);
    channel_wake(c);
    return is_gone;
}

void channel_close(struct channel *c)
{
    if (!c)
        return;
    if (channel_drain(c)) {
        /* Its thread ends the process soon, should the caller not manage to. */
        pthread_detach(c->thread);
        return;
    }
    pthread_join(c->thread, NULL);
    free(c->out.bytes);
    free(c->state.bytes);
    free(c->last.bytes);
    while (c->steps.n)
        free(ring_take(&c->steps).bytes);
    while (c->loads.n)
        free(ring_take(&c->loads).bytes);
    if (c->start)
        ballast__trainer_message__free_unpacked(c->start, NULL);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    close(c->wake_fd);
    close(c->fd);
    free(c);
}
