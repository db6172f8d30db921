/* test_lora.c - adapters: which and where, their gradients, what they add, and every layout */
#include "tests/whole_model.h"

#include "common/lora_map.h"
#include "kernels/packed.h"
#include "worker/optim.h"
#include "worker/shuffle.h"
#include "worker/transfer.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- models --------------------------------------------------------------------------------- */

/* Projections that a_model has not: of low-rank gates, direct queries; experts see the whole
 * width. */
static struct model_spec plain(void)
{
    struct model_spec m = a_model();
    m.residual = RESIDUAL_PLAIN;
    m.attn_res_block = 0;
    m.kda_gate_full_rank = m.mla_output_gate = false;
    m.q_lora_rank = 0;
    m.activation = ACTIVATION_SWIGLU;
    m.latent = m.hidden;
    m.latent_moe = m.latent_norm = false;
    return m;
}

/* Sparse attention, where kv_b is applied head by head. */
static struct model_spec indexed(void)
{
    struct model_spec m = a_model();
    m.index_heads = 3;
    m.index_head_dim = 8;
    m.index_top_k = 64;
    m.index_norm_eps = 1e-6f;
    return m;
}

static const char *const all[] = {
    "q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate_proj", "up_proj", "down_proj",
    "routed_expert_down_proj", "routed_expert_up_proj", "experts", "block_sparse_moe.gate",
    "lm_head",
};
static const char *const indexer[] = { "indexer.wq_b", "indexer.wk", "weights_proj", "o_proj" };
static const char *const ends[] = { "gate", "lm_head" };
static const char *const all_plain[] = {
    "q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj",
    "o_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate_proj", "up_proj", "down_proj", "experts",
};
static const char *const attention[] = { "self_attn.q_proj", "o_proj" };
static const char *const experts[] = { "experts" };
static const char *const downs[] = { "experts.w2" };

static struct lora_config lora_on(const char *const *targets, size_t n, bool shared_a)
{
    return (struct lora_config){ 3, 6.6, shared_a, targets, n, targets == indexer };
}
#define LORA(targets, shared_a) lora_on(targets, COUNT(targets), shared_a)

/* A function of the tensor's name and the element alone. Selection biases are far apart, so that a
 * small step never changes a choice. */
static float initial(const struct tensor_entry *e, uint64_t i)
{
    uint64_t tensor = 5381;
    for (const char *c = e->name; *c; c++)
        tensor = tensor * 33 + (uint8_t)*c;
    if (e->is_buffer)
        return (float)((i * 5 + tensor) % 8) * 3;
    if (e->init == INIT_ONES)
        return (float)(1 + 0.1 * noise(tensor, i));
    if (e->n_dims == 2 && e->dims[0] > 1)
        return (float)((e->adapter == ADAPTER_NONE ? 1 : 0.3) * noise(tensor, i) /
                       sqrt((double)e->dims[1]));
    return (float)(0.3 * noise(tensor, i));
}

static void fill(const struct stack *s)
{
    struct shard_part part;
    for (size_t t = 0; t < s->config->map->n_entries; t++) {
        const struct tensor_entry *e = &s->config->map->entries[t];
        if (shard_part(s->shard, e, &part))
            for (uint64_t i = 0; i < part.count; i++)
                part.weights[i] = initial(e, part.first + i);
    }
    assert(shard_refresh_all(s->shard, NULL) == 0);
}

/* A map with adapters as c says; c NULL: without. */
static struct tensor_map map_of(const struct model_spec *spec, const struct lora_config *c)
{
    struct tensor_map map;
    struct err err = {0};
    assert_int_equal(tensor_map_init(spec, &map, NULL), 0);
    if (c && lora_map_add(&map, c, &err) < 0)
        fail_msg("%s", err.text);
    return map;
}

