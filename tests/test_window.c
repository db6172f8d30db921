/* test_window.c - what ranks counted in a window comes together, and only if it is whole */
#include "tests/ranks.h"

#include <math.h>

#include "worker/window.h"

#define STEPS_OF_WINDOW 3u

/* Tokens that a rank sends to an expert of a layer in a step. */
static int64_t tokens_of(uint32_t rank, uint32_t layer, uint32_t expert, uint64_t step)
{
    return layer == 0 ? 0 : (int64_t)(rank * 1000 + layer * 100 + expert * 7 + step);
}

/* One step of a rank that served 1000 rows; rank 3 takes slow times as long for them. */
static void add_step(struct test_rank *r, struct window *w, uint64_t step, double slow)
{
    int64_t tokens[3 * 8], rerouted[3] = {0, r->rank, 1}, dropped[3] = {0, (int64_t)step, 0};
    struct model_counters c = {.tokens = tokens, .served = tokens, .n_rows = 1000,
                               .rerouted = rerouted, .dropped = dropped,
                               .expert_s = r->rank == 3 ? 0.1 * slow : 0.1};
    for (uint32_t l = 0; l < 3; l++)
        for (uint32_t e = 0; e < 8; e++)
            tokens[l * 8 + e] = tokens_of(r->rank, l, e, step);
    window_add(w, step, &c, 0.5 + 0.1 * r->rank, 1.5);
}

/* NULL on other ranks than 0, and where no window is over. */
static Ballast__LoadReport *report(struct test_rank *r, struct window *w, uint64_t step)
{
    struct shard_expert_bytes bytes = {4000, 8000};
    Ballast__LoadReport *load = NULL;
    if (window_is_over(w, step))
        RANK_CHECK(r, window_report(w, step, &r->slots, r->coll, bytes, &load, &r->err) == 0);
    RANK_CHECK(r, r->rank == 0 || !load);
    return load;
}

static void check_tokens(struct test_rank *r, const Ballast__LoadReport *load)
{
    for (size_t i = 0; i < load->n_layers; i++)
        for (uint32_t node = 0; node < 2; node++)
            for (uint32_t e = 0; e < 8; e++) {
                int64_t expected = 0;
                for (uint64_t s = load->first_step; s <= load->last_step; s++)
                    for (uint32_t rank = 2 * node; rank < 2 * node + 2; rank++)
                        expected += tokens_of(rank, load->layers[i]->layer, e, s);
                RANK_CHECK(r, load->layers[i]->tokens[node * 8 + e] == expected);
            }
}

static void check_overflow(struct test_rank *r, const Ballast__LoadReport *load)
{
    uint64_t steps = load->first_step + (load->first_step + 1) + load->last_step;
    RANK_CHECK(r, load->layers[0]->layer == 1 && load->layers[1]->layer == 2);
    RANK_CHECK(r, load->layers[0]->rerouted == 3 * (0 + 1 + 2 + 3) &&
                      load->layers[0]->dropped == 4 * steps);
    RANK_CHECK(r, load->layers[1]->rerouted == 3 * 4 && load->layers[1]->dropped == 0);
}

static void windows(struct test_rank *r)
{
    static const char *const nodes[] = {"b", "b", "a", "a"};
    Ballast__GangMember members[4], *gang[4];
    Ballast__Start start = BALLAST__START__INIT;
    struct window w;
    struct transfer_result moved = {.sent_bytes = 1000 * (r->rank + 1), .link_seconds = 0.5};
    for (uint32_t i = 0; i < 4; i++) {
        members[i] = (Ballast__GangMember)BALLAST__GANG_MEMBER__INIT;
        members[i].node = (char *)nodes[i];
        gang[i] = &members[i];
    }
    start.gang = gang;
    start.n_gang = 4;
    start.rank = r->rank;
    window_init(&w, &r->slots, STEPS_OF_WINDOW, &start);
    for (uint64_t step = 2; step <= 18 && r->rc == 0; step++) { /* resumed amid the first window */
        add_step(r, &w, step, step > 9 ? 2 : 1);
        Ballast__LoadReport *load = report(r, &w, step);
        bool expected = step % STEPS_OF_WINDOW == 0 && step != 3 && step != 9;
        RANK_CHECK(r, !load == !(expected && r->rank == 0));
        const double *speed = window_speeds(&w); /* shares follow it on every rank */
        RANK_CHECK(r, !speed == (step < 15));
        RANK_CHECK(r, !speed || fabs(speed[3] - 0.5 / 0.875) < 1e-9);
        if (step == 8) { /* amid the third: it is in no report */
            r->slots.epoch = 1;
            window_moved(&w, &moved);
            window_break(&w);
        }
        if (!load)
            continue;
        RANK_CHECK(r, load->first_step == step - 2 && load->last_step == step);
        RANK_CHECK(r, load->n_nodes == 2 && load->n_experts == 8 && load->n_layers == 2);
        RANK_CHECK(r, load->placement_epoch == (step > 8));
        RANK_CHECK(r, fabs(load->step_s - 0.65) < 1e-9 && load->device_imbalance == 1.5);
        RANK_CHECK(r, fabs(load->row_s / (step > 9 ? 0.5 / 4000 : 0.1 / 1000) - 1) < 1e-9);
        RANK_CHECK(r, load->expert_bytes == 4000 && load->state_bytes == 8000);
        RANK_CHECK(r, load->link_bytes_per_s == (step > 8 ? 10000 / 2.0 : 0));
        check_tokens(r, load);
        check_overflow(r, load);
        /* A slow device is told of once it has been slow for two windows. */
        RANK_CHECK(r, load->n_speed == (step > 12 ? 4 : 0));
        for (size_t g = 0; g < load->n_speed; g++)
            RANK_CHECK(r, fabs(load->speed[g] - (g == 3 ? 0.5 : 1) / 0.875) < 1e-9);
        ballast__load_report__free_unpacked(load, NULL);
    }
    window_fini(&w);
}

static void whole_windows_come_together(void **state)
{
    (void)state;
    struct model_spec spec = test_spec();
    struct tensor_map map;
    struct err err = {0};
    assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
    test_ranks_run((struct layout_degrees){4, 1, 4, 0}, &spec, &map, windows, NULL);
    tensor_map_fini(&map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_windows_come_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
