/* memory_model.c - what a rank owns, and what it takes to compute with it
 *
 * Follows worker/shard.c, dispatch.c and kernels/ in what they take and when: a table that is
 * measured against them (tests/test_memory_model.c) keeps both together. */
#include "common/memory_model.h"

#include <assert.h>
#include <string.h>

#include "common/gpu_bytes.h"

#define MARGIN_COUNTS 1001u /* 64-bit counts per layer and expert of quantile balancing */
#define FLOAT_BYTES   4u
#define MIB           ((uint64_t)1 << 20)
/* Measured on a CPU (bench_memory short). A trainer without a model: heap, stacks, what its
 * libraries relocate, its share of the collectives' bookkeeping. */
#define PROCESS_BYTES (19 * MIB / 16)
/* And of each tensor while the header of a checkpoint is made or read. */
#define TENSOR_BYTES  2048u
/* On a GPU: the context, its libraries' code and work space. */
#define CONTEXT_BYTES (640 * MIB)
#define GPU_RING_BYTES    (8 * MIB) /* of uploads */
#define KDA_CHUNK_ROWS    64u
#define HUGE_PAGE_BYTES   (2 * MIB)  /* large blocks on a CPU are whole ones */
#define PACK_BYTES        (MIB / 2)  /* a thread's panels, and the scratch of most ops */
#define LOGITS_BYTES      (8 * MIB)  /* of the head's loss, at once */
#define LOGITS_ROWS_MIN   16u
#define CHUNK_TOKENS      1024u      /* fewer are not worth a chunk of their own */
#define CHUNK_FLOPS       2.75e11    /* nor are less, on a GPU that keeps all it computes */

static uint64_t max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* ---- what a rank owns ------------------------------------------------------------------------ */

/* For experts, of each rank and layer, spare ones included. */
static uint32_t slots_of(const struct memory_input *in)
{
    return in->spec->n_experts / in->degrees.ep + in->n_spare;
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

static uint64_t packed_expert_bytes(const struct memory_input *in)
{
    uint64_t latent = in->spec->latent, inter = in->spec->expert_inter;
    return 2 * packing_bytes(in->packing, inter, latent) +
           packing_bytes(in->packing, latent, inter);
}

/* Of one expert; frozen in elements, also where it is packed. */
static struct tensor_block expert_of(const struct memory_input *in,
                                     const struct model_counts *counts)
{
    if (in->map)
        return in->map->expert;
    if (!memory_is_frozen(in))
        return (struct tensor_block){.trained = counts->per_expert};
    return (struct tensor_block){
        .trained = in->expert_adapters,
        .frozen = in->packing ? packed_expert_bytes(in) / in->elem_bytes : counts->per_expert,
    };
}

/* What a rank owns: weights as they are read, and numbers that are trained. */
struct state {
    uint64_t weight_bytes, trained;
};

static struct state state_of_map(const struct memory_input *in, const struct model_counts *counts)
{
    const struct tensor_map *map = in->map;
    struct tensor_block dense = {0};
    for (uint32_t u = 0; u < map->n_units; u++) {
        dense.trained += map->units[u].trained;
        dense.frozen += map->units[u].frozen;
    }
    return (struct state){
        .weight_bytes = in->elem_bytes * owned(in, counts, dense.trained + dense.frozen,
                                               map->expert.trained + map->expert.frozen),
        .trained = owned(in, counts, dense.trained, map->expert.trained),
    };
}

static struct state state_of_counts(const struct memory_input *in,
                                    const struct model_counts *counts)
{
    uint64_t base = owned(in, counts, counts->total - counts->experts, counts->per_expert);
    uint64_t experts = owned(in, counts, 0, counts->per_expert);
    uint64_t adapters = owned(in, counts, in->dense_adapters, in->expert_adapters);
    uint64_t expert_bytes = in->packing ? owned(in, counts, 0, packed_expert_bytes(in))
                                        : experts * in->elem_bytes;
    return (struct state){
        .weight_bytes = (base - experts + adapters) * in->elem_bytes + expert_bytes,
        .trained = memory_is_frozen(in) ? adapters : base,
    };
}

/* Numbers of second moments among the trained ones. Muon leaves those of embedding, head and
 * vectors; without a map the vectors, which are few, do not count. */
static uint64_t second_moments(const struct memory_input *in, const struct model_counts *counts,
                               uint64_t trained)
{
    uint64_t n = memory_is_frozen(in) ? 0 : counts->embedding;
    if (!in->has_muon)
        return trained;
    for (size_t i = 0; in->map && i < in->map->n_entries; i++) {
        const struct tensor_entry *e = &in->map->entries[i];
        bool is_counted = e->role == ROLE_EMBEDDING || e->role == ROLE_HEAD;
        if (tensor_has_v(in->map, e) && (memory_is_frozen(in) || !is_counted))
            n += e->count;
    }
    return n / in->degrees.fsdp;
}

/* ---- what else it takes ---------------------------------------------------------------------- */

static uint32_t n_sparse(const struct model_spec *m)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < m->n_layers; l++)
        n += m->layers[l].mlp == MLP_MOE;
    return n;
}

