/* test_memory_model.c - the plan of memory beside what a rank really takes
 *
 * Bodies run on the ranks' threads, where cmocka cannot fail: they return an error with a line. */
#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "common/lora_map.h"
#include "common/memory_model.h"
#include "tests/skewed.h"
#include "worker/ckpt.h"
#include "worker/stack.h"

#define TOLERANCE 0.05 /* of each part */
#define N_TOKENS  256  /* of a document */
#define DOCS_MAX  8
#define CUT_MAX   8    /* lengths in turn */

static struct model_spec kimi(void)
{
    return (struct model_spec){
        .family = FAMILY_KIMI_K3, .n_layers = 6,
        .layers = {{ATTENTION_KDA, MLP_DENSE}, {ATTENTION_KDA, MLP_MOE}, {ATTENTION_KDA, MLP_MOE},
                   {ATTENTION_MLA, MLP_MOE}, {ATTENTION_KDA, MLP_MOE}, {ATTENTION_MLA, MLP_MOE}},
        .residual = RESIDUAL_ATTN_RES, .attn_res_block = 2, .hidden = 128, .vocab = 512,
        .norm_eps = 1e-5f, .latent_norm_eps = 1e-6f, .init_std = 0.02f, .kda_heads = 4,
        .kda_head_dim = 32, .conv_kernel = 4, .kda_gate_bounded = true,
        .kda_gate_lower_bound = -5, .kda_gate_full_rank = true, .heads = 4, .q_lora_rank = 64,
        .kv_lora_rank = 32, .qk_nope_dim = 32, .qk_rope_dim = 16, .v_dim = 32,
        .mla_output_gate = true, .activation = ACTIVATION_SITU, .situ_beta = 4,
        .situ_linear_beta = 25, .dense_inter = 384, .n_experts = 16, .top_k = 4,
        .expert_inter = 64, .n_shared_experts = 2, .latent = 64, .latent_moe = true,
        .latent_norm = true, .renormalize = true, .routed_scale = 1,
    };
}

static const char *const targets[] = {"q_b_proj", "o_proj", "kv_b_proj",
                                      "experts",  "gate",   "lm_head"};
static const struct lora_config adapters = {8, 16, false, targets, 6};

