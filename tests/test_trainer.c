/* test_trainer.c - whole trainers as processes, with this test as their daemon */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/clock.h"
#include "common/mem.h"
#include "proto/job_file.h"
#include "worker/channel.h"
#include "worker/trainer.h"

#define RANKS 4u
#define STEPS 64u

static char folder[] = "/tmp/ballast-trainer-XXXXXX";

static const char config_json[] =
    "{\"model_type\": \"kimi_k3\", \"tie_word_embeddings\": false, \"text_config\": {"
    "\"hidden_size\": 32, \"num_hidden_layers\": 3, \"vocab_size\": 128,"
    "\"num_attention_heads\": 2, \"num_key_value_heads\": 2, \"q_lora_rank\": 16,"
    "\"kv_lora_rank\": 16, \"qk_nope_head_dim\": 16, \"qk_rope_head_dim\": 8,"
    "\"v_head_dim\": 16, \"mla_use_nope\": true, \"mla_use_output_gate\": true,"
    "\"intermediate_size\": 64, \"first_k_dense_replace\": 1, \"moe_layer_freq\": 1,"
    "\"num_experts\": 8, \"num_experts_per_token\": 2, \"num_shared_experts\": 1,"
    "\"moe_intermediate_size\": 16, \"routed_expert_hidden_size\": 16,"
    "\"latent_moe_use_norm\": true, \"moe_renormalize\": true, \"routed_scaling_factor\": 1.0,"
    "\"moe_router_activation_func\": \"sigmoid\", \"hidden_act\": \"situ\","
    "\"activation_situ_beta\": 4.0, \"activation_situ_linear_beta\": 25.0,"
    "\"attn_res_block_size\": 2, \"rms_norm_eps\": 1e-05, \"initializer_range\": 0.02,"
    "\"linear_attn_config\": {\"num_heads\": 2, \"head_dim\": 16,"
    "\"short_conv_kernel_size\": 4, \"use_full_rank_gate\": true, \"gate_lower_bound\": -5.0,"
    "\"kda_layers\": [1, 2], \"full_attn_layers\": [3]}}}\n";

/* ---- files ---------------------------------------------------------------------------------- */

static void put(const char *name, const char *text, size_t n)
{
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
    free(path);
}

/* Words in a simple grammar, so that there is something to learn. */
static void put_text(const char *name, uint32_t seed, size_t n)
{
    static const char *const words[] = {"the ", "ship ", "sails ", "to ", "a ", "far ", "shore "};
    char *text = xcalloc(n + 16, 1);
    uint32_t at = seed % 7;
    for (size_t i = 0; i < n;) {
        strcpy(text + i, words[at]);
        i += strlen(words[at]);
        seed = seed * 1664525u + 1013904223u;
        at = (at + 1 + (seed >> 24) % 2) % 7;
    }
    put(name, text, n);
    free(text);
}

static bool exists(const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    bool yes = access(path, F_OK) == 0;
    free(path);
    return yes;
}

static void assert_same_file(const char *a, const char *b)
{
    char *command = xasprintf("cmp %s/%s %s/%s", folder, a, folder, b);
    assert_int_equal(system(command), 0);
    free(command);
}

/* ---- trainers ------------------------------------------------------------------------------- */

struct trial {
    uint32_t world; /* processes here */
    uint32_t n_gang;
    pid_t pids[RANKS];
    int   fds[RANKS];
    struct channel_reader readers[RANKS];
    uint32_t phase[RANKS];
    uint64_t step[RANKS], checkpoint_step, resumed_from;
    bool     retryable[RANKS];
    char     text[RANKS][1024];
    int      status[RANKS];
    double   loss[STEPS + 1], validation[STEPS + 1];
    double   imbalance;
    uint64_t n_reports;
};

static void send_message(int fd, const Ballast__TrainerMessage *m)
{
    uint8_t *bytes;
    size_t n = channel_pack(m, &bytes);
    if (write(fd, bytes, n) < 0 && errno != EPIPE)
        fail_msg("write: %s", strerror(errno));
    free(bytes);
}

