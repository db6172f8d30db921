/* bench_train.c - tokens per second of a whole step
 *
 *   bench_train --model DIR --text FILE [options]      a model on bytes, sequences of 256
 *   bench_train --shape 921m --device cuda:0 --dtype bf16 --steps 20
 *
 * Ranks are trainer processes with this program as their daemon; dense parameters and experts are
 * cut over all ranks, which share the device; with --hosts N they are as if on so many hosts, and
 * reach each other through the network's loopback, sealed. A shape is a model of random weights on
 * random tokens, made in a folder of its own. Prints the median over steps after the first three, and
 * where rank 0's time went; BALLAST_OP_TIMES=1 adds what each op of a GPU takes. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/hf_config.h"
#include "common/mem.h"
#include "proto/job_file.h"
#include "tests/pin.h"
#include "worker/channel.h"
#include "worker/trainer.h"

#define RANKS_HERE_MAX 8u
#define STEPS_HERE_MAX 1000u
#define WARM_STEPS 3u
#define PHASES_HERE_MAX 32u
#define BATCHES_OF_TOKENS 4u

/* Of the Kimi-Linear family: every fourth layer is latent attention, the others KDA; all layers
 * have experts. Heads are of head_dim in both. */
struct shape {
    const char *name;
    unsigned hidden, n_layers, n_heads, head_dim, rope_dim, latent;
    unsigned n_experts, top_k, expert_width, vocab;
    unsigned sequence_length, n_sequences; /* of a step */
};

static const struct shape shapes[] = {
    {"921m", 1024, 8, 8, 128, 64, 512, 64, 8, 512, 32768, 4096, 4},
    {"tiny", 64, 4, 2, 32, 16, 32, 8, 2, 32, 256, 128, 8},
};

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

/* ---- a model and tokens from a shape -------------------------------------------------------- */

static FILE *create(const char *folder, const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    if (!f) {
        fprintf(stderr, "bench_train: %s: %s\n", path, strerror(errno));
        exit(1);
    }
    free(path);
    return f;
}

static void close_written(FILE *f)
{
    if (fclose(f) != 0) {
        fprintf(stderr, "bench_train: writing the model: %s\n", strerror(errno));
        exit(1);
    }
}

static void write_layers(FILE *f, const char *key, const struct shape *s, bool is_full)
{
    const char *comma = "";
    fprintf(f, "\"%s\": [", key);
    for (unsigned l = 1; l <= s->n_layers; l++)
        if ((l % 4 == 0) == is_full) {
            fprintf(f, "%s%u", comma, l);
            comma = ", ";
        }
    fprintf(f, "]");
}

static void write_config(const struct shape *s, const char *folder)
{
    FILE *f = create(folder, "config.json");
    fprintf(f, "{\"model_type\": \"kimi_linear\", \"architectures\": [\"KimiLinearForCausalLM\"],\n"
            "\"vocab_size\": %u, \"hidden_size\": %u, \"num_hidden_layers\": %u,\n"
            "\"intermediate_size\": %u, \"moe_intermediate_size\": %u,\n"
            "\"num_attention_heads\": %u, \"num_key_value_heads\": %u, \"q_lora_rank\": null,\n"
            "\"kv_lora_rank\": %u, \"qk_nope_head_dim\": %u, \"qk_rope_head_dim\": %u,\n"
            "\"v_head_dim\": %u, \"mla_use_nope\": true,\n", s->vocab, s->hidden, s->n_layers,
            s->expert_width, s->expert_width, s->n_heads, s->n_heads, s->latent, s->head_dim,
            s->rope_dim, s->head_dim);
    fprintf(f, "\"linear_attn_config\": {\"num_heads\": %u, \"head_dim\": %u,\n"
            "\"short_conv_kernel_size\": 4, ", s->n_heads, s->head_dim);
    write_layers(f, "kda_layers", s, false);
    fprintf(f, ", ");
    write_layers(f, "full_attn_layers", s, true);
    fprintf(f, "},\n\"first_k_dense_replace\": 0, \"moe_layer_freq\": 1, \"num_experts\": %u,\n"
            "\"num_experts_per_token\": %u, \"num_shared_experts\": 1,\n"
            "\"moe_renormalize\": true, \"moe_router_activation_func\": \"sigmoid\",\n"
            "\"routed_scaling_factor\": 2.446, \"num_expert_group\": 1, \"topk_group\": 1,\n"
            "\"hidden_act\": \"silu\", \"initializer_range\": 0.02, \"rms_norm_eps\": 1e-05,\n"
            "\"tie_word_embeddings\": false}\n", s->n_experts, s->top_k);
    close_written(f);
}

