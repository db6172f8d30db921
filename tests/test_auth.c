/* test_auth.c - every method and every role: what is allowed, written down a second time */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "coordinator/auth.h"
#include "proto/check.h"

#define M(x) BALLAST__METHOD__METHOD_##x

enum { W = 1, V = 2, U = 4, A = 8 }; /* worker, viewer, user, admin */

static const struct {
    Ballast__Method method;
    unsigned roles;
} rows[] = {
    {M(PING), W | V | U | A},      {M(SUBMIT), U | A},
    {M(JOB_LIST), V | U | A},      {M(JOB_SHOW), V | U | A},
    {M(JOB_CANCEL), U | A},        {M(JOB_HOLD), U | A},
    {M(JOB_RELEASE), U | A},       {M(JOB_REQUEUE), U | A},
    {M(JOB_PAUSE), U | A},         {M(JOB_RESUME), U | A},
    {M(JOB_SET), U | A},           {M(JOB_WAIT), V | U | A},
    {M(WORKER_LIST), V | U | A},   {M(WORKER_DRAIN), A},
    {M(WORKER_RESUME), A},         {M(EVENTS), V | U | A},
    {M(LOGS), V | U | A},          {M(METRICS), V | U | A},
    {M(EXPERTS), V | U | A},       {M(PLACEMENT), V | U | A},
    {M(REBALANCE_PLAN), V | U | A}, {M(REBALANCE_APPLY), U | A},
    {M(REBALANCE_AUTO), U | A},    {M(REBALANCE_HISTORY), V | U | A},
    {M(DB_QUERY), V | U | A},      {M(DB_BACKUP), A},
    {M(HELLO), W},                 {M(HEARTBEAT), W},
    {M(RANK_STATE), W},            {M(STEPS), W},
    {M(LOG), W},                   {M(GOODBYE), W},
    {M(LOAD), W},                  {M(START), 0},
    {M(STOP), 0},                  {M(ACK), 0},
    {M(PREPARE), 0},               {M(ABORT_PLAN), 0},
    {M(SETTINGS), 0},              {M(PEERS), 0},
};

static unsigned expected(Ballast__Method method)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].method == method)
            return rows[i].roles;
    return 0;
}

static void roles_may_what_the_table_says(void **state)
{
    (void)state;
    static const struct { enum key_role role; unsigned bit; } roles[] = {
        {KEY_WORKER, W}, {KEY_VIEWER, V}, {KEY_USER, U}, {KEY_ADMIN, A}, {KEY_COORDINATOR, 0}};
    const ProtobufCEnumDescriptor *d = &ballast__method__descriptor;
    size_t n = 0;
    for (unsigned i = 0; i < d->n_values; i++) {
        Ballast__Method method = (Ballast__Method)d->values[i].value;
        n += check_method(method) != NULL;
        for (size_t r = 0; r < sizeof roles / sizeof *roles; r++) {
            struct identity who = {"x", true, roles[r].role};
            if (auth_may(&who, method) != !!(expected(method) & roles[r].bit))
                fail_msg("%s by %s", d->values[i].name, key_role_name(roles[r].role));
        }
        if (check_method(method))
            assert_true(auth_may(&(struct identity){"local", false, KEY_VIEWER}, method));
    }
    assert_int_equal(n, sizeof rows / sizeof *rows); /* a new method needs a row here */
}

static void only_users_are_bound_to_their_own_jobs(void **state)
{
    (void)state;
    assert_true(auth_is_limited(&(struct identity){"x", true, KEY_USER}));
    assert_false(auth_is_limited(&(struct identity){"x", true, KEY_ADMIN}));
    assert_false(auth_is_limited(&(struct identity){"x", false, KEY_USER}));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(roles_may_what_the_table_says),
        cmocka_unit_test(only_users_are_bound_to_their_own_jobs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
