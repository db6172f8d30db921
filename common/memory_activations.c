/* memory_activations.c - bytes of a step's activations, in the order in which a step takes them
 *
 * The peak is in the backward of some layer: what all layers before it keep, what it keeps, and
 * the scratch of its backward. */
#include "common/memory_model.h"

#define KDA_CHUNK_ROWS    64u /* tokens per chunk of the recurrence */
#define KDA_HEADS_AT_ONCE 32u /* by the recurrence on a GPU */
#define FLOAT_BYTES       4u

/* Bytes per token, and per row that the router sends; of a layer, of all its tokens. */
struct bytes {
    uint64_t kept, scratch;
};

static uint64_t max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
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

static struct bytes mla(const struct model_spec *m, uint64_t n_tokens, uint64_t e)
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
                FLOAT_BYTES * (min(n_tokens, m->index_top_k) + m->heads + 2),
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
        .scratch = FLOAT_BYTES * (m->top_k + m->n_experts) +
                   e * (m->n_experts + 2 * m->latent + slots),
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

/* Bytes of attn_res before a sublayer. */
static uint64_t mix(const struct model_spec *m, uint64_t n_bank, uint64_t e)
{
    return n_bank ? e * m->hidden + FLOAT_BYTES * (n_bank + 1) : 0;
}

/* What layer l keeps for its backward, and the most that forward and backward need beside it. */
static struct bytes layer_bytes(const struct memory_input *in, uint32_t l, uint64_t n_rows)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, n = in->n_tokens, hidden = e * m->hidden;
    bool is_kda = m->layers[l].attention == ATTENTION_KDA;
    struct bytes a = is_kda ? kda(m, e) : mla(m, n, e);
    uint64_t kept = a.kept + 3 * hidden + mix(m, l ? bank_rows(m, l - 1) : 0, e) +
                    mix(m, bank_rows(m, l), e) + 2 * FLOAT_BYTES;
    if (m->layers[l].mlp != MLP_MOE) {
        struct bytes b = dense(m->dense_inter, e);
        return (struct bytes){n * (kept + b.kept), n * (hidden + max(a.scratch, b.scratch))};
    }
    struct bytes b = moe(m, e), rows = row(m, e);
    uint64_t shared = n * dense((uint64_t)m->n_shared_experts * m->expert_inter, e).scratch;
    uint64_t experts = n * (hidden + b.scratch) + max(n_rows * rows.scratch, shared);
    struct bytes all = {n * (kept + b.kept), n * (hidden + a.scratch)};
    /* The rows are kept, too, but not yet while attention computes. */
    uint64_t row_bytes = n_rows * rows.kept;
    all.kept += row_bytes;
    all.scratch = max(experts, all.scratch > row_bytes ? all.scratch - row_bytes : 0);
    return all;
}

uint64_t memory_activations(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, n_blocks = bank_rows(m, m->n_layers ? m->n_layers - 1 : 0);
    uint64_t n_rows = memory_rows_max(m, in->n_tokens, in->degrees.ep, memory_slots(in));
    /* The residual stream after each layer, its gradients, tokens and labels. */
    uint64_t kept = in->n_tokens * (e * (m->n_layers + 2 + n_blocks) * m->hidden +
                                    FLOAT_BYTES * (2 + (m->n_experts ? m->top_k : 0)));
    uint64_t head = in->n_tokens * (3 * e * m->hidden + mix(m, n_blocks, e) + FLOAT_BYTES);
    uint64_t peak = kept + head;
    for (uint32_t l = 0; l < m->n_layers; l++) {
        struct bytes layer = layer_bytes(in, l, n_rows);
        peak = max(peak, kept + layer.kept + layer.scratch);
        if (!in->recompute)
            kept += layer.kept;
    }
    return max(peak, kept + head);
}

uint64_t memory_rows_max(const struct model_spec *m, uint64_t n_tokens, uint32_t ep,
                         uint32_t n_slots)
{
    uint64_t n_chosen = m->top_k < n_slots ? m->top_k : n_slots, at_once = ep * n_chosen;
    uint64_t most = n_tokens * at_once, even = n_tokens * m->top_k * 5 / 4;
    return even < most ? max(even, at_once) : most;
}
