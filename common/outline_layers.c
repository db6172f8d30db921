/* outline_layers.c - which layer is of which kind: lists, patterns, periods and offsets */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_keys.h"
#include "common/outline_build.h"

/* ---- mixers --------------------------------------------------------------------------------- */

static int mix_of_word(const char *word, enum mix_kind *out)
{
    static const struct { const char *word; enum mix_kind kind; } words[] = {
        {"full_attention", MIX_FULL}, {"attention", MIX_FULL}, {"global", MIX_FULL},
        {"deepseek_sparse_attention", MIX_FULL}, {"sliding_attention", MIX_SLIDING},
        {"sliding_window", MIX_SLIDING}, {"local", MIX_SLIDING},
        {"chunked_attention", MIX_CHUNKED}, {"linear_attention", MIX_LINEAR},
        {"mamba", MIX_LINEAR}, {"mamba2", MIX_LINEAR}, {"recurrent", MIX_LINEAR},
        {"kda", MIX_LINEAR}, {"hybrid", MIX_LINEAR}, {"conv", MIX_CONV},
    };
    for (size_t i = 0; word && i < sizeof words / sizeof *words; i++)
        if (!strcmp(word, words[i].word)) {
            *out = words[i].kind;
            return 0;
        }
    return -EINVAL;
}

static int read_types(struct builder *b, const char *key, const struct json *list)
{
    char shown[64];
    if (json_kind_of(list) != JSON_ARRAY || json_count(list) < b->o->n_layers)
        return err_set(b->err, -EINVAL, "key '%s' is not a list of %u layers", key,
                       b->o->n_layers);
    for (uint32_t l = 0; l < b->o->n_layers; l++) {
        const char *word = json_as_string(json_at(list, l));
        bool is_ffn = word && (!strcmp(word, "moe") || !strcmp(word, "mlp"));
        if (is_ffn && b->one_block) {
            b->mix[l] = MIX_NONE;
            b->ffn[l] = word[1] == 'o' ? FFN_MOE : FFN_DENSE;
        } else if (mix_of_word(word, &b->mix[l]) < 0) {
            return err_set(b->err, -ENOTSUP, "key '%s', element %u, is '%s', an unknown kind of "
                           "layer", key, l, word ? hf_shown(word, shown) : "no text");
        } else if (b->one_block) {
            b->ffn[l] = FFN_NONE;
        }
    }
    return 0;
}

/* Kimi's lists begin with 1; the rule that every layer stands in one of them tells. */
static int read_kda_lists(struct builder *b, const struct json *linear)
{
    const struct json *lists[] = {json_get(linear, "kda_layers"),
                                  json_get(linear, "full_attn_layers")};
    uint32_t first = 1, n = b->o->n_layers;
    bool seen[LAYERS_MAX] = {0};
    for (size_t i = 0; i < 2; i++)
        for (size_t j = 0; j < json_count(lists[i]); j++) {
            uint64_t x;
            if (json_as_u64(json_at(lists[i], j), &x) && x == 0)
                first = 0;
        }
    for (size_t i = 0; i < 2; i++)
        for (size_t j = 0; j < json_count(lists[i]); j++) {
            uint64_t x;
            const char *key = i ? "full_attn_layers" : "kda_layers";
            if (!json_as_u64(json_at(lists[i], j), &x) || x < first || x - first >= n)
                return err_set(b->err, -EINVAL, "key '%s', element %zu: expected a layer number "
                               "from %u to %u", key, j, first, n - 1 + first);
            if (seen[x - first])
                return err_set(b->err, -EINVAL, "layer %u stands twice in kda_layers and "
                               "full_attn_layers", (unsigned)x);
            seen[x - first] = true;
            b->mix[x - first] = i ? MIX_FULL : MIX_LINEAR;
        }
    for (uint32_t l = 0; l < n; l++)
        if (!seen[l])
            return err_set(b->err, -EINVAL, "layer %u stands neither in kda_layers nor in "
                           "full_attn_layers", l + first);
    return 0;
}