static void send_start(struct trial *t, uint32_t rank, Ballast__JobSpec *spec, uint8_t id[16],
                       char *root)
{
    Ballast__Start s = BALLAST__START__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    Ballast__GangMember members[RANKS], *gang[RANKS];
    for (uint32_t i = 0; i < t->n_gang; i++) {
        members[i] = (Ballast__GangMember)BALLAST__GANG_MEMBER__INIT;
        members[i].worker = (char *)"w";
        members[i].node = (char *)"n";
        gang[i] = &members[i];
    }
    s.job_id = 7;
    s.attempt = 1;
    s.rank = rank;
    s.coll_id = (ProtobufCBinaryData){16, id};
    s.n_gang = t->n_gang;
    s.gang = gang;
    s.spec = spec;
    s.n_allowed_roots = root ? 1 : 0;
    s.allowed_roots = &root;
    s.n_threads = 1;
    s.device = (char *)"cpu";
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &s;
    send_message(t->fds[rank], &m);
}

static void spawn(struct trial *t, uint32_t rank)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    t->pids[rank] = fork();
    if (t->pids[rank] == 0) {
        for (uint32_t i = 0; i < rank; i++)
            close(t->fds[i]);
        close(pair[0]);
        char *log = xasprintf("%s/rank-%u.log", folder, rank);
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0666);
        dup2(fd, 1);
        dup2(fd, 2);
        _exit(trainer_main(pair[1]));
    }
    close(pair[1]);
    t->fds[rank] = pair[0];
}

/* The first n_here of world ranks. keys: more lines of the job file. */
static void start_some(struct trial *t, uint32_t n_here, uint32_t world, const char *checkpoint,
                       const char *keys)
{
    static uint32_t n_runs;
    struct problems problems = {0};
    Ballast__JobSpec *spec = NULL;
    uint32_t id[4] = {(uint32_t)getpid(), ++n_runs, (uint32_t)time(NULL), 0};
    char *text = xasprintf("name: trial\nmodel: {path: model}\ncheckpoint: {path: %s, every_steps: "
                           "4, keep: 9}\nparallel:\n  workers: %u\n%s", checkpoint, world, keys);
    if (job_file_read_text("trial", folder, text, strlen(text), &spec, &problems) < 0) {
        problems_print(&problems, stderr);
        fail_msg("the trial's job file");
    }
    *t = (struct trial){.world = n_here, .n_gang = world};
    for (uint32_t i = 0; i <= STEPS; i++)
        t->loss[i] = t->validation[i] = NAN;
    for (uint32_t r = 0; r < n_here; r++) {
        spawn(t, r);
        send_start(t, r, spec, (uint8_t *)id, folder);
    }
    job_file_free(spec);
    free(text);
}

static void start(struct trial *t, uint32_t world, const char *checkpoint, const char *keys)
{
    start_some(t, world, world, checkpoint, keys);
}

static void take(struct trial *t, uint32_t rank, const Ballast__TrainerMessage *m)
{
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP) {
        assert_int_equal(rank, 0);
        assert_true(m->step->step <= STEPS);
        t->loss[m->step->step] = m->step->loss;
        t->validation[m->step->step] = m->step->validation_loss;
        t->imbalance = m->step->imbalance;
        t->n_reports++;
        return;
    }
    assert_int_equal(m->what_case, BALLAST__TRAINER_MESSAGE__WHAT_STATE);
    t->phase[rank] = m->state->phase;
    t->step[rank] = m->state->step;
    t->checkpoint_step = m->state->checkpoint_step;
    t->resumed_from = m->state->resumed_from_step;
    t->retryable[rank] = m->state->retryable;
    snprintf(t->text[rank], sizeof t->text[rank], "%s", m->state->text);
}