static const struct row {
    const char *shows;
    struct layout_degrees degrees;
    enum recompute recompute;
    bool count_margins;
    uint32_t n_spare;
    const struct lora_config *lora;
    enum packing packing;
    bool muon, is_blocking;
    uint32_t n_nodes;
    uint32_t n_docs;     /* 0: one */
    uint32_t doc_tokens; /* of each; 0: N_TOKENS */
    bool to_the_first;   /* all tokens choose the first experts */
    bool cut_otherwise;  /* later steps have other documents */
    bool deterministic;
    uint32_t segment_tokens; /* then there is an indexer */
    enum aux_scope aux_scope;
    float aux_loss;
} rows[] = {
    {"one rank", {1, 1, 1, 1}, RECOMPUTE_OFF, .cut_otherwise = true},
    {"one rank, layers computed again", {1, 1, 1, 1}, RECOMPUTE_FULL, true},
    {"one rank, some made again", {1, 1, 1, 1}, RECOMPUTE_SELECTIVE, false},
    {"all cut", {4, 4, 4, 1}, RECOMPUTE_OFF, false},
    {"all cut, some made again", {4, 4, 4, 1}, RECOMPUTE_SELECTIVE, .cut_otherwise = true},
    {"halves and replicas", {4, 2, 2, 1}, RECOMPUTE_FULL, false},
    {"experts cut again", {4, 2, 2, 2}, RECOMPUTE_OFF, true},
    {"the same, one unit after another", {4, 2, 2, 2}, RECOMPUTE_OFF, .is_blocking = true},
    {"all cut, over two nodes", {4, 4, 4, 1}, RECOMPUTE_OFF, .n_nodes = 2},
    {"eight over two nodes", {8, 8, 8, 1}, RECOMPUTE_FULL, .n_nodes = 2},
    {"a node each", {4, 4, 4, 1}, RECOMPUTE_OFF, .n_nodes = 4},
    {"all cut, computed again", {4, 4, 1, 4}, RECOMPUTE_FULL, false},
    {"room for copies of experts", {4, 2, 2, 2}, RECOMPUTE_OFF, false, 3},
    {"adapters", {1, 1, 1, 1}, RECOMPUTE_FULL, false, 0, &adapters},
    {"adapters, all cut", {4, 4, 2, 2}, RECOMPUTE_OFF, false, 1, &adapters},
    {"adapters, experts as MXFP4", {2, 2, 2, 1}, RECOMPUTE_OFF, false, 0, &adapters,
     PACKING_MXFP4},
    {"adapters, experts as FP8", {2, 2, 2, 1}, RECOMPUTE_OFF, false, 0, &adapters, PACKING_FP8},
    {"adapters, experts as FP8, all cut", {4, 4, 2, 2}, RECOMPUTE_OFF, false, 1, &adapters,
     PACKING_FP8},
    {"adapters, one unit after another", {4, 4, 2, 2}, RECOMPUTE_OFF, .lora = &adapters,
     .is_blocking = true},
    {"in chunks", {2, 2, 2, 1}, RECOMPUTE_OFF, .n_docs = 8},
    {"in chunks, all on one rank, computed again", {2, 2, 2, 1}, RECOMPUTE_FULL, .n_docs = 8,
     .to_the_first = true},
    {"the same, some made again", {2, 2, 2, 1}, RECOMPUTE_SELECTIVE, .n_docs = 8,
     .to_the_first = true},
    {"the same, over two nodes", {4, 4, 4, 1}, RECOMPUTE_SELECTIVE, .n_docs = 8, .n_nodes = 2,
     .to_the_first = true},
    {"the same, bits in one order", {2, 2, 2, 1}, RECOMPUTE_FULL, .n_docs = 8,
     .to_the_first = true, .deterministic = true},
    {"all on one rank, adapters", {4, 4, 4, 1}, RECOMPUTE_SELECTIVE, .lora = &adapters,
     .to_the_first = true},
    {"all on one rank, nothing made again", {2, 2, 2, 1}, RECOMPUTE_OFF, .n_docs = 8,
     .to_the_first = true},
    {"in segments", {1, 1, 1, 1}, RECOMPUTE_FULL, .segment_tokens = 128, .cut_otherwise = true},
    {"in segments, all cut", {4, 4, 2, 2}, RECOMPUTE_FULL, .segment_tokens = 64},
    {"sequences of one token", {1, 1, 1, 1}, RECOMPUTE_OFF, .n_docs = 8, .doc_tokens = 1},
    {"of 7", {2, 2, 2, 1}, RECOMPUTE_SELECTIVE, .n_docs = 8, .doc_tokens = 7},
    {"of 16", {1, 1, 1, 1}, RECOMPUTE_OFF, .n_docs = 8, .doc_tokens = 16, .lora = &adapters,
     .cut_otherwise = true},
    {"of 48", {1, 1, 1, 1}, RECOMPUTE_OFF, .n_docs = 8, .doc_tokens = 48},
    {"of 63", {4, 2, 2, 2}, RECOMPUTE_FULL, .n_docs = 2, .doc_tokens = 63},
    {"of 65", {1, 1, 1, 1}, RECOMPUTE_OFF, .n_docs = 3, .doc_tokens = 65},
    {"a loss of each document", {1, 1, 1, 1}, RECOMPUTE_SELECTIVE, .aux_loss = 0.01f,
     .aux_scope = AUX_SEQUENCE, .cut_otherwise = true},
    {"Muon", {1, 1, 1, 1}, RECOMPUTE_FULL, .muon = true},
    {"Muon, all cut", {4, 4, 2, 2}, RECOMPUTE_FULL, .muon = true},
    {"Muon and adapters", {2, 2, 2, 1}, RECOMPUTE_FULL, .lora = &adapters, .muon = true},
};

static int near(const char *shows, const char *part, double planned, double real, struct err *err)
{
    printf("%s: %s planned %.0f KiB, real %.0f KiB\n", shows, part, planned / 1024, real / 1024);
    if (planned < real * (1 - TOLERANCE) || planned > real * (1 + TOLERANCE))
        return err_set(err, -EBADMSG, "%s: %s planned %.0f bytes, real %.0f", shows, part, planned,
                       real);
    return 0;
}

static uint32_t n_docs(const struct row *row)
{
    return row->n_docs ? row->n_docs : 1;
}

static uint32_t doc_tokens(const struct row *row)
{
    return row->doc_tokens ? row->doc_tokens : N_TOKENS;
}

/* How a pass's tokens may be cut in documents: lengths in turn; 0: all that are left. */
static const struct cut {
    const char *shows;
    int32_t     lengths[CUT_MAX];
} cuts[] = {
    {"one document", {0}},
    {"of 5 to 20", {5, 17, 20, 9, 12, 6, 14, 11}},
    {"of all lengths", {1, 70, 16, 128, 3, 64, 65, 2}},
    {"each token", {1, 1, 1, 1, 1, 1, 1, 1}},
};

static int32_t cut(const struct cut *c, int32_t n_tokens, int32_t *out_cu_seqlens)
{
    int32_t n_docs = 0;
    for (int32_t at = 0; at < n_tokens; n_docs++) {
        int32_t n = c->lengths[n_docs % CUT_MAX];
        at = n == 0 || n > n_tokens - at ? n_tokens : at + n;
        out_cu_seqlens[n_docs + 1] = at;
    }
    return n_docs;
}

