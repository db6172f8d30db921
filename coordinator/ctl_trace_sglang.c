/* ctl_trace_sglang.c - what SGLang's expert distribution recorder dumps
 *
 * In its mode `stat` a dictionary with logical_count (step, layer, logical expert), all ranks
 * together; in the modes `per_pass` and `per_token` one file per rank with records, each with a
 * forward_pass_id and global_physical_count (layer, physical expert), and
 * last_physical_to_logical_map. As JSON: logical_count alone, with or without steps. */
#include "coordinator/ctl_trace.h"

#include <math.h>
#include <string.h>

#include "coordinator/ctl_torch.h"

#define STEPS_MAX (1u << 20)

static bool fits(int64_t n_layers, int64_t n_experts)
{
    return n_layers >= 1 && n_layers <= LAYERS_MAX && n_experts >= 1 && n_experts <= EXPERTS_MAX;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static int add_layers(struct trace *t, uint64_t step, const struct json *layers, struct err *err)
{
    for (uint32_t k = 0; k < json_count(layers); k++) {
        const struct json *loads = json_at(layers, k);
        size_t n = json_count(loads);
        if (!fits((int64_t)json_count(layers), (int64_t)n))
            return trace_fail(t, err, "logical_count: expected at most %u layers of at most %u "
                              "experts", LAYERS_MAX, EXPERTS_MAX);
        double *load = trace_add(t, step, k, TRACE_RANK_NONE, (uint32_t)n);
        for (size_t e = 0; e < n; e++) {
            int rc = trace_load(t, json_at(loads, e), &load[e], err);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

int trace_sglang_json(struct trace *t, const struct json *o, struct err *err)
{
    const struct json *count = json_get(o, "logical_count");
    bool has_steps = json_kind_of(json_at(json_at(json_at(count, 0), 0), 0)) != JSON_NULL;
    int rc = 0;
    if (!has_steps)
        return add_layers(t, 0, count, err);
    for (size_t i = 0; i < json_count(count) && rc == 0; i++)
        rc = add_layers(t, i, json_at(count, i), err);
    return rc;
}

/* ---- torch ----------------------------------------------------------------------------------- */

static int read_load(const struct trace *t, const struct torch_value *v, const int64_t *index,
                     double *out, struct err *err)
{
    double x = torch_at(v, index);
    if (!isfinite(x) || x < 0)
        return trace_fail(t, err, "a load is not a finite number from 0");
    *out = x;
    return 0;
}

static int add_counts(struct trace *t, const struct torch_value *v, struct err *err)
{
    if (v->kind != TORCH_TENSOR || v->n_dims != 3 || !fits(v->shape[1], v->shape[2]) ||
        v->shape[0] > STEPS_MAX)
        return trace_fail(t, err, "logical_count: expected a tensor of steps, layers and experts");
    for (int64_t i = 0; i < v->shape[0]; i++)
        for (int64_t k = 0; k < v->shape[1]; k++) {
            double *load = trace_add(t, (uint64_t)i, (uint32_t)k, TRACE_RANK_NONE,
                                     (uint32_t)v->shape[2]);
            for (int64_t e = 0; e < v->shape[2]; e++) {
                int rc = read_load(t, v, (const int64_t[]){ i, k, e }, &load[e], err);
                if (rc < 0)
                    return rc;
            }
        }
    return 0;
}

static int add_pass(struct trace *t, const struct torch_file *f, const struct torch_value *record,
                    const struct torch_value *map, struct err *err)
{
    const struct torch_value *pass = torch_get(f, record, "forward_pass_id");
    const struct torch_value *v = torch_get(f, record, "global_physical_count");
    if (!pass || pass->kind != TORCH_NUMBER || !(pass->number >= 0 && pass->number < 1e15) || !v ||
        v->kind != TORCH_TENSOR || v->n_dims != 2 || v->shape[0] != map->shape[0] ||
        v->shape[1] != map->shape[1])
        return trace_fail(t, err, "a record: expected forward_pass_id and global_physical_count in "
                          "the shape of last_physical_to_logical_map");
    for (int64_t k = 0; k < v->shape[0]; k++) {
        uint32_t n = 0;
        double *load = trace_add(t, (uint64_t)pass->number, (uint32_t)k, TRACE_RANK_NONE,
                                 (uint32_t)v->shape[1]);
        for (int64_t i = 0; i < v->shape[1]; i++) {
            const int64_t at[] = { k, i };
            double expert = torch_at(map, at), x = 0;
            int rc = read_load(t, v, at, &x, err);
            if (rc < 0)
                return rc;
            if (!(expert >= 0 && expert < (double)v->shape[1]))
                return trace_fail(t, err, "last_physical_to_logical_map names no expert");
            load[(uint32_t)expert] += x;
            n = (uint32_t)expert >= n ? (uint32_t)expert + 1 : n;
        }
        t->record[t->n_records - 1].n_experts = n;
    }
    return 0;
}

static int add_passes(struct trace *t, const struct torch_file *f, const struct torch_value *root,
                      struct err *err)
{
    const struct torch_value *records = torch_get(f, root, "records");
    const struct torch_value *map = torch_get(f, root, "last_physical_to_logical_map");
    int rc = 0;
    if (!records || records->kind != TORCH_LIST || !map || map->kind != TORCH_TENSOR ||
        map->n_dims != 2 || !fits(map->shape[0], map->shape[1]))
        return trace_fail(t, err, "no logical_count, nor records with a "
                          "last_physical_to_logical_map; a dump of SGLang's recorder is expected");
    for (uint32_t i = 0; i < records->n_items && rc == 0; i++)
        rc = add_pass(t, f, torch_item(f, records, i), map, err);
    return rc;
}

int trace_sglang(struct trace *t, const uint8_t *bytes, size_t n_bytes, struct err *err)
{
    struct torch_file f;
    struct err why;
    if (torch_open(bytes, n_bytes, &f, &why) < 0)
        return trace_fail(t, err, "%s", why.text);
    const struct torch_value *root = &f.value[f.root];
    const struct torch_value *count = torch_get(&f, root, "logical_count");
    int rc = count ? add_counts(t, count, err) : add_passes(t, &f, root, err);
    torch_close(&f);
    return rc;
}
