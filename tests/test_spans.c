/* test_spans.c - every moment belongs to the innermost span; a run's steps and its trace say so */
#include "tests/trial.h"

#include "common/json.h"
#include "kernels/spans.h"

enum { OUTER, INNER, BESIDE };

struct seen {
    struct span spans[8];
    uint32_t n;
};

static void see(void *user, const struct span *span)
{
    struct seen *s = user;
    assert_true(s->n < 8);
    s->spans[s->n++] = *span;
}

static void a_moment_belongs_to_the_innermost_span(void **state)
{
    (void)state;
    struct device *dev;
    struct err err = {0};
    struct seen seen = {0};
    assert_int_equal(device_cpu_open(1, true, &dev, &err), 0);
    spans_begin(dev, OUTER, 1); /* nobody measures */
    spans_end(dev);
    assert_true(spans_seconds(dev, OUTER) == 0);

    spans_open(dev);
    spans_reset(dev, see, &seen);
    int64_t began_ns = clock_wall_ns();
    spans_begin(dev, OUTER, 4);
    usleep(2000);
    for (int i = 0; i < 2; i++) {
        spans_begin(dev, INNER, -1);
        usleep(3000);
        spans_settle(dev); /* also with spans open */
        spans_end(dev);
    }
    spans_end(dev);
    double outer = spans_seconds(dev, OUTER), inner = spans_seconds(dev, INNER);
    assert_int_equal(seen.n, 3);
    double whole = (double)seen.spans[2].duration_ns / NS_PER_S;
    assert_true(outer >= 0.002 && inner >= 0.006);
    assert_true(fabs(outer + inner - whole) < 1e-6);
    assert_true(seen.spans[0].kind == INNER && seen.spans[0].layer == -1);
    assert_true(seen.spans[2].kind == OUTER && seen.spans[2].layer == 4);
    for (uint32_t i = 0; i < 2; i++)
        assert_true(seen.spans[i].begin_ns >= seen.spans[2].begin_ns);
    assert_true(llabs(seen.spans[2].begin_ns - began_ns) < (int64_t)(PATIENCE * NS_PER_S));

    uint64_t now_ns = clock_now_ns(); /* beside the others, of which it takes nothing */
    spans_beside(dev, BESIDE, 7, now_ns - 5 * NS_PER_MS, now_ns);
    spans_beside(dev, BESIDE, 8, now_ns, now_ns);
    assert_true(fabs(spans_seconds(dev, BESIDE) - 0.005) < 1e-9);
    assert_true(spans_seconds(dev, OUTER) == outer && spans_seconds(dev, INNER) == inner);
    assert_true(seen.n == 4 && seen.spans[3].kind == BESIDE && seen.spans[3].layer == 7);
    assert_int_equal(seen.spans[3].duration_ns, 5 * NS_PER_MS);
    assert_true(llabs(seen.spans[3].begin_ns - began_ns) < (int64_t)(PATIENCE * NS_PER_S));

    spans_begin(dev, OUTER, 0); /* forgotten, though open */
    spans_reset(dev, NULL, NULL);
    spans_begin(dev, INNER, 0);
    spans_end(dev);
    assert_true(spans_seconds(dev, OUTER) == 0 && spans_seconds(dev, INNER) < outer + inner);
    spans_close(dev);
    dev->ops->close(dev);
}

static void phases_make_up_a_step(void **state)
{
    (void)state;
    struct trial t;
    double step_s = 1, sum = 0;
    /* On a busy machine a step may be held up between two phases. */
    for (int i = 0; i < 10 && sum < 0.6 * step_s; i++) {
        new_folder(NULL);
        start(&t, 2, "run", "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n"
                            "  activation_checkpointing: full\n" DATA TRAIN(6, ""));
        finish(&t);
        assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
        step_s = 8 * 24 / t.tokens_per_second;
        sum = 0;
        for (int k = 0; k < PHASE_MIGRATION; k++) {
            if (!(t.seconds[k] > 0))
                fail_msg("%s took %g s", phase_names[k], t.seconds[k]);
            sum += t.seconds[k];
        }
        if (sum > step_s)
            break;
    }
    if (sum > step_s || sum < 0.6 * step_s)
        fail_msg("phases of %g s in a step of %g s", sum, step_s);
    assert_true(t.mfu > 0 && t.mfu < 1);
    assert_true(t.seconds[PHASE_VALIDATION] > 0 && t.seconds[PHASE_CHECKPOINT] > 0);
    assert_false(exists("run/trace"));
}

