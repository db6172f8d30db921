/* test_channel.c - frames in pieces, states that replace each other, an orphan that ends */
#include "worker/channel.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/mem.h"
#include "tests/patience.h"

static size_t pack_state(uint64_t step, uint8_t **out_bytes)
{
    Ballast__RankState state = BALLAST__RANK_STATE__INIT;
    state.job_id = 7;
    state.step = step;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STATE;
    m.state = &state;
    return channel_pack(&m, out_bytes);
}

/* NULL when none is whole yet. */
static Ballast__TrainerMessage *next_message(struct channel_reader *r)
{
    const uint8_t *bytes = NULL;
    size_t n_bytes = 0;
    int rc = channel_reader_next(r, &bytes, &n_bytes, NULL);
    assert_true(rc >= 0);
    if (rc == 0)
        return NULL;
    Ballast__TrainerMessage *m = ballast__trainer_message__unpack(NULL, n_bytes, bytes);
    assert_non_null(m);
    return m;
}

static void frames_arrive_whole_whatever_the_pieces(void **unused)
{
    (void)unused;
    uint8_t *bytes = NULL;
    size_t n_bytes = 0;
    for (uint64_t step = 0; step < 20; step++) {
        uint8_t *one;
        size_t n = pack_state(step * step * 1000, &one);
        bytes = xrealloc(bytes, n_bytes + n);
        memcpy(bytes + n_bytes, one, n);
        n_bytes += n;
        free(one);
    }
    for (size_t piece = 1; piece <= n_bytes; piece++) {
        struct channel_reader r = {0};
        uint64_t step = 0;
        for (size_t at = 0; at < n_bytes; at += piece) {
            channel_reader_add(&r, bytes + at, n_bytes - at < piece ? n_bytes - at : piece);
            Ballast__TrainerMessage *m;
            while ((m = next_message(&r))) {
                assert_int_equal(m->state->step, step * step * 1000);
                step++;
                ballast__trainer_message__free_unpacked(m, NULL);
            }
        }
        assert_int_equal(step, 20);
        channel_reader_fini(&r);
    }
    free(bytes);
}

static void a_length_that_no_frame_has_is_refused(void **unused)
{
    (void)unused;
    static const uint8_t bytes[] = {0xff, 0xff, 0xff, 0x7f};
    struct channel_reader r = {0};
    struct err err = {0};
    const uint8_t *packed = NULL;
    size_t n_packed = 0;
    channel_reader_add(&r, bytes, 3);
    assert_int_equal(channel_reader_next(&r, &packed, &n_packed, &err), 0);
    channel_reader_add(&r, bytes + 3, 1);
    assert_int_equal(channel_reader_next(&r, &packed, &n_packed, &err), -EPROTO);
    assert_non_null(strstr(err.text, "at most"));
    assert_null(packed);
    channel_reader_fini(&r);
}

/* ---- a trainer on one end, a daemon that reads and writes frames on the other --------------- */

struct seen {
    int n_stops;
    int mode;
    int n_plans;
    uint32_t prepared, aborted, settings, peers;
};

static void note_stop(void *user, const Ballast__Stop *stop)
{
    struct seen *seen = user;
    seen->mode = stop ? (int)stop->mode : -1;
    __atomic_add_fetch(&seen->n_stops, 1, __ATOMIC_SEQ_CST);
}

static void note_prepare(void *user, const Ballast__Prepare *prepare)
{
    struct seen *seen = user;
    seen->prepared = prepare->placement->epoch;
    __atomic_add_fetch(&seen->n_plans, 1, __ATOMIC_SEQ_CST);
}

static void note_abort_plan(void *user, const Ballast__AbortPlan *abort_plan)
{
    struct seen *seen = user;
    seen->aborted = abort_plan->epoch;
    __atomic_add_fetch(&seen->n_plans, 1, __ATOMIC_SEQ_CST);
}

static void note_settings(void *user, const Ballast__Settings *settings)
{
    struct seen *seen = user;
    seen->settings = settings->revision;
    __atomic_add_fetch(&seen->n_plans, 1, __ATOMIC_SEQ_CST);
}

static void note_peers(void *user, const Ballast__Peers *peers)
{
    struct seen *seen = user;
    seen->peers = (uint32_t)peers->n_peers;
    __atomic_add_fetch(&seen->n_plans, 1, __ATOMIC_SEQ_CST);
}

