/* test_outline.c - configurations of all families, counted: published ones exactly, bad ones told
 *
 * The published ones are read where the folder of reference data is given (BALLAST_SHARED). */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/outline_check.h"
#include "common/outline_config.h"

static const char *configs(void)
{
    static char folder[4096];
    const char *shared = getenv("BALLAST_SHARED"), *source = getenv("BALLAST_SOURCE");
    if (shared && *shared)
        snprintf(folder, sizeof folder, "%s/data/configs", shared);
    else
        snprintf(folder, sizeof folder, "%s/../shared/data/configs", source ? source : "..");
    return folder;
}

/* A count of expected.tsv; "-": not known exactly. */
static bool is_as_expected(const char *model, const char *what, const char *text, uint64_t count)
{
    uint64_t expected;
    if (sscanf(text, "%" SCNu64, &expected) != 1 || expected == count)
        return true;
    print_error("%s: %s %" PRIu64 ", expected %" PRIu64 " (%+" PRId64 ")\n", model, what, count,
                expected, (int64_t)(count - expected));
    return false;
}

/* Where a list of the checkpoint's tensors is given: nothing of it may be unknown or of another
 * size, and the counts are those of the list. */
static bool check_tensors(char *const cell[10], const struct outline *o,
                          const struct outline_counts *c)
{
    struct tensor_list list;
    struct outline_check k;
    struct err err = {0};
    char *folder = xasprintf("%s/%s", configs(), cell[0]);
    bool good = true;
    if (tensor_list_read(folder, &list, &err) < 0)
        fail_msg("%s", err.text);
    free(folder);
    if (list.source != TENSORS_NONE) {
        outline_check(o, &list, &k);
        for (uint32_t i = 0; i < k.n_lines; i++)
            print_error("%s: %s\n", cell[0], k.lines[i]);
        assert_int_equal(k.n_used + k.n_scales + k.n_carried + k.n_unknown, list.n_tensors);
        good = k.n_unknown == 0 && k.n_lines == 0;
    }
    if (list.source == TENSORS_TSV) {
        good &= is_as_expected(cell[0], "text by tensors", cell[3], k.text);
        good &= is_as_expected(cell[0], "MTP", cell[4], k.mtp);
        good &= is_as_expected(cell[0], "vision", cell[5], k.vision);
        good &= is_as_expected(cell[0], "tensors", cell[7], list.n_tensors);
        good &= is_as_expected(cell[0], "elements", cell[8], list.n_elements);
        good &= is_as_expected(cell[0], "bytes", cell[9], list.n_bytes);
        assert_int_equal(k.text, c->total);
    }
    tensor_list_fini(&list);
    return good;
}

static bool check_row(char *line)
{
    char *cell[10] = {0}, *save = NULL;
    size_t n = 0;
    for (char *s = strtok_r(line, "\t\n", &save); s && n < 10; s = strtok_r(NULL, "\t\n", &save))
        cell[n++] = s;
    assert_true(n == 10);
    struct outline *o;
    struct err err = {0};
    char *path = xasprintf("%s/%s/config.json", configs(), cell[0]);
    if (outline_read(path, &o, &err) < 0)
        fail_msg("%s", err.text);
    struct outline_counts c = outline_count(o);
    uint64_t parts = 0;
    for (int i = 0; i < OUTLINE_PARTS; i++)
        parts += c.parts[i];
    assert_int_equal(parts, c.total);
    printf("%-28s %16" PRIu64 " %15" PRIu64 "\n", cell[0], c.total, c.active);
    bool good = is_as_expected(cell[0], "total", cell[3], c.total);
    good &= is_as_expected(cell[0], "active", cell[6], c.active);
    if (!strcmp(cell[0], "kimi-k3"))
        good &= is_as_expected(cell[0], "live", "2779484476000", c.live);
    good &= check_tensors(cell, o, &c);
    free(o);
    free(path);
    return good;
}

