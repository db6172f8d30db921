/* muon.c - gathers what is cut, makes the steps of matrices on their owners, and takes them
 *
 * The step of a matrix that lies whole here is one operation. Else its owner takes the same
 * operation of a zero matrix, and what comes out is what to add; the sum over members, of whom one
 * has it and the others zeros, brings everybody his slice. */
#include "worker/muon.h"

#include <assert.h>
#include <math.h>

#include "worker/shard_state.h"

#define RMS 0.2 /* of a step, over lr: that of AdamW */

static int32_t heads_of(const struct muon_step *step, const struct tensor_entry *e)
{
    if (!step->per_head || e->adapter != ADAPTER_NONE)
        return 1;
    switch ((int)e->role) {
    case ROLE_KDA_Q:
    case ROLE_KDA_K:
    case ROLE_KDA_V:
        return (int32_t)step->spec->kda_heads;
    case ROLE_MLA_Q:
    case ROLE_MLA_Q_B:
    case ROLE_MLA_KV_B:
        return (int32_t)step->spec->heads;
    }
    return 1;
}

static void orthogonalise(struct shard *s, const struct muon_step *step,
                          const struct tensor_entry *e, float *w, float *m, const float *gradient,
                          double lr, double weight_decay)
{
    int32_t n_heads = heads_of(step, e);
    int64_t rows = (int64_t)e->dims[0] / n_heads, cols = (int64_t)e->dims[1];
    struct muon_config c = {
        .lr = (float)lr, .momentum = (float)step->momentum, .weight_decay = (float)weight_decay,
        .grad_scale = (float)step->grad_scale, .rms = (float)RMS, .nesterov = true,
    };
    assert(rows * n_heads == (int64_t)e->dims[0] && (uint64_t)(rows * n_heads * cols) == e->count);
    s->dev->ops->muon(s->dev, w, m, gradient, n_heads, rows, cols, &c);
}

/* ---- what is cut ---------------------------------------------------------------------------- */

/* A unit, or the slots of a layer: n_blocks of whole numbers each, of which this rank has a slice
 * from float `at` on. */
struct cut {
    const struct coll_group *group;
    const struct shard_unit *unit;
    uint64_t n_blocks, whole;
    float *gradients, *momenta, *steps; /* (n_blocks, whole) */
    float *mine;                        /* (n_blocks, slice): my part of the steps */
};

static bool begin_cut(struct shard *s, bool is_layer, uint32_t index, struct cut *out)
{
    *out = (struct cut){
        .group = is_layer ? &s->expert_shard : &s->fsdp,
        .unit = is_layer ? &s->layers[index] : &s->units[index],
        .n_blocks = is_layer ? s->slots->layers[index].n_used : 1,
    };
    out->whole = out->unit->slice * out->group->n_ranks;
    return out->group->n_ranks > 1 && out->unit->slice > 0 && out->n_blocks > 0;
}

static int gather(struct shard *s, struct cut *c, struct err *err)
{
    size_t n_bytes = c->n_blocks * c->whole * sizeof(float);
    float **const all[] = { &c->gradients, &c->momenta, &c->steps };
    void *p;
    int rc = 0;

    for (size_t i = 0; i < 3 && rc == 0; i++)
        if ((rc = shard_buffer_take(s, n_bytes, &p, err)) == 0)
            *all[i] = p;
    if (rc == 0 && (rc = shard_buffer_take(s, n_bytes / c->group->n_ranks, &p, err)) == 0)
        c->mine = p;
    if (rc == 0)
        rc = coll_all_gather(s->coll, c->group, ELEM_F32, s->gradients + c->unit->at,
                             c->unit->slice, c->n_blocks, c->gradients, err);
    if (rc == 0)
        rc = coll_all_gather(s->coll, c->group, ELEM_F32, s->m + c->unit->at, c->unit->slice,
                             c->n_blocks, c->momenta, err);
    if (rc == 0)
        s->dev->ops->zero(s->dev, c->steps, n_bytes);
    return rc;
}

static int scatter(struct shard *s, struct cut *c, struct err *err)
{
    return coll_reduce_scatter(s->coll, c->group, ELEM_F32, c->steps, c->unit->slice, c->n_blocks,
                               c->mine, err);
}

static void end_cut(struct shard *s, struct cut *c)
{
    void *const all[] = { c->gradients, c->momenta, c->steps, c->mine };
    for (size_t i = 0; i < 4; i++)
        if (all[i])
            shard_buffer_return(s, all[i]);
}

