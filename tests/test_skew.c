/* test_skew.c - routing at its worst trains the same, in the memory that was planned
 *
 * Each row runs on several ranks and on one, over the same documents; loss and gradient norm must
 * agree. On several ranks tokens go one chunk after another, overlapped, and by way of few ranks of
 * each node, which must not change a bit; nor must what is made again; nor, where bits have one
 * order, who serves an expert. Bodies run on the ranks' threads, where cmocka cannot fail: they
 * return an error. */
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

#include "common/memory_model.h"
#include "tests/skewed.h"
#include "worker/ckpt.h"
#include "worker/optim.h"
#include "worker/shuffle.h"
#include "worker/stack.h"
#include "worker/transfer.h"
#include "worker/usage.h"

#define DOCS_MAX   64
#define TOKENS_MAX 32 /* of a document */
#define TOLERANCE  1e-4

static struct model_spec model(uint32_t n_experts, uint32_t top_k)
{
    return (struct model_spec){
        .family = FAMILY_KIMI_K3, .n_layers = 3,
        .layers = {{ATTENTION_KDA, MLP_DENSE}, {ATTENTION_MLA, MLP_MOE}, {ATTENTION_KDA, MLP_MOE}},
        .residual = RESIDUAL_ATTN_RES, .attn_res_block = 2, .hidden = 32, .vocab = 64,
        .norm_eps = 1e-5f, .latent_norm_eps = 1e-6f, .init_std = 0.1f, .kda_heads = 2,
        .kda_head_dim = 16, .conv_kernel = 4, .kda_gate_bounded = true,
        .kda_gate_lower_bound = -5, .kda_gate_full_rank = true, .heads = 2, .q_lora_rank = 16,
        .kv_lora_rank = 16, .qk_nope_dim = 8, .qk_rope_dim = 8, .v_dim = 8,
        .mla_output_gate = true, .activation = ACTIVATION_SITU, .situ_beta = 4,
        .situ_linear_beta = 25, .dense_inter = 32, .n_experts = n_experts, .top_k = top_k,
        .expert_inter = 16, .n_shared_experts = 1, .latent = 16, .latent_moe = true,
        .latent_norm = true, .renormalize = true, .routed_scale = 1,
    };
}

static const struct row {
    const char *shows;
    struct layout_degrees degrees;
    uint32_t n_experts, top_k;
    bool     to_the_first; /* all tokens choose the first experts */
    enum recompute recompute;
    int32_t  n_empty;  /* of the ranks, from rank 1 on: those have no tokens; negative: the last */
    int32_t  n_tokens; /* of the others */
    double   capacity; /* 0: none. A rank's micro-batch is its unit: none on one rank alone */
    enum overflow_kind overflow;
    bool     deterministic;
} rows[] = {
    {"all tokens on one expert", {4, 4, 4, 1}, 8, 1, true, RECOMPUTE_OFF, 0, 32},
    {"the same, layers computed again", {4, 4, 4, 1}, 8, 1, true, RECOMPUTE_FULL, 0, 32},
    {"the same, some of them", {4, 4, 4, 1}, 8, 1, true, RECOMPUTE_SELECTIVE, 0, 32},
    {"all tokens on two experts of a rank", {4, 1, 4, 1}, 8, 2, true, RECOMPUTE_OFF, 0, 31},
    {"one expert, cut over two ranks", {4, 2, 2, 2}, 8, 1, true, RECOMPUTE_FULL, 0, 32},
    {"the same, some made again", {4, 2, 2, 2}, 8, 1, true, RECOMPUTE_SELECTIVE, 0, 32},
    {"one expert, and nothing for those who share it", {4, 2, 2, 2}, 8, 1, true,
     RECOMPUTE_SELECTIVE, -2, 32},
    {"the same, layers computed again", {4, 2, 2, 2}, 8, 1, true, RECOMPUTE_FULL, -2, 32},
    {"one expert, with replicas", {4, 2, 2, 1}, 8, 1, true, RECOMPUTE_OFF, 0, 17},
    {"only one rank has tokens", {4, 4, 4, 1}, 8, 2, false, RECOMPUTE_OFF, 3, 32},
    {"and all on one expert", {4, 4, 4, 1}, 8, 1, true, RECOMPUTE_FULL, 3, 32},
    {"every expert is chosen", {4, 4, 4, 1}, 8, 8, false, RECOMPUTE_FULL, 1, 16},
    {"sequences of one token", {4, 2, 4, 1}, 8, 2, true, RECOMPUTE_OFF, 0, 1},
    {"capacity is hit everywhere", {4, 4, 4, 1}, 8, 2, true, RECOMPUTE_OFF, 1, 32, 0.5},
    {"the same, layers computed again", {4, 4, 4, 1}, 8, 2, true, RECOMPUTE_FULL, 1, 32, 0.5},
    {"and most of them", {4, 4, 4, 1}, 8, 2, true, RECOMPUTE_SELECTIVE, 1, 32, 0.5},
    {"and rerouted", {4, 2, 4, 1}, 8, 2, true, RECOMPUTE_OFF, 0, 31, 0.5, OVERFLOW_REROUTE},
    {"one expert, bits in one order", {4, 2, 4, 1}, 8, 1, true, RECOMPUTE_OFF, 1, 31,
     .deterministic = true},
    {"two experts, bits in one order", {4, 1, 4, 1}, 8, 2, true, RECOMPUTE_FULL, 0, 9,
     .deterministic = true},
    {"896 experts on 64 ranks", {64, 1, 64, 1}, 896, 8, false, RECOMPUTE_FULL, 1, 2},
    {"the same, all tokens on one rank", {64, 1, 64, 1}, 896, 8, true, RECOMPUTE_FULL, 0, 2},
};