static void published_models_count_as_published(void **state)
{
    (void)state;
    char *path = xasprintf("%s/expected.tsv", configs()), line[1024];
    FILE *f = fopen(path, "r");
    size_t n = 0, n_good = 0;
    free(path);
    if (!f) {
        print_message("SKIPPED: no reference data at %s\n", configs());
        skip();
    }
    assert_non_null(fgets(line, sizeof line, f));
    for (; fgets(line, sizeof line, f); n++)
        n_good += check_row(line);
    fclose(f);
    printf("%zu of %zu rows as expected\n", n_good, n);
    assert_true(n >= 27);
    assert_int_equal(n_good, n);
}

/* ---- further families, published totals ------------------------------------------------------ */

static const struct {
    const char *shows;
    uint64_t total, active;
    const char *config;
} further[] = {
    {"qwen1.5-moe", 14315784192ull, 2689173504ull,
     "{\"model_type\": \"qwen2_moe\", \"hidden_size\": 2048, \"intermediate_size\": 5632, "
     "\"num_attention_heads\": 16, \"num_key_value_heads\": 16, \"num_hidden_layers\": 24,"
     " \"num_experts\": 60, \"num_experts_per_tok\": 4, \"moe_intermediate_size\": 1408, "
     "\"shared_expert_intermediate_size\": 5632, \"vocab_size\": 151936, \"decoder_sparse_"
     "step\": 1}"},
    {"dbrx", 131596523520ull, 36469708800ull,
     "{\"model_type\": \"dbrx\", \"d_model\": 6144, \"n_heads\": 48, \"n_layers\": 40, \"v"
     "ocab_size\": 100352, \"max_seq_len\": 32768, \"attn_config\": {\"clip_qkv\": 8, \"kv"
     "_n_heads\": 8, \"rope_theta\": 500000}, \"ffn_config\": {\"ffn_hidden_size\": 10752,"
     " \"moe_num_experts\": 16, \"moe_top_k\": 4, \"ffn_act_fn\": {\"name\": \"silu\"}}}"},
    {"phimoe", 41873153344ull, 6640999744ull,
     "{\"model_type\": \"phimoe\", \"hidden_size\": 4096, \"intermediate_size\": 6400, \"n"
     "um_attention_heads\": 32, \"num_key_value_heads\": 8, \"num_hidden_layers\": 32, \"n"
     "um_local_experts\": 16, \"num_experts_per_tok\": 2, \"vocab_size\": 32064, \"attenti"
     "on_bias\": true, \"lm_head_bias\": true}"},
    {"ling-2.0-mini", 16255643392ull, 1432973056ull,
     "{\"model_type\": \"bailing_moe_v2\", \"hidden_size\": 2048, \"num_hidden_layers\": 2"
     "0, \"num_attention_heads\": 16, \"num_key_value_heads\": 4, \"head_dim\": 128, \"int"
     "ermediate_size\": 5120, \"moe_intermediate_size\": 512, \"num_experts\": 256, \"num_"
     "experts_per_tok\": 8, \"num_shared_experts\": 1, \"first_k_dense_replace\": 1, \"voc"
     "ab_size\": 157184, \"use_qk_norm\": true, \"moe_router_enable_expert_bias\": true, "
     "\"n_group\": 8, \"topk_group\": 4}"},
    {"gpt-oss-120b", 116829156672ull, 5711982912ull,
     "{\"model_type\": \"gpt_oss\", \"attention_bias\": true, \"head_dim\": 64, \"hidden_s"
     "ize\": 2880, \"intermediate_size\": 2880, \"num_attention_heads\": 64, \"num_key_val"
     "ue_heads\": 8, \"num_hidden_layers\": 36, \"num_local_experts\": 128, \"num_experts_"
     "per_tok\": 4, \"vocab_size\": 201088, \"sliding_window\": 128, \"swiglu_limit\": 7.0"
     ", \"tie_word_embeddings\": false, \"layer_types\": [\"sliding_attention\", \"full_at"
     "tention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", \"full_"
     "attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", \"ful"
     "l_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", \"f"
     "ull_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\", "
     "\"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention\""
     ", \"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attention"
     "\", \"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_attenti"
     "on\", \"full_attention\", \"sliding_attention\", \"full_attention\", \"sliding_atten"
     "tion\", \"full_attention\", \"sliding_attention\", \"full_attention\"], \"max_positi"
     "on_embeddings\": 131072}"},
    {"qwen3-235b", 235093634560ull, 22190763520ull,
     "{\"model_type\": \"qwen3_moe\", \"head_dim\": 128, \"hidden_size\": 4096, \"intermed"
     "iate_size\": 12288, \"num_attention_heads\": 64, \"num_key_value_heads\": 4, \"num_h"
     "idden_layers\": 94, \"num_experts\": 128, \"num_experts_per_tok\": 8, \"moe_intermed"
     "iate_size\": 1536, \"vocab_size\": 151936, \"mlp_only_layers\": [], \"decoder_sparse"
     "_step\": 1, \"norm_topk_prob\": true}"},
};

