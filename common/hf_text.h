/* hf_text.h - the parts of a config.json's text model, one per reader
 *
 * Private to hf_config. Each fills its fields of a spec whose family is set; errors name keys. */
#ifndef COMMON_HF_TEXT_H
#define COMMON_HF_TEXT_H

#include "common/err.h"
#include "common/json.h"
#include "common/model_spec.h"

/* Everything. */
int hf_text(const struct json *o, struct model_spec *m, struct err *err);

/* Which layers are KDA, and how it is built: linear_attn_config as published, or layer_types and
 * linear_* as transformers writes them. */
int hf_linear(const struct json *o, struct model_spec *m, struct err *err);

/* Rotary positions: rope_theta and rope_scaling, or rope_parameters. */
int hf_rotary(const struct json *o, struct model_spec *m, struct err *err);

/* The indexer of latent attention: index_n_heads, index_head_dim and index_topk, in dsa_config or
 * beside the other keys; all zero where there are none. After the layers' kinds. */
int hf_indexer(const struct json *o, struct model_spec *m, struct err *err);

#endif
