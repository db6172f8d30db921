/* model_runs.h - the models that test_model*.c run, and what one step of them gives */
#ifndef TESTS_MODEL_RUNS_H
#define TESTS_MODEL_RUNS_H

#include "tests/whole_model.h"

/* ---- models --------------------------------------------------------------------------------- */

/* KDA and latent attention, dense and sparse, a block boundary in the middle. */
static inline struct model_spec kimi(void)
{
    struct model_spec m = a_model();
    m.n_layers = 5;
    m.layers[3] = (struct layer_spec){ ATTENTION_KDA, MLP_MOE };
    m.layers[4] = (struct layer_spec){ ATTENTION_MLA, MLP_MOE };
    return m;
}

/* Every switch the other way. */
static inline struct model_spec plain(void)
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
static inline struct model_spec turned(void)
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
static inline struct model_spec indexed(struct model_spec m, uint32_t top_k)
{
    m.index_heads = 3;
    m.index_head_dim = 8;
    m.index_top_k = top_k;
    m.index_norm_eps = 1e-6f;
    return m;
}

/* A weight as a function of tensor and element alone, the same on every layout. Selection biases
 * are far apart, so that a small step never changes a choice. */
static inline float initial(const struct tensor_entry *e, uint64_t tensor, uint64_t i)
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

static inline bool is_of_indexer(const struct tensor_entry *e)
{
    return e->role >= ROLE_INDEX_Q && e->role <= ROLE_INDEX_WEIGHTS;
}

static inline void fill(const struct stack *s)
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

static inline void run_with(const struct model_spec *spec, struct layout_degrees degrees,
                            enum recompute recompute, enum index_stage stage,
                            struct moe_rules rules, stack_fn body, void *arg)
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

static inline void run_stage(const struct model_spec *spec, struct layout_degrees degrees,
                             enum recompute recompute, enum index_stage stage, stack_fn body,
                             void *arg)
{
    run_with(spec, degrees, recompute, stage, (struct moe_rules){0}, body, arg);
}

static inline void run_on(const struct model_spec *spec, struct layout_degrees degrees,
                          enum recompute recompute, stack_fn body, void *arg)
{
    run_stage(spec, degrees, recompute, INDEX_FROZEN, body, arg);
}

/* ---- runs ----------------------------------------------------------------------------------- */

static inline int check_gradients(struct stack *s, void *arg, struct err *err)
{
    const struct tensor_map *map = s->config->map;
    struct documents *d = documents((const int32_t[]){ 9, 1, 22 }, 3, 7);
    struct model_loss loss;
    int n_checked = 0;
    double step = 1;
    if (s->config->index_stage != INDEX_FROZEN)
        step /= 30; /* a small loss, with a kink where a score is 0 */
    if (s->config->rules.aux_loss > 0 || s->config->rules.capacity_factor > 0)
        step /= 20; /* steps where a token's choice changes */

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
        rc = check_tensor(s, &d->batch, &map->entries[t], gradient, step, err);
        free(gradient);
        n_checked += rc;
    }
    free(d);
    if (rc < 0)
        return rc;
    *(int *)arg = n_checked;
    return 0;
}

struct snapshot {
    double loss;
    float *gradients; /* all tensors one after another */
    int64_t *tokens;
    size_t activations; /* bytes */
};

static inline uint64_t total_count(const struct tensor_map *map)
{
    uint64_t n = 0;
    for (size_t t = 0; t < map->n_entries; t++)
        n += map->entries[t].count;
    return n;
}

/* Owners of all ranks fill their slices side by side. */
static inline void collect(const struct stack *s, float *out)
{
    const struct tensor_map *map = s->config->map;
    struct shard_part part;
    for (size_t t = 0; t < map->n_entries; out += map->entries[t++].count)
        if (shard_part(s->shard, &map->entries[t], &part) && part.is_first && part.gradients)
            memcpy(out + part.first, part.gradients, part.count * sizeof *out);
}

static inline struct snapshot *snapshot_on(const struct model_spec *spec,
                                           struct layout_degrees degrees, enum recompute recompute,
                                           stack_fn body)
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

static inline struct snapshot *snapshot_of(const struct model_spec *spec, enum recompute recompute,
                                           stack_fn body)
{
    return snapshot_on(spec, alone, recompute, body);
}

static inline void snapshot_free(struct snapshot *x)
{
    free(x->gradients);
    free(x->tokens);
    free(x);
}

static inline int one_step(struct stack *s, void *arg, struct err *err)
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

#endif