/* Where a tensor begins in a gathered buffer; -1: it has its home elsewhere. */
static int64_t place_of(const struct shard *s, const struct cut *c, const struct tensor_entry *e)
{
    if (e->expert < 0)
        return (int64_t)e->offset;
    const struct slots *slots = s->slots;
    uint32_t home = slots->layers[e->unit - 1].map.home[e->expert];
    if (home / slots->n_slots != slots->me)
        return -1;
    return (int64_t)(home % slots->n_slots * c->whole + e->offset);
}

/* w = (1 - lr decay) w + lr step, and the momentum as the operation has it. */
static void take_step(struct shard *s, const struct muon_step *step, const struct cut *c,
                      const struct shard_part *p)
{
    const struct device_ops *ops = s->dev->ops;
    const float *mine = c->mine + (p->gradients - (s->gradients + c->unit->at));
    int64_t n = (int64_t)p->count;

    ops->scale(s->dev, p->m, (float)step->momentum, n);
    ops->axpy(s->dev, p->m, (float)step->grad_scale, p->gradients, n);
    ops->scale(s->dev, p->weights, (float)(1 - step->lr * step->weight_decay), n);
    ops->axpy(s->dev, p->weights, (float)step->lr, mine, n);
}

/* ---- all ------------------------------------------------------------------------------------ */

/* The entries of one unit: its dense tensors, or the routed experts of its layer. */
struct entries {
    const struct tensor_entry *first;
    size_t n;
    bool   is_layer;
};

static bool is_of(const struct entries *x, const struct tensor_entry *e)
{
    return tensor_is_for_muon(e) && (e->expert >= 0) == x->is_layer;
}

static void step_whole(struct shard *s, const struct entries *x, const struct muon_step *step)
{
    for (size_t i = 0; i < x->n; i++) {
        struct shard_part p;
        if (!is_of(x, &x->first[i]) || !shard_part(s, &x->first[i], &p))
            continue;
        assert(p.count == x->first[i].count);
        orthogonalise(s, step, &x->first[i], p.weights, p.m, p.gradients, step->lr,
                      step->weight_decay);
    }
}

static int step_cut(struct shard *s, const struct entries *x, const struct muon_step *step,
                    struct cut *c, struct err *err)
{
    uint32_t turn = 0;
    int rc = gather(s, c, err);
    for (size_t i = 0; i < x->n && rc == 0; i++) {
        int64_t at = is_of(x, &x->first[i]) ? place_of(s, c, &x->first[i]) : -1;
        if (at >= 0 && turn++ % c->group->n_ranks == c->group->me)
            orthogonalise(s, step, &x->first[i], c->steps + at, c->momenta + at, c->gradients + at,
                          1, 0);
    }
    if (rc == 0)
        rc = scatter(s, c, err);
    for (size_t i = 0; i < x->n && rc == 0; i++) {
        struct shard_part p;
        if (is_of(x, &x->first[i]) && shard_part(s, &x->first[i], &p))
            take_step(s, step, c, &p);
    }
    end_cut(s, c);
    return rc;
}

static int step_entries(struct shard *s, const struct entries *x, const struct muon_step *step,
                        struct err *err)
{
    struct cut c;
    uint32_t unit = x->first->unit;
    bool any = false;
    for (size_t i = 0; i < x->n && !any; i++)
        any = is_of(x, &x->first[i]);
    if (!any)
        return 0;
    s->coll->layer = unit > 0 && unit + 1 < s->map->n_units ? (int32_t)unit - 1 : -1;
    if (begin_cut(s, x->is_layer, x->is_layer ? unit - 1 : unit, &c))
        return step_cut(s, x, step, &c, err);
    step_whole(s, x, step);
    return 0;
}

int muon_step(struct shard *s, const struct tensor_map *map, const struct muon_step *step,
              struct err *err)
{
    int rc = 0;
    for (size_t i = 0, n; i < map->n_entries && rc == 0; i += n) {
        for (n = 1; i + n < map->n_entries && map->entries[i + n].unit == map->entries[i].unit; n++)
            ;
        struct entries x = { .first = &map->entries[i], .n = n };
        rc = step_entries(s, &x, step, err);
        x.is_layer = true;
        if (rc == 0)
            rc = step_entries(s, &x, step, err);
    }
    s->coll->layer = -1;
    return rc;
}
