/* outline_config.c - reads a config.json of any family into an outline */
#include "common/outline_config.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "common/hf_keys.h"
#include "common/mem.h"
#include "common/outline_build.h"

#define VOCAB_MAX (1u << 24)
#define PARAMETERS_MAX 1e17

/* Families whose every tensor is known. */
static const char known[] =
    "afmoe arctic bailing_moe bailing_moe_v2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 "
    "deepseek_v4 dots1 ernie4_5_moe glm4_moe glm4_moe_lite glm5_next glm_moe_dsa gpt_oss "
    "granitemoe granitemoehybrid granitemoeshared hunyuan hunyuan_v1_moe jamba kimi_k2 kimi_k25 "
    "kimi_k3 kimi_k31 kimi_linear lfm2_moe llama4 longcat_flash mimo_v2 mimo_v2_flash minimax_m1 "
    "minimax_m2 minimax_m3 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe qwen3_moe "
    "qwen3_next";

/* Other names of the same structure. */
static const struct { const char *type, *kin; } kins[] = {
    {"glm4v_moe", "glm4_moe"}, {"minimax", "minimax_m1"}, {"minimax_text_01", "minimax_m1"},
    {"minimax_m3_vl", "minimax_m3"}, {"qwen3_vl_moe", "qwen3_moe"},
    {"qwen3_omni_moe", "qwen3_moe"}, {"deepseek_moe", "deepseek"}, {"kimi_vl", "deepseek_v3"},
    {"ernie4_5_moe_vl", "ernie4_5_moe"}, {"glm5_next_text", "glm5_next"},
};

/* ---- values --------------------------------------------------------------------------------- */

static int number_of(const struct builder *b, const char *key, const struct json *v, uint32_t l,
                     uint32_t min, uint32_t max, uint32_t *out)
{
    uint64_t x;
    if (json_kind_of(v) == JSON_ARRAY) {
        bool is_ernie = build_is(b, "ernie"); /* a value for text, another for pictures */
        l = is_ernie ? 0 : l;
        if (!b->o->n_layers)
            return err_set(b->err, -EINVAL, "key '%s' is a list, expected a whole number", key);
        if (l >= json_count(v) || (!is_ernie && json_count(v) < b->o->n_layers))
            return err_set(b->err, -EINVAL, "key '%s' has %zu elements, expected one per layer",
                           key, json_count(v));
        v = json_at(v, l);
    }
    if (!json_as_u64(v, &x) || x < min || x > max)
        return err_set(b->err, -EINVAL, "key '%s': expected a whole number from %u to %u", key,
                       min, max);
    *out = (uint32_t)x;
    return 0;
}

/* Some keep the keys of attention and experts in objects of their own. */
static const struct json *find(const struct builder *b, const char *key)
{
    static const char *const nests[] = {"ffn_config", "attn_config"};
    const struct json *v = json_get(b->text, key);
    for (size_t i = 0; !v && i < sizeof nests / sizeof *nests; i++)
        v = json_get(json_get(b->text, nests[i]), key);
    return v;
}

static int missing(const struct builder *b, const char *const *keys)
{
    char others[256] = "";
    for (size_t i = 1, n = 0; keys[i] && n < sizeof others; i++)
        n += (size_t)snprintf(others + n, sizeof others - n, "%s'%s'", i == 1 ? " (or " : ", ",
                              keys[i]);
    return err_set(b->err, -EINVAL, "key '%s' is missing%s%s", keys[0], others,
                   *others ? ")" : "");
}

int build_number(const struct builder *b, uint32_t l, const char *const *keys, uint32_t min,
                 uint32_t max, uint32_t otherwise, uint32_t *out)
{
    for (size_t i = 0; keys[i]; i++) {
        const struct json *v = find(b, keys[i]);
        if (v)
            return number_of(b, keys[i], v, l, min, max, out);
    }
    if (otherwise == OUTLINE_REQUIRED)
        return missing(b, keys);
    *out = otherwise;
    return 0;
}

int build_flag(const struct builder *b, const char *key, bool otherwise, bool *out)
{
    return hf_flag(b->text, key, otherwise, out, b->err);
}

const char *build_text(const struct builder *b, const char *key)
{
    const char *text = json_as_string(json_get(b->text, key));
    return text ? text : "";
}

bool build_has(const struct builder *b, const char *key)
{
    return find(b, key) != NULL;
}

bool build_is(const struct builder *b, const char *words)
{
    for (const char *at = words; *at;) {
        size_t n = strcspn(at, " ");
        if (!strncmp(b->type, at, n))
            return true;
        at += n + (at[n] == ' ');
    }
    return false;
}

