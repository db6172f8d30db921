/* memory_activations.c - bytes of a step's activations, in the order in which a step takes them
 *
 * The peak is in the backward of some layer: what all layers before it keep, what it keeps or has
 * made again, and the scratch of its backward. Follows worker/: each kind of layer's carve. */
#include "common/memory_model.h"

#define KDA_CHUNK_ROWS    64u /* tokens per chunk of the recurrence */
#define FLOAT_BYTES       4u

/* Of a token, of a row that the router sends, or of all of them: what common/recompute.h says is
 * kept and made again, and what forward and backward take besides. */
struct bytes {
    uint64_t kept, again, forward, backward;
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

/* The states that the recurrence keeps of n tokens, however many documents they are: before each
 * chunk but a document's first. */
static uint64_t kda_states(const struct model_spec *m, uint64_t n, uint64_t e)
{
    uint64_t n_states = n ? (n - 1) / KDA_CHUNK_ROWS : 0;
    return e * n_states * m->kda_heads * m->kda_head_dim * m->kda_head_dim;
}

static struct bytes kda(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t d = m->kda_head_dim, wide = d * m->kda_heads, e = in->elem_bytes;
    /* What the recurrence keeps of a row beside the states: on a CPU. */
    uint64_t row = in->on_gpu ? 0 : e * m->kda_heads * (2 * KDA_CHUNK_ROWS + 2 * d);
    uint64_t gate_kept = m->kda_gate_full_rank ? wide : d; /* and f */
    uint64_t gate_again = m->kda_gate_full_rank ? 0 : wide;
    return (struct bytes){
        /* query, key, value before the convolution, the output */
        .kept = e * (4 * wide + gate_kept + d + m->kda_heads) + row,
        /* the three twice, z, the gated output; decay, three norms per head */
        .again = e * (8 * wide + gate_again) + FLOAT_BYTES * (wide + 3 * m->kda_heads),
        .forward = e * wide,
        .backward = e * (6 * wide + m->kda_heads + d) + FLOAT_BYTES * wide,
    };
}

static struct bytes mla(const struct model_spec *m, uint64_t n_tokens, uint64_t e)
{
    uint64_t q = (uint64_t)m->heads * (m->qk_nope_dim + m->qk_rope_dim);
    uint64_t kv = (uint64_t)m->heads * (m->qk_nope_dim + m->v_dim);
    uint64_t o = (uint64_t)m->heads * m->v_dim, gate = m->mla_output_gate ? o : 0;
    uint64_t low = max(m->q_lora_rank, m->kv_lora_rank + m->qk_rope_dim);
    /* With an indexer queries and outputs in the latent's space take the place of kv. */
    bool     is_sparse = m->index_top_k > 0;
    uint64_t absorbed = (uint64_t)m->heads * m->kv_lora_rank;
    uint64_t index = (uint64_t)m->index_heads * m->index_head_dim + 2 * m->index_head_dim +
                     m->index_heads;
    return (struct bytes){
        .kept = e * ((m->q_lora_rank ? m->q_lora_rank : q) + m->kv_lora_rank + m->qk_rope_dim +
                     (is_sparse ? absorbed : o) + gate) +
                FLOAT_BYTES * (min(n_tokens, m->index_top_k) + m->heads),
        .again = e * ((m->q_lora_rank ? m->q_lora_rank + q : 0) + m->kv_lora_rank +
                      (is_sparse ? absorbed + o : kv) + gate) + FLOAT_BYTES * 2,
        .forward = is_sparse ? e * index + FLOAT_BYTES * 2 : 0,
        .backward = e * (o + 2 * gate + q + (is_sparse ? 2 * absorbed : kv) + m->qk_rope_dim +
                         2 * low),
    };
}

static struct bytes dense(uint64_t inter, uint64_t e)
{
    return (struct bytes){.again = 3 * inter * e, .backward = 3 * inter * e};
}

/* Router, shared experts and the way of the token's own slots; not the rows that are served. */
static struct bytes moe(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, slots = (uint64_t)m->top_k * m->latent;
    struct bytes shared = dense((uint64_t)m->n_shared_experts * m->expert_inter, e);
    return (struct bytes){
        .kept = FLOAT_BYTES * (m->n_experts * (in->has_z_loss ? 2 : 1) +
                               m->top_k * (in->has_capacity ? 3 : 2)) +
                e * (slots + (m->latent_moe ? m->latent : 0)),
        .again = e * m->latent * (m->latent_norm ? 2 : 1) + (m->latent_norm ? FLOAT_BYTES : 0) +
                 shared.again,
        .backward = FLOAT_BYTES * (m->top_k + m->n_experts) +
                    e * (m->n_experts + 2 * m->latent + slots),
    };
}

/* Of a row at its expert: forward is beside what it keeps, and may run again in a backward. */
static struct bytes row(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, n = m->latent + 3ull * m->expert_inter;
    uint64_t r = in->expert_adapters ? in->lora_rank : 0;
    uint64_t between = r ? (e + FLOAT_BYTES) * r + e * m->latent : 0; /* of a forward */
    return (struct bytes){
        .again = n * e,
        .forward = e * m->latent + between,
        .backward = n * e + (6 * e + FLOAT_BYTES) * r + between,
    };
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

/* Of all tokens of a layer: its attention's, and its feed-forward's. */
struct layer_bytes {
    struct bytes attention, feed_forward;
};

static struct bytes times(struct bytes x, uint64_t n)
{
    return (struct bytes){x.kept * n, x.again * n, x.forward * n, x.backward * n};
}

static struct layer_bytes layer_bytes(const struct memory_input *in, uint32_t l)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, n = memory_tokens_at_once(in), hidden = e * m->hidden;
    bool is_kda = m->layers[l].attention == ATTENTION_KDA;
    struct layer_bytes b = {.attention = is_kda ? kda(in) : mla(m, n, e)};
    bool is_moe = m->layers[l].mlp == MLP_MOE;
    b.feed_forward = is_moe ? moe(in) : dense(m->dense_inter, e);
    b.attention.kept += hidden; /* the sum after it */
    b.attention.again += hidden + FLOAT_BYTES + mix(m, l ? bank_rows(m, l - 1) : 0, e);
    b.feed_forward.again += hidden + FLOAT_BYTES + mix(m, bank_rows(m, l), e);
    b.attention = times(b.attention, n);
    if (is_kda)
        b.attention.kept += kda_states(m, n, e);
    b.feed_forward = times(b.feed_forward, n);
    if (is_moe) {
        struct memory_rows n_rows = memory_rows(in);
        struct bytes each = row(in);
        uint64_t shared = n * dense((uint64_t)m->n_shared_experts * m->expert_inter, e).backward;
        b.feed_forward.again += n_rows.kept * each.again;
        b.feed_forward.forward += n_rows.piece * each.forward;
        uint64_t counts = in->has_sequence_loss ? n * 8 * m->n_experts : 0; /* a document a row */
        b.feed_forward.backward += max(max(n_rows.piece * each.backward, shared), counts);
    }
    return b;
}

/* Of a layer in segments: what these share, from forward to backward, and besides in the backward;
 * of a segment's own `shared` is not taken again. */
struct cut_bytes {
    uint64_t kept, backward, shared;
};

static struct cut_bytes cut_bytes(const struct memory_input *in, uint32_t l)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, n = in->n_tokens, at_once = memory_tokens_at_once(in);
    if (m->layers[l].attention == ATTENTION_KDA) {
        uint64_t wide = (uint64_t)m->kda_heads * m->kda_head_dim;
        uint64_t state = FLOAT_BYTES * wide * m->kda_head_dim;
        uint64_t rows = 3 * e * (m->conv_kernel - 1) * wide;
        return (struct cut_bytes){
            .kept = (n + at_once - 1) / at_once * (state + rows),
            /* and rows of the segment before beside its own, of ten tensors */
            .backward = 2 * state + rows + 10 * e * (m->conv_kernel - 1) * wide,
        };
    }
    uint64_t keys = e * (2 * m->kv_lora_rank + m->qk_rope_dim) +
                    FLOAT_BYTES * (m->heads + 1 + min(n, m->index_top_k));
    return (struct cut_bytes){
        .kept = n * (keys + e * m->index_head_dim),
        .backward = n * FLOAT_BYTES * (m->kv_lora_rank + m->qk_rope_dim),
        .shared = at_once * keys,
    };
}

