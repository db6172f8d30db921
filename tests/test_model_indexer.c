/* test_model_indexer.c - indexers in a whole model: what they choose, and what they learn */
#include "tests/model_runs.h"

/* The distance of two gradients of one tensor, relative to the first. */
static double apart(const float *a, const float *b, uint64_t n)
{
    double square = 0, norm = 0;
    for (uint64_t i = 0; i < n; i++) {
        square += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)a[i] * a[i];
    }
    return sqrt(square) / fmax(sqrt(norm), 1e-6);
}

/* Absorbed attention over all keys is expanded attention. */
static void an_indexer_that_keeps_all_keys_changes_nothing(void **state)
{
    (void)state;
    struct model_spec models[] = { kimi(), turned() };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        struct model_spec with = indexed(models[i], 64), few = indexed(models[i], 3);
        struct snapshot *dense = snapshot_of(&models[i], RECOMPUTE_OFF, one_step);
        struct snapshot *all = snapshot_of(&with, RECOMPUTE_OFF, one_step);
        struct snapshot *three = snapshot_of(&few, RECOMPUTE_OFF, one_step);
        struct tensor_map map;
        const float *a = dense->gradients, *b = all->gradients;
        double worst = 0;
        assert_int_equal(tensor_map_init(&with, &map, NULL), 0);
        for (size_t t = 0; t < map.n_entries; b += map.entries[t++].count) {
            const struct tensor_entry *e = &map.entries[t];
            if (is_of_indexer(e)) {
                for (uint64_t k = 0; k < e->count; k++)
                    assert_true(b[k] == 0);
                continue;
            }
            worst = fmax(worst, apart(a, b, e->count));
            a += e->count;
        }
        print_message("losses %.3e apart, gradients %.1e\n",
                      fabs(all->loss - dense->loss) / dense->loss, worst);
        assert_true(fabs(all->loss - dense->loss) < 1e-6 * dense->loss);
        assert_true(worst < 5e-5);
        assert_true(fabs(three->loss - dense->loss) > 1e-4 * dense->loss);
        tensor_map_fini(&map);
        snapshot_free(dense);
        snapshot_free(all);
        snapshot_free(three);
    }
}

/* Gradients by entry, NULL where nothing trains; tensors lie in the same order in every map. */
struct learned {
    struct model_loss loss;
    float *gradients[500];
};

static int learn_once(struct stack *s, void *arg, struct err *err)
{
    const struct tensor_map *map = s->config->map;
    struct documents *d = documents((const int32_t[]){ 9, 30, 22 }, 3, 7);
    struct learned *out = arg;
    struct shard_part part;

    CHECK(map->n_entries <= 500);
    fill(s);
    int rc = model_step(s->model, &d->batch, true, &out->loss, err);
    for (size_t t = 0; rc == 0 && t < map->n_entries; t++)
        if (tensor_is_trained(&map->entries[t]) && shard_part(s->shard, &map->entries[t], &part))
            out->gradients[t] = xmemdup(part.gradients, part.count * sizeof(float));
    free(d);
    return rc;
}

static struct learned *learned_of(const struct model_spec *spec, enum recompute recompute,
                                  enum index_stage stage, bool is_beside)
{
    struct learned *x = xcalloc(1, sizeof *x);
    beside = is_beside;
    run_stage(spec, alone, recompute, stage, learn_once, x);
    beside = false;
    return x;
}

static void indexers_learn_beside_the_model_what_they_learn_alone(void **state)
{
    (void)state;
    struct model_spec models[] = { indexed(kimi(), 8), indexed(turned(), 8) };
    for (size_t i = 0; i < 4; i++) {
        const struct model_spec *spec = &models[i / 2];
        enum recompute recompute = i % 2 ? RECOMPUTE_FULL : RECOMPUTE_OFF;
        struct learned *model = learned_of(spec, recompute, INDEX_FROZEN, false);
        struct learned *index = learned_of(spec, recompute, INDEX_SPARSE, false);
        struct learned *both = learned_of(spec, recompute, INDEX_SPARSE, true);
        struct tensor_map map;
        size_t n_index = 0;
        assert_int_equal(tensor_map_init(spec, &map, NULL), 0);
        assert_true(both->loss.sum == model->loss.sum && both->loss.index == index->loss.sum);
        assert_true(both->loss.index > 0 && model->loss.index == 0);
        for (size_t t = 0; t < map.n_entries; t++) {
            const float *expected = model->gradients[t] ? model->gradients[t]
                                                        : index->gradients[t];
            n_index += !model->gradients[t] && index->gradients[t];
            assert_int_equal(!both->gradients[t], !expected);
            if (expected)
                assert_memory_equal(both->gradients[t], expected,
                                    map.entries[t].count * sizeof *expected);
            free(model->gradients[t]);
            free(index->gradients[t]);
            free(both->gradients[t]);
        }
        assert_int_equal(n_index, (i / 2 ? 5 : 2) * 5); /* layers, tensors of each */
        tensor_map_fini(&map);
        free(model);
        free(index);
        free(both);
    }
}