uint64_t memory_chunk_tokens(double flops, bool on_gpu, enum recompute recompute)
{
    if (!on_gpu || recompute != RECOMPUTE_OFF || flops <= 0)
        return CHUNK_TOKENS;
    return max(CHUNK_TOKENS, (uint64_t)(CHUNK_FLOPS / flops));
}

uint32_t memory_chunks(uint64_t n_tokens, uint32_t ep, uint64_t chunk_tokens)
{
    return ep > 1 ? (uint32_t)min(max(n_tokens / chunk_tokens, 1), MEMORY_CHUNKS_MAX) : 1;
}

static uint32_t chunks_of(const struct memory_input *in)
{
    double flops = model_spec_expert_flops(in->spec);
    return memory_chunks(memory_tokens_at_once(in), in->degrees.ep,
                         memory_chunk_tokens(flops, in->on_gpu, in->recompute));
}

uint64_t memory_piece_rows(uint64_t rows_max, uint32_t n_chunks, uint64_t n_blocks)
{
    /* A quarter more than the even share is half as many again, of a chunk. */
    uint64_t n = max(rows_max * 6 / (5 * n_chunks), 2 * n_blocks);
    return n_chunks > 1 ? min(n, rows_max) : rows_max;
}

struct memory_rows memory_rows(const struct memory_input *in)
{
    uint32_t ep = in->degrees.ep;
    if (!n_sparse(in->spec))
        return (struct memory_rows){0};
    uint32_t n_slots = slots_of(in);
    uint64_t rows_max = memory_rows_max(in->spec, memory_tokens_at_once(in), ep, n_slots);
    uint64_t piece = memory_piece_rows(rows_max, chunks_of(in), (uint64_t)ep * n_slots);
    return (struct memory_rows){in->recompute == RECOMPUTE_OFF ? rows_max : piece, piece};
}

/* Of a rank that passes on what other nodes have for its own: how many ranks it does so for, one of
 * each node, and how many its node has. */
struct relay {
    uint64_t n_sources, n_here; /* both 0: tokens go straight */
};

static struct relay relay_of(const struct memory_input *in)
{
    uint64_t ep = in->degrees.ep, n = in->n_nodes;
    if (n < 2 || n >= ep)
        return (struct relay){0};
    return (struct relay){n, (ep + n - 1) / n};
}

/* Of a chunk of n tokens what leaves for experts, twice, as the next one may be filled while others
 * read the last; where it is passed on, to those who do so and by this rank. */
static uint64_t leaving_rows(const struct memory_input *in, uint64_t n)
{
    uint64_t top_k = in->spec->top_k;
    struct relay r = relay_of(in);
    if (!r.n_sources)
        return 2 * n * min(top_k, in->degrees.ep);
    return 2 * n * min(top_k, r.n_sources) + r.n_sources * n * (1 + 2 * min(top_k, r.n_here));
}