static uint64_t count_allocs(const struct stack *s)
{
    struct device_memory m;
    s->dev->ops->memory(s->dev, &m);
    return m.n_allocs;
}

/* Later steps take what the first has taken, however their documents are cut. */
static int step_otherwise(struct stack *s, const struct row *row, struct model_batch *batch,
                          struct err *err)
{
    static _Thread_local int32_t cu_seqlens[DOCS_MAX * N_TOKENS + 1];
    uint64_t n_allocs = count_allocs(s);
    size_t n_bytes = model_activation_bytes(s->model);
    struct model_loss loss;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < sizeof cuts / sizeof *cuts; i++) {
        batch->n_docs = cut(&cuts[i], (int32_t)batch->n_tokens, cu_seqlens);
        batch->cu_seqlens = cu_seqlens;
        rc = model_step(s->model, batch, true, &loss, err);
        if (rc == 0 && (count_allocs(s) != n_allocs || model_activation_bytes(s->model) != n_bytes))
            rc = err_set(err, -EBADMSG, "%s: documents cut otherwise, %s, take more: %" PRIu64
                         " allocations, not %" PRIu64, row->shows, cuts[i].shows, count_allocs(s),
                         n_allocs);
    }
    return rc;
}

/* Steps, so that every buffer has been taken; then the parts of rank 0, which has the first
 * experts. */
static int compare(struct stack *s, void *arg, struct err *err)
{
    const struct row *row = arg;
    const struct tensor_map *map = s->config->map;
    uint64_t dense = 0;
    for (uint32_t u = 0; row->lora && u < map->n_units; u++)
        dense += map->units[u].trained;
    struct memory_plan plan = memory_model(&(struct memory_input){
        .spec = s->config->spec, .degrees = row->degrees, .elem_bytes = 4,
        .n_tokens = n_docs(row) * doc_tokens(row), .has_sequence_loss = row->aux_loss > 0,
        .dense_adapters = dense, .expert_adapters = row->lora ? map->expert.trained : 0,
        .packing = row->packing, .map = map, .has_muon = row->muon,
        .lora_rank = row->lora ? row->lora->r : 0,
        .segment_tokens = row->segment_tokens, .recompute = row->recompute,
        .count_margins = row->count_margins,
        .n_spare = row->n_spare, .is_blocking = row->is_blocking, .n_nodes = row->n_nodes});
    int32_t tokens[DOCS_MAX * N_TOKENS], cu_seqlens[DOCS_MAX + 1] = {0};
    int32_t n_tokens = (int32_t)(n_docs(row) * doc_tokens(row));
    struct model_loss loss;
    double state = (double)(plan.weights + plan.gradients + plan.optimizer);
    int rc;

    if ((rc = near(row->shows, "state", state, (double)shard_state_bytes(s->shard), err)) < 0)
        return rc;
    for (int i = 0; i < n_tokens; i++)
        tokens[i] = (i * i * 79 + i * 31 + (int)s->rank * 97) % 512;
    for (uint32_t i = 1; i <= n_docs(row); i++)
        cu_seqlens[i] = (int32_t)(i * doc_tokens(row));
    ckpt_init_weights(s->shard, s->config->map, s->config->spec, 1); /* else all rows go one way */
    if (row->to_the_first)
        prefer_the_first(s);
    if ((rc = shard_refresh_all(s->shard, err)) < 0)
        return rc;
    struct model_batch batch = {tokens, tokens, cu_seqlens, n_tokens, (int32_t)n_docs(row)};
    if ((rc = model_step(s->model, &batch, true, &loss, err)) < 0 ||
        (row->cut_otherwise && (rc = step_otherwise(s, row, &batch, err)) < 0) ||
        (rc = shard_sum_replicas(s->shard, err)) < 0 || /* ends what the step has begun */
        (rc = s->coll->ops->barrier(s->coll, &s->coll->world_group, err)) < 0 || s->rank)
        return rc;
    double activations = (double)model_activation_bytes(s->model);
    double gathered = (double)shard_buffer_bytes(s->shard);
    if (!row->muon && (plan.gathered > 0 || gathered > 0) && /* Muon's are of its step */
        (rc = near(row->shows, "gathered", (double)plan.gathered, gathered, err)) < 0)
        return rc;
    if ((rc = near(row->shows, "dispatch", (double)plan.dispatch,
                   (double)dispatch_bytes(s->dispatch), err)) < 0)
        return rc;
    return near(row->shows, "activations", (double)plan.activations, activations, err);
}

