/* test_model.c - the whole model: gradients against finite differences, recomputation, packing,
 * layouts, counters
 *
 * Bodies run on the ranks' threads, where cmocka cannot fail: they return an error with a line. */
#include <assert.h>
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/mem.h"
#include "worker/optim.h"
#include "worker/stack.h"
#include "tests/a_model.h"
#include "tests/noise.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return err_set(err, -EBADMSG, "line %d: %s", __LINE__, #condition);                    \
    } while (0)

/* ---- models --------------------------------------------------------------------------------- */

/* KDA and latent attention, dense and sparse, a block boundary in the middle. */
static struct model_spec kimi(void)
{
    struct model_spec m = a_model();
    m.n_layers = 5;
    m.layers[3] = (struct layer_spec){ ATTENTION_KDA, MLP_MOE };
    m.layers[4] = (struct layer_spec){ ATTENTION_MLA, MLP_MOE };
    return m;
}

/* Every switch the other way. */
static struct model_spec plain(void)
{
    struct model_spec m = kimi();
    m.residual = RESIDUAL_PLAIN;
    m.attn_res_block = 0;
    m.kda_gate_bounded = m.kda_gate_full_rank = m.mla_output_gate = false;
    m.q_lora_rank = 0;
    m.activation = ACTIVATION_SWIGLU;
    m.n_shared_experts = 0;
    m.latent = m.hidden;
    m.latent_moe = m.latent_norm = m.renormalize = false;
    m.routed_scale = 2.5f;
    return m;
}

/* DeepSeek's: positions turn, stretched by YaRN, and experts are chosen in groups. */
static struct model_spec turned(void)
{
    struct model_spec m = plain();
    m.family = FAMILY_DEEPSEEK_V3;
    for (uint32_t l = 0; l < m.n_layers; l++)
        m.layers[l].attention = ATTENTION_MLA;
    m.q_lora_rank = 16;
    m.renormalize = true;
    m.n_expert_groups = 4;
    m.top_groups = 3; /* with initial's biases no choice of a group that counts is near */
    m.mla_rotary = m.rotary_interleaved = true;
    m.rotary = (struct rotary_config){
        .dim = m.qk_rope_dim, .theta = 100, .yarn = true, .factor = 4, .original_positions = 16,
        .beta_fast = 4, .beta_slow = 1, .truncate = true, .mscale = 1, .mscale_all_dim = 0.7,
    };
    return m;
}

/* An indexer that keeps top_k keys. */
static struct model_spec indexed(struct model_spec m, uint32_t top_k)
{
    m.index_heads = 3;
    m.index_head_dim = 8;
    m.index_top_k = top_k;
    m.index_norm_eps = 1e-6f;
    return m;
}

/* A weight as a function of tensor and element alone, the same on every layout. Selection biases
 * are far apart, so that a small step never changes a choice. */
static float initial(const struct tensor_entry *e, uint64_t tensor, uint64_t i)
{
    if (e->is_buffer)
        return (float)((i * 5 + tensor) % 8) * 3;
    switch (e->init) {
    case INIT_ONES:    return (float)(1 + 0.1 * noise(tensor, i));
    case INIT_NORMAL:
    case INIT_LORA_A:
    case INIT_HEAD:    return (float)(noise(tensor, i) / sqrt((double)e->dims[e->n_dims - 1]));
    case INIT_CONV:    return (float)(0.5 * noise(tensor, i));
    case INIT_ZEROS:
    case INIT_A_LOG:
    case INIT_DT_BIAS: return (float)(0.3 * noise(tensor, i));
    }
    return 0;
}

static bool is_of_indexer(const struct tensor_entry *e)
{
    return e->role >= ROLE_INDEX_Q && e->role <= ROLE_INDEX_WEIGHTS;
}

