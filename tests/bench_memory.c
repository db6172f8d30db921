/* bench_memory.c - planned and measured memory of a rank:
 * bench_memory MODEL TEXT RANKS[/NODES] MICRO_BATCH SEQUENCE_LENGTH [KEY=VALUE]...
 * bench_memory MODEL TEXT all|short|check MICRO_BATCH SEQUENCE_LENGTH
 *
 * TEXT is a file; or LOW-HIGH, for documents of such lengths; or late, for sequences of one
 * document each, but for those of the last steps, of which each token is one.
 *
 * Ranks are trainer processes ($BALLAST_BIN/ballast-worker) with this program as their daemon;
 * dense parameters and experts are cut over all ranks unless keys say otherwise; what is measured
 * is the largest rank's, over 6 steps. Ranks of several nodes, in a row, share memory still. Prints
 * a line for each run: also what is taken after the first step; its last number is planned over
 * measured. all: 1, 2 and 4 ranks with all that changes a plan, and the worst of them. short: short
 * sequences, and such documents in sequences, without the room for experts that move, as none do.
 * check: a few of those, a failure where the two are more than 5 % apart or later steps take more
 * than the first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/data.h"
#include "common/hf_config.h"
#include "common/mem.h"
#include "proto/job_file.h"
#include "proto/job_memory.h"
#include "proto/job_spec.h"
#include "tests/documents.h"
#include "tests/trainers.h"
#include "worker/child.h"

#define N_STEPS        6u
#define N_LATE_STEPS   12u
#define DENSE_STEP     10u  /* the first one of single tokens, with late */
#define N_SEQUENCES    120u /* of documents made here */
#define N_TOKEN_IDS    120u /* in them */
#define TOLERANCE      0.05
#define SEED           1u

struct job {
    const char *model, *text, *micro_batch, *length;
    uint32_t    ranks, nodes;
    const char *name;      /* of the row */
    const char *sets[12];  /* of the job file */
    size_t      n_sets;
};

struct outcome {
    double planned, first, most; /* bytes; taken after the first step, and at most */
};

static char *work_folder(void)
{
    static char path[] = "/tmp/bench-memory-XXXXXX";
    static bool is_made;
    if (!is_made && !mkdtemp(path))
        exit(1);
    is_made = true;
    return path;
}

static void order(const char *command)
{
    char *text = xasprintf("cd %s && %s", work_folder(), command);
    if (system(text) != 0)
        fprintf(stderr, "%s failed\n", text);
    free(text);
}

/* ---- documents ------------------------------------------------------------------------------- */

static bool is_late(const struct job *j)
{
    return !strcmp(j->text, "late");
}

static bool is_made_here(const struct job *j)
{
    unsigned low, high;
    return is_late(j) || sscanf(j->text, "%u-%u", &low, &high) == 2;
}

static char *documents_path(void)
{
    return xasprintf("%s/documents", work_folder());
}

static void write_lengths(const uint32_t *lengths, uint64_t n_docs, const uint16_t *tokens)
{
    char *path = documents_path();
    documents_write(path, lengths, n_docs, tokens);
    free(path);
}

/* Lengths drawn between the two. */
static void write_drawn(uint64_t n_tokens, uint32_t low, uint32_t high, const uint16_t *tokens)
{
    uint32_t *lengths = xcalloc(n_tokens, sizeof *lengths), state = SEED;
    uint64_t n_docs = 0;
    for (uint64_t at = 0; at < n_tokens; at += lengths[n_docs++]) {
        state = state * 1664525 + 1013904223;
        uint64_t n = low + (state >> 8) % (high - low + 1), left = n_tokens - at;
        lengths[n_docs] = (uint32_t)(n < left ? n : left);
    }
    write_lengths(lengths, n_docs, tokens);
    free(lengths);
}

