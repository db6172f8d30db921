/* validate_self.c - a model against itself: other layouts, finite differences, its own loss curve
 *
 * For a model that nobody has a reference of. Weights are drawn from a seed, tokens follow a rule
 * that can be learnt. What one rank computes is the measure of what others do together; and that
 * one rank's gradients are right is told by the loss itself, which must change along the gradient
 * of each kind of tensor by what it says. On a GPU the CPU's definitions are a measure, too. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/mix.h"
#include "worker/ckpt.h"
#include "worker/validate.h"

#define SPEED_LENGTH    256u /* of rows that are timed */
#define SPEED_STEPS     6u
#define ROWS            4u
#define LENGTH          64u
#define RULE_SHARE      0.9  /* of tokens that follow the rule */
#define ALPHABET        64u
#define SLOPE_LENGTH    16u  /* of the row whose loss is differentiated: few choices to change */
#define LEARNING_RATE   2e-3
#define LOGITS_LIMIT    3e-5
#define GRADIENT_LIMIT  3e-4
#define LOSS_LIMIT      1e-5
#define TWIN_TIMES      4    /* so much further than twins that begin 1e-7 apart curves may part */
#define FALL_LIMIT      0.9  /* of the first loss */
#define SLOPE_LIMIT     0.05
#define SLOPE_CHANGE    2e-3 /* of the loss, that a step along a gradient aims at */
#define SLOPE_LEAST     1e-4 /* less than this is rounding */
#define SLOPE_MOVE      0.05 /* of a tensor's norm at most */
#define SLOPE_ROWS      3    /* so many are tried */
#define SLOPE_TRIES     6
#define SLOPE_SHORTER   4
#define GRADIENT_FLOOR  1e-6

/* ---- tokens --------------------------------------------------------------------------------- */

static uint64_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return mix_word(*state);
}

/* A token mostly tells the next one. */
static struct token_rows make_rows(uint32_t n_rows, uint32_t length, uint32_t vocab, uint64_t seed,
                                   uint32_t n_docs)
{
    uint32_t n = vocab < ALPHABET ? vocab : ALPHABET;
    struct token_rows r = {.n_rows = n_rows, .length = length, .n_docs = (int32_t)n_docs};
    r.tokens = xcalloc((size_t)n_rows * length, sizeof *r.tokens);
    r.cu_seqlens = xcalloc(n_docs + 1, sizeof *r.cu_seqlens);
    for (uint32_t d = 0; d <= n_docs; d++)
        r.cu_seqlens[d] = (int32_t)(d * length / n_docs);
    uint64_t last = 0;
    for (size_t i = 0; i < (size_t)n_rows * length; i++) {
        bool follows = i % length && mix_unit(draw(&seed)) < RULE_SHARE;
        last = follows ? (5 * last + 7) % n : draw(&seed) % n;
        r.tokens[i] = (int32_t)last;
    }
    return r;
}

static void make_fixture(uint32_t vocab, uint32_t length, uint32_t n_steps, struct fixture *f)
{
    *f = (struct fixture){.n_steps = n_steps, .n_curves = 1};
    f->batch = make_rows(ROWS, length, vocab, 1, 1);
    f->packed = make_rows(ROWS, length, vocab, 2, 3);
    f->steps = xcalloc(n_steps, sizeof *f->steps);
    for (uint32_t i = 0; i < n_steps; i++)
        f->steps[i] = make_rows(ROWS, length, vocab, 100 + i, 1);
    f->curves[0] = (struct curve){
        .name = "adamw", .lr = LEARNING_RATE, .after = NAN,
        .optim = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .clip_grad_norm = 1,
                  .decay = DECAY_MATRICES}};
}

/* ---- what is told --------------------------------------------------------------------------- */

struct teller {
    FILE *out;
    bool json, all_passed;
};

static void tell(struct teller *t, const char *check, bool passed, double measured, double limit,
                 const char *where)
{
    t->all_passed &= passed;
    if (t->json)
        fprintf(t->out, "{\"check\": \"%s\", \"passed\": %s, \"measured\": %.6g, \"limit\": %.6g, "
                "\"where\": \"%s\"}\n", check, passed ? "true" : "false",
                isfinite(measured) ? measured : 1e308, limit, where);
    else
        fprintf(t->out, "%-44s %-6s %10.3g %10.3g  %s\n", check, passed ? "passed" : "FAILED",
                measured, limit, where);
    fflush(t->out);
}

/* ---- one layout against another ------------------------------------------------------------- */

static double distance(const float *x, const float *y, size_t n)
{
    double apart = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        apart += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        norm += (double)y[i] * y[i];
    }
    return sqrt(apart) / fmax(sqrt(norm), GRADIENT_FLOOR);
}

