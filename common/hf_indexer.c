/* hf_indexer.c - reads the indexer of sparse attention, and checks that every layer that could have
 * one does */
#include <errno.h>
#include <string.h>

#include "common/hf_keys.h"
#include "common/hf_text.h"

#define AT(field) offsetof(struct model_spec, field)
#define LAYER_NORM_EPS 1e-6

static const struct hf_number numbers[] = {
    { "index_n_heads", NULL, AT(index_heads), 1, HF_HEADS_MAX },
    { "index_head_dim", NULL, AT(index_head_dim), 1, 1024 },
    { "index_topk", NULL, AT(index_top_k), 1, 1u << 20 },
};

/* A list of layer numbers, from 1, that must be those of latent attention. */
static int check_layers(const char *key, const struct json *list, const struct model_spec *m,
                        struct err *err)
{
    bool has[LAYERS_MAX] = {0};

    for (size_t i = 0; i < json_count(list); i++) {
        uint32_t l;
        int rc = hf_layer(list, i, key, m->n_layers, &l, err);
        if (rc < 0)
            return rc;
        has[l] = true;
    }
    for (uint32_t l = 0; l < m->n_layers; l++)
        if (has[l] != (m->layers[l].attention == ATTENTION_MLA))
            return err_set(err, -ENOTSUP, "key '%s' %s layer %u; supported: an indexer in every "
                           "layer of full attention and in no other", key,
                           has[l] ? "has" : "lacks", l + 1);
    return 0;
}

/* The list's key is not the same everywhere, so any list is taken for it. */
static int read_own_object(const struct json *dsa, const struct model_spec *m, struct err *err)
{
    for (struct json_iter i = json_iter(dsa); json_next(&i);) {
        int rc = json_kind_of(i.value) == JSON_ARRAY ? check_layers(i.key, i.value, m, err) : 0;
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Where transformers lists the layers' kinds, all must be sparse. */
static int check_types(const struct json *o, const struct model_spec *m, struct err *err)
{
    const struct json *types = json_get(o, "layer_types");
    char part[64];

    for (size_t l = 0; m->family == FAMILY_DEEPSEEK_V3 && l < json_count(types); l++) {
        const char *type = json_as_string(json_at(types, l));
        if (!type || strcmp(type, "deepseek_sparse_attention") != 0)
            return err_set(err, -ENOTSUP, "key 'layer_types', element %zu, is '%s'; supported: "
                           "deepseek_sparse_attention", l, type ? hf_shown(type, part) : "no text");
    }
    return 0;
}

static int check(const struct json *o, const struct model_spec *m, struct err *err)
{
    if (m->q_lora_rank == 0)
        return err_set(err, -ENOTSUP, "an indexer needs 'q_lora_rank': it reads the query's "
                       "latent");
    if (m->mla_rotary && m->index_head_dim < m->rotary.dim)
        return err_set(err, -EINVAL, "key 'index_head_dim' is %u, less than the %u dims that turn",
                       m->index_head_dim, m->rotary.dim);
    return check_types(o, m, err);
}

int hf_indexer(const struct json *o, struct model_spec *m, struct err *err)
{
    const struct json *own = json_get(o, "dsa_config"), *from = own ? own : o;
    int rc;

    if (!own && !json_get(o, "index_topk"))
        return 0;
    if (own && json_kind_of(own) != JSON_OBJECT)
        return err_set(err, -EINVAL, "key 'dsa_config' is not an object");
    rc = hf_numbers(from, numbers, sizeof numbers / sizeof *numbers, m, err);
    if (rc == 0 && own)
        rc = read_own_object(own, m, err);
    if (rc < 0 && own)
        err_prefix(err, "dsa_config");
    if (rc < 0 || (rc = check(o, m, err)) < 0)
        return rc;
    /* K3.1 states none, and takes the model's. */
    m->index_norm_eps = m->family == FAMILY_KIMI_K3 ? m->norm_eps : (float)LAYER_NORM_EPS;
    return 0;
}
