/* test_overlap.c - what is begun early gives the numbers of what waits: no bit differs, on any
 * layout, full and with adapters, whatever is computed again */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/lora_map.h"
#include "common/mem.h"
#include "common/mix.h"
#include "tests/a_model.h"
#include "worker/optim.h"
#include "worker/stack.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return err_set(err, -EBADMSG, "rank %u line %d: %s", s->rank, __LINE__, #condition);   \
    } while (0)

#define TOKENS 24
#define RANKS  8

/* Dense and sparse layers, one of each last. */
static struct model_spec model(void)
{
    struct model_spec m = a_model();
    m.layers[m.n_layers++] = m.layers[0];
    return m;
}

/* ---- what a rank asks of the collectives ---------------------------------------------------- */

/* Of one rank, on its thread. */
struct watch {
    struct coll_ops ops;
    const struct coll_ops *below;
    uint32_t n_open, n_beside; /* started and not finished; starts beside those */
    uint32_t n_sums;           /* reduce-scatters of the dense units' group */
};
static _Thread_local struct watch watch;

static void note_start(coll_ticket ticket)
{
    watch.n_beside += watch.n_open > 0;
    watch.n_open += ticket != 0;
}

static int gather(struct coll *c, const struct coll_group *g, enum elem_type type, const void *in,
                  size_t n, size_t n_blocks, void *out, coll_ticket *out_ticket, struct err *err)
{
    int rc = watch.below->start_all_gather(c, g, type, in, n, n_blocks, out, out_ticket, err);
    note_start(*out_ticket);
    return rc;
}

static int scatter(struct coll *c, const struct coll_group *g, enum elem_type type, const void *in,
                   size_t n, size_t n_blocks, void *out, coll_ticket *out_ticket, struct err *err)
{
    int rc = watch.below->start_reduce_scatter(c, g, type, in, n, n_blocks, out, out_ticket, err);
    watch.n_sums += g->id == COLL_FSDP;
    note_start(*out_ticket);
    return rc;
}

static int exchange(struct coll *c, const struct coll_group *g, const void *send,
                    const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                    size_t row_bytes, coll_ticket *out_ticket, struct err *err)
{
    int rc = watch.below->start_all_to_all_rows(c, g, send, send_rows, recv, recv_rows, row_bytes,
                                                out_ticket, err);
    note_start(*out_ticket);
    return rc;
}

static int finish(struct coll *c, coll_ticket ticket, struct err *err)
{
    watch.n_open -= ticket != 0;
    return watch.below->finish(c, ticket, err);
}

static void watch_calls(struct coll *c)
{
    watch = (struct watch){.ops = *c->ops, .below = c->ops};
    watch.ops.start_all_gather = gather;
    watch.ops.start_reduce_scatter = scatter;
    watch.ops.start_all_to_all_rows = exchange;
    watch.ops.finish = finish;
    c->ops = &watch.ops;
}

/* ---- a step of several passes --------------------------------------------------------------- */

/* What all ranks got: gradients and updated weights of what each is the first to own, by tensor. */
struct outcome {
    double loss[RANKS], norm[RANKS];
    float *gradients, *weights;
    uint32_t n_beside[RANKS], n_sums[RANKS];
    bool is_staged; /* what is started is over at once */
    size_t buffer_bytes[RANKS];
};

static uint64_t total_count(const struct tensor_map *map)
{
    uint64_t n = 0;
    for (size_t t = 0; t < map->n_entries; t++)
        n += map->entries[t].count;
    return n;
}

static float initial(const struct tensor_entry *e, uint64_t i)
{
    uint64_t z = 5381;
    for (const char *c = e->name; *c; c++)
        z = z * 33 + (uint8_t)*c;
    if (e->is_buffer)
        return (float)((i * 5 + z) % 8) * 3;
    z = (z + i) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 31) * 0xbf58476d1ce4e5b9ull;
    float noise = (float)(mix_unit(z) - 0.5) * 0.4f;
    return e->init == INIT_ONES ? 1 + noise : noise;
}

static int fill(struct stack *s, struct err *err)
{
    const struct tensor_map *map = s->config->map;
    struct shard_part part;
    for (size_t t = 0; t < map->n_entries; t++)
        if (shard_part(s->shard, &map->entries[t], &part))
            for (uint64_t i = 0; i < part.count; i++) {
                float x = initial(&map->entries[t], part.first + i);
                shard_part_write(s->shard, &part, i, 1, &x);
            }
    return shard_refresh_all(s->shard, err);
}