/* Which sequences come to their turn after so many others; tokens begin with their number. */
static void find_later(uint32_t length, uint64_t n_before, bool out_later[N_SEQUENCES])
{
    char *path = documents_path();
    struct data_config c = {.patterns = &path, .n_patterns = 1, .what = "documents",
                            .format = DATA_MEGATRON, .sequence_length = length,
                            .vocab = N_TOKEN_IDS, .pack = true, .seed = SEED};
    struct data_batch b = {0};
    struct data *d;
    struct err err;
    if (data_open(&c, &d, &err) < 0 || data_windows(d) != N_SEQUENCES) {
        fprintf(stderr, "the documents of %s cannot be read\n", path);
        exit(1);
    }
    for (uint64_t i = n_before; i < N_SEQUENCES; i++) {
        data_batch_clear(&b);
        if (data_sample(d, i, &b, &err) == 0)
            out_later[b.tokens[0]] = true;
    }
    data_batch_fini(&b);
    data_close(d);
    free(path);
}

static void write_late(uint32_t length, uint64_t n_before)
{
    uint64_t n_tokens = (uint64_t)N_SEQUENCES * length + 1, n_docs = 1;
    uint32_t *lengths = xcalloc(n_tokens, sizeof *lengths);
    uint16_t *tokens = xcalloc(n_tokens, sizeof *tokens);
    bool later[N_SEQUENCES] = {false};
    for (uint64_t i = 0; i < n_tokens; i++)
        tokens[i] = (uint16_t)(i / length);
    lengths[0] = (uint32_t)n_tokens;
    write_lengths(lengths, n_docs, tokens);
    find_later(length, n_before, later);
    n_docs = 0;
    for (uint32_t i = 0; i < N_SEQUENCES; i++)
        for (uint32_t k = 0; k < (later[i] ? length : 1); k++)
            lengths[n_docs++] = later[i] ? 1 : length;
    lengths[n_docs++] = 1;
    for (uint64_t i = 0; i < n_tokens; i++)
        tokens[i] = (uint16_t)((i * i * 7 + i * 31) % N_TOKEN_IDS);
    write_lengths(lengths, n_docs, tokens);
    free(lengths);
    free(tokens);
}

static void make_documents(const struct job *j)
{
    uint32_t length = (uint32_t)atoi(j->length), low, high;
    uint64_t n_tokens = (uint64_t)N_SEQUENCES * length + 1;
    if (is_late(j)) {
        write_late(length, (DENSE_STEP - 1) * j->ranks * (uint64_t)atoi(j->micro_batch));
    } else if (sscanf(j->text, "%u-%u", &low, &high) == 2 && low > 0 && low <= high) {
        uint16_t *tokens = xcalloc(n_tokens, sizeof *tokens);
        for (uint64_t i = 0; i < n_tokens; i++)
            tokens[i] = (uint16_t)((i * i * 7 + i * 31) % N_TOKEN_IDS);
        write_drawn(n_tokens, low, high, tokens);
        free(tokens);
    }
}

/* ---- a run ----------------------------------------------------------------------------------- */

static Ballast__JobSpec *make_spec(const struct job *j)
{
    struct problems problems = {0};
    struct job_file_places places = {0};
    Ballast__JobSpec *spec = NULL;
    char *path = xasprintf("%s/job.yaml", work_folder());
    FILE *f = fopen(path, "w");
    if (!f)
        exit(1);
    char *text = is_made_here(j) ? documents_path() : xstrdup(j->text);
    fprintf(f, "name: bench\nmodel: {path: %s}\n"
            "data: {train: [%s], format: %s, sequence_length: %s}\n"
            "train: {steps: %u, global_batch: %u, micro_batch: %s, validation_sequences: 1,\n"
            "  seed: %u}\n"
            "parallel: {workers: %u, fsdp_shard_degree: %u, expert_parallel_degree: %u}\n"
            "moe: {bias_update: off}\n"
            "checkpoint: {path: %s/ckpt, every_steps: 1000000}\n", j->model, text,
            is_made_here(j) ? "megatron" : "bytes", j->length, is_late(j) ? N_LATE_STEPS : N_STEPS,
            j->ranks * (uint32_t)atoi(j->micro_batch), j->micro_batch, SEED, j->ranks, j->ranks,
            j->ranks, work_folder());
    fclose(f);
    free(text);
    if (job_file_read(path, j->sets, j->n_sets, &spec, &places, &problems) < 0) {
        problems_print(&problems, stderr);
        exit(2);
    }
    job_file_places_fini(&places);
    free(path);
    return spec;
}