/* What travels there and back: what a piece brings, and what comes back of a chunk. In rows. */
static uint64_t travelling_rows(const struct memory_input *in)
{
    uint32_t n_chunks = chunks_of(in);
    uint64_t n = (memory_tokens_at_once(in) + n_chunks - 1) / n_chunks;
    return leaving_rows(in, n) + 3 * memory_rows(in).piece + n * in->spec->top_k;
}

/* Rows on their way, notes about them, and the places of the rows of every plan that is kept. */
static uint64_t dispatch_bytes(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t n_tokens = memory_tokens_at_once(in), n_pairs = n_tokens * m->top_k;
    uint64_t n_rows = memory_rows_max(m, n_tokens, in->degrees.ep, slots_of(in));
    uint64_t n_plans = in->recompute == RECOMPUTE_OFF ? n_sparse(m) : 1;
    bool travels = in->degrees.ep > 1;
    if (!n_sparse(m))
        return 0;
    struct relay r = travels ? relay_of(in) : (struct relay){0};
    uint64_t n_passed = r.n_sources * n_tokens * min(m->top_k, r.n_here);
    uint64_t n_noted = max(max(n_pairs, n_rows), n_passed);
    uint64_t notes = 8 * n_noted + (travels ? 2 * 8 * n_pairs : 0);
    uint64_t n_sent = r.n_sources ? n_pairs + n_noted : n_pairs;
    uint64_t plan = 8 * (n_pairs + n_rows) + FLOAT_BYTES * n_rows +
                    (travels ? 8 * (n_sent + n_rows) : 0);
    uint64_t rows = travels ? travelling_rows(in) * m->latent * in->elem_bytes : 0;
    return notes + 8 * n_pairs * (r.n_sources ? 6 : travels ? 3 : 1) + n_plans * plan + rows;
}

/* Copies of experts are sent from their homes and their gradients back; experts that move wait in
 * staging. As much as the spare slots hold. */
static uint64_t staging_bytes(const struct memory_input *in, const struct model_counts *counts)
{
    struct tensor_block one = expert_of(in, counts);
    uint64_t n_slots = (uint64_t)in->n_spare * n_sparse(in->spec);
    uint64_t frozen = one.frozen * in->elem_bytes;
    if (!in->n_spare || in->degrees.ep == 1)
        return 0;
    uint64_t copies = 2 * max(one.trained * FLOAT_BYTES, frozen);
    uint64_t moves = one.trained * (in->elem_bytes + 3 * FLOAT_BYTES) + frozen;
    return n_slots * (copies + moves) / max(in->degrees.expert_shard, 1);
}

/* Muon's, of its largest matrix: two of its size, and two squares of its smaller side. */
static uint64_t muon_bytes(const struct memory_input *in)
{
    uint64_t most = 0;
    for (size_t i = 0; in->has_muon && in->map && i < in->map->n_entries; i++) {
        const struct tensor_entry *e = &in->map->entries[i];
        if (!tensor_is_for_muon(e) || e->n_dims < 2)
            continue;
        uint64_t side = min(e->dims[0], e->dims[1]);
        most = max(most, 2 * FLOAT_BYTES * (e->dims[0] * e->dims[1] + side * side));
    }
    return most;
}

/* What the backward of the recurrence takes for its chunks on a GPU: five (rows, d), two (rows,
 * rows), one of them floats, one (d, d), and d floats, of some heads at once, and of as many chunks
 * as one document of all tokens has. */
static uint64_t kda_bytes(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t d = m->kda_head_dim, square = KDA_CHUNK_ROWS * KDA_CHUNK_ROWS, e = in->elem_bytes;
    uint64_t chunk = e * (5 * KDA_CHUNK_ROWS * d + square + d * d) + FLOAT_BYTES * (square + d);
    uint64_t n_chunks = max((memory_tokens_at_once(in) + KDA_CHUNK_ROWS - 1) / KDA_CHUNK_ROWS,
                            GPU_KDA_CHUNKS_MIN);
    for (uint32_t l = 0; l < m->n_layers; l++)
        if (m->layers[l].attention == ATTENTION_KDA)
            return n_chunks * min(m->kda_heads, GPU_KDA_HEADS) * chunk;
    return 0;
}

