/* model_batch.c - a micro-batch on the device: checked, cut in segments, uploaded
 *
 * What is carved here stays for the whole pass, below everything that layers carve. */
#include "worker/model_parts.h"

#include <errno.h>

#include "common/mem.h"

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

void model_cut_batch(struct model *m, const int32_t *cu_seqlens, int32_t n_docs)
{
    int64_t n_rows = m->config.segment_rows;
    segments_fini(&m->segments);
    if (n_rows)
        segments_init(&m->segments, cu_seqlens, n_docs, n_rows,
                      (int32_t)((m->config.tokens_max + n_rows - 1) / n_rows));
    m->pass.segments = n_rows ? &m->segments : NULL;
}

void model_carve_inputs(struct model *m, const struct model_batch *b)
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

void model_carve_gradients(struct model *m)
{
    int64_t n = m->pass.n * m->config.spec->hidden;

    m->residuals.d_p = activations_take(&m->act, n);
    for (uint32_t b = 0; b < m->n_blocks; b++)
        m->residuals.d_bank[b] = activations_take(&m->act, n);
}

void model_grow_ones(struct model *m, int64_t n)
{
    if (n <= m->n_host_ones)
        return;
    m->host_ones = xrealloc(m->host_ones, (size_t)n * sizeof *m->host_ones);
    for (int64_t i = m->n_host_ones; i < n; i++)
        m->host_ones[i] = 1;
    m->n_host_ones = n;
}

int model_begin(struct model *m, const struct model_batch *b, struct err *err)
{
    int rc = check_batch(m->config.spec, b, err);

    if (rc < 0)
        return rc;
    activations_release(&m->act, (struct activations_mark){0});
    m->act.failed = false;
    m->knows_counts = m->has_head = m->has_backward = false;
    model_grow_ones(m, b->n_tokens * m->config.spec->top_k);
    m->pass = (struct pass){
        .dev = m->config.dev, .spec = m->config.spec, .act = &m->act, .n = b->n_tokens,
        .n_docs = b->n_docs,
        .index_stage = m->config.index_joint ? INDEX_FROZEN : m->config.index_stage,
        .index_weight = m->config.index_weight, .acc_loss = m->acc_loss,
        .acc_index_loss = m->acc_loss + 1,
        .lora = lora_of(m->config.lora, m->config.map),
    };
    model_cut_batch(m, b->cu_seqlens, b->n_docs);
    m->config.dev->ops->zero(m->config.dev, m->acc_loss, 2 * sizeof *m->acc_loss);
    if (m->moe.acc_losses)
        m->config.dev->ops->zero(m->config.dev, m->moe.acc_losses,
                                 MOE_LOSSES * sizeof *m->moe.acc_losses);
    if ((rc = positions_grow(&m->positions, m->config.spec, m->config.dev, b->n_tokens, err)) < 0)
        return rc;
    m->pass.rotary = m->positions.table;
    model_carve_inputs(m, b);
    return activations_check(&m->act, err);
}
