/* model.c - one micro-batch through all units: forward, loss and backward
 *
 * What a step takes of memory is planned here, at open, by the same calls that carve it later. */
#include "worker/model_parts.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/bf16.h"
#include "common/mem.h"
#include "common/memory_model.h"
#include "kernels/spans.h"
#include "worker/head.h"

/* ---- open ----------------------------------------------------------------------------------- */

static void find_offsets(struct model *m)
{
    const struct tensor_map *map = m->config.map;

    m->at = xcalloc(map->n_units, sizeof *m->at);
    m->packed_rows = xcalloc(map->n_units, sizeof *m->packed_rows);
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        if (e->expert <= 0 && e->adapter == ADAPTER_NONE)
            m->at[e->unit][e->role] = e->offset;
        if (e->expert < 0 && e->packing != PACKING_NONE)
            m->packed_rows[e->unit][e->role] = (uint32_t)e->dims[0];
    }
    m->adapters = lora_find(map);
}

/* Tokens that a layer takes at once. */
static int64_t tokens_at_once(const struct model *m)
{
    int64_t n = m->config.tokens_max, most = m->config.segment_rows;
    return most && most < n ? most : n;
}

static int open_dispatch(struct model *m, struct err *err)
{
    const struct model_spec *s = m->config.spec;
    uint32_t ep = m->config.layout->degrees.ep;
    /* Deterministic sums do not know of slots for copies. */
    uint32_t n_slots = m->config.dev->deterministic ? s->n_experts / ep : m->moe.n_slots;
    int64_t n_tokens = tokens_at_once(m);
    int64_t rows_max = (int64_t)memory_rows_max(s, (uint64_t)n_tokens, ep, n_slots);
    int rc = dispatch_limit(m->config.dispatch, n_tokens, rows_max, err);

    m->moe.piece_rows = dispatch_piece_rows(m->config.dispatch);
    m->moe.kept_rows = m->config.recompute == RECOMPUTE_OFF ? rows_max : m->moe.piece_rows;
    return rc;
}

static void count_forward(struct model *m, uint32_t l)
{
    decoder_count_forward(&m->pass, &m->moe, l, model_kept(m), &m->layers[l]);
}

/* Bytes that a step of tokens_max tokens takes, however they are routed. */
static size_t plan(struct model *m)
{
    const struct model_spec *s = m->config.spec;
    int32_t cu_seqlens[2] = { 0, (int32_t)m->config.tokens_max };
    struct model_batch whole = { .cu_seqlens = cu_seqlens, .n_tokens = m->config.tokens_max,
                                 .n_docs = 1 };
    size_t peak;

    activations_init(&m->act, m->config.dev, true);
    m->pass = (struct pass){ m->config.dev, s, &m->act, whole.n_tokens, cu_seqlens, 1 };
    m->pass.index_stage = m->config.index_stage;
    m->pass.lora = lora_of(m->config.lora, m->config.map);
    model_cut_batch(m, cu_seqlens, 1);
    model_carve_inputs(m, &whole);
    model_carve_gradients(m);
    for (uint32_t l = 0; l < s->n_layers; l++) {
        if (m->cuts) {
            decoder_cut_carve(&m->pass, l, &m->cuts[l]);
            decoder_cut_count(&m->pass, &m->moe, l, &m->cuts[l]);
            continue;
        }
        count_forward(m, l);
        if (m->config.recompute == RECOMPUTE_FULL)
            activations_release(&m->act, m->layers[l].mark);
    }
    head_count(&m->pass);
    for (uint32_t l = s->n_layers; !m->cuts && l-- > 0;) {
        if (m->config.recompute == RECOMPUTE_FULL)
            count_forward(m, l);
        decoder_count_backward(&m->pass, &m->moe, l, &m->layers[l]);
        activations_release(&m->act, m->layers[l].mark);
    }
    peak = m->act.peak;
    m->pass = (struct pass){0};
    return peak;
}

