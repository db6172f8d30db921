/* test_segments.c - layers in segments do what they do whole */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "tests/a_model.h"
#include "tests/one_layer.h"
#include "worker/ckpt.h"
#include "worker/stack.h"

#define DOCS_MAX 8

/* ---- the cuts ---- */

struct cut_case {
    const char *what;
    int32_t n_docs, lengths[DOCS_MAX];
    int64_t n_rows;
    int32_t n_least;
    const char *cut; /* of each segment: rows, (rows before), ends of its documents, > if it goes
                      * on */
};

static const struct cut_case cuts[] = {
    {"nothing to cut", 1, {100}, 128, 0, "0+100 100"},
    {"documents end with segments", 4, {64, 32, 32, 64}, 64, 0, "0+64 64|64+64 32 64|128+64 64"},
    {"a long one", 1, {200}, 64, 0, "0+64 64>|64+64(64) 64>|128+64(128) 64>|192+8(192) 8"},
    {"several and a part of the next", 3, {30, 30, 30}, 64, 0, "0+64 30 60 64>|64+26(4) 26"},
    {"a part, several and a part", 5, {70, 10, 20, 50, 1}, 64, 0,
     "0+64 64>|64+64(64) 6 16 36 64>|128+23(28) 22 23"},
    {"more than needed", 1, {70}, 64, 4, "0+64 64>|64+6(64) 6|70+0|70+0"},
    {"no documents", 0, {0}, 64, 1, "0+0"},
};

static int32_t lay_out(int32_t *cu_seqlens, const int32_t *lengths, int32_t n_docs)
{
    cu_seqlens[0] = 0;
    for (int32_t i = 0; i < n_docs; i++)
        cu_seqlens[i + 1] = cu_seqlens[i] + lengths[i];
    return cu_seqlens[n_docs];
}

static size_t describe(char *text, size_t size, const struct segment *g)
{
    int n = snprintf(text, size, "%lld+%lld", (long long)g->begin, (long long)g->n);
    if (g->before)
        n += snprintf(text + n, size - (size_t)n, "(%lld)", (long long)g->before);
    for (int32_t i = 1; i <= g->n_docs; i++)
        n += snprintf(text + n, size - (size_t)n, " %d", g->cu_seqlens[i]);
    n += snprintf(text + n, size - (size_t)n, "%s", g->goes_on ? ">" : "");
    return (size_t)n;
}

static void batches_are_cut_where_rows_are_enough(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const struct cut_case *c = &cuts[i];
        int32_t cu_seqlens[DOCS_MAX + 1];
        char text[256] = "";
        size_t n = 0;
        struct segments s;
        lay_out(cu_seqlens, c->lengths, c->n_docs);
        segments_init(&s, cu_seqlens, c->n_docs, c->n_rows, c->n_least);
        for (int32_t j = 0; j < s.n; j++) {
            const struct segment *g = &s.all[j];
            if (j)
                text[n++] = '|';
            n += describe(text + n, sizeof text - n, g);
            assert_int_equal(g->index, j);
            assert_int_equal(g->cu_keys[0], 0);
            assert_int_equal(g->cu_keys[g->n_docs], g->n + g->before);
            assert_int_equal(g->cu_positions[0], -g->before);
            assert_int_equal(g->cu_positions[g->n_docs], g->n_docs ? g->n : 0);
        }
        if (strcmp(text, c->cut) != 0)
            fail_msg("%s: cut %s, expected %s", c->what, text, c->cut);
        segments_fini(&s);
    }
}

/* ---- layers ---- */

static struct model_spec small_model(enum attention_kind kind)
{
    struct model_spec m = {
        .family = FAMILY_KIMI_K3, .n_layers = 1, .layers = {{kind, MLP_DENSE}}, .hidden = 24,
        .vocab = 32, .norm_eps = 1e-5f, .latent_norm_eps = 1e-6f, .init_std = 0.3f, .kda_heads = 2,
        .kda_head_dim = 16, .conv_kernel = 4, .kda_gate_bounded = true,
        .kda_gate_lower_bound = -5, .kda_gate_full_rank = true, .heads = 3, .q_lora_rank = 16,
        .kv_lora_rank = 12, .qk_nope_dim = 8, .qk_rope_dim = 4, .v_dim = 8,
        .mla_output_gate = true, .index_heads = 2, .index_head_dim = 8, .index_top_k = 20,
        .index_norm_eps = 1e-5f, .dense_inter = 16, .latent = 24, .n_expert_groups = 1,
        .top_groups = 1, .attn_res_block = 1,
    };
    return m;
}

struct outcome {
    float *y, *dx, *gradients;
    int64_t n, n_weights;
    double index_loss;
};