static const struct channel_events events = {note_stop, note_prepare, note_abort_plan,
                                             note_settings, note_peers};

static void wait_for(const int *counter, int value)
{
    uint64_t end_ns = patience_end_ns(5);
    while (__atomic_load_n(counter, __ATOMIC_SEQ_CST) < value && clock_now_ns() < end_ns)
        usleep(1000);
    assert_true(__atomic_load_n(counter, __ATOMIC_SEQ_CST) >= value);
}

static void write_message(int fd, const Ballast__TrainerMessage *m)
{
    uint8_t *bytes;
    size_t n = channel_pack(m, &bytes);
    assert_int_equal(write(fd, bytes, n), n);
    free(bytes);
}

static void write_start(int fd, job_id job)
{
    Ballast__Start start = BALLAST__START__INIT;
    start.job_id = job;
    start.rank = 3;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &start;
    write_message(fd, &m);
}

static void write_plan(int fd, uint32_t epoch)
{
    Ballast__Placement placement = BALLAST__PLACEMENT__INIT;
    Ballast__Prepare prepare = BALLAST__PREPARE__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    placement.epoch = epoch;
    prepare.placement = &placement;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_PREPARE;
    m.prepare = &prepare;
    write_message(fd, &m);
    Ballast__AbortPlan abort_plan = BALLAST__ABORT_PLAN__INIT;
    abort_plan.epoch = epoch;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_ABORT_PLAN;
    m.abort_plan = &abort_plan;
    write_message(fd, &m);
}

static void write_stop(int fd, Ballast__StopMode mode)
{
    Ballast__Stop stop = BALLAST__STOP__INIT;
    stop.mode = mode;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STOP;
    m.stop = &stop;
    write_message(fd, &m);
}

/* Blocks for one message. */
static Ballast__TrainerMessage *read_message(int fd, struct channel_reader *r)
{
    Ballast__TrainerMessage *m;
    while (!(m = next_message(r))) {
        uint8_t bytes[512];
        ssize_t n = read(fd, bytes, sizeof bytes);
        assert_true(n > 0);
        channel_reader_add(r, bytes, (size_t)n);
    }
    return m;
}

static void start_stop_and_the_end(void **unused)
{
    (void)unused;
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    struct seen seen = {0};
    struct channel *c;
    assert_int_equal(channel_open(fds[1], &events, &seen, &c, NULL), 0);

    write_start(fds[0], 42);
    write_start(fds[0], 43); /* a repeated START changes nothing */
    const Ballast__Start *start;
    assert_int_equal(channel_wait_start(c, &start, NULL), 0);
    assert_int_equal(start->job_id, 42);
    assert_int_equal(start->rank, 3);

    write_stop(fds[0], BALLAST__STOP_MODE__STOP_CHECKPOINT);
    write_stop(fds[0], BALLAST__STOP_MODE__STOP_NOW);
    wait_for(&seen.n_stops, 2);
    assert_int_equal(seen.mode, BALLAST__STOP_MODE__STOP_NOW);

    write_plan(fds[0], 5);
    wait_for(&seen.n_plans, 2);
    assert_int_equal(seen.prepared, 5);
    assert_int_equal(seen.aborted, 5);

    Ballast__Settings settings = BALLAST__SETTINGS__INIT;
    Ballast__TrainerMessage changed = BALLAST__TRAINER_MESSAGE__INIT;
    settings.revision = 6;
    changed.what_case = BALLAST__TRAINER_MESSAGE__WHAT_SETTINGS;
    changed.settings = &settings;
    write_message(fds[0], &changed);
    wait_for(&seen.n_plans, 3);
    assert_int_equal(seen.settings, 6);

    Ballast__StepReport step = BALLAST__STEP_REPORT__INIT;
    step.step = 9;
    channel_send_step(c, &step);
    Ballast__LoadReport load = BALLAST__LOAD_REPORT__INIT;
    load.last_step = 8;
    channel_send_load(c, &load);
    Ballast__RankState state = BALLAST__RANK_STATE__INIT;
    state.phase = BALLAST__RANK_PHASE__RANK_STOPPED;
    channel_send_state(c, &state);
    channel_close(c); /* sends what waits */

    struct channel_reader r = {0};
    Ballast__TrainerMessage *m = read_message(fds[0], &r);
    assert_int_equal(m->what_case, BALLAST__TRAINER_MESSAGE__WHAT_STEP);
    assert_int_equal(m->step->step, 9);
    ballast__trainer_message__free_unpacked(m, NULL);
    m = read_message(fds[0], &r);
    assert_int_equal(m->load->last_step, 8);
    ballast__trainer_message__free_unpacked(m, NULL);
    m = read_message(fds[0], &r);
    assert_int_equal(m->state->phase, BALLAST__RANK_PHASE__RANK_STOPPED);
    ballast__trainer_message__free_unpacked(m, NULL);
    channel_reader_fini(&r);
    close(fds[0]);
}