void build_tensor(struct outline_block *k, enum outline_part part, const char *names, uint64_t out,
                  uint64_t in, uint32_t n_copies)
{
    if (k->n_tensors < OUTLINE_TENSORS_MAX)
        k->tensors[k->n_tensors++] = (struct outline_tensor){
            .names = names, .part = part, .n_copies = n_copies, .out = out, .in = in};
}

void build_norm(struct builder *b, struct outline_block *k, const char *weight, const char *bias)
{
    build_op(k, build_is(b, "phimoe dbrx") ? OP_LAYER_NORM
                : b->is_zero_centred       ? OP_RMS_NORM_ZERO_CENTRED
                                           : OP_RMS_NORM);
    build_tensor(k, PART_NORMS, weight, b->o->hidden, 0, 1);
    if (build_is(b, "phimoe"))
        build_tensor(k, PART_NORMS, bias, b->o->hidden, 0, 1);
}

void build_post_norm(struct builder *b, struct outline_block *k, const char *weight)
{
    if (!build_is(b, "afmoe gemma grok git"))
        return;
    build_op(k, OP_POST_NORM);
    build_tensor(k, PART_NORMS, weight, b->o->hidden, 0, 1);
}

void build_residual(struct builder *b, struct outline_block *k, const struct residual_names *n)
{
    uint64_t h = b->o->hidden;
    if (build_has(b, "attn_res_block_size")) {
        build_op(k, OP_ATTN_RES);
        build_tensor(k, PART_RESIDUAL, n->res_norm, h, 0, 1);
        build_tensor(k, PART_RESIDUAL, n->res_proj, h, 0, 1);
    }
    if (build_has(b, "hc_mult")) {
        build_op(k, OP_HYPER_CONNECTIONS);
        build_tensor(k, PART_RESIDUAL, n->hyper_fn, 24, 4 * h, 1);
        build_tensor(k, PART_RESIDUAL, n->hyper_base, 24, 0, 1);
        build_tensor(k, PART_RESIDUAL, n->hyper_scale, 3, 0, 1);
    }
    if (build_has(b, "residual_multiplier") || build_has(b, "layernorm_mlp_alpha"))
        build_op(k, OP_SCALED_STREAM);
}

/* ---- the whole model ------------------------------------------------------------------------ */

bool outline_is_known(const char *word)
{
    size_t n = strlen(word);
    for (const char *at = known; *at;) {
        size_t m = strcspn(at, " ");
        if (m == n && !strncmp(at, word, n))
            return true;
        at += m + (at[m] == ' ');
    }
    return false;
}

static const char *kin_of(const char *type)
{
    for (size_t i = 0; i < sizeof kins / sizeof *kins; i++)
        if (!strcmp(type, kins[i].type))
            return kins[i].kin;
    return type;
}

/* "DeepseekV4ForCausalLM" as "deepseek_v4": what configurations under other names say, too. */
static void type_of_class(const char *class, char out[64])
{
    size_t n = 0;
    const char *end = strstr(class, "For");
    for (const char *p = class; *p && p != end && n < 61; p++) {
        bool is_upper = *p >= 'A' && *p <= 'Z';
        if (is_upper && p > class && !(p[-1] >= 'A' && p[-1] <= 'Z'))
            out[n++] = '_';
        out[n++] = is_upper ? (char)(*p - 'A' + 'a') : *p;
    }
    out[n] = '\0';
}

/* Whose habits a model has whose own name tells nothing: of its text model, or of its class. */
static void find_kin(struct builder *b)
{
    const char *text = json_as_string(json_get(b->text, "model_type"));
    const char *class = json_as_string(json_at(json_get(b->root, "architectures"), 0));
    size_t n = text ? strlen(text) : 0;
    char own[64];
    snprintf(b->kin, sizeof b->kin, "%s", kin_of(b->o->family));
    if (!outline_is_known(b->kin) && class) {
        type_of_class(class, own);
        if (outline_is_known(kin_of(own)))
            snprintf(b->kin, sizeof b->kin, "%s", kin_of(own));
    }
    if (!outline_is_known(b->kin) && n && n < sizeof own && b->text != b->root) {
        bool has_end = n > 5 && !strcmp(text + n - 5, "_text");
        snprintf(own, sizeof own, "%.*s", (int)(has_end ? n - 5 : n), text);
        snprintf(b->kin, sizeof b->kin, "%s", kin_of(own));
    }
    b->type = b->kin;
    b->o->is_known = outline_is_known(b->kin);
    if (!b->o->is_known)
        outline_note(b->o, "model_type '%s' is not known: its structure is inferred from its keys",
                     b->o->family);
    else if (strcmp(b->kin, b->o->family) != 0)
        outline_note(b->o, "model_type '%s' is read as %s", b->o->family, b->kin);
}

