/* test_hf_config.c - foreign config.json files: what is read, and the one line for what is wrong */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "common/mem.h"

/* A small model of the family; cases replace a part of this text. */
static const char good[] =
    "{\"model_type\": \"kimi_k3\", \"tie_word_embeddings\": false, \"text_config\": {"
    "\"hidden_size\": 64, \"num_hidden_layers\": 4, \"vocab_size\": 256,"
    "\"num_attention_heads\": 2, \"num_key_value_heads\": 2, \"q_lora_rank\": 32,"
    "\"kv_lora_rank\": 32, \"qk_nope_head_dim\": 32, \"qk_rope_head_dim\": 16,"
    "\"v_head_dim\": 32, \"mla_use_nope\": true, \"mla_use_output_gate\": true,"
    "\"intermediate_size\": 128, \"first_k_dense_replace\": 1, \"moe_layer_freq\": 1,"
    "\"num_experts\": 16, \"num_experts_per_token\": 4, \"num_shared_experts\": 2,"
    "\"moe_intermediate_size\": 32, \"routed_expert_hidden_size\": 48,"
    "\"latent_moe_use_norm\": true, \"moe_renormalize\": true, \"routed_scaling_factor\": 1.0,"
    "\"moe_router_activation_func\": \"sigmoid\", \"hidden_act\": \"situ\","
    "\"activation_situ_beta\": 4.0, \"activation_situ_linear_beta\": 25.0,"
    "\"attn_res_block_size\": 2, \"rms_norm_eps\": 1e-05, \"initializer_range\": 0.02,"
    "\"linear_attn_config\": {\"num_heads\": 2, \"head_dim\": 32,"
    "\"short_conv_kernel_size\": 4, \"use_full_rank_gate\": true, \"gate_lower_bound\": -5.0,"
    "\"kda_layers\": [1, 2, 3], \"full_attn_layers\": [4]}}}";

/* The same for a model with rotary and groups of experts. */
static const char rotary[] =
    "{\"model_type\": \"deepseek_v3\", \"hidden_size\": 64, \"num_hidden_layers\": 3,"
    "\"vocab_size\": 256, \"num_attention_heads\": 2, \"q_lora_rank\": 32, \"kv_lora_rank\": 32,"
    "\"qk_nope_head_dim\": 32, \"qk_rope_head_dim\": 16, \"v_head_dim\": 32,"
    "\"intermediate_size\": 128, \"first_k_dense_replace\": 1, \"n_routed_experts\": 16,"
    "\"num_experts_per_tok\": 4, \"n_shared_experts\": 1, \"moe_intermediate_size\": 32,"
    "\"n_group\": 4, \"topk_group\": 2, \"norm_topk_prob\": true, \"scoring_func\": \"sigmoid\","
    "\"routed_scaling_factor\": 2.5, \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-06,"
    "\"rope_theta\": 50000, \"num_nextn_predict_layers\": 1, \"rope_scaling\": {\"type\": \"yarn\","
    "\"factor\": 40, \"mscale\": 1.0, \"mscale_all_dim\": 0.5, \"beta_fast\": 16,"
    "\"original_max_position_embeddings\": 4096}}";