/* Small models of structures that others publish, with counts worked out by hand: a name that only
 * the class explains, keys in an object of an object, lists for text and pictures, heads of layers
 * with windows, two blocks in a layer, factored queries, convolutions, a dense block beside. */
static const struct {
    const char *shows;
    uint64_t total, active;
    const char *config;
} structures[] = {
    {"kin_by_class", 281280, 133824,
     "{\"hidden_size\": 64, \"num_hidden_layers\": 4, \"vocab_size\": 256,"
     " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 128,"
     " \"num_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 32,"
     " \"model_type\": \"my_tune\", \"architectures\": [\"Qwen3MoeForCausalLM\"]}"},
    {"nested_twice", 281280, 133824,
     "{\"model_type\": \"qwen3_omni_moe\", \"thinker_config\": {\"model_type\": \"x\","
     " \"text_config\": {\"hidden_size\": 64, \"num_hidden_layers\": 4,"
     " \"vocab_size\": 256, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
     " \"intermediate_size\": 128, \"num_experts\": 8, \"num_experts_per_tok\": 2,"
     " \"moe_intermediate_size\": 32, \"model_type\": \"qwen3_omni_moe_text\"}}}"},
    {"ernie_vl", 258136, 147544,
     "{\"hidden_size\": 64, \"num_hidden_layers\": 4, \"vocab_size\": 256,"
     " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 128,"
     " \"model_type\": \"ernie4_5_moe_vl\", \"moe_num_experts\": [8, 8], \"moe_k\": 2,"
     " \"moe_intermediate_size\": [32, 16], \"moe_num_shared_experts\": 1,"
     " \"moe_layer_start_index\": [1, 1], \"moe_layer_end_index\": -1,"
     " \"tie_word_embeddings\": true}"},
    {"mimo_v2", 278624, 168032,
     "{\"hidden_size\": 64, \"num_hidden_layers\": 4, \"vocab_size\": 256,"
     " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 128,"
     " \"num_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 32,"
     " \"model_type\": \"mimo_v2\", \"head_dim\": 24, \"v_head_dim\": 16,"
     " \"swa_num_key_value_heads\": 4, \"hybrid_layer_pattern\": [0, 1, 1, 0],"
     " \"moe_layer_freq\": [0, 1, 1, 1], \"sliding_window\": 128,"
     " \"add_swa_attention_sink_bias\": true, \"attention_chunk_size\": 128,"
     " \"topk_method\": \"noaux_tc\", \"scoring_func\": \"sigmoid\"}"},
    {"longcat", 272600, 198872,
     "{\"model_type\": \"longcat_flash\", \"hidden_size\": 64, \"num_layers\": 2,"
     " \"vocab_size\": 256, \"num_attention_heads\": 4, \"ffn_hidden_size\": 128,"
     " \"expert_ffn_hidden_size\": 32, \"n_routed_experts\": 8, \"zero_expert_num\": 4,"
     " \"moe_topk\": 3, \"q_lora_rank\": 16, \"kv_lora_rank\": 16,"
     " \"qk_nope_head_dim\": 16, \"qk_rope_head_dim\": 8, \"v_head_dim\": 16}"},
    {"step3", 237216, 163488,
     "{\"model_type\": \"step3_vl\", \"text_config\": {\"model_type\": \"step3_text\","
     " \"hidden_size\": 64, \"num_hidden_layers\": 4, \"vocab_size\": 256,"
     " \"num_attention_heads\": 4, \"num_attention_groups\": 1, \"head_dim\": 16,"
     " \"share_q_dim\": 24, \"intermediate_size\": 128, \"moe_num_experts\": 8,"
     " \"moe_top_k\": 2, \"moe_intermediate_size\": 32, \"share_expert_dim\": 48,"
     " \"moe_layers_enum\": \"1,3\"}}"},
    {"lfm2_moe", 252600, 142008,
     "{\"hidden_size\": 64, \"num_hidden_layers\": 4, \"vocab_size\": 256,"
     " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 128,"
     " \"num_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 32,"
     " \"model_type\": \"lfm2_moe\", \"layer_types\": [\"conv\", \"conv\","
     " \"full_attention\", \"conv\"], \"num_dense_layers\": 1, \"use_expert_bias\": true,"
     " \"tie_word_embeddings\": true, \"conv_L_cache\": 3}"},
    {"gemma_moe", 377120, 229664,
     "{\"model_type\": \"gemma4\", \"text_config\": {\"hidden_size\": 64,"
     " \"num_hidden_layers\": 4, \"vocab_size\": 256, \"num_attention_heads\": 4,"
     " \"num_key_value_heads\": 2, \"intermediate_size\": 128, \"num_experts\": 8,"
     " \"moe_intermediate_size\": 32, \"model_type\": \"gemma4_text\","
     " \"top_k_experts\": 2, \"head_dim\": 16, \"global_head_dim\": 32,"
     " \"num_global_key_value_heads\": 1, \"attention_k_eq_v\": true,"
     " \"enable_moe_block\": true, \"layer_types\": [\"sliding_attention\","
     " \"full_attention\", \"sliding_attention\", \"full_attention\"],"
     " \"sliding_window\": 64, \"tie_word_embeddings\": true,"
     " \"hidden_activation\": \"gelu_pytorch_tanh\"}}"},
    {"residual_moe", 379968, 232512,
     "{\"hidden_size\": 64, \"num_hidden_layers\": 4, \"vocab_size\": 256,"
     " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 128,"
     " \"num_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 32,"
     " \"model_type\": \"git\", \"residual_moe\": true}"},
    {"listed_layers", 281152, 133696,
     "{\"hidden_size\": 64, \"vocab_size\": 256, \"num_attention_heads\": 4,"
     " \"num_key_value_heads\": 2, \"intermediate_size\": 128, \"num_experts\": 8,"
     " \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 32,"
     " \"model_type\": \"new_moe\", \"layer_types\": [\"full_attention\","
     " \"full_attention\", \"full_attention\", \"full_attention\"]}"},
    {"block_indexer", 265528, 154936,
     "{\"hidden_size\": 64, \"num_hidden_layers\": 4, \"vocab_size\": 256,"
     " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"num_experts_per_tok\": 2,"
     " \"model_type\": \"minimax_m3_vl\", \"num_local_experts\": 8,"
     " \"dense_intermediate_size\": 128, \"intermediate_size\": 32, \"use_qk_norm\": true,"
     " \"use_gemma_norm\": true, \"qk_norm_type\": \"per_head\","
     " \"use_routing_bias\": true, \"scoring_func\": \"sigmoid\", \"moe_layer_freq\": [0,"
     " 1, 1, 1], \"sparse_attention_config\": {\"sparse_num_index_heads\": 2,"
     " \"sparse_index_dim\": 16, \"sparse_topk_blocks\": 4, \"sparse_block_size\": 8,"
     " \"sparse_attention_freq\": [0, 1, 1, 1]}}"},
};

