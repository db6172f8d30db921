/* test_moves.c - experts move while four trainers train, and what refuses to */
#include "tests/trial.h"

#include "common/hf_config.h"
#include "tests/prepare.h"
#include "tests/staged.h"
#include "worker/shuffle.h"

static struct model_spec spec;

/* ---- plans ---------------------------------------------------------------------------------- */

/* The placement of the model's experts over n_devices, in order. */
static void slots_of(struct slots *s, uint32_t n_devices)
{
    uint32_t ranks[RANKS] = {0, 1, 2, 3};
    struct layout layout = {.ep = {ranks, n_devices, 0}};
    struct err err = {0};
    assert_int_equal(slots_init(s, &spec, &layout, 1, &err), 0);
}

/* base says what is in force; stage: per layer, or NULL. */
static void send_staged(struct trial *t, uint32_t rank, const struct slots *s, uint32_t base,
                        uint32_t *const *stage)
{
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_PREPARE;
    m.prepare = prepare_of(s, base, stage);
    send_message(t->fds[rank], &m);
}

static void send_prepare(struct trial *t, uint32_t rank, const struct slots *s, uint32_t base)
{
    send_staged(t, rank, s, base, NULL);
}

static void send_abort_plan(struct trial *t, uint32_t epoch)
{
    Ballast__AbortPlan abort_plan = BALLAST__ABORT_PLAN__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    abort_plan.job_id = 7;
    abort_plan.attempt = 1;
    abort_plan.epoch = epoch;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_ABORT_PLAN;
    m.abort_plan = &abort_plan;
    for (uint32_t r = 0; r < t->world; r++)
        send_message(t->fds[r], &m);
}

/* To a random placement of the next epoch; every second time in as many stages as there can be. */
static void propose(struct trial *t, struct slots *s, uint32_t base, uint64_t seed)
{
    struct slots before;
    uint32_t *stage[8] = {NULL};
    bool is_staged = seed % 2 == 0;
    slots_init_like(&before, s);
    slots_shuffle(s, seed);
    if (is_staged)
        staged(&before, s, stage);
    for (uint32_t r = 0; r < t->world; r++)
        send_staged(t, r, s, base, is_staged ? stage : NULL);
    for (uint32_t l = 0; l < 8; l++)
        free(stage[l]);
    slots_fini(&before);
}

/* Proposes random placements, one after the other, until the run is over. */
static uint32_t keep_moving(struct trial *t, struct slots *s, uint64_t seed)
{
    while (t->fds[0] >= 0) {
        uint32_t base = s->epoch;
        follow(t, t->step[0] + 2);
        if (t->fds[0] < 0)
            return base;
        propose(t, s, base, seed++);
        while (t->fds[0] >= 0 && t->placement[0] < s->epoch)
            follow(t, t->step[0] + 1);
        if (t->placement[0] < s->epoch) /* the end came first */
            return base;
    }
    return s->epoch;
}

/* ---- what must hold ------------------------------------------------------------------------- */

#define LONG_TRAIN TRAIN(40, ", micro_batch: 1")
#define WINDOWS    "rebalance: {window_steps: 5}\n"

/* Every window once, and in it every choice of every token. */
static void check_loads(const struct trial *t)
{
    uint32_t n_loads = 0;
    for (uint32_t step = 1; step <= 40; step++) {
        const Ballast__LoadReport *a = t->loads[step];
        if (!a)
            continue;
        n_loads++;
        assert_int_equal(step % 5, 0);
        assert_int_equal(a->first_step, step - 4);
        assert_int_equal(a->n_layers, 2);
        assert_int_equal(a->n_nodes, 1);
        assert_true(a->step_s > 0 && a->row_s > 0 && a->row_s < a->step_s);
        assert_true(a->device_imbalance >= 1 && a->expert_bytes == 3 * 16 * 16 * 4);
        for (size_t l = 0; l < 2; l++) {
            uint64_t sum = 0;
            for (size_t e = 0; e < a->layers[l]->n_tokens; e++)
                sum += a->layers[l]->tokens[e];
            assert_int_equal(sum, 5 * 8 * 24 * 2); /* steps, samples, tokens, top-k */
        }
    }
    assert_int_equal(n_loads, 8);
}

