/* model.c - walks one micro-batch through all units, forward, loss and backward
 *
 * A unit is gathered, used and let go in an order that follows from the model alone: every rank
 * makes the same collective calls. While one is computed with, the next one comes, and the
 * gradients of the one before go home. */
#include "worker/model.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/bf16.h"
#include "common/mem.h"
#include "common/memory_model.h"
#include "kernels/spans.h"
#include "worker/decoder_cut.h"
#include "worker/head.h"
#include "worker/phases.h"
#include "worker/positions.h"

struct model {
    struct model_config config;
    uint64_t (*at)[TENSOR_ROLES]; /* offsets by unit and role */
    uint32_t (*packed_rows)[TENSOR_ROLES];
    struct adapters_at *adapters; /* by unit; NULL: there are none */
    struct activations act;
    struct moe moe;
    struct positions positions;
    struct residuals residuals;
    struct decoder_saved *layers;
    struct decoder_cut *cuts; /* n_layers, of layers in segments; NULL: they take all at once */
    struct segments segments; /* of the present batch */
    uint32_t n_blocks;
    float   *host_ones;           /* uploaded for sums over slots */
    int64_t  n_host_ones;
    struct model_counters counters;
    int64_t *host_tokens, *host_margins;
    bool     knows_counts; /* the two are the device's */
    double  *acc_loss; /* on the device: of the micro-batch, of the model and of its indexers */

    /* of the current step */
    struct pass pass;
    bool is_learning; /* indexers get gradients in this forward */
    bool has_head, has_backward; /* what comes after the layers of the forward */
    const int32_t *tokens, *labels; /* on the device */
};

static uint32_t unit_of_layer(uint32_t l)
{
    return 1 + l;
}

static uint32_t unit_of_head(const struct model *m)
{
    return 1 + m->config.spec->n_layers;
}

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


/* What begin_pass to the end of the backward carves, in that order. */
static void take_inputs(struct model *m, const struct model_batch *b);
static void take_gradients(struct model *m);

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

/* All ranks cut a batch alike, however many tokens each has. */
static void cut_batch(struct model *m, const int32_t *cu_seqlens, int32_t n_docs)
{
    int64_t n_rows = m->config.segment_rows;
    segments_fini(&m->segments);
    if (n_rows)
        segments_init(&m->segments, cu_seqlens, n_docs, n_rows,
                      (int32_t)((m->config.tokens_max + n_rows - 1) / n_rows));
    m->pass.segments = n_rows ? &m->segments : NULL;
}

/* What is carved of a layer whose backward will come. */
static enum carve kept_of(const struct model *m)
{
    return m->config.recompute == RECOMPUTE_SELECTIVE ? CARVE_KEPT : CARVE_ALL;
}

