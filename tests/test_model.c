/* test_model.c - the whole model: gradients against finite differences, recomputation, packing,
 * layouts, counters */
#include "tests/model_runs.h"

#include "worker/optim.h"

/* ---- gradients ------------------------------------------------------------------------------ */

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

struct course {
    double losses[N_STEPS], norms[N_STEPS];
    int64_t tokens[5 * 8]; /* layers x experts, of all ranks and steps */
};

static int train(struct stack *s, void *arg, struct err *err)
{
    struct course *c = arg;
    struct optim_config config = { .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1,
                                   .decay = DECAY_ALL, .clip_grad_norm = 1 };
    struct model_loss mine = {0};
    int rc = 0;

    fill(s);
    for (uint64_t step = 0; rc == 0 && step < N_STEPS; step++) {
        struct documents *d = dealt(s, step, 23);
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
        cmocka_unit_test(recomputation_changes_no_bit),
        cmocka_unit_test(packed_documents_do_not_see_each_other),
        cmocka_unit_test(every_layout_trains_the_same),
        cmocka_unit_test(only_training_forwards_are_counted_once),
        cmocka_unit_test(a_bad_batch_is_refused_before_it_runs),
        cmocka_unit_test(the_plan_holds_and_grows_at_need),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
