/* bench_train.c - tokens per second of a whole step
 *
 *   bench_train --model DIR --text FILE [options]      a model on bytes, sequences of 256
 *   bench_train --shape 921m --device cuda:0 --dtype bf16 --steps 20
 *
 * Ranks are trainer processes with this program as their daemon; dense parameters and experts are
 * cut over all ranks, which share the device; with --hosts N they are as if on so many hosts, and
 * reach each other through the network's loopback, sealed. A shape is a model of random weights on
 * random tokens, made in a folder of its own. Prints the median over steps after the first three,
 * and where rank 0's time went; BALLAST_OP_TIMES=1 adds what each op of a GPU takes. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/hf_config.h"
#include "common/mem.h"
#include "proto/job_file.h"
#include "tests/pin.h"
#include "tests/shape.h"
#include "tests/trainers.h"
#include "worker/trainer.h"

#define STEPS_HERE_MAX 1000u
#define WARM_STEPS 3u
#define PHASES_HERE_MAX 32u

struct options {
    const char *model, *text, *device, *dtype, *recompute;
    const struct shape *shape; /* NULL: model and text */
    uint32_t n_ranks, n_hosts, n_threads, n_steps;
    bool json, is_blocking, is_pinned; /* each rank to a core of its own */
    bool is_balanced; /* all experts get the same: what no imbalance would give */
};

struct figures {
    double   tokens_per_second[STEPS_HERE_MAX];
    double   seconds[PHASES_HERE_MAX];
    char     names[PHASES_HERE_MAX][32];
    uint32_t n_steps, n_phases;
    uint64_t memory_bytes;
    double   loss; /* of the last step */
};

/* ---- the job -------------------------------------------------------------------------------- */

/* The default goes with every model but one that chooses experts in groups. */
static const char *bias_rule(const char *model_path)
{
    static struct model_spec model;
    struct err err;
    if (hf_config_read(model_path, &model, &err) < 0) {
        fprintf(stderr, "bench_train: %s\n", err.text);
        exit(2);
    }
    return model.n_expert_groups > 1 ? "sign" : "quantile";
}

static char *job_text(const struct options *o, const char *folder)
{
    const struct shape *s = o->shape;
    unsigned n_sequences = s ? s->n_sequences : 8;
    const char *path = s ? folder : o->model;
    char *data = s ? xasprintf("[%s/tokens.bin], format: u16", folder)
                   : xasprintf("[%s]", o->text);
    char *job = xasprintf(
        "name: bench\nmodel: {path: %s}\ndata: {train: %s, sequence_length: %u}\n"
        "train: {steps: 1000000, global_batch: %u, micro_batch: %u, precision: %s,\n"
        "  optimizer: {lr: 1e-4}, schedule: {name: constant}}\n"
        "parallel: {workers: %u, fsdp_shard_degree: %u, expert_parallel_degree: %u,\n"
        "  activation_checkpointing: %s, overlap: %s}\n"
        "moe: {bias_update: %s%s}\n"
        "checkpoint: {path: %s/checkpoints, every_steps: 1000000}\n", path, data,
        s ? s->sequence_length : 256, n_sequences, n_sequences / o->n_ranks, o->dtype, o->n_ranks,
        o->n_ranks, o->n_ranks, o->recompute, o->is_blocking ? "false" : "true",
        bias_rule(path), o->is_balanced ? ", force_balance: true" : "", folder);
    free(data);
    return job;
}

static void remove_made(const char *folder)
{
    static const char *const names[] = {"config.json", "tokens.bin", "checkpoints/.lock",
                                        "checkpoints", ""};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *path = xasprintf("%s/%s", folder, names[i]);
        remove(path);
        free(path);
    }
}

static Ballast__JobSpec *make_spec(const struct options *o, const char *folder)
{
    struct problems problems = {0};
    Ballast__JobSpec *spec = NULL;
    char *job = job_text(o, folder);
    if (job_file_read_text("bench", "/", job, strlen(job), &spec, &problems) < 0) {
        problems_print(&problems, stderr);
        exit(2);
    }
    free(job);
    return spec;
}

/* ---- the ranks ------------------------------------------------------------------------------ */

static void train(uint32_t rank, int channel)
{
    (void)rank;
    _exit(trainer_main(channel));
}

static void train_pinned(uint32_t rank, int channel)
{
    pin_to(rank);
    train(rank, channel);
}

