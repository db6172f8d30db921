/* shard_parts.c - the owner's view of the parameters: parts of tensors, and what follows a step */
#include <assert.h>
#include <stdlib.h>

#include "common/bf16.h"
#include "common/mem.h"
#include "kernels/spans.h"
#include "worker/phases.h"
#include "worker/shard_state.h"

struct device *shard_device(const struct shard *s)
{
    return s->dev;
}

/* The float32 weights of trained numbers: at is where they lie in the blocks of float32,
 * weights_at where in the block of elements. */
static float *master_of(const struct shard *s, uint64_t at, uint64_t weights_at)
{
    return s->master ? s->master + at : (float *)elem_at(s->dev, s->weights, (int64_t)weights_at);
}

/* ---- parts ---------------------------------------------------------------------------------- */

static void buffer_part(const struct shard *s, const struct tensor_entry *e, struct shard_part *out)
{
    *out = (struct shard_part){
        .count = e->count, .weights = s->buffers + e->offset, .is_first = s->coll->rank == 0,
    };
}

/* Which of a unit's or slot's numbers are mine, of the trained part or of the frozen one. */
struct range {
    uint64_t begin, end; /* from the part's start */
    uint64_t base;       /* where the part starts, as tensors' offsets count */
};

static struct range mine_of(const struct shard *s, const struct tensor_entry *e,
                            const struct shard_unit *u)
{
    bool is_expert = e->expert >= 0, is_trained = tensor_is_trained(e);
    const struct tensor_block *block = is_expert ? &s->map->expert : &s->map->units[e->unit];
    uint64_t slice = is_trained ? u->slice : u->frozen;
    uint32_t me = is_expert ? s->expert_shard.me : s->fsdp.me;
    return (struct range){ me * slice, (me + 1) * slice, is_trained ? 0 : block->trained };
}

/* Where the numbers of e's unit begin that I own; false: its home is elsewhere. */
static bool find_slices(const struct shard *s, const struct tensor_entry *e,
                        struct shard_unit *out)
{
    if (e->expert < 0) {
        *out = s->units[e->unit];
        return true;
    }
    uint32_t layer = e->unit - 1, expert = (uint32_t)e->expert;
    if (slots_home(s->slots, layer, expert) != s->slots->me)
        return false;
    uint64_t place = s->slots->layers[layer].map.home[expert] % s->slots->n_slots;
    *out = s->layers[layer];
    out->at += place * out->slice;
    out->weights_at += place * out->slice;
    out->frozen_at += place * out->frozen;
    return true;
}

/* Of e's numbers in mine, counted as mine is; empty: last <= first. */
static void cut(const struct tensor_entry *e, const struct range *mine, uint64_t *out_first,
                uint64_t *out_last)
{
    uint64_t begin = e->offset - mine->base, end = begin + e->count;
    *out_first = begin > mine->begin ? begin : mine->begin;
    *out_last = end < mine->end ? end : mine->end;
}

void shard_plan_v(struct shard *s)
{
    s->n_v = s->map->has_muon ? 0 : s->n_owned;
    if (!s->map->has_muon)
        return;
    s->v_at = xcalloc(s->map->n_entries, sizeof *s->v_at);
    for (size_t i = 0; i < s->map->n_entries; i++) {
        const struct tensor_entry *e = &s->map->entries[i];
        uint64_t first, last;
        if (!tensor_has_v(s->map, e))
            continue;
        assert(e->expert < 0); /* they have nothing but matrices */
        struct range mine = mine_of(s, e, &s->units[e->unit]);
        cut(e, &mine, &first, &last);
        s->v_at[i] = s->n_v;
        s->n_v += last > first ? last - first : 0;
    }
}

static float *v_of(const struct shard *s, const struct tensor_entry *e, uint64_t at)
{
    if (!tensor_has_v(s->map, e))
        return NULL;
    return s->v + (s->v_at ? s->v_at[e - s->map->entries] : at);
}

bool shard_part(const struct shard *s, const struct tensor_entry *e, struct shard_part *out)
{
    struct shard_unit u;
    uint64_t first, last;
    if (e->is_buffer) {
        buffer_part(s, e, out);
        return true;
    }
    if (!find_slices(s, e, &u))
        return false;
    bool is_trained = tensor_is_trained(e);
    struct range mine = mine_of(s, e, &u);
    cut(e, &mine, &first, &last);
    if (first >= last)
        return false;
    uint64_t begin = e->offset - mine.base;
    uint64_t at = u.at + first - mine.begin;
    uint64_t weights_at = (is_trained ? u.weights_at : u.frozen_at) + first - mine.begin;
    struct shard_part p = {
        .first = first - begin, .count = last - first,
        .elements = elem_at(s->dev, s->weights, (int64_t)weights_at),
        .is_first = (e->expert >= 0 ? s->expert_replica.me : s->fsdp_replica.me) == 0,
    };
    if (is_trained || !s->master)
        p.weights = master_of(s, at, weights_at);
    if (is_trained) {
        p.gradients = s->gradients + at;
        p.m = s->m + at;
        p.v = v_of(s, e, at);
    }
    *out = p;
    return true;
}

