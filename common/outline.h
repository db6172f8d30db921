/* outline.h - a model of any family as counted parts: layers, tensors, operators
 *
 * model_spec says how to run the families that are built; an outline says what any other model is
 * made of, well enough to count, to compare with a checkpoint and to plan. A layer is one or two
 * blocks, a mixer over the sequence and a feed-forward; blocks that are alike are kept once. */
#ifndef COMMON_OUTLINE_H
#define COMMON_OUTLINE_H

#include "common/err.h"
#include "common/types.h"

#define OUTLINE_BLOCKS_MAX  128u
#define OUTLINE_TENSORS_MAX 40u /* of one block */
#define OUTLINE_NOTES_MAX   24u
#define OUTLINE_NONE        UINT16_MAX

enum outline_part {
    PART_EMBEDDING, PART_ATTENTION, PART_DENSE, PART_EXPERTS, PART_SHARED, PART_ROUTER,
    PART_LATENT, PART_NORMS, PART_RESIDUAL,
    OUTLINE_PARTS
};

/* What a block computes beyond plain products; operators.h says what of it is built. */
enum outline_op {
    OP_EMBEDDING, OP_HEAD, OP_TIED_HEAD, OP_RMS_NORM, OP_RMS_NORM_ZERO_CENTRED, OP_LAYER_NORM,
    OP_SCALED_STREAM, OP_ATTN_RES, OP_HYPER_CONNECTIONS,
    OP_KDA_BOUNDED, OP_KDA_SOFTPLUS, OP_GDN, OP_MAMBA1, OP_MAMBA2, OP_LIGHTNING, OP_SHORT_CONV,
    OP_GATED_NORM, OP_MLA, OP_MLA_GATE, OP_GQA, OP_GQA_GATE, OP_QK_NORM_HEAD, OP_QK_NORM_ALL,
    OP_QK_NORM_PLAIN, OP_ROTARY, OP_ROTARY_PARTIAL, OP_ROTARY_SCALED, OP_YARN, OP_ATTENTION_BIAS,
    OP_CLIP_QKV, OP_SLIDING_WINDOW, OP_CHUNKED_ATTENTION, OP_SINKS, OP_SHARED_KV,
    OP_COMPRESSED_KV, OP_INDEXER, OP_INDEXER_SHARED, OP_INDEXER_POOLED, OP_SPARSE_ATTENTION,
    OP_DENSE_MLP, OP_ROUTER_SIGMOID, OP_ROUTER_SIGMOID_PLAIN, OP_ROUTER_GROUPS,
    OP_ROUTER_SOFTMAX, OP_ROUTER_SOFTMAX_CHOSEN, OP_ROUTER_SQRT_SOFTPLUS, OP_ROUTER_HASH,
    OP_EXPERTS, OP_EXPERT_BIAS, OP_LATENT_EXPERTS, OP_SHARED_EXPERT, OP_SHARED_EXPERT_GATE,
    OP_SWIGLU, OP_SWIGLU_CLAMPED, OP_SITU, OP_RELU2, OP_OTHER_ACTIVATION,
    OP_GATED_CONV, OP_INDEXER_BLOCKS, OP_ZERO_EXPERTS, OP_SOFT_CAP, OP_POST_NORM, OP_FACTORED_QUERY,
    OUTLINE_OPS
};
_Static_assert(OUTLINE_OPS <= 64, "a block's operators are the bits of one word");

/* (out, in) numbers, in 0: a vector; n_copies: one per expert. */
struct outline_tensor {
    const char *names;   /* what its name ends with; spellings, and parts that lie apart, separated
                          * by '|'. {E} is an expert's number */
    enum outline_part part;
    uint32_t n_copies;
    uint64_t out, in;
    uint64_t n_padding;  /* stored beyond out x in */
};

/* All zero where it does not apply. Compared as bytes, so made from zeroed memory. */
struct outline_block {
    char     kind[24];      /* "kda", "mla", "gqa", "moe", ... */
    uint64_t ops;           /* bit 1 << enum outline_op */
    uint32_t heads, key_dim, value_dim; /* of the core */
    uint32_t kv_heads;      /* whose keys and values are kept; MLA: 1 of the latent's width */
    uint32_t window;        /* keys a token sees at most; 0: all before it */
    uint32_t index_heads, index_dim, index_top_k;
    uint64_t n_state;       /* floats of recurrent state of a sequence */
    uint32_t n_experts, top_k, expert_in, expert_inter, expert_matrices;
    uint32_t n_zero;        /* choices beyond the experts that compute nothing */
    uint32_t n_tensors;
    struct outline_tensor tensors[OUTLINE_TENSORS_MAX];
};

struct outline_layer {
    uint16_t mixer, ffn; /* indices of blocks; OUTLINE_NONE: the layer has none */
};

struct outline_quant {
    char     method[40]; /* "" where the weights are plain */
    uint32_t bits, group, block; /* group: numbers of a scale; block: its square's side */
};

struct outline {
    char     family[64];    /* model_type */
    bool     is_known;      /* else its structure was inferred from the keys */
    uint32_t n_layers, hidden, vocab, context;
    bool     is_tied, has_vision;
    uint32_t n_mtp_layers;
    struct outline_layer layers[LAYERS_MAX];
    struct outline_block blocks[OUTLINE_BLOCKS_MAX], top; /* top: embedding, last norms, head */
    uint32_t n_blocks;
    struct outline_quant quant;
    uint32_t n_notes;
    char     notes[OUTLINE_NOTES_MAX][160]; /* what was inferred, for the report */
};

struct outline_counts {
    uint64_t total, active; /* as stored; both embedding matrices counted in both */
    uint64_t live;          /* total without padding */
    uint64_t parts[OUTLINE_PARTS];
};

struct outline_counts outline_count(const struct outline *o);

/* Of one block: all its numbers, and those that one token uses. */
void outline_block_count(const struct outline_block *b, uint64_t *out_all, uint64_t *out_active);

const char *outline_part_name(enum outline_part part);

/* How many layers have the block as mixer or feed-forward. */
uint32_t outline_block_layers(const struct outline *o, uint32_t block);

/* The length of the longest of the tensor's spellings that name ends with; 0: it is another. */
size_t outline_tensor_match(const struct outline_tensor *t, const char *name);

/* Adds a line of what was inferred; a repeated line is kept once. */
void outline_note(struct outline *o, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
