/* hf_config.c - reads a config.json: which family it is, and its text model */
#include "common/hf_config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/hf_keys.h"
#include "common/hf_text.h"
#include "common/mem.h"

#define SUPPORTED "kimi_k3, kimi_linear, deepseek_v3, kimi_k2, deepseek_v32"

static const struct family {
    const char *type;
    enum model_family family;
    bool has_indexer;
} families[] = {
    { "kimi_k3", FAMILY_KIMI_K3 },
    { "kimi_k31", FAMILY_KIMI_K3, true },
    { "kimi_k3_1", FAMILY_KIMI_K3, true },
    { "kimi_linear", FAMILY_KIMI_LINEAR },
    { "deepseek_v3", FAMILY_DEEPSEEK_V3 },
    { "kimi_k2", FAMILY_DEEPSEEK_V3 },
    { "deepseek_v32", FAMILY_DEEPSEEK_V3, true },
};

/* Families that are known and not built, with the operators that they need beyond ours. */
static const struct {
    const char *type, *needs;
} lacking[] = {
    { "deepseek_v2", "a softmax router over groups" },
    { "deepseek_v4", "shared key-value heads, compressed keys, attention sinks, hyper-connections, "
                     "a square-root-softplus router" },
    { "glm_moe_dsa", "sparse attention with index sets that layers share" },
    { "glm5_next", "hyper-connections, pooled index keys, clamped SwiGLU" },
    { "glm5_next_text", "hyper-connections, pooled index keys, clamped SwiGLU" },
    { "glm4_moe", "grouped-query attention, partial rotary" },
    { "qwen3_moe", "grouped-query attention, query and key norms, a softmax router" },
    { "qwen3_next", "a gated delta rule, gated grouped-query attention, zero-centred norms, a "
                    "softmax router, a gated shared expert" },
    { "qwen3_5_moe", "a gated delta rule, gated grouped-query attention, zero-centred norms, a "
                     "softmax router, a gated shared expert" },
    { "mixtral", "grouped-query attention, a softmax router" },
    { "gpt_oss", "grouped-query attention with sinks and a sliding window, biases, a router that "
                 "takes the softmax of the chosen" },
    { "olmoe", "attention with query and key norms over all heads, a softmax router" },
    { "minimax_m2", "grouped-query attention, norms over all heads, partial rotary" },
    { "nemotron_h", "Mamba2, grouped-query attention, squared ReLU experts of two matrices" },
};

static int read_family(const struct json *root, const struct family **out, struct err *err)
{
    const char *type;
    char part[64];
    int rc = json_get_string(root, "model_type", &type, err);

    if (rc == -ENOENT)
        return err_set(err, -EINVAL, "key 'model_type' is missing; supported: " SUPPORTED);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (strcmp(type, families[i].type) == 0) {
            *out = &families[i];
            return 0;
        }
    for (size_t i = 0; i < sizeof lacking / sizeof *lacking; i++)
        if (strcmp(type, lacking[i].type) == 0)
            return err_set(err, -ENOTSUP, "key 'model_type' is '%s', which needs what is not "
                           "built: %s; supported: " SUPPORTED, type, lacking[i].needs);
    return err_set(err, -ENOTSUP, "key 'model_type' is '%s'; supported: " SUPPORTED,
                   hf_shown(type, part));
}

static int read_root(const struct json *root, struct model_spec *m, struct err *err)
{
    if (json_kind_of(root) != JSON_OBJECT)
        return err_set(err, -EINVAL, "not a JSON object, expected a model's config.json");
    const struct family *family = NULL;
    int rc = read_family(root, &family, err);
    if (rc < 0 || (rc = hf_expect_flag(root, "tie_word_embeddings", false, err)) < 0)
        return rc;
    m->family = family->family;
    bool nested = m->family == FAMILY_KIMI_K3;
    const struct json *text = nested ? json_get(root, "text_config") : root;
    if (json_kind_of(text) != JSON_OBJECT)
        return err_set(err, -EINVAL, "key 'text_config' is missing or not an object");
    rc = hf_text(text, m, err);
    if (rc == 0 && family->has_indexer && !m->index_top_k)
        rc = err_set(err, -EINVAL, "key 'index_topk' is missing: a %s model has an indexer",
                     family->type);
    if (rc < 0 && nested)
        err_prefix(err, "text_config");
    return rc == -ENOENT ? -EINVAL : rc; /* the file is there, a key is not */
}

static int read_parsed(const char *name, struct json *root, struct model_spec *out,
                       struct err *err)
{
    struct model_spec m = {0};
    struct err own = {0};
    int rc = read_root(root, &m, &own);

    json_destroy(root);
    if (rc < 0)
        return err_set(err, rc, "%s: %s", name, own.text);
    *out = m;
    return 0;
}

int hf_config_parse(const char *name, const char *text, size_t n_bytes, struct model_spec *out,
                    struct err *err)
{
    struct json *root;
    int rc = json_parse(text, n_bytes, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc < 0) {
        err_prefix(err, "%s", name);
        return rc;
    }
    return read_parsed(name, root, out, err);
}

int hf_config_read(const char *path, struct model_spec *out, struct err *err)
{
    struct stat s;
    bool is_folder = stat(path, &s) == 0 && S_ISDIR(s.st_mode);
    char *file = is_folder ? xasprintf("%s/config.json", path) : xstrdup(path);
    struct json *root;
    int rc = json_read_file(file, HF_CONFIG_BYTES_MAX, &root, err);
    if (rc == 0)
        rc = read_parsed(file, root, out, err);
    free(file);
    return rc;
}