static void spawn_all(const struct options *o, Ballast__JobSpec *spec, int *out_fds)
{
    struct trainers t = {.name = "bench", .spec = spec, .n_ranks = o->n_ranks,
                         .n_threads = o->n_threads, .device = o->device};
    for (uint32_t r = 0; r < o->n_ranks; r++) {
        snprintf(t.machines[r], sizeof t.machines[r], "here/%u", r * o->n_hosts / o->n_ranks);
        memcpy(t.nodes[r], t.machines[r], sizeof t.nodes[r]);
    }
    for (uint32_t r = 0; r < o->n_ranks; r++)
        out_fds[r] = trainer_spawn(&t, r, o->is_pinned ? train_pinned : train);
}

static void stop(const struct options *o, const int *fds)
{
    Ballast__Stop s = BALLAST__STOP__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    s.job_id = 1;
    s.mode = BALLAST__STOP_MODE__STOP_NOW;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_STOP;
    m.stop = &s;
    for (uint32_t r = 0; r < o->n_ranks; r++)
        trainer_send(fds[r], &m);
}

static void take(struct figures *f, const Ballast__StepReport *s)
{
    if (s->step <= WARM_STEPS || f->n_steps == STEPS_HERE_MAX)
        return;
    f->tokens_per_second[f->n_steps++] = s->tokens_per_second;
    f->memory_bytes = s->memory_bytes;
    f->loss = s->loss;
    f->n_phases = s->n_phases < PHASES_HERE_MAX ? (uint32_t)s->n_phases : PHASES_HERE_MAX;
    for (uint32_t i = 0; i < f->n_phases; i++) {
        f->seconds[i] += s->phases[i]->seconds;
        snprintf(f->names[i], sizeof f->names[i], "%s", s->phases[i]->name);
    }
}

/* Tells all where each listens. */
static void introduce(const struct options *o, const int *fds, struct channel_reader *readers)
{
    Ballast__TrainerMessage *told[TRAINERS_MAX], m = BALLAST__TRAINER_MESSAGE__INIT;
    Ballast__Peer peers[TRAINERS_MAX], *listed[TRAINERS_MAX];
    Ballast__Peers all = BALLAST__PEERS__INIT;
    for (uint32_t r = 0; r < o->n_ranks; r++) {
        while ((told[r] = trainer_next(fds[r], &readers[r])) &&
               !(told[r]->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STATE &&
                 told[r]->state->data_address[0]))
            ballast__trainer_message__free_unpacked(told[r], NULL);
        if (!told[r])
            exit(1); /* it has said why */
        ballast__peer__init(listed[r] = &peers[r]);
        peers[r].address = told[r]->state->data_address;
        peers[r].key = told[r]->state->data_key;
    }
    all.job_id = 1;
    all.n_peers = o->n_ranks;
    all.peers = listed;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_PEERS;
    m.peers = &all;
    for (uint32_t r = 0; r < o->n_ranks; r++)
        trainer_send(fds[r], &m);
    for (uint32_t r = 0; r < o->n_ranks; r++)
        ballast__trainer_message__free_unpacked(told[r], NULL);
}

/* Until rank 0 is gone. Stopped at once, the ranks write no checkpoint. */
static void follow(const struct options *o, const int *fds, struct figures *f)
{
    struct channel_reader readers[TRAINERS_MAX] = {0};
    bool is_stopped = false;
    if (o->n_hosts > 1)
        introduce(o, fds, readers);
    for (Ballast__TrainerMessage *m; (m = trainer_next(fds[0], &readers[0]));) {
        if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP && !is_stopped)
            take(f, m->step);
        ballast__trainer_message__free_unpacked(m, NULL);
        if (f->n_steps >= o->n_steps && !is_stopped) {
            stop(o, fds);
            is_stopped = true;
        }
    }
    for (uint32_t r = 0; r < o->n_ranks; r++)
        channel_reader_fini(&readers[r]);
}

/* ---- what it was ---------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_json(const struct options *o, const struct figures *f, double median, double best)
{
    printf("{\"model\": \"%s\", \"device\": \"%s\", \"dtype\": \"%s\", \"ranks\": %u, "
           "\"steps\": %u, \"tokens_per_second\": %.0f, \"best_tokens_per_second\": %.0f, "
           "\"memory_bytes\": %llu, \"loss\": %.4f, \"phases_ms\": {",
           o->shape ? o->shape->name : o->model, o->device, o->dtype, o->n_ranks, f->n_steps,
           median, best, (unsigned long long)f->memory_bytes, f->loss);
    for (uint32_t i = 0; i < f->n_phases; i++)
        printf("%s\"%s\": %.3f", i ? ", " : "", f->names[i], f->seconds[i] / f->n_steps * 1e3);
    printf("}}\n");
}

static void print(const struct options *o, struct figures *f)
{
    qsort(f->tokens_per_second, f->n_steps, sizeof(double), by_value);
    double median = f->tokens_per_second[f->n_steps / 2];
    double best = f->tokens_per_second[f->n_steps - 1];
    if (o->json) {
        print_json(o, f, median, best);
        return;
    }
    printf("device=%s dtype=%s ranks=%u steps=%u tokens_per_s=%.0f best=%.0f memory_mb=%.0f "
           "loss=%.4f", o->device, o->dtype, o->n_ranks, f->n_steps, median, best,
           (double)f->memory_bytes / 1e6, f->loss);
    for (uint32_t i = 0; i < f->n_phases; i++)
        if (f->seconds[i] > 0)
            printf(" %s_ms=%.2f", f->names[i], f->seconds[i] / f->n_steps * 1e3);
    printf("\n");
}

/* ---- the command ---------------------------------------------------------------------------- */

