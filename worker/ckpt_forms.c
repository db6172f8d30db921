/* ckpt_forms.c - decides the form of each tensor from the model's folder and the job's wish
 *
 * A configuration speaks of all packed tensors at once, so they are all packed or all plain. */
#include "worker/ckpt_forms.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "worker/ckpt_source.h"

int ckpt_dtype_parse(const char *word, enum ckpt_dtype *out, struct err *err)
{
    static const char *const words[] = {"source", "f32", "bf16", "f16"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i]) == 0) {
            *out = (enum ckpt_dtype)i;
            return 0;
        }
    return err_set(err, -EINVAL, "checkpoint.dtype '%s': unknown, use one of source, f32, bf16, "
                   "f16", word);
}

static struct ckpt_form form_of(const struct tensor_entry *e, const struct ckpt_source *source,
                                enum ckpt_dtype choice)
{
    static const enum st_dtype chosen[] = {[CKPT_DTYPE_F32] = ST_F32, [CKPT_DTYPE_BF16] = ST_BF16,
                                           [CKPT_DTYPE_F16] = ST_F16};
    bool is_plain = source->values && !source->scales;
    struct ckpt_form f = {.dtype = ST_F32};
    if (choice != CKPT_DTYPE_SOURCE)
        f.dtype = e->keep_f32 ? ST_F32 : chosen[choice];
    else if (is_plain)
        f.dtype = source->values->tensor.dtype;
    else if (source->scales)
        f.dtype = ST_BF16; /* what published models are before they are packed */
    if (source->is_fused) {
        f.fused = source->values;
        f.fused_at = source->at;
    }
    f.is_left_out = e->is_unreached && e->is_optional && !source->values;
    f.is_exact = f.dtype == ST_F32 || f.is_left_out ||
                 (e->is_unreached && is_plain && f.dtype == source->values->tensor.dtype);
    return f;
}

/* The packed tensors, if the job trains none of them. */
static void keep_packed(struct ckpt_forms *f, const struct tensor_map *map,
                        const struct ckpt_source *sources)
{
    bool any = false;
    for (size_t i = 0; i < map->n_entries; i++) {
        if (!sources[i].scales)
            continue;
        if (!map->entries[i].is_unreached)
            return;
        any = true;
    }
    f->is_packed = any;
    for (size_t i = 0; i < map->n_entries; i++) {
        if (!sources[i].scales)
            continue;
        f->of[i].packed = sources[i].values;
        f->of[i].scales = sources[i].scales;
        f->of[i].is_exact = true;
    }
}

static int find_sources(const struct ckpt_forms *f, const struct tensor_map *map,
                        const char *model_path, struct ckpt_source *out, struct err *err)
{
    int rc = 0;
    for (size_t i = 0; f->source && i < map->n_entries && rc == 0; i++) {
        const struct tensor_entry *e = &map->entries[i];
        if (e->adapter == ADAPTER_NONE &&
            (!e->is_optional || safetensors_find(f->source, e->name)))
            rc = ckpt_source_find(f->source, e, model_path, &out[i], err);
    }
    return rc;
}

int ckpt_forms_open(const char *model_path, bool has_weights, const struct tensor_map *map,
                    enum ckpt_dtype choice, struct ckpt_forms *out, struct err *err)
{
    struct ckpt_forms f = {.of = xcalloc(map->n_entries, sizeof *f.of)};
    struct ckpt_source *sources = xcalloc(map->n_entries, sizeof *sources);
    int rc = has_weights ? safetensors_open(model_path, &f.source, err) : 0;
    if (rc == 0)
        rc = find_sources(&f, map, model_path, sources, err);
    for (size_t i = 0; i < map->n_entries && rc == 0; i++)
        f.of[i] = form_of(&map->entries[i], &sources[i], choice);
    if (rc == 0 && choice == CKPT_DTYPE_SOURCE)
        keep_packed(&f, map, sources);
    for (size_t i = 0; i < map->n_entries; i++)
        f.n_masters += !f.of[i].is_exact;
    free(sources);
    if (rc < 0)
        ckpt_forms_close(&f);
    else
        *out = f;
    return rc;
}

void ckpt_forms_close(struct ckpt_forms *f)
{
    safetensors_close(f->source);
    free(f->of);
    *f = (struct ckpt_forms){0};
}
