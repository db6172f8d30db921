/* memory_model.h - bytes of one rank's device for a training step, before anything is allocated
 *
 * Pure arithmetic over a model's counts, the degrees and the tokens of a pass. It is an upper bound
 * however tokens are routed, but in deterministic mode, and of however many documents they are:
 * what ops keep and take follows from the number of tokens. */
#ifndef COMMON_MEMORY_MODEL_H
#define COMMON_MEMORY_MODEL_H

#include "common/layout.h"
#include "common/recompute.h"
#include "common/tensor_map.h"

/* A checkpoint's numbers on their way between device and file, at once. */
#define MEMORY_CHECKPOINT_BYTES ((uint64_t)1 << 20)

struct memory_input {
    const struct model_spec *spec;
    struct layout_degrees degrees; /* valid: layout_init took them; auto resolved */
    uint64_t n_tokens;  /* of one pass of one rank: micro_batch x sequence_length */
    uint64_t segment_tokens; /* that layers take at once, with full recomputation; 0: all */
    enum recompute recompute;
    uint32_t elem_bytes; /* of activations and of the weights that they meet: 4 or 2 */
    uint32_t n_spare;   /* slots of each rank and layer for copies of experts */
    /* Numbers of adapters beside a frozen base: of all dense tensors, and of one expert. Both 0:
     * all weights are trained. */
    uint64_t dense_adapters, expert_adapters;
    uint32_t lora_rank;      /* of those */
    bool     lora_by_heads;  /* sparse attention brings one of kv_b head by head */
    enum packing packing; /* of a frozen base; without a map its experts' alone count */
    const struct tensor_map *map; /* for the exact sizes of units; NULL: layers' mean */
    bool     on_gpu;
    uint32_t n_threads;     /* of a CPU; 0: one */
    uint32_t n_nodes; /* on which an expert group lies as evenly as it goes, where its ranks pass
                       * tokens on to others of their node; 0: they do not */
    bool     has_muon;       /* matrices have no second moment, and are gathered for a step */
    bool     has_z_loss, has_capacity; /* of the routers */
    bool     has_sequence_loss; /* of them, of each document */
    bool     count_margins; /* quantile balancing keeps a histogram per expert and layer */
    bool     is_blocking; /* parallel.overlap: false: no unit comes while another is used */
};

/* Tokens that a layer takes at once. */
static inline uint64_t memory_tokens_at_once(const struct memory_input *in)
{
    bool cuts = in->segment_tokens && in->segment_tokens < in->n_tokens;
    return cuts ? in->segment_tokens : in->n_tokens;
}

static inline bool memory_is_frozen(const struct memory_input *in)
{
    return in->dense_adapters || in->expert_adapters;
}

/* Of experts, that a rank has of a sparse layer: that stay until its backward, and that come at
 * once. */
struct memory_rows {
    uint64_t kept, piece;
};

struct memory_plan {
    uint64_t weights, gradients, optimizer; /* the slices that this rank owns; weights with their
                                             * float32 masters, where they are narrower */
    uint64_t activations;
    uint64_t buffers; /* the sum of the next ones */
    uint64_t gathered; /* whole layers while they are used, and their gradients */
    uint64_t dispatch; /* rows on their way to experts */
    uint64_t staging;  /* copies of experts, and experts that move */
    uint64_t counters; /* of routing */
    uint64_t scratch;  /* of ops */
    uint64_t op_scratch; /* of that, what one of them takes at once, threads' own left out */
    uint64_t process;  /* the process itself, or a GPU's context and libraries */
    uint64_t total;
    struct memory_rows rows; /* no bytes: a count that some of the bytes are of */
};

/* Rows of experts that a rank of ep keeps of a layer for its backward where nothing is computed
 * again, of n_tokens of each rank: a quarter more than its even share, or two for each of a rank's
 * slots. Where more come, none are kept. n_slots: for experts, of each rank and layer, spare ones
 * included. */
uint64_t memory_rows_max(const struct model_spec *m, uint64_t n_tokens, uint32_t ep,
                         uint32_t n_slots);

/* In how many chunks a rank's tokens go to experts; and how many rows come to a rank at once, which
 * is what it holds where they are computed again: of several chunks half as many again as its even
 * share of one, but at least two for each of n_blocks, as many as a rank has slots times the ranks
 * that send rows to them. A chunk that would bring more goes in several pieces.
 * chunk_tokens: the fewest that are worth a chunk. Where a GPU keeps what it computes, so many that
 * their experts' products, of flops a token, forward and in one layer, take half a millisecond of
 * an H200: smaller ones lose more in their products than their way would cost. Elsewhere chunks
 * save memory, too. */
#define MEMORY_CHUNKS_MAX 4u
uint64_t memory_chunk_tokens(double flops, bool on_gpu, enum recompute recompute);
uint32_t memory_chunks(uint64_t n_tokens, uint32_t ep, uint64_t chunk_tokens);
uint64_t memory_piece_rows(uint64_t rows_max, uint32_t n_chunks, uint64_t n_blocks);

/* Of the plan, the rows; its activations; and its whole layers. */
struct memory_rows memory_rows(const struct memory_input *in);
uint64_t memory_activations(const struct memory_input *in);
uint64_t memory_gathered(const struct memory_input *in);

struct memory_plan memory_model(const struct memory_input *in);

#endif