static int read_family(struct builder *b)
{
    const char *type = json_as_string(json_get(b->root, "model_type"));
    char shown[64];
    if (!type)
        return err_set(b->err, -EINVAL, "key 'model_type' is missing or not a text");
    if (strlen(type) >= sizeof b->o->family)
        return err_set(b->err, -EINVAL, "key 'model_type' is '%s...', too long for a name",
                       hf_shown(type, shown));
    snprintf(b->o->family, sizeof b->o->family, "%s", hf_shown(type, shown));
    return 0;
}

static bool has_widths(const struct json *o)
{
    return json_get(o, "hidden_size") || json_get(o, "n_embd") || json_get(o, "d_model");
}

/* The language model's object may lie in another: thinker_config.text_config. */
static int find_text(struct builder *b)
{
    static const char *const keys[] = {"text_config", "language_config", "llm_config",
                                       "thinker_config"};
    b->text = b->root;
    for (int depth = 0; depth < 2; depth++) {
        const struct json *inner = NULL;
        for (size_t i = 0; !inner && i < sizeof keys / sizeof *keys; i++) {
            inner = json_get(b->text, keys[i]);
            if (inner && json_kind_of(inner) != JSON_OBJECT)
                return err_set(b->err, -EINVAL, "key '%s' is not an object", keys[i]);
        }
        if (inner && !has_widths(b->text))
            b->text = inner;
    }
    return 0;
}

static int read_widths(struct builder *b)
{
    struct outline *o = b->o;
    bool at_root = false, in_text = false;
    int rc;
    if ((rc = build_number(b, 0, KEYS("hidden_size", "n_embd", "d_model"), 1, WIDTH_MAX,
                           OUTLINE_REQUIRED, &o->hidden)) < 0 ||
        (rc = build_number(b, 0, KEYS("vocab_size"), 2, VOCAB_MAX, OUTLINE_REQUIRED,
                           &o->vocab)) < 0 ||
        (rc = build_number(b, 0, KEYS("max_position_embeddings", "max_seq_len"), 1, 1u << 30,
                           0, &o->context)) < 0 ||
        (rc = build_number(b, 0, KEYS("num_nextn_predict_layers", "mtp_num_hidden_layers",
                                      "num_mtp_layers"), 0, 64, 0, &o->n_mtp_layers)) < 0 ||
        (rc = hf_flag(b->root, "tie_word_embeddings", false, &at_root, b->err)) < 0 ||
        (rc = build_flag(b, "tie_word_embeddings", at_root, &in_text)) < 0)
        return rc;
    o->is_tied = in_text;
    o->has_vision = json_get(b->root, "vision_config") != NULL;
    return 0;
}

/* Embedding, the norms at the end, the head. */
static void make_top(struct builder *b)
{
    struct outline *o = b->o;
    struct outline_block *k = &o->top;
    uint64_t h = o->hidden;
    memcpy(k->kind, "top", 4);
    build_tensor(k, PART_EMBEDDING, "embed_tokens.weight|embeddings.weight|embed.weight|"
                 "wte.weight|in_out_embed.weight|word_embeddings.weight", o->vocab,
                 h, 1);
    build_norm(b, k, "model.norm.weight|norm_f.weight|final_layernorm.weight|"
               "norm.weight|embedding_norm.weight",
               "model.norm.bias");
    if (!o->is_tied)
        build_tensor(k, PART_EMBEDDING, "lm_head.weight|head.weight", o->vocab, h, 1);
    if (build_is(b, "phimoe"))
        build_tensor(k, PART_EMBEDDING, "lm_head.bias", o->vocab, 0, 1);
    if (build_has(b, "attn_res_block_size")) {
        build_tensor(k, PART_RESIDUAL, "output_attn_res_norm.weight", h, 0, 1);
        build_tensor(k, PART_RESIDUAL, "output_attn_res_proj.weight", h, 0, 1);
    }
    if (build_is(b, "deepseek_v4")) {
        build_tensor(k, PART_RESIDUAL, "hc_head_fn", 4, 4 * h, 1);
        build_tensor(k, PART_RESIDUAL, "hc_head_base", 4, 0, 1);
        build_tensor(k, PART_RESIDUAL, "hc_head_scale", 1, 0, 1);
    }
    build_op(k, OP_EMBEDDING);
    build_op(k, o->is_tied ? OP_TIED_HEAD : OP_HEAD);
    if (build_has(b, "logits_scaling") || build_has(b, "embedding_multiplier") ||
        build_has(b, "embedding_multiplier_scale") || build_is(b, "afmoe gemma"))
        build_op(k, OP_SCALED_STREAM);
    if (build_has(b, "final_logit_softcapping") || build_has(b, "max_attn_value"))
        build_op(k, OP_SOFT_CAP);
}