static void run_on(const struct model_spec *spec, const struct lora_config *lora,
                   struct layout_degrees degrees, uint32_t variant, stack_fn body, void *arg)
{
    struct tensor_map map = map_of(spec, lora);
    struct err err = {0};
    struct stack_config config = {
        .spec = spec, .map = &map, .lora = lora, .degrees = degrees, .tokens_max = 128,
        .recompute = variant & 1 ? RECOMPUTE_FULL : RECOMPUTE_OFF, .n_spare = variant & 2 ? 1 : 0,
        .deterministic = variant & 4,
    };
    if (variant & (16 | 32 | 64)) { /* indexers learn: beside the model, or alone */
        config.index_stage = variant & 32 ? INDEX_DENSE : INDEX_SPARSE;
        config.index_joint = variant & 16;
    }
    enum packing packing = variant & 8     ? PACKING_MXFP4
                           : variant & 128 ? PACKING_FP8
                                           : PACKING_NONE;
    if (tensor_map_pack(&map, packing, sizeof(float), &err) < 0)
        fail_msg("%s", err.text);
    if (stack_run(&config, body, arg, &err) < 0)
        fail_msg("world %u fsdp %u ep %u shard %u: %s", degrees.world, degrees.fsdp, degrees.ep,
                 degrees.expert_shard, err.text);
    tensor_map_fini(&map);
}

/* ---- which and where ------------------------------------------------------------------------ */

static void adapters_are_named_as_peft_has_them(void **state)
{
    (void)state;
    struct model_spec m = a_model();
    struct lora_config c = LORA(all, false);
    struct tensor_map map = map_of(&m, &c);
    const struct tensor_entry *a = tensor_map_find(&map, "base_model.model.language_model.model."
                                                   "layers.1.self_attn.kv_b_proj.lora_A.weight");
    const struct tensor_entry *b = tensor_map_find(&map, "base_model.model.language_model.model."
                                                   "layers.1.block_sparse_moe.experts.7.w2."
                                                   "lora_B.weight");
    assert_non_null(a);
    assert_non_null(b);
    assert_true(a->adapter == ADAPTER_A && a->dims[0] == 3 && a->dims[1] == 16 && a->unit == 2);
    assert_true(b->adapter == ADAPTER_B && b->dims[0] == 16 && b->dims[1] == 3 && b->expert == 7);
    assert_string_equal(lora_base_of(&map, b)->name, "language_model.model.layers.1."
                        "block_sparse_moe.experts.7.w2.weight");
    for (size_t i = 0; i < map.n_entries; i++)
        assert_true(map.entries[i].is_unreached == (map.entries[i].adapter == ADAPTER_NONE));
    tensor_map_fini(&map);
}

/* Blocks hold every tensor once, and those of the model where they were. */
static void adapters_are_all_that_is_trained(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        struct model_spec m = a_model();
        struct lora_config c = LORA(all, shared);
        struct tensor_map map = map_of(&m, &c), bare = map_of(&m, NULL);
        for (size_t i = 0; i < map.n_entries; i++) {
            const struct tensor_entry *e = &map.entries[i];
            assert_true(tensor_is_trained(e) == (e->adapter != ADAPTER_NONE));
        }
        for (size_t i = 0; i < bare.n_entries; i++) {
            const struct tensor_entry *e = tensor_map_find(&map, bare.entries[i].name);
            assert_true(e && e->unit == bare.entries[i].unit && e->count == bare.entries[i].count);
        }
        for (uint32_t u = 0; u < map.n_units; u++)
            assert_int_equal(map.units[u].frozen, bare.units[u].trained + bare.units[u].frozen);
        assert_int_equal(map.expert.frozen, bare.expert.trained);
        tensor_map_fini(&map);
        tensor_map_fini(&bare);
    }
}

static void a_target_that_fits_nothing_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *target, *says;
    } rows[] = {
        { "query", "LoRA target 'query' is no matrix of this model; use some of q_proj, k_proj, " },
        { "_proj", "is no matrix of this model" },
        { "embed_tokens", "embed_tokens.weight takes no adapter; use some of q_proj" },
        { "mlp_res_proj", "mlp_res_proj.weight takes no adapter" },
        { "q_conv1d", "takes no adapter" },
        { "input_layernorm", "takes no adapter" },
        { "", "is no matrix" },
    };
    struct model_spec m = indexed();
    for (size_t i = 0; i < COUNT(rows); i++) {
        const char *targets[] = { "o_proj", rows[i].target };
        struct lora_config c = LORA(targets, false);
        struct tensor_map map = map_of(&m, NULL);
        struct err err = {0};
        size_t n = map.n_entries;
        assert_int_equal(lora_map_add(&map, &c, &err), -EINVAL);
        if (!strstr(err.text, rows[i].says))
            fail_msg("'%s': %s", rows[i].target, err.text);
        assert_true(map.n_entries == n && !map.adapter_names && !map.entries[0].is_unreached);
        tensor_map_fini(&map);
    }
}

