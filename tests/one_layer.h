/* one_layer.h - the attention of one layer with all its weights on one device, whole or in segments
 *
 * Every weight is trained, indexers too, and its gradient is float32. */
#ifndef TESTS_ONE_LAYER_H
#define TESTS_ONE_LAYER_H

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/tensor_map.h"
#include "worker/kda.h"
#include "worker/mla.h"
#include "worker/positions.h"
#include "worker/segments.h"

#define ONE_LAYER_CHUNK ((int64_t)16 << 20) /* numbers made on the host at a time */

struct one_layer {
    struct device *dev; /* borrowed */
    struct model_spec spec;
    struct tensor_map map;
    uint64_t at[TENSOR_ROLES];
    int64_t n_weights;
    elem *weights;
    float *gradients;
    double *losses; /* of the model, which has none, and of its indexers */
    struct unit_view u;
    struct activations act;
    struct pass pass;
    struct segments segments;
    struct positions positions;
};

static inline float one_layer_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(*state >> 40) * 0x1p-23f - 1;
}

/* n numbers of up to width on either side of middle. */
static inline void one_layer_fill(struct device *dev, elem *to, int64_t n, float middle,
                                  float width, uint64_t seed)
{
    int64_t most = n < ONE_LAYER_CHUNK ? n : ONE_LAYER_CHUNK;
    float *host = xcalloc((size_t)most, sizeof *host);
    float *floats = dev->ops->alloc(dev, (size_t)most * sizeof *floats);
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;

    for (int64_t at = 0; floats && at < n; at += most) {
        int64_t m = n - at < most ? n - at : most;
        for (int64_t i = 0; i < m; i++)
            host[i] = middle + width * one_layer_random(&state);
        dev->ops->to_device(dev, floats, host, (size_t)m * sizeof *host);
        dev->ops->to_elem(dev, elem_at(dev, to, at), floats, m);
    }
    dev->ops->synchronize(dev);
    dev->ops->free(dev, floats);
    free(host);
}

static inline void one_layer_weights(struct one_layer *l)
{
    for (size_t i = 0; i < l->map.n_entries; i++) {
        const struct tensor_entry *e = &l->map.entries[i];
        float middle = 0, width = l->spec.init_std * 1.7f;
        if (e->unit != 1 || e->expert > 0 || e->is_buffer)
            continue;
        if (e->init == INIT_ONES)
            middle = 1, width = 0.1f;
        else if (e->init == INIT_A_LOG)
            middle = 1.4f, width = 1.3f;
        else if (e->init == INIT_DT_BIAS)
            middle = -4, width = 2;
        else if (e->init == INIT_CONV)
            width = 0.5f;
        l->at[e->role] = e->offset;
        one_layer_fill(l->dev, elem_at(l->dev, l->weights, (int64_t)e->offset), (int64_t)e->count,
                       middle, width, i + 1);
    }
}

/* spec has one layer. -ENOMEM, or as tensor_map_init. */
static inline int one_layer_open(struct one_layer *l, struct device *dev,
                                 const struct model_spec *spec, struct err *err)
{
    *l = (struct one_layer){.dev = dev, .spec = *spec};
    int rc = tensor_map_init(spec, &l->map, err);
    if (rc < 0)
        return rc;
    l->n_weights = (int64_t)(l->map.units[1].trained + l->map.units[1].frozen);
    l->weights = dev->ops->alloc(dev, (size_t)l->n_weights * elem_size(dev));
    l->gradients = dev->ops->alloc(dev, (size_t)l->n_weights * sizeof *l->gradients);
    l->losses = dev->ops->alloc(dev, 2 * sizeof *l->losses);
    if (!l->weights || !l->gradients || !l->losses)
        return err_set(err, -ENOMEM, "no memory for %lld weights", (long long)l->n_weights);
    one_layer_weights(l);
    l->u = (struct unit_view){
        .dev = dev, .at = l->at, .gradients = l->gradients,
        .weights = {.trained = l->weights, .n_trained = (uint64_t)l->n_weights},
    };
    return 0;
}

/* The table of angles for that many positions, where the layer turns its queries. */
static inline int one_layer_turn(struct one_layer *l, int64_t n, struct err *err)
{
    return positions_grow(&l->positions, &l->spec, l->dev, n, err);
}

/* The pass of these documents; rows_max 0: not in segments. */
static inline void one_layer_begin(struct one_layer *l, const int32_t *cu_seqlens, int32_t n_docs,
                                   int64_t rows_max, enum index_stage stage)
{
    segments_fini(&l->segments);
    if (rows_max)
        segments_init(&l->segments, cu_seqlens, n_docs, rows_max, 0);
    l->pass = (struct pass){
        .dev = l->dev, .spec = &l->spec, .act = &l->act, .n = cu_seqlens[n_docs],
        .cu_seqlens = cu_seqlens, .n_docs = n_docs, .segments = rows_max ? &l->segments : NULL,
        .index_stage = stage, .index_weight = 1, .acc_loss = l->losses,
        .acc_index_loss = l->losses + 1, .rotary = l->positions.table,
    };
    l->dev->ops->zero(l->dev, l->gradients, (size_t)l->n_weights * sizeof *l->gradients);
    l->dev->ops->zero(l->dev, l->losses, 2 * sizeof *l->losses);
}

/* Of a forward, for its backward: all, or what segments share. */
struct one_layer_saved {
    struct kda_saved kda;
    struct mla_saved mla, mla_cut;
    struct kda_cut kda_cut;
};

static inline bool one_layer_is_kda(const struct one_layer *l)
{
    return l->spec.layers[0].attention == ATTENTION_KDA;
}