static void compare_gradients(struct teller *t, const char *check, const struct validation *v,
                              const struct validation *one, const struct tensor_map *map)
{
    double worst = 0;
    const char *where = "";
    for (size_t i = 0; i < map->n_entries; i++) {
        if (!v->gradients[i] || !tensor_is_trained(&map->entries[i]))
            continue;
        double d = distance(v->gradients[i], one->gradients[i], map->entries[i].stored_count);
        if (!(d <= worst)) {
            worst = d;
            where = map->entries[i].name;
        }
    }
    tell(t, check, worst <= GRADIENT_LIMIT, worst, GRADIENT_LIMIT, where);
}

/* How far twins of one have come from it up to a step. */
static double twins_apart(const struct validation *one, uint32_t step)
{
    double worst = 0;
    for (uint32_t k = 0; k < TWINS; k++)
        for (uint32_t i = 0; i <= step; i++)
            worst = fmax(worst, fabs(one->twins[k][i] / one->curves[0].losses[i] - 1));
    return worst;
}

/* Where routers choose, a curve hangs on rounding after some steps; its twins say how much. */
static void compare_curves(struct teller *t, const char *check, const struct validation *v,
                           const struct validation *one)
{
    double value = 0, limit = LOSS_LIMIT;
    char where[32] = "";
    for (uint32_t i = 0; i < v->n_steps; i++) {
        double d = fabs(v->curves[0].losses[i] / one->curves[0].losses[i] - 1);
        double most = fmax(LOSS_LIMIT, TWIN_TIMES * twins_apart(one, i));
        if (d / most <= value / limit)
            continue;
        value = d;
        limit = most;
        snprintf(where, sizeof where, "step %u", i + 1);
    }
    tell(t, check, value <= limit, value, limit, where);
}

static void compare(struct teller *t, const char *what, const struct validation *v,
                    const struct validation *one, const struct tensor_map *map, uint32_t vocab)
{
    const size_t n = (size_t)ROWS * LENGTH * vocab;
    char check[96];
    double d = fmax(distance(v->logits, one->logits, n),
                    distance(v->packed_logits, one->packed_logits, n));
    snprintf(check, sizeof check, "logits, %s", what);
    tell(t, check, d <= LOGITS_LIMIT, d, LOGITS_LIMIT, "whole and packed rows");
    d = fabs(v->loss / one->loss - 1);
    snprintf(check, sizeof check, "loss, %s", what);
    tell(t, check, d <= LOSS_LIMIT, d, LOSS_LIMIT, "");
    snprintf(check, sizeof check, "gradients, %s", what);
    compare_gradients(t, check, v, one, map);
    snprintf(check, sizeof check, "loss curve, %s", what);
    compare_curves(t, check, v, one);
}

/* ---- slopes --------------------------------------------------------------------------------- */

struct slopes {
    const struct validation *one;  /* its gradients */
    const struct token_rows *rows;
    double *best; /* n_entries, of the first tensor of each kind: how far off at least so far; -1:
                   * flat so far */
};

/* Names that differ by numbers only are of one kind. */
static bool same_kind(const char *a, const char *b)
{
    while (*a && *b) {
        size_t n = strspn(a, "0123456789"), m = strspn(b, "0123456789");
        if (n && m) {
            a += n;
            b += m;
        } else if (*a++ != *b++) {
            return false;
        }
    }
    return *a == *b;
}

static bool has_slope(const struct slopes *x, const struct tensor_map *map, size_t i)
{
    return x->one->gradients[i] && tensor_is_trained(&map->entries[i]);
}

/* Adds by times the gradient to all tensors of a kind; gives squares of its norm and of theirs. */
static void move_kind(struct stack *s, const struct slopes *x, size_t kind, double by,
                      double *out_gradient, double *out_weights)
{
    const struct tensor_map *map = s->config->map;
    *out_gradient = *out_weights = 0;
    for (size_t i = kind; i < map->n_entries; i++) {
        struct shard_part p;
        if (!has_slope(x, map, i) || !same_kind(map->entries[i].name, map->entries[kind].name) ||
            !shard_part(s->shard, &map->entries[i], &p))
            continue;
        const float *g = x->one->gradients[i] + p.first;
        float *w = xcalloc(p.count, sizeof *w);
        shard_part_read(s->shard, &p, 0, p.count, w);
        for (uint64_t k = 0; k < p.count; k++) {
            *out_gradient += (double)g[k] * g[k];
            *out_weights += (double)w[k] * w[k];
            w[k] += (float)(by * g[k]);
        }
        if (by != 0)
            shard_part_write(s->shard, &p, 0, p.count, w);
        free(w);
    }
}