static void a_slow_daemon_costs_steps_but_no_state(void **unused)
{
    (void)unused;
    enum { N_STEPS = 20000 };
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    struct seen seen = {0};
    struct channel *c;
    assert_int_equal(channel_open(fds[1], &events, &seen, &c, NULL), 0);
    uint64_t start_ns = clock_now_ns();
    Ballast__StepReport step = BALLAST__STEP_REPORT__INIT;
    Ballast__RankState state = BALLAST__RANK_STATE__INIT;
    for (uint64_t i = 1; i <= N_STEPS; i++) {
        step.step = state.step = i;
        channel_send_step(c, &step);
        channel_send_state(c, &state);
    }
    assert_true(was_soon(start_ns, 2)); /* nobody has read a byte */

    struct channel_reader r = {0};
    uint64_t n_steps = 0, last_step = 0, last_state = 0;
    while (last_state < N_STEPS) {
        Ballast__TrainerMessage *m = read_message(fds[0], &r);
        if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP) {
            assert_true(m->step->step > last_step);
            last_step = m->step->step;
            n_steps++;
        } else {
            assert_true(m->state->step > last_state);
            last_state = m->state->step;
        }
        ballast__trainer_message__free_unpacked(m, NULL);
    }
    assert_int_equal(last_step, N_STEPS); /* the oldest went, not the newest */
    assert_true(n_steps < N_STEPS);
    channel_reader_fini(&r);
    channel_close(c);
    close(fds[0]);
}

static void an_orphan_ends_although_its_step_loop_hangs(void **unused)
{
    (void)unused;
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(fds[0]);
        static struct seen seen;
        struct channel *c;
        if (channel_open(fds[1], &events, &seen, &c, NULL) < 0)
            _exit(9);
        for (;;)
            pause();
    }
    close(fds[1]);
    usleep(20000);
    uint64_t start_ns = clock_now_ns();
    close(fds[0]); /* as a kill -9 of the daemon does */
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EXIT_FAILURE);
    assert_true(was_soon(start_ns, 3));
}

static void note_stop_late(void *user, const Ballast__Stop *stop)
{
    usleep(100000);
    note_stop(user, stop);
}

/* Who was waiting for a START then frees what the events look at. */
static void an_orphan_hears_no_event_after_its_close(void **unused)
{
    (void)unused;
    enum { TOLD = 7, NOT_TOLD = 8 };
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct channel_events late = events;
        struct seen seen = {0};
        struct channel *c;
        const Ballast__Start *start;
        late.stop = note_stop_late;
        close(fds[0]);
        if (channel_open(fds[1], &late, &seen, &c, NULL) < 0 ||
            channel_wait_start(c, &start, NULL) != -ECONNRESET)
            _exit(9);
        channel_close(c);
        _exit(seen.n_stops == 1 ? TOLD : NOT_TOLD);
    }
    close(fds[1]);
    close(fds[0]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) != EXIT_FAILURE) /* a slow machine: its thread was faster */
        assert_int_equal(WEXITSTATUS(status), TOLD);
}

static void a_descriptor_that_is_no_channel_is_refused(void **unused)
{
    (void)unused;
    struct channel *c;
    struct err err = {0};
    assert_int_equal(channel_open(987, &events, NULL, &c, &err), -EBADF);
    assert_non_null(strstr(err.text, "987"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frames_arrive_whole_whatever_the_pieces),
        cmocka_unit_test(a_length_that_no_frame_has_is_refused),
        cmocka_unit_test(start_stop_and_the_end),
        cmocka_unit_test(a_slow_daemon_costs_steps_but_no_state),
        cmocka_unit_test(an_orphan_ends_although_its_step_loop_hangs),
        cmocka_unit_test(an_orphan_hears_no_event_after_its_close),
        cmocka_unit_test(a_descriptor_that_is_no_channel_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
