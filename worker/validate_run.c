/* validate_run.c - computes on every rank what a fixture expects
 *
 * The documents of a batch are dealt to the ranks in turn, starting with another rank in every
 * batch, so that with more ranks than documents some have none. */
#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/mix.h"
#include "worker/agree.h"
#include "worker/ckpt.h"
#include "worker/shuffle.h"
#include "worker/transfer.h"
#include "worker/validate.h"

/* ---- batches -------------------------------------------------------------------------------- */

struct part { /* this rank's documents of a batch */
    int32_t *tokens, *labels, *cu_seqlens;
    struct model_batch batch;
};

/* Document i of the batch. */
struct document {
    const int32_t *tokens;
    int32_t  length;
    uint64_t row; /* of its first token in the whole batch */
    bool     is_mine;
};

static struct document document_of(const struct stack *s, const struct token_rows *r, uint32_t i,
                                   uint32_t turn)
{
    uint32_t n_docs = (uint32_t)r->n_docs, d = i % n_docs;
    uint64_t row = (uint64_t)(i / n_docs) * r->length + (uint32_t)r->cu_seqlens[d];

    return (struct document){ r->tokens + row, r->cu_seqlens[d + 1] - r->cu_seqlens[d], row,
                              (i + turn) % s->config->degrees.world == s->rank };
}

static uint32_t count_documents(const struct token_rows *r)
{
    return r->n_rows * (uint32_t)r->n_docs;
}

static struct part part_of(const struct stack *s, const struct token_rows *r, uint32_t turn)
{
    size_t n = (size_t)r->n_rows * r->length;
    struct part p = {
        .tokens = xcalloc(n, sizeof *p.tokens),
        .labels = xcalloc(n, sizeof *p.labels),
        .cu_seqlens = xcalloc((size_t)count_documents(r) + 1, sizeof *p.cu_seqlens),
    };
    int32_t at = 0, docs = 0;

    for (uint32_t i = 0; i < count_documents(r); i++) {
        struct document d = document_of(s, r, i, turn);
        if (!d.is_mine)
            continue;
        for (int32_t k = 0; k < d.length; k++) {
            p.tokens[at + k] = d.tokens[k];
            p.labels[at + k] = k + 1 < d.length ? d.tokens[k + 1] : -1;
        }
        at += d.length;
        p.cu_seqlens[++docs] = at;
    }
    p.batch = (struct model_batch){ p.tokens, p.labels, p.cu_seqlens, at, docs };
    return p;
}

static void part_fini(struct part *p)
{
    free(p->tokens);
    free(p->labels);
    free(p->cu_seqlens);
}

static int64_t tokens_of(const struct token_rows *r)
{
    return (int64_t)r->n_rows * r->length;
}

int64_t validation_tokens_max(const struct fixture *f)
{
    int64_t most = tokens_of(&f->batch), n = tokens_of(&f->packed);

    most = n > most ? n : most;
    for (uint32_t i = 0; i < f->n_steps; i++) {
        n = tokens_of(&f->steps[i]);
        most = n > most ? n : most;
    }
    return most;
}

/* ---- what a rank does ----------------------------------------------------------------------- */

static int logits(struct stack *s, const struct token_rows *r, float *out, struct err *err)
{
    struct part p = part_of(s, r, 0);
    size_t vocab = s->config->spec->vocab;
    float *mine = xcalloc((size_t)p.batch.n_tokens * vocab, sizeof *mine), *from = mine;
    int rc = model_logits(s->model, &p.batch, mine, err);

    for (uint32_t i = 0; rc == 0 && i < count_documents(r); i++) {
        struct document d = document_of(s, r, i, 0);
        if (!d.is_mine)
            continue;
        memcpy(out + d.row * vocab, from, (size_t)d.length * vocab * sizeof *out);
        from += (size_t)d.length * vocab;
    }
    free(mine);
    part_fini(&p);
    return rc;
}