static void outcome_free(struct outcome *o)
{
    free(o->y);
    free(o->dx);
    free(o->gradients);
}

static float *to_host(struct device *dev, const void *from, int64_t n)
{
    float *host = xcalloc((size_t)n, sizeof *host);
    dev->ops->to_host(dev, host, from, (size_t)n * sizeof *host);
    return host;
}

static struct outcome run(struct one_layer *l, const int32_t *cu_seqlens, int32_t n_docs,
                          int64_t rows_max)
{
    struct device *dev = l->dev;
    int64_t n = (int64_t)cu_seqlens[n_docs] * l->spec.hidden;
    size_t n_bytes = (size_t)n * elem_size(dev);
    elem *x = dev->ops->alloc(dev, n_bytes), *y = dev->ops->alloc(dev, n_bytes);
    elem *dy = dev->ops->alloc(dev, n_bytes), *dx = dev->ops->alloc(dev, n_bytes);
    struct one_layer_saved s = {0};
    struct err err;
    double losses[2];

    one_layer_fill(dev, x, n, 0, 1.7f, 100);
    one_layer_fill(dev, dy, n, 0, 1, 101);
    one_layer_begin(l, cu_seqlens, n_docs, rows_max, INDEX_SPARSE);
    assert_int_equal(one_layer_reserve(l, &err), 0);
    one_layer_forward(l, x, y, &s);
    one_layer_backward(l, x, dy, dx, &s);
    assert_int_equal(l->act.n_blocks, 1); /* what was counted was enough */
    assert_false(l->act.failed);
    dev->ops->to_host(dev, losses, l->losses, sizeof losses);
    struct outcome out = {
        to_host(dev, y, n), to_host(dev, dx, n), to_host(dev, l->gradients, l->n_weights), n,
        l->n_weights, losses[1],
    };
    elem *all[] = {x, y, dy, dx};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        dev->ops->free(dev, all[i]);
    return out;
}

static double distance(const float *a, const float *b, int64_t n)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(difference / (norm + 1e-30));
}

struct batch_case {
    const char *what;
    int32_t n_docs, lengths[DOCS_MAX];
    bool is_exact; /* blocks of tokens inside of ops lie as they do without */
};

static const struct batch_case batches[] = {
    {"one document", 1, {200}, true},
    {"a last segment shorter than the convolution", 1, {129}, true},
    {"documents end with segments", 3, {128, 64, 10}, true},
    {"a document begins just before a cut", 4, {10, 53, 100, 3}, false},
    {"many short ones", 8, {30, 40, 1, 64, 2, 3, 1, 70}, false},
};

static void compare(struct one_layer *l, const struct batch_case *c)
{
    int32_t cu_seqlens[DOCS_MAX + 1];
    lay_out(cu_seqlens, c->lengths, c->n_docs);
    struct outcome whole = run(l, cu_seqlens, c->n_docs, 0);
    struct outcome cut = run(l, cu_seqlens, c->n_docs, 64);
    double y = distance(cut.y, whole.y, whole.n), dx = distance(cut.dx, whole.dx, whole.n);
    double dw = distance(cut.gradients, whole.gradients, whole.n_weights);
    if (!(y <= (c->is_exact ? 0 : 1e-6)) || !(dx < 1e-6) || !(dw < 1e-6) ||
        fabs(cut.index_loss - whole.index_loss) > 1e-6 * fabs(whole.index_loss))
        fail_msg("%s: y %g, dx %g, weights %g, index loss %.9g instead of %.9g", c->what, y, dx,
                 dw, cut.index_loss, whole.index_loss);
    outcome_free(&whole);
    outcome_free(&cut);
}

