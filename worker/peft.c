/* peft.c - reads and writes adapter_config.json, and lists the modules of an adapter's tensors */
#include "worker/peft.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "worker/ckpt_beside.h"

#define CONFIG_BYTES_MAX (1u << 20)

/* ---- reading -------------------------------------------------------------------------------- */

/* Keys that must say nothing: absent, null, false, or empty. */
static const char *const unused[] = {
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out", "kasa_config",
    "layer_replication", "lora_bias", "modules_to_save", "monteclora_config", "rank_pattern",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
    "use_rslora", "velora_config",
};

static bool says_nothing(const struct json *v)
{
    bool x = true;
    if (json_kind_of(v) == JSON_NULL)
        return true;
    if (json_kind_of(v) == JSON_ARRAY || json_kind_of(v) == JSON_OBJECT)
        return json_count(v) == 0;
    return json_as_bool(v, &x) && !x;
}

static int check_word(const struct json *o, const char *key, const char *expected, struct err *err)
{
    const char *word = json_as_string(json_get(o, key));
    if (json_kind_of(json_get(o, key)) == JSON_NULL || (word && strcmp(word, expected) == 0))
        return 0;
    return err_set(err, -EINVAL, "'%s' is not \"%s\", the only one that is known here", key,
                   expected);
}

static int read_config(const struct json *o, struct peft *p, struct err *err)
{
    int rc;
    if ((rc = check_word(o, "peft_type", "LORA", err)) < 0 ||
        (rc = check_word(o, "bias", "none", err)) < 0 ||
        (rc = json_get_u32(o, "r", 1, LORA_RANK_MAX, &p->r, err)) < 0 ||
        (rc = json_get_double(o, "lora_alpha", &p->alpha, err)) < 0)
        return rc;
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++)
        if (!says_nothing(json_get(o, unused[i])))
            return err_set(err, -ENOTSUP, "'%s' is set; adapters are plain A and B of one rank "
                           "here", unused[i]);
    rc = json_get_double(o, "lora_dropout", &p->dropout, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    if (!isfinite(p->alpha) || p->alpha <= 0)
        return err_set(err, -EINVAL, "'lora_alpha' is %g, expected more than 0", p->alpha);
    return 0;
}

static bool has_target(const struct peft *p, const char *target)
{
    for (size_t i = p->n_targets; i-- > 0;) /* names come in order: mostly one of the last */
        if (strcmp(p->targets[i], target) == 0)
            return true;
    return false;
}

static int list_targets(const char *path, struct peft *p, struct err *err)
{
    struct safetensors *st;
    int rc = safetensors_open(path, &st, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < safetensors_count(st) && rc == 0; i++) {
        char target[LORA_NAME_BYTES];
        const char *name = safetensors_at(st, i)->tensor.name;
        if (lora_is_copy(name, target))
            continue;
        if ((rc = lora_target_of(name, target, err)) < 0)
            err_prefix(err, "%s", path);
        else if (!has_target(p, target)) {
            p->targets = xrealloc(p->targets, (p->n_targets + 1) * sizeof *p->targets);
            p->targets[p->n_targets++] = xstrdup(target);
        }
    }
    if (rc == 0 && p->n_targets == 0)
        rc = err_set(err, -EINVAL, "%s holds no adapter", path);
    safetensors_close(st);
    return rc;
}

int peft_open(const char *folder, struct peft *out, struct err *err)
{
    char *config = xasprintf("%s/" PEFT_CONFIG_FILE, folder);
    char *tensors = xasprintf("%s/" PEFT_TENSORS_FILE, folder);
    struct peft p = {0};
    struct json *o = NULL;
    int rc = json_read_file(config, CONFIG_BYTES_MAX, &o, err);
    if (rc == -ENOENT)
        err_set(err, rc, "%s: is not there; expected a PEFT folder, as step-N of a job's "
                "checkpoint.path is one", config);
    if (rc == 0 && (rc = read_config(o, &p, err)) < 0)
        err_prefix(err, "%s", config);
    if (rc == 0)
        rc = list_targets(tensors, &p, err);
    json_destroy(o);
    free(config);
    free(tensors);
    if (rc < 0)
        peft_fini(&p);
    else
        *out = p;
    return rc;
}

void peft_fini(struct peft *p)
{
    for (size_t i = 0; i < p->n_targets; i++)
        free(p->targets[i]);
    free(p->targets);
    *p = (struct peft){0};
}

#define COPY_FLOATS ((uint64_t)1 << 16) /* compared at once */

static int check_copy(const struct st_view *copy, const struct st_view *base, struct err *err)
{
    float *x = xcalloc(2 * COPY_FLOATS, sizeof *x);
    bool same = base && copy->tensor.n_dims == base->tensor.n_dims &&
                memcmp(copy->tensor.dims, base->tensor.dims,
                       copy->tensor.n_dims * sizeof *copy->tensor.dims) == 0;
    int rc = 0;
    for (uint64_t at = 0; same && rc == 0 && at < copy->n_elements; at += COPY_FLOATS) {
        uint64_t rest = copy->n_elements - at, n = rest < COPY_FLOATS ? rest : COPY_FLOATS;
        if ((rc = st_read_f32(copy, at, n, x, err)) == 0 &&
            (rc = st_read_f32(base, at, n, x + COPY_FLOATS, err)) == 0)
            same = memcmp(x, x + COPY_FLOATS, n * sizeof *x) == 0;
    }
    free(x);
    if (rc < 0 || same)
        return rc;
    return err_set(err, -EINVAL, "%s: tensor '%.200s' is not the matrix of the model that the "
                   "adapter is to lie beside", copy->file, copy->tensor.name);
}

