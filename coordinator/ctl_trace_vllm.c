/* ctl_trace_vllm.c - vLLM's records of expert load, as its balancer writes them line by line
 *
 * {record_type: "eplb_load_stats", version: 1, step, expert_load: [[tokens per physical expert] per
 * layer], p2l_map: [[logical expert, -1 for none] per layer]}; without a map each expert is
 * itself. Lines of other record types tell of the run and are passed over. */
#include "coordinator/ctl_trace.h"

#include <string.h>

static int read_layer(struct trace *t, uint64_t step, uint32_t layer, const struct json *loads,
                      const struct json *map, bool has_map, struct err *err)
{
    size_t n = json_count(loads);
    uint32_t n_logical = 0;
    if (!n || n > EXPERTS_MAX || (has_map && json_count(map) != n))
        return trace_fail(t, err, "layer %u: expected 1 to %u loads, and as many in p2l_map",
                          layer, EXPERTS_MAX);
    double *load = trace_add(t, step, layer, TRACE_RANK_NONE, (uint32_t)n);
    for (size_t i = 0; i < n; i++) {
        uint64_t expert = i;
        double x, y;
        int rc = trace_load(t, json_at(loads, i), &x, err);
        if (rc < 0)
            return rc;
        if (has_map && json_as_double(json_at(map, i), &y) && y == -1 && x == 0)
            continue;
        if (has_map && (!json_as_u64(json_at(map, i), &expert) || expert >= n))
            return trace_fail(t, err, "layer %u: p2l_map names no expert for slot %zu", layer, i);
        load[expert] += x;
        n_logical = expert >= n_logical ? (uint32_t)expert + 1 : n_logical;
    }
    t->record[t->n_records - 1].n_experts = n_logical;
    return 0;
}

int trace_vllm(struct trace *t, const struct json *o, struct err *err)
{
    const char *type = json_as_string(json_get(o, "record_type"));
    const struct json *loads = json_get(o, "expert_load"), *map = json_get(o, "p2l_map");
    uint64_t step, version;
    struct err why;
    if (!type || strcmp(type, "eplb_load_stats"))
        return type ? 0 : trace_fail(t, err, "record_type: expected a text");
    if (json_get_u64(o, "version", 1, 1, &version, &why) < 0 ||
        json_get_u64(o, "step", 0, INT64_MAX, &step, &why) < 0)
        return trace_fail(t, err, "%s", why.text);
    size_t n = json_count(loads);
    if (!n || n > LAYERS_MAX || (map && json_count(map) != n))
        return trace_fail(t, err, "expert_load: expected 1 to %u layers, and as many in p2l_map",
                          LAYERS_MAX);
    int rc = 0;
    for (size_t k = 0; k < n && rc == 0; k++)
        rc = read_layer(t, step, (uint32_t)k, json_at(loads, k), json_at(map, k), map != NULL, err);
    return rc;
}