static void fill(const struct stack *s)
{
    const struct tensor_map *map = s->config->map;
    struct shard_part part;
    uint64_t number = 0; /* an indexer does not count: with or without, the others are the same */
    for (size_t t = 0; t < map->n_entries; t++) {
        const struct tensor_entry *e = &map->entries[t];
        uint64_t own = is_of_indexer(e) ? 7000 + t : number++;
        if (shard_part(s->shard, e, &part))
            for (uint64_t i = 0; i < part.count; i++)
                part.weights[i] = initial(e, own, part.first + i);
    }
    assert(shard_refresh(s->shard, NULL) == 0);
}

static bool beside; /* indexers that train do so beside everything else */

static void run_with(const struct model_spec *spec, struct layout_degrees degrees,
                     enum recompute recompute, enum index_stage stage, struct moe_rules rules,
                     stack_fn body, void *arg)
{
    struct tensor_map map;
    struct err err = {0};
    assert_int_equal(tensor_map_init(spec, &map, NULL), 0);
    if (stage != INDEX_FROZEN)
        tensor_map_train_indexers(&map, !beside);
    struct stack_config config = {
        .index_stage = stage, .index_joint = beside && stage != INDEX_FROZEN, .rules = rules,
        .spec = spec, .map = &map, .degrees = degrees, .tokens_max = 64, .recompute = recompute,
        .deterministic = true, .count_margins = spec->n_expert_groups <= 1,
    };
    if (stack_run(&config, body, arg, &err) < 0)
        fail_msg("world %u fsdp %u ep %u shard %u: %s", degrees.world, degrees.fsdp, degrees.ep,
                 degrees.expert_shard, err.text);
    tensor_map_fini(&map);
}

static void run_stage(const struct model_spec *spec, struct layout_degrees degrees,
                      enum recompute recompute, enum index_stage stage, stack_fn body, void *arg)
{
    run_with(spec, degrees, recompute, stage, (struct moe_rules){0}, body, arg);
}

static void run_on(const struct model_spec *spec, struct layout_degrees degrees,
                   enum recompute recompute, stack_fn body, void *arg)
{
    run_stage(spec, degrees, recompute, INDEX_FROZEN, body, arg);
}

static const struct layout_degrees alone = { 1, 1, 1, 0 };

/* ---- batches -------------------------------------------------------------------------------- */

#define TOKENS_MAX 256
#define DOCS_MAX 16

struct documents {
    int32_t tokens[TOKENS_MAX], labels[TOKENS_MAX], cu_seqlens[DOCS_MAX + 1];
    struct model_batch batch;
};

static void add_document(struct documents *d, int32_t length, uint64_t seed)
{
    int32_t at = d->cu_seqlens[d->batch.n_docs];
    for (int32_t i = 0; i <= length; i++) {
        int32_t token = (int32_t)(fabs(noise(seed, (uint64_t)i)) * 1000) % 64;
        if (i < length)
            d->tokens[at + i] = token;
        if (i > 0)
            d->labels[at + i - 1] = i == length ? -100 : token;
    }
    d->cu_seqlens[++d->batch.n_docs] = at + length;
    d->batch = (struct model_batch){ d->tokens, d->labels, d->cu_seqlens, at + length,
                                     d->batch.n_docs };
}

static struct documents *documents(const int32_t *lengths, int32_t n, uint64_t seed)
{
    struct documents *d = xcalloc(1, sizeof *d);
    d->batch = (struct model_batch){ d->tokens, d->labels, d->cu_seqlens, 0, 0 };
    for (int32_t i = 0; i < n; i++)
        add_document(d, lengths[i], seed + (uint64_t)i);
    return d;
}

/* ---- finite differences --------------------------------------------------------------------- */

/* Rules hold in a step with backward alone. */
static bool has_rules(const struct stack *s)
{
    const struct moe_rules *r = &s->config->rules;
    return r->capacity_factor > 0 || r->aux_loss > 0 || r->z_loss > 0;
}

