/* whole_model.h - batches for whole models, and their gradients beside finite differences
 *
 * Bodies run on the ranks' threads, where cmocka cannot fail: they return an error with a line. */
#ifndef TESTS_WHOLE_MODEL_H
#define TESTS_WHOLE_MODEL_H

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/mem.h"
#include "tests/a_model.h"
#include "tests/noise.h"
#include "worker/stack.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return err_set(err, -EBADMSG, "line %d: %s", __LINE__, #condition);                    \
    } while (0)

static const struct layout_degrees alone = { 1, 1, 1, 0 };

/* ---- batches -------------------------------------------------------------------------------- */

#define TOKENS_MAX 256
#define DOCS_MAX 16

struct documents {
    int32_t tokens[TOKENS_MAX], labels[TOKENS_MAX], cu_seqlens[DOCS_MAX + 1];
    struct model_batch batch;
};

static inline void add_document(struct documents *d, int32_t length, uint64_t seed)
{
    int32_t at = d->cu_seqlens[d->batch.n_docs];
    for (int32_t i = 0; i <= length; i++) {
        int32_t token = (int32_t)(fabs(noise(seed, (uint64_t)i)) * 1000) % 64;
        if (i < length)
            d->tokens[at + i] = token;
        if (i > 0)
            d->labels[at + i - 1] = i == length ? -100 : token;
    }
    d->cu_seqlens[++d->batch.n_docs] = at + length;
    d->batch = (struct model_batch){ d->tokens, d->labels, d->cu_seqlens, at + length,
                                     d->batch.n_docs };
}

static inline struct documents *documents(const int32_t *lengths, int32_t n, uint64_t seed)
{
    struct documents *d = xcalloc(1, sizeof *d);
    d->batch = (struct model_batch){ d->tokens, d->labels, d->cu_seqlens, 0, 0 };
    for (int32_t i = 0; i < n; i++)
        add_document(d, lengths[i], seed + (uint64_t)i);
    return d;
}

/* Six documents of 5 to 5 + most tokens dealt to the ranks in turn; with eight ranks some have
 * none. */
static inline struct documents *dealt(const struct stack *s, uint64_t step, uint32_t most)
{
    struct documents *d = documents(NULL, 0, 0);
    for (uint32_t row = 0; row < 6; row++)
        if ((row + step) % s->config->degrees.world == s->rank)
            add_document(d, (int32_t)(5 + row * 7 % most), 100 * step + row);
    return d;
}

/* ---- finite differences --------------------------------------------------------------------- */

/* Rules hold in a step with backward alone. */
static inline bool has_rules(const struct stack *s)
{
    const struct moe_rules *r = &s->config->rules;
    return r->capacity_factor > 0 || r->aux_loss > 0 || r->z_loss > 0;
}

static inline int loss_at(struct stack *s, const struct model_batch *b,
                          const struct shard_part *part, const float *start, const float *direction,
                          double at, double *out, struct err *err)
{
    struct model_loss loss;
    for (uint64_t i = 0; i < part->count; i++)
        part->weights[i] = (float)(start[i] + at * direction[i]);
    int rc = model_step(s->model, b, has_rules(s), &loss, err);
    *out = loss.sum + s->config->rules.aux_loss * loss.aux + s->config->rules.z_loss * loss.z;
    return rc;
}

/* Along the gradient and a random direction together: the one makes the change large beside the
 * rounding of the loss, the other finds what the gradient lacks. step: 1, or less where the loss is
 * not as smooth. 1: they agree; 0: there is no gradient. */
static inline int check_tensor(struct stack *s, const struct model_batch *b,
                               const struct tensor_entry *e, const float *gradient, double step,
                               struct err *err)
{
    struct shard_part part;
    double norm = 0, spread = 0, expected = 0, y[4];
    static const double points[4] = { -2, -1, 1, 2 };
    uint64_t seed = 1000 + (uint64_t)(e - s->config->map->entries);

    CHECK(shard_part(s->shard, e, &part) && part.count == e->count);
    for (uint64_t i = 0; i < part.count; i++) {
        norm += (double)gradient[i] * gradient[i];
        spread += noise(seed, i) * noise(seed, i);
    }
    norm = sqrt(norm);
    spread = sqrt(spread);
    if (norm == 0) /* an expert that no token reached, a key that softmax ignores */
        return 0;
    float *start = xmemdup(part.weights, part.count * sizeof *start);
    float *direction = xcalloc(part.count, sizeof *direction);
    for (uint64_t i = 0; i < part.count; i++) {
        direction[i] = (float)(gradient[i] / norm + 0.5 * noise(seed, i) / spread);
        expected += (double)gradient[i] * direction[i];
    }
    /* A change of about 0.1 in a loss of about a hundred, but no step that leaves the smooth. */
    double h = step * fmin(0.1 / norm, 0.02 * sqrt((double)part.count));
    int rc = 0;
    for (int k = 0; rc == 0 && k < 4; k++)
        rc = loss_at(s, b, &part, start, direction, points[k] * h, &y[k], err);
    memcpy(part.weights, start, part.count * sizeof *start);
    free(start);
    free(direction);
    if (rc < 0)
        return rc;
    double found = (8 * (y[2] - y[1]) - (y[3] - y[0])) / (12 * h);
    double allowed = 5e-3 * fabs(expected) + 2e-6 * fabs(y[1]) / h;
    if (!(fabs(found - expected) <= allowed))
        return err_set(err, -EBADMSG, "%s: difference %.6g, gradient %.6g", e->name, found,
                       expected);
    return 1;
}

#endif