static void train(uint32_t rank, int channel)
{
    (void)rank;
    dup2(channel, CHANNEL_FD);
    char *program = xasprintf("%s/ballast-worker", getenv("BALLAST_BIN"));
    execl(program, program, "--trainer", NULL);
}

static void spawn_all(Ballast__JobSpec *spec, uint32_t n_ranks, uint32_t n_nodes, int *out_fds)
{
    struct trainers t = {.name = "memory", .spec = spec, .n_ranks = n_ranks, .n_threads = 1,
                         .device = "cpu"};
    for (uint32_t r = 0; r < n_ranks; r++)
        snprintf(t.nodes[r], sizeof t.nodes[r], "n%u", r * n_nodes / n_ranks);
    for (uint32_t r = 0; r < n_ranks; r++)
        out_fds[r] = trainer_spawn(&t, r, train);
}

/* The first that a step reported, and the largest. */
static void follow(int fd, struct outcome *out)
{
    struct channel_reader reader = {0};
    for (Ballast__TrainerMessage *m; (m = trainer_next(fd, &reader));) {
        if (m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP) {
            double n_bytes = (double)m->step->memory_bytes;
            out->first = out->first > 0 ? out->first : n_bytes;
            out->most = n_bytes > out->most ? n_bytes : out->most;
        }
        ballast__trainer_message__free_unpacked(m, NULL);
    }
    channel_reader_fini(&reader);
}

/* 0: the model does not take the job's choices, which is told. */
static uint64_t planned(const Ballast__JobSpec *spec, uint32_t nodes)
{
    struct job_machine on = {.n_threads = 1, .n_nodes = nodes}; /* of experts cut over all */
    static struct model_spec model;
    struct layout layout = {0};
    struct memory_plan plan = {0};
    const char *key;
    struct err err;
    if (hf_config_read(spec->model_path, &model, &err) < 0 ||
        layout_init(job_spec_degrees(spec), model.n_experts, 0, &layout, &err) < 0 ||
        job_memory(spec, &model, layout.degrees, &on, &plan, &key, &err) < 0)
        fprintf(stderr, "%s\n", err.text);
    layout_fini(&layout);
    return plan.total;
}

static struct outcome run(const struct job *j, int *out_failed)
{
    struct outcome out = {0};
    make_documents(j);
    Ballast__JobSpec *spec = make_spec(j);
    int fds[TRAINERS_MAX];
    out.planned = (double)planned(spec, j->nodes);
    uint32_t n_ranks = out.planned > 0 ? j->ranks : 0;
    spawn_all(spec, n_ranks, j->nodes, fds);
    if (n_ranks)
        follow(fds[0], &out);
    for (uint32_t r = 0; r < n_ranks; r++)
        close(fds[r]);
    for (int status; wait(&status) > 0;)
        *out_failed |= status != 0;
    job_file_free(spec);
    const char *model = strrchr(j->model, '/');
    printf("%-20s ranks=%u %-41s planned_mib=%.2f first_mib=%.2f measured_mib=%.2f ratio=%.3f\n",
           model ? model + 1 : j->model, j->ranks, j->name, out.planned / (1 << 20),
           out.first / (1 << 20), out.most / (1 << 20), out.most > 0 ? out.planned / out.most : 0);
    fflush(stdout);
    return out;
}

/* Of several runs, planned over measured. */
struct span {
    double least, most;
};

static void span_add(struct span *s, const struct outcome *x)
{
    double ratio = x->most > 0 ? x->planned / x->most : 0;
    if (ratio > 0 && (s->least <= 0 || ratio < s->least)) /* else refused: not every model takes */
        s->least = ratio;                                 /* every choice */
    s->most = ratio > s->most ? ratio : s->most;
}

static void span_print(const struct span *s)
{
    printf("planned over measured: %.3f to %.3f\n", s->least, s->most);
}

/* ---- all ------------------------------------------------------------------------------------- */