static int loss_at(struct stack *s, const struct model_batch *b, const struct shard_part *part,
                   const float *start, const float *direction, double at, double *out,
                   struct err *err)
{
    struct model_loss loss;
    for (uint64_t i = 0; i < part->count; i++)
        part->weights[i] = (float)(start[i] + at * direction[i]);
    int rc = model_step(s->model, b, has_rules(s), &loss, err);
    *out = loss.sum + s->config->rules.aux_loss * loss.aux + s->config->rules.z_loss * loss.z;
    return rc;
}

/* Along the gradient and a random direction together: the one makes the change large beside the
 * rounding of the loss, the other finds what the gradient lacks. */
static int check_tensor(struct stack *s, const struct model_batch *b, size_t t,
                        const float *gradient, struct err *err)
{
    const struct tensor_entry *e = &s->config->map->entries[t];
    struct shard_part part;
    double norm = 0, spread = 0, expected = 0, y[4];
    static const double points[4] = { -2, -1, 1, 2 };

    CHECK(shard_part(s->shard, e, &part) && part.count == e->count);
    float *start = xmemdup(part.weights, part.count * sizeof *start);
    float *direction = xcalloc(part.count, sizeof *direction);
    for (uint64_t i = 0; i < part.count; i++) {
        norm += (double)gradient[i] * gradient[i];
        spread += noise(t + 1000, i) * noise(t + 1000, i);
    }
    norm = sqrt(norm);
    spread = sqrt(spread);
    if (norm == 0) { /* an expert that no token reached, a key that softmax ignores */
        free(start);
        free(direction);
        return 0;
    }
    for (uint64_t i = 0; i < part.count; i++) {
        direction[i] = (float)(gradient[i] / norm + 0.5 * noise(t + 1000, i) / spread);
        expected += (double)gradient[i] * direction[i];
    }
    /* A change of about 0.1 in a loss of about a hundred, but no step that leaves the smooth. */
    double h = fmin(0.1 / norm, 0.02 * sqrt((double)part.count));
    if (s->config->index_stage != INDEX_FROZEN)
        h /= 30; /* a small loss, with a kink where a score is 0 */
    if (s->config->rules.aux_loss > 0 || s->config->rules.capacity_factor > 0)
        h /= 20; /* steps where a token's choice changes */
    int rc = 0;
    for (int k = 0; rc == 0 && k < 4; k++)
        rc = loss_at(s, b, &part, start, direction, points[k] * h, &y[k], err);
    memcpy(part.weights, start, part.count * sizeof *start);
    free(start);
    free(direction);
    if (rc < 0)
        return rc;
    double found = (8 * (y[2] - y[1]) - (y[3] - y[0])) / (12 * h);
    double allowed = 5e-3 * fabs(expected) + 2e-6 * fabs(y[1]) / h;
    if (!(fabs(found - expected) <= allowed))
        return err_set(err, -EBADMSG, "%s: difference %.6g, gradient %.6g", e->name, found,
                       expected);
    return 1;
}

static int check_gradients(struct stack *s, void *arg, struct err *err)
{
    const struct tensor_map *map = s->config->map;
    struct documents *d = documents((const int32_t[]){ 9, 1, 22 }, 3, 7);
    struct model_loss loss;
    int n_checked = 0;

    fill(s);
    int rc = model_step(s->model, &d->batch, true, &loss, err);
    for (size_t t = 0; rc >= 0 && t < map->n_entries; t++) {
        struct shard_part part;
        if (map->entries[t].is_buffer || map->entries[t].is_unreached ||
            !shard_part(s->shard, &map->entries[t], &part))
            continue;
        if (has_rules(s)) { /* each loss above has added to them */
            shard_zero_gradients(s->shard);
            rc = model_step(s->model, &d->batch, true, &loss, err);
        }
        if (rc < 0)
            break;
        float *gradient = xmemdup(part.gradients, part.count * sizeof *gradient);
        rc = check_tensor(s, &d->batch, t, gradient, err);
        free(gradient);
        n_checked += rc;
    }
    free(d);
    if (rc < 0)
        return rc;
    *(int *)arg = n_checked;
    return 0;
}