int peft_check_copies(const char *folder, const char *base_folder, struct err *err)
{
    char *path = xasprintf("%s/" PEFT_TENSORS_FILE, folder);
    struct safetensors *st = NULL, *base = NULL;
    int rc = safetensors_open(path, &st, err);
    for (size_t i = 0; rc == 0 && i < safetensors_count(st); i++) {
        const struct st_view *v = safetensors_at(st, i);
        char name[LORA_NAME_BYTES];
        if (!lora_is_copy(v->tensor.name, name))
            continue;
        if (base || (rc = safetensors_open(base_folder, &base, err)) == 0)
            rc = check_copy(v, safetensors_find(base, name), err);
    }
    safetensors_close(st);
    safetensors_close(base);
    free(path);
    return rc;
}

struct lora_config peft_lora(const struct peft *p)
{
    return (struct lora_config){.r = p->r, .alpha = p->alpha,
                                .targets = (const char *const *)p->targets,
                                .n_targets = p->n_targets};
}

int peft_check(const struct peft *p, const char *folder, const struct lora_config *c,
               struct err *err)
{
    if (p->r != c->r)
        return err_set(err, -EINVAL, "%s: r is %u, the job's train.lora.r is %u", folder, p->r,
                       c->r);
    if (p->alpha != c->alpha)
        return err_set(err, -EINVAL, "%s: lora_alpha is %g, the job's train.lora.alpha is %g",
                       folder, p->alpha, c->alpha);
    if (p->dropout != 0)
        return err_set(err, -EINVAL, "%s: lora_dropout is %g, but adapters are trained without "
                       "dropout here; set it to 0 in " PEFT_CONFIG_FILE " to go on without",
                       folder, p->dropout);
    return 0;
}

/* ---- writing -------------------------------------------------------------------------------- */

/* The last part of the path of an expert's matrix: "w1" of "...experts.0.w1.weight". Gives. */
static char *expert_word(const struct tensor_entry *base)
{
    const char *end = strrchr(base->name, '.'), *begin = end;
    while (begin[-1] != '.')
        begin--;
    return xasprintf("%.*s", (int)(end - begin), begin);
}

static void append(struct json *list, char **pattern, const char *word)
{
    char *longer = xasprintf("%s%s%s", *pattern, **pattern ? "|" : "", word);
    json_push(list, json_new_string(word));
    free(*pattern);
    *pattern = longer;
}

/* A list of ends of paths, or where experts have adapters one pattern of whole paths, because of
 * their numbers. */
static struct json *targets_of(const struct lora_config *c, const struct tensor_map *map)
{
    struct json *list = json_new_array();
    char *pattern = xstrdup("");
    bool has_experts = false;
    for (size_t i = 0; i < c->n_targets; i++)
        if (strcmp(c->targets[i], "experts") != 0)
            append(list, &pattern, c->targets[i]);
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        if (e->adapter != ADAPTER_B || e->expert != 0)
            continue;
        char *word = expert_word(lora_base_of(map, e));
        char *whole = xasprintf("experts\\.[0-9]+\\.%s", word);
        if (!strstr(pattern, whole))
            append(list, &pattern, whole);
        has_experts = true;
        free(whole);
        free(word);
    }
    if (has_experts) {
        char *whole = xasprintf("(.*\\.)?(%s)", pattern);
        json_destroy(list);
        list = json_new_string(whole);
        free(whole);
    }
    free(pattern);
    return list;
}

int peft_write_config(const char *folder, const struct lora_config *c,
                      const struct tensor_map *map, const char *base_path, struct err *err)
{
    struct json *o = json_new_object();
    json_put(o, "peft_type", json_new_string("LORA"));
    json_put(o, "task_type", json_new_string("CAUSAL_LM"));
    json_put(o, "base_model_name_or_path", json_new_string(base_path));
    json_put(o, "inference_mode", json_new_bool(true));
    json_put(o, "r", json_new_u64(c->r));
    json_put(o, "lora_alpha", json_new_double(c->alpha));
    json_put(o, "lora_dropout", json_new_double(0));
    json_put(o, "bias", json_new_string("none"));
    json_put(o, "fan_in_fan_out", json_new_bool(false));
    json_put(o, "use_rslora", json_new_bool(false));
    json_put(o, "use_dora", json_new_bool(false));
    json_put(o, "init_lora_weights", json_new_bool(true));
    json_put(o, "target_modules", targets_of(c, map));
    char *path = xasprintf("%s/" PEFT_CONFIG_FILE, folder);
    int rc = ckpt_write_json(o, path, err);
    json_destroy(o);
    free(path);
    return rc;
}