struct outcome {
    double loss, norm;
};

/* How tokens travel. */
static const struct way {
    const char *shows;
    uint32_t n_chunks, n_nodes;
    bool     hierarchical, overlap;
} ways[] = {
    {"one chunk after another", 3, 2, false, false},
    {"overlapped", 3, 2, false, true},
    {"across two nodes", 3, 2, true, false},
    {"across two nodes, overlapped", 3, 2, true, true},
};

struct trial {
    const struct row *row;
    bool     alone; /* one rank has all documents */
    bool     is_moved; /* experts and copies lie anywhere */
    int      n_steps;
    struct outcome out;
};

static bool is_empty(const struct row *row, uint32_t rank)
{
    if (row->n_empty < 0)
        return rank >= row->degrees.world - (uint32_t)-row->n_empty;
    return rank > 0 && rank <= (uint32_t)row->n_empty;
}

static int move_experts(struct stack *s, struct err *err)
{
    struct transfer_result r = {0};
    struct transfer *t = NULL;
    struct slots to;
    slots_init_like(&to, &s->slots);
    slots_shuffle(&to, 3);
    int rc = transfer_create(s->shard, &s->slots, &to, NULL, &t, err);
    if (rc == 0)
        rc = transfer_run(t, &r, err);
    transfer_destroy(t);
    return rc;
}

static int run(struct stack *s, void *arg, struct err *err)
{
    struct trial *t = arg;
    const struct row *row = t->row;
    uint32_t first = t->alone ? 0 : s->rank, end = t->alone ? row->degrees.world : s->rank + 1;
    int32_t tokens[DOCS_MAX * TOKENS_MAX], cu_seqlens[DOCS_MAX + 1] = {0};
    struct model_batch batch = {tokens, tokens, NULL, 0, 0};
    struct usage usage = {0};
    struct model_loss loss;
    uint64_t n_allocs = 0;
    size_t bytes = 0;
    double sum, norm;
    int rc;

    for (uint32_t doc = first; doc < end; doc++) {
        if (is_empty(row, doc))
            continue;
        for (int32_t i = 0; i < row->n_tokens; i++)
            tokens[batch.n_tokens++] = (i * i * 7 + i * 31 + (int32_t)doc * 13) % 64;
        cu_seqlens[++batch.n_docs] = (int32_t)batch.n_tokens;
    }
    if (batch.n_docs)
        batch.cu_seqlens = cu_seqlens;
    ckpt_init_weights(s->shard, s->config->map, s->config->spec, 1);
    if (row->to_the_first)
        prefer_the_first(s);
    if ((rc = shard_refresh_all(s->shard, err)) < 0 ||
        (t->is_moved && (rc = move_experts(s, err)) < 0))
        return rc;
    for (int step = 0; step < t->n_steps; step++) {
        shard_zero_gradients(s->shard);
        if ((rc = model_step(s->model, &batch, true, &loss, err)) < 0 ||
            (rc = optim_norm(s->shard, s->config->map, s->coll, s->dev, 1, &norm, err)) < 0)
            return rc;
        usage_look(&usage, s->dev, s->coll);
        if (step > 0 && usage.n_allocs != n_allocs)
            return err_set(err, -EBADMSG, "step %d took memory %llu times", step,
                           (unsigned long long)(usage.n_allocs - n_allocs));
        if (step > 0 && model_activation_bytes(s->model) != bytes)
            return err_set(err, -EBADMSG, "step %d grew", step);
        struct memory_input in = {
            .spec = s->config->spec, .degrees = s->layout.degrees, .elem_bytes = sizeof(float),
            .n_tokens = (uint64_t)s->config->tokens_max,
            .recompute = row->recompute, .n_spare = s->config->n_spare,
        };
        /* Tensors of a few bytes begin on lines of their own. Of many short documents, as one rank
         * has them, each takes a chunk of the recurrence. */
        uint64_t planned = memory_activations(&in) * 5 / 4 + (1 << 20);
        if (!t->alone && model_activation_bytes(s->model) > planned)
            return err_set(err, -EBADMSG, "activations took %zu bytes, planned %llu",
                           model_activation_bytes(s->model), (unsigned long long)planned);
        n_allocs = usage.n_allocs;
        bytes = model_activation_bytes(s->model);
    }
    sum = loss.sum;
    rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_SUM, &sum, 1, err);
    if (s->rank == 0)
        t->out = (struct outcome){sum, norm};
    return rc;
}

