/* test_migration.c - the life of a plan as stories in virtual time */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "coordinator/migration.h"

enum { N_RANKS = 3, LATE_S = 60 };

struct story {
    struct migration      m;
    struct migration_rank ranks[N_RANKS];
    uint64_t              now_s;
    char                  trace[4096];
};

static void say(struct story *s, const char *text)
{
    size_t n = strlen(s->trace);
    snprintf(s->trace + n, sizeof s->trace - n, "[%3u] %s\n", (unsigned)s->now_s, text);
}

static void say_state(struct story *s, enum migration_state before)
{
    if (s->m.state != before)
        say(s, migration_state_name(s->m.state));
}

/* As the core: what has to be recorded is, and the record moves it on. */
static void look(struct story *s)
{
    static const char *const words[] = {
        [MIGRATION_REFUSED] = "record: ended, rank %u refused",
        [MIGRATION_LATE] = "record: ended, rank %u did not answer",
        [MIGRATION_COMPLETE] = "record: placement",
    };
    enum migration_state before = s->m.state;
    uint32_t rank = 99;
    enum migration_news news = migration_look(&s->m, s->ranks, N_RANKS, s->now_s * NS_PER_S,
                                              &rank);
    say_state(s, before);
    if (news == MIGRATION_NO_NEWS)
        return;
    char text[64];
    snprintf(text, sizeof text, words[news], rank);
    say(s, text);
    before = s->m.state;
    migration_move(&s->m, news == MIGRATION_COMPLETE ? MIGRATION_DONE : MIGRATION_ABORTING);
    say_state(s, before);
    if (news != MIGRATION_COMPLETE)
        look(s);
}

static void propose(struct story *s, uint32_t epoch)
{
    assert_true(migration_is_settled(&s->m, s->ranks, N_RANKS));
    migration_move(&s->m, MIGRATION_PREPARING);
    s->m.epoch = epoch;
    s->m.late_ns = (s->now_s + LATE_S) * NS_PER_S;
    say(s, "PREPARING");
}

static void pass(struct story *s, uint64_t seconds)
{
    s->now_s += seconds;
    look(s);
}

/* The newest plan a rank is ready for, has refused, has carried out. */
static void hear(struct story *s, uint32_t rank, uint32_t prepared, uint32_t rejected,
                 uint32_t placement)
{
    Ballast__RankState said = BALLAST__RANK_STATE__INIT;
    said.prepared_epoch = prepared;
    said.rejected_epoch = rejected;
    said.placement_epoch = placement;
    migration_hear(&s->ranks[rank], &said);
    s->now_s++;
    look(s);
}

static void expect(struct story *s, const char *trace)
{
    assert_string_equal(s->trace, trace);
    s->trace[0] = '\0';
}

static bool must_ask(const struct story *s, uint32_t rank)
{
    return migration_must_ask(&s->m, &s->ranks[rank]);
}

static void all_prepare_and_all_migrate(void **state)
{
    (void)state;
    struct story s = {0};
    propose(&s, 1);
    assert_true(must_ask(&s, 0));
    hear(&s, 0, 1, 0, 0);
    assert_false(must_ask(&s, 0));
    hear(&s, 1, 1, 0, 0);
    assert_true(must_ask(&s, 2));
    hear(&s, 2, 1, 0, 0);
    hear(&s, 2, 1, 0, 1);
    hear(&s, 0, 1, 0, 1);
    hear(&s, 0, 0, 0, 0); /* overtaken: nothing shrinks */
    assert_false(migration_is_settled(&s.m, s.ranks, N_RANKS));
    hear(&s, 1, 1, 0, 1);
    expect(&s, "[  0] PREPARING\n"
               "[  3] MIGRATING\n"
               "[  7] record: placement\n"
               "[  7] DONE\n");
    propose(&s, 2);
    assert_true(must_ask(&s, 0));
}