/* What they learn is their own loss, in both stages, and nothing else gets a gradient. */
static void indexers_learn_alone(void **state)
{
    (void)state;
    struct model_spec models[] = { indexed(kimi(), 64), indexed(turned(), 64) };
    for (size_t i = 0; i < 2; i++)
        for (enum index_stage stage = INDEX_DENSE; stage <= INDEX_SPARSE; stage++) {
            int n_checked = 0;
            run_stage(&models[i], alone, RECOMPUTE_FULL, stage, check_gradients, &n_checked);
            assert_int_equal(n_checked, (i ? 5 : 2) * 5); /* layers, tensors of each */
        }
}

struct learnt { double loss; float *gradients; };

static int learn(struct stack *s, void *arg, struct err *err)
{
    struct learnt *x = arg;
    struct documents *d = documents((const int32_t[]){ 30, 2, 17, 9 }, 4, 11);
    struct documents *mine = documents((const int32_t[]){ 30, 2, 17, 9 }, 4, 11);
    double sum[1];
    struct model_loss loss;
    fill(s);
    if (s->config->degrees.world == 2) { /* two documents each */
        int32_t cut = s->rank ? d->cu_seqlens[2] : 0;
        mine->batch.tokens += cut;
        mine->batch.labels += cut;
        for (int k = 0; k < 3; k++)
            mine->cu_seqlens[k] = d->cu_seqlens[k + (s->rank ? 2 : 0)] - cut;
        mine->batch.n_docs = 2;
        mine->batch.n_tokens = mine->cu_seqlens[2];
    }
    int rc = model_step(s->model, &mine->batch, true, &loss, err);
    sum[0] = loss.sum;
    if (rc == 0)
        rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_SUM, sum, 1, err);
    if (rc == 0)
        collect(s, x->gradients);
    if (s->rank == 0)
        x->loss = sum[0];
    free(d);
    free(mine);
    return rc;
}

static void what_indexers_learn_does_not_know_the_layout(void **state)
{
    (void)state;
    struct model_spec m = indexed(turned(), 5);
    for (enum index_stage stage = INDEX_DENSE; stage <= INDEX_SPARSE; stage++) {
        struct tensor_map map;
        assert_int_equal(tensor_map_init(&m, &map, NULL), 0);
        uint64_t n = total_count(&map);
        struct learnt one = { 0, xcalloc(n, sizeof(float)) };
        struct learnt two = { 0, xcalloc(n, sizeof(float)) };
        run_stage(&m, alone, RECOMPUTE_FULL, stage, learn, &one);
        run_stage(&m, (struct layout_degrees){ 2, 2, 2, 0 }, RECOMPUTE_FULL, stage, learn, &two);
        assert_true(one.loss > 0 && fabs(one.loss - two.loss) < 1e-5 * one.loss);
        assert_true(apart(one.gradients, two.gradients, n) < 1e-5);
        const float *g = one.gradients;
        for (size_t t = 0; t < map.n_entries; g += map.entries[t++].count) {
            double sum = 0;
            for (uint64_t k = 0; k < map.entries[t].count; k++)
                sum += fabs(g[k]);
            assert_true((sum > 0) == is_of_indexer(&map.entries[t]));
        }
        free(one.gradients);
        free(two.gradients);
        tensor_map_fini(&map);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_indexer_that_keeps_all_keys_changes_nothing),
        cmocka_unit_test(indexers_learn_alone),
        cmocka_unit_test(indexers_learn_beside_the_model_what_they_learn_alone),
        cmocka_unit_test(what_indexers_learn_does_not_know_the_layout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
