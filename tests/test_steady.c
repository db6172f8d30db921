/* test_steady.c - after its first step a run takes no more memory, whatever its steps are made of
 *
 * Tokens, and with them the routing, and documents differ from step to step; the number of tokens
 * stays. Between steps there are validations and checkpoints. Bodies run on the ranks' threads,
 * where cmocka cannot fail: they return an error. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/lora_map.h"
#include "worker/ckpt.h"
#include "worker/optim.h"
#include "worker/stack.h"
#include "worker/usage.h"
#include "tests/a_model.h"
#include "tests/skewed.h"
#include "tests/folder.h"

#define N_TOKENS 48
#define N_STEPS  4

static const char *const targets[] = {"q_b_proj", "o_proj", "experts", "gate", "lm_head"};
static const struct lora_config adapters = {4, 8, false, targets, 5};

static const struct row {
    const char *shows;
    struct layout_degrees degrees;
    enum recompute recompute;
    bool is_blocking, hierarchical, muon;
    const struct lora_config *lora;
    uint32_t n_chunks;
    struct moe_rules rules;
    enum bias_rule bias;
    bool saves; /* checkpoints after the second and the third step */
    bool becomes_skewed; /* from the third step on all tokens choose the first experts */
    bool one_sparse; /* of the layers, and one micro-batch a step */
} rows[] = {
    {"one rank", {1, 1, 1, 1}, RECOMPUTE_OFF},
    {"one rank, some made again", {1, 1, 1, 1}, RECOMPUTE_SELECTIVE, .bias = BIAS_QUANTILE},
    {"all cut", {4, 4, 4, 1}, RECOMPUTE_OFF, .bias = BIAS_SIGN, .saves = true},
    {"all cut, computed again", {4, 4, 4, 1}, RECOMPUTE_FULL, .bias = BIAS_QUANTILE},
    {"all cut, some made again", {4, 4, 4, 1}, RECOMPUTE_SELECTIVE},
    {"one unit after another", {4, 2, 2, 2}, RECOMPUTE_OFF, .is_blocking = true},
    {"the same, computed again", {4, 2, 2, 2}, RECOMPUTE_FULL, .is_blocking = true, .saves = true},
    {"in chunks across two nodes", {4, 2, 4, 1}, RECOMPUTE_OFF, .hierarchical = true,
     .n_chunks = 3},
    {"one sparse layer", {4, 2, 4, 1}, RECOMPUTE_OFF, .one_sparse = true},
    {"the same, one chunk after another", {4, 2, 4, 1}, RECOMPUTE_FULL, .is_blocking = true,
     .n_chunks = 3, .one_sparse = true},
    {"the same, across two nodes", {4, 2, 4, 1}, RECOMPUTE_OFF, .hierarchical = true,
     .one_sparse = true},
    {"capacity", {4, 2, 4, 1}, RECOMPUTE_FULL, .rules = {.capacity_factor = 1},
     .bias = BIAS_SIGN, .saves = true},
    {"capacity and another expert", {4, 2, 2, 2}, RECOMPUTE_SELECTIVE,
     .rules = {.capacity_factor = 0.75, .overflow = OVERFLOW_REROUTE}},
    {"all tokens to two experts at once", {4, 4, 4, 1}, RECOMPUTE_OFF, .becomes_skewed = true},
    {"the same, some made again", {4, 2, 4, 1}, RECOMPUTE_SELECTIVE, .n_chunks = 3,
     .becomes_skewed = true},
    {"the same, computed again", {4, 2, 4, 1}, RECOMPUTE_FULL, .hierarchical = true,
     .becomes_skewed = true},
    {"the same, on one rank", {1, 1, 1, 1}, RECOMPUTE_OFF, .becomes_skewed = true},
    {"losses of the routers", {4, 4, 2, 1}, RECOMPUTE_OFF,
     .rules = {.aux_loss = 1e-2f, .z_loss = 1e-3f, .aux_scope = AUX_SEQUENCE}},
    {"Muon", {1, 1, 1, 1}, RECOMPUTE_OFF, .muon = true},
    {"Muon, all cut", {4, 4, 2, 2}, RECOMPUTE_FULL, .muon = true, .saves = true},
    {"Muon, one unit after another", {4, 2, 2, 1}, RECOMPUTE_OFF, .is_blocking = true,
     .muon = true},
    {"adapters", {1, 1, 1, 1}, RECOMPUTE_FULL, .lora = &adapters, .saves = true},
    {"adapters, all cut", {4, 4, 2, 2}, RECOMPUTE_OFF, .lora = &adapters, .saves = true},
    {"adapters and Muon, one unit after another", {4, 2, 4, 1}, RECOMPUTE_SELECTIVE,
     .is_blocking = true, .muon = true, .lora = &adapters},
};

static int skew(struct stack *s, struct err *err)
{
    prefer_the_first(s);
    return shard_refresh_all(s->shard, err);
}

static int model_of(struct stack *s, int step, bool backward, struct err *err)
{
    static const int32_t docs[] = {3, 5, 1, N_TOKENS}; /* the shortest come late */
    int32_t n_docs = docs[step % 8 / 2], tokens[N_TOKENS], cu_seqlens[N_TOKENS + 1];
    struct model_batch batch = {tokens, tokens, cu_seqlens, N_TOKENS, n_docs};
    struct model_loss loss;
    for (int i = 0; i < N_TOKENS; i++)
        tokens[i] = (i * i * 7 + i * (31 + step) + step * 17 + (int)s->rank * 13) % 64;
    for (int i = 0; i <= n_docs; i++)
        cu_seqlens[i] = i * N_TOKENS / n_docs;
    return model_step(s->model, &batch, backward, &loss, err);
}

