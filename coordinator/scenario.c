/* scenario.c - draws of the next window's loads from a forecast and its error
 *
 * Each expert's load is gamma distributed (never negative, mean and deviation as believed), by the
 * cube approximation of Wilson and Hilferty. Its 16 draws are the 16 strata of the distribution in
 * an order of its own, so that even few scenarios show each expert's whole spread. */
#include "coordinator/scenario.h"

#include <math.h>
#include <string.h>

/* Middles of the upper 128 of 256 equal strata of the normal distribution, scaled to variance 1;
 * the lower half mirrors them. */
static const float upper[128] = {
    0.0049f, 0.0147f, 0.0245f, 0.0344f, 0.0442f, 0.0540f, 0.0638f, 0.0737f, 0.0835f, 0.0934f,
    0.1033f, 0.1131f, 0.1230f, 0.1329f, 0.1428f, 0.1527f, 0.1627f, 0.1726f, 0.1826f, 0.1926f,
    0.2026f, 0.2126f, 0.2227f, 0.2328f, 0.2429f, 0.2530f, 0.2631f, 0.2733f, 0.2835f, 0.2937f,
    0.3040f, 0.3143f, 0.3246f, 0.3350f, 0.3454f, 0.3558f, 0.3663f, 0.3768f, 0.3873f, 0.3979f,
    0.4086f, 0.4193f, 0.4300f, 0.4408f, 0.4516f, 0.4625f, 0.4735f, 0.4845f, 0.4955f, 0.5067f,
    0.5179f, 0.5291f, 0.5404f, 0.5518f, 0.5633f, 0.5748f, 0.5864f, 0.5981f, 0.6099f, 0.6217f,
    0.6337f, 0.6457f, 0.6578f, 0.6700f, 0.6824f, 0.6948f, 0.7073f, 0.7200f, 0.7327f, 0.7456f,
    0.7586f, 0.7718f, 0.7850f, 0.7984f, 0.8120f, 0.8257f, 0.8396f, 0.8536f, 0.8678f, 0.8821f,
    0.8967f, 0.9114f, 0.9264f, 0.9415f, 0.9569f, 0.9725f, 0.9883f, 1.0044f, 1.0207f, 1.0374f,
    1.0543f, 1.0715f, 1.0890f, 1.1069f, 1.1252f, 1.1438f, 1.1628f, 1.1823f, 1.2022f, 1.2226f,
    1.2435f, 1.2649f, 1.2870f, 1.3097f, 1.3331f, 1.3573f, 1.3822f, 1.4081f, 1.4349f, 1.4628f,
    1.4919f, 1.5223f, 1.5541f, 1.5876f, 1.6230f, 1.6605f, 1.7005f, 1.7434f, 1.7898f, 1.8403f,
    1.8960f, 1.9582f, 2.0291f, 2.1119f, 2.2121f, 2.3411f, 2.5268f, 2.8929f,
};

/* Without branches: this is most of what a draw costs. */
static float stratum(uint32_t i)
{
    uint32_t is_upper = i >> 7, bits;
    float x = upper[(i ^ (is_upper - 1)) & 127];
    memcpy(&bits, &x, sizeof bits);
    bits |= (1 - is_upper) << 31;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Scenario k gets stratum order[k]: an affine order, xor'ed, is enough of a shuffle and is cheap.
 * Each stratum is drawn at a random place within, so that far tails are seen too. */
static void draw_expert(double mean, double sd, uint64_t random, float out[SCENARIOS])
{
    uint32_t flip = (uint32_t)random % SCENARIOS, add = (uint32_t)(random >> 8) % SCENARIOS;
    uint32_t odd = (uint32_t)(random >> 16) % SCENARIOS | 1;
    uint64_t within = scenario_hash(random);
    float cv = (float)(sd / mean), drift = 1 - cv * cv / 9, sum[4] = { 0 };
    for (uint32_t k = 0; k < SCENARIOS; k++) {
        uint32_t order = ((k ^ flip) * odd + add) % SCENARIOS;
        out[k] = stratum(order * 16 + (within >> (4 * k) & 15));
    }
    for (uint32_t k = 0; k < SCENARIOS; k++) {
        float x = drift + out[k] * cv / 3;
        x = x > 0 ? x : 0;
        out[k] = x * x * x;
    }
    for (uint32_t k = 0; k < SCENARIOS; k++) /* four sums, so that none waits for the other */
        sum[k % 4] += out[k];
    float all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float scale = all > 0 ? (float)mean * SCENARIOS / all : 0;
    for (uint32_t k = 0; k < SCENARIOS; k++)
        out[k] *= scale;
}

void scenario_draw(const struct belief *b, uint32_t n_devices, uint64_t seed, float *out)
{
    float sum[SCENARIOS] = { 0 };
    for (uint32_t e = 0; e < b->n_experts; e++) {
        float *row = out + (size_t)e * SCENARIOS;
        memset(row, 0, SCENARIOS * sizeof *row);
        if (b->mean[e] > 0)
            draw_expert(b->mean[e], b->sd[e], scenario_hash(seed ^ scenario_hash(e)), row);
        row[0] = (float)b->mean[e];
        for (uint32_t k = 0; k < SCENARIOS; k++)
            sum[k] += row[k];
    }
    for (uint32_t k = 0; k < SCENARIOS; k++)
        sum[k] = sum[k] > 0 ? (float)n_devices / sum[k] : 0;
    for (uint32_t e = 0; e < b->n_experts; e++)
        for (uint32_t k = 0; k < SCENARIOS; k++)
            out[(size_t)e * SCENARIOS + k] *= sum[k];
}