int model_open(const struct model_config *config, struct model **out, struct err *err)
{
    const struct model_spec *s = config->spec;
    struct model *m = xcalloc(1, sizeof *m);
    size_t n_counts = (size_t)s->n_layers * s->n_experts;
    int rc = 0;

    assert(!config->lora == !config->map->adapter_names);
    assert(config->tokens_max > 0 && config->tokens_max <= INT32_MAX);
    assert(!config->segment_rows || config->recompute == RECOMPUTE_FULL);
    m->config = *config;
    m->n_blocks = bank_rows_attention(s, s->n_layers);
    find_offsets(m);
    m->layers = xcalloc(s->n_layers, sizeof *m->layers);
    if (config->segment_rows)
        m->cuts = xcalloc(s->n_layers, sizeof *m->cuts);
    m->residuals.p = xcalloc(s->n_layers + 1, sizeof *m->residuals.p);
    m->residuals.d_bank = xcalloc(m->n_blocks, sizeof *m->residuals.d_bank);
    m->residuals.rows = xcalloc(m->n_blocks + 1, sizeof *m->residuals.rows);
    m->residuals.d_rows = xcalloc(m->n_blocks + 1, sizeof *m->residuals.d_rows);
    m->host_tokens = xcalloc(n_counts, sizeof *m->host_tokens);
    if (config->count_margins)
        m->host_margins = xcalloc(n_counts * MARGIN_BINS, sizeof *m->host_margins);
    m->moe.shard = config->shard;
    m->moe.dispatch = config->dispatch;
    if (config->dispatch)
        rc = moe_init(&m->moe, s, config->slots, &config->rules, config->count_margins, config->dev,
                      err);
    if (rc == 0 && config->dispatch)
        rc = open_dispatch(m, err);
    m->acc_loss = config->dev->ops->alloc(config->dev, 2 * sizeof *m->acc_loss);
    if (rc == 0 && !m->acc_loss)
        rc = err_set(err, -ENOMEM, "no memory for the model's loss");
    model_grow_ones(m, config->tokens_max * s->top_k);
    if (rc == 0)
        rc = positions_grow(&m->positions, s, config->dev, config->tokens_max, err);
    if (rc == 0) {
        size_t n_bytes = plan(m);
        activations_init(&m->act, config->dev, false);
        rc = activations_reserve(&m->act, n_bytes, err);
    }
    if (rc < 0) {
        model_close(m);
        return rc;
    }
    *out = m;
    return 0;
}

void model_close(struct model *m)
{
    if (!m)
        return;
    moe_fini(&m->moe, m->config.dev);
    positions_fini(&m->positions, m->config.dev);
    activations_fini(&m->act);
    if (m->acc_loss)
        m->config.dev->ops->free(m->config.dev, m->acc_loss);
    free(m->at);
    free(m->packed_rows);
    free(m->adapters);
    free(m->layers);
    free(m->cuts);
    segments_fini(&m->segments);
    free(m->residuals.p);
    free(m->residuals.d_bank);
    free(m->residuals.rows);
    free(m->residuals.d_rows);
    free(m->host_ones);
    free(m->host_tokens);
    free(m->host_margins);
    free(m);
}

size_t model_activation_bytes(const struct model *m)
{
    return activations_bytes(&m->act);
}

/* ---- a step --------------------------------------------------------------------------------- */

struct sums {
    double model, index;
};

static struct sums read_losses(struct model *m)
{
    double both[2];
    m->config.dev->ops->to_host(m->config.dev, both, m->acc_loss, sizeof both);
    return (struct sums){ both[0], both[1] };
}

static void read_router_losses(struct model *m, struct model_loss *out)
{
    double sums[MOE_LOSSES];
    if (!m->moe.acc_losses)
        return;
    m->config.dev->ops->to_host(m->config.dev, sums, m->moe.acc_losses, sizeof sums);
    /* In segments they are sums of means over the rows of each. */
    double weight = (double)m->moe.loss_weight;
    if (m->cuts && m->pass.n > m->config.segment_rows)
        weight *= (double)m->config.segment_rows / (double)m->pass.n;
    out->aux = sums[MOE_AUX_LOSS] * weight;
    out->z = sums[MOE_Z_LOSS] * weight;
}

static int64_t count_labels(const struct model_batch *b)
{
    int64_t n = 0;
    for (int64_t i = 0; i < b->n_tokens; i++)
        n += b->labels[i] >= 0;
    return n;
}