static void the_plan_is_near_what_is_taken(void **state)
{
    (void)state;
    struct err err = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct row row = rows[i];
        struct model_spec spec = kimi();
        struct tensor_map map;
        if (row.segment_tokens) {
            spec.index_heads = 2;
            spec.index_head_dim = 16;
            spec.index_top_k = 24;
            spec.index_norm_eps = 1e-6f;
        }
        assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
        assert_true(!row.lora || lora_map_add(&map, row.lora, &err) == 0);
        assert_int_equal(tensor_map_pack(&map, row.packing, sizeof(float), &err), 0);
        map.has_muon = row.muon;
        struct stack_config config = {
            .spec = &spec, .map = &map, .lora = row.lora, .degrees = row.degrees,
            .tokens_max = n_docs(&row) * doc_tokens(&row), .deterministic = row.deterministic,
            .segment_rows = row.segment_tokens, .recompute = row.recompute,
            .count_margins = row.count_margins,
            .n_spare = row.n_spare, .is_blocking = row.is_blocking, .n_nodes = row.n_nodes,
            .hierarchical = row.n_nodes > 0,
            .rules = {.aux_loss = row.aux_loss, .aux_scope = row.aux_scope},
        };
        if (stack_run(&config, compare, &row, &err) < 0)
            fail_msg("%s", err.text);
        tensor_map_fini(&map);
    }
}

/* Weights are all that a frozen base has: what is beside them is the adapters'. */
static void a_frozen_base_has_no_gradients_and_no_moments(void **state)
{
    (void)state;
    struct model_spec spec = kimi();
    struct memory_input in = {.spec = &spec, .degrees = {1, 1, 1, 1}, .n_tokens = 1024,
                              .elem_bytes = 2, .dense_adapters = 5000, .expert_adapters = 64};
    uint64_t n = 5000 + 64 * 5 * 16, total = model_spec_count(&spec).total;
    struct memory_plan plan = memory_model(&in);
    assert_true(plan.gradients == 4 * n && plan.optimizer == 8 * n);
    assert_true(plan.weights == 2 * (total + n) + 4 * n); /* and the adapters' masters */
}

static void more_ranks_and_recomputation_need_less(void **state)
{
    (void)state;
    struct model_spec spec = kimi();
    struct memory_input in = {.spec = &spec, .degrees = {4, 1, 1, 4}, .n_tokens = 1024,
                              .elem_bytes = 4};
    struct memory_plan whole = memory_model(&in);
    in.degrees = (struct layout_degrees){4, 4, 4, 1};
    struct memory_plan cut = memory_model(&in);
    in.recompute = RECOMPUTE_FULL;
    struct memory_plan again = memory_model(&in);
    assert_true(cut.weights < whole.weights && cut.optimizer == 2 * cut.weights);
    assert_true(again.activations < cut.activations / 2);
    in.elem_bytes = 2;
    struct memory_plan halves = memory_model(&in);
    assert_true(halves.weights * 2 == again.weights * 3 && halves.gradients == again.gradients &&
                halves.optimizer == again.optimizer); /* a float32 master and 2 bytes, not 4 */
    assert_true(halves.activations < again.activations && halves.activations * 3 >
                                                              again.activations);
    in.dense_adapters = 4096;
    struct memory_plan frozen = memory_model(&in);
    assert_true(frozen.weights < halves.weights / 2 && frozen.gradients == 4 * 1024 &&
                frozen.optimizer == 2 * frozen.gradients);
    assert_true(again.total == again.weights + again.gradients + again.optimizer +
                again.activations + again.buffers);
}

/* Sparse attention takes about a GiB for its queries, and more where there are many keys. */
static void a_gpu_has_scratch_for_sparse_attention(void **state)
{
    (void)state;
    struct model_spec spec = kimi();
    spec.kv_lora_rank = 512;
    spec.qk_rope_dim = 64;
    spec.heads = 64;
    struct memory_input in = {.spec = &spec, .degrees = {1, 1, 1, 1}, .n_tokens = 65536,
                              .elem_bytes = 2, .on_gpu = true, .recompute = RECOMPUTE_FULL};
    uint64_t dense = memory_model(&in).scratch, GiB = 1ull << 30;
    spec.index_top_k = 2048;
    uint64_t sparse = memory_model(&in).scratch;
    assert_true(sparse > dense && sparse > GiB && sparse < 3 * GiB / 2);
    in.n_tokens = 1 << 20;
    assert_true(memory_model(&in).scratch > sparse + GiB);
    in.n_tokens = 64; /* of which each sees at most 64 */
    assert_true(memory_model(&in).scratch < GiB / 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_plan_is_near_what_is_taken),
        cmocka_unit_test(a_frozen_base_has_no_gradients_and_no_moments),
        cmocka_unit_test(more_ranks_and_recomputation_need_less),
        cmocka_unit_test(a_gpu_has_scratch_for_sparse_attention),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