static int read_pattern(struct builder *b, const char *pattern)
{
    size_t n = strlen(pattern);
    if (n == 0 || n > LAYERS_MAX)
        return err_set(b->err, -EINVAL, "key 'hybrid_override_pattern' has %zu letters, expected "
                       "1 to %u", n, LAYERS_MAX);
    b->o->n_layers = (uint32_t)n;
    for (size_t l = 0; l < n; l++) {
        b->mix[l] = pattern[l] == 'M' ? MIX_LINEAR : pattern[l] == '*' ? MIX_FULL : MIX_NONE;
        b->ffn[l] = pattern[l] == 'E' ? FFN_MOE : pattern[l] == '-' ? FFN_DENSE : FFN_NONE;
        if (!strchr("M*E-", pattern[l]))
            return err_set(b->err, -EINVAL, "key 'hybrid_override_pattern', letter %zu: expected "
                           "M, E, * or -", l + 1);
    }
    return 0;
}

static int read_attn_types(struct builder *b)
{
    for (uint32_t l = 0; l < b->o->n_layers; l++) {
        uint32_t is_full;
        int rc = build_number(b, l, KEYS("attn_type_list"), 0, 1, 1, &is_full);
        if (rc < 0)
            return rc;
        b->mix[l] = is_full ? MIX_FULL : MIX_LINEAR;
    }
    return 0;
}

/* A number for each layer: 1 is a window. */
static int read_window_list(struct builder *b, const char *key)
{
    for (uint32_t l = 0; l < b->o->n_layers; l++) {
        uint32_t is_window;
        int rc = build_number(b, l, KEYS(key), 0, 1, OUTLINE_REQUIRED, &is_window);
        if (rc < 0)
            return rc;
        b->mix[l] = is_window ? MIX_SLIDING : MIX_FULL;
    }
    return 0;
}

/* Every layer full but those that a period leaves out. */
static int read_periods(struct builder *b)
{
    uint32_t every = 0, period = 0, offset = 0, group = 0, n = b->o->n_layers;
    bool hybrid = build_is(b, "qwen3_next qwen3_5 glm5_next");
    int rc;
    if ((rc = build_number(b, 0, KEYS("full_attention_interval"), 1, LAYERS_MAX, hybrid ? 4 : 0,
                           &every)) < 0 ||
        (rc = build_number(b, 0, KEYS("attn_layer_period"), 1, LAYERS_MAX, 0, &period)) < 0 ||
        (rc = build_number(b, 0, KEYS("attn_layer_offset"), 0, LAYERS_MAX, 0, &offset)) < 0 ||
        (rc = build_number(b, 0, KEYS("layer_group_size"), 1, LAYERS_MAX, 0, &group)) < 0)
        return rc;
    for (uint32_t l = 0; l < n; l++) {
        bool full = true;
        if (every)
            full = (l + 1) % every == 0;
        else if (period)
            full = l % period == offset;
        else if (group)
            full = (l + 1) % group == 0 || l >= n / group * group;
        b->mix[l] = full ? MIX_FULL : MIX_LINEAR;
    }
    return 0;
}

/* Sliding windows without a list: on every layer, where they are used at all. */
static int read_windows(struct builder *b)
{
    bool used;
    int rc = build_flag(b, "use_sliding_window", !build_is(b, "qwen"), &used);
    if (rc == 0 && used && build_has(b, "sliding_window") && !build_is(b, "deepseek_v4"))
        for (uint32_t l = 0; l < b->o->n_layers; l++)
            b->mix[l] = b->mix[l] == MIX_FULL ? MIX_SLIDING : b->mix[l];
    return rc;
}

