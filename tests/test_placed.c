/* test_placed.c - placements through messages and back */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "proto/check.h"
#include "proto/placed.h"
#include "proto/message.h"

/* Two devices with two slots each, three experts, of which 0 has a copy on both. */
static struct placement sample(void)
{
    struct placement p;
    assert_int_equal(placement_init(&p, 3, 2, 2, NULL), 0);
    const int32_t experts[] = {0, 1, 0, 2};
    const double shares[] = {0.25, 1, 0.75, 1};
    memcpy(p.expert, experts, sizeof experts);
    memcpy(p.share, shares, sizeof shares);
    placement_keep_homes(&p, NULL);
    return p;
}

static Ballast__Placement *message(const struct placement *p, const uint32_t *layers, size_t n,
                                   struct arena *arena)
{
    Ballast__Placement *m = arena_alloc(arena, sizeof *m);
    ballast__placement__init(m);
    m->epoch = (uint32_t)n;
    m->n_devices = p->n_devices;
    m->n_slots = p->n_slots;
    m->layers = arena_alloc(arena, n * sizeof *m->layers);
    for (size_t i = 0; i < n; i++)
        m->layers[m->n_layers++] = placed_pack(p, layers[i], arena);
    return m;
}

static void it_comes_back_as_it_was(void **state)
{
    (void)state;
    struct arena arena = {0};
    struct placement p = sample(), q;
    Ballast__Placement *m = message(&p, (uint32_t[]){4, 7}, 2, &arena);
    Ballast__Placement *copy = message_copy(m, NULL);
    struct err err;
    assert_int_equal(check_placement(copy, &err), 0);
    assert_int_equal(placed_find(copy, 7), 1);
    assert_int_equal(placed_find(copy, 5), -1);
    placed_layer(copy, 1, &q);
    assert_memory_equal(q.expert, p.expert, 4 * sizeof *p.expert);
    assert_memory_equal(q.share, p.share, 4 * sizeof *p.share);
    assert_memory_equal(q.home, p.home, 3 * sizeof *p.home);
    ballast__placement__free_unpacked(copy, NULL);
    placement_fini(&q);
    placement_fini(&p);
    arena_fini(&arena);
}

static void changes_replace_their_layers_only(void **state)
{
    (void)state;
    struct arena arena = {0};
    struct placement p = sample();
    Ballast__Placement *base = message(&p, (uint32_t[]){1, 2, 3}, 3, &arena);
    Ballast__Placement *changes = message(&p, (uint32_t[]){0, 2}, 2, &arena);
    Ballast__Placement *m = placed_merge(base, changes, &arena);
    assert_int_equal(m->epoch, 2);
    assert_int_equal(m->n_layers, 4);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(m->layers[i]->layer, i);
    assert_ptr_equal(m->layers[2], changes->layers[1]);
    assert_ptr_equal(m->layers[3], base->layers[2]);
    assert_int_equal(placed_merge(NULL, changes, &arena)->n_layers, 2);
    placement_fini(&p);
    arena_fini(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_comes_back_as_it_was),
        cmocka_unit_test(changes_replace_their_layers_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
