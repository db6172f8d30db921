/* memory_gathered.c - whole units and layers of experts while they are used
 *
 * Follows the order of worker/model.c and the buffers of worker/shard_travel.c: while a unit is
 * computed with, the next one comes and the gradients of the one before go home, so that there are
 * two of each. */
#include "common/memory_model.h"

#define FLOAT_BYTES 4u

static uint64_t max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- buffers -------------------------------------------------------------------------------- */

#define POOL_MAX 64

/* As shard_buffer_take does: a block serves what is at least half of it. */
struct pool {
    struct { uint64_t n_bytes; bool is_used; } blocks[POOL_MAX];
    uint32_t n;
    uint64_t sum;
};

static uint32_t pool_take(struct pool *p, uint64_t n_bytes)
{
    uint32_t best = POOL_MAX;
    for (uint32_t i = 0; i < p->n; i++)
        if (!p->blocks[i].is_used && p->blocks[i].n_bytes >= n_bytes &&
            p->blocks[i].n_bytes / 2 <= n_bytes &&
            (best == POOL_MAX || p->blocks[i].n_bytes < p->blocks[best].n_bytes))
            best = i;
    if (best == POOL_MAX && p->n < POOL_MAX) {
        best = p->n++;
        p->blocks[best].n_bytes = n_bytes;
        p->sum += n_bytes;
    }
    if (best < POOL_MAX)
        p->blocks[best].is_used = true;
    return best;
}

static void pool_return(struct pool *p, uint32_t i)
{
    if (i < POOL_MAX)
        p->blocks[i].is_used = false;
}

/* ---- units ---------------------------------------------------------------------------------- */

/* Numbers of unit u: 0 the embedding, then the layers, then the head. */
static struct tensor_block unit_of(const struct memory_input *in, const struct model_counts *counts,
                                   uint32_t u)
{
    const struct model_spec *m = in->spec;
    if (in->map)
        return in->map->units[u];
    uint64_t vocabulary = (uint64_t)m->vocab * m->hidden;
    uint64_t layers = counts->total - counts->experts - counts->embedding;
    uint64_t n = u == 0 || u > m->n_layers ? vocabulary : layers / max(m->n_layers, 1);
    return memory_is_frozen(in) ? (struct tensor_block){.frozen = n}
                                : (struct tensor_block){.trained = n};
}

/* Numbers of the experts of unit u that are cut again; zeros where none are. */
static struct tensor_block experts_of(const struct memory_input *in,
                                      const struct model_counts *counts, uint32_t u)
{
    const struct model_spec *m = in->spec;
    if (u == 0 || u > m->n_layers || m->layers[u - 1].mlp != MLP_MOE ||
        in->degrees.expert_shard <= 1)
        return (struct tensor_block){0};
    uint64_t n = m->n_experts / in->degrees.ep;
    struct tensor_block one = {.trained = memory_is_frozen(in) ? 0 : counts->per_expert,
                               .frozen = memory_is_frozen(in) ? counts->per_expert : 0};
    if (in->map)
        one = in->map->expert;
    return (struct tensor_block){n * one.trained, n * one.frozen};
}

/* ---- a pass --------------------------------------------------------------------------------- */

/* Where something is in the pool; POOL_MAX: nowhere. */
struct travel {
    const struct memory_input *in;
    struct model_counts counts;
    struct pool pool;
    uint32_t weights, experts;  /* that have begun to come */
    uint32_t going;             /* gradients of a unit on their way, */
    uint32_t experts_going, sum; /* and of experts, with what becomes of my part */
};

static uint32_t take(struct travel *t, uint64_t n_bytes)
{
    return n_bytes > 0 ? pool_take(&t->pool, n_bytes) : POOL_MAX;
}

static void give(struct travel *t, uint32_t *i)
{
    pool_return(&t->pool, *i);
    *i = POOL_MAX;
}

static uint32_t take_unit(struct travel *t, int64_t u)
{
    if (u < 0 || t->in->degrees.fsdp <= 1)
        return POOL_MAX;
    struct tensor_block unit = unit_of(t->in, &t->counts, (uint32_t)u);
    return take(t, t->in->elem_bytes * (unit.trained + unit.frozen));
}

static uint32_t take_experts(struct travel *t, int64_t u)
{
    if (u < 0)
        return POOL_MAX;
    struct tensor_block e = experts_of(t->in, &t->counts, (uint32_t)u);
    return take(t, t->in->elem_bytes * (e.trained + e.frozen));
}

