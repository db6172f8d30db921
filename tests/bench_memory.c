/* bench_memory.c - planned and measured memory of a rank:
 * bench_memory MODEL TEXT RANKS off|full MICRO_BATCH SEQUENCE_LENGTH
 *
 * Ranks are trainer processes ($BALLAST_BIN/ballast-worker) with this program as their daemon;
 * dense parameters and experts cut over all ranks; what is measured is the largest rank's, over 6
 * steps. Prints one line; its last number is planned over measured. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
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

static Ballast__JobSpec *make_spec(char **argv, uint32_t ranks)
{
    struct problems problems = {0};
    Ballast__JobSpec *spec = NULL;
    char *job = xasprintf(
        "name: bench\nmodel: {path: %s}\ndata: {train: [%s], sequence_length: %s}\n"
        "train: {steps: 6, global_batch: %u, micro_batch: %s, validation_sequences: 1}\n"
        "parallel: {workers: %u, fsdp_shard_degree: %u, expert_parallel_degree: %u,"
        " activation_checkpointing: %s}\nmoe: {bias_update: off}\n"
        "checkpoint: {path: /tmp/bench-memory-%d, every_steps: 1000000}\n",
        argv[1], argv[2], argv[6], ranks * (uint32_t)atoi(argv[5]), argv[5], ranks, ranks, ranks,
        argv[4], (int)getpid());
    if (job_file_read_text("bench", "/", job, strlen(job), &spec, &problems) < 0) {
        problems_print(&problems, stderr);
        exit(2);
    }
    free(job);
    return spec;
}

static int spawn(Ballast__JobSpec *spec, uint32_t rank, uint32_t ranks)
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
    Ballast__GangMember member = BALLAST__GANG_MEMBER__INIT, *gang[RANKS_HERE_MAX];
    for (uint32_t i = 0; i < ranks; i++)
        gang[i] = &member;
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

static uint64_t planned(const Ballast__JobSpec *spec)
{
    static struct model_spec model;
    struct layout layout;
    struct memory_plan plan;
    const char *key;
    struct err err;
    if (hf_config_read(spec->model_path, &model, &err) < 0 ||
        layout_init(job_spec_degrees(spec), model.n_experts, 0, &layout, &err) < 0 ||
        job_memory(spec, &model, layout.degrees, NULL, &plan, &key, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        exit(2);
    }
    layout_fini(&layout);
    return plan.total;
}

int main(int argc, char **argv)
{
    uint32_t ranks = argc == 7 ? (uint32_t)atoi(argv[3]) : 0;
    int fds[RANKS_HERE_MAX], rc = 0;
    if (ranks < 1 || ranks > RANKS_HERE_MAX || !getenv("BALLAST_BIN")) {
        fprintf(stderr, "usage: BALLAST_BIN=FOLDER bench_memory MODEL TEXT RANKS off|full "
                "MICRO_BATCH SEQUENCE_LENGTH\n");
        return 2;
    }
    Ballast__JobSpec *spec = make_spec(argv, ranks);
    for (uint32_t r = 0; r < ranks; r++)
        fds[r] = spawn(spec, r, ranks);
    double plan = (double)planned(spec), most = (double)follow(fds[0]);
    for (int status; wait(&status) > 0;)
        rc |= status != 0;
    job_file_free(spec);
    printf("%-24s ranks=%u recompute=%-9s planned_mib=%.2f measured_mib=%.2f ratio=%.3f\n",
           strrchr(argv[1], '/') ? strrchr(argv[1], '/') + 1 : argv[1], ranks, argv[4],
           plan / (1 << 20), most / (1 << 20), most > 0 ? plan / most : 0);
    return rc;
}
