/* model_counters.c - what routing did: counts on the device, read once a step */
#include "worker/model_parts.h"

#include <string.h>

#include "kernels/spans.h"
#include "worker/phases.h"

void model_choices(struct model *m, int64_t *out)
{
    size_t n = (size_t)m->config.spec->n_layers * m->config.spec->n_experts;
    m->config.dev->ops->to_host(m->config.dev, out, m->moe.choices, n * sizeof *out);
}

void model_set_choices(struct model *m, const int64_t *choices)
{
    size_t n = (size_t)m->config.spec->n_layers * m->config.spec->n_experts;
    if (choices)
        m->config.dev->ops->to_device(m->config.dev, m->moe.choices, choices,
                                      n * sizeof *choices);
    else
        m->config.dev->ops->zero(m->config.dev, m->moe.choices, n * sizeof *choices);
}

/* Once a step, whoever asks how often. */
static void read_counts(struct model *m)
{
    struct device *dev = m->config.dev;
    size_t n = (size_t)m->config.spec->n_layers * m->config.spec->n_experts * sizeof(int64_t);

    if (m->moe.tokens)
        dev->ops->to_host(dev, m->host_tokens, m->moe.tokens, n);
    if (m->moe.margins)
        dev->ops->to_host(dev, m->host_margins, m->moe.margins, n * MARGIN_BINS);
    m->knows_counts = true;
}

const struct model_counters *model_counters(struct model *m)
{
    if (!m->knows_counts)
        read_counts(m);
    m->counters = (struct model_counters){
        .tokens = m->host_tokens,
        .served = m->config.rules.capacity_factor > 0 ? m->moe.served : m->host_tokens,
        .rerouted = m->moe.rerouted,
        .dropped = m->moe.dropped,
        .margins = m->host_margins,
        .margin_lo = m->moe.margin_lo,
        .margin_hi = m->moe.margin_hi,
        .layer_rows = m->moe.layer_rows,
        .expert_s = spans_seconds(m->config.dev, PHASE_EXPERTS),
    };
    for (uint32_t l = 0; m->moe.layer_rows && l < m->config.spec->n_layers; l++)
        m->counters.n_rows += m->moe.layer_rows[l];
    return &m->counters;
}

void model_counters_reset(struct model *m)
{
    struct device *dev = m->config.dev;
    size_t n = (size_t)m->config.spec->n_layers * m->config.spec->n_experts * sizeof(int64_t);

    if (m->moe.tokens)
        dev->ops->zero(dev, m->moe.tokens, n);
    if (m->moe.margins)
        dev->ops->zero(dev, m->moe.margins, n * MARGIN_BINS);
    m->knows_counts = false;
    if (!m->moe.layer_rows)
        return;
    memset(m->moe.layer_rows, 0, m->config.spec->n_layers * sizeof *m->moe.layer_rows);
    memset(m->moe.served, 0, n);
    memset(m->moe.rerouted, 0, m->config.spec->n_layers * sizeof *m->moe.rerouted);
    memset(m->moe.dropped, 0, m->config.spec->n_layers * sizeof *m->moe.dropped);
}