/* Not a bit of losses or of the final parameters and state knows where experts were. */
static void moves_change_no_bit_in_deterministic_mode(void **state)
{
    (void)state;
    static const struct {
        uint32_t n_devices;
        const char *keys;
    } rows[] = {
        {4, "  fsdp_shard_degree: 2\n  expert_parallel_degree: 4\n"},
        {2, "  fsdp_shard_degree: 4\n  expert_parallel_degree: 2\n"},
        {2, "  fsdp_shard_degree: 1\n  expert_parallel_degree: 2\n  expert_shard_degree: 1\n"
            "  activation_checkpointing: full\n"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct trial still, moved;
        struct slots s;
        char *keys = xasprintf("%s%s", rows[i].keys, WINDOWS DATA LONG_TRAIN);
        new_folder(NULL);
        start(&still, 4, "run-still", keys);
        still.keeps_loads = true;
        finish(&still);
        assert_all(&still, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
        slots_of(&s, rows[i].n_devices);
        start(&moved, 4, "run-moved", keys);
        uint32_t n_moves = keep_moving(&moved, &s, 100 * i);
        finish(&moved);
        assert_all(&moved, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
        printf("layout %zu: %u migrations\n", i, n_moves);
        assert_true(n_moves >= 2);
        for (uint32_t step = 1; step <= 40; step++)
            if (moved.loss[step] != still.loss[step])
                fail_msg("layout %zu step %u: loss %.17g with moves, %.17g without", i, step,
                         moved.loss[step], still.loss[step]);
        assert_same_file("run-still/step-40/model.safetensors",
                         "run-moved/step-40/model.safetensors");
        assert_same_file("run-still/step-40/ballast/m/model.safetensors",
                         "run-moved/step-40/ballast/m/model.safetensors");
        assert_same_file("run-still/step-40/ballast/v/model.safetensors",
                         "run-moved/step-40/ballast/v/model.safetensors");
        check_loads(&still);
        forget_loads(&still);
        slots_fini(&s);
        free(keys);
    }
}

/* A checkpoint knows experts by name: it resumes under any placement, which START names. */
static void an_attempt_begins_with_the_placement_in_force(void **state)
{
    (void)state;
    struct trial whole, part;
    struct slots s;
    const char *keys = "  fsdp_shard_degree: 2\n  expert_parallel_degree: 4\n" DATA
                       TRAIN(24, ", micro_batch: 1");
    start(&whole, 4, "run-whole", keys);
    finish(&whole);
    hold_before(6);
    start(&part, 4, "run-part", keys);
    follow(&part, 5);
    stop(&part, BALLAST__STOP_MODE__STOP_CHECKPOINT);
    let_go();
    finish(&part);
    assert_all(&part, BALLAST__RANK_PHASE__RANK_STOPPED, 0);
    slots_of(&s, 4);
    slots_shuffle(&s, 9);
    s.epoch = 6;
    Ballast__Placement placement = *prepare_of(&s, 0, NULL)->placement;
    trial_placement = &placement;
    start(&part, 4, "run-part", keys);
    finish(&part);
    assert_all(&part, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_int_equal(part.placement[3], 6);
    assert_same_file("run-whole/step-24/model.safetensors", "run-part/step-24/model.safetensors");
    placement.n_slots++; /* of another job */
    start(&part, 4, "run-part", keys);
    trial_placement = NULL;
    finish(&part);
    assert_all(&part, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_true(part.retryable[0]);
    assert_non_null(strstr(part.text[0], "this job has 4 with 3"));
    slots_fini(&s);
}

static void refusals_aborts_and_repeats_leave_all_as_it_is(void **state)
{
    (void)state;
    struct trial t;
    struct slots s, wrong;
    start(&t, 4, "run", "  fsdp_shard_degree: 1\n  expert_parallel_degree: 4\n" WINDOWS DATA
          "train: {steps: 100000, global_batch: 8, micro_batch: 1, optimizer: {lr: 1e-3}}\n");
    follow(&t, 2);
    slots_of(&s, 4);
    slots_of(&wrong, 2);
    wrong.epoch = 1;
    for (uint32_t r = 0; r < 4; r++)
        send_prepare(&t, r, &wrong, 0);
    follow_until(&t, &t.rejected[0], 1);
    assert_non_null(strstr(t.plan_text[0], "placement 1 is of 2 devices with 5 slots, this job "
                                           "has 4 with 3"));
    slots_shuffle(&s, 5);
    s.epoch = 2;
    for (uint32_t r = 0; r < 4; r++)
        send_prepare(&t, r, &s, 1);
    follow_until(&t, &t.rejected[0], 2);
    assert_non_null(strstr(t.plan_text[0], "starts from placement 1, in force is 0"));
    s.epoch = 3; /* three of four: nobody moves, and the wish to stop is granted */
    for (uint32_t r = 0; r < 3; r++)
        send_prepare(&t, r, &s, 0);
    follow_until(&t, &t.prepared[0], 3);
    follow(&t, t.step[0] + 3);
    assert_int_equal(t.placement[0], 0);
    send_abort_plan(&t, 3);
    follow_until(&t, &t.rejected[0], 3);
    assert_non_null(strstr(t.plan_text[0], "plan 3 was aborted"));
    send_prepare(&t, 3, &s, 0); /* late: the abort was there first */
    follow(&t, t.step[0] + 3);
    assert_int_equal(t.placement[0], 0);
    s.epoch = 4;
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t r = 0; r < 4; r++)
            send_prepare(&t, r, &s, 0);
    follow_until(&t, &t.placement[0], 4);
    send_abort_plan(&t, 4); /* too late */
    follow(&t, t.step[0] + 2);
    assert_int_equal(t.placement[0], 4);
    assert_true(t.moved_bytes[0] > 0 && t.prepared[0] == 4 && t.rejected[0] == 3);
    stop(&t, BALLAST__STOP_MODE__STOP_CHECKPOINT);
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_STOPPED, 0);
    for (uint32_t r = 0; r < 4; r++)
        assert_int_equal(t.placement[r], 4);
    slots_fini(&s);
    slots_fini(&wrong);
}

/* A rank dies amid the moves, or finds them damaged: the attempt ends for all, nobody has moved. */
static void a_failure_amid_the_moves_ends_the_attempt_with_the_old_placement(void **state)
{
    (void)state;
    static const char *const wishes[] = {"in-move:kill", "before-move:error", "in-move:error",
                                         "move-checksum:error"};
    for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++) {
        struct trial t;
        struct slots s;
        new_folder(NULL);
        slots_of(&s, 4);
        slots_shuffle(&s, 5);
        setenv("BALLAST_FAILPOINT", wishes[i], 1);
        start(&t, 4, "run", "  fsdp_shard_degree: 1\n  expert_parallel_degree: 4\n" DATA
              "train: {steps: 100000, global_batch: 8, micro_batch: 1, optimizer: {lr: 1e-3}}\n");
        unsetenv("BALLAST_FAILPOINT");
        follow(&t, 2);
        for (uint32_t r = 0; r < 4; r++)
            send_prepare(&t, r, &s, 0);
        finish(&t);
        for (uint32_t r = 0; r < 4; r++) {
            assert_int_equal(t.placement[r], 0);
            if (i == 0)
                continue; /* all four died */
            if (t.phase[r] != BALLAST__RANK_PHASE__RANK_FAILED || !t.retryable[r])
                fail_msg("%s: rank %u is in phase %u", wishes[i], r, t.phase[r]);
        }
        slots_fini(&s);
    }
}

int main(void)
{
    struct err err = {0};
    if (!make_folder())
        return 1;
    char *model = xasprintf("%s/model", folder);
    if (hf_config_read(model, &spec, &err) < 0)
        return 1;
    free(model);
#define CASE(name) cmocka_unit_test_setup(name, new_folder)
    const struct CMUnitTest tests[] = {
        CASE(moves_change_no_bit_in_deterministic_mode),
        CASE(an_attempt_begins_with_the_placement_in_force),
        CASE(refusals_aborts_and_repeats_leave_all_as_it_is),
        CASE(a_failure_amid_the_moves_ends_the_attempt_with_the_old_placement),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