static void read_rank(struct trial *t, uint32_t rank)
{
    uint8_t bytes[65536];
    const uint8_t *packed;
    size_t n_packed;
    struct err err = {0};
    ssize_t n = read(t->fds[rank], bytes, sizeof bytes);
    if (n <= 0) {
        close(t->fds[rank]);
        t->fds[rank] = -1;
        return;
    }
    channel_reader_add(&t->readers[rank], bytes, (size_t)n);
    while (channel_reader_next(&t->readers[rank], &packed, &n_packed, &err) == 1) {
        Ballast__TrainerMessage *m = ballast__trainer_message__unpack(NULL, n_packed, packed);
        assert_non_null(m);
        take(t, rank, m);
        ballast__trainer_message__free_unpacked(m, NULL);
    }
}

/* Reads until rank 0 has done step, or with step 0 until all channels are closed. */
static void follow(struct trial *t, uint64_t step)
{
    uint64_t deadline = clock_now_ns() + 120 * NS_PER_S;
    for (;;) {
        struct pollfd p[RANKS];
        uint32_t n_open = 0;
        for (uint32_t r = 0; r < t->world; r++) {
            p[r] = (struct pollfd){.fd = t->fds[r], .events = POLLIN};
            n_open += t->fds[r] >= 0;
        }
        if (n_open == 0 || (step > 0 && t->step[0] >= step))
            return;
        assert_true(clock_now_ns() < deadline);
        poll(p, t->world, 1000);
        for (uint32_t r = 0; r < t->world; r++)
            if (p[r].revents)
                read_rank(t, r);
    }
}

static void finish(struct trial *t)
{
    follow(t, 0);
    for (uint32_t r = 0; r < t->world; r++) {
        waitpid(t->pids[r], &t->status[r], 0);
        channel_reader_fini(&t->readers[r]);
    }
}

static void stop(struct trial *t, Ballast__StopMode mode)
{
    Ballast__Stop s = BALLAST__STOP__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    s.mode = mode;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STOP;
    m.stop = &s;
    for (uint32_t r = 0; r < t->world; r++)
        send_message(t->fds[r], &m);
}

static void assert_all(const struct trial *t, Ballast__RankPhase phase, int exit_code)
{
    for (uint32_t r = 0; r < t->world; r++) {
        if (t->phase[r] != phase)
            fail_msg("rank %u is in phase %u: %s", r, t->phase[r], t->text[r]);
        assert_true(WIFEXITED(t->status[r]));
        assert_int_equal(WEXITSTATUS(t->status[r]), exit_code);
    }
}

#define DATA "data: {train: ['text/*.txt'], validation: [held-out.txt], sequence_length: 24}\n"
#define TRAIN(steps, more)                                                                         \
    "train: {steps: " #steps ", global_batch: 8, deterministic: true, validation_sequences: 5, "   \
    "optimizer: {lr: 2e-3, eps: 1e-4}, schedule: {name: constant}" more "}\n"

static int new_folder(void **state)
{
    (void)state;
    char *command = xasprintf("rm -rf %s/run*", folder);
    int rc = system(command);
    free(command);
    return rc;
}

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
    start(&part, 2, "run-part", keys);
    follow(&part, 5);
    stop(&part, BALLAST__STOP_MODE__STOP_CHECKPOINT);
    finish(&part);
    assert_true(part.step[0] >= 5 && part.step[0] == part.step[1]);
    assert_int_equal(part.checkpoint_step, part.step[0]);
    if (part.step[0] < 12) {
        uint64_t stopped_at = part.step[0];
        assert_all(&part, BALLAST__RANK_PHASE__RANK_STOPPED, 0);
        start(&part, 2, "run-part", keys);
        finish(&part);
        assert_int_equal(part.resumed_from, stopped_at);
        assert_all(&part, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
        for (uint64_t s = stopped_at + 1; s <= 12; s++)
            assert_true(part.loss[s] == whole.loss[s]);
    }
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
    start(&t, 2, "run", keys);
    follow(&t, 6);
    uint64_t began = clock_now_ns();
    kill(t.pids[1], SIGKILL);
    finish(&t);
    assert_true(clock_now_ns() - began < 3 * NS_PER_S);
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
    assert_true(clock_now_ns() - began < 2 * NS_PER_S);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_STOPPED, 0);
    start(&t, 2, "run", keys);
    follow(&t, 6);
    began = clock_now_ns();
    for (uint32_t r = 0; r < 2; r++) {
        close(t.fds[r]);
        t.fds[r] = -1;
    }
    finish(&t);
    assert_true(clock_now_ns() - began < 3 * NS_PER_S);
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
    assert_true(clock_now_ns() - began < 2 * NS_PER_S);
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