static void every_gradient_agrees_with_finite_differences(void **state)
{
    (void)state;
    struct model_spec models[] = { kimi(), plain(), kimi(), turned(), turned(),
                                   indexed(turned(), 64) };
    models[2].top_k = models[2].n_experts; /* every score counts */
    models[4].rotary_interleaved = false;
    models[4].attention_bias = true;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        int n_checked = 0;
        run_on(&models[i], alone, RECOMPUTE_OFF, check_gradients, &n_checked);
        assert_true(n_checked > (models[i].mla_rotary ? 60 : 80));
    }
}

static void what_a_job_adds_to_routers_agrees_too(void **state)
{
    (void)state;
    static const struct moe_rules rules[] = {
        { .aux_loss = 2, .aux_scope = AUX_MICRO_BATCH },
        { .aux_loss = 2, .aux_scope = AUX_SEQUENCE },
        { .z_loss = 1 },
        { .capacity_factor = 0.75, .order = KEEP_FIRST_TOKENS },
        { .capacity_factor = 0.75, .overflow = OVERFLOW_REROUTE, .order = KEEP_FIRST_TOKENS,
          .aux_loss = 2, .aux_scope = AUX_MICRO_BATCH },
    };
    struct model_spec models[] = { kimi(), turned() };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (size_t k = 0; k < sizeof rules / sizeof *rules; k++) {
            int n_checked = 0;
            run_with(&models[i], alone, RECOMPUTE_OFF, INDEX_FROZEN, rules[k], check_gradients,
                     &n_checked);
            assert_true(n_checked > 50);
        }
}

/* ---- recomputation -------------------------------------------------------------------------- */

struct snapshot {
    double loss;
    float *gradients; /* all tensors one after another */
    int64_t *tokens;
    size_t activations; /* bytes */
};

static uint64_t total_count(const struct tensor_map *map)
{
    uint64_t n = 0;
    for (size_t t = 0; t < map->n_entries; t++)
        n += map->entries[t].count;
    return n;
}

/* Owners of all ranks fill their slices side by side. */
static void collect(const struct stack *s, float *out)
{
    const struct tensor_map *map = s->config->map;
    struct shard_part part;
    for (size_t t = 0; t < map->n_entries; out += map->entries[t++].count)
        if (shard_part(s->shard, &map->entries[t], &part) && part.is_first && part.gradients)
            memcpy(out + part.first, part.gradients, part.count * sizeof *out);
}

static struct snapshot *snapshot_on(const struct model_spec *spec, struct layout_degrees degrees,
                                    enum recompute recompute, stack_fn body)
{
    struct tensor_map map;
    struct snapshot *x = xcalloc(1, sizeof *x);
    assert_int_equal(tensor_map_init(spec, &map, NULL), 0);
    x->gradients = xcalloc(total_count(&map), sizeof *x->gradients);
    x->tokens = xcalloc((size_t)spec->n_layers * spec->n_experts, sizeof *x->tokens);
    tensor_map_fini(&map);
    run_on(spec, degrees, recompute, body, x);
    return x;
}

static struct snapshot *snapshot_of(const struct model_spec *spec, enum recompute recompute,
                                    stack_fn body)
{
    return snapshot_on(spec, alone, recompute, body);
}

static void snapshot_free(struct snapshot *x)
{
    free(x->gradients);
    free(x->tokens);
    free(x);
}

static int one_step(struct stack *s, void *arg, struct err *err)
{
    struct snapshot *x = arg;
    const struct model_spec *spec = s->config->spec;
    struct documents *d = documents((const int32_t[]){ 30, 2, 17 }, 3, 11);
    struct model_loss loss;

    fill(s);
    int rc = model_step(s->model, &d->batch, true, &loss, err);
    free(d);
    if (rc < 0)
        return rc;
    CHECK(loss.n_labels == 29 + 1 + 16);
    collect(s, x->gradients);
    if (s->rank)
        return 0;
    x->loss = loss.sum;
    x->activations = model_activation_bytes(s->model);
    memcpy(x->tokens, model_counters(s->model)->tokens,
           (size_t)spec->n_layers * spec->n_experts * sizeof *x->tokens);
    return 0;
}