/* What the backward of sparse attention takes on a GPU: of some queries at once the weights of all
 * heads, twice, and what each adds to its keys; where the keys find that; and, unless segments have
 * them, sums of all keys. */
static uint64_t sparse_bytes(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t width = m->kv_lora_rank + m->qk_rope_dim, n = memory_tokens_at_once(in);
    uint64_t top = min(m->index_top_k, in->n_tokens);
    if (top == 0)
        return 0;
    bool is_cut = n < in->n_tokens;
    uint64_t heads = (m->heads + 63) / 64 * 64;
    uint64_t row = (top + GPU_SPARSE_STEP - 1) / GPU_SPARSE_STEP * GPU_SPARSE_STEP;
    uint64_t query = in->elem_bytes == FLOAT_BYTES
                         ? FLOAT_BYTES * (2 * m->heads * top + top * width)
                         : in->elem_bytes * (2 * heads * row + top * width);
    uint64_t block = min(min(max(GPU_SPARSE_BYTES / query, 1), GPU_SPARSE_QUERIES), n);
    return block * query + FLOAT_BYTES * (in->n_tokens * block + n * m->heads +
                                          (is_cut ? 0 : in->n_tokens * width));
}

/* What the backward of attention over all keys takes on a GPU: a number for each row of a head, and
 * what each head adds to the rotated part that keys share. */
static uint64_t attention_bytes(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    for (uint32_t l = 0; l < m->n_layers && !m->index_top_k; l++)
        if (m->layers[l].attention != ATTENTION_KDA)
            return FLOAT_BYTES * in->n_tokens * m->heads * (1 + (uint64_t)m->qk_rope_dim);
    return 0;
}

/* Some rows of logits at once, and the loss of each row. */
static uint64_t logits_bytes(const struct memory_input *in)
{
    uint64_t row = (uint64_t)in->spec->vocab * in->elem_bytes;
    uint64_t rows = GPU_LOGITS_BYTES / row / GPU_LOGITS_ROWS_MIN * GPU_LOGITS_ROWS_MIN;
    return min(in->n_tokens, max(rows, GPU_LOGITS_ROWS_MIN)) * row + 8 * in->n_tokens;
}

/* Experts' weights that are unpacked at once. */
static uint64_t packed_bytes(const struct memory_input *in)
{
    uint64_t matrix = (uint64_t)in->spec->latent * in->spec->expert_inter * in->elem_bytes;
    return in->packing == PACKING_NONE ? 0 : packing_room(slots_of(in), matrix);
}

/* What the op takes at once that takes the most on a GPU. */
static uint64_t gpu_op_bytes(const struct memory_input *in)
{
    const uint64_t ops[] = {logits_bytes(in), kda_bytes(in),    attention_bytes(in),
                            muon_bytes(in),   sparse_bytes(in), packed_bytes(in)};
    uint64_t most = 0;
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
        most = max(most, ops[i]);
    return most + GPU_TABLE_BYTES;
}

/* And on a CPU, where threads have their own besides. */
static uint64_t cpu_op_bytes(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    uint64_t n = in->n_tokens, wide = 0, rope = 0;
    for (uint32_t l = 0; l < m->n_layers; l++)
        if (m->layers[l].attention == ATTENTION_KDA)
            wide = (uint64_t)m->kda_heads * m->kda_head_dim;
        else
            rope = (uint64_t)m->heads * m->qk_rope_dim;
    uint64_t rows = min(n, max(LOGITS_ROWS_MIN, LOGITS_BYTES / FLOAT_BYTES / m->vocab));
    uint64_t logits = rows * (8 + FLOAT_BYTES * (uint64_t)m->vocab);
    return max(max(logits, muon_bytes(in)), FLOAT_BYTES * n * max(wide, rope));
}

static uint64_t op_bytes(const struct memory_input *in)
{
    /* Losses of rows, and shares of each expert in each document, at most one a row. */
    uint64_t shares = in->has_sequence_loss
                          ? in->n_tokens * (8 + FLOAT_BYTES * (uint64_t)in->spec->n_experts)
                          : 0;
    return max(shares, in->on_gpu ? gpu_op_bytes(in) : cpu_op_bytes(in));
}