static void collect(const struct stack *s, struct outcome *out, bool gradients)
{
    const struct tensor_map *map = s->config->map;
    struct shard_part part;
    uint64_t at = 0;
    for (size_t t = 0; t < map->n_entries; at += map->entries[t++].count) {
        if (!shard_part(s->shard, &map->entries[t], &part) || !part.is_first)
            continue;
        if (gradients && part.gradients)
            s->dev->ops->to_host(s->dev, out->gradients + at + part.first, part.gradients,
                                 part.count * sizeof(float));
        else if (!gradients)
            shard_part_read(s->shard, &part, 0, part.count, out->weights + at + part.first);
    }
}

static int pass(struct stack *s, uint32_t k, double *io_loss, struct err *err)
{
    int32_t tokens[TOKENS], labels[TOKENS], cu_seqlens[3] = {0, 7 + (int32_t)s->rank, TOKENS};
    for (int32_t i = 0; i < TOKENS; i++) {
        tokens[i] = (i * i * 7 + i * 31 + (int32_t)(13 * s->rank + 5 * k)) % 64;
        labels[i] = (tokens[i] * 3 + 1) % 64;
    }
    struct model_batch batch = {tokens, labels, cu_seqlens, TOKENS, 2};
    struct model_loss loss;
    int rc = model_step(s->model, &batch, k < 2, &loss, err);
    *io_loss += loss.sum;
    return rc;
}

/* Two passes with a backward, whose sums are taken, an update of weights that others may just have
 * read, and a pass that shows it. */
static int step(struct stack *s, void *arg, struct err *err)
{
    struct outcome *out = arg;
    struct optim_config o = {.weight_decay = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
    int rc = fill(s, err);
    watch_calls(s->coll);
    for (uint32_t k = 0; k < 2 && rc == 0; k++)
        rc = pass(s, k, &out->loss[s->rank], err);
    if (rc == 0)
        rc = optim_norm(s->shard, s->config->map, s->coll, s->dev, 100, &out->norm[s->rank], err);
    if (rc < 0)
        return rc;
    collect(s, out, true);
    out->n_sums[s->rank] = watch.n_sums;
    optim_step(s->shard, s->config->map, s->dev, &o, 1, 1e-2, 100, out->norm[s->rank]);
    if ((rc = shard_refresh(s->shard, err)) < 0 || (rc = pass(s, 2, &out->loss[s->rank], err)) < 0)
        return rc;
    collect(s, out, false);
    out->n_beside[s->rank] = watch.n_beside;
    if (s->rank == 0)
        out->is_staged = !s->dev->is_host;
    out->buffer_bytes[s->rank] = shard_buffer_bytes(s->shard);
    CHECK(watch.n_open == 0);
    return 0;
}

static struct outcome run(const struct stack_config *base, bool is_blocking)
{
    struct stack_config config = *base;
    struct outcome out = {0};
    struct err err = {0};
    out.gradients = xcalloc(total_count(base->map), sizeof *out.gradients);
    out.weights = xcalloc(total_count(base->map), sizeof *out.weights);
    config.is_blocking = is_blocking;
    if (stack_run(&config, step, &out, &err) < 0)
        fail_msg("%s", err.text);
    return out;
}

static void outcome_fini(struct outcome *x)
{
    free(x->gradients);
    free(x->weights);
}

/* ---- rows ----------------------------------------------------------------------------------- */

struct row {
    struct layout_degrees degrees;
    bool gathers; /* something is cut, so that there is something to begin early */
};

static const struct row rows[] = {
    {{1, 1, 1, 1}, false}, {{2, 2, 2, 1}, true},  {{2, 1, 1, 2}, true},  {{2, 2, 1, 2}, true},
    {{2, 1, 2, 1}, false}, {{4, 4, 2, 2}, true},  {{4, 2, 4, 1}, true},  {{4, 2, 1, 1}, true},
    {{4, 4, 1, 4}, true},  {{8, 4, 4, 2}, true},  {{8, 8, 2, 2}, true},  {{8, 2, 8, 1}, true},
};

static void compare(const struct row *row, const struct stack_config *config)
{
    uint32_t world = row->degrees.world;
    uint64_t n = total_count(config->map);
    struct outcome early = run(config, false), waits = run(config, true);
    for (uint32_t r = 0; r < world; r++) {
        if (early.loss[r] != waits.loss[r] || early.norm[r] != waits.norm[r])
            fail_msg("world %u fsdp %u ep %u shard %u %s: loss %.17g and %.17g, norm %.17g and "
                     "%.17g", world, row->degrees.fsdp, row->degrees.ep,
                     row->degrees.expert_shard, recompute_words[config->recompute], early.loss[r],
                     waits.loss[r], early.norm[r], waits.norm[r]);
        bool is_early = row->gathers && !early.is_staged;
        bool may_be = is_early || row->degrees.ep > 1; /* tokens that go in several pieces */
        assert_true(waits.n_beside[r] == 0 && (early.n_beside[r] > 0 || !is_early) &&
                    (early.n_beside[r] == 0 || may_be));
        assert_int_equal(early.n_sums[r], waits.n_sums[r]);
        /* Two units in place of one, which with adapters are not alike. */
        assert_true(2 * early.buffer_bytes[r] <= 5 * waits.buffer_bytes[r]);
    }
    assert_true(early.norm[0] > 0 && early.loss[0] > 0);
    assert_memory_equal(early.gradients, waits.gradients, n * sizeof(float));
    assert_memory_equal(early.weights, waits.weights, n * sizeof(float));
    outcome_fini(&early);
    outcome_fini(&waits);
}

static void compare_all(const struct tensor_map *map, const struct model_spec *spec,
                        const struct lora_config *lora, bool deterministic)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct stack_config config = {
            .spec = spec, .map = map, .lora = lora, .degrees = rows[i].degrees,
            .tokens_max = TOKENS, .recompute = (enum recompute)(i % RECOMPUTE_WAYS),
            .deterministic = deterministic,
        };
        compare(&rows[i], &config);
        config.recompute = (enum recompute)((i + 1) % RECOMPUTE_WAYS);
        if (!deterministic && !lora)
            compare(&rows[i], &config);
    }
}