static const char usage[] =
    "usage: bench_train --model DIR --text FILE | --shape 921m|tiny\n"
    "           [--device cpu|cuda:N] [--dtype f32|bf16] [--steps N] [--ranks 1|2|4|8]\n"
    "           [--hosts N] [--threads N] [--recompute off|selective|full] [--no-overlap]\n"
    "           [--pin] [--force-balance] [--json]\n";

static int refuse(void)
{
    fputs(usage, stderr);
    return 2;
}

static int parse(int argc, char **argv, struct options *o)
{
    static const struct option known[] = {
        {"model", required_argument, NULL, 'm'},   {"text", required_argument, NULL, 't'},
        {"shape", required_argument, NULL, 's'},   {"device", required_argument, NULL, 'd'},
        {"dtype", required_argument, NULL, 'e'},   {"steps", required_argument, NULL, 'n'},
        {"ranks", required_argument, NULL, 'r'},   {"threads", required_argument, NULL, 'j'},
        {"recompute", required_argument, NULL, 'c'}, {"json", no_argument, NULL, 'J'},
        {"no-overlap", no_argument, NULL, 'b'},    {"pin", no_argument, NULL, 'p'},
        {"force-balance", no_argument, NULL, 'f'}, {"hosts", required_argument, NULL, 'h'},
        {0},
    };
    *o = (struct options){.device = "cpu", .dtype = "f32", .recompute = "off", .n_ranks = 1,
                          .n_hosts = 1, .n_threads = 1, .n_steps = 20};
    for (int which; (which = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        switch (which) {
        case 'm': o->model = optarg; break;
        case 't': o->text = optarg; break;
        case 's':
            if (!(o->shape = shape_find(optarg)))
                return -1;
            break;
        case 'd': o->device = optarg; break;
        case 'e': o->dtype = optarg; break;
        case 'n': o->n_steps = (uint32_t)atoi(optarg); break;
        case 'r': o->n_ranks = (uint32_t)atoi(optarg); break;
        case 'h': o->n_hosts = (uint32_t)atoi(optarg); break;
        case 'j': o->n_threads = (uint32_t)atoi(optarg); break;
        case 'c': o->recompute = optarg; break;
        case 'J': o->json = true; break;
        case 'b': o->is_blocking = true; break;
        case 'p': o->is_pinned = true; break;
        case 'f': o->is_balanced = true; break;
        default: return -1;
        }
    }
    unsigned n_sequences = o->shape ? o->shape->n_sequences : 8;
    bool has_model = o->shape ? !o->model && !o->text : o->model && o->text;
    return optind == argc && has_model && o->n_ranks >= 1 && o->n_ranks <= 8 &&
                   n_sequences % o->n_ranks == 0 && o->n_hosts >= 1 &&
                   o->n_ranks % o->n_hosts == 0 && o->n_threads >= 1 && o->n_steps >= 1 &&
                   o->n_steps <= STEPS_HERE_MAX
               ? 0
               : -1;
}

int main(int argc, char **argv)
{
    static struct figures f;
    struct options o;
    char folder[] = "/tmp/bench-train.XXXXXX";
    int fds[TRAINERS_MAX], rc = 0;

    if (parse(argc, argv, &o) < 0)
        return refuse();
    if (!mkdtemp(folder)) {
        fprintf(stderr, "bench_train: %s: %s\n", folder, strerror(errno));
        return 1;
    }
    if (o.shape)
        shape_write(o.shape, folder);
    Ballast__JobSpec *spec = make_spec(&o, folder);
    spawn_all(&o, spec, fds);
    follow(&o, fds, &f);
    for (int status; wait(&status) > 0;)
        rc |= status != 0;
    job_file_free(spec);
    remove_made(folder);
    if (f.n_steps < o.n_steps)
        return 1;
    print(&o, &f);
    return rc;
}