static int update(struct stack *s, const struct row *row, int step, struct err *err)
{
    struct optim_config optim = {
        .kind = row->muon ? OPTIM_MUON : OPTIM_ADAMW, .momentum = 0.9, .beta1 = 0.9, .beta2 = 0.99,
        .eps = 1e-8, .clip_grad_norm = 1,
    };
    const struct stack_config *c = s->config;
    double n = N_TOKENS * c->degrees.world, norm;
    int rc;
    if ((rc = optim_norm(s->shard, c->map, s->coll, s->dev, n, &norm, err)) < 0)
        return rc;
    optim_step(s->shard, c->map, s->dev, &optim, (uint64_t)step, 1e-2, n, norm);
    if ((rc = optim_muon(s->shard, c->map, c->spec, &optim, 1e-2, n, norm, err)) < 0 ||
        (rc = optim_balance(s->shard, c->map, c->spec, s->coll, s->dev, model_counters(s->model),
                            row->bias, 1e-2, err)) < 0)
        return rc;
    return row->muon ? shard_refresh(s->shard, err) : shard_refresh_copies(s->shard, err);
}

static int train(struct stack *s, const struct row *row, int step, struct err *err)
{
    int rc;
    model_counters_reset(s->model);
    for (int micro = 0; micro < (row->one_sparse ? 1 : 2); micro++)
        if ((rc = model_of(s, 2 * step + micro, true, err)) < 0)
            return rc;
    if ((rc = update(s, row, step, err)) < 0)
        return rc;
    shard_zero_gradients(s->shard);
    return 0;
}

static int has_taken(struct stack *s, const char *what, int step, uint64_t n_allowed,
                     uint64_t *n_allocs, struct err *err)
{
    struct usage usage = {0};
    usage_look(&usage, s->dev, s->coll);
    uint64_t before = *n_allocs;
    *n_allocs = usage.n_allocs;
    return before == 0 || usage.n_allocs <= before + n_allowed
               ? 0
               : err_set(err, -EBADMSG, "%s %d took memory %llu times", what, step,
                         (unsigned long long)(usage.n_allocs - before));
}

static int run(struct stack *s, void *arg, struct err *err)
{
    const struct row *row = arg;
    const struct stack_config *c = s->config;
    struct ckpt_config ckpt = {.path = folder, .model_path = folder, .keep = 1, .spec = c->spec,
                               .map = c->map, .lora = c->lora, .shard = s->shard, .coll = s->coll};
    uint64_t n_allocs = 0, n_first;
    int rc;
    ckpt_init_weights(s->shard, c->map, c->spec, 1);
    if (row->lora)
        ckpt_init_adapters(s->shard, c->map, 1);
    if ((rc = shard_refresh_all(s->shard, err)) < 0)
        return rc;
    for (int step = 1; step <= N_STEPS; step++) {
        struct ckpt_state state = {.step = (uint64_t)step, .seed = 1};
        if ((step == 3 && row->becomes_skewed && (rc = skew(s, err)) < 0) ||
            (rc = train(s, row, step, err)) < 0 ||
            (rc = has_taken(s, "step", step, 0, &n_allocs, err)) < 0)
            return rc;
        if (step % 2 == 0 && ((rc = model_of(s, 99 + step, false, err)) < 0 ||
                              (rc = has_taken(s, "validation", step, 0, &n_allocs, err)) < 0))
            return rc;
        bool saves = row->saves && (step == 2 || step == 3);
        if (saves && (rc = ckpt_save(&ckpt, &state, err)) < 0)
            return rc;
        n_first = saves && step == 2 ? 1 : 0; /* room for the message of its sums */
        if ((rc = has_taken(s, "checkpoint", step, n_first, &n_allocs, err)) < 0)
            return rc;
    }
    return 0;
}

static void a_step_takes_no_memory(void **state)
{
    (void)state;
    char *config_path = xasprintf("%s/config.json", folder);
    FILE *f = fopen(config_path, "w");
    assert_true(f && fputs("{}\n", f) >= 0 && fclose(f) == 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct row r = rows[i], *row = &r;
        struct model_spec spec = a_model();
        struct tensor_map map;
        struct err err = {0};
        if (row->one_sparse)
            spec.layers[2].mlp = MLP_DENSE;
        assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
        assert_true(!row->lora || lora_map_add(&map, row->lora, &err) == 0);
        map.has_muon = row->muon;
        struct stack_config config = {
            .spec = &spec, .map = &map, .lora = row->lora, .degrees = row->degrees,
            .tokens_max = N_TOKENS, .recompute = row->recompute, .is_blocking = row->is_blocking,
            .hierarchical = row->hierarchical, .n_nodes = row->hierarchical ? 2 : 0,
            .n_chunks = row->n_chunks, .rules = row->rules,
            .count_margins = row->bias == BIAS_QUANTILE,
        };
        if (stack_run(&config, run, row, &err) < 0)
            fail_msg("%s: %s", row->shows, err.text);
        tensor_map_fini(&map);
        char *command = xasprintf("rm -rf %s/step-*", folder);
        assert_int_equal(system(command), 0);
        free(command);
    }
    free(config_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_step_takes_no_memory)};
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