/* ---- the indexer ---------------------------------------------------------------------------- */

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

/* What they learn is their own loss, in both stages, and nothing else gets a gradient. */
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

static void recomputation_changes_no_bit(void **state)
{
    (void)state;
    static const struct layout_degrees layouts[] = { { 1, 1, 1, 0 }, { 2, 2, 2, 0 },
                                                     { 4, 2, 2, 2 } };
    struct model_spec models[] = { kimi(), plain(), turned(), indexed(turned(), 5) };
    for (size_t i = 0; i < 3 * sizeof models / sizeof *models; i++) {
        const struct model_spec *m = &models[i / 3];
        struct tensor_map map;
        struct snapshot *by_way[RECOMPUTE_WAYS], *off;
        assert_int_equal(tensor_map_init(m, &map, NULL), 0);
        for (int how = RECOMPUTE_OFF; how < RECOMPUTE_WAYS; how++) {
            struct snapshot *x = snapshot_on(m, layouts[i % 3], (enum recompute)how, one_step);
            by_way[how] = x;
            off = by_way[RECOMPUTE_OFF];
            assert_true(off->loss == x->loss);
            assert_memory_equal(off->gradients, x->gradients, total_count(&map) * sizeof(float));
            assert_memory_equal(off->tokens, x->tokens,
                                (size_t)m->n_layers * m->n_experts * sizeof(int64_t));
        }
        assert_true(by_way[RECOMPUTE_SELECTIVE]->activations < off->activations &&
                    by_way[RECOMPUTE_FULL]->activations <
                        by_way[RECOMPUTE_SELECTIVE]->activations);
        tensor_map_fini(&map);
        for (int how = RECOMPUTE_OFF; how < RECOMPUTE_WAYS; how++)
            snapshot_free(by_way[how]);
    }
}

/* ---- packing -------------------------------------------------------------------------------- */

static const int32_t packed_lengths[] = { 1, 17, 40, 3, 25 };
#define N_PACKED 5

