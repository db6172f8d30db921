/* test_layout.c - every way to cut one to eight ranks, and what each cut must satisfy */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "common/layout.h"

#define WORLD_MAX 8u
#define N_EXPERTS 16u

enum { FSDP, FSDP_REPLICA, EP, EXPERT_SHARD, EXPERT_REPLICA, GROUPS };

static const struct rank_group *group_of(const struct layout *l, int which)
{
    const struct rank_group *groups[GROUPS] = { &l->fsdp, &l->fsdp_replica, &l->ep,
                                                &l->expert_shard, &l->expert_replica };
    return groups[which];
}

static bool is_same_group(const struct rank_group *a, const struct rank_group *b)
{
    return a->n_ranks == b->n_ranks &&
           memcmp(a->ranks, b->ranks, a->n_ranks * sizeof *a->ranks) == 0;
}

static bool has(const struct rank_group *g, uint32_t rank)
{
    for (uint32_t i = 0; i < g->n_ranks; i++)
        if (g->ranks[i] == rank)
            return true;
    return false;
}

/* All members see one group, and the groups of one kind hold every rank once. */
static void check_partition(const struct layout *all, uint32_t world, int which)
{
    for (uint32_t r = 0; r < world; r++) {
        const struct rank_group *g = group_of(&all[r], which);
        assert_int_equal(g->ranks[g->me], r);
        for (uint32_t i = 0; i < g->n_ranks; i++) {
            assert_true(g->ranks[i] < world);
            assert_true(i == 0 || g->ranks[i] > g->ranks[i - 1]);
            assert_true(is_same_group(g, group_of(&all[g->ranks[i]], which)));
        }
    }
}

/* Groups of two kinds meet in one rank at most: a slice has one owner in each replica. */
static void check_crossing(const struct layout *all, uint32_t world, int a, int b)
{
    for (uint32_t r = 0; r < world; r++)
        for (uint32_t s = 0; s < world; s++) {
            uint32_t n_common = 0;
            for (uint32_t t = 0; t < world; t++)
                n_common += has(group_of(&all[r], a), t) && has(group_of(&all[s], b), t);
            assert_true(n_common <= 1);
        }
}

static void check_experts(const struct layout *all, uint32_t world)
{
    for (uint32_t r = 0; r < world; r++) {
        const struct layout *l = &all[r];
        /* Who shares or repeats my experts sits at my place of its expert group. */
        for (uint32_t i = 0; i < l->expert_shard.n_ranks; i++)
            assert_int_equal(all[l->expert_shard.ranks[i]].ep.me, l->ep.me);
        for (uint32_t i = 0; i < l->expert_replica.n_ranks; i++) {
            assert_int_equal(all[l->expert_replica.ranks[i]].ep.me, l->ep.me);
            assert_int_equal(all[l->expert_replica.ranks[i]].expert_shard.me, l->expert_shard.me);
        }
        assert_int_equal(l->ep.n_ranks * l->expert_shard.n_ranks * l->expert_replica.n_ranks,
                         world);
        assert_int_equal(l->fsdp.n_ranks * l->fsdp_replica.n_ranks, world);
        for (uint32_t i = 0; i < l->fsdp_replica.n_ranks; i++)
            assert_int_equal(all[l->fsdp_replica.ranks[i]].fsdp.me, l->fsdp.me);
    }
}

static bool divides_all(struct layout_degrees d)
{
    uint32_t shard = d.expert_shard;
    if (d.world % d.fsdp || d.world % d.ep || N_EXPERTS % d.ep)
        return false;
    return !shard || d.world / d.ep % shard == 0;
}

