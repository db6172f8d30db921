/* test_coll_choose.c - which devices and wishes send tensors through host memory, in what words */
#include <pthread.h>

#include "tests/coll_calls.h"
#include "worker/coll_choose.h"

/* A rank's device and wish; gpu 0: the cpu, else the number of its GPU. */
struct have {
    uint8_t gpu;
    enum coll_wish wish;
};

struct chooser {
    struct rank r;
    struct have have;
    char said[COLL_SAID_BYTES];
    bool is_host;
};

static void *choose_main(void *arg)
{
    struct chooser *x = arg;
    struct rank *r = &x->r;
    struct coll *host = NULL, *c;
    struct device *dev = NULL;
    struct layout layout = {0};
    struct coll_host_config config = {.id = r->id, .rank = r->rank, .world = r->world,
                                      .open_timeout_ns = 10 * NS_PER_S,
                                      .call_timeout_ns = 10 * NS_PER_S};
    if ((r->rc = device_cpu_open(1, false, &dev, &r->err)) == 0 &&
        (r->rc = coll_host_open(&config, &host, &r->err)) == 0) {
        dev->is_host = !x->have.gpu;
        dev->uuid[0] = x->have.gpu;
        c = host;
        r->rc = coll_choose(&c, dev, x->have.wish, &layout, x->said, &r->err);
        x->is_host = c == host && host->dev == dev;
    }
    if (host)
        host->ops->close(host);
    if (dev)
        dev->ops->close(dev);
    return NULL;
}

static void devices_and_wishes_decide(void **state)
{
    (void)state;
    static const struct {
        const char *shows;
        uint32_t world;
        struct have have[3];
        const char *says; /* of the way, or of the error */
        bool is_error;
    } rows[] = {
        {"one rank has nobody to send to", 1, {{1, 0}}, "host memory, there is one rank", false},
        {"ranks on the cpu", 2, {{0, 0}, {0, 0}}, "host memory, rank 0 computes on the cpu", false},
        {"one of them", 3, {{1, 0}, {2, 0}, {0, 0}}, "host memory, rank 2 computes on", false},
        {"two on one GPU", 3, {{1, 0}, {2, 0}, {1, 0}}, "host memory, ranks 0 and 2 share a GPU",
         false},
        {"a wish for the host", 2, {{1, 0}, {2, COLL_WISH_HOST}},
         "host memory, a worker's configuration says so", false},
        {"it is stronger than one for NCCL", 2, {{1, COLL_WISH_NCCL}, {2, COLL_WISH_HOST}},
         "host memory, a worker's configuration says so", false},
        {"a wish that cannot be", 2, {{3, 0}, {3, COLL_WISH_NCCL}},
         "needs a GPU for every rank, but ranks 0 and 1 share a GPU", true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct chooser ranks[3];
        pthread_t threads[3];
        uint8_t id[16];
        make_id(id);
        for (uint32_t r = 0; r < rows[i].world; r++) {
            ranks[r] = (struct chooser){.r = {.rank = r, .world = rows[i].world},
                                        .have = rows[i].have[r]};
            memcpy(ranks[r].r.id, id, sizeof id);
            assert_int_equal(pthread_create(&threads[r], NULL, choose_main, &ranks[r]), 0);
        }
        for (uint32_t r = 0; r < rows[i].world; r++)
            pthread_join(threads[r], NULL);
        for (uint32_t r = 0; r < rows[i].world; r++) {
            const struct rank *x = &ranks[r].r;
            const char *said = rows[i].is_error ? x->err.text : ranks[r].said;
            if (x->rc != (rows[i].is_error ? -EINVAL : 0) || !strstr(said, rows[i].says))
                fail_msg("%s: rank %u: %d, '%s'", rows[i].shows, r, x->rc, said);
            assert_true(ranks[r].is_host);
        }
    }
}

static void words_are_wishes(void **state)
{
    (void)state;
    enum coll_wish wish = COLL_WISH_HOST;
    struct err err = {0};
    assert_int_equal(coll_wish_parse(NULL, &wish, &err), 0);
    assert_int_equal(wish, COLL_WISH_AUTO);
    assert_int_equal(coll_wish_parse("host", &wish, &err), 0);
    assert_int_equal(wish, COLL_WISH_HOST);
    assert_int_equal(coll_wish_parse("nccl", &wish, &err), 0);
    assert_int_equal(wish, COLL_WISH_NCCL);
    assert_int_equal(coll_wish_parse("mpi", &wish, &err), -EINVAL);
    assert_non_null(strstr(err.text, "expected auto, host or nccl"));
    assert_int_equal(wish, COLL_WISH_NCCL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_and_wishes_decide),
        cmocka_unit_test(words_are_wishes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
