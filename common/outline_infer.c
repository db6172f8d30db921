/* outline_infer.c - builds layers from the names and shapes of tensors alone */
#include "common/outline_infer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hf_config.h"
#include "common/hf_keys.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/outline_config.h"
#include "common/tensor_kind.h"

struct work {
    const struct tensor_list *list;
    struct outline *o;
    uint32_t top_k; /* 0: no key tells */
};

/* ---- parts ---------------------------------------------------------------------------------- */

static bool has_any(const char *name, const char *const *words)
{
    for (; *words; words++)
        if (strstr(name, *words))
            return true;
    return false;
}

static enum outline_part part_of(const char *name)
{
    static const char *const shared[] = {"shared", NULL}, *const experts[] = {"experts.", NULL};
    static const char *const router[] = {"router", ".gate.", "correction_bias", NULL};
    static const char *const mixer[] = {"attn", "attention", "mixer", "mamba", "ssm", "conv", NULL};
    static const char *const norms[] = {"norm", NULL};
    static const char *const embedding[] = {"embed", "lm_head", "wte", "output.weight", NULL};
    if (has_any(name, shared))
        return PART_SHARED;
    if (has_any(name, experts))
        return PART_EXPERTS;
    if (has_any(name, router))
        return PART_ROUTER;
    if (has_any(name, embedding))
        return PART_EMBEDDING;
    if (has_any(name, mixer))
        return PART_ATTENTION;
    return has_any(name, norms) ? PART_NORMS : PART_DENSE;
}

static bool is_of_mixer(enum outline_part part, const char *name)
{
    return part == PART_ATTENTION || (part == PART_NORMS && strstr(name, "input"));
}

/* One matrix of (out, in), a vector, or with experts in front so many of them. */
static struct outline_tensor tensor_of(const struct work *w, const struct tensor_group *g,
                                       uint32_t n_in_layer)
{
    struct outline_tensor t = {.names = g->name, .part = part_of(g->name), .n_copies = n_in_layer};
    uint64_t n = g->n_elements * tensor_unpacked(g, w->o->quant.bits);
    uint32_t first = 0;
    if (t.part == PART_EXPERTS && g->n_dims >= 2 && !strstr(g->name, "{E}")) {
        t.n_copies = (uint32_t)g->dims[0];
        first = 1;
    }
    uint64_t each = t.n_copies ? n / (first ? t.n_copies : 1) : 0;
    t.out = g->n_dims > first && g->dims[first] ? g->dims[first] : each;
    t.in = g->n_dims > first + 1 && t.out ? each / t.out : 0;
    if (!t.in)
        t.out = each;
    return t;
}

/* ---- blocks --------------------------------------------------------------------------------- */

static int add_tensor(struct outline_block *b, const struct outline_tensor *t, struct err *err)
{
    static const char *const down[] = {"down", "w2", "fc2", "output", NULL};
    if (b->n_tensors == OUTLINE_TENSORS_MAX)
        return err_set(err, -ENOTSUP, "a layer has more than %u different tensors",
                       2 * OUTLINE_TENSORS_MAX);
    b->tensors[b->n_tensors++] = *t;
    if (t->part != PART_EXPERTS)
        return 0;
    if (t->n_copies < 1 || t->n_copies > EXPERTS_MAX)
        return err_set(err, -EINVAL, "tensor '%.200s' is of %u experts, allowed 1 to %u", t->names,
                       t->n_copies, EXPERTS_MAX);
    b->ops |= 1ull << OP_EXPERTS;
    b->n_experts = t->n_copies;
    b->expert_matrices += t->in > 1;
    if (t->in > 1 && !has_any(t->names, down)) {
        b->expert_in = (uint32_t)t->in;
        b->expert_inter = (uint32_t)t->out;
    }
    return 0;
}

static int keep_block(struct outline *o, const struct outline_block *b, uint16_t *out,
                      struct err *err)
{
    uint32_t i = 0;
    *out = OUTLINE_NONE;
    if (!b->n_tensors)
        return 0;
    while (i < o->n_blocks && memcmp(b, &o->blocks[i], sizeof *b) != 0)
        i++;
    if (i == OUTLINE_BLOCKS_MAX)
        return err_set(err, -ENOTSUP, "the layers are of more than %u different kinds",
                       OUTLINE_BLOCKS_MAX);
    if (i == o->n_blocks)
        o->blocks[o->n_blocks++] = *b;
    *out = (uint16_t)i;
    return 0;
}

static int add_layer(struct work *w, uint32_t l, struct outline_block *mixer,
                     struct outline_block *ffn, struct err *err)
{
    int rc = 0;
    memset(mixer, 0, sizeof *mixer);
    memset(ffn, 0, sizeof *ffn);
    memcpy(mixer->kind, "mixer", 6);
    for (size_t i = 0; rc == 0 && i < w->list->n_groups; i++) {
        const struct tensor_group *g = &w->list->groups[i];
        if (!g->has_layers || !g->per_layer[l] || tensor_kind_of(g) != TENSOR_TEXT)
            continue;
        struct outline_tensor t = tensor_of(w, g, g->per_layer[l]);
        rc = add_tensor(is_of_mixer(t.part, g->name) ? mixer : ffn, &t, err);
    }
    ffn->top_k = w->top_k && w->top_k <= ffn->n_experts ? w->top_k : ffn->n_experts;
    if (ffn->n_experts)
        memcpy(ffn->kind, "moe", sizeof "moe");
    else
        memcpy(ffn->kind, "dense", sizeof "dense");
    if (rc == 0 && (rc = keep_block(w->o, mixer, &w->o->layers[l].mixer, err)) == 0)
        rc = keep_block(w->o, ffn, &w->o->layers[l].ffn, err);
    return rc;
}