static void count_forward(struct model *m, uint32_t l)
{
    decoder_count_forward(&m->pass, &m->moe, l, kept_of(m), &m->layers[l]);
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
    cut_batch(m, cu_seqlens, 1);
    take_inputs(m, &whole);
    take_gradients(m);
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

/* ---- the batch ------------------------------------------------------------------------------ */

static int check_batch(const struct model_spec *s, const struct model_batch *b, struct err *err)
{
    if (b->n_tokens < 0 || b->n_tokens > INT32_MAX || b->n_docs < 0 || b->n_docs > b->n_tokens ||
        (b->n_docs == 0) != (b->n_tokens == 0))
        return err_set(err, -EINVAL, "a batch of %lld tokens in %d documents",
                       (long long)b->n_tokens, b->n_docs);
    for (int64_t i = 0; i < b->n_tokens; i++) {
        if (b->tokens[i] < 0 || (uint32_t)b->tokens[i] >= s->vocab)
            return err_set(err, -EINVAL, "token %lld is %d, the vocabulary has ids 0 to %u",
                           (long long)i, b->tokens[i], s->vocab - 1);
        if (b->labels && b->labels[i] >= 0 && (uint32_t)b->labels[i] >= s->vocab)
            return err_set(err, -EINVAL, "label %lld is %d, the vocabulary has ids 0 to %u",
                           (long long)i, b->labels[i], s->vocab - 1);
    }
    for (int32_t d = 0; d < b->n_docs; d++)
        if (b->cu_seqlens[0] != 0 || b->cu_seqlens[d + 1] <= b->cu_seqlens[d] ||
            b->cu_seqlens[b->n_docs] != b->n_tokens)
            return err_set(err, -EINVAL,
                           "cu_seqlens do not ascend from 0 to the %lld tokens of the batch",
                           (long long)b->n_tokens);
    return 0;
}

/* Uploads n words of 4 bytes; from NULL leaves them undefined. */
static void *take_words(struct model *m, const void *from, int64_t n)
{
    int32_t *p = activations_take_i32(&m->act, n);
    if (p && from && n)
        m->config.dev->ops->to_device(m->config.dev, p, from, (size_t)n * sizeof *p);
    return p;
}

/* n elements that are 1. */
static void take_ones(struct model *m, int64_t n)
{
    elem *ones = activations_take(&m->act, n);
    float *floats = take_words(m, m->host_ones, n);

    if (ones && floats && m->host_ones)
        m->config.dev->ops->to_elem(m->config.dev, ones, floats, n);
    m->pass.ones = ones;
}

static void take_inputs(struct model *m, const struct model_batch *b)
{
    const struct model_spec *s = m->config.spec;
    static const int32_t nothing[1] = { 0 };

    m->tokens = take_words(m, b->tokens, b->n_tokens);
    m->labels = take_words(m, b->labels, b->n_tokens);
    m->pass.cu_seqlens = b->n_docs ? b->cu_seqlens : nothing;
    if (m->config.dispatch)
        m->moe.ones = take_words(m, m->host_ones, b->n_tokens * s->top_k);
    if (s->attention_bias)
        take_ones(m, b->n_tokens);
    if (m->adapters)
        lora_carve(&m->pass, m->adapters, m->config.map->n_units);
    for (uint32_t l = 0; l <= s->n_layers; l++)
        m->residuals.p[l] = activations_take(&m->act, b->n_tokens * s->hidden);
}

static void take_gradients(struct model *m)
{
    int64_t n = m->pass.n * m->config.spec->hidden;

    m->residuals.d_p = activations_take(&m->act, n);
    for (uint32_t b = 0; b < m->n_blocks; b++)
        m->residuals.d_bank[b] = activations_take(&m->act, n);
}

static void grow_ones(struct model *m, int64_t n)
{
    if (n <= m->n_host_ones)
        return;
    m->host_ones = xrealloc(m->host_ones, (size_t)n * sizeof *m->host_ones);
    for (int64_t i = m->n_host_ones; i < n; i++)
        m->host_ones[i] = 1;
    m->n_host_ones = n;
}

static int begin(struct model *m, const struct model_batch *b, struct err *err)
{
    int rc = check_batch(m->config.spec, b, err);

    if (rc < 0)
        return rc;
    activations_release(&m->act, (struct activations_mark){0});
    m->act.failed = false;
    m->knows_counts = m->has_head = m->has_backward = false;
    grow_ones(m, b->n_tokens * m->config.spec->top_k);
    m->pass = (struct pass){
        .dev = m->config.dev, .spec = m->config.spec, .act = &m->act, .n = b->n_tokens,
        .n_docs = b->n_docs,
        .index_stage = m->config.index_joint ? INDEX_FROZEN : m->config.index_stage,
        .index_weight = m->config.index_weight, .acc_loss = m->acc_loss,
        .acc_index_loss = m->acc_loss + 1,
        .lora = lora_of(m->config.lora, m->config.map),
    };
    cut_batch(m, b->cu_seqlens, b->n_docs);
    m->config.dev->ops->zero(m->config.dev, m->acc_loss, 2 * sizeof *m->acc_loss);
    if (m->moe.acc_losses)
        m->config.dev->ops->zero(m->config.dev, m->moe.acc_losses,
                                 MOE_LOSSES * sizeof *m->moe.acc_losses);
    if ((rc = positions_grow(&m->positions, m->config.spec, m->config.dev, b->n_tokens, err)) < 0)
        return rc;
    m->pass.rotary = m->positions.table;
    take_inputs(m, b);
    return activations_check(&m->act, err);
}

/* ---- units ---------------------------------------------------------------------------------- */

#define NOTHING INT64_C(-1) /* in place of a unit or a layer */

/* The sparse layer after from, upwards or downwards, from itself included. */
static int64_t find_sparse(const struct model *m, int64_t from, int step)
{
    const struct model_spec *s = m->config.spec;
    while (from >= 0 && from < (int64_t)s->n_layers && s->layers[from].mlp != MLP_MOE)
        from += step;
    return from < (int64_t)s->n_layers ? from : NOTHING;
}

/* Whose experts come after those of layer l. */
static int64_t experts_after(const struct model *m, uint32_t l, bool backward)
{
    if (backward)
        return find_sparse(m, (int64_t)l - 1, -1);
    int64_t next = find_sparse(m, (int64_t)l + 1, 1);
    return next == NOTHING && m->has_backward ? (int64_t)l : next;
}

/* next: the unit that is opened after this one. */
static int open_unit(struct model *m, uint32_t unit, bool backward, int64_t next,
                     struct unit_view *out, struct err *err)
{
    *out = (struct unit_view){
        .dev = m->config.dev, .at = m->at[unit], .buffers = shard_buffers(m->config.shard),
        .sink = shard_sink(m->config.shard), .packed_rows = m->packed_rows[unit],
        .adapters = m->adapters ? &m->adapters[unit] : NULL,
    };
    int rc = shard_acquire(m->config.shard, unit, &out->weights, err);
    if (rc == 0 && next != NOTHING)
        rc = shard_prefetch(m->config.shard, (uint32_t)next, err);
    if (rc == 0 && backward)
        out->gradients = shard_gradient(m->config.shard, unit);
    return rc;
}

static int close_unit(struct model *m, uint32_t unit, const struct unit_view *u, int rc,
                      struct err *err)
{
    if (rc == 0 && u->gradients)
        rc = shard_reduce(m->config.shard, unit, err);
    if (u->weights.trained)
        shard_release(m->config.shard, unit);
    return rc;
}

static int64_t unit_after_layer(const struct model *m, uint32_t l, bool backward)
{
    if (backward)
        return l > 0 ? unit_of_layer(l - 1) : NOTHING;
    if (l + 1 < m->config.spec->n_layers)
        return unit_of_layer(l + 1);
    return m->has_head ? (int64_t)unit_of_head(m) : NOTHING;
}

static int embed(struct model *m, struct err *err)
{
    struct pass *p = &m->pass;
    struct unit_view u;
    int64_t sparse = find_sparse(m, 0, 1);
    int rc = open_unit(m, 0, false, unit_of_layer(0), &u, err);

    if (rc == 0 && sparse != NOTHING)
        rc = shard_experts_prefetch(m->config.shard, (uint32_t)sparse, err);
    spans_begin(p->dev, PHASE_EMBEDDING, -1);
    if (rc == 0)
        p->dev->ops->embedding(p->dev, m->residuals.p[0], weight_of(&u, ROLE_EMBEDDING), m->tokens,
                               p->n, p->spec->hidden);
    spans_end(p->dev);
    return close_unit(m, 0, &u, rc, err);
}

static int embed_backward(struct model *m, struct err *err)
{
    struct pass *p = &m->pass;
    struct unit_view u = { .dev = m->config.dev, .at = m->at[0],
                           .weights.n_trained = m->config.map->units[0].trained,
                           .gradients = shard_gradient(m->config.shard, 0) };

    if (!unit_trains(&u, ROLE_EMBEDDING))
        return 0;
    spans_begin(p->dev, PHASE_EMBEDDING, -1);
    p->dev->ops->embedding_backward(p->dev, gradient_of(&u, ROLE_EMBEDDING), m->residuals.d_p,
                                    m->tokens, p->n, p->spec->hidden);
    spans_end(p->dev);
    return close_unit(m, 0, &u, 0, err);
}

/* In segments: their own backward makes all again but what they share. */
static int forward_cut(struct model *m, uint32_t l, const struct unit_view *u, struct err *err)
{
    bool holds = m->pass.spec->layers[l].mlp == MLP_MOE;
    struct decoder_cut *cut = &m->cuts[l];
    int rc = holds ? shard_experts_hold(m->config.shard, l, err) : 0;

    decoder_cut_carve(&m->pass, l, cut);
    if (rc == 0)
        rc = decoder_cut_forward(&m->pass, &m->moe, l, u, &m->residuals, m->residuals.p[l + 1],
                                 cut, err);
    if (rc == 0 && holds)
        shard_experts_release(m->config.shard, l);
    if (rc == 0 && !m->has_backward)
        activations_release(&m->act, cut->mark);
    return rc;
}

/* keep: for a backward without recomputation. */
static int forward_layer(struct model *m, uint32_t l, bool keep, struct err *err)
{
    struct pass *p = &m->pass;
    struct decoder_saved *saved = &m->layers[l];
    bool learns = m->is_learning && p->spec->layers[l].attention == ATTENTION_MLA;
    struct unit_view u;
    spans_begin(p->dev, PHASE_OTHER, (int32_t)l);
    int rc = open_unit(m, unit_of_layer(l), learns, unit_after_layer(m, l, false), &u, err);

    if (p->spec->layers[l].mlp == MLP_MOE)
        shard_experts_then(m->config.shard, experts_after(m, l, false));
    if (rc == 0 && m->cuts) {
        rc = forward_cut(m, l, &u, err);
    } else if (rc == 0) {
        decoder_carve(p, &m->moe, l, kept_of(m), saved);
        rc = decoder_forward(p, &m->moe, l, &u, &m->residuals, m->residuals.p[l + 1], saved, err);
    }
    if (rc == 0 && !keep && !m->cuts) {
        moe_drop(&saved->moe);
        activations_release(&m->act, saved->mark);
    }
    rc = close_unit(m, unit_of_layer(l), &u, rc, err);
    spans_end(p->dev);
    return rc;
}

static int backward_layer(struct model *m, uint32_t l, struct err *err)
{
    struct pass *p = &m->pass;
    struct decoder_saved *saved = &m->layers[l];
    bool is_sparse = p->spec->layers[l].mlp == MLP_MOE;
    bool holds = is_sparse && m->config.recompute != RECOMPUTE_OFF; /* it is run again before */
    struct unit_view u;
    spans_begin(p->dev, PHASE_OTHER, (int32_t)l);
    int rc = open_unit(m, unit_of_layer(l), true, unit_after_layer(m, l, true), &u, err);

    if (is_sparse)
        shard_experts_then(m->config.shard, experts_after(m, l, true));
    if (rc == 0 && holds)
        rc = shard_experts_hold(m->config.shard, l, err);
    if (rc == 0 && m->cuts) {
        rc = decoder_cut_backward(p, &m->moe, l, &u, &m->residuals, &m->cuts[l], err);
        saved->mark = m->cuts[l].mark;
    } else if (rc == 0 && m->config.recompute == RECOMPUTE_FULL) {
        decoder_carve(p, &m->moe, l, CARVE_ALL, saved);
        rc = decoder_forward(p, &m->moe, l, &u, &m->residuals, NULL, saved, err);
    }
    if (rc == 0 && !m->cuts)
        rc = decoder_backward(p, &m->moe, l, &u, &m->residuals, saved, err);
    if (rc == 0)
        activations_release(&m->act, saved->mark);
    if (rc == 0 && holds)
        shard_experts_release(m->config.shard, l);
    rc = close_unit(m, unit_of_layer(l), &u, rc, err);
    spans_end(p->dev);
    return rc;
}

/* ---- the head ------------------------------------------------------------------------------- */

static int head_loss(struct model *m, bool backward, struct err *err)
{
    struct activations_mark mark = activations_mark(&m->act);
    struct unit_view u;
    struct head h;
    int64_t next = backward ? unit_of_layer(m->config.spec->n_layers - 1) : NOTHING;
    int rc = open_unit(m, unit_of_head(m), backward, next, &u, err);

    spans_begin(m->config.dev, PHASE_HEAD, -1);
    if (rc == 0)
        rc = head_forward(&m->pass, &u, &m->residuals, &h, err);
    if (rc == 0 && backward)
        head_loss_backward(&m->pass, &u, &m->residuals, &h, m->labels);
    else if (rc == 0)
        head_loss_only(&m->pass, &u, &h, m->labels);
    spans_end(m->config.dev);
    activations_release(&m->act, mark);
    return close_unit(m, unit_of_head(m), &u, rc, err);
}

static int logits(struct model *m, float *out_logits, struct err *err)
{
    struct activations_mark mark = activations_mark(&m->act);
    struct unit_view u;
    struct head h;
    int rc = open_unit(m, unit_of_head(m), false, NOTHING, &u, err);

    if (rc == 0 && (rc = head_forward(&m->pass, &u, &m->residuals, &h, err)) == 0)
        rc = head_logits(&m->pass, &u, &h, out_logits, err);
    activations_release(&m->act, mark);
    return close_unit(m, unit_of_head(m), &u, rc, err);
}

/* ---- the pass ------------------------------------------------------------------------------- */

static int forward(struct model *m, bool keep, struct err *err)
{
    int rc = embed(m, err);
    for (uint32_t l = 0; rc == 0 && l < m->config.spec->n_layers; l++)
        rc = forward_layer(m, l, keep, err);
    return rc;
}

static int backward_all(struct model *m, struct err *err)
{
    int rc = 0;
    for (uint32_t l = m->config.spec->n_layers; rc == 0 && l-- > 0;)
        rc = backward_layer(m, l, err);
    return rc < 0 ? rc : embed_backward(m, err);
}

/* A step that failed between the two halves of a layer leaves plans behind. */
static void drop_plans(struct model *m)
{
    for (uint32_t l = 0; l < m->config.spec->n_layers; l++)
        moe_drop(&m->layers[l].moe);
}

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
    int rc = forward(m, false, err);
    if (rc == 0)
        rc = shard_settle(m->config.shard, err);
    m->is_learning = m->moe.counting = m->moe.capping = false;
    if (rc < 0) {
        drop_plans(m);
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
    int rc = begin(m, batch, err);

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
        take_gradients(m);
    /* Indexers learn in this forward, and not in one that is run again. */
    m->is_learning = learns;
    m->pass.index_stage = learns ? m->config.index_stage : INDEX_FROZEN;
    rc = forward(m, backward && m->config.recompute != RECOMPUTE_FULL, err);
    m->is_learning = m->moe.counting = false;
    m->pass.index_stage = INDEX_FROZEN;
    if (rc == 0)
        rc = head_loss(m, backward, err);
    if (rc == 0 && backward)
        rc = backward_all(m, err);
    if (rc == 0)
        rc = shard_settle(m->config.shard, err);
    m->moe.capping = false;
    if (rc < 0) {
        drop_plans(m);
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
    int rc = begin(m, batch, err);

    if (rc < 0)
        return rc;
    m->moe.surveying = m->moe.capping = true;
    rc = forward(m, false, err);
    if (rc == 0)
        rc = shard_settle(m->config.shard, err);
    m->moe.surveying = m->moe.capping = false;
    if (rc < 0)
        drop_plans(m);
    return rc;
}

int model_logits(struct model *m, const struct model_batch *batch, float *out_logits,
                 struct err *err)
{
    int rc = begin(m, batch, err);

    m->has_head = true;
    if (rc == 0 && (rc = forward(m, false, err)) == 0 && (rc = logits(m, out_logits, err)) == 0)
        rc = shard_settle(m->config.shard, err);
    if (rc < 0)
        drop_plans(m);
    return rc;
}

/* ---- counters ------------------------------------------------------------------------------- */

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
