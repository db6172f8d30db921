/* ctl_adapt_shrink.c - a small configuration of the same structure
 *
 * Keeps every key and option; widths, heads and experts become few, and of the layers those stay
 * that show every kind in its order: of a run of layers that are alike no more than two, until all
 * kinds were seen. */
#include "coordinator/ctl_adapt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"

#define RUN_MAX    2u
#define LAYERS_MIN 4u

struct shrink {
    const struct adapt *a;
    enum shrink_size size;
    uint32_t kept[LAYERS_MAX], n_kept; /* numbers of the original's layers, ascending */
    uint32_t first;     /* the number that lists of layers give the first one */
    bool     has_groups;
};

/* ---- layers --------------------------------------------------------------------------------- */

static uint32_t kind_of(const struct outline *o, uint32_t l)
{
    return (uint32_t)o->layers[l].mixer << 16 | o->layers[l].ffn;
}

static bool seen_before(const struct outline *o, uint32_t l)
{
    for (uint32_t k = 0; k < l; k++)
        if (kind_of(o, k) == kind_of(o, l))
            return true;
    return false;
}

static void choose_layers(struct shrink *s)
{
    const struct outline *o = s->a->outline;
    uint32_t last_new = 0, run = 0;
    for (uint32_t l = 0; l < o->n_layers; l++)
        last_new = seen_before(o, l) ? last_new : l;
    for (uint32_t l = 0; l < o->n_layers; l++) {
        if (l > last_new && s->n_kept >= LAYERS_MIN)
            return;
        run = l && kind_of(o, l) == kind_of(o, l - 1) ? run + 1 : 1;
        if (run <= RUN_MAX)
            s->kept[s->n_kept++] = l;
    }
}

/* The new number of layer l, or n_kept: it is gone. */
static uint32_t place_of(const struct shrink *s, uint64_t l)
{
    uint32_t i = 0;
    while (i < s->n_kept && s->kept[i] != l)
        i++;
    return i;
}

/* ---- values --------------------------------------------------------------------------------- */

static const struct { const char *key; uint32_t small, wide; } caps[] = {
    {"hidden_size", 64, 256}, {"vocab_size", 256, 1024}, {"intermediate_size", 128, 512},
    {"moe_intermediate_size", 32, 128}, {"num_attention_heads", 4, 4},
    {"num_key_value_heads", 4, 4}, {"num_heads", 4, 4}, {"head_dim", 16, 64},
    {"qk_nope_head_dim", 16, 64}, {"qk_rope_head_dim", 8, 32}, {"v_head_dim", 16, 64},
    {"q_lora_rank", 32, 128}, {"kv_lora_rank", 32, 128}, {"num_experts", 8, 16},
    {"n_routed_experts", 8, 16}, {"num_local_experts", 8, 16},
    {"routed_expert_hidden_size", 32, 128}, {"attn_res_block_size", 2, 2},
    {"num_shared_experts", 2, 2}, {"n_shared_experts", 2, 2}, {"num_nextn_predict_layers", 1, 1},
    {"index_n_heads", 2, 4}, {"index_head_dim", 16, 32}, {"index_topk", 8, 64},
    {"n_group", 4, 4}, {"num_expert_group", 4, 4}, {"topk_group", 2, 2},
};

static uint32_t cap_of(const struct shrink *s, const char *key)
{
    if (!strncmp(key, "num_experts_per_tok", 19))
        return s->has_groups ? 2 : 4;
    for (size_t i = 0; i < sizeof caps / sizeof *caps; i++)
        if (!strcmp(key, caps[i].key))
            return s->size == SHRINK_SMALL ? caps[i].small : caps[i].wide;
    return UINT32_MAX;
}

static uint32_t count_dense(const struct shrink *s)
{
    const struct outline *o = s->a->outline;
    uint32_t n = 0;
    while (n < s->n_kept && !o->blocks[o->layers[s->kept[n]].ffn].n_experts)
        n++;
    return n;
}

/* ---- lists ---------------------------------------------------------------------------------- */

