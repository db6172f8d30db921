/* bench_train.c - tokens per second of a whole step: bench_train MODEL TEXT RANKS THREADS [STEPS]
 *
 * Ranks are trainer processes with this program as their daemon; 8 sequences of 256 tokens a step,
 * dense parameters and experts cut over all ranks. Prints the median over steps after the first
 * three, and where rank 0's time went. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/mem.h"
#include "proto/job_file.h"
#include "worker/channel.h"
#include "worker/trainer.h"

#define RANKS_HERE_MAX 16u
#define STEPS_HERE_MAX 1000u
#define WARM_STEPS 3u
#define PHASES_HERE_MAX 16u

struct figures {
    double   tokens_per_second[STEPS_HERE_MAX];
    double   seconds[PHASES_HERE_MAX];
    char     names[PHASES_HERE_MAX][32];
    uint32_t n_steps, n_phases;
    double   memory_mb;
};

static Ballast__JobSpec *make_spec(const char *model, const char *text, uint32_t ranks,
                                   uint32_t steps)
{
    struct problems problems = {0};
    Ballast__JobSpec *spec = NULL;
    char *job = xasprintf(
        "name: bench\nmodel: {path: %s}\ndata: {train: [%s], sequence_length: 256}\n"
        "train: {steps: %u, global_batch: 8, micro_batch: %u}\n"
        "parallel: {workers: %u, fsdp_shard_degree: %u, expert_parallel_degree: %u}\n"
        "checkpoint: {path: /tmp/bench-train-%d, every_steps: 1000000}\n",
        model, text, steps, 8 / ranks ? 8 / ranks : 1, ranks, ranks, ranks, (int)getpid());
    if (job_file_read_text("bench", "/", job, strlen(job), &spec, &problems) < 0) {
        problems_print(&problems, stderr);
        exit(2);
    }
    free(job);
    return spec;
}

static int spawn(Ballast__JobSpec *spec, uint32_t rank, uint32_t ranks, uint32_t threads)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        exit(1);
    if (fork() == 0) {
        close(pair[0]);
        dup2(2, 1);
        _exit(trainer_main(pair[1]));
    }
    close(pair[1]);
    uint8_t id[16] = "bench", *bytes;
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
    s.n_threads = threads;
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &s;
    size_t n = channel_pack(&m, &bytes);
    if (write(pair[0], bytes, n) != (ssize_t)n)
        exit(1);
    free(bytes);
    return pair[0];
}

static void take(struct figures *f, const Ballast__StepReport *s)
{
    if (s->step <= WARM_STEPS || f->n_steps == STEPS_HERE_MAX)
        return;
    f->tokens_per_second[f->n_steps++] = s->tokens_per_second;
    f->memory_mb = (double)s->memory_bytes / 1e6;
    f->n_phases = s->n_phases < PHASES_HERE_MAX ? (uint32_t)s->n_phases : PHASES_HERE_MAX;
    for (uint32_t i = 0; i < f->n_phases; i++) {
        f->seconds[i] += s->phases[i]->seconds;
        snprintf(f->names[i], sizeof f->names[i], "%s", s->phases[i]->name);
    }
}

static void follow(int fd, struct figures *f)
{
    struct channel_reader reader = {0};
    uint8_t bytes[65536];
    const uint8_t *packed;
    size_t n_packed;
    struct err err = {0};
    for (ssize_t n; (n = read(fd, bytes, sizeof bytes)) > 0;) {
        channel_reader_add(&reader, bytes, (size_t)n);
        while (channel_reader_next(&reader, &packed, &n_packed, &err) == 1) {
            Ballast__TrainerMessage *m = ballast__trainer_message__unpack(NULL, n_packed, packed);
            if (m && m->what_case == BALLAST__TRAINER_MESSAGE__WHAT_STEP)
                take(f, m->step);
            ballast__trainer_message__free_unpacked(m, NULL);
        }
    }
    channel_reader_fini(&reader);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    uint32_t ranks = argc > 3 ? (uint32_t)atoi(argv[3]) : 0;
    uint32_t threads = argc > 4 ? (uint32_t)atoi(argv[4]) : 0;
    if (ranks < 1 || ranks > 8 || 8 % ranks != 0 || threads < 1) {
        fprintf(stderr, "usage: bench_train MODEL TEXT 1|2|4|8 THREADS [STEPS]\n");
        return 2;
    }
    static struct figures f;
    int fds[RANKS_HERE_MAX], rc = 0;
    Ballast__JobSpec *spec = make_spec(argv[1], argv[2], ranks,
                                       argc > 5 ? (uint32_t)atoi(argv[5]) : 20);
    for (uint32_t r = 0; r < ranks; r++)
        fds[r] = spawn(spec, r, ranks, threads);
    follow(fds[0], &f);
    for (int status; wait(&status) > 0;)
        rc |= status != 0;
    job_file_free(spec);
    if (f.n_steps == 0)
        return 1;
    qsort(f.tokens_per_second, f.n_steps, sizeof(double), by_value);
    printf("ranks=%u threads=%u tokens_per_s=%.0f best=%.0f memory_mb=%.0f", ranks, threads,
           f.tokens_per_second[f.n_steps / 2], f.tokens_per_second[f.n_steps - 1], f.memory_mb);
    for (uint32_t i = 0; i < f.n_phases; i++)
        if (f.seconds[i] > 0)
            printf(" %s_ms=%.1f", f.names[i], f.seconds[i] / f.n_steps * 1e3);
    printf("\n");
    return rc;
}
