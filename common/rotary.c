/* rotary.c - the angles of rotary position embedding, plain and stretched by YaRN
 *
 * YaRN leaves the fast pairs alone, slows the slow ones by the factor, and ramps linearly between
 * the pair that turns beta_fast times over the original context and the one that turns beta_slow
 * times. */
#include "common/rotary.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "common/mem.h"

/* The pair, as a real number, that makes n_turns over the original context. */
static double pair_of_turns(const struct rotary_config *c, double n_turns)
{
    return c->dim * log(c->original_positions / (2 * M_PI * n_turns)) / (2 * log(c->theta));
}

static double clamp(double x, double lo, double hi)
{
    return x < lo ? lo : x > hi ? hi : x;
}

void rotary_frequencies(const struct rotary_config *c, double *out_frequencies)
{
    assert(c->dim % 2 == 0);
    double lo = 0, hi = 0;
    if (c->yarn) {
        lo = pair_of_turns(c, c->beta_fast);
        hi = pair_of_turns(c, c->beta_slow);
        if (c->truncate) {
            lo = floor(lo);
            hi = ceil(hi);
        }
        lo = fmax(lo, 0);
        hi = fmin(hi, c->dim - 1.0);
        if (lo == hi)
            hi += 0.001;
    }
    for (uint32_t i = 0; i < c->dim / 2; i++) {
        double f = pow(c->theta, -2.0 * i / c->dim);
        double ramp = c->yarn ? clamp((i - lo) / (hi - lo), 0, 1) : 0;
        out_frequencies[i] = c->yarn ? ramp * f / c->factor + (1 - ramp) * f : f;
    }
}

static double magnitude(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

double rotary_attention_factor(const struct rotary_config *c)
{
    if (!c->yarn)
        return 1;
    if (c->attention_factor != 0)
        return c->attention_factor;
    if (c->mscale != 0 && c->mscale_all_dim != 0)
        return magnitude(c->factor, c->mscale) / magnitude(c->factor, c->mscale_all_dim);
    return magnitude(c->factor, 1);
}

double rotary_score_factor(const struct rotary_config *c)
{
    if (!c->yarn || c->mscale_all_dim == 0)
        return 1;
    double m = magnitude(c->factor, c->mscale_all_dim);
    return m * m;
}

void rotary_table(const struct rotary_config *c, int64_t n_positions, float *out_table)
{
    uint32_t n_pairs = c->dim / 2;
    double *frequencies = xcalloc(n_pairs ? n_pairs : 1, sizeof *frequencies);
    double factor = rotary_attention_factor(c);
    rotary_frequencies(c, frequencies);
    for (int64_t t = 0; t < n_positions; t++)
        for (uint32_t i = 0; i < n_pairs; i++) {
            double angle = (double)t * frequencies[i];
            out_table[t * c->dim + i] = (float)(factor * cos(angle));
            out_table[t * c->dim + n_pairs + i] = (float)(factor * sin(angle));
        }
    free(frequencies);
}