/* A value for each layer: those of the layers that stay. */
static struct json *pick(const struct shrink *s, const struct json *list)
{
    struct json *out = json_new_array();
    for (uint32_t i = 0; i < s->n_kept; i++)
        json_push(out, json_copy(json_at(list, s->kept[i])));
    return out;
}

/* Numbers of layers: those that stay, under their new numbers. */
static struct json *renumber(const struct shrink *s, const struct json *list)
{
    struct json *out = json_new_array();
    for (size_t i = 0; i < json_count(list); i++) {
        uint64_t l;
        if (!json_as_u64(json_at(list, i), &l) || l < s->first)
            continue;
        uint32_t place = place_of(s, l - s->first);
        if (place < s->n_kept)
            json_push(out, json_new_u64(place + s->first));
    }
    return out;
}

static bool is_one_of(const char *key, const char *const *keys)
{
    while (*keys && strcmp(key, *keys) != 0)
        keys++;
    return *keys != NULL;
}

/* Lists of layers count from 1, unless one holds a 0. */
static uint32_t first_of(const struct json *text)
{
    static const char *const keys[] = {"kda_layers", "full_attn_layers"};
    const struct json *linear = json_get(text, "linear_attn_config");
    for (size_t k = 0; k < 2; k++)
        for (size_t i = 0; i < json_count(json_get(linear, keys[k])); i++) {
            uint64_t l;
            if (json_as_u64(json_at(json_get(linear, keys[k]), i), &l) && l == 0)
                return 0;
        }
    return linear ? 1 : 0;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static struct json *shrink_value(const struct shrink *s, const char *key, const struct json *v);

static struct json *shrink_object(const struct shrink *s, const struct json *o)
{
    static const char *const dropped[] = {"quantization_config", "compression_config",
                                          "vision_config", "audio_config", NULL};
    struct json *out = json_new_object();
    for (struct json_iter i = json_iter(o); json_next(&i);)
        if (!is_one_of(i.key, dropped))
            json_put(out, i.key, shrink_value(s, i.key, i.value));
    return out;
}

static struct json *shrink_value(const struct shrink *s, const char *key, const struct json *v)
{
    static const char *const inner[] = {"text_config", "linear_attn_config", "dsa_config", NULL};
    static const char *const numbers[] = {"kda_layers", "full_attn_layers", "layers",
                                          "mlp_only_layers", NULL};
    uint64_t x;
    if (json_kind_of(v) == JSON_OBJECT && is_one_of(key, inner))
        return shrink_object(s, v);
    if (json_kind_of(v) == JSON_ARRAY && is_one_of(key, numbers))
        return renumber(s, v);
    if (json_kind_of(v) == JSON_ARRAY && json_count(v) == s->a->outline->n_layers)
        return pick(s, v);
    if (!json_as_u64(v, &x))
        return json_copy(v);
    if (!strcmp(key, "num_hidden_layers"))
        return json_new_u64(s->n_kept);
    if (!strcmp(key, "first_k_dense_replace"))
        return json_new_u64(count_dense(s));
    uint32_t cap = cap_of(s, key);
    return json_new_u64(x > cap ? cap : x);
}

static int write_config(const struct json *config, const char *folder, struct err *err)
{
    char *path = xasprintf("%s/config.json", folder), *text = json_text(config, true);
    FILE *f = fopen(path, "we");
    int rc = 0;
    if (!f || fprintf(f, "%s\n", text) < 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    if (f && fclose(f) != 0 && rc == 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    free(text);
    free(path);
    return rc;
}

int adapt_shrink(const struct adapt *a, enum shrink_size size, const char *folder, struct err *err)
{
    char *path = xasprintf("%s/config.json", a->model_dir);
    struct shrink *s = xcalloc(1, sizeof *s);
    struct json *root = NULL;
    int rc = json_read_file(path, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc == 0) {
        const struct json *text = json_get(root, "text_config");
        *s = (struct shrink){.a = a, .size = size, .first = first_of(text ? text : root),
                             .has_groups = operator_layers(a->outline, OP_ROUTER_GROUPS) > 0};
        choose_layers(s);
        struct json *small = shrink_object(s, root);
        rc = write_config(small, folder, err);
        json_destroy(small);
    }
    json_destroy(root);
    free(s);
    free(path);
    return rc;
}
