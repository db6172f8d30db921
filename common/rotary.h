/* rotary.h - the angles of rotary position embedding, plain and stretched by YaRN
 *
 * Pure functions of a model's settings, computed in double. YaRN: Peng, Quesnelle, Fan, Shippole
 * 2023, with the factors that DeepSeek-V3's and Kimi's configurations name. */
#ifndef COMMON_ROTARY_H
#define COMMON_ROTARY_H

#include <stdbool.h>
#include <stdint.h>

struct rotary_config {
    uint32_t dim;   /* rotated dims of a head, even: pair i of dim / 2 turns at theta^(-2i / dim) */
    double   theta; /* the base */
    bool     yarn;  /* else all that follows is not read */
    double   factor;
    double   original_positions;  /* the context length before stretching */
    double   beta_fast, beta_slow; /* 32 and 1 where a config has none */
    bool     truncate;             /* true where a config does not say */
    double   mscale, mscale_all_dim; /* 0: absent */
    double   attention_factor;       /* 0: absent, then it follows from the mscales */
};

/* Radians per position of each pair; dim / 2 of them. */
void rotary_frequencies(const struct rotary_config *c, double *out_frequencies);

/* What cosines and sines are multiplied by; 1 without YaRN. */
double rotary_attention_factor(const struct rotary_config *c);

/* What latent attention multiplies its score scale by; 1 without YaRN or mscale_all_dim. The score
 * of an indexer never takes it. */
double rotary_score_factor(const struct rotary_config *c);

/* The table that the device's rotary reads: for each position from 0, dim / 2 cosines and then
 * dim / 2 sines, times the attention factor. out_table (n_positions, dim). */
void rotary_table(const struct rotary_config *c, int64_t n_positions, float *out_table);

#endif
