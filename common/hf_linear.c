/* hf_linear.c - reads which layers of a Kimi model are linear attention, in both spellings */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "common/hf_keys.h"
#include "common/hf_text.h"

#define AT(field) offsetof(struct model_spec, field)

static const struct hf_number published[] = {
    { "num_heads", NULL, AT(kda_heads), 1, HF_HEADS_MAX },
    { "head_dim", NULL, AT(kda_head_dim), 1, 1024 },
    { "short_conv_kernel_size", NULL, AT(conv_kernel), 1, 16 },
};

static const struct hf_number flat[] = {
    { "linear_num_heads", NULL, AT(kda_heads), 1, HF_HEADS_MAX },
    { "linear_head_dim", NULL, AT(kda_head_dim), 1, 1024 },
    { "linear_conv_kernel_dim", NULL, AT(conv_kernel), 1, 16 },
};

/* Marks the layers of one list, whose numbers begin with 1. */
static int read_layer_list(const struct json *linear, const char *key, enum attention_kind kind,
                           bool *seen, struct model_spec *m, struct err *err)
{
    const struct json *list = json_get(linear, key);

    if (!list)
        return err_set(err, -EINVAL, "key '%s' is missing", key);
    if (json_kind_of(list) != JSON_ARRAY)
        return err_set(err, -EINVAL, "key '%s' is not a list of layer numbers", key);
    for (size_t i = 0; i < json_count(list); i++) {
        uint32_t l;
        int rc = hf_layer(list, i, key, m->n_layers, &l, err);
        if (rc < 0)
            return rc;
        if (seen[l])
            return err_set(err, -EINVAL,
                           "layer %u stands twice in kda_layers and full_attn_layers", l + 1);
        seen[l] = true;
        m->layers[l].attention = kind;
    }
    return 0;
}

static int read_published(const struct json *linear, struct model_spec *m, struct err *err)
{
    bool seen[LAYERS_MAX] = {0};
    int rc = hf_numbers(linear, published, sizeof published / sizeof *published, m, err);

    if (rc == 0)
        rc = hf_flag(linear, "use_full_rank_gate", false, &m->kda_gate_full_rank, err);
    m->kda_gate_bounded = json_get(linear, "gate_lower_bound") != NULL;
    if (rc == 0 && m->kda_gate_bounded)
        rc = hf_real(linear, "gate_lower_bound", -5, -1e-3, NAN, &m->kda_gate_lower_bound, err);
    if (rc == 0)
        rc = read_layer_list(linear, "kda_layers", ATTENTION_KDA, seen, m, err);
    if (rc == 0)
        rc = read_layer_list(linear, "full_attn_layers", ATTENTION_MLA, seen, m, err);
    for (uint32_t l = 0; rc == 0 && l < m->n_layers; l++)
        if (!seen[l])
            rc = err_set(err, -EINVAL,
                         "layer %u stands neither in kda_layers nor in full_attn_layers", l + 1);
    if (rc < 0)
        err_prefix(err, "linear_attn_config");
    return rc;
}

/* transformers also saves dense layers under the experts' name. */
static int read_flat(const struct json *o, struct model_spec *m, struct err *err)
{
    const struct json *types = json_get(o, "layer_types");
    int rc = hf_numbers(o, flat, sizeof flat / sizeof *flat, m, err);

    if (rc < 0)
        return rc;
    if (json_kind_of(types) != JSON_ARRAY || json_count(types) != m->n_layers)
        return err_set(err, -EINVAL, "key 'layer_types' is not a list of %u layers", m->n_layers);
    for (uint32_t l = 0; l < m->n_layers; l++) {
        const char *type = json_as_string(json_at(types, l));
        if (type && strcmp(type, "linear_attention") == 0)
            m->layers[l].attention = ATTENTION_KDA;
        else if (type && strcmp(type, "full_attention") == 0)
            m->layers[l].attention = ATTENTION_MLA;
        else
            return err_set(err, -EINVAL, "key 'layer_types', element %u: expected "
                           "'linear_attention' or 'full_attention'", l);
    }
    m->dense_as_moe = true;
    return 0;
}

int hf_linear(const struct json *o, struct model_spec *m, struct err *err)
{
    const struct json *linear = json_get(o, "linear_attn_config");

    if (!linear && m->family == FAMILY_KIMI_LINEAR && json_get(o, "layer_types"))
        return read_flat(o, m, err);
    if (json_kind_of(linear) != JSON_OBJECT)
        return err_set(err, -EINVAL, "key 'linear_attn_config' is missing or not an object");
    return read_published(linear, m, err);
}