static void one_refusal_ends_it_for_all(void **state)
{
    (void)state;
    struct story s = {0};
    propose(&s, 4);
    hear(&s, 0, 4, 0, 0);
    hear(&s, 1, 0, 4, 0);
    expect(&s, "[  0] PREPARING\n"
               "[  2] record: ended, rank 1 refused\n"
               "[  2] ABORTING\n"
               "[  2] ENDED\n");
    assert_true(must_ask(&s, 0)); /* it still holds memory for the plan */
    assert_false(must_ask(&s, 1));
    assert_false(migration_is_settled(&s.m, s.ranks, N_RANKS));
    hear(&s, 0, 4, 4, 0);
    hear(&s, 2, 0, 4, 0);
    assert_true(migration_is_settled(&s.m, s.ranks, N_RANKS));
    propose(&s, 5);
    hear(&s, 0, 5, 4, 0);
    hear(&s, 1, 5, 4, 0);
    hear(&s, 2, 5, 4, 0);
    expect(&s, "[  4] PREPARING\n"
               "[  7] MIGRATING\n");
}

static void who_does_not_answer_is_not_waited_for(void **state)
{
    (void)state;
    struct story s = {0};
    propose(&s, 1);
    hear(&s, 0, 1, 0, 0);
    pass(&s, 58);
    hear(&s, 2, 1, 0, 0);
    expect(&s, "[  0] PREPARING\n"
               "[ 60] record: ended, rank 1 did not answer\n"
               "[ 60] ABORTING\n");
    assert_true(must_ask(&s, 0) && must_ask(&s, 1));
    hear(&s, 2, 1, 1, 0);
    expect(&s, "[ 61] ENDED\n");
}

static void a_migration_wins_over_an_abort(void **state)
{
    (void)state;
    struct story s = {0};
    propose(&s, 1);
    hear(&s, 0, 1, 0, 0);
    hear(&s, 1, 1, 0, 0);
    pass(&s, 60); /* rank 2 is prepared, but its word is lost */
    hear(&s, 0, 1, 0, 1);
    assert_false(migration_is_settled(&s.m, s.ranks, N_RANKS));
    hear(&s, 2, 1, 0, 1);
    hear(&s, 1, 1, 0, 1);
    expect(&s, "[  0] PREPARING\n"
               "[ 62] record: ended, rank 2 did not answer\n"
               "[ 62] ABORTING\n"
               "[ 63] MIGRATING\n"
               "[ 65] record: placement\n"
               "[ 65] DONE\n");
}

static void one_that_has_migrated_speaks_for_all(void **state)
{
    (void)state;
    struct story s = {0};
    propose(&s, 1);
    hear(&s, 1, 1, 0, 1);
    pass(&s, 100); /* no time limit from here on: the others have moved, too, or died */
    hear(&s, 0, 1, 0, 1);
    hear(&s, 2, 1, 0, 1);
    expect(&s, "[  0] PREPARING\n"
               "[  1] MIGRATING\n"
               "[103] record: placement\n"
               "[103] DONE\n");
}

static void the_end_of_an_attempt_voids_what_was_said(void **state)
{
    (void)state;
    struct story s = {0};
    propose(&s, 1);
    hear(&s, 0, 1, 0, 0);
    migration_void(&s.m);
    memset(s.ranks, 0, sizeof s.ranks);
    assert_true(migration_is_settled(&s.m, s.ranks, N_RANKS));
    assert_false(must_ask(&s, 0));
    assert_false(migration_may_move(&s.m, MIGRATION_MIGRATING));
    assert_true(migration_may_move(&s.m, MIGRATION_PREPARING));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_prepare_and_all_migrate),
        cmocka_unit_test(one_refusal_ends_it_for_all),
        cmocka_unit_test(who_does_not_answer_is_not_waited_for),
        cmocka_unit_test(a_migration_wins_over_an_abort),
        cmocka_unit_test(one_that_has_migrated_speaks_for_all),
        cmocka_unit_test(the_end_of_an_attempt_voids_what_was_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