/* Makes the last weight of the newest checkpoint a NaN. */
static void spoil(const char *name)
{
    static const uint32_t nan_bits = 0x7fc00000;
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "r+");
    assert_non_null(f);
    fseek(f, -4, SEEK_END);
    assert_int_equal(fwrite(&nan_bits, 4, 1, f), 1);
    fclose(f);
    free(path);
}

static void a_nan_does_what_the_job_says(void **state)
{
    (void)state;
    struct trial t;
    start(&t, 1, "run", DATA TRAIN(4, ""));
    finish(&t);
    spoil("run/step-4/model.safetensors");
    start(&t, 2, "run", DATA TRAIN(6, ""));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_false(t.retryable[0] || t.retryable[1]);
    assert_non_null(strstr(t.text[0], "step 5: loss nan"));
    assert_non_null(strstr(t.text[0], "lm_head.weight"));
    start(&t, 1, "run", DATA TRAIN(6, ", on_nan: rollback"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_non_null(strstr(t.text[0], "again after 3 rollbacks"));
    start(&t, 1, "run", DATA TRAIN(6, ", on_nan: skip"));
    finish(&t);
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FINISHED, 0);
    assert_true(isnan(t.loss[6]));
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
    new_folder(NULL);
    start(&t, 1, "run", DATA TRAIN(3, "")); /* its only one is its last */
    finish(&t);
    unsetenv("BALLAST_FAILPOINT");
    assert_all(&t, BALLAST__RANK_PHASE__RANK_FAILED, 1);
    assert_non_null(strstr(t.text[0], "No space left on device"));
}

static int remove_folder(void **state)
{
    (void)state;
    char *command = xasprintf("rm -r %s", folder);
    int rc = getenv("KEEP") ? 0 : system(command);
    free(command);
    return rc;
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    if (!mkdtemp(folder))
        return 1;
    char *path = xasprintf("%s/text", folder), *model = xasprintf("%s/model", folder);
    if (mkdir(path, 0777) < 0 || mkdir(model, 0777) < 0)
        return 1;
    free(path);
    free(model);
    put("model/config.json", config_json, sizeof config_json - 1);
    put_text("text/a.txt", 1, 5000);
    put_text("text/b.txt", 2, 3000);
    put_text("held-out.txt", 3, 1000);
    put("empty.txt", "", 0);
    static const char foreign[] = "na\xc3\xafve words are no part of this vocabulary, and so on";
    put("high.txt", foreign, sizeof foreign - 1);
#define CASE(name) cmocka_unit_test_setup(name, new_folder)
    const struct CMUnitTest tests[] = {
        CASE(a_run_learns_and_finishes),
        CASE(any_layout_gives_the_same_losses),
        CASE(stop_and_resume_change_no_bit),
        CASE(the_death_of_a_rank_ends_the_others_and_the_run_goes_on_elsewhere),
        CASE(a_stop_at_once_and_a_lost_daemon_end_soon),
        CASE(a_stop_ends_a_rank_that_waits_for_the_others),
        CASE(what_no_attempt_can_cure_is_said_once_and_for_all),
        CASE(a_nan_does_what_the_job_says),
        CASE(a_failed_checkpoint_costs_only_itself),
    };
    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
