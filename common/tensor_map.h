/* tensor_map.h - where each tensor of a checkpoint lives in the model's parameter blocks
 *
 * Parameters are grouped in units that are gathered and freed together: unit 0 is the embedding,
 * unit 1 + l the dense parameters of layer l, the last unit the final norms and the head. The
 * routed experts of a layer stand outside the units: expert e of layer l is one block, w1 (gate),
 * w3 (up), w2 (down) in this order. In a unit or block trained tensors come first, then frozen
 * ones, each starting at a multiple of 16 numbers; either part is cut over ranks by itself. Buffers
 * are few: those of all units lie together, whole on every rank. */
#ifndef COMMON_TENSOR_MAP_H
#define COMMON_TENSOR_MAP_H

#include "common/err.h"
#include "common/model_spec.h"
#include "common/packing.h"

/* NORMAL: N(0, init_std). A_LOG: log U(1, 16). DT_BIAS: inverse softplus of a step drawn
 * log-uniformly from [1e-3, 0.1]. CONV: U(-b, b), b = kernel^-0.5. HEAD: N(0, 1 / hidden) cut at
 * 3 standard deviations. LORA_A: U(-b, b), b = in^-0.5. */
enum tensor_init {
    INIT_NORMAL, INIT_ONES, INIT_ZEROS, INIT_A_LOG, INIT_DT_BIAS, INIT_CONV, INIT_HEAD,
    INIT_LORA_A
};

/* What a tensor is to the code that computes with it; names differ between families. */
enum tensor_role {
    ROLE_EMBEDDING,
    ROLE_FINAL_NORM, ROLE_OUTPUT_RES_NORM, ROLE_OUTPUT_RES_PROJ, ROLE_HEAD,

    ROLE_ATTN_NORM, ROLE_MLP_NORM,
    ROLE_ATTN_RES_NORM, ROLE_ATTN_RES_PROJ, ROLE_MLP_RES_NORM, ROLE_MLP_RES_PROJ,

    ROLE_KDA_Q, ROLE_KDA_K, ROLE_KDA_V, ROLE_KDA_Q_CONV, ROLE_KDA_K_CONV, ROLE_KDA_V_CONV,
    ROLE_KDA_F_A, ROLE_KDA_F_B, ROLE_KDA_DT_BIAS, ROLE_KDA_A_LOG, ROLE_KDA_BETA,
    ROLE_KDA_G, ROLE_KDA_G_A, ROLE_KDA_G_B, ROLE_KDA_O_NORM, ROLE_KDA_O,

    ROLE_MLA_Q, ROLE_MLA_Q_A, ROLE_MLA_Q_A_NORM, ROLE_MLA_Q_B,
    ROLE_MLA_KV_A, ROLE_MLA_KV_A_NORM, ROLE_MLA_KV_B, ROLE_MLA_G, ROLE_MLA_O,
    ROLE_MLA_Q_A_BIAS, ROLE_MLA_KV_A_BIAS, ROLE_MLA_O_BIAS,

    ROLE_INDEX_Q, ROLE_INDEX_K, ROLE_INDEX_K_NORM, ROLE_INDEX_K_NORM_BIAS, ROLE_INDEX_WEIGHTS,

    ROLE_MLP_GATE, ROLE_MLP_UP, ROLE_MLP_DOWN,

    ROLE_ROUTER, ROLE_ROUTER_BIAS, ROLE_LATENT_DOWN, ROLE_LATENT_UP, ROLE_LATENT_NORM,
    ROLE_SHARED_GATE, ROLE_SHARED_UP, ROLE_SHARED_DOWN,
    ROLE_EXPERT_GATE, ROLE_EXPERT_UP, ROLE_EXPERT_DOWN,
    TENSOR_ROLES
};

/* The low-rank adapter beside a matrix W (out, in): y = W x + (alpha / r) B A x; lora_map.h. */
enum adapter_part { ADAPTER_NONE, ADAPTER_A /* (r, in) */, ADAPTER_B /* (out, r) */ };