static int read_mixers(struct builder *b)
{
    const struct json *linear = json_get(b->text, "linear_attn_config");
    const struct json *types = json_get(b->text, "layer_types");
    int rc;
    if (types)
        return read_types(b, "layer_types", types);
    if (json_get(linear, "kda_layers") || json_get(linear, "full_attn_layers")) {
        if ((rc = read_kda_lists(b, linear)) < 0)
            err_prefix(b->err, "linear_attn_config");
        return rc;
    }
    if (build_has(b, "attn_type_list"))
        return read_attn_types(b);
    if (json_kind_of(json_get(b->text, "hybrid_layer_pattern")) == JSON_ARRAY)
        return read_window_list(b, "hybrid_layer_pattern");
    if (json_kind_of(json_get(b->text, "sliding_window_layout")) == JSON_ARRAY)
        return read_window_list(b, "sliding_window_layout");
    rc = read_periods(b);
    return rc < 0 ? rc : read_windows(b);
}

/* ---- feed-forward --------------------------------------------------------------------------- */

static int read_ffn_list(struct builder *b, const char *key)
{
    const struct json *list = json_get(b->text, key);
    if (json_kind_of(list) != JSON_ARRAY || json_count(list) < b->o->n_layers)
        return err_set(b->err, -EINVAL, "key '%s' is not a list of %u layers", key,
                       b->o->n_layers);
    for (uint32_t l = 0; l < b->o->n_layers; l++) {
        const struct json *v = json_at(list, l);
        const char *word = json_as_string(v);
        uint64_t x = 0;
        bool is_moe = false;
        if (json_as_bool(v, &is_moe))
            x = is_moe;
        else if (!word && !json_as_u64(v, &x))
            return err_set(b->err, -EINVAL, "key '%s', element %u: expected 'dense' or 'sparse'",
                           key, l);
        b->ffn[l] = word ? (strcmp(word, "dense") ? FFN_MOE : FFN_DENSE)
                         : (x ? FFN_MOE : FFN_DENSE);
    }
    return 0;
}

/* A list of the layers that differ from the rest. */
static int mark_layers(struct builder *b, const char *key, enum ffn_kind kind)
{
    const struct json *list = json_get(b->text, key);
    for (size_t i = 0; i < json_count(list); i++) {
        uint64_t l;
        if (!json_as_u64(json_at(list, i), &l) || l >= b->o->n_layers)
            return err_set(b->err, -EINVAL, "key '%s', element %zu: expected a layer number from "
                           "0 to %u", key, i, b->o->n_layers - 1);
        b->ffn[l] = kind;
    }
    return 0;
}

/* "4,5,6": the layers with experts, as a text. */
static int read_ffn_text(struct builder *b, const char *list)
{
    for (uint32_t l = 0; l < b->o->n_layers; l++)
        b->ffn[l] = FFN_DENSE;
    for (const char *at = list; *at;) {
        char *end;
        unsigned long l = strtoul(at, &end, 10);
        if (end == at || l >= b->o->n_layers || (*end && *end != ','))
            return err_set(b->err, -EINVAL, "key 'moe_layers_enum': expected layer numbers from 0 "
                           "to %u, separated by commas", b->o->n_layers - 1);
        b->ffn[l] = FFN_MOE;
        at = end + (*end == ',');
    }
    return 0;
}

/* A negative number counts from the end. */
static int last_moe_layer(struct builder *b, uint32_t *out)
{
    double x = -1;
    if (json_as_double(json_get(b->text, "moe_layer_end_index"), &x) && x < 0) {
        *out = b->o->n_layers - 1;
        return 0;
    }
    return build_number(b, 0, KEYS("moe_layer_end_index"), 0, LAYERS_MAX, b->o->n_layers - 1, out);
}

