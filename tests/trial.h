/* trial.h - whole trainers as processes, with the test as their daemon */
#ifndef TESTS_TRIAL_H
#define TESTS_TRIAL_H

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
#include "tests/patience.h"
#include "worker/channel.h"
#include "worker/phases.h"
#include "worker/trainer.h"

#define RANKS 4u
#define STEPS 64u

static char folder[] = "/tmp/ballast-trainer-XXXXXX";
static const char *trial_failpoint; /* of the last rank alone; NULL: none */
static Ballast__Placement *trial_placement; /* of START; NULL: experts in order */

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

static inline void put(const char *name, const char *text, size_t n)
{
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
    free(path);
}

/* Words in a simple grammar, so that there is something to learn. */
static inline void put_text(const char *name, uint32_t seed, size_t n)
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

static inline bool exists(const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    bool yes = access(path, F_OK) == 0;
    free(path);
    return yes;
}

static inline void assert_same_file(const char *a, const char *b)
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
    double   imbalance, aux, z, index; /* of the newest step */
    double   mfu, tokens_per_second, seconds[PHASES];
    uint64_t skipped;
    uint64_t rerouted, dropped; /* in all steps */
    uint64_t n_reports;
    uint32_t placement[RANKS], prepared[RANKS], rejected[RANKS]; /* epochs */
    char     warning[1024]; /* the newest of rank 0 while it ran that was not empty */
    char     plan_text[RANKS][256];
    uint32_t settings[RANKS]; /* revisions */
    uint64_t settings_step[RANKS]; /* that first showed the newest */
    uint64_t moved_bytes[RANKS];
    bool     keeps_loads; /* until forget_loads */
    Ballast__LoadReport *loads[STEPS + 1]; /* by last step */
};

static inline void send_message(int fd, const Ballast__TrainerMessage *m)
{
    uint8_t *bytes;
    size_t n = channel_pack(m, &bytes);
    if (write(fd, bytes, n) < 0 && errno != EPIPE)
        fail_msg("write: %s", strerror(errno));
    free(bytes);
}

static inline void send_start(struct trial *t, uint32_t rank, Ballast__JobSpec *spec,
                              uint8_t id[16], char *root)
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
    s.placement = trial_placement;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &s;
    send_message(t->fds[rank], &m);
}

/* Before its step-th step the last rank of the next runs waits, and with it all, until let_go. */
static inline void hold_before(uint32_t step)
{
    static char wish[100];
    put("hold", "", 0);
    snprintf(wish, sizeof wish, "before-step:%u:while_%s/hold", step, folder);
    trial_failpoint = wish;
}

static inline void let_go(void)
{
    char *path = xasprintf("%s/hold", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
    trial_failpoint = NULL;
}

static inline void spawn(struct trial *t, uint32_t rank)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    t->pids[rank] = fork();
    if (t->pids[rank] == 0) {
        for (uint32_t i = 0; i < rank; i++)
            close(t->fds[i]);
        close(pair[0]);
        if (trial_failpoint && rank + 1 == t->n_gang)
            setenv("BALLAST_FAILPOINT", trial_failpoint, 1);
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
static inline void start_some(struct trial *t, uint32_t n_here, uint32_t world,
                              const char *checkpoint, const char *keys)
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

static inline void start(struct trial *t, uint32_t world, const char *checkpoint, const char *keys)
{
    start_some(t, world, world, checkpoint, keys);
}

static inline void take(struct trial *t, uint32_t rank, Ballast__TrainerMessage *m)
{
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP) {
        assert_int_equal(rank, 0);
        if (m->step->step <= STEPS) { /* a run that is ended by a test comes as far as it comes */
            t->loss[m->step->step] = m->step->loss;
            t->validation[m->step->step] = m->step->validation_loss;
        }
        t->imbalance = m->step->imbalance;
        t->aux = m->step->aux_loss;
        t->z = m->step->z_loss;
        t->index = m->step->index_loss;
        t->rerouted += m->step->rerouted;
        t->dropped += m->step->dropped;
        t->mfu = m->step->mfu;
        t->skipped = m->step->skipped;
        t->tokens_per_second = m->step->tokens_per_second;
        assert_int_equal(m->step->n_phases, PHASES);
        for (uint32_t i = 0; i < PHASES; i++) {
            assert_string_equal(m->step->phases[i]->name, phase_names[i]);
            t->seconds[i] = m->step->phases[i]->seconds;
        }
        t->n_reports++;
        return;
    }
    if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_LOAD) {
        assert_int_equal(rank, 0);
        if (!t->keeps_loads)
            return;
        assert_true(m->load->last_step <= STEPS && !t->loads[m->load->last_step]);
        t->loads[m->load->last_step] = m->load;
        m->what_case = BALLAST__TRAINER_MESSAGE__WHAT__NOT_SET; /* kept */
        return;
    }
    assert_int_equal(m->what_case, BALLAST__TRAINER_MESSAGE__WHAT_STATE);
    if (m->state->settings_revision > t->settings[rank])
        t->settings_step[rank] = m->state->step;
    t->settings[rank] = m->state->settings_revision;
    t->placement[rank] = m->state->placement_epoch;
    t->prepared[rank] = m->state->prepared_epoch;
    t->rejected[rank] = m->state->rejected_epoch;
    t->moved_bytes[rank] = m->state->moved_bytes;
    snprintf(t->plan_text[rank], sizeof t->plan_text[rank], "%s", m->state->plan_text);
    t->phase[rank] = m->state->phase;
    t->step[rank] = m->state->step;
    t->checkpoint_step = m->state->checkpoint_step;
    t->resumed_from = m->state->resumed_from_step;
    t->retryable[rank] = m->state->retryable;
    snprintf(t->text[rank], sizeof t->text[rank], "%s", m->state->text);
    if (rank == 0 && m->state->phase == BALLAST__RANK_PHASE__RANK_RUNNING && *m->state->text)
        snprintf(t->warning, sizeof t->warning, "%s", m->state->text);
}

