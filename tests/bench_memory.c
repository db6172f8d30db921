/* bench_memory.c - planned and measured memory of a rank:
 * bench_memory MODEL TEXT RANKS[/NODES] MICRO_BATCH SEQUENCE_LENGTH [KEY=VALUE]...
 * bench_memory MODEL TEXT all MICRO_BATCH SEQUENCE_LENGTH
 *
 * Ranks are trainer processes ($BALLAST_BIN/ballast-worker) with this program as their daemon;
 * dense parameters and experts are cut over all ranks unless keys say otherwise; what is measured
 * is the largest rank's, over 6 steps. Ranks of several nodes, in a row, share memory still. Prints
 * a line for each run; its last number is planned over measured. all: 1, 2 and 4 ranks with all
 * that changes a plan, and the worst of them. */
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
#include "proto/job_memory.h"
#include "proto/job_spec.h"
#include "worker/channel.h"
#include "worker/child.h"

#define RANKS_HERE_MAX 16u

struct job {
    const char *model, *text, *micro_batch, *length;
    uint32_t    ranks, nodes;
    const char *name;      /* of the row */
    const char *sets[12];  /* of the job file */
    size_t      n_sets;
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

static Ballast__JobSpec *make_spec(const struct job *j)
{
    struct problems problems = {0};
    struct job_file_places places = {0};
    Ballast__JobSpec *spec = NULL;
    char *path = xasprintf("%s/job.yaml", work_folder());
    FILE *f = fopen(path, "w");
    if (!f)
        exit(1);
    fprintf(f, "name: bench\nmodel: {path: %s}\ndata: {train: [%s], sequence_length: %s}\n"
            "train: {steps: 6, global_batch: %u, micro_batch: %s, validation_sequences: 1}\n"
            "parallel: {workers: %u, fsdp_shard_degree: %u, expert_parallel_degree: %u}\n"
            "moe: {bias_update: off}\n"
            "checkpoint: {path: %s/ckpt, every_steps: 1000000}\n", j->model, j->text, j->length,
            j->ranks * (uint32_t)atoi(j->micro_batch), j->micro_batch, j->ranks, j->ranks,
            j->ranks, work_folder());
    fclose(f);
    if (job_file_read(path, j->sets, j->n_sets, &spec, &places, &problems) < 0) {
        problems_print(&problems, stderr);
        exit(2);
    }
    job_file_places_fini(&places);
    free(path);
    return spec;
}

static int spawn(Ballast__JobSpec *spec, uint32_t rank, uint32_t ranks, uint32_t nodes)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        exit(1);
    if (fork() == 0) {
        close(pair[0]);
        dup2(2, 1);
        dup2(pair[1], CHANNEL_FD);
        char *program = xasprintf("%s/ballast-worker", getenv("BALLAST_BIN"));
        execl(program, program, "--trainer", NULL);
        _exit(127);
    }
    close(pair[1]);
    uint8_t id[16] = "memory", *bytes;
    uint32_t pid = (uint32_t)getpid();
    memcpy(id + 8, &pid, sizeof pid);
    Ballast__GangMember members[RANKS_HERE_MAX], *gang[RANKS_HERE_MAX];
    char names[RANKS_HERE_MAX][8];
    for (uint32_t i = 0; i < ranks; i++) {
        members[i] = (Ballast__GangMember)BALLAST__GANG_MEMBER__INIT;
        snprintf(names[i], sizeof names[i], "n%u", i * nodes / ranks % RANKS_HERE_MAX);
        members[i].node = names[i];
        gang[i] = &members[i];
    }
    Ballast__Start s = BALLAST__START__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    char *root = (char *)"/";
    s.job_id = 1;
    s.rank = rank;
    s.coll_id = (ProtobufCBinaryData){16, id};
    s.n_gang = ranks;
    s.gang = gang;
    s.spec = spec;
    s.n_allowed_roots = 1;
    s.allowed_roots = &root;
    s.n_threads = 1;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &s;
    size_t n = channel_pack(&m, &bytes);
    if (write(pair[0], bytes, n) != (ssize_t)n)
        exit(1);
    free(bytes);
    return pair[0];
}

