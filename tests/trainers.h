/* trainers.h - trainer processes of one job, with a bench as their daemon
 *
 * What goes wrong here ends the program; what goes wrong there a trainer says itself. */
#ifndef TESTS_TRAINERS_H
#define TESTS_TRAINERS_H

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/ballast.pb-c.h"
#include "worker/channel.h"

#define TRAINERS_MAX 16u

struct trainers {
    const char       *name; /* of the bench, at most 8 letters: where ranks meet */
    Ballast__JobSpec *spec;
    uint32_t          n_ranks, n_threads;
    const char       *device;
    char nodes[TRAINERS_MAX][16], machines[TRAINERS_MAX][16]; /* of each rank */
};

static inline void trainer_send(int fd, const Ballast__TrainerMessage *m)
{
    uint8_t *bytes;
    size_t n = channel_pack(m, &bytes);
    if (write(fd, bytes, n) != (ssize_t)n)
        exit(1);
    free(bytes);
}

static inline void trainer_send_start(int fd, const struct trainers *t, uint32_t rank)
{
    Ballast__GangMember members[TRAINERS_MAX], *gang[TRAINERS_MAX];
    Ballast__Start s = BALLAST__START__INIT;
    Ballast__TrainerMessage m = BALLAST__TRAINER_MESSAGE__INIT;
    uint8_t id[16] = {0};
    uint32_t pid = (uint32_t)getpid();
    char *root = (char *)"/";
    memcpy(id, t->name, strnlen(t->name, 8));
    memcpy(id + 8, &pid, sizeof pid);
    for (uint32_t i = 0; i < t->n_ranks; i++) {
        ballast__gang_member__init(gang[i] = &members[i]);
        members[i].node = (char *)t->nodes[i];
        members[i].machine = (char *)t->machines[i];
    }
    s.job_id = 1;
    s.rank = rank;
    s.coll_id = (ProtobufCBinaryData){sizeof id, id};
    s.n_gang = t->n_ranks;
    s.gang = gang;
    s.spec = t->spec;
    s.n_allowed_roots = 1;
    s.allowed_roots = &root;
    s.n_threads = t->n_threads;
    s.device = (char *)t->device;
    s.data_address = (char *)"tcp://127.0.0.1:*";
    m.what_case = BALLAST__TRAINER_MESSAGE__WHAT_START;
    m.start = &s;
    trainer_send(fd, &m);
}

/* A process that has become a trainer by run, whose output is on stderr, and has its START; the
 * other end of its channel. */
static inline int trainer_spawn(const struct trainers *t, uint32_t rank,
                                void (*run)(uint32_t rank, int channel))
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        exit(1);
    if (fork() == 0) {
        close(pair[0]);
        dup2(2, 1);
        run(rank, pair[1]);
        _exit(127);
    }
    close(pair[1]);
    trainer_send_start(pair[0], t, rank);
    return pair[0];
}

/* The next message of one, ended with ballast__trainer_message__free_unpacked; NULL: it is gone. */
static inline Ballast__TrainerMessage *trainer_next(int fd, struct channel_reader *reader)
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

#endif