/* The job's word comes to the collectives: nothing is hidden, and nothing else differs. */
static void without_overlap_the_numbers_are_the_same(void **state)
{
    (void)state;
    struct trial early, waits;
    new_folder(NULL);
    start(&early, 2, "run", "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n"
                            DATA TRAIN(6, ""));
    finish(&early);
    new_folder(NULL);
    start(&waits, 2, "run", "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n"
                            "  overlap: false\n" DATA TRAIN(6, ""));
    finish(&waits);
    assert_all(&early, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_all(&waits, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    for (int step = 1; step <= 6; step++)
        if (early.loss[step] != waits.loss[step])
            fail_msg("step %d: loss %.17g and %.17g", step, early.loss[step], waits.loss[step]);
    for (int i = 0; i < PHASES; i++)
        assert_true(!phase_is_hidden((enum phase)i) || waits.seconds[i] == 0);
}

static void a_trace_holds_the_steps_that_were_asked_for(void **state)
{
    (void)state;
    struct trial t;
    uint32_t n_seen[PHASES] = {0};
    new_folder(NULL);
    start(&t, 2, "run", "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n"
                        "trace: {first_step: 2, steps: 2}\n" DATA TRAIN(6, ""));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    for (uint32_t rank = 0; rank < 2; rank++) {
        char *path = xasprintf("%s/run/trace/rank-%u.json", folder, rank);
        struct json *all;
        struct err err = {0};
        if (json_read_file(path, 1 << 24, &all, &err) < 0)
            fail_msg("%s", err.text);
        free(path);
        assert_string_equal(json_as_string(json_get(json_at(all, 0), "ph")), "M");
        for (size_t i = 1; i < json_count(all); i++) {
            const struct json *e = json_at(all, i), *args = json_get(e, "args");
            uint64_t pid, step, line;
            uint32_t kind = 0;
            double ts, dur;
            if (!strcmp(json_as_string(json_get(e, "ph")), "M"))
                continue; /* a line's name, when it is first needed */
            assert_int_equal(json_get_u64(e, "pid", 0, 9, &pid, &err), 0);
            assert_int_equal(json_get_u64(args, "step", 2, 3, &step, &err), 0);
            assert_int_equal(json_get_u64(e, "tid", 0, 7, &line, &err), 0);
            assert_true(json_as_double(json_get(e, "ts"), &ts) && ts > 1e15);
            assert_true(json_as_double(json_get(e, "dur"), &dur) && dur >= 0);
            assert_int_equal(pid, rank);
            while (strcmp(phase_names[kind], json_as_string(json_get(e, "name"))) != 0)
                assert_true(++kind < PHASES);
            n_seen[kind]++;
            assert_int_equal(line > 0, phase_is_hidden(kind));
        }
        json_destroy(all);
    }
    /* 2 ranks, 2 steps, 4 passes, there and back. */
    assert_int_equal(n_seen[PHASE_KDA], 2 * 2 * 4 * 2 * 2);
    assert_int_equal(n_seen[PHASE_MLA], 2 * 2 * 4 * 2);
    assert_int_equal(n_seen[PHASE_OPTIMIZER], 2 * 2);
    assert_true(n_seen[PHASE_DISPATCH] > 0 && n_seen[PHASE_GATHER] > 0 && n_seen[PHASE_REDUCE] > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_moment_belongs_to_the_innermost_span),
        cmocka_unit_test(phases_make_up_a_step),
        cmocka_unit_test(without_overlap_the_numbers_are_the_same),
        cmocka_unit_test(a_trace_holds_the_steps_that_were_asked_for),
    };
    return make_folder() ? cmocka_run_group_tests(tests, NULL, remove_folder) : 1;
}
