/* test_segments.c - layers in segments do what they do whole */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "tests/one_layer.h"

#define DOCS_MAX 8

/* ---- the cuts ---- */

struct cut_case {
    const char *what;
    int32_t n_docs, lengths[DOCS_MAX];
    int64_t rows_max;
    const char *cut; /* begin+n of each segment, with what is before and > where it goes on */
};

static const struct cut_case cuts[] = {
    {"nothing to cut", 1, {100}, 128, "0+100/0"},
    {"short documents together", 4, {30, 30, 30, 30}, 64, "0+60/0 60+60/0"},
    {"a long one in pieces", 1, {200}, 64, "0+64/0> 64+64/64> 128+64/128> 192+8/192"},
    {"pieces that come out even", 1, {128}, 64, "0+64/0> 64+64/64"},
    {"long ones among short ones", 5, {10, 20, 100, 5, 65}, 64,
     "0+30/0 30+64/0> 94+36/64 130+5/0 135+64/0> 199+1/64"},
    {"no documents", 0, {0}, 64, ""},
};

static int32_t lay_out(int32_t *cu_seqlens, const int32_t *lengths, int32_t n_docs)
{
    cu_seqlens[0] = 0;
    for (int32_t i = 0; i < n_docs; i++)
        cu_seqlens[i + 1] = cu_seqlens[i] + lengths[i];
    return cu_seqlens[n_docs];
}

static void batches_are_cut_at_documents_and_in_pieces(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const struct cut_case *c = &cuts[i];
        int32_t cu_seqlens[DOCS_MAX + 1];
        char text[256] = "";
        size_t n = 0;
        struct segments s;
        lay_out(cu_seqlens, c->lengths, c->n_docs);
        segments_init(&s, cu_seqlens, c->n_docs, c->rows_max);
        for (int32_t j = 0; j < s.n; j++) {
            const struct segment *g = &s.all[j];
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%lld+%lld/%lld%s", j ? " " : "",
                                  (long long)g->begin, (long long)g->n, (long long)g->before,
                                  g->goes_on ? ">" : "");
            assert_int_equal(g->cu_seqlens[0], 0);
            assert_int_equal(g->cu_seqlens[g->n_docs], g->n);
            if (g->before)
                assert_int_equal(g->cu_keys[1], g->before + g->n);
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

static const struct cut_case batches[] = {
    {"one document in pieces", 1, {200}, 64, NULL},
    {"a last piece shorter than the convolution", 1, {129}, 64, NULL},
    {"among short ones", 6, {10, 20, 150, 5, 65, 3}, 64, NULL},
    {"short ones alone", 4, {30, 40, 1, 64}, 64, NULL},
};

static void compare(struct one_layer *l, const struct cut_case *c)
{
    int32_t cu_seqlens[DOCS_MAX + 1];
    lay_out(cu_seqlens, c->lengths, c->n_docs);
    struct outcome whole = run(l, cu_seqlens, c->n_docs, 0);
    struct outcome cut = run(l, cu_seqlens, c->n_docs, c->rows_max);
    double y = distance(cut.y, whole.y, whole.n), dx = distance(cut.dx, whole.dx, whole.n);
    double dw = distance(cut.gradients, whole.gradients, whole.n_weights);
    if (y != 0 || !(dx < 1e-6) || !(dw < 1e-6) ||
        fabs(cut.index_loss - whole.index_loss) > 1e-9 * fabs(whole.index_loss))
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
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(batches_are_cut_at_documents_and_in_pieces),
        cmocka_unit_test(kda_in_segments_is_kda),
        cmocka_unit_test(chosen_keys_in_segments_are_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