static void structures_count_as_worked_out(void **state)
{
    (void)state;
    bool good = true;
    for (size_t i = 0; i < sizeof structures / sizeof *structures; i++) {
        struct outline *o;
        struct err err = {0};
        const char *text = structures[i].config;
        if (outline_parse(structures[i].shows, text, strlen(text), &o, &err) < 0)
            fail_msg("%s", err.text);
        struct outline_counts c = outline_count(o);
        if (c.total != structures[i].total || c.active != structures[i].active) {
            print_error("%s: %" PRIu64 " and %" PRIu64 ", expected %" PRIu64 " and %" PRIu64 "\n",
                        structures[i].shows, c.total, c.active, structures[i].total,
                        structures[i].active);
            good = false;
        }
        free(o);
    }
    assert_true(good);
}

static void further_families_count_as_published(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof further / sizeof *further; i++) {
        struct outline *o;
        struct err err = {0};
        const char *text = further[i].config;
        if (outline_parse(further[i].shows, text, strlen(text), &o, &err) < 0)
            fail_msg("%s", err.text);
        struct outline_counts c = outline_count(o);
        assert_true(o->is_known);
        if (c.total != further[i].total || c.active != further[i].active)
            fail_msg("%s: %" PRIu64 " and %" PRIu64, further[i].shows, c.total, c.active);
        free(o);
    }
}

