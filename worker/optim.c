/* optim.c - learning rate, exact global norm, AdamW over owned slices, the correction bias
 *
 * The norm is taken over what the first owner of each slice holds, so replicas count once; its sum
 * over ranks is in double and in rank order, in deterministic mode for each expert by itself, so
 * that it does not depend on where experts have their homes. Every owner then does the same
 * arithmetic on the same numbers, so replicas stay equal bit for bit without talking again. */
#include "worker/optim.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "kernels/router_balance.h"
#include "worker/muon.h"

static int parse_word(const char *key, const char *word, const char *const *words, int *out,
                      struct err *err)
{
    char known[128] = "";
    size_t n = 0;
    for (int i = 0; words[i]; i++) {
        if (strcmp(word, words[i]) == 0) {
            *out = i;
            return 0;
        }
        n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", i > 0 ? ", " : "", words[i]);
    }
    return err_set(err, -EINVAL, "%s '%s': unknown, use one of %s", key, word, known);
}

/* ---- the learning rate ---------------------------------------------------------------------- */

int schedule_parse(const char *word, enum schedule_kind *out, struct err *err)
{
    static const char *const words[] = {"constant", "linear", "cosine", "wsd", NULL};
    int i, rc = parse_word("train.schedule.name", word, words, &i, err);
    if (rc == 0)
        *out = (enum schedule_kind)i;
    return rc;
}

/* How far step is on the way from after to last, 0 to 1. */
static double progress(uint64_t step, uint64_t after, uint64_t last)
{
    if (step <= after)
        return 0;
    return step >= last ? 1 : (double)(step - after) / (double)(last - after);
}

double schedule_lr(const struct schedule *s, uint64_t step)
{
    if (step < s->warmup_steps)
        return s->lr * (double)step / (double)s->warmup_steps;
    double p = progress(step, s->warmup_steps, s->steps), fall = s->lr - s->min_lr;
    uint64_t tail = s->steps - s->steps / 10;
    switch (s->kind) {
    case SCHEDULE_CONSTANT:
        return s->lr;
    case SCHEDULE_LINEAR:
        return s->lr - fall * p;
    case SCHEDULE_COSINE:
        return s->min_lr + fall * 0.5 * (1 + cos(M_PI * p));
    case SCHEDULE_WSD:
        break;
    }
    return s->lr - fall * progress(step, tail > s->warmup_steps ? tail : s->warmup_steps, s->steps);
}

/* ---- AdamW ---------------------------------------------------------------------------------- */

int optim_kind_parse(const char *word, enum optim_kind *out, struct err *err)
{
    static const char *const words[] = {"adamw", "muon", "muon_per_head", NULL};
    int i, rc = parse_word("train.optimizer.name", word, words, &i, err);
    if (rc == 0)
        *out = (enum optim_kind)i;
    return rc;
}

int optim_decay_parse(const char *word, enum optim_decay *out, struct err *err)
{
    static const char *const words[] = {"matrices", "all", "none", NULL};
    int i, rc = parse_word("train.optimizer.decay", word, words, &i, err);
    if (rc == 0)
        *out = (enum optim_decay)i;
    return rc;
}

/* Whether p lies right behind the parts that before is made of. What is treated alike is then one
 * op: an op for each tensor of each expert takes longer than their numbers do. */
static bool follows(const struct device *dev, const struct shard_part *before,
                    const struct shard_part *p)
{
    return before->count > 0 && before->gradients + before->count == p->gradients &&
           before->weights + before->count == p->weights &&
           elem_at(dev, before->elements, (int64_t)before->count) == p->elements;
}

/* And begins anew. */
static void add_squares(struct device *dev, double *acc, struct shard_part *parts)
{
    if (parts->count > 0)
        dev->ops->sum_squares(dev, acc, parts->gradients, (int64_t)parts->count);
    parts->count = 0;
}

