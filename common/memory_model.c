/* memory_model.c - counts bytes layer by layer, in the order in which a step takes them
 *
 * The peak is in the backward of some layer: what all layers before it keep, what it keeps, and
 * the scratch of its backward. Small per-row sums are counted where they are as wide as a head. */
#include "common/memory_model.h"

#include <assert.h>

#define KDA_CHUNK_ROWS    64u   /* tokens per chunk of the recurrence */
#define KDA_HEADS_AT_ONCE 32u   /* by the recurrence on a GPU */
#define MARGIN_COUNTS     1001u /* 64-bit counts per layer and expert of quantile balancing */
#define FLOAT_BYTES       4u
#define PROCESS_BYTES     (16u << 20) /* a trainer without a model: code, stacks, scratch */

/* Bytes per token, and per row that the router sends. */
struct bytes {
    uint64_t kept, scratch;
};

static uint64_t max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- what one token takes in a layer; e: bytes of an element --------------------------------- */

static struct bytes kda(const struct model_spec *m, uint64_t e)
{
    uint64_t d = m->kda_head_dim, wide = d * m->kda_heads;
    /* What the recurrence keeps of a chunk: with floats as the CPU does, else as the GPU. */
    uint64_t square = KDA_CHUNK_ROWS * KDA_CHUNK_ROWS;
    uint64_t chunk = e == FLOAT_BYTES ? e * (d * d + 2 * square + 2 * KDA_CHUNK_ROWS * d)
                                      : e * d * d;
    /* And what the GPU's backward takes for its chunks, for so many heads at once. */
    uint64_t heads = m->kda_heads < KDA_HEADS_AT_ONCE ? m->kda_heads : KDA_HEADS_AT_ONCE;
    uint64_t matrices = e == FLOAT_BYTES ? 0 : e * (5 * KDA_CHUNK_ROWS * d + square + d * d) +
                                                   FLOAT_BYTES * (square + d);
    return (struct bytes){
        /* query, key, value three times; f, z, gate, output, gated; beta */
        .kept = e * (13 * wide + m->kda_heads + (m->kda_gate_full_rank ? 1 : 2) * d) +
                /* decay, three norms per head, the chunks' states */
                FLOAT_BYTES * (wide + 3 * m->kda_heads) + m->kda_heads * chunk / KDA_CHUNK_ROWS,
        .scratch = e * (6 * wide + m->kda_heads + d) + FLOAT_BYTES * wide +
                   heads * matrices / KDA_CHUNK_ROWS,
    };
}

static struct bytes mla(const struct model_spec *m, uint64_t e)
{
    uint64_t q = (uint64_t)m->heads * (m->qk_nope_dim + m->qk_rope_dim);
    uint64_t kv = (uint64_t)m->heads * (m->qk_nope_dim + m->v_dim);
    uint64_t o = (uint64_t)m->heads * m->v_dim, gates = m->mla_output_gate ? 2 * o : 0;
    uint64_t low = max(m->q_lora_rank, m->kv_lora_rank + m->qk_rope_dim);
    /* With an indexer queries and outputs in the latent's space take the place of kv. */
    uint64_t absorbed = 2ull * m->heads * m->kv_lora_rank;
    uint64_t core = m->index_top_k ? absorbed : kv;
    return (struct bytes){
        .kept = e * (2 * m->q_lora_rank + q + 2 * m->kv_lora_rank + m->qk_rope_dim + core + o +
                     gates) +
                FLOAT_BYTES * (m->index_top_k + m->heads + 2),
        .scratch = e * (o + gates + q + core + m->qk_rope_dim + 2 * low),
    };
}

static struct bytes dense(uint64_t inter, uint64_t e)
{
    return (struct bytes){3 * inter * e, 3 * inter * e};
}

/* Router, shared experts and the way of the token's own slots; not the rows that are served. */
static struct bytes moe(const struct model_spec *m, uint64_t e)
{
    struct bytes shared = dense((uint64_t)m->n_shared_experts * m->expert_inter, e);
    uint64_t slots = (uint64_t)m->top_k * m->latent;
    uint64_t latents = 1 + (m->latent_moe ? 1 : 0) + (m->latent_norm ? 1 : 0);
    return (struct bytes){
        .kept = FLOAT_BYTES * (m->n_experts + 2 * m->top_k) + e * (slots + latents * m->latent) +
                shared.kept,
        .scratch = max(FLOAT_BYTES * (m->top_k + m->n_experts) +
                           e * (m->n_experts + 2 * m->latent + slots), shared.scratch),
    };
}

static struct bytes row(const struct model_spec *m, uint64_t e)
{
    uint64_t n = m->latent + 3ull * m->expert_inter;
    return (struct bytes){n * e, n * e};
}

/* Rows of the residual bank that a mix reads at decoder layer l. */
static uint64_t bank_rows(const struct model_spec *m, uint32_t l)
{
    return m->residual == RESIDUAL_ATTN_RES ? l / m->attn_res_block + 1 : 0;
}