/* Of indexers they rest with these, unless asked for. */
static void adapters_of_indexers_are_trained_where_these_learn(void **state)
{
    (void)state;
    struct model_spec m = indexed();
    for (int learns = 0; learns < 2; learns++) {
        struct lora_config c = LORA(indexer, false);
        c.indexers = learns;
        struct tensor_map map = map_of(&m, &c);
        size_t n_trained = 0, n_resting = 0;
        for (size_t i = 0; i < map.n_entries; i++) {
            n_trained += tensor_is_trained(&map.entries[i]);
            n_resting += map.entries[i].adapter != ADAPTER_NONE && map.entries[i].is_unreached;
        }
        assert_int_equal(n_trained, 2 * (learns ? 3 + 3 : 3));
        assert_int_equal(n_resting, 2 * (learns ? 0 : 3));
        tensor_map_fini(&map);
    }
    struct lora_config alone_c = lora_on(indexer, 3, false);
    struct tensor_map map = map_of(&m, NULL);
    struct err err = {0};
    alone_c.indexers = false;
    assert_int_equal(lora_map_add(&map, &alone_c, &err), -EINVAL);
    assert_non_null(strstr(err.text, "rest unless train.indexer.with_model is true"));
    assert_null(map.adapter_names);
    tensor_map_fini(&map);
}

static void names_of_adapters_are_read_back(void **state)
{
    (void)state;
    static const struct {
        const char *name, *target;
    } rows[] = {
        { "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
          "model.layers.0.self_attn.q_proj" },
        { "base_model.model.model.layers.1.mlp.experts.12.up_proj.lora_B.weight",
          "model.layers.1.mlp.experts.up_proj" },
        { "model.layers.0.self_attn.q_proj.lora_A.weight", NULL },
        { "base_model.model.model.layers.0.self_attn.q_proj.weight", NULL },
        { "base_model.model..lora_A.weight", "" },
        { "base_model.model.model.embed_tokens.lora_embedding_A", NULL },
        { "base_model.model.lm_head.lora_A.weight", "lm_head" },
        { "", NULL },
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char target[LORA_NAME_BYTES] = "";
        int rc = lora_target_of(rows[i].name, target, NULL);
        if (rows[i].target && *rows[i].target)
            assert_string_equal(target, rows[i].target);
        else
            assert_int_equal(rc, -EINVAL);
    }
}

/* ---- finite differences --------------------------------------------------------------------- */

static int check_gradients(struct stack *s, void *arg, struct err *err)
{
    const struct tensor_map *map = s->config->map;
    struct documents *d = dealt(s, 7, 16);
    struct model_loss loss;
    int n_checked = 0;

    fill(s);
    int rc = model_step(s->model, &d->batch, true, &loss, err);
    for (size_t t = 0; rc >= 0 && t < map->n_entries; t++) {
        struct shard_part part;
        if (map->entries[t].adapter == ADAPTER_NONE ||
            !shard_part(s->shard, &map->entries[t], &part))
            continue;
        enum tensor_role role = map->entries[t].role;
        bool is_of_indexer = role >= ROLE_INDEX_Q && role <= ROLE_INDEX_WEIGHTS;
        rc = check_tensor(s, &d->batch, &map->entries[t], part.gradients,
                          is_of_indexer ? 0.01 : 1, err); /* whose scores have bends */
        n_checked += rc;
    }
    free(d);
    *(int *)arg = n_checked;
    return rc < 0 ? rc : 0;
}

static void every_gradient_agrees_with_finite_differences(void **state)
{
    (void)state;
    struct model_spec models[] = { a_model(), plain(), indexed(), a_model(), a_model(), plain() };
    struct lora_config configs[] = { LORA(all, false), LORA(all_plain, false), LORA(all, false),
                                     LORA(all, true), LORA(downs, false), LORA(ends, false) };
    static const int at_least[] = { 96, 80, 96, 76, 8, 6 };
    for (size_t i = 0; i < COUNT(models); i++)
        for (uint32_t variant = 0; variant < (configs[i].shared_a ? 2 : 8); variant += 5) {
            int n_checked = 0;
            run_on(&models[i], &configs[i], alone, variant, check_gradients, &n_checked);
            if (n_checked < at_least[i])
                fail_msg("model %zu: only %d tensors had a gradient", i, n_checked);
        }
}