/* Indexers learn in the forward: there is no head and no way back. */
static int index_step(struct model *m, bool backward, struct model_loss *out, struct err *err)
{
    m->is_learning = m->moe.counting = m->moe.capping = backward;
    int rc = model_forward(m, false, err);
    if (rc == 0)
        rc = shard_settle(m->config.shard, err);
    m->is_learning = m->moe.counting = m->moe.capping = false;
    if (rc < 0) {
        model_drop_plans(m);
        return rc;
    }
    *out = (struct model_loss){ .sum = read_losses(m).index, .n_labels = m->pass.n };
    spans_settle(m->config.dev);
    return 0;
}

int model_step(struct model *m, const struct model_batch *batch, bool backward,
               struct model_loss *out, struct err *err)
{
    struct model_loss loss = {0};
    int rc = model_begin(m, batch, err);

    if (rc < 0)
        return rc;
    loss.n_labels = count_labels(batch);
    m->moe.loss_weight = (float)loss.n_labels;
    if (m->pass.index_stage != INDEX_FROZEN)
        return index_step(m, backward, out, err);
    bool learns = m->config.index_joint && backward;
    m->has_head = true;
    m->has_backward = backward;
    m->moe.counting = m->moe.capping = backward;
    if (backward)
        model_carve_gradients(m);
    /* Indexers learn in this forward, and not in one that is run again. */
    m->is_learning = learns;
    m->pass.index_stage = learns ? m->config.index_stage : INDEX_FROZEN;
    rc = model_forward(m, backward && m->config.recompute != RECOMPUTE_FULL, err);
    m->is_learning = m->moe.counting = false;
    m->pass.index_stage = INDEX_FROZEN;
    if (rc == 0)
        rc = model_head_loss(m, backward, err);
    if (rc == 0 && backward)
        rc = model_backward(m, err);
    if (rc == 0)
        rc = shard_settle(m->config.shard, err);
    m->moe.capping = false;
    if (rc < 0) {
        model_drop_plans(m);
        return rc;
    }
    struct sums sums = read_losses(m);
    spans_settle(m->config.dev);
    loss.sum = sums.model;
    loss.index = sums.index;
    if (backward)
        read_router_losses(m, &loss);
    *out = loss;
    return 0;
}

static bool is_finite_output(struct model *m, const elem *p, void *host)
{
    size_t n = (size_t)(m->pass.n * m->config.spec->hidden);
    bool halves = m->config.dev->elem == ELEM_BF16;
    bool finite = true;

    m->config.dev->ops->to_host(m->config.dev, host, p, n * elem_size(m->config.dev));
    for (size_t i = 0; finite && i < n; i++)
        finite = isfinite(halves ? bf16_value(((const uint16_t *)host)[i])
                                 : ((const float *)host)[i]);
    return finite;
}

int model_find_bad(struct model *m, const struct model_batch *batch, struct model_loss *out,
                   int64_t *out_first, struct err *err)
{
    int rc = model_step(m, batch, false, out, err);
    int64_t first = 0, n_layers = m->config.spec->n_layers;

    if (rc < 0)
        return rc;
    void *host = xcalloc((size_t)(m->pass.n * m->config.spec->hidden) + 1, sizeof(float));
    while (first <= n_layers && is_finite_output(m, m->residuals.p[first], host))
        first++;
    free(host);
    *out_first = first <= n_layers || !isfinite(out->sum) ? first : -1;
    return 0;
}

int model_survey(struct model *m, const struct model_batch *batch, struct err *err)
{
    int rc = model_begin(m, batch, err);

    if (rc < 0)
        return rc;
    m->moe.surveying = m->moe.capping = true;
    rc = model_forward(m, false, err);
    if (rc == 0)
        rc = shard_settle(m->config.shard, err);
    m->moe.surveying = m->moe.capping = false;
    if (rc < 0)
        model_drop_plans(m);
    return rc;
}

int model_logits(struct model *m, const struct model_batch *batch, float *out_logits,
                 struct err *err)
{
    int rc = model_begin(m, batch, err);

    m->has_head = true;
    if (rc == 0)
        rc = model_forward(m, false, err);
    if (rc == 0)
        rc = model_head_logits(m, out_logits, err);
    if (rc == 0)
        rc = shard_settle(m->config.shard, err);
    if (rc < 0)
        model_drop_plans(m);
    return rc;
}