/* ---- foreign files -------------------------------------------------------------------------- */

/* A small model of a family that nobody registered; cases replace a part of this text. */
static const char good[] =
    "{\"model_type\": \"new_moe\", \"hidden_size\": 64, \"num_hidden_layers\": 4,"
    "\"vocab_size\": 256, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
    "\"intermediate_size\": 128, \"num_experts\": 8, \"num_experts_per_tok\": 2,"
    "\"moe_intermediate_size\": 32, \"layer_types\": [\"full_attention\", \"full_attention\","
    "\"full_attention\", \"full_attention\"]}";

static const struct {
    const char *shows, *from, *to, *says;
} bad[] = {
    {"no layers", "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 0", "num_hidden_layers"},
    {"10^9 experts", "\"num_experts\": 8", "\"num_experts\": 1000000000", "num_experts"},
    {"a negative width", "\"hidden_size\": 64", "\"hidden_size\": -64", "hidden_size"},
    {"a width of NaN", "\"hidden_size\": 64", "\"hidden_size\": NaN", "hidden_size"},
    {"infinitely many", "\"vocab_size\": 256", "\"vocab_size\": Infinity", "vocab_size"},
    {"text for a number", "\"hidden_size\": 64", "\"hidden_size\": \"64\"", "hidden_size"},
    {"an object for a number", "\"hidden_size\": 64", "\"hidden_size\": {}", "hidden_size"},
    {"a list for a number", "\"hidden_size\": 64", "\"hidden_size\": [64, 64]", "hidden_size"},
    {"a list of layers that is too short", "\"num_experts\": 8", "\"num_experts\": [8, 8]",
     "num_experts"},
    {"too many parameters", "\"hidden_size\": 64, \"num_hidden_layers\": 4,\"vocab_size\": 256, "
     "\"num_attention_heads\": 4, \"num_key_value_heads\": 2,\"intermediate_size\": 128, "
     "\"num_experts\": 8, \"num_experts_per_tok\": 2,\"moe_intermediate_size\": 32",
     "\"hidden_size\": 1048576, \"num_hidden_layers\": 4, \"vocab_size\": 256, "
     "\"num_attention_heads\": 4, \"intermediate_size\": 1048576, \"num_experts\": 8192, "
     "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 1048576", "parameters"},
    {"a fraction", "\"num_experts\": 8", "\"num_experts\": 8.5", "num_experts"},
    {"more chosen than there are", "_per_tok\": 2", "_per_tok\": 9", "num_experts_per_tok"},
    {"heads that do not divide", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3",
     "num_key_value_heads"},
    {"a list that is too short", "[\"full_attention\", ", "[", "layer_types"},
    {"an unknown kind of layer", "[\"full_attention\"", "[\"magic\\n\"", "'magic?'"},
    {"no type", "\"model_type\": \"new_moe\"", "\"model_type\": 7", "model_type"},
    {"a key twice", "\"num_experts\": 8", "\"num_experts\": 8, \"num_experts\": 8", "twice"},
    {"a packing without a method", "\"num_experts\": 8",
     "\"num_experts\": 8, \"quantization_config\": {}", "quant_method"},
    {"text where the model should be", "\"hidden_size\": 64",
     "\"text_config\": 7, \"hidden_size\": 64", "text_config"},
};

