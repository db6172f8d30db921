/* test_child.c - the daemon's view of a trainer process; this program is its own trainer */
#include "worker/child.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <uv.h>

#include "worker/channel.h"

/* ---- the trainer: says what it was told, then does as its job id says --- */

enum { JOB_FINISHES = 1, JOB_FLOODS, JOB_HANGS, JOB_LEAVES_A_CHILD, JOB_SENDS_NONSENSE };

static void ignore_stop(void *user, const Ballast__Stop *stop)
{
    (void)user;
    (void)stop;
}

static void ignore_prepare(void *user, const Ballast__Prepare *prepare)
{
    (void)user;
    (void)prepare;
}

static void ignore_abort_plan(void *user, const Ballast__AbortPlan *abort_plan)
{
    (void)user;
    (void)abort_plan;
}

static void ignore_settings(void *user, const Ballast__Settings *settings)
{
    (void)user;
    (void)settings;
}

static void ignore_peers(void *user, const Ballast__Peers *peers)
{
    (void)user;
    (void)peers;
}

static int trainer(const char *label)
{
    static const struct channel_events events = {ignore_stop, ignore_prepare, ignore_abort_plan,
                                                 ignore_settings, ignore_peers};
    struct channel *c;
    const Ballast__Start *start;
    if (channel_open(CHANNEL_FD, &events, NULL, &c, NULL) < 0 ||
        channel_wait_start(c, &start, NULL) < 0)
        return 9;
    char folder[256];
    printf("%s in %s\n", label, getcwd(folder, sizeof folder));
    fflush(stdout);
    fprintf(stderr, "and on stderr\n");
    Ballast__RankState state = BALLAST__RANK_STATE__INIT;
    state.phase = BALLAST__RANK_PHASE__RANK_READY;
    channel_send_state(c, &state);
    switch (start->job_id) {
    case JOB_FLOODS:
        for (int i = 0; i < 100000; i++)
            printf("line %d of a very talkative trainer\n", i);
        break;
    case JOB_HANGS:
        for (;;)
            pause();
    case JOB_LEAVES_A_CHILD:
        if (fork() == 0)
            for (;;)
                pause(); /* holds the pipes open */
        break;
    case JOB_SENDS_NONSENSE:
        if (write(CHANNEL_FD, "\xff\xff\xff\xff", 4) < 0)
            return 9;
        pause();
    }
    state.phase = BALLAST__RANK_PHASE__RANK_FINISHED;
    state.step = 77;
    channel_send_state(c, &state);
    channel_close(c);
    return 5;
}

/* ---- the daemon's side ---------------------------------------------------------------------- */

struct story {
    uv_loop_t loop;
    struct child *child;
    size_t n_output;
    char output[256]; /* the beginning */
    uint64_t last_step;
    int n_messages, n_closed, n_exited, exit_code, exit_signal;
    bool had_why, is_killed_when_ready;
};

static void on_message(void *context, const uint8_t *packed, size_t n_bytes)
{
    struct story *s = context;
    Ballast__TrainerMessage *m = ballast__trainer_message__unpack(NULL, n_bytes, packed);
    assert_non_null(m);
    s->n_messages++;
    s->last_step = m->state->step;
    ballast__trainer_message__free_unpacked(m, NULL);
    if (s->is_killed_when_ready)
        child_kill(s->child);
}

static void on_output(void *context, const void *bytes, size_t n_bytes)
{
    struct story *s = context;
    size_t n_free = sizeof s->output - 1 - s->n_output;
    if (s->n_output < sizeof s->output - 1)
        memcpy(s->output + s->n_output, bytes, n_bytes < n_free ? n_bytes : n_free);
    s->n_output += n_bytes;
}

static void on_closed(void *context, const char *why)
{
    struct story *s = context;
    s->n_closed++;
    s->had_why = why != NULL;
    if (why)
        child_kill(s->child);
}

static void on_exited(void *context, int exit_code, int exit_signal)
{
    struct story *s = context;
    s->n_exited++;
    s->exit_code = exit_code;
    s->exit_signal = exit_signal;
    child_destroy(s->child);
}

static const struct child_events events = {on_message, on_output, on_closed, on_exited};

static void tell(struct story *s, job_id job)
{
    struct child_options options = {.label = "label", .folder = "/"};
    assert_int_equal(uv_loop_init(&s->loop), 0);
    assert_int_equal(child_spawn(&s->loop, &options, &events, s, &s->child, NULL), 0);
    Ballast__Start start = BALLAST__START__INIT;
    start.job_id = job;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &start;
    child_send(s->child, &m);
    uv_run(&s->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&s->loop), 0);
    assert_int_equal(s->n_closed, 1);
    assert_int_equal(s->n_exited, 1);
}

static void its_last_words_come_before_its_end(void **unused)
{
    (void)unused;
    struct story s = {0};
    tell(&s, JOB_FINISHES);
    assert_int_equal(s.exit_code, 5);
    assert_int_equal(s.exit_signal, 0);
    assert_int_equal(s.last_step, 77);
    assert_string_equal(s.output, "label in /\nand on stderr\n");
    assert_false(s.had_why);
}

static void all_its_output_is_read(void **unused)
{
    (void)unused;
    struct story s = {0};
    tell(&s, JOB_FLOODS);
    assert_true(s.n_output > 3600000);
    assert_int_equal(s.exit_code, 5);
}

static void a_kill_ends_one_that_hangs(void **unused)
{
    (void)unused;
    struct story s = {.is_killed_when_ready = true};
    tell(&s, JOB_HANGS);
    assert_int_equal(s.exit_signal, SIGKILL);
    assert_int_equal(s.n_messages, 1);
}

static void its_group_goes_with_it(void **unused)
{
    (void)unused;
    struct story s = {0};
    tell(&s, JOB_LEAVES_A_CHILD); /* would wait for ever for the end of the pipes */
    assert_int_equal(s.exit_code, 5);
    assert_int_equal(s.last_step, 77);
}

static void nonsense_closes_its_channel(void **unused)
{
    (void)unused;
    struct story s = {0};
    tell(&s, JOB_SENDS_NONSENSE);
    assert_true(s.had_why);
    assert_int_equal(s.exit_signal, SIGKILL);
}

static void a_folder_that_is_missing_is_one_line(void **unused)
{
    (void)unused;
    struct story s = {0};
    struct child_options options = {.label = "x", .folder = "/no/such/folder"};
    struct err err = {0};
    assert_int_equal(uv_loop_init(&s.loop), 0);
    assert_int_equal(child_spawn(&s.loop, &options, &events, &s, &s.child, &err), -ENOENT);
    assert_non_null(strstr(err.text, "cannot start a trainer"));
    uv_run(&s.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&s.loop), 0);
    assert_int_equal(s.n_exited, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(its_last_words_come_before_its_end),
        cmocka_unit_test(all_its_output_is_read),
        cmocka_unit_test(a_kill_ends_one_that_hangs),
        cmocka_unit_test(its_group_goes_with_it),
        cmocka_unit_test(nonsense_closes_its_channel),
        cmocka_unit_test(a_folder_that_is_missing_is_one_line),
    };
    if (argc == 3 && !strcmp(argv[1], "--trainer"))
        return trainer(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
