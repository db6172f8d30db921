/* ctl_trace_megatron.c - Megatron's router traces and per-rank counts of tokens per expert
 *
 * A route record is {rank, step, layer, top_indices: [[expert, ...] per token]}, one line per step,
 * layer and rank, in router_trace_rank*.jsonl. A count record is {iter, layer, tpe: [[tokens of
 * each expert of this rank] per micro-batch]} in rank*.jsonl. `block` is decoder, or mtp with
 * mtp_idx. */
#include "coordinator/ctl_trace.h"

#include <inttypes.h>
#include <string.h>

static int read_layer(const struct trace *t, const struct json *o, uint32_t *out, struct err *err)
{
    const char *block = json_as_string(json_get(o, "block"));
    uint32_t layer, mtp = 0;
    struct err why;
    bool is_mtp = block && !strcmp(block, "mtp");
    if (block && !is_mtp && strcmp(block, "decoder"))
        return trace_fail(t, err, "block: expected decoder or mtp");
    if (json_get_u32(o, "layer", 0, LAYERS_MAX - 1, &layer, &why) < 0 ||
        (is_mtp && json_get_u32(o, "mtp_idx", 0, 15, &mtp, &why) < 0))
        return trace_fail(t, err, "%s", why.text);
    *out = is_mtp ? TRACE_LAYER_MTP + mtp * LAYERS_MAX + layer : layer;
    return 0;
}

_Static_assert(16 * LAYERS_MAX <= TRACE_LAYER_MTP, "all layers have their number");

static int read_step(const struct trace *t, const struct json *o, const char *key, uint64_t *out,
                     struct err *err)
{
    struct err why;
    if (json_get_u64(o, key, 0, INT64_MAX, out, &why) < 0)
        return trace_fail(t, err, "%s", why.text);
    return 0;
}

int trace_megatron_routes(struct trace *t, const struct json *o, struct err *err)
{
    const struct json *tokens = json_get(o, "top_indices");
    uint32_t layer, n_experts = 0;
    uint64_t step, expert;
    int rc = read_layer(t, o, &layer, err);
    if (rc == 0)
        rc = read_step(t, o, "step", &step, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < json_count(tokens); i++)
        for (size_t k = 0; k < json_count(json_at(tokens, i)); k++) {
            const struct json *v = json_at(json_at(tokens, i), k);
            double x;
            if (json_as_double(v, &x) && x == -1)
                continue; /* padding */
            if (!json_as_u64(v, &expert) || expert >= EXPERTS_MAX)
                return trace_fail(t, err, "top_indices of token %zu: an expert must be a whole "
                                  "number from 0 to %u", i, EXPERTS_MAX - 1);
            n_experts = expert >= n_experts ? (uint32_t)expert + 1 : n_experts;
        }
    double *load = trace_add(t, step, layer, TRACE_RANK_NONE, n_experts);
    for (size_t i = 0; i < json_count(tokens); i++)
        for (size_t k = 0; k < json_count(json_at(tokens, i)); k++)
            if (json_as_u64(json_at(json_at(tokens, i), k), &expert))
                load[expert]++;
    return 0;
}

int trace_megatron_counts(struct trace *t, const struct json *o, struct err *err)
{
    const struct json *tpe = json_get(o, "tpe");
    size_t n = json_count(json_at(tpe, 0));
    uint32_t layer;
    uint64_t step;
    int rc = read_layer(t, o, &layer, err);
    if (rc == 0)
        rc = read_step(t, o, "iter", &step, err);
    if (rc < 0)
        return rc;
    if (t->rank >= RANKS_MAX)
        return trace_fail(t, err, "counts of one rank's experts; its number is in the name of its "
                          "file, as in rank3.jsonl");
    if (!n || n > EXPERTS_MAX)
        return trace_fail(t, err, "tpe: expected lists of 1 to %u counts", EXPERTS_MAX);
    double *load = trace_add(t, step, layer, t->rank, (uint32_t)n);
    for (size_t i = 0; i < json_count(tpe); i++) {
        if (json_count(json_at(tpe, i)) != n)
            return trace_fail(t, err, "tpe: micro-batch %zu has %zu experts instead of %zu", i,
                              json_count(json_at(tpe, i)), n);
        for (size_t e = 0; e < n; e++) {
            double x;
            if ((rc = trace_load(t, json_at(json_at(tpe, i), e), &x, err)) < 0)
                return rc;
            load[e] += x;
        }
    }
    return 0;
}
