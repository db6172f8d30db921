/* scenario.h - loads that the next window may bring, drawn around a forecast
 *
 * A placement is judged by what it does on all of them, because one that is perfect for a single
 * forecast is brittle in the window that really comes. */
#ifndef COORDINATOR_SCENARIO_H
#define COORDINATOR_SCENARIO_H

#include "common/mix.h"
#include "common/types.h"

#define SCENARIOS 16

/* What is believed of one layer's next window. */
struct belief {
    uint32_t n_experts;
    double  *mean; /* (n_experts) tokens */
    double  *sd;   /* (n_experts) standard deviation of what comes around the mean */
    double   drift; /* 0..1: the part of all variance that is not counting noise */
};

/* out: (n_experts, SCENARIOS), each scenario scaled to a mean of 1 per device. Scenario 0 is the
 * mean itself. All zero means give all zero. The same seed gives the same bits. */
void scenario_draw(const struct belief *b, uint32_t n_devices, uint64_t seed, float *out);

/* Pseudo-random bits of a counter: the same everywhere. */
static inline uint64_t scenario_hash(uint64_t x)
{
    return mix_word(x + 0x9e3779b97f4a7c15u);
}

#endif