static inline void one_layer_carve(struct one_layer *l, struct pass *p, struct one_layer_saved *s)
{
    if (one_layer_is_kda(l))
        kda_carve(p, CARVE_ALL, &s->kda);
    else
        mla_carve(p, CARVE_ALL, &s->mla);
}

/* In one go. y NULL: only what a backward needs. */
static inline void one_layer_run(struct one_layer *l, struct pass *p, const elem *x, elem *y,
                                 struct one_layer_saved *s)
{
    if (one_layer_is_kda(l)) {
        kda_layer_forward(p, &l->u, x, y, 0, &s->kda);
        return;
    }
    if (p->act->is_counting)
        dsa_count_forward(p);
    else
        mla_layer_forward(p, &l->u, x, y, 0, &s->mla);
}

/* The pass of segment i, whose layer is carved. */
static inline struct pass one_layer_segment(struct one_layer *l, int32_t i,
                                            struct one_layer_saved *s)
{
    struct pass part = segment_pass(&l->pass, &l->segments.all[i]);
    part.kda_cut = &s->kda_cut;
    part.mla_cut = &s->mla_cut;
    one_layer_carve(l, &part, s);
    return part;
}

/* Backwards, once all is chosen. */
static inline void one_layer_learn(struct one_layer *l, const elem *x, struct one_layer_saved *s)
{
    struct pass *p = &l->pass;
    struct activations_mark before = activations_mark(p->act);
    mla_cut_carve_learning(p, &s->mla_cut);
    for (int32_t i = l->segments.n; i-- > 0;) {
        struct activations_mark mark = activations_mark(p->act);
        struct pass part = one_layer_segment(l, i, s);
        if (p->act->is_counting)
            dsa_count_forward(&part);
        else
            mla_layer_learn(&part, &l->u,
                            segment_inputs(p, x, part.segment->begin, l->spec.hidden), &s->mla);
        activations_release(p->act, mark);
    }
    s->mla_cut.dsa.index_later = NULL;
    activations_release(p->act, before);
}

static inline void one_layer_forward(struct one_layer *l, const elem *x, elem *y,
                                     struct one_layer_saved *s)
{
    struct pass *p = &l->pass;
    enum index_stage stage = p->index_stage;
    if (!p->segments) {
        one_layer_carve(l, p, s);
        one_layer_run(l, p, x, y, s);
        return;
    }
    if (one_layer_is_kda(l))
        kda_cut_carve(p, l->segments.n, &s->kda_cut);
    else
        mla_cut_carve(p, &s->mla_cut);
    p->index_stage = INDEX_FROZEN;
    for (int32_t i = 0; i < l->segments.n; i++) {
        struct activations_mark mark = activations_mark(p->act);
        struct pass part = one_layer_segment(l, i, s);
        one_layer_run(l, &part, segment_inputs(p, x, part.segment->begin, l->spec.hidden),
                      segment_rows(p, y, part.segment->begin, l->spec.hidden), s);
        activations_release(p->act, mark);
    }
    p->index_stage = stage;
    if (stage != INDEX_FROZEN && !one_layer_is_kda(l))
        one_layer_learn(l, x, s);
}

static inline void one_layer_run_back(struct one_layer *l, struct pass *p, const elem *dy,
                                      elem *dx, const struct one_layer_saved *s)
{
    if (one_layer_is_kda(l))
        kda_layer_backward(p, &l->u, dy, dx, &s->kda);
    else
        mla_layer_backward(p, &l->u, dy, dx, &s->mla);
}

static inline void one_layer_backward(struct one_layer *l, const elem *x, const elem *dy,
                                      elem *dx, struct one_layer_saved *s)
{
    struct pass *p = &l->pass;
    if (!p->segments) {
        one_layer_run_back(l, p, dy, dx, s);
        return;
    }
    struct activations_mark before = activations_mark(p->act);
    p->index_stage = INDEX_FROZEN;
    if (one_layer_is_kda(l))
        kda_cut_carve_backward(p, &s->kda_cut);
    else
        mla_cut_carve_backward(p, &s->mla_cut);
    for (int32_t i = l->segments.n; i-- > 0;) {
        struct activations_mark mark = activations_mark(p->act);
        struct pass part = one_layer_segment(l, i, s);
        int64_t begin = part.segment->begin;
        one_layer_run(l, &part, segment_inputs(p, x, begin, l->spec.hidden), NULL, s);
        one_layer_run_back(l, &part, segment_inputs(p, dy, begin, l->spec.hidden),
                           segment_rows(p, dx, begin, l->spec.hidden), s);
        activations_release(p->act, mark);
    }
    activations_release(p->act, before);
}

/* Takes the memory that a forward and backward of the pass need, and no more. */
static inline int one_layer_reserve(struct one_layer *l, struct err *err)
{
    struct one_layer_saved s = {0};
    activations_fini(&l->act);
    activations_init(&l->act, l->dev, true);
    enum index_stage stage = l->pass.index_stage;
    one_layer_forward(l, NULL, NULL, &s);
    one_layer_backward(l, NULL, NULL, NULL, &s);
    l->pass.index_stage = stage;
    size_t peak = l->act.peak;
    activations_init(&l->act, l->dev, false);
    return activations_reserve(&l->act, peak, err);
}

static inline void one_layer_close(struct one_layer *l)
{
    activations_fini(&l->act);
    segments_fini(&l->segments);
    positions_fini(&l->positions, l->dev);
    l->dev->ops->free(l->dev, l->weights);
    l->dev->ops->free(l->dev, l->gradients);
    l->dev->ops->free(l->dev, l->losses);
    tensor_map_fini(&l->map);
}

#endif
