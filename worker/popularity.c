/* popularity.c - recorded shares, or made up ones: hot and cold experts that wander */
#include "worker/popularity.h"

#include <errno.h>
#include <math.h>

#include "common/mix.h"

/* Of the logarithm of an expert's share, in standard deviations: what stays, the height of the wave
 * that does not, and what one window differs from the next by chance. Nearly what OLMoE and
 * Kimi-Linear show: with experts in order the busiest of 16 ranks has 1.3 to 1.8 of the mean. */
#define LASTING     1.0
#define WAVE        0.6
#define NOISE       0.05
#define PERIOD_MIN  400.0 /* steps */
#define PERIOD_MORE 1600.0

int popularity_init(struct popularity *p, const char *path, uint64_t seed, struct err *err)
{
    struct popularity made = {.seed = seed, .path = path};
    int rc = path ? loads_read(path, &made.loads, err) : 0;
    if (rc == 0)
        *p = made;
    return rc;
}

void popularity_fini(struct popularity *p)
{
    loads_fini(&p->loads);
}

int popularity_check(const struct popularity *p, uint32_t n_experts, struct err *err)
{
    if (!p->path || p->loads.n_experts == n_experts)
        return 0;
    return err_set(err, -EINVAL, "%s: loads of %u experts a layer, the job's model has %u; begin "
                   "--simulate with loads of as many, or without a file", p->path,
                   p->loads.n_experts, n_experts);
}

/* From 0 to 1. */
static double chance(const struct popularity *p, uint32_t layer, uint32_t expert, uint64_t what)
{
    uint64_t place = (uint64_t)layer << 32 | expert;
    return mix_unit(mix_at(mix_at(p->seed, what), place));
}

static double normal(const struct popularity *p, uint32_t layer, uint32_t expert, uint64_t what)
{
    double u = chance(p, layer, expert, what), v = chance(p, layer, expert, what + 1);
    return sqrt(-2 * log(1 - u)) * cos(2 * M_PI * v);
}

static double made_up(const struct popularity *p, uint32_t layer, uint32_t expert, uint64_t step)
{
    double period = PERIOD_MIN + PERIOD_MORE * chance(p, layer, expert, 2);
    double turns = (double)step / period + chance(p, layer, expert, 3);
    return exp(LASTING * normal(p, layer, expert, 0) + WAVE * sin(2 * M_PI * turns) +
               NOISE * normal(p, layer, expert, 4 + 2 * step));
}

/* The file's layer of that number, or else one in turn. */
static const double *recorded(const struct popularity *p, uint32_t layer, uint32_t nth,
                              uint64_t window)
{
    const struct loads *l = &p->loads;
    uint32_t at = 0;
    while (at < l->n_layers && l->layer[at] != layer)
        at++;
    if (at == l->n_layers)
        at = nth % l->n_layers;
    return loads_at(l, (uint32_t)(window % l->n_windows), at);
}

void popularity_shares(const struct popularity *p, uint32_t layer, uint32_t nth, uint64_t step,
                       uint32_t n_steps, uint32_t n_experts, double *out)
{
    const double *load = p->path ? recorded(p, layer, nth, step / n_steps) : NULL;
    double sum = 0;
    for (uint32_t e = 0; e < n_experts; e++) {
        out[e] = load ? load[e] : made_up(p, layer, e, step);
        sum += out[e];
    }
    for (uint32_t e = 0; e < n_experts; e++)
        out[e] = sum > 0 ? out[e] / sum : 1.0 / n_experts;
}
