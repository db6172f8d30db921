/* test_same_build.c - a rank of another build is named, on every rank, before anything else */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <cmocka.h>

#include "worker/same_build.h"

#define WORLD 5u

struct rank {
    uint8_t  id[16];
    uint32_t rank;
    struct build_id build;
    Ballast__GangMember *const *gang;
    pthread_t thread;
    int rc;
    struct err err;
};

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    struct coll *c = NULL;
    struct coll_host_config config = {.id = r->id, .rank = r->rank, .world = WORLD,
                                      .open_timeout_ns = 60 * NS_PER_S,
                                      .call_timeout_ns = 60 * NS_PER_S};
    r->rc = coll_host_open(&config, &c, &r->err);
    if (r->rc == 0)
        r->rc = same_build(c, &r->build, r->gang, &r->err);
    if (c)
        c->ops->close(c);
    return NULL;
}

static void run_ranks(const struct build_id *build, struct rank *ranks)
{
    static uint32_t n_runs;
    static Ballast__GangMember member[WORLD], *gang[WORLD];
    static char names[WORLD][8];
    uint32_t id[4] = {(uint32_t)getpid(), ++n_runs, 0x6275696cu, WORLD};
    for (uint32_t i = 0; i < WORLD; i++) {
        ballast__gang_member__init(&member[i]);
        snprintf(names[i], sizeof names[i], "w%u", i);
        member[i].worker = names[i];
        gang[i] = &member[i];
    }
    for (uint32_t i = 0; i < WORLD; i++) {
        ranks[i] = (struct rank){.rank = i, .build = build[i], .gang = gang};
        memcpy(ranks[i].id, id, sizeof id);
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
    }
    for (uint32_t i = 0; i < WORLD; i++)
        pthread_join(ranks[i].thread, NULL);
}

static void builds_are_compared(void **state)
{
    static const struct {
        const char *what;
        int old[WORLD];    /* 1: another commit; 2: the same with other limits */
        int rc;
        const char *says[3];
    } row[] = {
        {"one build", {0, 0, 0, 0, 0}, 0, {"", "", ""}},
        {"another one, but the same", {1, 1, 1, 1, 1}, 0, {"", "", ""}},
        {"one rank's", {0, 0, 0, 1, 0}, -EPROTO,
         {"rank 3 on worker w3 is Ballast 0.0 (commit old)", "as rank 0 on worker w0",
          "ballast worker drain w3"}},
        {"the first rank's", {1, 0, 0, 0, 0}, -EPROTO,
         {"rank 0 on worker w0 is Ballast 0.0 (commit old)", "as rank 1 on worker w1",
          "ballast worker drain w0"}},
        {"two of them", {0, 1, 0, 1, 0}, -EPROTO,
         {"rank 1 on worker w1 is Ballast", "as rank 0", "of one build"}},
        {"what no commit tells", {0, 0, 2, 0, 0}, -EPROTO,
         {"rank 2 on worker w2", "with other limits", "of one build"}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        struct build_id build[WORLD];
        struct rank ranks[WORLD];
        print_message("%s\n", row[i].what);
        for (uint32_t r = 0; r < WORLD; r++) {
            build[r] = build_id_own();
            if (row[i].old[r] == 1) {
                memset(build[r].text, 0, sizeof build[r].text);
                strcpy(build[r].text, "0.0 (commit old)");
            }
            build[r].sum += row[i].old[r] == 2;
        }
        run_ranks(build, ranks);
        for (uint32_t r = 0; r < WORLD; r++) {
            assert_int_equal(ranks[r].rc, row[i].rc);
            for (int k = 0; row[i].rc && k < 3; k++)
                if (!strstr(ranks[r].err.text, row[i].says[k]))
                    fail_msg("rank %u: '%s' does not say '%s'", r, ranks[r].err.text,
                             row[i].says[k]);
        }
    }
}

/* A rank whose very first word differs cannot come so far as to tell its build. */
static void another_rendezvous_is_named(void **state)
{
    struct rank first = {.rank = 0, .build = build_id_own()};
    uint32_t id[4] = {(uint32_t)getpid(), 1000, 0x6275696cu, WORLD};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char *p = address.sun_path + 1;
    struct {
        char magic[4];
        uint32_t rank, more[9];
    } hello = {{'B', 'M', 'T', '9'}, 3, {0}};
    (void)state;
    memcpy(first.id, id, sizeof id);
    assert_int_equal(pthread_create(&first.thread, NULL, run_rank, &first), 0);
    p += sprintf(p, "ballast-coll-");
    for (int i = 0; i < 16; i++)
        p += sprintf(p, "%02x", first.id[i]);
    socklen_t n = (socklen_t)(p - (char *)&address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    while (connect(fd, (struct sockaddr *)&address, n) < 0)
        usleep(2000);
    assert_int_equal(send(fd, &hello, sizeof hello, 0), sizeof hello);
    pthread_join(first.thread, NULL);
    close(fd);
    assert_int_equal(first.rc, -EPROTO);
    assert_non_null(strstr(first.err.text, "rank 3 is of another version of Ballast than rank 0"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(builds_are_compared),
        cmocka_unit_test(another_rendezvous_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