static void training_gives_the_same_bits(void **state)
{
    struct model_spec spec = model();
    struct tensor_map map;
    assert_int_equal(tensor_map_init(&spec, &map, NULL), 0);
    compare_all(&map, &spec, NULL, *state != NULL);
    tensor_map_fini(&map);
}

static const char *const targets[] = {"q_proj", "o_proj", "experts"};

static void adapters_differ_by_no_bit(void **state)
{
    struct model_spec spec = model();
    struct lora_config lora = {.r = 3, .alpha = 6, .targets = targets, .n_targets = 3};
    struct tensor_map map;
    struct err err;
    assert_int_equal(tensor_map_init(&spec, &map, NULL), 0);
    if (lora_map_add(&map, &lora, &err) < 0)
        fail_msg("%s", err.text);
    compare_all(&map, &spec, &lora, *state != NULL);
    tensor_map_fini(&map);
}

/* Of six units two have adapters: only their gradients travel, in two passes. */
static void frozen_units_send_no_gradients(void **state)
{
    (void)state;
    static const char *const kv[] = {"kv_b_proj", "lm_head"};
    struct model_spec spec = model();
    struct lora_config lora = {.r = 3, .alpha = 6, .targets = kv, .n_targets = 2};
    struct tensor_map map;
    struct err err;
    assert_int_equal(tensor_map_init(&spec, &map, NULL), 0);
    if (lora_map_add(&map, &lora, &err) < 0)
        fail_msg("%s", err.text);
    struct stack_config config = {.spec = &spec, .map = &map, .lora = &lora,
                                  .degrees = {2, 2, 2, 1}, .tokens_max = TOKENS};
    struct outcome x = run(&config, false);
    assert_int_equal(x.n_sums[0], 2 * 2);
    outcome_fini(&x);
    tensor_map_fini(&map);
}

int main(void)
{
    static bool deterministic = true;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(training_gives_the_same_bits),
        cmocka_unit_test_prestate(training_gives_the_same_bits, &deterministic),
        cmocka_unit_test(adapters_differ_by_no_bit),
        cmocka_unit_test_prestate(adapters_differ_by_no_bit, &deterministic),
        cmocka_unit_test(frozen_units_send_no_gradients),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