static double distance(const float *a, const float *b, uint64_t n)
{
    double difference = 0, norm = 0;
    for (uint64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(difference / fmax(norm, 1e-12));
}

static int packed_or_alone(struct stack *s, void *arg, struct err *err)
{
    struct documents *all = documents(packed_lengths, N_PACKED, 23);
    uint64_t n = total_count(s->config->map), row = s->config->spec->vocab;
    float *together = xcalloc((size_t)all->batch.n_tokens * row, sizeof *together);
    float *apart = xcalloc((size_t)all->batch.n_tokens * row, sizeof *apart);
    float *sum = xcalloc(n, sizeof *sum), *packed = xcalloc(n, sizeof *packed);
    struct model_loss whole = {0}, one = {0};
    double parts = 0, off[2] = {0};
    int rc;

    (void)arg;
    fill(s);
    rc = model_logits(s->model, &all->batch, together, err);
    if (rc == 0)
        rc = model_step(s->model, &all->batch, true, &whole, err);
    collect(s, packed);
    shard_zero_gradients(s->shard);
    for (int32_t i = 0, at = 0; rc == 0 && i < N_PACKED; at += packed_lengths[i++]) {
        struct documents *d = documents(&packed_lengths[i], 1, 23 + (uint64_t)i);
        rc = model_logits(s->model, &d->batch, apart + (uint64_t)at * row, err);
        if (rc == 0) /* the gradients of all documents add up */
            rc = model_step(s->model, &d->batch, true, &one, err);
        parts += one.sum;
        free(d);
    }
    collect(s, sum);
    off[0] = distance(together, apart, (uint64_t)all->batch.n_tokens * row);
    off[1] = distance(packed, sum, n);
    free(all);
    free(together);
    free(apart);
    free(sum);
    free(packed);
    if (rc < 0)
        return rc;
    CHECK(off[0] < 1e-6);
    CHECK(off[1] < 1e-5);
    CHECK(fabs(whole.sum - parts) < 1e-6 * parts);
    return 0;
}

static void packed_documents_do_not_see_each_other(void **state)
{
    (void)state;
    struct model_spec models[] = { kimi(), plain() };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        run_on(&models[i], alone, RECOMPUTE_OFF, packed_or_alone, NULL);
}

/* ---- layouts -------------------------------------------------------------------------------- */

#define N_STEPS 6
#define N_ROWS 6

struct course {
    double losses[N_STEPS], norms[N_STEPS];
    int64_t tokens[5 * 8]; /* layers x experts, of all ranks and steps */
};

/* Documents of uneven lengths dealt to the ranks in turn; with eight ranks some have none. */
static struct documents *dealt(const struct stack *s, uint64_t step)
{
    struct documents *d = documents(NULL, 0, 0);
    for (uint32_t row = 0; row < N_ROWS; row++)
        if ((row + step) % s->config->degrees.world == s->rank)
            add_document(d, (int32_t)(5 + row * 7 % 23), 100 * step + row);
    return d;
}

static int train(struct stack *s, void *arg, struct err *err)
{
    struct course *c = arg;
    struct optim_config config = { .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1,
                                   .decay = DECAY_ALL, .clip_grad_norm = 1 };
    struct model_loss mine = {0};
    int rc = 0;

    fill(s);
    for (uint64_t step = 0; rc == 0 && step < N_STEPS; step++) {
        struct documents *d = dealt(s, step);
        rc = model_step(s->model, &d->batch, true, &mine, err);
        free(d);
        double sums[2] = { mine.sum, (double)mine.n_labels }, norm = 0;
        if (rc == 0)
            rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_SUM, sums, 2,
                                              err);
        if (rc == 0)
            rc = optim_norm(s->shard, s->config->map, s->coll, s->dev, sums[1], &norm, err);
        if (rc < 0)
            return rc;
        optim_step(s->shard, s->config->map, s->dev, &config, step + 1, 1e-4, sums[1], norm);
        shard_zero_gradients(s->shard);
        if (s->rank == 0) {
            c->losses[step] = sums[0] / sums[1];
            c->norms[step] = norm;
        }
    }
    double tokens[5 * 8];
    for (size_t i = 0; i < 5 * 8; i++)
        tokens[i] = (double)model_counters(s->model)->tokens[i];
    if (rc == 0)
        rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_SUM, tokens, 5 * 8,
                                          err);
    for (size_t i = 0; s->rank == 0 && i < 5 * 8; i++)
        c->tokens[i] = (int64_t)tokens[i];
    return rc;
}

static void every_layout_trains_the_same(void **state)
{
    (void)state;
    static const struct layout_degrees layouts[] = {
        { 2, 1, 1, 0 }, { 2, 1, 1, 1 }, { 2, 2, 1, 0 }, { 2, 1, 2, 0 }, { 2, 2, 2, 0 },
        { 4, 1, 1, 1 }, { 4, 2, 1, 2 }, { 4, 4, 1, 0 }, { 4, 1, 2, 1 }, { 4, 2, 2, 0 },
        { 4, 4, 2, 1 }, { 4, 1, 4, 0 }, { 4, 2, 4, 0 }, { 4, 4, 4, 0 }, { 8, 4, 2, 2 },
        { 8, 2, 8, 0 }, { 8, 8, 4, 1 }, { 3, 3, 1, 3 },
    };
    struct model_spec m = kimi();
    struct course one = {0};
    run_on(&m, alone, RECOMPUTE_OFF, train, &one);
    assert_true(one.losses[N_STEPS - 1] < one.losses[0] * 1.5 && one.norms[0] > 0);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct course c = {0};
        run_on(&m, layouts[i], i % 2 ? RECOMPUTE_FULL : RECOMPUTE_OFF, train, &c);
        for (size_t step = 0; step < N_STEPS; step++)
            if (!(fabs(c.losses[step] / one.losses[step] - 1) < 1e-5) ||
                !(fabs(c.norms[step] / one.norms[step] - 1) < 1e-3))
                fail_msg("layout %zu step %zu: loss %.9g %.9g, norm %.9g %.9g", i, step,
                         c.losses[step], one.losses[step], c.norms[step], one.norms[step]);
        assert_memory_equal(c.tokens, one.tokens, sizeof c.tokens);
    }
}

