/* test_queue.c - which waiting jobs start, and what the others are told */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "coordinator/queue.h"

#define GIB (1ull << 30)

/* Jobs "id:workers[:memory GiB[:together[:memory when spread]]]" in order; workers
 * "name/node[*busy]", 8 GiB each. The expected lines: "id starts a b" or "id waits KIND
 * numbers". */
struct row {
    const char *shows, *jobs, *workers, *expected;
};

static const struct row rows[] = {
    {"a gang starts when it is whole", "1:2", "a/x b/x", "1 starts a b\n"},
    {"no workers at all", "1:2", "", "1 waits workers 2 0 0\n"},
    {"a part of a gang does not start", "1:3", "a/x b/x c/x*", "1 waits workers 3 3 2\n"},
    {"nothing overtakes a job that waits for busy workers", "1:3 2:1", "a/x b/x c/x*",
     "1 waits workers 3 3 2\n2 waits behind 1\n"},
    {"a job too large for the whole fleet holds nobody up", "1:4 2:1", "a/x b/x c/x*",
     "1 waits workers 4 3 2\n2 starts a\n"},
    {"several start at once, in order", "1:1 2:2", "a/x b/x c/x", "1 starts a\n2 starts b c\n"},
    {"one node that has enough is taken, the fullest first", "1:2", "a/x b/x c/x d/y e/y",
     "1 starts d e\n"},
    {"a gang on two nodes keeps a node's ranks together", "1:4", "a/x d/y b/x e/y c/y",
     "1 starts c d e a\n"},
    {"ranks that exchange tokens are on one node, where they can be", "1:4:0:2",
     "a/x d/y b/x e/y c/y", "1 starts c d a b\n"},
    {"and fill the nodes where they cannot", "1:4:0:2", "a/x d/y b/z e/y c/y",
     "1 starts c d e a\n"},
    {"memory counts", "1:1:16", "a/x b/x", "1 waits memory 1 0 0\n"},
    {"where the experts lie on two nodes ranks need more than there is", "1:4:8:4:9",
     "a/x b/x c/y d/y", "1 waits memory 4 0 0\n"},
    {"on one node they do not", "1:4:8:4:9", "a/x b/x c/x d/x", "1 starts a b c d\n"},
    {"nor where each group has a node", "1:4:8:2:9", "a/x b/x c/y d/y", "1 starts a b c d\n"},
    {"a group waits for its node, rather than start where it does not fit", "1:2:8:2:9 2:1",
     "a/x b/x* c/y", "1 waits node 2 0 0\n2 waits behind 1\n"},
    {"and starts on several where all have room", "1:2:4:2:8", "a/x b/x* c/y", "1 starts a c\n"},
    {"a group that no node has room for waits but for workers", "1:4:3:4:4 2:1",
     "a/x b/x* c/y d/y", "1 waits workers 4 4 3\n2 waits behind 1\n"},
    {"a job that fits no worker lets others pass", "1:1:16 2:1", "a/x",
     "1 waits memory 1 0 0\n2 starts a\n"},
};

static size_t read_jobs(const char *text, struct queue_job *out_jobs)
{
    size_t n = 0;
    unsigned id, n_workers, gib, together, spread;
    int length;
    for (; *text; text += strspn(text, " ")) {
        gib = together = spread = 0;
        sscanf(text, "%u:%u%n", &id, &n_workers, &length);
        text += length;
        if (*text == ':') {
            sscanf(text, ":%u%n", &gib, &length);
            text += length;
        }
        if (*text == ':') {
            sscanf(text, ":%u%n", &together, &length);
            text += length;
        }
        if (*text == ':') {
            sscanf(text, ":%u%n", &spread, &length);
            text += length;
        }
        out_jobs[n++] = (struct queue_job){.id = id, .n_workers = n_workers,
                                           .memory_bytes = gib * GIB, .n_together = together,
                                           .memory_bytes_spread = spread * GIB};
    }
    return n;
}

static size_t read_workers(const char *text, char names[][8], char nodes[][8],
                           struct queue_worker *out_workers)
{
    size_t n = 0;
    int length;
    for (; *text; text += strspn(text, " "), n++) {
        sscanf(text, "%7[a-z]/%7[a-z]%n", names[n], nodes[n], &length);
        text += length;
        bool is_busy = *text == '*';
        text += is_busy;
        out_workers[n] = (struct queue_worker){.index = (uint32_t)n, .is_free = !is_busy,
            .memory_bytes = 8 * GIB, .name = names[n], .node = nodes[n]};
    }
    return n;
}

static void the_table(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct queue_job jobs[8];
        struct queue_worker workers[8];
        struct queue_decision decisions[8];
        char names[8][8], nodes[8][8], text[512] = "";
        struct arena arena = {0};
        size_t n_jobs = read_jobs(rows[i].jobs, jobs);
        size_t n_workers = read_workers(rows[i].workers, names, nodes, workers);
        queue_decide(jobs, n_jobs, workers, n_workers, &arena, decisions);
        for (size_t k = 0; k < n_jobs; k++) {
            const struct queue_decision *d = &decisions[k];
            char *end = text + strlen(text);
            size_t room = sizeof text - strlen(text);
            if (d->workers) {
                snprintf(end, room, "%u starts", (unsigned)jobs[k].id);
                for (uint32_t r = 0; r < jobs[k].n_workers; r++)
                    snprintf(text + strlen(text), sizeof text - strlen(text), " %s",
                             names[d->workers[r]]);
                strcat(text, "\n");
            } else if (d->wait.kind == WAIT_BEHIND) {
                snprintf(end, room, "%u waits behind %u\n", (unsigned)jobs[k].id,
                         (unsigned)d->wait.a);
            } else {
                snprintf(end, room, "%u waits %s %u %u %u\n", (unsigned)jobs[k].id,
                         d->wait.kind == WAIT_MEMORY ? "memory"
                         : d->wait.kind == WAIT_NODE ? "node" : "workers", (unsigned)d->wait.a,
                         (unsigned)d->wait.b, (unsigned)d->wait.c);
            }
        }
        if (strcmp(text, rows[i].expected))
            fail_msg("%s: got\n%s", rows[i].shows, text);
        arena_fini(&arena);
    }
}

static void priority_goes_before_age(void **state)
{
    (void)state;
    struct queue_job old = {.id = 1, .priority = 0}, young = {.id = 2, .priority = 5};
    assert_true(queue_is_before(&young, &old));
    young.priority = 0;
    assert_true(queue_is_before(&old, &young));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table),
        cmocka_unit_test(priority_goes_before_age),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