static bool tensors_equal(const struct outline_block *x, const struct outline_block *y)
{
    for (uint32_t i = 0; i < x->n_tensors; i++) {
        const struct outline_tensor *s = &x->tensors[i], *t = &y->tensors[i];
        if (strcmp(s->names, t->names) || s->part != t->part || s->n_copies != t->n_copies ||
            s->out != t->out || s->in != t->in || s->n_padding != t->n_padding)
            return false;
    }
    return true;
}

static int keep_block(struct builder *b, const struct outline_block *k, uint16_t *out)
{
    struct outline *o = b->o;
    for (uint32_t i = 0; i < o->n_blocks; i++)
        if (!memcmp(k, &o->blocks[i], offsetof(struct outline_block, tensors)) &&
            tensors_equal(k, &o->blocks[i])) {
            *out = (uint16_t)i;
            return 0;
        }
    if (o->n_blocks == OUTLINE_BLOCKS_MAX)
        return err_set(b->err, -ENOTSUP, "the layers are of more than %u different kinds",
                       OUTLINE_BLOCKS_MAX);
    *out = (uint16_t)o->n_blocks;
    o->blocks[o->n_blocks++] = *k;
    return 0;
}

static int make_layers(struct builder *b)
{
    struct outline_block *k = xcalloc(1, sizeof *k);
    int rc = 0;
    for (uint32_t l = 0; rc == 0 && l < b->o->n_layers; l++) {
        struct outline_layer *layer = &b->o->layers[l];
        layer->mixer = layer->ffn = OUTLINE_NONE;
        memset(k, 0, sizeof *k);
        if (b->mix[l] != MIX_NONE && (rc = build_mixer(b, l, k)) == 0)
            rc = keep_block(b, k, &layer->mixer);
        memset(k, 0, sizeof *k);
        if (rc == 0 && b->ffn[l] != FFN_NONE && (rc = build_ffn(b, l, k)) == 0)
            rc = keep_block(b, k, &layer->ffn);
    }
    free(k);
    return rc;
}

/* Counts are whole numbers of 64 bits. */
static int check_size(struct builder *b)
{
    double n = 0;
    for (uint32_t l = 0; l < b->o->n_layers; l++)
        for (int k = 0; k < 2; k++) {
            uint16_t i = k ? b->o->layers[l].ffn : b->o->layers[l].mixer;
            const struct outline_block *block = i == OUTLINE_NONE ? NULL : &b->o->blocks[i];
            for (uint32_t t = 0; block && t < block->n_tensors; t++)
                n += (double)block->tensors[t].n_copies * (double)block->tensors[t].out *
                     (double)(block->tensors[t].in ? block->tensors[t].in : 1);
        }
    if (n > PARAMETERS_MAX)
        return err_set(b->err, -EINVAL, "the keys speak of %.3g parameters, allowed up to %.0e: "
                       "see hidden_size, the intermediate sizes, experts and layers", n,
                       PARAMETERS_MAX);
    return 0;
}

static int build(struct builder *b)
{
    int rc;
    if (json_kind_of(b->root) != JSON_OBJECT)
        return err_set(b->err, -EINVAL, "not a JSON object, expected a model's config.json");
    if ((rc = read_family(b)) < 0 || (rc = find_text(b)) < 0)
        return rc;
    find_kin(b);
    if ((rc = read_widths(b)) == 0 && (rc = build_layers(b)) == 0 && (rc = make_layers(b)) == 0)
        rc = build_quant(b);
    if (rc < 0 && b->text != b->root)
        err_prefix(b->err, "text_config");
    if (rc < 0)
        return rc;
    make_top(b);
    return check_size(b);
}

static int build_root(const char *name, struct json *root, struct outline **out, struct err *err)
{
    struct err own = {0};
    struct builder *b = xcalloc(1, sizeof *b);
    b->root = root;
    b->err = &own;
    b->o = xcalloc(1, sizeof *b->o);
    int rc = build(b);
    if (rc < 0) {
        err_set(err, rc, "%s: %s", name, own.text);
        free(b->o);
    } else {
        *out = b->o;
    }
    free(b);
    json_destroy(root);
    return rc;
}

int outline_parse(const char *name, const char *text, size_t n_bytes, struct outline **out,
                  struct err *err)
{
    struct json *root;
    int rc = json_parse(text, n_bytes, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc < 0) {
        err_prefix(err, "%s", name);
        return rc;
    }
    return build_root(name, root, out, err);
}

int outline_read(const char *path, struct outline **out, struct err *err)
{
    struct json *root;
    int rc = json_read_file(path, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc < 0 || (rc = build_root(path, root, out, err)) < 0 || *(*out)->quant.method)
        return rc;
    const char *slash = strrchr(path, '/');
    char *beside = xasprintf("%.*shf_quant_config.json", slash ? (int)(slash - path + 1) : 0, path);
    if ((rc = build_quant_beside(beside, &(*out)->quant, err)) < 0) {
        free(*out);
        *out = NULL;
    }
    free(beside);
    return rc;
}