static int loss_at(struct stack *s, const struct slopes *x, size_t kind, double by, double *out,
                   struct err *err)
{
    double norm, labels, g, w;
    int rc;
    ckpt_init_weights(s->shard, s->config->map, s->config->spec, VALIDATION_SEED);
    move_kind(s, x, kind, by, &g, &w);
    if ((rc = shard_refresh_all(s->shard, err)) < 0)
        return rc;
    return validation_loss(s, x->rows, 0, false, out, &norm, &labels, err);
}

/* The best of some step sizes, of some rows: a router's choice may change along one, a wrong
 * gradient is wrong along all. */
static int check_kind(struct stack *s, struct slopes *x, size_t kind, struct err *err)
{
    double gradient, weights, best = x->best[kind] < 0 ? INFINITY : x->best[kind];
    move_kind(s, x, kind, 0, &gradient, &weights);
    double by = SLOPE_CHANGE / 2 / fmax(gradient, 1e-30);
    double most = SLOPE_MOVE * fmax(sqrt(weights), 0.1) / fmax(sqrt(gradient), 1e-30);
    by = fmin(by, most);
    if (2 * by * gradient < SLOPE_LEAST)
        return 0;
    for (int k = 0; k < SLOPE_TRIES && best > SLOPE_LIMIT / 2; k++, by /= SLOPE_SHORTER) {
        double up, down;
        int rc = loss_at(s, x, kind, by, &up, err);
        if (rc < 0 || (rc = loss_at(s, x, kind, -by, &down, err)) < 0)
            return rc;
        best = fmin(best, fabs((up - down) / (2 * by * gradient) - 1));
    }
    x->best[kind] = best;
    return 0;
}

static int check_slopes(struct stack *s, void *arg, struct err *err)
{
    struct slopes *x = arg;
    const struct tensor_map *map = s->config->map;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < map->n_entries; i++) {
        bool is_new = has_slope(x, map, i);
        for (size_t k = 0; is_new && k < i; k++)
            is_new = !has_slope(x, map, k) || !same_kind(map->entries[k].name,
                                                         map->entries[i].name);
        if (is_new && !(x->best[i] >= 0 && x->best[i] <= SLOPE_LIMIT / 2))
            rc = check_kind(s, x, i, err);
    }
    return rc;
}

/* ---- the checks ----------------------------------------------------------------------------- */

static int run_layout(const struct stack_config *base, struct layout_degrees degrees,
                      const char *device, const struct fixture *f, uint32_t n_steps,
                      struct validation *out, struct err *err)
{
    struct stack_config config = *base;
    config.degrees = degrees;
    config.device = device;
    return validation_run(&config, NULL, f, n_steps, (struct validation_moves){0}, 0, out, err);
}

static int check_layouts(const struct stack_config *config, const struct fixture *f,
                         const struct validation *one, struct teller *t, struct err *err)
{
    const uint32_t n_experts = config->spec->n_experts;
    static const struct { struct layout_degrees degrees; const char *name; } layouts[] = {
        {{4, 2, 4, 1}, "4 ranks, fsdp 2, experts 4"},
        {{4, 4, 2, 2}, "4 ranks, fsdp 4, experts 2 x 2"},
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct validation v;
        if (n_experts % layouts[i].degrees.ep)
            continue;
        int rc = run_layout(config, layouts[i].degrees, config->device, f, one->n_steps, &v, err);
        if (rc < 0)
            return rc;
        compare(t, layouts[i].name, &v, one, config->map, config->spec->vocab);
        validation_fini(&v, config->map);
    }
    return 0;
}

static int check_recompute(const struct stack_config *config, const struct fixture *f,
                           const struct validation *one, struct teller *t, struct err *err)
{
    static const struct { enum recompute kind; const char *name; } kinds[] = {
        {RECOMPUTE_SELECTIVE, "recomputing selectively"}, {RECOMPUTE_FULL, "recomputing all"},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct stack_config own = *config;
        struct validation v;
        own.recompute = kinds[i].kind;
        int rc = run_layout(&own, (struct layout_degrees){1, 1, 1, 0}, own.device, f,
                            one->n_steps, &v, err);
        if (rc < 0)
            return rc;
        compare(t, kinds[i].name, &v, one, own.map, own.spec->vocab);
        validation_fini(&v, own.map);
    }
    return 0;
}

static int check_device(const struct stack_config *config, const struct fixture *f,
                        const struct validation *one, struct teller *t, struct err *err)
{
    struct validation v;
    if (!config->device || !strcmp(config->device, "cpu"))
        return 0;
    int rc = run_layout(config, (struct layout_degrees){1, 1, 1, 0}, "cpu", f, one->n_steps, &v,
                        err);
    if (rc == 0) {
        compare(t, "the CPU's definitions", one, &v, config->map, config->spec->vocab);
        validation_fini(&v, config->map);
    }
    return rc;
}