static bool is_mtp_mark(const char *name)
{
    static const char *const marks[] = {".eh_proj.", ".enorm.", ".hnorm.", NULL};
    return has_any(name, marks);
}

/* A next-token layer, which stands after the last, joins two inputs by tensors of its own. */
static uint32_t count_layers(const struct tensor_list *list)
{
    uint32_t n = 0, first_mtp = LAYERS_MAX;
    for (size_t i = 0; i < list->n_groups; i++) {
        const struct tensor_group *g = &list->groups[i];
        if (!g->has_layers || tensor_kind_of(g) != TENSOR_TEXT)
            continue;
        for (uint32_t l = 0; l < LAYERS_MAX; l++) {
            if (g->per_layer[l] && l >= n)
                n = l + 1;
            if (g->per_layer[l] && is_mtp_mark(g->name) && l < first_mtp)
                first_mtp = l;
        }
    }
    return n < first_mtp ? n : first_mtp;
}

static int add_layers(struct work *w, struct err *err)
{
    struct outline_block *mixer = xcalloc(1, sizeof *mixer), *ffn = xcalloc(1, sizeof *ffn);
    int rc = 0;
    w->o->n_layers = count_layers(w->list);
    for (uint32_t l = 0; rc == 0 && l < w->o->n_layers; l++)
        rc = add_layer(w, l, mixer, ffn, err);
    free(mixer);
    free(ffn);
    return rc;
}

/* The embedding gives the widths. */
static int add_top(struct work *w, struct err *err)
{
    struct outline *o = w->o;
    bool has_head = false;
    int rc = 0;
    memcpy(o->top.kind, "top", 4);
    for (size_t i = 0; rc == 0 && i < w->list->n_groups; i++) {
        const struct tensor_group *g = &w->list->groups[i];
        if (g->has_layers || tensor_kind_of(g) != TENSOR_TEXT)
            continue;
        struct outline_tensor t = tensor_of(w, g, (uint32_t)g->n_tensors);
        rc = add_tensor(&o->top, &t, err);
        if (t.part != PART_EMBEDDING || t.in < 2 || t.out > UINT32_MAX || t.in > UINT32_MAX)
            continue;
        has_head |= o->vocab == t.out;
        o->vocab = t.out > o->vocab ? (uint32_t)t.out : o->vocab;
        o->hidden = (uint32_t)t.in;
    }
    o->is_tied = !has_head;
    if (rc == 0 && (!o->hidden || !o->n_layers))
        rc = err_set(err, -EINVAL, "the tensors have neither an embedding nor layers");
    return rc;
}

/* ---- keys ----------------------------------------------------------------------------------- */

/* Any number whose key speaks of experts per token. */
static uint32_t find_top_k(const struct json *o)
{
    static const char *const words[] = {"per_tok", "topk", "top_k", NULL};
    for (struct json_iter i = json_iter(o); json_next(&i);) {
        uint64_t x;
        if (has_any(i.key, words) && !strstr(i.key, "group") && !strstr(i.key, "index") &&
            json_as_u64(i.value, &x) && x > 0 && x <= EXPERTS_MAX)
            return (uint32_t)x;
        uint32_t inner = json_kind_of(i.value) == JSON_OBJECT ? find_top_k(i.value) : 0;
        if (inner)
            return inner;
    }
    return 0;
}

static int read_keys(struct work *w, const struct json *root, const char *why, struct err *err)
{
    const char *type = json_as_string(json_get(root, "model_type"));
    char shown[64];
    if (!type || outline_is_known(type) || w->list->source == TENSORS_INDEX ||
        w->list->source == TENSORS_NONE)
        return err_set(err, -ENOTSUP, "%s", why);
    snprintf(w->o->family, sizeof w->o->family, "%s", hf_shown(type, shown));
    w->top_k = find_top_k(root);
    w->o->has_vision = json_get(root, "vision_config") != NULL;
    const char *key = strstr(why, "key '");
    outline_note(w->o, "model_type '%s' is not known and its keys do not tell enough: layers are "
                 "those of the tensors", w->o->family);
    outline_note(w->o, "%s", key ? key : why);
    outline_note(w->o, "operators and heads are not known; plans leave out what attention over the "
                 "sequence costs");
    if (!w->top_k)
        outline_note(w->o, "no key tells how many experts a token uses: all count as active");
    return 0;
}

int outline_infer(const char *config, const struct tensor_list *list, const char *why,
                  struct outline **out, struct err *err)
{
    struct json *root;
    int rc = json_read_file(config, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc < 0)
        return rc;
    struct work w = {.list = list, .o = xcalloc(1, sizeof *w.o)};
    rc = read_keys(&w, root, why, err);
    if (rc == 0 && (rc = add_layers(&w, err)) == 0)
        rc = add_top(&w, err);
    json_destroy(root);
    if (rc < 0)
        free(w.o);
    else
        *out = w.o;
    return rc;
}