int optim_norm(struct shard *s, const struct tensor_map *map, struct coll *coll,
               struct device *dev, double n_tokens, double *out_norm, struct err *err)
{
    uint32_t n_experts = 0;
    int rc = shard_sum_replicas(s, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; dev->deterministic && i < map->n_entries; i++)
        if (map->entries[i].expert >= (int32_t)n_experts)
            n_experts = (uint32_t)map->entries[i].expert + 1;
    size_t n = 1 + (size_t)map->n_units * n_experts; /* all that is dense, then (unit, expert) */
    double *acc = shard_accumulators(s, n), sum = 0;
    struct shard_part parts = {0};
    size_t parts_at = 0;
    if (!acc)
        return err_set(err, -ENOMEM, "no memory for %zu sums of squares", n);
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        struct shard_part p;
        size_t at = e->expert < 0 || n_experts == 0
                        ? 0
                        : 1 + (size_t)e->unit * n_experts + (uint32_t)e->expert;
        if (!tensor_is_trained(e) || !shard_part(s, e, &p) || !p.is_first)
            continue;
        if (at == parts_at && follows(dev, &parts, &p)) {
            parts.count += p.count;
            continue;
        }
        add_squares(dev, &acc[parts_at], &parts);
        parts = p;
        parts_at = at;
    }
    add_squares(dev, &acc[parts_at], &parts);
    double *sums = xcalloc(n, sizeof *sums);
    dev->ops->to_host(dev, sums, acc, n * sizeof *sums);
    rc = coll->ops->all_reduce_f64(coll, &coll->world_group, COLL_SUM, sums, n, err);
    for (size_t i = 0; i < n; i++)
        sum += sums[i];
    free(sums);
    if (rc == 0)
        *out_norm = sqrt(sum) / n_tokens;
    return rc;
}

/* What gradients, sums over tokens, are multiplied by. */
static double grad_scale(const struct optim_config *config, double n_tokens, double norm)
{
    double clip = 1;
    if (config->clip_grad_norm > 0 && norm > config->clip_grad_norm)
        clip = config->clip_grad_norm / (norm + 1e-6);
    return clip / n_tokens;
}

int optim_muon(struct shard *s, const struct tensor_map *map, const struct model_spec *spec,
               const struct optim_config *config, double lr, double n_tokens, double norm,
               struct err *err)
{
    if (config->kind == OPTIM_ADAMW)
        return 0;
    struct muon_step step = {
        .spec = spec, .per_head = config->kind == OPTIM_MUON_PER_HEAD, .lr = lr,
        .momentum = config->momentum, .grad_scale = grad_scale(config, n_tokens, norm),
        .weight_decay = config->decay == DECAY_NONE ? 0 : config->weight_decay,
    };
    return muon_step(s, map, &step, err);
}

static void update(struct device *dev, const struct shard_part *parts,
                   const struct adamw_config *config)
{
    bool is_own_master = (const void *)parts->elements == (const void *)parts->weights;
    if (parts->count > 0)
        dev->ops->adamw(dev, parts->weights, parts->m, parts->v,
                        is_own_master ? NULL : parts->elements, parts->gradients,
                        (int64_t)parts->count, config);
}

void optim_step(struct shard *s, const struct tensor_map *map, struct device *dev,
                const struct optim_config *config, uint64_t step, double lr, double n_tokens,
                double norm)
{
    struct adamw_config a = {
        .lr = (float)lr, .beta1 = (float)config->beta1, .beta2 = (float)config->beta2,
        .eps = (float)config->eps, .grad_scale = (float)grad_scale(config, n_tokens, norm),
        .correction1 = (float)(1 - pow(config->beta1, (double)step)),
        .correction2 = (float)(1 - pow(config->beta2, (double)step)),
    };
    struct shard_part parts = {0};
    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        struct shard_part p;
        if (!tensor_is_trained(e) || (config->kind != OPTIM_ADAMW && tensor_is_for_muon(e)) ||
            !shard_part(s, e, &p))
            continue;
        bool decays = config->decay == DECAY_ALL || (config->decay == DECAY_MATRICES &&
                                                     e->is_matrix);
        float weight_decay = decays ? (float)config->weight_decay : 0;
        if (weight_decay == a.weight_decay && follows(dev, &parts, &p)) {
            parts.count += p.count;
            continue;
        }
        update(dev, &parts, &a);
        parts = p;
        a.weight_decay = weight_decay;
    }
    update(dev, &parts, &a);
}

/* ---- the router's correction bias ----------------------------------------------------------- */