static void all_batches(const struct model_spec *m)
{
    struct device *dev;
    struct one_layer l;
    struct err err;

    assert_int_equal(device_cpu_open(1, true, &dev, &err), 0);
    if (one_layer_open(&l, dev, m, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(one_layer_turn(&l, 256, &err), 0);
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++)
        compare(&l, &batches[i]);
    one_layer_close(&l);
    dev->ops->close(dev);
}

static void kda_in_segments_is_kda(void **state)
{
    (void)state;
    struct model_spec m = small_model(ATTENTION_KDA);
    all_batches(&m);
    m.kda_gate_full_rank = false;
    m.family = FAMILY_KIMI_LINEAR;
    m.kda_gate_bounded = false;
    all_batches(&m);
}

static void chosen_keys_in_segments_are_the_same(void **state)
{
    (void)state;
    struct model_spec m = small_model(ATTENTION_MLA);
    all_batches(&m);
    m.family = FAMILY_DEEPSEEK_V3;
    m.mla_output_gate = false;
    m.mla_rotary = m.rotary_interleaved = true;
    m.rotary = (struct rotary_config){.dim = m.qk_rope_dim, .theta = 100};
    all_batches(&m);
}

/* ---- whole models --------------------------------------------------------------------------- */

/* Of all ranks: each writes what it owns. */
struct learnt {
    double loss[2], index[2];
    float *gradients;
    size_t activations;
};

static void collect(struct stack *s, float *out)
{
    const struct tensor_map *map = s->config->map;
    struct shard_part part;
    for (size_t t = 0; t < map->n_entries; out += map->entries[t++].count)
        if (tensor_is_trained(&map->entries[t]) && shard_part(s->shard, &map->entries[t], &part) &&
            part.is_first)
            memcpy(out + part.first, part.gradients, part.count * sizeof *out);
}

static int learn_once(struct stack *s, void *arg, struct err *err)
{
    static const int32_t of_first[] = {0, 150, 160, 200}, of_second[] = {0, 3, 70};
    struct learnt *x = arg;
    bool is_first = s->rank == 0;
    int64_t n = is_first ? 200 : 70;
    int32_t tokens[200], labels[200];
    struct model_loss loss;
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = (i * i * 7919 + i * 31 + (int32_t)s->rank * 97) % 64;
        labels[i] = (tokens[i] * 5 + 1) % 64;
    }
    struct model_batch batch = {tokens, labels, is_first ? of_first : of_second, n,
                                is_first ? 3 : 2};
    ckpt_init_weights(s->shard, s->config->map, s->config->spec, 1);
    int rc = shard_refresh_all(s->shard, err);
    if (rc < 0 || (rc = model_step(s->model, &batch, true, &loss, err)) < 0 ||
        (rc = shard_sum_replicas(s->shard, err)) < 0)
        return rc;
    collect(s, x->gradients);
    x->loss[s->rank] = loss.sum;
    x->index[s->rank] = loss.index;
    if (is_first)
        x->activations = model_activation_bytes(s->model);
    return 0;
}

static uint64_t total_count(const struct tensor_map *map)
{
    uint64_t n = 0;
    for (size_t t = 0; t < map->n_entries; t++)
        n += map->entries[t].count;
    return n;
}

static struct learnt learn(const struct model_spec *spec, const struct tensor_map *map,
                           struct layout_degrees degrees, int64_t segment_rows)
{
    struct learnt x = {.gradients = xcalloc(total_count(map), sizeof(float))};
    struct stack_config config = {
        .spec = spec, .map = map, .degrees = degrees, .tokens_max = 200,
        .recompute = RECOMPUTE_FULL, .segment_rows = segment_rows, .deterministic = true,
        .index_stage = INDEX_SPARSE, .index_joint = true,
    };
    struct err err = {0};
    if (stack_run(&config, learn_once, &x, &err) < 0)
        fail_msg("world %u, segments of %lld: %s", degrees.world, (long long)segment_rows,
                 err.text);
    return x;
}

static void models_learn_the_same_in_segments(void **state)
{
    (void)state;
    static const struct layout_degrees layouts[] = {{1, 1, 1, 1}, {2, 2, 2, 1}, {2, 1, 1, 2}};
    struct model_spec m = a_model();
    m.index_heads = 2;
    m.index_head_dim = 8;
    m.index_top_k = 20;
    m.index_norm_eps = 1e-6f;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct tensor_map map;
        assert_int_equal(tensor_map_init(&m, &map, NULL), 0);
        tensor_map_train_indexers(&map, false);
        struct learnt whole = learn(&m, &map, layouts[i], 0);
        struct learnt cut = learn(&m, &map, layouts[i], 64);
        for (uint32_t r = 0; r < layouts[i].world; r++) {
            assert_true(fabs(cut.loss[r] - whole.loss[r]) < 1e-6 * whole.loss[r]);
            assert_true(whole.index[r] > 0);
            assert_true(fabs(cut.index[r] - whole.index[r]) < 1e-5 * whole.index[r]);
        }
        double apart = distance(cut.gradients, whole.gradients, (int64_t)total_count(&map));
        if (!(apart < 2e-6))
            fail_msg("layout %zu: gradients are %g apart", i, apart);
        if (i == 0)
            assert_true(cut.activations < whole.activations * 3 / 4);
        free(whole.gradients);
        free(cut.gradients);
        tensor_map_fini(&map);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(batches_are_cut_where_rows_are_enough),
        cmocka_unit_test(kda_in_segments_is_kda),
        cmocka_unit_test(chosen_keys_in_segments_are_the_same),
        cmocka_unit_test(models_learn_the_same_in_segments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