/* The largest that any step reported. */
static uint64_t follow(int fd)
{
    struct channel_reader reader = {0};
    uint8_t bytes[65536];
    const uint8_t *packed;
    size_t n_packed;
    uint64_t most = 0;
    struct err err = {0};
    for (ssize_t n; (n = read(fd, bytes, sizeof bytes)) > 0;) {
        channel_reader_add(&reader, bytes, (size_t)n);
        while (channel_reader_next(&reader, &packed, &n_packed, &err) == 1) {
            Ballast__TrainerMessage *m = ballast__trainer_message__unpack(NULL, n_packed, packed);
            if (m && m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP &&
                m->step->memory_bytes > most)
                most = m->step->memory_bytes;
            ballast__trainer_message__free_unpacked(m, NULL);
        }
    }
    channel_reader_fini(&reader);
    return most;
}

static uint64_t planned(const Ballast__JobSpec *spec, uint32_t nodes)
{
    struct job_machine on = {.n_threads = 1, .n_nodes = nodes}; /* of experts cut over all */
    static struct model_spec model;
    struct layout layout;
    struct memory_plan plan;
    const char *key;
    struct err err;
    if (hf_config_read(spec->model_path, &model, &err) < 0 ||
        layout_init(job_spec_degrees(spec), model.n_experts, 0, &layout, &err) < 0 ||
        job_memory(spec, &model, layout.degrees, &on, &plan, &key, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        exit(2);
    }
    layout_fini(&layout);
    return plan.total;
}

static double run(const struct job *j, int *out_failed)
{
    Ballast__JobSpec *spec = make_spec(j);
    int fds[RANKS_HERE_MAX];
    for (uint32_t r = 0; r < j->ranks; r++)
        fds[r] = spawn(spec, r, j->ranks, j->nodes);
    double plan = (double)planned(spec, j->nodes), most = (double)follow(fds[0]);
    for (uint32_t r = 0; r < j->ranks; r++)
        close(fds[r]);
    for (int status; wait(&status) > 0;)
        *out_failed |= status != 0;
    job_file_free(spec);
    const char *model = strrchr(j->model, '/');
    double ratio = most > 0 ? plan / most : 0;
    printf("%-20s ranks=%u %-34s planned_mib=%.2f measured_mib=%.2f ratio=%.3f\n",
           model ? model + 1 : j->model, j->ranks, j->name, plan / (1 << 20), most / (1 << 20),
           ratio);
    fflush(stdout);
    return ratio;
}

/* ---- all ------------------------------------------------------------------------------------- */

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
    double least = 1, most = 1;
    int failed = 0;
    char *weights = xasprintf("%s/weights", work_folder());
    const char *bare = j.model;
    run(&j, &failed);
    order("mv ckpt/step-6 weights"); /* adapters want weights beside them */
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
            double ratio = run(&j, &failed);
            if (ratio > 0) /* else refused: not every model takes every choice */
                least = ratio < least ? ratio : least;
            most = ratio > most ? ratio : most;
            for (int i = 0; i < 3; i++)
                free(keys[i]);
            free(name);
        }
    free(weights);
    printf("planned over measured: %.3f to %.3f\n", least, most);
    return failed;
}

int main(int argc, char **argv)
{
    bool is_all = argc == 6 && !strcmp(argv[3], "all");
    uint32_t ranks = argc >= 6 ? (uint32_t)atoi(argv[3]) : 0;
    const char *slash = argc >= 6 ? strchr(argv[3], '/') : NULL;
    uint32_t nodes = slash ? (uint32_t)atoi(slash + 1) : 1;
    int failed = 0;
    if ((!is_all && (ranks < 1 || ranks > RANKS_HERE_MAX || nodes < 1 || nodes > ranks)) ||
        argc > 6 + 12 || !getenv("BALLAST_BIN")) {
        fprintf(stderr, "usage: BALLAST_BIN=FOLDER bench_memory MODEL TEXT RANKS[/NODES]|all "
                "MICRO_BATCH SEQUENCE_LENGTH [KEY=VALUE]...\n");
        return 2;
    }
    struct job j = {.model = argv[1], .text = argv[2], .ranks = ranks, .nodes = nodes,
                    .micro_batch = argv[4], .length = argv[5],
                    .name = argc > 6 ? argv[6] : "as it is"};
    for (int i = 6; i < argc; i++)
        j.sets[j.n_sets++] = argv[i];
    if (is_all) {
        j.ranks = 1;
        failed = run_all(j);
    } else {
        run(&j, &failed);
    }
    order("cd / && rm -rf \"$OLDPWD\"");
    return failed;
}