/* Their loss is the divergence, of all keys and of few. */
static void gradients_of_indexers_agree_with_finite_differences(void **state)
{
    (void)state;
    struct model_spec m = indexed();
    struct lora_config c = LORA(indexer, false);
    static const uint32_t stages[] = { 32, 64 };
    for (size_t i = 0; i < COUNT(stages); i++)
        for (m.index_top_k = 4; m.index_top_k <= 64; m.index_top_k += 60) {
            int n_checked = 0;
            run_on(&m, &c, alone, stages[i], check_gradients, &n_checked);
            assert_int_equal(n_checked, 6); /* o_proj's are not reached by it */
        }
}

struct index_pass {
    double index, loss;
    uint64_t digest;
};

static int learn_once(struct stack *s, void *arg, struct err *err)
{
    struct index_pass *out = arg;
    const struct tensor_map *map = s->config->map;
    struct documents *d = dealt(s, 7, 16);
    struct model_loss loss;
    fill(s);
    int rc = model_step(s->model, &d->batch, true, &loss, err);
    free(d);
    *out = (struct index_pass){loss.index, loss.sum, 0};
    for (size_t t = 0; rc == 0 && t < map->n_entries; t++) {
        const struct tensor_entry *e = &map->entries[t];
        struct shard_part p;
        if (e->adapter == ADAPTER_NONE || e->role < ROLE_INDEX_Q || e->role > ROLE_INDEX_WEIGHTS ||
            !shard_part(s->shard, e, &p))
            continue;
        for (uint64_t i = 0; i < p.count; i++) {
            uint32_t bits;
            memcpy(&bits, &p.gradients[i], sizeof bits);
            out->digest = (out->digest ^ bits) * 0x100000001b3u;
        }
    }
    return rc;
}

/* Beside the model they learn what they learn alone, to the bit. */
static void adapters_of_indexers_learn_beside_the_model(void **state)
{
    (void)state;
    struct model_spec m = indexed();
    struct lora_config c = LORA(indexer, false);
    struct index_pass by_themselves, beside, again;
    m.index_top_k = 4;
    run_on(&m, &c, alone, 64, learn_once, &by_themselves);
    run_on(&m, &c, alone, 16, learn_once, &beside);
    run_on(&m, &c, alone, 16 | 1, learn_once, &again);
    assert_true(by_themselves.digest != 0 && beside.digest == by_themselves.digest);
    assert_true(again.digest == beside.digest && beside.index == by_themselves.loss);
}

/* ---- what an adapter adds ------------------------------------------------------------------- */

struct merged {
    struct lora_config c;
    float logits[256 * 64];
};

static int logits(struct stack *s, void *arg, struct err *err)
{
    struct merged *out = arg;
    const struct tensor_map *map = s->config->map;
    struct documents *d = dealt(s, 3, 16);
    fill(s);
    for (size_t t = 0; !s->config->lora && t < map->n_entries; t++) { /* W + s B A instead */
        const struct lora_config c = out->c;
        struct tensor_map beside = map_of(s->config->spec, &c);
        struct shard_part part;
        assert_true(shard_part(s->shard, &map->entries[t], &part));
        for (size_t k = 0; k < beside.n_entries; k++) {
            const struct tensor_entry *a = &beside.entries[k], *b = a + 1;
            if (a->adapter != ADAPTER_A ||
                strcmp(lora_base_of(&beside, a)->name, map->entries[t].name) != 0)
                continue;
            for (uint64_t i = 0; i < c.r * part.count; i++) {
                uint64_t r = i % c.r, row = i / c.r / a->dims[1], column = i / c.r % a->dims[1];
                part.weights[i / c.r] += (float)(c.alpha / c.r * initial(b, row * c.r + r) *
                                                 initial(a, r * a->dims[1] + column));
            }
        }
        tensor_map_fini(&beside);
    }
    int rc = model_logits(s->model, &d->batch, out->logits, err);
    free(d);
    return rc;
}