int validation_loss(struct stack *s, const struct token_rows *r, uint32_t turn, bool backward,
                    double *out_loss, double *out_norm, double *out_labels, struct err *err)
{
    struct part p = part_of(s, r, turn);
    struct model_loss mine = {0};
    int rc;

    if (backward)
        shard_zero_gradients(s->shard);
    rc = model_step(s->model, &p.batch, backward, &mine, err);
    part_fini(&p);
    double sums[2] = { mine.sum, (double)mine.n_labels };
    if (rc == 0)
        rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_SUM, sums, 2, err);
    if (rc < 0)
        return rc;
    *out_loss = sums[0] / sums[1];
    *out_labels = sums[1];
    if (backward)
        rc = optim_norm(s->shard, s->config->map, s->coll, s->dev, sums[1], out_norm, err);
    return rc;
}

/* Owners write their slices side by side. */
static void collect_gradients(const struct stack *s, struct validation *v, double n_labels)
{
    const struct tensor_map *map = s->config->map;

    for (size_t i = 0; i < map->n_entries; i++) {
        struct shard_part part;
        if (!v->gradients[i] || !shard_part(s->shard, &map->entries[i], &part) ||
            !part.is_first || !part.gradients)
            continue;
        float *to = v->gradients[i] + part.first;
        s->dev->ops->to_host(s->dev, to, part.gradients, part.count * sizeof *to);
        for (uint64_t k = 0; k < part.count; k++)
            to[k] = (float)(to[k] / n_labels);
    }
}

int validation_migrate(struct stack *s, struct validation *v, uint32_t step, struct err *err)
{
    struct transfer_result r = {0};
    struct transfer *t = NULL;
    struct slots to;
    int rc;

    slots_init_like(&to, &s->slots);
    slots_shuffle(&to, v->moves.seed + step);
    rc = transfer_create(s->shard, &s->slots, &to, NULL, &t, err);
    if ((rc = agree(s->coll, rc, err)) == 0)
        rc = transfer_run(t, &r, err);
    transfer_destroy(t);
    double bytes = (double)r.sent_bytes, seconds = r.seconds;
    if (rc == 0)
        rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_SUM, &bytes, 1, err);
    if (rc == 0)
        rc = s->coll->ops->all_reduce_f64(s->coll, &s->coll->world_group, COLL_MAX, &seconds, 1,
                                          err);
    if (rc == 0 && s->rank == 0) {
        v->n_migrations++;
        v->moved_bytes += (uint64_t)bytes;
        v->pause_s += seconds;
    }
    return rc;
}

/* A sum over elements, so that it does not matter who owns them. */
static void add_digest(const struct stack *s, struct validation *v)
{
    const struct tensor_map *map = s->config->map;
    uint64_t sum = 0;

    for (size_t i = 0; i < map->n_entries; i++) {
        struct shard_part p;
        if (!shard_part(s->shard, &map->entries[i], &p) || !p.is_first)
            continue;
        uint32_t *bits = xcalloc(3 * p.count, sizeof *bits); /* weights, m, v; else 0 */
        shard_part_read(s->shard, &p, 0, p.count, (float *)bits);
        if (p.m) {
            s->dev->ops->to_host(s->dev, bits + p.count, p.m, p.count * sizeof *bits);
            if (p.v)
                s->dev->ops->to_host(s->dev, bits + 2 * p.count, p.v, p.count * sizeof *bits);
        }
        for (uint64_t k = 0; k < 3 * p.count; k++)
            sum += mix_word(mix_word(3 * i + k / p.count) ^
                                  mix_word(p.first + k % p.count + 1) ^ bits[k]);
        free(bits);
    }
    __atomic_add_fetch(&v->digest, sum, __ATOMIC_RELAXED);
}

static int curve_step(struct stack *s, struct validation *v, uint32_t c, uint32_t i,
                      double *out_loss, double *out_norm, struct err *err)
{
    const struct curve *curve = &v->fixture->curves[c];
    double n_labels;
    int rc = validation_loss(s, &v->fixture->steps[i], i, true, out_loss, out_norm, &n_labels, err);

    if (rc < 0)
        return rc;
    optim_step(s->shard, s->config->map, s->dev, &curve->optim, i + 1, curve->lr, n_labels,
               *out_norm);
    return shard_refresh(s->shard, err);
}

