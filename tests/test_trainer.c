/* test_trainer.c - a run as its daemon sees it: learns, stops, resumes, survives, fails */
#include "tests/trial.h"
#include "worker/bad.h"

#include <float.h>

/* ---- what must hold ------------------------------------------------------------------------- */

static void a_run_learns_and_finishes(void **state)
{
    (void)state;
    struct trial t;
    start(&t, 1, "run", DATA TRAIN(30, ", micro_batch: 2"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_int_equal(t.n_reports, 30);
    assert_int_equal(t.checkpoint_step, 30);
    assert_true(fabs(t.loss[1] - log(128) - 0.5) < 0.3); /* logits begin with variance 1 */
    assert_true(t.loss[30] < t.loss[1] - 1);
    assert_true(t.validation[30] < t.validation[4] && isnan(t.validation[29]));
    assert_true(exists("run/step-30/model.safetensors") && exists("run/step-28"));
    start(&t, 1, "run", DATA TRAIN(30, ", micro_batch: 2")); /* all is done already */
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_int_equal(t.n_reports, 0);
    assert_int_equal(t.resumed_from, 30);
}

static void any_layout_gives_the_same_losses(void **state)
{
    (void)state;
    static const struct {
        uint32_t world;
        const char *keys;
    } rows[] = {
        {1, "  fsdp_shard_degree: 1\n"},
        {2, "  fsdp_shard_degree: 2\n  expert_parallel_degree: 1\n"},
        {2, "  fsdp_shard_degree: 1\n  expert_parallel_degree: 2\n"},
        {4, "  fsdp_shard_degree: 2\n  expert_parallel_degree: 4\n"},
        {4, "  fsdp_shard_degree: 4\n  expert_parallel_degree: 2\n"},
        {4, "  fsdp_shard_degree: 1\n  expert_parallel_degree: 1\n  expert_shard_degree: 1\n"},
        {4, "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n"
            "  activation_checkpointing: full\n"},
    };
    struct trial first = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct trial t;
        char *keys = xasprintf("%s%s", rows[i].keys, DATA TRAIN(8, ", micro_batch: 1"));
        new_folder(NULL);
        start(&t, rows[i].world, "run", keys);
        finish(&t);
        free(keys);
        assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
        if (i == 0)
            first = t;
        for (uint32_t s = 1; s <= 8; s++)
            if (!(fabs(t.loss[s] / first.loss[s] - 1) < 1e-4))
                fail_msg("layout %zu step %u: loss %.7g, one rank has %.7g", i, s, t.loss[s],
                         first.loss[s]);
        assert_true(fabs(t.validation[8] / first.validation[8] - 1) < 1e-4);
        assert_true(t.imbalance >= 1);
    }
}

static const char cut2[] = "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n";

static void stop_and_resume_change_no_bit(void **state)
{
    (void)state;
    struct trial whole, part;
    char *keys = xasprintf("%s%s", cut2, DATA TRAIN(12, ", micro_batch: 2"));
    start(&whole, 2, "run-whole", keys);
    finish(&whole);
    assert_all(&whole, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    hold_before(6);
    start(&part, 2, "run-part", keys);
    follow(&part, 5);
    stop(&part, BALLAST__STOP_MODE__STOP_CHECKPOINT);
    let_go();
    finish(&part);
    assert_true(part.step[0] >= 5 && part.step[0] < 12 && part.step[0] == part.step[1]);
    assert_int_equal(part.checkpoint_step, part.step[0]);
    uint64_t stopped_at = part.step[0];
    assert_all(&part, BALLAST__RANK_PHASE__RANK_STOPPED, 0);
    start(&part, 2, "run-part", keys);
    finish(&part);
    assert_int_equal(part.resumed_from, stopped_at);
    assert_all(&part, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    for (uint64_t s = stopped_at + 1; s <= 12; s++)
        assert_true(part.loss[s] == whole.loss[s]);
    assert_same_file("run-whole/step-12/model.safetensors", "run-part/step-12/model.safetensors");
    assert_same_file("run-whole/step-12/ballast/m/model.safetensors",
                     "run-part/step-12/ballast/m/model.safetensors");
    assert_same_file("run-whole/step-12/ballast/v/model.safetensors",
                     "run-part/step-12/ballast/v/model.safetensors");
    free(keys);
}

static void the_death_of_a_rank_ends_the_others_and_the_run_goes_on_elsewhere(void **state)
{
    (void)state;
    struct trial t, whole;
    char *keys = xasprintf("%s%s", cut2, DATA TRAIN(60, ", micro_batch: 1"));
    start(&whole, 1, "run-whole", DATA TRAIN(60, ", micro_batch: 1"));
    finish(&whole);
    hold_before(7);
    start(&t, 2, "run", keys);
    follow(&t, 6);
    uint64_t began = clock_now_ns();
    kill(t.pids[1], SIGKILL);
    let_go();
    finish(&t);
    assert_true(was_soon(began, 3));
    assert_int_equal(t.phase[0], BALLAST__RANK_PHASE__RANK_FAILED);
    assert_true(t.retryable[0]);
    assert_non_null(strstr(t.text[0], "rank 1 has died"));
    free(keys);
    start(&t, 4, "run", "  fsdp_shard_degree: 2\n  expert_parallel_degree: 4\n" DATA
                        TRAIN(60, ", micro_batch: 2"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_true(t.resumed_from >= 4 && t.resumed_from % 4 == 0);
    assert_true(fabs(t.loss[t.resumed_from + 1] / whole.loss[t.resumed_from + 1] - 1) < 1e-4);
    assert_true(t.loss[60] < whole.loss[1] - 1);
}

static void a_stop_at_once_and_a_lost_daemon_end_soon(void **state)
{
    (void)state;
    struct trial t;
    char *keys = xasprintf("%s%s", cut2, DATA TRAIN(100000, ", micro_batch: 1"));
    start(&t, 2, "run", keys);
    follow(&t, 2);
    uint64_t began = clock_now_ns();
    stop(&t, BALLAST__STOP_MODE__STOP_NOW);
    finish(&t);
    assert_true(was_soon(began, 2));
    assert_all(&t, BALLAST__RANK_PHASE__RANK_STOPPED, 0);
    start(&t, 2, "run", keys);
    follow(&t, 6);
    began = clock_now_ns();
    for (uint32_t r = 0; r < 2; r++) {
        close(t.fds[r]);
        t.fds[r] = -1;
    }
    finish(&t);
    assert_true(was_soon(began, 3));
    free(keys);
}

static void a_stop_ends_a_rank_that_waits_for_the_others(void **state)
{
    (void)state;
    struct trial t;
    char *keys = xasprintf("%s%s", cut2, DATA TRAIN(8, ""));
    start_some(&t, 1, 2, "run", keys);
    usleep(200 * 1000);
    uint64_t began = clock_now_ns();
    stop(&t, BALLAST__STOP_MODE__STOP_CHECKPOINT);
    finish(&t);
    assert_true(was_soon(began, 2));
    assert_all(&t, BALLAST__RANK_PHASE__RANK_STOPPED, 0);
    free(keys);
}

static void what_no_attempt_can_cure_is_said_once_and_for_all(void **state)
{
    (void)state;
    static const struct {
        const char *what, *keys, *text;
    } rows[] = {
        {"no data", "data: {train: [none/*.txt], sequence_length: 24}\n" TRAIN(4, ""),
         "data.train: no file matches '"},
        {"an empty file", "data: {train: [empty.txt], sequence_length: 24}\n" TRAIN(4, ""),
         "empty.txt: empty"},
        {"a token beyond the vocabulary", "data: {train: [high.txt], sequence_length: 24}\n"
         TRAIN(4, ""), "is outside the model's vocabulary of 128"},
        {"outside of the roots", "data: {train: [/etc/passwd], sequence_length: 24}\n"
         TRAIN(4, ""), "/etc/passwd"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct trial t;
        start(&t, 2, "run", rows[i].keys);
        finish(&t);
        for (uint32_t r = 0; r < 2; r++) {
            if (t.phase[r] != BALLAST__RANK_PHASE__RANK_FAILED)
                fail_msg("%s: phase %u", rows[i].what, t.phase[r]);
            assert_int_equal(WEXITSTATUS(t.status[r]), 1);
        }
        uint32_t who = strstr(t.text[0], rows[i].text) ? 0 : 1;
        if (!strstr(t.text[who], rows[i].text) || t.retryable[who])
            fail_msg("%s: '%s' / '%s'", rows[i].what, t.text[0], t.text[1]);
    }
}

static void half_a_model_is_not_begun_anew(void **state)
{
    (void)state;
    struct trial t;
    put("model/model-00001-of-00002.safetensors", "", 0);
    start(&t, 2, "run", DATA TRAIN(4, ""));
    finish(&t);
    char *path = xasprintf("%s/model/model-00001-of-00002.safetensors", folder);
    unlink(path);
    free(path);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_non_null(strstr(t.text[0], "holds model-00001-of-00002.safetensors, but neither"));
    assert_false(t.retryable[0]);
}

/* Changes a weight of a checkpoint, a tensor's last one, and forgets its checksums. */
static void spoil(const char *name, const char *tensor, float value)
{
    char *path = xasprintf("%s/%s", folder, name), header[65536] = "";
    FILE *f = fopen(path, "r+");
    uint64_t n_header;
    unsigned long long first, end;
    assert_non_null(f);
    assert_int_equal(fread(&n_header, sizeof n_header, 1, f), 1);
    assert_true(n_header < sizeof header && fread(header, n_header, 1, f) == 1);
    const char *at = strstr(header, tensor);
    assert_true(at && (at = strstr(at, "data_offsets\":[")) != NULL);
    assert_int_equal(sscanf(at, "data_offsets\":[%llu,%llu]", &first, &end), 2);
    char *sums = xasprintf("%s/run/step-4/ballast/checksums.json", folder);
    assert_true(unlink(sums) == 0 || errno == ENOENT);
    free(sums);
    fseek(f, (long)(sizeof n_header + n_header + end - sizeof value), SEEK_SET);
    assert_int_equal(fwrite(&value, sizeof value, 1, f), 1);
    fclose(f);
    free(path);
}

static void a_nan_does_what_the_job_says(void **state)
{
    (void)state;
    struct trial t;
    start(&t, 1, "run", DATA TRAIN(4, ""));
    finish(&t);
    spoil("run/step-4/model.safetensors", "lm_head.weight", FLT_MAX); /* products overflow */
    start(&t, 2, "run", DATA TRAIN(6, ""));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_false(t.retryable[0] || t.retryable[1]);
    assert_non_null(strstr(t.text[0], "step 5: loss "));
    assert_non_null(strstr(t.text[0], "first in the loss, behind layers that are finite"));
    start(&t, 1, "run", DATA TRAIN(6, ", on_nan: rollback"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_non_null(strstr(t.text[0], "again after 3 rollbacks"));
    start(&t, 1, "run", DATA TRAIN(6, ", on_nan: skip"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_false(isfinite(t.loss[6]));
    assert_int_equal(t.skipped, 2);
    start(&t, 1, "run", DATA TRAIN(30, ", on_nan: skip"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_non_null(strstr(t.text[0], "step 17: loss "));
    assert_non_null(strstr(t.text[0], "after 10 skipped steps in a row"));
}

static void a_nan_is_named_by_the_first_layer_that_has_it(void **state)
{
    (void)state;
    static const struct {
        const char *layer, *down, *text;
    } rows[] = {
        {"layers.0", "mlp.down_proj.weight", "first in the output of layer 0 (kda+dense)"},
        {"layers.2", "block_sparse_moe.shared_experts.down_proj.weight",
         "first in the output of layer 2 (mla+moe)"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct trial t;
        new_folder(NULL);
        start(&t, 1, "run", DATA TRAIN(4, ""));
        finish(&t);
        /* What the activation bounds, 100, times the largest number. */
        char *norm = xasprintf("%s.post_attention_layernorm.weight", rows[i].layer);
        char *down = xasprintf("%s.%s", rows[i].layer, rows[i].down);
        spoil("run/step-4/model.safetensors", norm, 1e30f);
        spoil("run/step-4/model.safetensors", down, FLT_MAX);
        free(norm);
        free(down);
        start(&t, 2, "run", "  expert_parallel_degree: 2\n" DATA TRAIN(6, ""));
        finish(&t);
        assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
        for (uint32_t r = 0; r < 2; r++)
            if (!strstr(t.text[r], rows[i].text))
                fail_msg("%s: '%s'", rows[i].layer, t.text[r]);
    }
}

/* In the words of `ballast adapt`. */
static void a_layer_is_called_by_its_kinds(void **state)
{
    (void)state;
    static const struct {
        struct layer_spec layer;
        uint32_t index_top_k;
        const char *text;
    } rows[] = {
        {{ATTENTION_KDA, MLP_DENSE}, 0, "(kda+dense)"},
        {{ATTENTION_KDA, MLP_MOE}, 64, "(kda+moe)"},
        {{ATTENTION_MLA, MLP_MOE}, 0, "(mla+moe)"},
        {{ATTENTION_MLA, MLP_DENSE}, 64, "(mla_sparse+dense)"},
    };
    struct run *run = xcalloc(1, sizeof *run);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char text[BAD_TEXT_BYTES];
        run->model_spec.n_layers = 2;
        run->model_spec.layers[1] = rows[i].layer;
        run->model_spec.index_top_k = rows[i].index_top_k;
        assert_non_null(strstr(bad_text(run, &(struct bad){2, -1}, text), rows[i].text));
    }
    free(run);
}

/* One rank of two has a loss that is not a number, once: all pass over the batch. */
static void a_nan_of_one_rank_costs_a_batch(void **state)
{
    (void)state;
    struct trial t, whole;
    new_folder(NULL);
    start(&whole, 2, "run", DATA TRAIN(12, ""));
    finish(&whole);
    trial_failpoint = "bad-loss:25:error"; /* the first of step 7's 4 passes */
    new_folder(NULL);
    start(&t, 2, "run", DATA TRAIN(12, ", on_nan: skip"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_int_equal(t.skipped, 1);
    assert_false(isfinite(t.loss[7]));
    assert_true(t.loss[6] == whole.loss[6] && isfinite(t.loss[8]));

    new_folder(NULL);
    start(&t, 2, "run", DATA TRAIN(12, ", on_nan: rollback"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_int_equal(t.skipped, 1);
    assert_int_equal(t.step[0], 12);
    assert_int_equal(t.step[1], 12);
    assert_true(isfinite(t.loss[7]) && isfinite(t.loss[12]));
    /* Weights are those of step 4, samples those after step 7's. */
    assert_true(t.loss[4] == whole.loss[4] && t.loss[5] != whole.loss[5]);

    new_folder(NULL);
    start(&t, 2, "run", DATA TRAIN(12, ""));
    finish(&t);
    trial_failpoint = NULL;
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_non_null(strstr(t.text[0], "a fault that passed by"));
    assert_string_equal(t.text[0], t.text[1]);
}

/* One rank leaves out a collective: the others say for whom they wait, or, where both are in calls
 * of one kind, what does not meet; and where each is. */
static void a_rank_that_skips_a_collective_is_named(void **state)
{
    (void)state;
    struct trial t;
    /* 8 passes of 2 layers, 5 each or more: the 8th step at most. */
    trial_failpoint = "skip-all-to-all:600:error";
    start(&t, 2, "run", "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n"
                        DATA TRAIN(64, ""));
    uint64_t began = clock_now_ns();
    finish(&t);
    trial_failpoint = NULL;
    assert_true(was_soon(began, 60)); /* not the 10 minutes of a first step */
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_true(t.step[0] >= 4);
    assert_true(t.retryable[0] && t.retryable[1]);
    /* Either may speak: each waits for the other, in a group that both are in. */
    static const char *const said[] = {"rank 0", "rank 1", "all_to_all ", " of layer "};
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        if (!strstr(t.text[0], said[i]))
            fail_msg("no '%s' in '%s'", said[i], t.text[0]);
    if (!strstr(t.text[0], " waited ") && !strstr(t.text[0], " expects "))
        fail_msg("neither waited nor other rows in '%s'", t.text[0]);
}

/* A bit of the last rank's weights turns before a comparison: no checkpoint is written from it. */
static void weights_that_part_are_noticed(void **state)
{
    (void)state;
    static const struct {
        uint32_t world;
        const char *keys, *text;
    } rows[] = {
        {4, "  fsdp_shard_degree: 1\n  expert_parallel_degree: 1\n",
         "step 6: the weights of the embedding on rank 3 are not those of its replicas, ranks "
         "0, 1, 2"},
        {4, "  fsdp_shard_degree: 2\n  expert_parallel_degree: 4\n",
         "step 6: the weights of the embedding, the same on ranks 1, 3, differ among them"},
        {2, "  fsdp_shard_degree: 2\n  expert_parallel_degree: 2\n", NULL}, /* no replicas */
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct trial t;
        new_folder(NULL);
        trial_failpoint = "flip-weight:3:error"; /* at steps 3, 4 and 6 */
        char *keys = xasprintf("%s%s", rows[i].keys, DATA TRAIN(8, ", verify_every_steps: 3"));
        start(&t, rows[i].world, "run", keys);
        finish(&t);
        trial_failpoint = NULL;
        free(keys);
        if (!rows[i].text) {
            assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
            continue;
        }
        assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
        for (uint32_t r = 0; r < rows[i].world; r++)
            if (!strstr(t.text[r], rows[i].text) || !t.retryable[r])
                fail_msg("%zu, rank %u: '%s'", i, r, t.text[r]);
        assert_int_equal(t.checkpoint_step, 4);
    }
}

static void a_failed_checkpoint_costs_only_itself(void **state)
{
    (void)state;
    struct trial t;
    setenv("BALLAST_FAILPOINT", "checkpoint-write:5:enospc", 1);
    start(&t, 1, "run", DATA TRAIN(8, ""));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_true(!exists("run/step-4") && !exists("run/step-4.tmp") && exists("run/step-8"));
    assert_non_null(strstr(t.warning, "no checkpoint of step 4: "));
    assert_non_null(strstr(t.warning, "No space left on device"));
    unsetenv("BALLAST_FAILPOINT");
}

/* The one at the job's end is tried again, by all ranks together, until somebody has made room. */
static void the_last_checkpoint_waits_for_room(void **state)
{
    (void)state;
    struct trial t;
    trial_failpoint = "checkpoint-write:5:enospc"; /* once */
    start(&t, 2, "run", DATA TRAIN(3, "")); /* its only one is its last */
    finish(&t);
    trial_failpoint = NULL;
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_non_null(strstr(t.warning, "step 3, the last, is not saved, tried again in 1 s: "));
    assert_non_null(strstr(t.warning, "No space left on device"));
    assert_true(exists("run/step-3") && !exists("run/step-3.tmp"));
    assert_int_equal(t.n_reports, 3); /* each step is told once */
}

/* What resumes from a checkpoint begins behind it, so its step is told before it counts. */
static void a_checkpoint_does_not_count_before_its_step_is_told(void **state)
{
    (void)state;
    struct trial t;
    setenv("BALLAST_FAILPOINT", "checkpoint-after-rename:1:kill", 1);
    start(&t, 1, "run", DATA TRAIN(8, ""));
    finish(&t);
    unsetenv("BALLAST_FAILPOINT");
    assert_true(WIFSIGNALED(t.status[0]) && exists("run/step-4"));
    assert_int_equal(t.n_reports, 4);
    assert_true(t.loss[4] > 0 && t.validation[4] > 0 && t.seconds[PHASE_CHECKPOINT] > 0);
    start(&t, 1, "run", DATA TRAIN(8, ""));
    finish(&t);
    assert_int_equal(t.n_reports, 4); /* 5 to 8, each once */
    assert_true(t.loss[5] > 0);
}

static void send_settings(struct trial *t, uint32_t rank, uint32_t revision, uint64_t every)
{
    Ballast__JobSpec spec = BALLAST__JOB_SPEC__INIT;
    Ballast__Settings s = BALLAST__SETTINGS__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    spec.checkpoint_every_steps = every;
    spec.checkpoint_keep = 50;
    spec.rebalance_window_steps = 1 + revision;
    spec.scheduling_max_restarts = 3;
    s.job_id = 7;
    s.attempt = 1;
    s.revision = revision;
    s.spec = &spec;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_SETTINGS;
    m.settings = &s;
    send_message(t->fds[rank], &m);
}

static void changed_settings_hold_from_one_step_on_all_ranks(void **state)
{
    (void)state;
    struct trial t, as_it_was;
    char *keys = xasprintf("  fsdp_shard_degree: 2\n  expert_parallel_degree: 4\n%s",
                           DATA TRAIN(60, ", micro_batch: 1"));
    start(&as_it_was, 4, "run-as-it-was", keys);
    finish(&as_it_was);
    hold_before(7);
    start(&t, 4, "run", keys);
    free(keys);
    follow(&t, 2);
    for (uint32_t r = 0; r < 3; r++)
        send_settings(&t, r, 1, 1000);
    follow(&t, 6);
    assert_int_equal(t.settings[0], 0); /* one has not heard of it: nobody takes it */
    assert_true(t.checkpoint_step >= 4);
    for (uint32_t r = 0; r < 4; r++) { /* an older one after it, and it once more */
        send_settings(&t, r, 2, 3);
        send_settings(&t, r, 1, 1000);
        send_settings(&t, r, 2, 5);
    }
    let_go();
    follow_until(&t, &t.settings[0], 2);
    uint64_t since = t.settings_step[0]; /* or a little earlier */
    assert_true(since >= 6 && since < 50);
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    for (uint32_t r = 0; r < 4; r++)
        assert_int_equal(t.settings[r], 2);
    for (uint64_t s = since; s < 60; s++) { /* written by all ranks, or not there */
        char *path = xasprintf("run/step-%llu/model.safetensors", (unsigned long long)s);
        assert_int_equal(exists(path), s % 3 == 0);
        free(path);
    }
    for (uint32_t s = 1; s <= 60; s++)
        assert_true(t.loss[s] == as_it_was.loss[s]);
}

int main(void)
{
    if (!make_folder())
        return 1;
#define CASE(name) cmocka_unit_test_setup(name, new_folder)
    const struct CMUnitTest tests[] = {
        CASE(a_run_learns_and_finishes),
        CASE(any_layout_gives_the_same_losses),
        CASE(stop_and_resume_change_no_bit),
        CASE(the_death_of_a_rank_ends_the_others_and_the_run_goes_on_elsewhere),
        CASE(a_stop_at_once_and_a_lost_daemon_end_soon),
        CASE(a_stop_ends_a_rank_that_waits_for_the_others),
        CASE(what_no_attempt_can_cure_is_said_once_and_for_all),
        CASE(half_a_model_is_not_begun_anew),
        CASE(a_nan_does_what_the_job_says),
        CASE(a_nan_is_named_by_the_first_layer_that_has_it),
        CASE(a_layer_is_called_by_its_kinds),
        CASE(a_nan_of_one_rank_costs_a_batch),
        CASE(weights_that_part_are_noticed),
        CASE(a_rank_that_skips_a_collective_is_named),
        CASE(a_failed_checkpoint_costs_only_itself),
        CASE(the_last_checkpoint_waits_for_room),
        CASE(a_checkpoint_does_not_count_before_its_step_is_told),
        CASE(changed_settings_hold_from_one_step_on_all_ranks),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