/* Adapters want weights beside them: those of a run of j, whose folder is given. */
static char *make_weights(const struct job *j, int *out_failed)
{
    order("rm -rf ckpt weights");
    run(j, out_failed);
    order("mv ckpt/step-* weights");
    return xasprintf("%s/weights", work_folder());
}

static const struct variant {
    const char *name, *sets[8];
} variants[] = {
    {"full", {0}},
    {"selective", {"parallel.activation_checkpointing=selective"}},
    {"recompute full", {"parallel.activation_checkpointing=full"}},
    {"checkpoints", {"checkpoint.every_steps=2"}},
    {"muon", {"train.optimizer.name=muon"}},
    {"z and aux loss, capacity", {"moe.z_loss=1e-3", "moe.aux_loss=1e-2",
                                  "moe.capacity_factor=1.5"}},
    {"quantile, accumulated", {"moe.bias_update=quantile", "train.global_batch=16"}},
    {"no spare slots", {"rebalance.spare_slots_per_rank=0"}},
    {"lora, attention", {"train.mode=lora", "train.lora.targets=[o_proj]"}},
    {"lora, experts", {"train.mode=lora", "train.lora.targets=[experts]"}},
    {"lora, checkpoints, selective", {"train.mode=lora", "train.lora.targets=[o_proj, experts]",
                                      "checkpoint.every_steps=2",
                                      "parallel.activation_checkpointing=selective"}},
};

static const struct cut {
    const char *name;
    uint32_t    ranks;
    const char *fsdp, *ep, *shard;
    uint32_t    nodes;
} cuts[] = {
    {"alone", 1, "1", "1", "1", 1},
    {"all cut", 2, "2", "2", "auto", 1},
    {"all cut", 4, "4", "4", "auto", 1},
    {"over two nodes", 4, "4", "4", "auto", 2},
    {"halves, experts cut again", 4, "2", "2", "2", 1},
    {"replicas", 4, "1", "1", "1", 1},
};

static int run_all(struct job j)
{
    struct span span = {0};
    int failed = 0;
    char *weights = make_weights(&j, &failed);
    const char *bare = j.model;
    for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++)
        for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
            char *name = xasprintf("%s: %s", cuts[c].name, variants[v].name);
            char *keys[3] = {xasprintf("parallel.fsdp_shard_degree=%s", cuts[c].fsdp),
                             xasprintf("parallel.expert_parallel_degree=%s", cuts[c].ep),
                             xasprintf("parallel.expert_shard_degree=%s", cuts[c].shard)};
            j.ranks = cuts[c].ranks;
            j.nodes = cuts[c].nodes;
            j.name = name;
            j.n_sets = 0;
            for (int i = 0; i < 3; i++)
                j.sets[j.n_sets++] = keys[i];
            for (size_t i = 0; variants[v].sets[i]; i++)
                j.sets[j.n_sets++] = variants[v].sets[i];
            j.model = strstr(variants[v].name, "lora") ? weights : bare;
            order("rm -rf ckpt");
            struct outcome x = run(&j, &failed);
            span_add(&span, &x);
            for (int i = 0; i < 3; i++)
                free(keys[i]);
            free(name);
        }
    free(weights);
    span_print(&span);
    return failed;
}

/* ---- short sequences, and short documents in sequences --------------------------------------- */

static const struct variant short_variants[] = {
    {"off", {0}},
    {"selective", {"parallel.activation_checkpointing=selective"}},
    {"recompute full", {"parallel.activation_checkpointing=full"}},
    {"accumulated", {"train.global_batch=16"}},
    {"lora", {"train.mode=lora", "train.lora.targets=[o_proj, experts]"}},
};

static const struct variant segments = {
    "in segments", {"parallel.activation_checkpointing=full", "parallel.segment_tokens=64"}};

static struct outcome run_short(struct job j, const struct variant *v, int *out_failed)
{
    char *name = xasprintf("%s x %s, %s: %s", j.micro_batch, j.length, j.name, v->name);
    j.name = name;
    j.n_sets = 0;
    j.sets[j.n_sets++] = "rebalance.spare_slots_per_rank=0";
    for (size_t i = 0; v->sets[i]; i++)
        j.sets[j.n_sets++] = v->sets[i];
    order("rm -rf ckpt");
    struct outcome x = run(&j, out_failed);
    free(name);
    return x;
}