static int read_ffn_periods(struct builder *b)
{
    uint32_t first, freq, step, period, offset, leave, skipped;
    int rc;
    if ((rc = build_number(b, 0, KEYS("first_k_dense_replace", "moe_layer_start_index",
                                      "num_dense_layers", "n_dense_layers"), 0, LAYERS_MAX, 0,
                           &first)) < 0 ||
        (rc = build_number(b, 0, KEYS("moe_layer_freq", "moe_layer_frequency",
                                      "moe_layer_interval", "moe_every_n_layer"), 1, LAYERS_MAX, 1,
                           &freq)) < 0 ||
        (rc = build_number(b, 0, KEYS("decoder_sparse_step", "interleave_moe_layer_step"), 1,
                           LAYERS_MAX, 1, &step)) < 0 ||
        (rc = build_number(b, 0, KEYS("expert_layer_period"), 1, LAYERS_MAX, 1, &period)) < 0 ||
        (rc = build_number(b, 0, KEYS("expert_layer_offset"), 0, LAYERS_MAX, 0, &offset)) < 0 ||
        (rc = build_number(b, 0, KEYS("moe_layer_num_skipped"), 0, LAYERS_MAX, 0, &skipped)) < 0 ||
        (rc = last_moe_layer(b, &leave)) < 0)
        return rc;
    if (skipped > first)
        first = skipped;
    for (uint32_t l = 0; l < b->o->n_layers; l++)
        b->ffn[l] = l >= first && l <= leave && l % freq == 0 && (l + 1) % step == 0 &&
                    l % period == offset % period ? FFN_MOE : FFN_DENSE;
    return mark_layers(b, "mlp_only_layers", FFN_DENSE);
}

static int read_ffns(struct builder *b)
{
    uint32_t n_experts;
    int rc;
    static const char *const lists[] = {"mlp_layer_types", "moe_layer_freq", "is_moe_layer",
                                        "moe_layer_layout"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if (json_kind_of(json_get(b->text, lists[i])) == JSON_ARRAY)
            return read_ffn_list(b, lists[i]);
    if (*build_text(b, "moe_layers_enum"))
        return read_ffn_text(b, build_text(b, "moe_layers_enum"));
    rc = build_number(b, 0, BUILD_N_EXPERTS, 0, EXPERTS_MAX, 0, &n_experts);
    if (rc < 0)
        return rc;
    if (!n_experts) {
        for (uint32_t l = 0; l < b->o->n_layers; l++)
            b->ffn[l] = FFN_DENSE;
        return 0;
    }
    if (build_has(b, "moe_layers")) {
        for (uint32_t l = 0; l < b->o->n_layers; l++)
            b->ffn[l] = FFN_DENSE;
        return mark_layers(b, "moe_layers", FFN_MOE);
    }
    return read_ffn_periods(b);
}

/* A list of the layers' kinds tells how many there are, too. */
static uint32_t count_listed(const struct builder *b)
{
    static const char *const lists[] = {"layer_types", "layers_block_type",
                                        "hybrid_layer_pattern", "mlp_layer_types"};
    size_t n = 0;
    for (size_t i = 0; n == 0 && i < sizeof lists / sizeof *lists; i++)
        n = json_count(json_get(b->text, lists[i]));
    return n > 0 && n <= LAYERS_MAX ? (uint32_t)n : OUTLINE_REQUIRED;
}

int build_layers(struct builder *b)
{
    const char *pattern = build_text(b, "hybrid_override_pattern");
    const struct json *blocks = json_get(b->text, "layers_block_type");
    int rc;
    if ((rc = build_flag(b, "use_gemma_norm", build_is(b, "qwen3_next qwen3_5 step3p"),
                         &b->is_zero_centred)) < 0)
        return rc;
    b->one_block = *pattern || (blocks && build_is(b, "nemotron_h"));
    if (*pattern)
        return read_pattern(b, pattern);
    rc = build_number(b, 0, KEYS("num_hidden_layers", "n_layers", "n_layer", "num_layers"), 1,
                      LAYERS_MAX, count_listed(b), &b->o->n_layers);
    if (rc < 0)
        return rc;
    if (blocks && (rc = read_types(b, "layers_block_type", blocks)) < 0)
        return rc;
    if (b->one_block)
        return 0;
    if (!blocks && (rc = read_mixers(b)) < 0)
        return rc;
    return read_ffns(b);
}
