/* test_model_spec.c - exact parameter counts against the published ones */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/model_spec.h"

/* One MLA layer in four and the last one. */
static struct model_spec toy(void)
{
    struct model_spec m = {
        .family = FAMILY_KIMI_K3, .n_layers = 9, .residual = RESIDUAL_ATTN_RES,
        .attn_res_block = 4, .hidden = 64, .vocab = 256, .kda_heads = 2, .kda_head_dim = 32,
        .conv_kernel = 4, .kda_gate_bounded = true, .kda_gate_full_rank = true, .heads = 2,
        .q_lora_rank = 32, .kv_lora_rank = 32, .qk_nope_dim = 32, .qk_rope_dim = 16, .v_dim = 32,
        .mla_output_gate = true, .dense_inter = 128, .n_experts = 16, .top_k = 4,
        .expert_inter = 32, .n_shared_experts = 2, .latent = 32, .latent_moe = true,
        .latent_norm = true,
    };
    for (uint32_t l = 0; l < m.n_layers; l++) {
        m.layers[l].attention = (l + 1) % 4 == 0 || l + 1 == m.n_layers ? ATTENTION_MLA
                                                                        : ATTENTION_KDA;
        m.layers[l].mlp = l ? MLP_MOE : MLP_DENSE;
    }
    return m;
}

static struct model_spec kimi_k3(void)
{
    struct model_spec m = toy();
    m.n_layers = 93;
    m.attn_res_block = 12;
    m.hidden = 7168;
    m.vocab = 163840;
    m.kda_heads = m.heads = 96;
    m.kda_head_dim = m.qk_nope_dim = m.v_dim = 128;
    m.qk_rope_dim = 64;
    m.q_lora_rank = 1536;
    m.kv_lora_rank = 512;
    m.dense_inter = 33792;
    m.n_experts = 896;
    m.top_k = 16;
    m.expert_inter = 3072;
    m.latent = 3584;
    for (uint32_t l = 0; l < m.n_layers; l++) {
        m.layers[l].attention = (l + 1) % 4 == 0 || l + 1 == m.n_layers ? ATTENTION_MLA
                                                                        : ATTENTION_KDA;
        m.layers[l].mlp = l ? MLP_MOE : MLP_DENSE;
    }
    return m;
}

static void kimi_k3_counts_as_published(void **state)
{
    (void)state;
    struct model_spec m = kimi_k3();
    struct model_counts c = model_spec_count(&m);
    assert_int_equal(c.total, 2779484476000ull);
    assert_int_equal(c.active, 105364017760ull);
    assert_int_equal(c.per_expert, 33030144);
    assert_int_equal(c.experts, 2722740830208ull);
    assert_int_equal(c.total - c.experts, 56743645792ull);
    assert_int_equal(c.attention, 69 * 443740384ull + 24 * 232196096ull);
    assert_int_equal(c.mlp_dense, 726663168);
    assert_int_equal(c.shared, 92 * 132120576ull);
    assert_int_equal(c.router, 92 * (6422528ull + 896));
    assert_int_equal(c.latent_projections, 92 * (2 * 25690112ull + 3584));
    assert_int_equal(c.norms, 93 * 43008 + 21504);
    assert_int_equal(c.embedding, 2 * 1174405120ull);
}

static void the_toy_counts_as_its_formulas(void **state)
{
    (void)state;
    struct model_spec m = toy();
    struct model_counts c = model_spec_count(&m);
    assert_int_equal(c.total, 808908);
    assert_int_equal(c.active, 513996);
    assert_int_equal(c.attention, 6 * 25570 + 3 * 20544);

    m.index_heads = 2;
    m.index_head_dim = 32;
    m.index_top_k = 16;
    assert_int_equal(model_spec_count(&m).total, 821772); /* an indexer has 4288 */
}

static void kimi_k31_counts_as_published(void **state)
{
    (void)state;
    struct model_spec m = kimi_k3();
    m.index_heads = 32;
    m.index_head_dim = 128;
    m.index_top_k = 2048;
    assert_int_equal(model_spec_count(&m).total, 2779663002208ull);
}

/* What a structure lacks is not counted. */
static void absent_parts_cost_nothing(void **state)
{
    (void)state;
    struct model_spec m = toy();
    uint64_t total = model_spec_count(&m).total;

    m.residual = RESIDUAL_PLAIN;
    total -= 9 * 4 * 64 + 2 * 64;
    assert_int_equal(model_spec_count(&m).total, total);
    m.mla_output_gate = false;
    total -= 3 * 64 * 64;
    assert_int_equal(model_spec_count(&m).total, total);
    m.latent_norm = false;
    total -= 8 * 32;
    assert_int_equal(model_spec_count(&m).total, total);
    m.kda_gate_full_rank = false; /* 64 x 64 becomes 32 x 64 and 64 x 32: the same */
    assert_int_equal(model_spec_count(&m).total, total);
    m.q_lora_rank = 0; /* 32 x 64 + 32 + 96 x 32 becomes 96 x 64 */
    total += 3 * (96 * 64 - 32 * 64 - 32 - 96 * 32);
    assert_int_equal(model_spec_count(&m).total, total);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kimi_k3_counts_as_published),
        cmocka_unit_test(kimi_k31_counts_as_published),
        cmocka_unit_test(the_toy_counts_as_its_formulas),
        cmocka_unit_test(absent_parts_cost_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