/* Lengths and variants all, ranks in turn. */
static int run_all_short(struct job j)
{
    static const char *const lengths[] = {"2", "7", "16", "63", "64", "65", "256"};
    static const char *const documents[] = {"5-20", "1-300", "late"};
    static const uint32_t ranks[] = {1, 2, 4};
    const char *bare = j.model, *length = j.length, *text = j.text;
    struct span span = {0};
    int failed = 0;
    size_t n_variants = sizeof short_variants / sizeof *short_variants;
    char *weights = make_weights(&j, &failed);
    for (size_t i = 0; i < 10; i++) {
        for (size_t v = 0; v <= n_variants; v++) {
            bool is_cut = v == n_variants;
            const struct variant *variant = is_cut ? &segments : &short_variants[v];
            j.model = strstr(variant->name, "lora") ? weights : bare;
            j.length = i < 7 ? lengths[i] : length;
            j.text = i < 7 ? text : documents[i - 7];
            j.name = i < 7 ? "a document each" : j.text;
            j.ranks = ranks[(i + v) % 3];
            if (is_cut && atoi(j.length) < 128)
                continue;
            struct outcome x = run_short(j, variant, &failed);
            span_add(&span, &x);
        }
    }
    free(weights);
    span_print(&span);
    return failed;
}

static int check(struct job j)
{
    static const struct {
        const char *text, *length;
        uint32_t    ranks, variant;
    } rows[] = {{NULL, "16", 1, 0}, {"5-20", "256", 2, 1}, {"late", "256", 1, 0}};
    const char *text = j.text;
    int failed = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        j.text = rows[i].text ? rows[i].text : text;
        j.name = rows[i].text ? rows[i].text : "a document each";
        j.length = rows[i].length;
        j.ranks = rows[i].ranks;
        struct outcome x = run_short(j, &short_variants[rows[i].variant], &failed);
        bool is_near = x.planned >= x.most * (1 - TOLERANCE) &&
                       x.planned <= x.most * (1 + TOLERANCE);
        if (!is_near || x.most > x.first + MEMORY_CHECKPOINT_BYTES) {
            printf("  FAILED: expected planned and measured within 5 %%, and that later steps take "
                   "as much as the first\n");
            failed = 1;
        }
    }
    return failed;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(struct job j);
    } modes[] = {{"all", run_all}, {"short", run_all_short}, {"check", check}};
    int (*mode)(struct job j) = NULL;
    for (size_t i = 0; argc == 6 && i < sizeof modes / sizeof *modes; i++)
        mode = strcmp(argv[3], modes[i].name) ? mode : modes[i].run;
    uint32_t ranks = argc >= 6 ? (uint32_t)atoi(argv[3]) : 0;
    const char *slash = argc >= 6 ? strchr(argv[3], '/') : NULL;
    uint32_t nodes = slash ? (uint32_t)atoi(slash + 1) : 1;
    int failed = 0;
    if ((!mode && (ranks < 1 || ranks > TRAINERS_MAX || nodes < 1 || nodes > ranks)) ||
        argc > 6 + 12 || !getenv("BALLAST_BIN")) {
        fprintf(stderr, "usage: BALLAST_BIN=FOLDER bench_memory MODEL TEXT|LOW-HIGH|late "
                "RANKS[/NODES]|all|short|check MICRO_BATCH SEQUENCE_LENGTH [KEY=VALUE]...\n");
        return 2;
    }
    struct job j = {.model = argv[1], .text = argv[2], .ranks = ranks, .nodes = nodes,
                    .micro_batch = argv[4], .length = argv[5],
                    .name = argc > 6 ? argv[6] : "as it is"};
    for (int i = 6; i < argc; i++)
        j.sets[j.n_sets++] = argv[i];
    if (mode) {
        j.ranks = j.nodes = 1;
        failed = mode(j);
    } else {
        run(&j, &failed);
    }
    order("cd / && rm -rf \"$OLDPWD\"");
    return failed;
}
