/* memory_model.c - counts floats layer by layer, in the order in which a step takes them
 *
 * The peak is in the backward of some layer: what all layers before it keep, what it keeps, and
 * the scratch of its backward. Small per-row sums are counted where they are as wide as a head. */
#include "common/memory_model.h"

#define KDA_CHUNK_ROWS 64u   /* tokens per chunk of the recurrence */
#define MARGIN_COUNTS  1001u /* 64-bit counts per layer and expert of quantile balancing */
#define FLOAT_BYTES    4u
#define PROCESS_BYTES  (16u << 20) /* a trainer without a model: code, stacks, scratch of the ops */

/* Floats per token, and per row that the router sends. */
struct floats {
    uint64_t kept, scratch;
};

static uint64_t max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- what one token takes in a layer --------------------------------------------------------- */

static struct floats kda(const struct model_spec *m)
{
    uint64_t d = m->kda_head_dim, wide = d * m->kda_heads;
    uint64_t chunk = d * d + 2 * KDA_CHUNK_ROWS * KDA_CHUNK_ROWS + 2 * KDA_CHUNK_ROWS * d;
    return (struct floats){
        /* query, key, value three times; f, z, decay, gate, output, gated; the chunks' states */
        .kept = 14 * wide + 4 * m->kda_heads + (m->kda_gate_full_rank ? 1 : 2) * d +
                m->kda_heads * chunk / KDA_CHUNK_ROWS,
        .scratch = 7 * wide + m->kda_heads + d,
    };
}

static struct floats mla(const struct model_spec *m)
{
    uint64_t q = (uint64_t)m->heads * (m->qk_nope_dim + m->qk_rope_dim);
    uint64_t kv = (uint64_t)m->heads * (m->qk_nope_dim + m->v_dim);
    uint64_t o = (uint64_t)m->heads * m->v_dim, gates = m->mla_output_gate ? 2 * o : 0;
    uint64_t low = max(m->q_lora_rank, m->kv_lora_rank + m->qk_rope_dim);
    /* With an indexer queries and outputs in the latent's space take the place of kv. */
    uint64_t absorbed = 2ull * m->heads * m->kv_lora_rank;
    uint64_t core = m->index_top_k ? absorbed : kv;
    return (struct floats){
        .kept = 2 * m->q_lora_rank + q + 2 * m->kv_lora_rank + m->qk_rope_dim + core +
                m->index_top_k + o + m->heads + gates + 2,
        .scratch = o + gates + q + core + m->qk_rope_dim + 2 * low,
    };
}

static struct floats dense(uint64_t inter)
{
    return (struct floats){3 * inter, 3 * inter};
}

/* Router, shared experts and the way of the token's own slots; not the rows that are served. */
static struct floats moe(const struct model_spec *m)
{
    struct floats shared = dense((uint64_t)m->n_shared_experts * m->expert_inter);
    uint64_t slots = (uint64_t)m->top_k * m->latent;
    uint64_t latents = 1 + (m->latent_moe ? 1 : 0) + (m->latent_norm ? 1 : 0);
    return (struct floats){
        .kept = m->n_experts + 2 * m->top_k + slots + latents * m->latent + shared.kept,
        .scratch = max(m->top_k + m->n_experts + 2 * m->latent + slots, shared.scratch),
    };
}

static struct floats row(const struct model_spec *m)
{
    return (struct floats){m->latent + 3ull * m->expert_inter, m->latent + 3ull * m->expert_inter};
}

/* Rows of the residual bank that a mix reads at decoder layer l. */
static uint64_t bank_rows(const struct model_spec *m, uint32_t l)
{
    return m->residual == RESIDUAL_ATTN_RES ? l / m->attn_res_block + 1 : 0;
}

/* ---- the whole step -------------------------------------------------------------------------- */

static void layer_floats(const struct memory_input *in, uint32_t l, uint64_t n_rows,
                         uint64_t *out_kept, uint64_t *out_scratch)
{
    const struct model_spec *m = in->spec;
    bool is_moe = m->layers[l].mlp == MLP_MOE;
    struct floats a = m->layers[l].attention == ATTENTION_KDA ? kda(m) : mla(m);
    struct floats b = is_moe ? moe(m) : dense(m->dense_inter);
    uint64_t mixes = bank_rows(m, l) ? 2 * (m->hidden + bank_rows(m, l) + 1) : 0;
    uint64_t kept = a.kept + b.kept + 3ull * m->hidden + mixes + 2;
    uint64_t scratch = in->n_tokens * (m->hidden + max(a.scratch, b.scratch));
    *out_kept = in->n_tokens * kept + (is_moe ? n_rows * row(m).kept : 0);
    *out_scratch = scratch + (is_moe ? n_rows * row(m).scratch : 0);
}

static uint64_t activation_floats(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t n_blocks = bank_rows(m, m->n_layers ? m->n_layers - 1 : 0);
    uint64_t n_rows = in->n_tokens * m->top_k * 5 / 4; /* a quarter above an even load */
    /* The residual stream after each layer, its gradients, tokens and labels. */
    uint64_t kept = in->n_tokens * ((m->n_layers + 2 + n_blocks) * m->hidden + 2 + m->top_k);
    uint64_t peak = kept + in->n_tokens * 4 * m->hidden; /* the head's */
    for (uint32_t l = 0; l < m->n_layers; l++) {
        uint64_t layer, scratch;
        layer_floats(in, l, n_rows, &layer, &scratch);
        peak = max(peak, kept + layer + scratch);
        if (!in->recompute)
            kept += layer;
    }
    return peak;
}

/* Whole units and layers while they are used, and what travels. */
static uint64_t buffer_floats(const struct memory_input *in, const struct model_counts *counts)
{
    const struct model_spec *m = in->spec;
    uint64_t vocabulary = (uint64_t)m->vocab * m->hidden;
    uint64_t layer = (counts->total - counts->experts - counts->embedding) /
                     (m->n_layers ? m->n_layers : 1);
    uint64_t n = 0;
    if (in->degrees.fsdp > 1)
        n += 2 * (vocabulary + layer); /* weights and gradients of each */
    if (in->degrees.expert_shard > 1)
        n += 2 * counts->per_expert * (m->n_experts / in->degrees.ep);
    if (in->degrees.ep > 1)
        n += 2 * in->n_tokens * m->top_k * m->latent;
    return n;
}

struct memory_plan memory_model(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    struct model_counts counts = model_spec_count(m);
    uint32_t n_shards = in->degrees.expert_shard ? in->degrees.expert_shard
                                                 : in->degrees.world / in->degrees.ep;
    uint64_t spare = m->n_experts ? counts.experts / m->n_experts * in->n_spare : 0;
    uint64_t owned = (counts.total - counts.experts) / in->degrees.fsdp +
                     (counts.experts / in->degrees.ep + spare) / n_shards;
    uint64_t margins = in->count_margins ? 8ull * m->n_layers * m->n_experts * MARGIN_COUNTS : 0;
    struct memory_plan plan = {
        .weights = owned * FLOAT_BYTES,
        .gradients = owned * FLOAT_BYTES,
        .optimizer = 2 * owned * FLOAT_BYTES,
        .activations = activation_floats(in) * FLOAT_BYTES,
        .buffers = buffer_floats(in, &counts) * FLOAT_BYTES + margins + PROCESS_BYTES,
    };
    plan.total = plan.weights + plan.gradients + plan.optimizer + plan.activations + plan.buffers;
    return plan;
}