/* way NULL: as dispatch chooses. n_spare: slots for copies, with experts and copies anywhere. */
static struct outcome run_moved(const struct row *row, bool alone, const struct way *way,
                                uint32_t n_spare)
{
    struct model_spec spec = model(row->n_experts, row->top_k);
    struct tensor_map map;
    struct err err = {0};
    struct trial t = {.row = row, .alone = alone, .is_moved = n_spare > 0,
                      .n_steps = way ? 2 : 3};
    assert_int_equal(tensor_map_init(&spec, &map, &err), 0);
    struct stack_config config = {
        .spec = &spec, .map = &map, .recompute = row->recompute,
        .degrees = alone ? (struct layout_degrees){1, 1, 1, 1} : row->degrees,
        .tokens_max = row->n_tokens * (alone ? (int64_t)row->degrees.world : 1),
        .deterministic = row->deterministic, .n_spare = n_spare,
        .rules = {.capacity_factor = row->capacity, .overflow = row->overflow},
    };
    if (way) {
        config.n_chunks = way->n_chunks;
        config.n_nodes = way->n_nodes;
        config.hierarchical = way->hierarchical;
        config.is_blocking = !way->overlap;
    }
    if (stack_run(&config, run, &t, &err) < 0)
        fail_msg("%s%s%s%s: %s", row->shows, alone ? ", one rank" : "", way ? ", " : "",
                 way ? way->shows : "", err.text);
    tensor_map_fini(&map);
    return t.out;
}

static struct outcome run_row(const struct row *row, bool alone, const struct way *way)
{
    return run_moved(row, alone, way, 0);
}

static void the_worst_routing_trains_the_same(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct outcome many = run_row(&rows[i], false, NULL);
        /* What a rank drops depends on what it has: there is another run to compare with. */
        bool alone = rows[i].capacity == 0;
        struct outcome one = run_row(&rows[i], alone, alone ? NULL : ways);
        printf("%s: loss %.6f and %.6f, norm %.6f and %.6f\n", rows[i].shows, many.loss, one.loss,
               many.norm, one.norm);
        if (!(fabs(many.loss - one.loss) <= TOLERANCE * fabs(one.loss)) ||
            !(fabs(many.norm - one.norm) <= TOLERANCE * one.norm))
            fail_msg("%s: loss %.9g, on one rank %.9g; norm %.9g, on one rank %.9g", rows[i].shows,
                     many.loss, one.loss, many.norm, one.norm);
    }
}

static void no_way_changes_a_bit(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t n = sizeof ways / sizeof *ways;
        if (rows[i].degrees.world > 8 && rows[i].to_the_first)
            continue; /* many threads: once is enough */
        struct outcome first = run_row(&rows[i], false, &ways[0]);
        for (size_t w = rows[i].degrees.world > 8 ? n - 1 : 1; w < n; w++) {
            struct outcome other = run_row(&rows[i], false, &ways[w]);
            if (memcmp(&first, &other, sizeof first) != 0)
                fail_msg("%s, %s: loss %.9g, not %.9g; norm %.9g, not %.9g", rows[i].shows,
                         ways[w].shows, other.loss, first.loss, other.norm, first.norm);
        }
    }
}

static void what_is_made_again_has_the_same_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct row row = rows[i];
        if (row.recompute != RECOMPUTE_OFF || row.degrees.world > 8)
            continue;
        struct outcome kept = run_row(&row, false, &ways[1]);
        for (row.recompute = RECOMPUTE_SELECTIVE; row.recompute < RECOMPUTE_WAYS; row.recompute++) {
            struct outcome again = run_row(&row, false, &ways[1]);
            if (memcmp(&kept, &again, sizeof kept) != 0)
                fail_msg("%s, %s: loss %.9g, not %.9g; norm %.9g, not %.9g", row.shows,
                         recompute_words[row.recompute], again.loss, kept.loss, again.norm,
                         kept.norm);
        }
    }
}

/* In as many pieces, and with each source's rows in the same ones. */
static void who_serves_changes_no_bit_of_those_in_one_order(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!rows[i].deterministic)
            continue;
        struct outcome first = run_row(&rows[i], false, &ways[1]);
        struct outcome moved = run_moved(&rows[i], false, &ways[1], 2);
        if (memcmp(&first, &moved, sizeof first) != 0)
            fail_msg("%s: loss %.9g, not %.9g; norm %.9g, not %.9g", rows[i].shows, moved.loss,
                     first.loss, moved.norm, first.norm);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_worst_routing_trains_the_same),
        cmocka_unit_test(no_way_changes_a_bit),
        cmocka_unit_test(what_is_made_again_has_the_same_bits),
        cmocka_unit_test(who_serves_changes_no_bit_of_those_in_one_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