static void an_adapter_is_what_it_would_be_merged(void **state)
{
    (void)state;
    struct model_spec models[] = { a_model(), indexed(), indexed() };
    struct lora_config configs[] = { LORA(all, false), LORA(all, false), LORA(indexer, false) };
    static struct merged beside, merged;
    models[2].index_top_k = 4;
    for (size_t i = 0; i < COUNT(models); i++) {
        double square = 0, norm = 0;
        beside.c = merged.c = configs[i];
        run_on(&models[i], &configs[i], alone, 0, logits, &beside);
        run_on(&models[i], NULL, alone, 0, logits, &merged);
        for (size_t k = 0; k < COUNT(merged.logits); k++) {
            double apart = (double)beside.logits[k] - merged.logits[k];
            square += apart * apart;
            norm += (double)merged.logits[k] * merged.logits[k];
        }
        if (!(sqrt(square / norm) < 3e-5))
            fail_msg("model %zu: %.2e apart", i, sqrt(square / norm));
    }
}

/* ---- layouts and moves ---------------------------------------------------------------------- */

#define N_STEPS 4

struct course {
    double losses[N_STEPS], norms[N_STEPS];
    uint64_t digest;  /* of adapters, their moments, and the base: not of where they lie */
    uint32_t moves_every;
};

static void add_digest(const struct stack *s, struct course *c)
{
    const struct tensor_map *map = s->config->map;
    uint64_t sum = 0;
    for (size_t t = 0; t < map->n_entries; t++) {
        const struct tensor_entry *e = &map->entries[t];
        struct shard_part p;
        if (!shard_part(s->shard, e, &p) || !p.is_first)
            continue;
        for (uint64_t i = 0; i < p.count; i++) {
            float x[3] = { p.weights[i], 0, 0 };
            if (e->adapter != ADAPTER_NONE)
                memcpy(x + 1, (float[]){ p.m[i], p.v[i] }, 2 * sizeof *x);
            else
                assert_true(x[0] == initial(e, p.first + i)); /* the base rests */
            for (int k = 0; k < 3; k++) {
                uint32_t bits;
                memcpy(&bits, &x[k], sizeof bits);
                sum += (bits + 1) * 0x9e3779b97f4a7c15ull * (3 * (p.first + i) + (uint64_t)k + 1) *
                       (2 * t + 1);
            }
        }
    }
    __atomic_add_fetch(&c->digest, sum, __ATOMIC_RELAXED);
}

static int move_all(struct stack *s, uint64_t seed, struct err *err)
{
    struct transfer_result r;
    struct transfer *t = NULL;
    struct slots to;
    slots_init_like(&to, &s->slots);
    slots_shuffle(&to, seed);
    int rc = transfer_create(s->shard, &s->slots, &to, NULL, &t, err);
    if (rc == 0)
        rc = transfer_run(t, &r, err);
    transfer_destroy(t);
    return rc;
}

static int train_on(struct stack *s, struct course *c, struct err *err)
{
    struct optim_config config = { .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1,
                                   .decay = DECAY_ALL, .clip_grad_norm = 1 };
    for (uint64_t step = 0; step < N_STEPS; step++) {
        struct documents *d = dealt(s, step, 16);
        struct model_loss mine = {0};
        int rc = model_step(s->model, &d->batch, true, &mine, err);
        free(d);
        double sums[2] = { mine.sum, (double)mine.n_labels }, norm = 0;
        if (rc < 0 ||
            (rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_SUM, sums, 2,
                                               err)) < 0 ||
            (rc = optim_norm(s->shard, s->config->map, s->coll, s->dev, sums[1], &norm, err)) < 0)
            return rc;
        optim_step(s->shard, s->config->map, s->dev, &config, step + 1, 3e-4, sums[1], norm);
        if ((rc = shard_refresh(s->shard, err)) < 0 ||
            (c->moves_every && (rc = move_all(s, step + 1, err)) < 0))
            return rc;
        shard_zero_gradients(s->shard);
        if (s->rank == 0) {
            c->losses[step] = sums[0] / sums[1];
            c->norms[step] = norm;
        }
    }
    return 0;
}

static int train(struct stack *s, void *arg, struct err *err)
{
    fill(s);
    int rc = train_on(s, arg, err);
    if (rc == 0)
        add_digest(s, arg);
    return rc;
}