static int load_start(struct stack *s, const struct validation *v, struct err *err)
{
    int rc = 0;

    if (v->model_path)
        rc = ckpt_load_weights(v->model_path, s->shard, s->config->map, err);
    else
        ckpt_init_weights(s->shard, s->config->map, s->config->spec, VALIDATION_SEED);
    if ((rc = agree(s->coll, rc, err)) < 0)
        return rc;
    shard_zero_optimizer(s->shard);
    if (v->rounding > 0)
        validation_round_start(s, v->rounding);
    return 0;
}

static bool moves_up(uint64_t tensor, uint64_t element, uint32_t twin)
{
    return mix_word(mix_word(tensor) ^ mix_word(element + 1) ^ (twin + 1)) & 1;
}

void validation_move_start(struct stack *s, uint32_t twin, float by)
{
    const struct tensor_map *map = s->config->map;

    for (size_t i = 0; i < map->n_entries; i++) {
        struct shard_part p;
        bool is_kept = s->config->lora && map->entries[i].adapter == ADAPTER_NONE;
        if (is_kept || map->entries[i].is_buffer || !shard_part(s->shard, &map->entries[i], &p))
            continue;
        float *w = xcalloc(p.count, sizeof *w);
        shard_part_read(s->shard, &p, 0, p.count, w);
        for (uint64_t k = 0; k < p.count; k++)
            w[k] *= moves_up(i, p.first + k, twin) ? 1 + by : 1 - by;
        shard_part_write(s->shard, &p, 0, p.count, w);
        free(w);
    }
}

/* The curve once more, from weights that are the same but for rounding. */
static int run_twin(struct stack *s, struct validation *v, uint32_t c, uint32_t twin,
                    struct err *err)
{
    double value, norm;
    int rc = load_start(s, v, err);

    if (rc < 0)
        return rc;
    validation_move_start(s, twin, TWIN_MOVE);
    rc = shard_refresh_all(s->shard, err);
    for (uint32_t i = 0; i < v->n_steps && rc == 0; i++) {
        rc = curve_step(s, v, c, i, &value, &norm, err);
        if (rc == 0 && s->rank == 0)
            v->twins[twin][i] = value;
    }
    return rc;
}