/* The most that layers in segments take, on top of kept, to which what they share is added. */
static uint64_t peak_of_segments(const struct memory_input *in, uint64_t *kept)
{
    const struct model_spec *m = in->spec;
    uint64_t dx = memory_tokens_at_once(in) * in->elem_bytes * m->hidden, peak = 0;
    for (uint32_t l = 0; l < m->n_layers; l++) {
        struct layer_bytes b = layer_bytes(in, l);
        struct bytes a = b.attention, f = b.feed_forward;
        struct cut_bytes cut = cut_bytes(in, l);
        uint64_t layer = a.kept + a.again + f.kept + f.again - cut.shared;
        *kept += cut.kept;
        peak = max(peak, *kept + cut.backward + layer +
                             max(max(a.forward, f.forward), dx + max(a.backward, f.backward)));
    }
    return peak;
}

/* What is made before the first layer: adapters' scratch between A and B, of every token, and where
 * sparse attention brings it head by head, of every head. */
static uint64_t adapter_bytes(const struct memory_input *in)
{
    uint64_t rows = in->lora_by_heads ? in->n_tokens * in->spec->heads : in->n_tokens;
    return rows * in->lora_rank * (2 * in->elem_bytes + FLOAT_BYTES);
}

/* And room for the largest of the matrices that are unpacked before their product; an op unpacks
 * experts' itself. */