/* Of a GPU one block, reserved before the first op, and the ring of uploads. */
static uint64_t scratch_bytes(const struct memory_input *in, uint64_t op)
{
    uint64_t d = in->spec->kda_head_dim, square = KDA_CHUNK_ROWS * KDA_CHUNK_ROWS;
    if (in->on_gpu)
        return max(op, GPU_BLOCK_BYTES) + GPU_RING_BYTES;
    /* Of a chunk of the recurrence some 22 (rows, d), three (rows, rows) and two (d, d). */
    uint64_t chunk = d ? FLOAT_BYTES * (22 * KDA_CHUNK_ROWS * d + 3 * square + 2 * d * d) : 0;
    return op + max(in->n_threads, 1) * (PACK_BYTES + chunk);
}

/* Of a process that writes or reads a checkpoint: what describes its tensors, and a part of one of
 * them on its way. */
static uint64_t process_bytes(const struct memory_input *in)
{
    uint64_t most = 0, n_tensors = 0;
    if (in->on_gpu)
        return CONTEXT_BYTES;
    for (size_t i = 0; in->map && i < in->map->n_entries; i++) {
        const struct tensor_entry *e = &in->map->entries[i];
        most = max(most, FLOAT_BYTES * e->stored_count);
        n_tensors += e->adapter == ADAPTER_NONE; /* adapters' are another checkpoint's, and fewer */
    }
    return PROCESS_BYTES + min(most, MEMORY_CHECKPOINT_BYTES) + TENSOR_BYTES * n_tensors;
}

/* A CPU's large blocks end on a huge page: what lies between. */
static uint64_t rest(const struct memory_input *in, uint64_t n_bytes)
{
    if (in->on_gpu || n_bytes < HUGE_PAGE_BYTES)
        return 0;
    return (HUGE_PAGE_BYTES - n_bytes % HUGE_PAGE_BYTES) % HUGE_PAGE_BYTES;
}

static void add_up(struct memory_plan *plan)
{
    plan->buffers = plan->gathered + plan->dispatch + plan->staging + plan->counters +
                    plan->scratch + plan->process;
    plan->total = plan->weights + plan->gradients + plan->optimizer + plan->activations +
                  plan->buffers;
}

struct memory_plan memory_model(const struct memory_input *in)
{
    const struct model_spec *m = in->spec;
    struct model_counts counts = model_spec_count(m);
    struct state state = in->map ? state_of_map(in, &counts) : state_of_counts(in, &counts);
    uint64_t trained = state.trained;
    uint64_t master = in->elem_bytes < FLOAT_BYTES ? FLOAT_BYTES : 0;
    uint64_t n_counts = 8ull * m->n_layers * m->n_experts;
    assert(in->elem_bytes == 4 || in->elem_bytes == 2);
    struct memory_plan plan = {
        .weights = state.weight_bytes + trained * master,
        .gradients = trained * FLOAT_BYTES,
        .optimizer = (trained + second_moments(in, &counts, trained)) * FLOAT_BYTES,
        .activations = memory_activations(in),
        .rows = memory_rows(in),
        .gathered = memory_gathered(in),
        .dispatch = dispatch_bytes(in),
        .staging = staging_bytes(in, &counts),
        /* On the device and, of a CPU in the same memory, for the host. */
        .counters = (in->on_gpu ? 1 : 2) * n_counts * (in->count_margins ? MARGIN_COUNTS : 1),
        .op_scratch = op_bytes(in),
        .scratch = scratch_bytes(in, op_bytes(in)),
        .process = process_bytes(in),
    };
    /* Blocks that are rounded: activations, and what does not travel of the state. */
    uint64_t first = trained * FLOAT_BYTES, second = plan.optimizer - first; /* moments */
    plan.process += rest(in, plan.activations) + rest(in, first) + rest(in, second);
    if (in->degrees.world == 1)
        plan.process += rest(in, plan.weights) + rest(in, plan.gradients);
    add_up(&plan);
    return plan;
}