/* text with the first `from` replaced; gives, freed with free. */
static char *changed_in(const char *text, const char *from, const char *to)
{
    const char *at = strstr(text, from);
    assert_non_null(at);
    return xasprintf("%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
}

static char *changed(const char *from, const char *to)
{
    return changed_in(good, from, to);
}

static int parse(const char *text, struct model_spec *out, struct err *err)
{
    return hf_config_parse("c.json", text, strlen(text), out, err);
}

static void every_key_reaches_its_field(void **state)
{
    (void)state;
    struct model_spec m;
    struct err err = {0};
    assert_int_equal(parse(good, &m, &err), 0);
    assert_int_equal(m.n_layers, 4);
    assert_int_equal(m.hidden, 64);
    assert_int_equal(m.latent, 48);
    assert_true(m.latent_moe && m.latent_norm && m.renormalize);
    assert_int_equal(m.residual, RESIDUAL_ATTN_RES);
    assert_int_equal(m.attn_res_block, 2);
    assert_true(m.kda_gate_bounded && m.kda_gate_full_rank && m.mla_output_gate);
    assert_float_equal(m.kda_gate_lower_bound, -5, 0);
    assert_float_equal(m.latent_norm_eps, 1e-6, 1e-12);
    assert_int_equal(m.layers[2].attention, ATTENTION_KDA);
    assert_int_equal(m.layers[3].attention, ATTENTION_MLA);
    assert_int_equal(m.layers[0].mlp, MLP_DENSE);
    assert_int_equal(m.layers[1].mlp, MLP_MOE);
}

static void what_is_absent_means_the_plain_structure(void **state)
{
    (void)state;
    static const struct { const char *from, *to; } drops[] = {
        { "\"attn_res_block_size\": 2,", "" },
        { "\"q_lora_rank\": 32,", "\"q_lora_rank\": null," },
        { "\"routed_expert_hidden_size\": 48,", "" },
        { "\"gate_lower_bound\": -5.0,", "" },
    };
    for (size_t i = 0; i < sizeof drops / sizeof *drops; i++) {
        struct model_spec m;
        char *text = changed(drops[i].from, drops[i].to);
        assert_int_equal(parse(text, &m, NULL), 0);
        assert_int_equal(m.residual, i == 0 ? RESIDUAL_PLAIN : RESIDUAL_ATTN_RES);
        assert_int_equal(m.q_lora_rank, i == 1 ? 0 : 32);
        assert_int_equal(m.latent, i == 2 ? 64 : 48);
        assert_int_equal(m.latent_moe, i != 2);
        assert_int_equal(m.kda_gate_bounded, i != 3);
        free(text);
    }
}

static const struct {
    const char *shows, *from, *to;
    int code;
    const char *says;
} bad[] = {
    { "no layers", "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 0", -EINVAL,
      "num_hidden_layers" },
    { "too many experts", "\"num_experts\": 16", "\"num_experts\": 1e9", -EINVAL,
      "num_experts" },
    { "a fraction", "\"num_experts\": 16", "\"num_experts\": 16.5", -EINVAL, "num_experts" },
    { "a negative width", "\"hidden_size\": 64", "\"hidden_size\": -64", -EINVAL,
      "hidden_size" },
    { "text for a number", "\"hidden_size\": 64", "\"hidden_size\": \"64\"", -EINVAL,
      "hidden_size" },
    { "a missing width", "\"hidden_size\": 64,", "", -EINVAL, "'hidden_size' is missing" },
    { "NaN", "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": NaN", -EINVAL, "rms_norm_eps" },
    { "infinity", "\"routed_scaling_factor\": 1.0", "\"routed_scaling_factor\": Infinity",
      -EINVAL, "routed_scaling_factor" },
    { "a flag that is a number", "\"mla_use_nope\": true", "\"mla_use_nope\": 7", -EINVAL,
      "mla_use_nope" },
    { "more chosen than there are", "\"num_experts_per_token\": 4",
      "\"num_experts_per_token\": 17", -EINVAL, "num_experts_per_token" },
    { "a layer in no list", "[1, 2, 3]", "[1, 2]", -EINVAL, "layer 3 stands neither" },
    { "a layer in both lists", "[1, 2, 3]", "[1, 2, 3, 4]", -EINVAL, "layer 4 stands twice" },
    { "a layer numbered from 0", "[1, 2, 3]", "[0, 1, 2]", -EINVAL, "from 1 to 4" },
    { "a list of texts", "[1, 2, 3]", "[\"1\", 2, 3]", -EINVAL, "kda_layers" },
    { "no list", "[1, 2, 3]", "{}", -EINVAL, "kda_layers" },
    { "a gate bound that would overflow", "-5.0", "-50.0", -EINVAL, "gate_lower_bound" },
    { "a key twice", "\"num_experts\": 16", "\"num_experts\": 8, \"num_experts\": 16", -EINVAL,
      "key 'num_experts' is there twice" },
    { "another family", "kimi_k3", "llama", -ENOTSUP, "supported: kimi_k3" },
    { "a family that needs more", "kimi_k3", "mixtral", -ENOTSUP,
      "not built: grouped-query attention, a softmax router" },
    { "two spellings that disagree", "\"num_experts\": 16",
      "\"n_routed_experts\": 8, \"num_experts\": 16", -EINVAL, "'n_routed_experts' is 8" },
    { "biases in attention", "\"num_experts\": 16",
      "\"attention_bias\": true, \"num_experts\": 16", -ENOTSUP, "attention_bias" },
    { "control characters in a name", "kimi_k3", "a\\nb\\u0007", -ENOTSUP, "'a?b?'" },
    { "no text part", "text_config", "text", -EINVAL, "text_config" },
    { "rotary attention", "\"mla_use_nope\": true", "\"mla_use_nope\": false", -ENOTSUP,
      "mla_use_nope" },
    { "another activation", "\"situ\"", "\"gelu\"", -ENOTSUP, "supported: situ, silu" },
    { "groups that do not divide", "\"num_experts\": 16",
      "\"num_expert_group\": 5, \"num_experts\": 16", -EINVAL, "num_expert_group" },
    { "an empty indexer", "\"num_experts\": 16", "\"dsa_config\": {}, \"num_experts\": 16",
      -EINVAL, "dsa_config: key 'index_n_heads'" },
    { "an indexer in other layers", "\"num_experts\": 16",
      "\"dsa_config\": {\"index_n_heads\": 2, \"index_head_dim\": 16, \"index_topk\": 8,"
      "\"layers\": [3]}, \"num_experts\": 16", -ENOTSUP, "dsa_config: key 'layers' has layer 3" },
    { "an indexer without a latent", "\"q_lora_rank\": 32",
      "\"index_n_heads\": 2, \"index_head_dim\": 16, \"index_topk\": 8", -ENOTSUP, "q_lora_rank" },
    { "no groups, but groups", "\"num_experts\": 16",
      "\"use_grouped_topk\": false, \"num_expert_group\": 4, \"num_experts\": 16", -ENOTSUP,
      "'use_grouped_topk' is false, but 'num_expert_group' is 4" },
    { "a third router", "\"sigmoid\"", "\"sqrtsoftplus\"", -ENOTSUP,
      "'moe_router_activation_func' is 'sqrtsoftplus'" },
    { "a clamp", "\"num_experts\": 16", "\"swiglu_limit\": 7, \"num_experts\": 16", -ENOTSUP,
      "'swiglu_limit' is set" },
    { "norms of queries", "\"num_experts\": 16", "\"use_qk_norm\": true, \"num_experts\": 16",
      -ENOTSUP, "'use_qk_norm' is set" },
    { "tied ends", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", -ENOTSUP,
      "tie_word_embeddings" },
    { "a cut file", "\"linear_attn_config\": {\"num_heads\": 2, \"head_dim\": 32,", "", -EINVAL,
      "c.json: " },
};

static void a_bad_value_is_one_clear_line(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct model_spec m;
        struct err err = {0};
        memset(&m, 0x5a, sizeof m);
        char *text = changed(bad[i].from, bad[i].to);
        int rc = parse(text, &m, &err);
        if (rc != bad[i].code || !strstr(err.text, bad[i].says) || strchr(err.text, '\n') ||
            strncmp(err.text, "c.json: ", 8) != 0 || err.code != rc)
            fail_msg("%s: %d \"%s\"", bad[i].shows, rc, err.text);
        for (size_t b = 0; b < sizeof m; b++)
            assert_int_equal(((unsigned char *)&m)[b], 0x5a);
        free(text);
    }
}

static void an_indexer_is_read_in_both_places(void **state)
{
    (void)state;
    static const char *const places[] = {
        "\"index_n_heads\": 2, \"index_head_dim\": 24, \"index_topk\": 8, \"num_experts\": 16",
        "\"dsa_config\": {\"index_n_heads\": 2, \"index_head_dim\": 24, \"index_topk\": 8,"
        "\"dsa_layers\": [4]}, \"num_experts\": 16",
    };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        struct model_spec m;
        struct err err = {0};
        char *text = changed("\"num_experts\": 16", places[i]);
        if (parse(text, &m, &err) < 0)
            fail_msg("%s", err.text);
        assert_true(m.index_heads == 2 && m.index_head_dim == 24 && m.index_top_k == 8);
        assert_float_equal(m.index_norm_eps, 1e-5, 1e-12); /* the model's */
        free(text);
    }
    struct model_spec m;
    struct err err = {0};
    char *text = changed_in(rotary, "deepseek_v3", "deepseek_v32");
    assert_int_equal(parse(text, &m, &err), -EINVAL);
    assert_non_null(strstr(err.text, "'index_topk' is missing"));
    free(text);
}