/* Uniform, so that no step is easier than another. */
static void write_tokens(const struct shape *s, const char *folder)
{
    FILE *f = create(folder, "tokens.bin");
    uint64_t x = 1;
    size_t n = (size_t)BATCHES_OF_TOKENS * s->n_sequences * s->sequence_length + 1;
    for (size_t i = 0; i < n; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        uint16_t token = (uint16_t)((x >> 33) % s->vocab);
        fwrite(&token, sizeof token, 1, f);
    }
    close_written(f);
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

static void send_message(int fd, Ballast__TrainerMessage *m)
{
    uint8_t *bytes;
    size_t n = channel_pack(m, &bytes);
    if (write(fd, bytes, n) != (ssize_t)n)
        exit(1);
    free(bytes);
}

static int spawn(const struct options *o, Ballast__JobSpec *spec, uint32_t rank)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        exit(1);
    if (fork() == 0) {
        close(pair[0]);
        dup2(2, 1);
        if (o->is_pinned)
            pin_to(rank);
        _exit(trainer_main(pair[1]));
    }
    close(pair[1]);
    uint8_t id[16] = "bench";
    uint32_t pid = (uint32_t)getpid();
    memcpy(id + 8, &pid, sizeof pid);
    Ballast__GangMember members[RANKS_HERE_MAX], *gang[RANKS_HERE_MAX];
    char machines[RANKS_HERE_MAX][16];
    for (uint32_t i = 0; i < o->n_ranks; i++) {
        snprintf(machines[i], sizeof machines[i], "here/%u", i * o->n_hosts / o->n_ranks);
        ballast__gang_member__init(gang[i] = &members[i]);
        members[i].machine = members[i].node = machines[i];
    }
    Ballast__Start s = BALLAST__START__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    char *root = (char *)"/";
    s.job_id = 1;
    s.rank = rank;
    s.coll_id = (ProtobufCBinaryData){16, id};
    s.n_gang = o->n_ranks;
    s.gang = gang;
    s.spec = spec;
    s.n_allowed_roots = 1;
    s.allowed_roots = &root;
    s.n_threads = o->n_threads;
    s.device = (char *)o->device;
    s.data_address = (char *)"tcp://127.0.0.1:*";
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &s;
    send_message(pair[0], &m);
    return pair[0];
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
        send_message(fds[r], &m);
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

/* The next from a rank, to be freed; NULL: it is gone. */
static Ballast__TrainerMessage *next_message(int fd, struct channel_reader *reader)
{
    uint8_t bytes[65536];
    const uint8_t *packed;
    size_t n_packed;
    struct err err = {0};
    while (channel_reader_next(reader, &packed, &n_packed, &err) != 1) {
        ssize_t n = read(fd, bytes, sizeof bytes);
        if (n <= 0)
            return NULL;
        channel_reader_add(reader, bytes, (size_t)n);
    }
    return ballast__trainer_message__unpack(NULL, n_packed, packed);
}

/* Tells all where each listens. */
static void introduce(const struct options *o, const int *fds, struct channel_reader *readers)
{
    Ballast__TrainerMessage *told[RANKS_HERE_MAX], m = BALLAST__TRAINER_MESSAGE__INIT;
    Ballast__Peer peers[RANKS_HERE_MAX], *listed[RANKS_HERE_MAX];
    Ballast__Peers all = BALLAST__PEERS__INIT;
    for (uint32_t r = 0; r < o->n_ranks; r++) {
        while ((told[r] = next_message(fds[r], &readers[r])) &&
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
        send_message(fds[r], &m);
    for (uint32_t r = 0; r < o->n_ranks; r++)
        ballast__trainer_message__free_unpacked(told[r], NULL);
}

/* Until rank 0 is gone. Stopped at once, the ranks write no checkpoint. */
static void follow(const struct options *o, const int *fds, struct figures *f)
{
    struct channel_reader readers[RANKS_HERE_MAX] = {0};
    bool is_stopped = false;
    if (o->n_hosts > 1)
        introduce(o, fds, readers);
    for (Ballast__TrainerMessage *m; (m = next_message(fds[0], &readers[0]));) {
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

static const struct shape *find_shape(const char *name)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (!strcmp(shapes[i].name, name))
            return &shapes[i];
    return NULL;
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
            if (!(o->shape = find_shape(optarg)))
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
    return optind == argc && has_model && o->n_ranks >= 1 && o->n_ranks <= RANKS_HERE_MAX &&
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
    int fds[RANKS_HERE_MAX], rc = 0;

    if (parse(argc, argv, &o) < 0)
        return refuse();
    if (!mkdtemp(folder)) {
        fprintf(stderr, "bench_train: %s: %s\n", folder, strerror(errno));
        return 1;
    }
    if (o.shape) {
        write_config(o.shape, folder);
        write_tokens(o.shape, folder);
    }
    Ballast__JobSpec *spec = make_spec(&o, folder);
    for (uint32_t r = 0; r < o.n_ranks; r++)
        fds[r] = spawn(&o, spec, r);
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