int bias_rule_parse(const char *word, enum bias_rule *out, struct err *err)
{
    static const char *const words[] = {"off", "sign", "quantile", NULL};
    int i, rc = parse_word("moe.bias_update", word, words, &i, err);
    if (rc == 0)
        *out = (enum bias_rule)i;
    return rc;
}

/* What one layer's update needs of all ranks, as doubles, which hold counts and floats exactly:
 * n_experts counts, n_experts biases, then the histograms. */
struct balance {
    const struct model_spec *spec;
    enum bias_rule rule;
    size_t   n;
    double  *sums;
    float   *bias;      /* n_experts */
    int64_t *counts;    /* n_experts */
    int64_t *histogram; /* (n_experts, MARGIN_BINS), NULL unless the rule wants it */
};

/* Biases come from the host's copy, so that all this happens while the device updates weights. */
static void gather_own(struct balance *b, struct shard *s, const struct tensor_entry *e,
                       const struct model_counters *counters)
{
    uint32_t n = b->spec->n_experts, layer = e->unit - 1;
    struct shard_part p;
    for (uint32_t i = 0; i < n; i++) {
        b->sums[i] = (double)counters->tokens[(size_t)layer * n + i];
        b->sums[n + i] = 0;
    }
    if (shard_part(s, e, &p) && p.is_first)
        for (uint64_t i = 0; i < p.count; i++)
            b->sums[n + p.first + i] = shard_host_buffers(s)[e->offset + p.first + i];
    size_t bins = b->n - 2 * n;
    for (size_t i = 0; i < bins; i++)
        b->sums[2 * n + i] = (double)counters->margins[layer * bins + i];
}

static void solve(struct balance *b, double rate)
{
    uint32_t n = b->spec->n_experts;
    int64_t n_rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        b->counts[i] = (int64_t)b->sums[i];
        b->bias[i] = (float)b->sums[n + i];
        n_rows += b->counts[i];
    }
    if (b->rule == BIAS_SIGN) {
        router_balance_sign(b->bias, b->counts, (int32_t)n, (float)rate);
        return;
    }
    float lo, hi;
    for (size_t i = 0; i < b->n - 2 * n; i++)
        b->histogram[i] = (int64_t)b->sums[2 * n + i];
    router_balance_range(b->bias, (int32_t)n, &lo, &hi);
    router_balance_quantile(b->bias, b->histogram, n_rows / b->spec->top_k, (int32_t)n,
                            (int32_t)b->spec->top_k, MARGIN_BINS, lo, hi);
}

int optim_balance(struct shard *s, const struct tensor_map *map, const struct model_spec *spec,
                  struct coll *coll, struct device *dev, const struct model_counters *counters,
                  enum bias_rule rule, double rate, struct err *err)
{
    size_t n = spec->n_experts, bins = rule == BIAS_QUANTILE ? n * MARGIN_BINS : 0;
    int rc = 0;
    if (rule == BIAS_OFF || n == 0)
        return 0;
    struct balance b = {
        .spec = spec, .rule = rule, .n = 2 * n + bins,
        .sums = xcalloc(2 * n + bins, sizeof *b.sums), .bias = xcalloc(n, sizeof *b.bias),
        .counts = xcalloc(n, sizeof *b.counts),
        .histogram = bins > 0 ? xcalloc(bins, sizeof *b.histogram) : NULL,
    };
    for (size_t i = 0; i < map->n_entries && rc == 0; i++) {
        const struct tensor_entry *e = &map->entries[i];
        struct shard_part p;
        if (e->role != ROLE_ROUTER_BIAS)
            continue;
        gather_own(&b, s, e, counters);
        coll->layer = (int32_t)e->unit - 1;
        rc = coll->ops->all_reduce_f64(coll, &coll->world_group, COLL_SUM, b.sums, b.n, err);
        if (rc < 0)
            break;
        solve(&b, rate);
        if (shard_part(s, e, &p))
            dev->ops->to_device(dev, p.weights, b.bias + p.first, p.count * sizeof(float));
    }
    coll->layer = -1;
    free(b.sums);
    free(b.bias);
    free(b.counts);
    free(b.histogram);
    return rc;
}