static uint64_t unpacked_bytes(const struct memory_input *in)
{
    uint64_t most = 0;
    for (size_t i = 0; in->map && i < in->map->n_entries; i++) {
        const struct tensor_entry *e = &in->map->entries[i];
        if (e->packing != PACKING_NONE && e->expert < 0)
            most = max(most, e->stored_count);
    }
    return in->elem_bytes * most;
}

uint64_t memory_activations(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t e = in->elem_bytes, n_blocks = bank_rows(m, m->n_layers ? m->n_layers - 1 : 0);
    /* The residual stream after each layer, its gradients, tokens and labels. */
    uint64_t kept = in->n_tokens * (e * (m->n_layers + 2 + n_blocks) * m->hidden +
                                    FLOAT_BYTES * (2 + (m->n_experts ? m->top_k : 0))) +
                    adapter_bytes(in) + unpacked_bytes(in);
    uint64_t head = in->n_tokens * (3 * e * m->hidden + mix(m, n_blocks, e) + FLOAT_BYTES);
    uint64_t dx = in->n_tokens * e * m->hidden, peak = 0;
    bool parts = in->recompute == RECOMPUTE_SELECTIVE;
    if (in->segment_tokens)
        peak = peak_of_segments(in, &kept);
    for (uint32_t l = 0; l < m->n_layers && !in->segment_tokens; l++) {
        struct layer_bytes b = layer_bytes(in, l);
        struct bytes a = b.attention, f = b.feed_forward;
        uint64_t layer = kept + a.kept + f.kept + (parts ? 0 : a.again + f.again);
        /* Where they are made again, only one of the two is there at once. */
        peak = max(peak, layer + (parts ? max(a.again + a.forward, f.again + f.forward)
                                        : f.forward));
        peak = max(peak, layer + dx + (parts ? max(a.again + max(a.forward, a.backward),
                                                   f.again + f.backward)
                                             : max(a.backward, f.backward)));
        if (in->recompute != RECOMPUTE_FULL)
            kept = layer;
    }
    return max(peak, kept + head);
}

uint64_t memory_rows_max(const struct model_spec *m, uint64_t n_tokens, uint32_t ep,
                         uint32_t n_slots)
{
    uint64_t most = n_tokens * ep * min(m->top_k, n_slots), even = n_tokens * m->top_k * 5 / 4;
    return min(max(even, 2ull * ep * n_slots), most);
}