static char *changed(const char *from, const char *to)
{
    const char *at = strstr(good, from);
    assert_non_null(at);
    return xasprintf("%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
}

static void an_unknown_family_is_read_by_its_keys(void **state)
{
    (void)state;
    struct outline *o;
    assert_int_equal(outline_parse("c.json", good, strlen(good), &o, NULL), 0);
    struct outline_counts c = outline_count(o);
    uint64_t attention = 2 * 64 * 64 + 2 * 64 * 32, moe = 8 * 64 + 8 * 3 * 64 * 32;
    assert_int_equal(c.total, 4 * (attention + moe + 2 * 64) + 64 + 2 * 256 * 64);
    assert_int_equal(c.active, c.total - 4ull * 6 * 3 * 64 * 32);
    assert_false(o->is_known);
    assert_non_null(strstr(o->notes[0], "new_moe"));
    free(o);
}

static void what_is_wrong_is_one_line(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct outline *o;
        struct err err = {0};
        char *text = changed(bad[i].from, bad[i].to);
        if (outline_parse("c.json", text, strlen(text), &o, &err) == 0)
            fail_msg("%s: accepted", bad[i].shows);
        if (strncmp(err.text, "c.json: ", 8) || !strstr(err.text, bad[i].says) ||
            strchr(err.text, '\n'))
            fail_msg("%s: '%s'", bad[i].shows, err.text);
        free(text);
    }
}

static const struct {
    const char *shows, *row, *says;
} rows[] = {
    {"four columns", "a.weight\t-\t-\tBF16", "five columns"},
    {"a layer without {L}", "a.weight\t0-3\t-\tBF16\t4", "do not agree"},
    {"a range backwards", "a.{L}.w\t3-0\t-\tBF16\t4", "range"},
    {"a range without end", "a.{L}.w\t0-99999999999999999999\t-\tBF16\t4", "range"},
    {"a step of zero", "a.{L}.w\t0-4/0\t-\tBF16\t4", "range"},
    {"too high a layer", "a.{L}.w\t5000\t-\tBF16\t4", "layer 5000"},
    {"an unknown type", "a.w\t-\t-\tBF17\t4", "type"},
    {"a negative shape", "a.w\t-\t-\tBF16\t-4", "shape"},
    {"a shape that overflows", "a.w\t-\t-\tBF16\t4294967296,4294967296,4", "shape"},
    {"nothing", "# only a remark", "no tensors"},
};

static void bad_lists_are_told_by_line(void **state)
{
    (void)state;
    char folder[] = "/tmp/test_outline.XXXXXX";
    assert_non_null(mkdtemp(folder));
    char *path = xasprintf("%s/tensors.tsv", folder);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct tensor_list list;
        struct err err = {0};
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fprintf(f, "name\tlayers\texperts\tdtype\tshape\n%s\n", rows[i].row);
        fclose(f);
        if (tensor_list_read(folder, &list, &err) == 0)
            fail_msg("%s: accepted", rows[i].shows);
        if (!strstr(err.text, rows[i].says) || !strstr(err.text, "tensors.tsv: "))
            fail_msg("%s: '%s'", rows[i].shows, err.text);
    }
    remove(path);
    remove(folder);
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_models_count_as_published),
        cmocka_unit_test(further_families_count_as_published),
        cmocka_unit_test(structures_count_as_worked_out),
        cmocka_unit_test(an_unknown_family_is_read_by_its_keys),
        cmocka_unit_test(what_is_wrong_is_one_line),
        cmocka_unit_test(bad_lists_are_told_by_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