struct tensor_entry {
    const char *name;       /* the published name */
    enum tensor_role role;  /* of an adapter: that of its matrix */
    enum adapter_part adapter;
    uint32_t n_same;        /* an A that all experts of the layer share is stored under the names
                             * of each of them, as many as this; name is expert 0's. Else 0 */
    uint32_t unit;          /* of dense tensors; for experts 1 + layer */
    int32_t  expert;        /* -1: dense */
    uint64_t offset;        /* in numbers, from the start of the unit or of the expert's block;
                             * of a buffer, from the start of all buffers */
    uint64_t count;         /* live numbers */
    uint64_t stored_count;  /* as stored: K3's A_log is padded with zeros to a multiple of 128 */
    uint32_t n_dims;
    uint64_t dims[TENSOR_DIMS_MAX]; /* as stored */
    enum tensor_init init;
    bool     is_buffer;     /* no gradient, no optimizer: the router's correction bias */
    bool     is_unreached;  /* nothing trains it: the loss never reaches it (layer 0's
                             * self_attention_res_*, indexers), or it is frozen */
    bool     is_optional;   /* a checkpoint may lack it; then it is zero */
    bool     is_matrix;     /* decayed by decay: matrices (2-D, not norm, bias, conv, A_log) */
    enum packing packing;   /* of a frozen matrix that is kept packed: count is what its bytes take
                             * in elements, stored_count the numbers that they stand for */
    bool     keep_f32;      /* published in F32 even in BF16 checkpoints */
};

/* A layer's matrix between activations, which FP8 rounds: not a router, an indexer's, the head. */
bool tensor_is_projection(enum tensor_role role);

static inline bool tensor_is_trained(const struct tensor_entry *e)
{
    return !e->is_buffer && !e->is_unreached;
}

/* Whether Muon takes it where a job trains with that: a matrix, but neither embedding nor head. */
static inline bool tensor_is_for_muon(const struct tensor_entry *e)
{
    return tensor_is_trained(e) && e->is_matrix && e->role != ROLE_EMBEDDING &&
           e->role != ROLE_HEAD;
}

/* Numbers of a unit, or of one routed expert's block; multiples of 16. */
struct tensor_block {
    uint64_t trained, frozen;
};

struct tensor_map {
    struct tensor_entry *entries;
    size_t    n_entries;    /* unit by unit; a layer's experts after its dense tensors */
    uint32_t *by_name;      /* indices of entries in ascending order of names */
    uint32_t  n_units;
    struct tensor_block *units, expert; /* n_units */
    uint64_t  n_buffers;    /* numbers of all buffers */
    char     *names;        /* all names; the entries point here */
    char     *adapter_names; /* and those of adapters; NULL: there are none */
    bool      has_muon;     /* tensors that are for Muon have no second moment */
    const char *layers;     /* what the names of layers begin with, up to the number */
    uint32_t n_layers, n_mtp_layers;
};

/* Whether a second moment is kept of it. */
static inline bool tensor_has_v(const struct tensor_map *map, const struct tensor_entry *e)
{
    return tensor_is_trained(e) && !(map->has_muon && tensor_is_for_muon(e));
}

/* Gives *out_map, ended with tensor_map_fini. Fails with -ENOTSUP for a family it lacks. */
int  tensor_map_init(const struct model_spec *m, struct tensor_map *out_map, struct err *err);
void tensor_map_fini(struct tensor_map *map);

/* From now on the indexers' tensors are trained; alone: and all others are not. */
void tensor_map_train_indexers(struct tensor_map *map, bool alone);

/* From now on frozen matrices are kept packed among elements of elem_bytes: as MXFP4 those of
 * routed experts, as FP8 all projections. PACKING_NONE changes nothing. Fails like
 * packing_check. */
int tensor_map_pack(struct tensor_map *map, enum packing packing, size_t elem_bytes,
                    struct err *err);

/* After entries were added or frozen: offsets, sizes and by_name anew. */
void tensor_map_index(struct tensor_map *map);

/* The entry of that name, or NULL. */
const struct tensor_entry *tensor_map_find(const struct tensor_map *map, const char *name);

/* A tensor of a part that is not computed and goes from checkpoint to checkpoint as it is: vision
 * towers and their projectors, next-token layers, stored rotary frequencies. */
bool tensor_map_is_carried(const struct tensor_map *map, const char *name);

#endif
