/* bad.c - names the first layer, or else the first gradient, that is not finite
 *
 * Nothing of this is looked at while numbers are good. The layer is found by running the batch
 * forward again: what came from data or weights comes again, what does not was the machine's. */
#include "worker/bad.h"

#include <stdio.h>

#include "worker/step_batch.h"

/* The last tensor of the model with a bad gradient is the first one that the backward met. */
static int64_t find_tensor(struct run *run)
{
    struct device *dev = run->dev;
    int32_t *acc_bad = (int32_t *)shard_accumulators(run->shard, 1), is_bad = 0;
    for (size_t i = acc_bad ? run->map.n_entries : 0; i-- > 0;) {
        struct shard_part p;
        if (!shard_part(run->shard, &run->map.entries[i], &p) || !p.gradients)
            continue;
        dev->ops->all_finite(dev, acc_bad, p.gradients, (int64_t)p.count);
        dev->ops->to_host(dev, &is_bad, acc_bad, sizeof is_bad);
        if (is_bad)
            return (int64_t)i;
    }
    return -1;
}

int bad_find(struct run *run, uint64_t n_micro, struct bad *out, struct err *err)
{
    struct bad bad = {-1, find_tensor(run)};
    for (uint64_t k = 0; k < n_micro; k++) {
        struct model_loss loss;
        int64_t first;
        int rc = step_batch(run, k, err);
        if (rc < 0)
            return rc;
        struct model_batch b = step_batch_of(&run->batch);
        if ((rc = model_find_bad(run->model, &b, &loss, &first, err)) < 0)
            return rc;
        if (first >= 0 && (bad.output < 0 || first < bad.output))
            bad.output = first;
    }
    *out = bad;
    return 0;
}

/* As `ballast adapt` calls it. */
static const char *attention_of(const struct model_spec *m, int64_t layer)
{
    return m->layers[layer].attention == ATTENTION_KDA ? "kda"
         : m->index_top_k ? "mla_sparse" : "mla";
}

static const char *mlp_of(const struct model_spec *m, int64_t layer)
{
    return m->layers[layer].mlp == MLP_MOE ? "moe" : "dense";
}

const char *bad_text(const struct run *run, const struct bad *bad, char out_text[BAD_TEXT_BYTES])
{
    int64_t n_layers = run->model_spec.n_layers, l = bad->output - 1;
    const char *tensor = bad->tensor >= 0 ? run->map.entries[bad->tensor].name : NULL;
    if (bad->output == 0)
        snprintf(out_text, BAD_TEXT_BYTES, "first in the embedding's output");
    else if (bad->output > 0 && l < n_layers)
        snprintf(out_text, BAD_TEXT_BYTES, "first in the output of layer %lld (%s+%s)",
                 (long long)l, attention_of(&run->model_spec, l), mlp_of(&run->model_spec, l));
    else if (bad->output > 0)
        snprintf(out_text, BAD_TEXT_BYTES, "first in the loss, behind layers that are finite");
    else if (tensor)
        snprintf(out_text, BAD_TEXT_BYTES, "the forward is finite when computed again, the "
                 "backward not from the gradient of %s on", tensor);
    else
        snprintf(out_text, BAD_TEXT_BYTES, "neither a gradient nor the forward, computed again, "
                 "shows it: a fault that passed by, of the device or its memory");
    return out_text;
}
