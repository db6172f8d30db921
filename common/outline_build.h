/* outline_build.h - what the readers of a configuration's parts share
 *
 * Private to outline_config. Numbers are read by lists of spellings; errors name keys. */
#ifndef COMMON_OUTLINE_BUILD_H
#define COMMON_OUTLINE_BUILD_H

#include "common/json.h"
#include "common/outline.h"

enum mix_kind {
    MIX_NONE, MIX_FULL, MIX_SLIDING, MIX_CHUNKED, MIX_LINEAR, /* which linear one: the keys say */
    MIX_CONV
};
enum ffn_kind { FFN_NONE, FFN_DENSE, FFN_MOE };

struct builder {
    const struct json *root, *text; /* text: the language model's keys */
    const char *type;               /* the model_type whose habits it has: its own, or of a kin */
    char kin[64];
    struct outline *o;
    enum mix_kind mix[LAYERS_MAX];
    enum ffn_kind ffn[LAYERS_MAX];
    bool one_block;                 /* a layer is one block with one norm */
    bool is_zero_centred;
    struct err *err;
};

#define KEYS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define BUILD_N_EXPERTS KEYS("num_experts", "n_routed_experts", "num_local_experts", \
                             "moe_num_experts", "moe_num_primary_experts")
#define OUTLINE_REQUIRED UINT32_MAX
#define WIDTH_MAX (1u << 20)

/* The first key of the list that is there; otherwise: what its absence means, or
 * OUTLINE_REQUIRED. A list gives its element l. */
int build_number(const struct builder *b, uint32_t l, const char *const *keys, uint32_t min,
                 uint32_t max, uint32_t otherwise, uint32_t *out);
/* A flag; any other kind of value is an error. */
int build_flag(const struct builder *b, const char *key, bool otherwise, bool *out);
/* The text, or "" */
const char *build_text(const struct builder *b, const char *key);
bool build_has(const struct builder *b, const char *key); /* neither absent nor null */
/* Does model_type begin with one of the words, which spaces separate? */
bool build_is(const struct builder *b, const char *words);

static inline void build_op(struct outline_block *k, enum outline_op op)
{
    k->ops |= 1ull << op;
}

/* Appends a tensor. */
void build_tensor(struct outline_block *k, enum outline_part part, const char *names, uint64_t out,
                  uint64_t in, uint32_t n_copies);

/* A norm of the residual stream: root mean square or, in a few families, LayerNorm. */
void build_norm(struct builder *b, struct outline_block *k, const char *weight, const char *bias);

/* A norm of the block's output, in the families that have one. */
void build_post_norm(struct builder *b, struct outline_block *k, const char *weight);

/* Which blocks the layers have: fills mix, ffn and, in nested patterns, the number of layers. */
int build_layers(struct builder *b);
/* Names of what a residual scheme adds to a block. */
struct residual_names {
    const char *res_norm, *res_proj;           /* of attention residuals */
    const char *hyper_fn, *hyper_base, *hyper_scale; /* of hyper-connections */
};
void build_residual(struct builder *b, struct outline_block *k, const struct residual_names *n);
/* The blocks of layer l. */
int build_mixer(struct builder *b, uint32_t l, struct outline_block *k);
int build_conv(struct builder *b, struct outline_block *k);
int build_linear(struct builder *b, struct outline_block *k);
int build_compressed(struct builder *b, uint32_t l, struct outline_block *k);
int build_ffn(struct builder *b, uint32_t l, struct outline_block *k);
int build_quant(struct builder *b);
/* Of a file beside the configuration, hf_quant_config.json; none there is no error. */
int build_quant_beside(const char *path, struct outline_quant *out, struct err *err);

#endif
