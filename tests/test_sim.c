/* test_sim.c - thousands of random histories of a cluster, and a few stories to read
 *
 * test_sim                             stories, then SIM_SEEDS histories from seed SIM_FIRST
 * test_sim --seeds N --first S         the same from the command line
 * A seed that breaks a rule is run again and prints its trace. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "tests/sim.h"

static uint64_t n_seeds = 2000, first_seed = 1;

static struct sim *history(uint64_t seed, bool keeps_trace)
{
    struct sim *s = sim_create(seed, 1 + (uint32_t)(seed % 5), 1 + (uint32_t)(seed % 3));
    s->keeps_trace = keeps_trace;
    sim_history(s);
    return s;
}

static void every_history_keeps_the_rules(void **state)
{
    (void)state;
    struct sim_counts sum = {0};
    uint64_t n_failed = 0;
    clock_t from = clock();
    for (uint64_t seed = first_seed; seed < first_seed + n_seeds; seed++) {
        struct sim *s = history(seed, false);
        sum.n_events += s->counts.n_events;
        sum.n_packets += s->counts.n_packets;
        sum.n_lost += s->counts.n_lost;
        sum.n_crashes += s->counts.n_crashes;
        sum.n_kills += s->counts.n_kills;
        sum.n_records += s->counts.n_records;
        sum.n_attempts += s->counts.n_attempts;
        sum.n_done += s->counts.n_done;
        if (*s->failure) {
            fprintf(stderr, "seed %" PRIu64 ": %s\n", seed, s->failure);
            if (!n_failed++) {
                struct sim *again = history(seed, true);
                fprintf(stderr, "%s", again->trace);
                sim_destroy(again);
            }
        }
        sim_destroy(s);
    }
    printf("%" PRIu64 " seeds from %" PRIu64 " in %.1f s: %" PRIu64 " events, %" PRIu64
           " packets (%" PRIu64 " lost), %" PRIu64 " coordinator crashes, %" PRIu64
           " daemon kills, %" PRIu64 " records, %" PRIu64 " trainers, %" PRIu64 " jobs done, %"
           PRIu64 " failed\n", n_seeds, first_seed, (double)(clock() - from) / CLOCKS_PER_SEC,
           sum.n_events, sum.n_packets, sum.n_lost, sum.n_crashes, sum.n_kills, sum.n_records,
           sum.n_attempts, sum.n_done, n_failed);
    assert_int_equal(n_failed, 0);
}

static uint64_t number(const char *text)
{
    return strtoull(text, NULL, 10);
}

int main(int argc, char **argv)
{
    if (getenv("SIM_SEEDS"))
        n_seeds = number(getenv("SIM_SEEDS"));
    if (getenv("SIM_FIRST"))
        first_seed = number(getenv("SIM_FIRST"));
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--seeds"))
            n_seeds = number(argv[i + 1]);
        else if (!strcmp(argv[i], "--first"))
            first_seed = number(argv[i + 1]);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_history_keeps_the_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