static void check_degrees(struct layout_degrees d)
{
    struct layout all[WORLD_MAX] = {0};
    struct err err = {0};

    for (uint32_t r = 0; r < d.world; r++) {
        int rc = layout_init(d, N_EXPERTS, r, &all[r], &err);
        if (!divides_all(d)) {
            assert_int_equal(rc, -EINVAL);
            assert_non_null(strstr(err.text, "use one of 1"));
            return;
        }
        assert_int_equal(rc, 0);
        assert_int_equal(all[r].degrees.expert_shard,
                         d.expert_shard ? d.expert_shard : d.world / d.ep);
    }
    for (int g = 0; g < GROUPS; g++)
        check_partition(all, d.world, g);
    check_crossing(all, d.world, FSDP, FSDP_REPLICA);
    check_crossing(all, d.world, EP, EXPERT_SHARD);
    check_crossing(all, d.world, EP, EXPERT_REPLICA);
    check_crossing(all, d.world, EXPERT_SHARD, EXPERT_REPLICA);
    check_experts(all, d.world);
    for (uint32_t r = 0; r < d.world; r++)
        layout_fini(&all[r]);
}

static void every_cut_of_up_to_eight_ranks_holds(void **state)
{
    (void)state;
    struct layout_degrees d;
    for (d.world = 1; d.world <= WORLD_MAX; d.world++)
        for (d.fsdp = 1; d.fsdp <= d.world; d.fsdp++)
            for (d.ep = 1; d.ep <= d.world; d.ep++)
                for (d.expert_shard = 0; d.expert_shard <= d.world; d.expert_shard++)
                    check_degrees(d);
}

static void consecutive_ranks_share_dense_slices_and_experts(void **state)
{
    (void)state;
    struct layout l;
    struct layout_degrees d = { .world = 8, .fsdp = 2, .ep = 2, .expert_shard = 2 };
    static const uint32_t fsdp[] = { 4, 5 }, fsdp_replica[] = { 1, 3, 5, 7 }, ep[] = { 4, 5 },
                          shard[] = { 5, 7 }, replica[] = { 1, 5 };
    assert_int_equal(layout_init(d, N_EXPERTS, 5, &l, NULL), 0);
    assert_memory_equal(l.fsdp.ranks, fsdp, sizeof fsdp);
    assert_memory_equal(l.fsdp_replica.ranks, fsdp_replica, sizeof fsdp_replica);
    assert_memory_equal(l.ep.ranks, ep, sizeof ep);
    assert_memory_equal(l.expert_shard.ranks, shard, sizeof shard);
    assert_memory_equal(l.expert_replica.ranks, replica, sizeof replica);
    layout_fini(&l);
}

static const struct {
    const char *shows;
    struct layout_degrees degrees;
    uint32_t n_experts, rank;
    const char *says;
} bad[] = {
    { "no workers", { 0, 1, 1, 0 }, 16, 0, "1 to 8192 workers" },
    { "too many workers", { 8193, 1, 1, 0 }, 16, 0, "1 to 8192 workers" },
    { "a rank beyond the last", { 4, 1, 1, 0 }, 16, 4, "ranks 0 to 3" },
    { "a degree that does not divide", { 6, 4, 1, 0 }, 16, 0,
      "fsdp_shard_degree 4 does not divide 6 workers; use one of 1, 2, 3, 6" },
    { "a degree of 0", { 6, 0, 1, 0 }, 16, 0, "fsdp_shard_degree 0" },
    { "more expert ranks than experts divide", { 6, 1, 3, 0 }, 16, 0,
      "expert_parallel_degree 3 does not divide 6 workers and the model's experts; use one of "
      "1, 2" },
    { "expert ranks without experts", { 4, 1, 2, 0 }, 0, 0, "use one of 1" },
    { "a shard degree beyond the copies", { 8, 1, 4, 4 }, 16, 0,
      "expert_shard_degree 4 does not divide 2 workers that hold the same experts; use one of "
      "1, 2" },
};

static void a_bad_degree_names_the_good_ones(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct layout l;
        struct err err = {0};
        int rc = layout_init(bad[i].degrees, bad[i].n_experts, bad[i].rank, &l, &err);
        if (rc != -EINVAL || !strstr(err.text, bad[i].says))
            fail_msg("%s: %d \"%s\"", bad[i].shows, rc, err.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_cut_of_up_to_eight_ranks_holds),
        cmocka_unit_test(consecutive_ranks_share_dense_slices_and_experts),
        cmocka_unit_test(a_bad_degree_names_the_good_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