/* The next unit from u on, upwards or downwards, whose experts are cut; -1: none. */
static int64_t find_experts(const struct travel *t, int64_t u, int step)
{
    for (; u >= 0 && u < (int64_t)t->in->spec->n_layers + 2; u += step) {
        struct tensor_block e = experts_of(t->in, &t->counts, (uint32_t)u);
        if (e.trained + e.frozen > 0)
            return u;
    }
    return -1;
}

static void use_experts(struct travel *t, uint32_t u, bool backward)
{
    struct tensor_block e = experts_of(t->in, &t->counts, u);
    int64_t next = find_experts(t, (int64_t)u + (backward ? -1 : 1), backward ? -1 : 1);
    uint32_t here = t->experts < POOL_MAX ? t->experts : take_experts(t, u);
    if (e.trained + e.frozen == 0)
        return;
    if (backward && e.trained) {
        uint32_t mine = take(t, FLOAT_BYTES * e.trained);
        give(t, &t->experts_going);
        give(t, &t->sum);
        t->experts_going = mine;
        t->sum = take(t, FLOAT_BYTES * e.trained / t->in->degrees.expert_shard);
    }
    t->experts = here;
    if (backward || next >= 0) /* else they are kept for the way back */
        give(t, &t->experts);
    if (!t->in->is_blocking && next >= 0)
        t->experts = take_experts(t, next);
}

/* What was begun before a unit and what is begun in it, there or on the way back. */
static void use_unit(struct travel *t, uint32_t u, int64_t next, bool backward)
{
    struct tensor_block unit = unit_of(t->in, &t->counts, u);
    uint32_t here = t->weights < POOL_MAX ? t->weights : take_unit(t, u), gradients = POOL_MAX;
    t->weights = t->in->is_blocking ? POOL_MAX : take_unit(t, next);
    if (u == 0 && !t->in->is_blocking)
        t->experts = take_experts(t, find_experts(t, 0, 1));
    if (backward && t->in->degrees.fsdp > 1)
        gradients = take(t, FLOAT_BYTES * unit.trained);
    use_experts(t, u, backward);
    if (backward) {
        give(t, &t->going);
        t->going = gradients;
    }
    if (t->in->is_blocking) {
        give(t, &t->going);
        give(t, &t->experts_going);
        give(t, &t->sum);
        give(t, &t->experts);
    }
    give(t, &here);
}

/* Gradients, momenta and steps of what is cut, whole, and my part of the steps, as worker/muon.c
 * takes them. */
static void use_for_muon(struct pool *p, uint64_t trained, uint32_t n_ranks)
{
    uint32_t taken[4];
    if (!trained || n_ranks <= 1)
        return;
    for (int i = 0; i < 4; i++)
        taken[i] = pool_take(p, FLOAT_BYTES * (i < 3 ? trained : trained / n_ranks));
    for (int i = 0; i < 4; i++)
        pool_return(p, taken[i]);
}

uint64_t memory_gathered(const struct memory_input *in)
{
    uint32_t n_layers = in->spec->n_layers;
    struct travel t = {.in = in, .counts = model_spec_count(in->spec), .weights = POOL_MAX,
                       .experts = POOL_MAX, .going = POOL_MAX, .experts_going = POOL_MAX,
                       .sum = POOL_MAX};
    for (uint32_t u = 0; u <= n_layers; u++)
        use_unit(&t, u, (int64_t)u + 1, false);
    for (uint32_t u = n_layers + 1; u > 0; u--)
        use_unit(&t, u, u > 1 ? (int64_t)u - 1 : -1, true);
    if (in->degrees.fsdp > 1) /* of the embedding, whose weights the way back does not need */
        take(&t, FLOAT_BYTES * unit_of(in, &t.counts, 0).trained);
    for (uint32_t i = 0; i < t.pool.n; i++)
        pool_return(&t.pool, i);
    for (uint32_t u = 1; in->has_muon && u <= n_layers; u++) {
        use_for_muon(&t.pool, unit_of(in, &t.counts, u).trained, in->degrees.fsdp);
        use_for_muon(&t.pool, experts_of(in, &t.counts, u).trained, in->degrees.expert_shard);
    }
    return t.pool.sum;
}