/* ---- counters and limits -------------------------------------------------------------------- */

static int count_tokens(struct stack *s, void *arg, struct err *err)
{
    const struct model_spec *spec = s->config->spec;
    struct documents *d = documents((const int32_t[]){ 20, 13 }, 2, 3);
    float *logits = xcalloc(33 * spec->vocab, sizeof *logits);
    struct model_loss loss;

    (void)arg;
    fill(s);
    int rc = model_step(s->model, &d->batch, false, &loss, err); /* none of these counts */
    if (rc == 0)
        rc = model_logits(s->model, &d->batch, logits, err);
    free(logits);
    CHECK(rc == 0 && model_counters(s->model)->n_rows == 0);
    for (int k = 0; rc == 0 && k < 2; k++)
        rc = model_step(s->model, &d->batch, true, &loss, err);
    free(d);
    CHECK(rc == 0);
    const struct model_counters *c = model_counters(s->model);
    CHECK(c->n_rows == 2 * 4 * 33 * spec->top_k); /* 4 sparse layers */
    for (uint32_t l = 0; l < spec->n_layers; l++) {
        int64_t tokens = 0, margins = 0;
        for (uint32_t e = 0; e < spec->n_experts; e++)
            tokens += c->tokens[l * spec->n_experts + e];
        for (uint32_t b = 0; b < spec->n_experts * MARGIN_BINS; b++)
            margins += c->margins[(size_t)l * spec->n_experts * MARGIN_BINS + b];
        CHECK(tokens == (l ? 2 * 33 * spec->top_k : 0));
        CHECK(margins == (l ? 2 * 33 * spec->n_experts : 0));
        CHECK(!l || (c->margin_lo[l] == -1 && c->margin_hi[l] == 22)); /* biases 0 to 21 */
    }
    model_counters_reset(s->model);
    c = model_counters(s->model);
    for (size_t i = 0; i < (size_t)spec->n_layers * spec->n_experts; i++)
        CHECK(c->tokens[i] == 0 && c->margins[i * MARGIN_BINS] == 0);
    CHECK(c->n_rows == 0);
    return 0;
}

static void only_training_forwards_are_counted_once(void **state)
{
    (void)state;
    struct model_spec m = kimi();
    run_on(&m, alone, RECOMPUTE_OFF, count_tokens, NULL);
    run_on(&m, alone, RECOMPUTE_FULL, count_tokens, NULL);
}

static int refuse_batches(struct stack *s, void *arg, struct err *err)
{
    static const struct { int what; const char *says; } cases[] = {
        { 0, "token 3 is 64, the vocabulary has ids 0 to 63" },
        { 1, "token 0 is -1" },
        { 2, "label 2 is 64" },
        { 3, "cu_seqlens do not ascend from 0 to the 12 tokens" },
        { 4, "cu_seqlens" },
        { 5, "12 tokens in 0 documents" },
    };
    (void)arg;
    fill(s);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct documents *d = documents((const int32_t[]){ 7, 5 }, 2, 3);
        struct model_loss loss = { .sum = 5 };
        struct err own = {0};
        if (cases[i].what == 0)
            d->tokens[3] = 64;
        if (cases[i].what == 1)
            d->tokens[0] = -1;
        if (cases[i].what == 2)
            d->labels[2] = 64;
        if (cases[i].what == 3)
            d->cu_seqlens[1] = 0;
        if (cases[i].what == 4)
            d->cu_seqlens[2] = 11;
        if (cases[i].what == 5)
            d->batch.n_docs = 0;
        int rc = model_step(s->model, &d->batch, true, &loss, &own);
        free(d);
        if (rc != -EINVAL || !strstr(own.text, cases[i].says) || loss.sum != 5)
            return err_set(err, -EBADMSG, "case %d: %d \"%s\"", cases[i].what, rc, own.text);
    }
    return 0;
}