static void tell_curve(const struct validation *one, struct teller *t)
{
    double first = one->curves[0].losses[0], left = one->curves[0].after / first;
    char where[96];
    snprintf(where, sizeof where, "%.4f to %.4f in %u steps", first, one->curves[0].after,
             one->n_steps);
    tell(t, "the loss falls", left <= FALL_LIMIT, left, FALL_LIMIT, where);
}

static void tell_speed(const struct validation *one, uint32_t length, struct teller *t)
{
    if (t->json)
        fprintf(t->out, "{\"step_seconds\": %.6g, \"sequences\": %u, \"sequence_length\": %u}\n",
                one->best_step_s, ROWS, length);
    else
        fprintf(t->out, "a step of %u tokens takes %.2f ms on one rank with one thread\n",
                ROWS * length, 1e3 * one->best_step_s);
}

/* One row: its gradients, and the slopes of what no row before has told. */
static int add_slopes(const struct stack_config *config, uint64_t seed, double *best,
                      struct err *err)
{
    struct fixture f = {.batch = make_rows(1, SLOPE_LENGTH, config->spec->vocab, seed, 1)};
    struct validation v;
    int rc = run_layout(config, config->degrees, config->device, &f, 0, &v, err);
    if (rc == 0) {
        struct slopes x = {.one = &v, .rows = &f.batch, .best = best};
        rc = stack_run(config, check_slopes, &x, err);
        validation_fini(&v, config->map);
    }
    fixture_close(&f);
    return rc;
}

static int check_gradients(const struct stack_config *config, struct teller *t, struct err *err)
{
    const struct tensor_map *map = config->map;
    struct stack_config own = *config;
    double *best = xcalloc(map->n_entries, sizeof *best), worst = 0;
    uint32_t n = 0;
    const char *where = "";
    char text[256];
    int rc = 0;
    own.degrees = (struct layout_degrees){1, 1, 1, 0};
    own.tokens_max = SLOPE_LENGTH;
    for (size_t i = 0; i < map->n_entries; i++)
        best[i] = -1;
    for (uint64_t seed = 3; rc == 0 && seed < 3 + SLOPE_ROWS; seed++)
        rc = add_slopes(&own, seed, best, err);
    for (size_t i = 0; i < map->n_entries; i++) {
        n += best[i] >= 0;
        if (best[i] > worst) {
            worst = best[i];
            where = map->entries[i].name;
        }
    }
    snprintf(text, sizeof text, "%.150s; %u kinds of tensors that the loss depends on", where, n);
    if (rc == 0)
        tell(t, "gradients, finite differences", n && worst <= SLOPE_LIMIT, worst, SLOPE_LIMIT,
             text);
    free(best);
    return rc;
}

int validation_self(const struct stack_config *config, uint32_t n_steps, bool json, FILE *out,
                    bool *out_passed, struct err *err)
{
    struct teller t = {out, json, true};
    struct fixture f;
    struct validation one;
    struct stack_config own = *config;
    make_fixture(config->spec->vocab, LENGTH, n_steps, &f);
    own.tokens_max = validation_tokens_max(&f);
    f.curves[0].exact = xcalloc(n_steps, sizeof(double)); /* asks for twins */
    int rc = run_layout(&own, (struct layout_degrees){1, 1, 1, 0}, config->device, &f, n_steps,
                        &one, err);
    free(f.curves[0].exact);
    f.curves[0].exact = NULL;
    if (rc == 0) {
        if ((rc = check_gradients(&own, &t, err)) == 0 &&
            (rc = check_layouts(&own, &f, &one, &t, err)) == 0 &&
            (rc = check_recompute(&own, &f, &one, &t, err)) == 0 &&
            (rc = check_device(&own, &f, &one, &t, err)) == 0) {
            tell_curve(&one, &t);
            tell_speed(&one, LENGTH, &t);
        }
        validation_fini(&one, own.map);
    }
    fixture_close(&f);
    *out_passed = t.all_passed;
    return rc;
}

int validation_speed(const struct stack_config *config, bool json, FILE *out, struct err *err)
{
    struct teller t = {out, json, true};
    struct stack_config own = *config;
    struct fixture f;
    struct validation one;
    make_fixture(config->spec->vocab, SPEED_LENGTH, SPEED_STEPS, &f);
    own.tokens_max = validation_tokens_max(&f);
    int rc = run_layout(&own, (struct layout_degrees){1, 1, 1, 0}, own.device, &f, SPEED_STEPS,
                        &one, err);
    if (rc == 0) {
        tell_speed(&one, SPEED_LENGTH, &t);
        validation_fini(&one, own.map);
    }
    fixture_close(&f);
    return rc;
}