void shard_part_read(const struct shard *s, const struct shard_part *p, uint64_t at, uint64_t n,
                     float *out)
{
    if (p->weights) {
        s->dev->ops->to_host(s->dev, out, p->weights + at, n * sizeof *out);
        return;
    }
    uint16_t *halves = xcalloc(n, sizeof *halves);
    s->dev->ops->to_host(s->dev, halves, elem_at(s->dev, p->elements, (int64_t)at),
                         n * sizeof *halves);
    for (uint64_t i = 0; i < n; i++)
        out[i] = bf16_value(halves[i]);
    free(halves);
}

void shard_part_write(struct shard *s, const struct shard_part *p, uint64_t at, uint64_t n,
                      const float *from)
{
    if (p->weights) {
        s->dev->ops->to_device(s->dev, p->weights + at, from, n * sizeof *from);
        return;
    }
    uint16_t *halves = xcalloc(n, sizeof *halves);
    for (uint64_t i = 0; i < n; i++)
        halves[i] = bf16_of(from[i]);
    s->dev->ops->to_device(s->dev, elem_at(s->dev, p->elements, (int64_t)at), halves,
                           n * sizeof *halves);
    free(halves);
}

/* ---- after a step --------------------------------------------------------------------------- */

int shard_sum_replicas(struct shard *s, struct err *err)
{
    uint64_t n_experts = s->n_owned - s->n_dense;
    spans_begin(s->dev, PHASE_REDUCE, -1);
    int rc = s->dev->deterministic ? 0 : copies_send_gradients(s, err);
    s->coll->layer = -1;
    if (rc == 0 && s->fsdp_replica.n_ranks > 1 && s->n_dense > 0)
        rc = s->coll->ops->all_reduce(s->coll, &s->fsdp_replica, COLL_SUM, ELEM_F32,
                                      s->gradients, s->n_dense, err);
    if (rc == 0 && s->expert_replica.n_ranks > 1 && n_experts > 0)
        rc = s->coll->ops->all_reduce(s->coll, &s->expert_replica, COLL_SUM, ELEM_F32,
                                      s->gradients + s->n_dense, n_experts, err);
    spans_end(s->dev);
    return rc;
}

/* The elements of n trained numbers, from their master weights. */
static void cast(struct shard *s, const struct shard_unit *u, uint64_t n)
{
    s->dev->ops->to_elem(s->dev, elem_at(s->dev, s->weights, (int64_t)u->weights_at),
                         s->master + u->at, (int64_t)n);
}

static void read_buffers(struct shard *s)
{
    size_t n_bytes = s->map->n_buffers * sizeof(float);
    if (n_bytes > 0)
        s->dev->ops->to_host(s->dev, s->host_buffers, s->buffers, n_bytes);
}

int shard_refresh(struct shard *s, struct err *err)
{
    for (uint32_t i = 0; s->master && i < s->map->n_units; i++)
        cast(s, &s->units[i], s->units[i].slice);
    /* What copies have for masters is nothing; their elements come from their homes. */
    for (uint32_t l = 0; s->master && l < s->spec->n_layers; l++)
        if (slots_is_sparse(s->slots, l))
            cast(s, &s->layers[l], s->layers[l].slice * s->slots->n_slots);
    return shard_refresh_copies(s, err);
}

int shard_refresh_copies(struct shard *s, struct err *err)
{
    read_buffers(s);
    spans_begin(s->dev, PHASE_GATHER, -1);
    int rc = copies_send_part(s, SLOT_WEIGHTS, err);
    spans_end(s->dev);
    return rc;
}

int shard_refresh_all(struct shard *s, struct err *err)
{
    int rc = shard_refresh(s, err);
    return rc < 0 ? rc : copies_send_part(s, SLOT_FROZEN, err);
}

void shard_zero_gradients(struct shard *s)
{
    s->dev->ops->zero(s->dev, s->gradients, s->n_owned * sizeof(float));
}

void shard_zero_optimizer(struct shard *s)
{
    s->dev->ops->zero(s->dev, s->m, s->n_owned * sizeof(float));
    s->dev->ops->zero(s->dev, s->v, s->n_v * sizeof(float));
}

double *shard_accumulators(struct shard *s, size_t n)
{
    if (n > s->n_acc) {
        if (s->acc)
            s->dev->ops->free(s->dev, s->acc);
        s->acc = s->dev->ops->alloc(s->dev, n * sizeof *s->acc);
        s->n_acc = s->acc ? n : 0;
    }
    if (s->acc)
        s->dev->ops->zero(s->dev, s->acc, n * sizeof *s->acc);
    return s->acc;
}

float *shard_file_chunk(struct shard *s)
{
    if (!s->file_chunk)
        s->file_chunk = xcalloc(SHARD_FILE_FLOATS, sizeof *s->file_chunk);
    return s->file_chunk;
}

struct shard_expert_bytes shard_expert_bytes(const struct shard *s)
{
    const struct tensor_block *e = &s->map->expert;
    return (struct shard_expert_bytes){
        .weights = (e->trained + e->frozen) * elem_size(s->dev),
        .frozen = e->frozen * elem_size(s->dev),
        .state = e->trained * sizeof(float) * ((s->master ? 2 : 1) + (s->v_at ? 0 : 1)),
    };
}