static void rotary_and_groups_are_read_in_both_spellings(void **state)
{
    (void)state;
    struct model_spec m;
    struct err err = {0};
    if (parse(rotary, &m, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(m.family, FAMILY_DEEPSEEK_V3);
    assert_int_equal(m.n_experts, 16);
    assert_int_equal(m.top_k, 4);
    assert_true(m.n_expert_groups == 4 && m.top_groups == 2 && m.n_mtp_layers == 1);
    assert_int_equal(m.activation, ACTIVATION_SWIGLU);
    assert_true(m.mla_rotary && m.rotary_interleaved && m.rotary.yarn && m.rotary.truncate);
    assert_int_equal(m.rotary.dim, 16);
    assert_float_equal(m.rotary.theta, 50000, 0);
    assert_float_equal(m.rotary.factor, 40, 0);
    assert_float_equal(m.rotary.beta_fast, 16, 0);
    assert_float_equal(m.rotary.beta_slow, 1, 0);
    assert_float_equal(m.rotary.mscale_all_dim, 0.5, 0);

    assert_false(m.attention_bias);
    char *text = changed_in(rotary, "\"rope_scaling\"",
                            "\"attention_bias\": true, \"rope_scaling\"");
    assert_int_equal(parse(text, &m, NULL), 0);
    assert_true(m.attention_bias);
    free(text);
    text = changed_in(rotary, "\"rope_scaling\": {\"type\": \"yarn\",",
                            "\"rope_interleave\": false, \"rope_parameters\": "
                            "{\"rope_type\": \"yarn\", \"rope_theta\": 7000,");
    assert_int_equal(parse(text, &m, NULL), 0);
    assert_true(m.rotary.yarn && !m.rotary_interleaved);
    assert_float_equal(m.rotary.theta, 7000, 0);
    free(text);
}

static const struct {
    const char *shows, *from, *to;
    int code;
    const char *says;
} bad_rotary[] = {
    { "another scaling", "\"yarn\"", "\"llama3\"", -ENOTSUP, "rope_scaling: key 'type'" },
    { "no factor", "\"factor\": 40, ", "", -EINVAL, "rope_scaling: key 'factor'" },
    { "a factor below 1", "40", "0.5", -EINVAL, "'factor' is 0.5" },
    { "scaling that is text", "{\"type\": \"yarn\",", "\"yarn\", \"x\": {", -EINVAL,
      "'rope_scaling' is not an object" },
    { "an odd width", "\"qk_rope_head_dim\": 16", "\"qk_rope_head_dim\": 15", -EINVAL, "pairs" },
    { "groups that do not divide", "\"n_group\": 4", "\"n_group\": 3", -EINVAL, "'n_group' is 3" },
    { "groups of one", "\"n_group\": 4", "\"n_group\": 16", -EINVAL, "two or more" },
    { "too few groups", "\"topk_group\": 2", "\"topk_group\": 5", -EINVAL, "'topk_group' is 5" },
    { "more chosen than the groups hold", "\"num_experts_per_tok\": 4",
      "\"num_experts_per_tok\": 9", -EINVAL, "9 are chosen" },
    { "another router", "\"sigmoid\"", "\"softmax\"", -ENOTSUP, "'scoring_func' is 'softmax'" },
    { "groups that are not said", "\"n_group\": 4, ", "", -EINVAL, "'n_group' is missing" },
    { "how many of them, too", "\"topk_group\": 2, ", "", -EINVAL, "'topk_group' is missing" },
    { "a scale that is not said", "\"routed_scaling_factor\": 2.5, ", "", -EINVAL,
      "'routed_scaling_factor' is missing" },
    { "a part that turns", "\"factor\": 40, ", "\"partial_rotary_factor\": 0.5, \"factor\": 40, ",
      -ENOTSUP, "rope_scaling: key 'partial_rotary_factor' is 0.5" },
    { "the other indexer", "\"rope_theta\"", "\"indexer_rope_interleave\": true, \"rope_theta\"",
      -ENOTSUP, "'indexer_rope_interleave' is set" },
};

static void a_bad_rotary_value_is_one_clear_line(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_rotary / sizeof *bad_rotary; i++) {
        struct model_spec m;
        struct err err = {0};
        char *text = changed_in(rotary, bad_rotary[i].from, bad_rotary[i].to);
        int rc = parse(text, &m, &err);
        if (rc != bad_rotary[i].code || !strstr(err.text, bad_rotary[i].says))
            fail_msg("%s: %d \"%s\"", bad_rotary[i].shows, rc, err.text);
        free(text);
    }
}

/* Keys that say what is so anyway, and what Kimi's routers may be. */
static void what_changes_nothing_is_read(void **state)
{
    (void)state;
    struct model_spec m;
    struct err err = {0};
    char *text = changed("\"moe_router_activation_func\": \"sigmoid\"",
                         "\"moe_router_activation_func\": \"softmax\", \"swiglu_limit\": null, "
                         "\"hc_mult\": 1, \"mlp_bias\": false, \"use_grouped_topk\": false, "
                         "\"attention_dropout\": 0.0, \"sliding_window\": null");
    if (parse(text, &m, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(m.router_softmax);
    assert_int_equal(parse(good, &m, NULL), 0);
    assert_false(m.router_softmax);
    free(text);
}

static void a_huge_name_is_shortened(void **state)
{
    (void)state;
    struct model_spec m;
    struct err err = {0};
    char *name = xcalloc(1, 1 << 20);
    memset(name, 'x', (1 << 20) - 1);
    char *text = changed("kimi_k3", name);
    assert_int_equal(parse(text, &m, &err), -ENOTSUP);
    assert_non_null(strstr(err.text, "supported: kimi_k3"));
    free(text);
    free(name);
}

static void a_folder_without_the_file_is_named(void **state)
{
    (void)state;
    struct model_spec m;
    struct err err = {0};
    char folder[] = "/tmp/hf_configXXXXXX";
    assert_non_null(mkdtemp(folder));
    assert_int_equal(hf_config_read(folder, &m, &err), -ENOENT);
    assert_non_null(strstr(err.text, "/config.json"));
    assert_int_equal(remove(folder), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_reaches_its_field),
        cmocka_unit_test(what_is_absent_means_the_plain_structure),
        cmocka_unit_test(a_bad_value_is_one_clear_line),
        cmocka_unit_test(an_indexer_is_read_in_both_places),
        cmocka_unit_test(rotary_and_groups_are_read_in_both_spellings),
        cmocka_unit_test(a_bad_rotary_value_is_one_clear_line),
        cmocka_unit_test(what_changes_nothing_is_read),
        cmocka_unit_test(a_huge_name_is_shortened),
        cmocka_unit_test(a_folder_without_the_file_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