static void every_layout_trains_the_same(void **state)
{
    (void)state;
    static const struct layout_degrees layouts[] = {
        { 2, 1, 1, 0 }, { 2, 2, 1, 1 }, { 2, 1, 2, 0 }, { 2, 2, 2, 0 }, { 4, 2, 1, 2 },
        { 4, 2, 2, 0 }, { 4, 4, 2, 1 }, { 4, 1, 4, 0 }, { 4, 4, 4, 0 },
    };
    struct model_spec m = a_model(), sparse = indexed();
    struct lora_config configs[] = { LORA(all, false), LORA(all, true), LORA(attention, false),
                                     LORA(experts, false), LORA(indexer, false) };
    for (size_t k = 0; k < COUNT(configs) * COUNT(layouts); k++) {
        const struct lora_config *lora = &configs[k / COUNT(layouts)];
        const struct model_spec *spec = lora->indexers || k % 2 ? &sparse : &m;
        uint32_t learns = lora->indexers ? 16 : 0;
        struct course one = {0}, c = { .moves_every = k % 3 == 0 };
        run_on(spec, lora, alone, learns, train, &one);
        assert_true(one.losses[N_STEPS - 1] != one.losses[0] && one.norms[0] > 0);
        run_on(spec, lora, layouts[k % COUNT(layouts)], (uint32_t)(k % 4) | learns, train, &c);
        for (size_t i = 0; i < N_STEPS; i++)
            if (!(fabs(c.losses[i] / one.losses[i] - 1) < 1e-5) ||
                !(fabs(c.norms[i] / one.norms[i] - 1) < 1e-3))
                fail_msg("%zu step %zu: loss %.9g %.9g, norm %.9g %.9g", k, i, c.losses[i],
                         one.losses[i], c.norms[i], one.norms[i]);
    }
}

/* An expert's adapters and their moments go with it, bit by bit. */
static void moving_experts_changes_no_bit(void **state)
{
    (void)state;
    static const struct layout_degrees layouts[] = {
        { 2, 2, 2, 0 }, { 4, 2, 2, 2 }, { 4, 1, 4, 0 },
    };
    struct model_spec m = a_model();
    struct lora_config c = LORA(all, false);
    for (size_t i = 0; i < COUNT(layouts); i++) {
        struct course rests = {0}, moves = { .moves_every = 1 };
        run_on(&m, &c, layouts[i], 4 | 2, train, &rests);
        run_on(&m, &c, layouts[i], 4 | 2, train, &moves);
        assert_memory_equal(rests.losses, moves.losses, sizeof rests.losses);
        assert_true(rests.digest == moves.digest);
    }
}

/* ---- a packed base -------------------------------------------------------------------------- */

/* Experts as wide as groups of MXFP4 ask for, or of more than one block of FP8. */
static struct model_spec wide(enum packing packing, bool sparse)
{
    struct model_spec m = sparse ? indexed() : a_model();
    m.latent = packing == PACKING_MXFP4 ? 32 : 150;
    m.expert_inter = packing == PACKING_MXFP4 ? 64 : 35;
    return m;
}

struct packed_course {
    struct course course;
    enum packing packing;
    size_t state_bytes;
};

/* What a matrix is packed as, from its numbers in the other runs. */
static uint8_t *pack(const struct tensor_entry *e, enum packing packing)
{
    float *x = xcalloc(e->stored_count, sizeof *x);
    uint8_t *bytes = xcalloc(packing_bytes(packing, e->dims[0], e->dims[1]) + sizeof *x, 1);
    for (uint64_t i = 0; i < e->stored_count; i++)
        x[i] = initial(e, i);
    packed_encode(bytes, packing, x, (int64_t)e->dims[0], (int64_t)e->dims[1]);
    free(x);
    return bytes;
}

/* What such a base packs, packed or as the floats that it decodes to. */
static void fill_packed(struct stack *s, enum packing packing)
{
    const struct tensor_map *map = s->config->map;
    for (size_t t = 0; t < map->n_entries; t++) {
        const struct tensor_entry *e = &map->entries[t];
        bool dense = packing == PACKING_FP8 && tensor_is_projection(e->role);
        struct shard_part part;
        if ((e->expert < 0 && !dense) || e->adapter != ADAPTER_NONE ||
            !shard_part(s->shard, e, &part))
            continue;
        int64_t rows = (int64_t)e->dims[0], cols = (int64_t)e->dims[1];
        uint8_t *bytes = pack(e, packing);
        struct packed w = {packing, bytes, rows, cols};
        float *x = xcalloc(e->stored_count, sizeof *x);
        packed_decode(x, &w, 0, rows, 0, cols);
        const float *from = e->packing ? (const float *)(const void *)bytes : x;
        memcpy(part.elements, from + part.first, part.count * sizeof *x);
        free(bytes);
        free(x);
    }
}