static void a_bad_batch_is_refused_before_it_runs(void **state)
{
    (void)state;
    struct model_spec m = kimi();
    run_on(&m, alone, RECOMPUTE_OFF, refuse_batches, NULL);
}

/* The plan holds for 64 tokens; more of them grow it once. */
static int grow(struct stack *s, void *arg, struct err *err)
{
    struct documents *small = documents((const int32_t[]){ 64 }, 1, 3);
    struct documents *large = documents((const int32_t[]){ 200 }, 1, 3);
    size_t planned = model_activation_bytes(s->model), grown = 0;
    struct model_loss loss;
    int rc;

    (void)arg;
    fill(s);
    rc = model_step(s->model, &small->batch, true, &loss, err);
    CHECK(rc == 0 && model_activation_bytes(s->model) == planned);
    for (int k = 0; rc == 0 && k < 2; k++) {
        rc = model_step(s->model, &large->batch, true, &loss, err);
        CHECK(k == 0 || model_activation_bytes(s->model) == grown);
        grown = model_activation_bytes(s->model);
    }
    free(small);
    free(large);
    CHECK(rc == 0 && grown > planned);
    return 0;
}

static void the_plan_holds_and_grows_at_need(void **state)
{
    (void)state;
    struct model_spec m = kimi();
    run_on(&m, alone, RECOMPUTE_OFF, grow, NULL);
    run_on(&m, alone, RECOMPUTE_FULL, grow, NULL);
}

static int count_forced(struct stack *s, void *arg, struct err *err)
{
    const struct model_spec *spec = s->config->spec;
    struct documents *d = documents((const int32_t[]){ 40, 24 }, 2, 5);
    struct model_loss loss;

    (void)arg;
    fill(s);
    int rc = model_step(s->model, &d->batch, true, &loss, err);
    free(d);
    CHECK(rc == 0 && isfinite(loss.sum));
    const struct model_counters *c = model_counters(s->model);
    int64_t even = 64 * spec->top_k / spec->n_experts;
    for (uint32_t i = spec->n_experts; i < spec->n_layers * spec->n_experts; i++)
        CHECK(c->tokens[i] == even || c->tokens[i] == even + 1);
    return 0;
}

static void forced_balance_gives_all_experts_the_same(void **state)
{
    (void)state;
    struct model_spec m = kimi();
    run_with(&m, alone, RECOMPUTE_OFF, INDEX_FROZEN, (struct moe_rules){.force_balance = true},
             count_forced, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forced_balance_gives_all_experts_the_same),
        cmocka_unit_test(every_gradient_agrees_with_finite_differences),
        cmocka_unit_test(what_a_job_adds_to_routers_agrees_too),
        cmocka_unit_test(an_indexer_that_keeps_all_keys_changes_nothing),
        cmocka_unit_test(indexers_learn_alone),
        cmocka_unit_test(indexers_learn_beside_the_model_what_they_learn_alone),
        cmocka_unit_test(what_indexers_learn_does_not_know_the_layout),
        cmocka_unit_test(recomputation_changes_no_bit),
        cmocka_unit_test(packed_documents_do_not_see_each_other),
        cmocka_unit_test(every_layout_trains_the_same),
        cmocka_unit_test(only_training_forwards_are_counted_once),
        cmocka_unit_test(a_bad_batch_is_refused_before_it_runs),
        cmocka_unit_test(the_plan_holds_and_grows_at_need),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