static inline void read_rank(struct trial *t, uint32_t rank)
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
static inline void follow(struct trial *t, uint64_t step)
{
    uint64_t deadline = patience_end_ns(12);
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

static inline void finish(struct trial *t)
{
    follow(t, 0);
    for (uint32_t r = 0; r < t->world; r++) {
        waitpid(t->pids[r], &t->status[r], 0);
        channel_reader_fini(&t->readers[r]);
    }
}

static inline void forget_loads(struct trial *t)
{
    for (uint32_t i = 0; i <= STEPS; i++)
        if (t->loads[i])
            ballast__load_report__free_unpacked(t->loads[i], NULL);
    memset(t->loads, 0, sizeof t->loads);
}

/* Reads until rank 0 has said the same in *field, which is one of t. */
static inline void follow_until(struct trial *t, const uint32_t *field, uint32_t value)
{
    uint64_t step = t->step[0];
    while (*field != value && t->fds[0] >= 0)
        follow(t, ++step);
    assert_int_equal(*field, value);
}

static inline void stop(struct trial *t, Ballast__StopMode mode)
{
    Ballast__Stop s = BALLAST__STOP__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    s.mode = mode;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STOP;
    m.stop = &s;
    for (uint32_t r = 0; r < t->world; r++)
        send_message(t->fds[r], &m);
}

static inline void assert_all(const struct trial *t, Ballast__RankPhase phase, int exit_code)
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

static inline int new_folder(void **state)
{
    (void)state;
    char *command = xasprintf("rm -rf %s/run*", folder);
    int rc = system(command);
    free(command);
    return rc;
}

static inline int remove_folder(void **state)
{
    (void)state;
    char *command = xasprintf("rm -r %s", folder);
    int rc = getenv("KEEP") ? 0 : system(command);
    free(command);
    return rc;
}

/* The folder with a model and texts; removed by remove_folder. */
static inline bool make_folder(void)
{
    signal(SIGPIPE, SIG_IGN);
    if (!mkdtemp(folder))
        return false;
    char *path = xasprintf("%s/text", folder), *model = xasprintf("%s/model", folder);
    if (mkdir(path, 0777) < 0 || mkdir(model, 0777) < 0)
        return false;
    free(path);
    free(model);
    put("model/config.json", config_json, sizeof config_json - 1);
    put_text("text/a.txt", 1, 5000);
    put_text("text/b.txt", 2, 3000);
    put_text("held-out.txt", 3, 1000);
    put("empty.txt", "", 0);
    static const char foreign[] = "na\xc3\xafve words are no part of this vocabulary, and so on";
    put("high.txt", foreign, sizeof foreign - 1);
    return true;
}

#endif