/* A thread of a CPU has a clock of its own, which other programs do not slow down. */
static uint64_t now_of(const struct stack *s)
{
    struct timespec t;
    if (!s->dev->is_host)
        return clock_now_ns();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

/* From the first weights. */
static int run_curve(struct stack *s, struct validation *v, uint32_t c, struct err *err)
{
    double value, norm, n_labels;
    int rc = load_start(s, v, err);

    if (rc < 0 || (rc = shard_refresh_all(s->shard, err)) < 0)
        return rc;
    for (uint32_t i = 0; i < v->n_steps; i++) {
        uint64_t began = clock_now_ns(), own_began = now_of(s);
        if ((rc = curve_step(s, v, c, i, &value, &norm, err)) < 0)
            return rc;
        if (s->rank == 0) {
            v->curves[c].losses[i] = value;
            v->curves[c].norms[i] = norm;
            double own = (double)(now_of(s) - own_began) / NS_PER_S;
            if (c == 0)
                v->best_step_s = i ? fmin(v->best_step_s, own) : own;
            v->step_s += c == 0 ? (double)(clock_now_ns() - began) / NS_PER_S : 0;
        }
        if (v->moves.every > 0 && (i + 1) % v->moves.every == 0 &&
            (rc = validation_migrate(s, v, i + 1, err)) < 0)
            return rc;
    }
    if (c == 0)
        add_digest(s, v);
    if (v->n_steps < v->fixture->n_steps)
        return 0;
    rc = validation_loss(s, &v->fixture->steps[0], 0, false, &value, &norm, &n_labels, err);
    if (rc == 0 && s->rank == 0)
        v->curves[c].after = value;
    return rc;
}

static int rank_run(struct stack *s, void *arg, struct err *err)
{
    struct validation *v = arg;
    const struct fixture *f = v->fixture;
    double value, norm, n_labels;
    int rc;

    if ((rc = load_start(s, v, err)) < 0 ||
        (rc = shard_refresh_all(s->shard, err)) < 0 ||
        (rc = logits(s, &f->batch, v->logits, err)) < 0 ||
        (rc = validation_loss(s, &f->batch, 0, true, &value, &norm, &n_labels, err)) < 0)
        return rc;
    collect_gradients(s, v, n_labels);
    if (s->rank == 0) {
        v->loss = value;
        v->norm = norm;
    }
    if (f->packed.n_rows) {
        if ((rc = logits(s, &f->packed, v->packed_logits, err)) < 0 ||
            (rc = validation_loss(s, &f->packed, 0, true, &value, &norm, &n_labels, err)) < 0)
            return rc;
        if (s->rank == 0) {
            v->packed_loss = value;
            v->packed_norm = norm;
        }
    }
    for (uint32_t c = 0; c < f->n_curves && v->n_steps; c++) {
        if ((rc = run_curve(s, v, c, err)) < 0)
            return rc;
        for (uint32_t k = 0; k < TWINS && f->curves[c].exact && !v->rounding; k++)
            if ((rc = run_twin(s, v, c, k, err)) < 0)
                return rc;
    }
    return 0;
}

/* ---- all ranks ------------------------------------------------------------------------------ */

int validation_run(const struct stack_config *config, const char *model_path,
                   const struct fixture *f, uint32_t n_steps, struct validation_moves moves,
                   uint32_t rounding, struct validation *out, struct err *err)
{
    const struct tensor_map *map = config->map;
    uint32_t vocab = config->spec->vocab;
    struct validation v = {
        .model_path = model_path, .fixture = f, .elem = config->elem, .n_steps = n_steps,
        .moves = moves, .rounding = rounding,
        .packed_loss = NAN, .packed_norm = NAN,
    };

    assert(n_steps <= f->n_steps);
    v.logits = xcalloc((size_t)f->batch.n_rows * f->batch.length * vocab, sizeof *v.logits);
    v.packed_logits = xcalloc((size_t)f->packed.n_rows * f->packed.length * vocab,
                              sizeof *v.packed_logits);
    v.gradients = xcalloc(map->n_entries, sizeof *v.gradients);
    for (size_t i = 0; i < map->n_entries; i++)
        if (!map->entries[i].is_buffer)
            v.gradients[i] = xcalloc(map->entries[i].stored_count, sizeof **v.gradients);
    for (uint32_t c = 0; c < CURVES_MAX; c++) {
        v.curves[c].losses = xcalloc(n_steps, sizeof *v.curves[c].losses);
        v.curves[c].norms = xcalloc(n_steps, sizeof *v.curves[c].norms);
        v.curves[c].after = NAN;
    }
    for (uint32_t k = 0; k < TWINS; k++)
        v.twins[k] = xcalloc(n_steps, sizeof *v.twins[k]);

    int rc = stack_run(config, rank_run, &v, err);
    if (rc < 0) {
        validation_fini(&v, map);
        return rc;
    }
    *out = v;
    return 0;
}

void validation_fini(struct validation *v, const struct tensor_map *map)
{
    lora_validation_destroy(v->lora);
    free(v->logits);
    free(v->packed_logits);
    for (size_t i = 0; v->gradients && i < map->n_entries; i++)
        free(v->gradients[i]);
    free(v->gradients);
    for (uint32_t c = 0; c < CURVES_MAX; c++) {
        free(v->curves[c].losses);
        free(v->curves[c].norms);
    }
    for (uint32_t k = 0; k < TWINS; k++)
        free(v->twins[k]);
    for (uint32_t k = 0; k < v->n_rounded; k++)
        validation_fini(&v->rounded[k], map);
    free(v->rounded);
    *v = (struct validation){0};
}