static int train_packed(struct stack *s, void *arg, struct err *err)
{
    struct packed_course *c = arg;
    fill(s);
    fill_packed(s, c->packing);
    c->state_bytes = shard_state_bytes(s->shard);
    return train_on(s, &c->course, err);
}

/* On one rank, where nothing else differs, bit by bit. */
static void a_packed_base_trains_as_what_it_decodes_to(void **state)
{
    (void)state;
    static const struct {
        enum packing packing;
        bool sparse; /* attention, which takes kv_b head by head */
        struct layout_degrees degrees;
    } rows[] = {
        { PACKING_MXFP4, false, { 1, 1, 1, 0 } }, { PACKING_MXFP4, false, { 4, 2, 2, 2 } },
        { PACKING_FP8, false, { 1, 1, 1, 0 } },   { PACKING_FP8, true, { 1, 1, 1, 0 } },
        { PACKING_FP8, false, { 4, 2, 2, 2 } },
    };
    struct lora_config c = LORA(all, false);
    for (size_t i = 0; i < COUNT(rows); i++) {
        struct model_spec m = wide(rows[i].packing, rows[i].sparse);
        struct packed_course plain_one = { .packing = rows[i].packing };
        struct packed_course packed = { .packing = rows[i].packing, .course.moves_every = 1 };
        run_on(&m, &c, rows[i].degrees, 2, train_packed, &plain_one);
        run_on(&m, &c, rows[i].degrees, 2 | (rows[i].packing == PACKING_FP8 ? 128 : 8),
               train_packed, &packed);
        assert_true(packed.state_bytes < plain_one.state_bytes);
        if (rows[i].degrees.world == 1)
            assert_memory_equal(packed.course.losses, plain_one.course.losses,
                                sizeof packed.course.losses);
        for (size_t k = 0; k < N_STEPS; k++)
            if (!(fabs(packed.course.losses[k] / plain_one.course.losses[k] - 1) < 1e-5))
                fail_msg("row %zu step %zu: %.9g packed, %.9g plain", i, k,
                         packed.course.losses[k], plain_one.course.losses[k]);
    }
}

static void rows_that_are_no_groups_are_not_packed(void **state)
{
    (void)state;
    struct model_spec m = a_model();
    struct lora_config c = LORA(all, false);
    struct tensor_map map = map_of(&m, &c);
    struct err err = {0};
    uint64_t before = map.expert.frozen;
    assert_int_equal(tensor_map_pack(&map, PACKING_MXFP4, 4, &err), -EINVAL);
    assert_non_null(strstr(err.text, "in groups of 32 numbers, but those of "));
    assert_true(map.expert.frozen == before);
    assert_int_equal(tensor_map_pack(&map, PACKING_FP8, 4, &err), 0);
    assert_true(map.expert.frozen < before);
    tensor_map_fini(&map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adapters_are_named_as_peft_has_them),
        cmocka_unit_test(adapters_are_all_that_is_trained),
        cmocka_unit_test(a_target_that_fits_nothing_is_refused),
        cmocka_unit_test(adapters_of_indexers_are_trained_where_these_learn),
        cmocka_unit_test(names_of_adapters_are_read_back),
        cmocka_unit_test(every_gradient_agrees_with_finite_differences),
        cmocka_unit_test(gradients_of_indexers_agree_with_finite_differences),
        cmocka_unit_test(adapters_of_indexers_learn_beside_the_model),
        cmocka_unit_test(an_adapter_is_what_it_would_be_merged),
        cmocka_unit_test(every_layout_trains_the_same),
        cmocka_unit_test(moving_experts_changes_no_bit),
        cmocka_unit_test(a_packed_base_trains_as_what_it_decodes_to),
        cmocka_unit_test(rows_that_are_no_groups_are_not_packed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