/* ---- the whole step -------------------------------------------------------------------------- */

static void layer_bytes(const struct memory_input *in, uint32_t l, uint64_t n_rows,
                        uint64_t *out_kept, uint64_t *out_scratch)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, n_bank = bank_rows(m, l);
    bool is_moe = m->layers[l].mlp == MLP_MOE;
    struct bytes a = m->layers[l].attention == ATTENTION_KDA ? kda(m, e) : mla(m, e);
    struct bytes b = is_moe ? moe(m, e) : dense(m->dense_inter, e);
    uint64_t mixes = n_bank ? 2 * (e * m->hidden + FLOAT_BYTES * (n_bank + 1)) : 0;
    uint64_t kept = a.kept + b.kept + 3 * e * m->hidden + mixes + 2 * FLOAT_BYTES;
    uint64_t scratch = in->n_tokens * (e * m->hidden + max(a.scratch, b.scratch));
    *out_kept = in->n_tokens * kept + (is_moe ? n_rows * row(m, e).kept : 0);
    *out_scratch = scratch + (is_moe ? n_rows * row(m, e).scratch : 0);
}

static uint64_t activation_bytes(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, n_blocks = bank_rows(m, m->n_layers ? m->n_layers - 1 : 0);
    uint64_t n_rows = in->n_tokens * m->top_k * 5 / 4; /* a quarter above an even load */
    /* The residual stream after each layer, its gradients, tokens and labels. */
    uint64_t kept = in->n_tokens * (e * (m->n_layers + 2 + n_blocks) * m->hidden +
                                    FLOAT_BYTES * (2 + m->top_k));
    uint64_t peak = kept + in->n_tokens * 4 * e * m->hidden; /* the head's */
    for (uint32_t l = 0; l < m->n_layers; l++) {
        uint64_t layer, scratch;
        layer_bytes(in, l, n_rows, &layer, &scratch);
        peak = max(peak, kept + layer + scratch);
        if (!in->recompute)
            kept += layer;
    }
    return peak;
}

static bool is_frozen(const struct memory_input *in)
{
    return in->dense_adapters || in->expert_adapters;
}

/* Whole units and layers while they are used, and what travels. */
static uint64_t buffer_bytes(const struct memory_input *in, const struct model_counts *counts)
{
    const struct model_spec *m = in->spec;
    uint64_t both = in->elem_bytes + (is_frozen(in) ? 0 : FLOAT_BYTES); /* weight, gradient */
    uint64_t vocabulary = (uint64_t)m->vocab * m->hidden;
    uint64_t layer = (counts->total - counts->experts - counts->embedding) /
                     (m->n_layers ? m->n_layers : 1);
    uint64_t n = 0;
    if (in->degrees.fsdp > 1)
        n += both * (vocabulary + layer);
    if (in->degrees.expert_shard > 1)
        n += both * counts->per_expert * (m->n_experts / in->degrees.ep);
    if (in->degrees.ep > 1)
        n += 2 * in->n_tokens * m->top_k * m->latent * in->elem_bytes;
    return n;
}

/* What a rank owns of numbers that there are of dense tensors and of each expert. */
static uint64_t owned(const struct memory_input *in, const struct model_counts *counts,
                      uint64_t dense, uint64_t per_expert)
{
    uint32_t n_shards = in->degrees.expert_shard ? in->degrees.expert_shard
                                                 : in->degrees.world / in->degrees.ep;
    uint64_t n_experts = counts->per_expert ? counts->experts / counts->per_expert : 0;
    uint64_t spare = n_experts ? n_experts / in->spec->n_experts * in->n_spare : 0;
    return dense / in->degrees.fsdp + (n_experts / in->degrees.ep + spare) * per_expert / n_shards;
}

struct memory_plan memory_model(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    struct model_counts counts = model_spec_count(m);
    uint64_t base = owned(in, &counts, counts.total - counts.experts, counts.per_expert);
    uint64_t experts = in->packed_experts ? owned(in, &counts, 0, counts.per_expert) : 0;
    uint64_t adapters = owned(in, &counts, in->dense_adapters, in->expert_adapters);
    uint64_t trained = is_frozen(in) ? adapters : base;
    uint64_t margins = in->count_margins ? 8ull * m->n_layers * m->n_experts * MARGIN_COUNTS : 0;
    uint64_t master = in->elem_bytes < FLOAT_BYTES ? FLOAT_BYTES : 0;
    assert(in->elem_bytes == 4 || in->elem_bytes == 2);
    struct memory_plan plan = {
        .weights = (base - experts + adapters) * in->elem_bytes + experts * 17 / 32 +
                   trained * master,
        .gradients = trained * FLOAT_BYTES,
        .optimizer = 2 * trained * FLOAT_BYTES,
        .activations = activation_bytes(in),
        .buffers = buffer_bytes(in, &counts) + margins + PROCESS_BYTES,
    };
    plan.total = plan.weights + plan.gradients + plan.optimizer + plan.activations + plan.buffers;
    return plan;
}
