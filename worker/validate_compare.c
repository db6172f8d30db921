/* validate_compare.c - how far a run is from its fixture, as a table
 *
 * Tensors are compared by the Frobenius norm of the difference over that of the expected. A run in
 * bfloat16 may be off by its tolerance, or by twice what rounded weights alone give for the same
 * quantity; along a curve, up to the same step. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "worker/validate.h"

/* All relative. Fixtures with a gentle curve are closer to float64. */
struct tolerances {
    double logits, logits_gentle, loss, gradient;
    double gradient_gate; /* A_log and dt_bias */
    double curve, curve_gentle, curve_norm;
    double parted; /* of a parting curve, once it parted */
    double flipped; /* in adapters' first steps: one token has chosen another expert */
    double adapter, adapter_parted; /* their end */
};

/* What is asked of float32 code, and of bfloat16, whose own rounding is 4e-3. */
static const struct tolerances tolerances[] = {
    [ELEM_F32] = {3e-5, 2e-5, 3e-6, 3e-4, 1e-3, 1e-4, 1e-5, 1e-3, 5e-2, 2e-3, 1e-3, 0.5},
    [ELEM_BF16] = {3e-2, 3e-2, 1e-2, 1e-1, 2e-1, 2e-2, 1e-2, 1e-1, 2e-1, 2e-2, 1, 1},
};

#define STEPS_TOGETHER 3u
#define GRADIENT_FLOOR 1e-6 /* a reference's norm counts as at least this */

/* ---- distances ------------------------------------------------------------------------------ */

#define ROUNDED_TIMES 2

/* How far a run is off in a quantity: about and i say which one. */
typedef double off_fn(const struct validation *v, const void *about, uint64_t i);

static double furthest_rounded(const struct validation *v, off_fn *off, const void *about,
                               uint64_t i)
{
    double most = 0;
    for (uint32_t k = 0; k < v->n_rounded; k++)
        most = fmax(most, off(&v->rounded[k], about, i)); /* a NaN is no measure */
    return most;
}

/* NaN counts as infinitely far. */
static void worst_note(struct worst *w, double value, double tolerance, double rounded,
                       const char *where)
{
    tolerance = fmax(tolerance, ROUNDED_TIMES * rounded);
    if (isnan(value))
        value = INFINITY;
    if (!w->where[0] || value / tolerance > w->value / w->tolerance) {
        w->value = value;
        w->tolerance = tolerance;
        w->rounded = rounded;
        snprintf(w->where, sizeof w->where, "%s", where);
    }
}

static void note(const struct validation *v, struct worst *w, off_fn *off, const void *about,
                 double tolerance, const char *where)
{
    worst_note(w, off(v, about, 0), tolerance, furthest_rounded(v, off, about, 0), where);
}

static double distance(const float *mine, const struct st_view *expected, double floor)
{
    double square = 0, norm = 0;
    float  chunk[1024];

    for (uint64_t at = 0; at < expected->n_elements; at += 1024) {
        uint64_t n = expected->n_elements - at < 1024 ? expected->n_elements - at : 1024;
        if (st_read_f32(expected, at, n, chunk, NULL) < 0)
            return NAN;
        for (uint64_t i = 0; i < n; i++) {
            double d = (double)mine[at + i] - chunk[i];
            square += d * d;
            norm += (double)chunk[i] * chunk[i];
        }
    }
    norm = fmax(sqrt(norm), floor);
    return norm > 0 ? sqrt(square) / norm : sqrt(square);
}

static double relative(double mine, double expected)
{
    return fabs(mine - expected) / fabs(expected);
}

static double logits_off(const struct validation *v, const void *about, uint64_t i)
{
    (void)i;
    return distance(v->logits, about, 0);
}

static double loss_off(const struct validation *v, const void *about, uint64_t i)
{
    (void)about, (void)i;
    return relative(v->loss, v->fixture->loss);
}

static double packed_logits_off(const struct validation *v, const void *about, uint64_t i)
{
    (void)i;
    return distance(v->packed_logits, about, 0);
}

static double packed_loss_off(const struct validation *v, const void *about, uint64_t i)
{
    (void)about, (void)i;
    return relative(v->packed_loss, v->fixture->packed_loss);
}

static double packed_norm_off(const struct validation *v, const void *about, uint64_t i)
{
    (void)about, (void)i;
    return relative(v->packed_norm, v->fixture->packed_norm);
}

/* Of entry i of the map. */
static double gradient_off(const struct validation *v, const void *about, uint64_t i)
{
    return distance(v->gradients[i], about, GRADIENT_FLOOR);
}

/* Of curve c at step i, where about is the fixture's. */
static double curve_off(const struct validation *v, const void *about, uint64_t i)
{
    const struct curve *c = about;
    return relative(v->curves[c - v->fixture->curves].losses[i], c->losses[i]);
}

static double curve_norm_off(const struct validation *v, const void *about, uint64_t i)
{
    const struct curve *c = about;
    return relative(v->curves[c - v->fixture->curves].norms[i], c->norms[i]);
}

static double after_off(const struct validation *v, const void *about, uint64_t i)
{
    const struct curve *c = about;
    (void)i;
    return relative(v->curves[c - v->fixture->curves].after, c->after);
}

static double lora_off(const struct validation *v, const void *about, uint64_t i)
{
    (void)about;
    return relative(v->lora->losses[i], v->fixture->lora.losses[i]);
}

/* Of entry i of the adapters' map. */
static double adapter_off(const struct validation *v, const void *about, uint64_t i)
{
    return distance(v->lora->adapters[i], about, GRADIENT_FLOOR);
}

static double gradient_tolerance(const struct tolerances *t, const char *name)
{
    size_t n = strlen(name);
    bool is_gate = (n > 6 && strcmp(name + n - 6, ".A_log") == 0) ||
                   (n > 8 && strcmp(name + n - 8, ".dt_bias") == 0);
    return is_gate ? t->gradient_gate : t->gradient;
}

/* The module of the first gradient above its tolerance, in the order the backward runs. */
static int compare_gradients(const struct validation *v, const struct tensor_map *map,
                             struct worst *w, const char **out_first, struct err *err)
{
    const struct safetensors *expected = v->fixture->gradients;
    size_t n_compared = 0;

    for (size_t i = map->n_entries; i-- > 0;) {
        const struct tensor_entry *e = &map->entries[i];
        const struct st_view *x = safetensors_find(expected, e->name);
        if (!x)
            continue;
        if (!v->gradients[i] || x->n_elements != e->stored_count)
            return err_set(err, -EINVAL, "%s: tensor '%s' has %llu elements, expected the "
                           "gradient of %llu", x->file, e->name,
                           (unsigned long long)x->n_elements, (unsigned long long)e->stored_count);
        double d = gradient_off(v, x, i), rounded = furthest_rounded(v, gradient_off, x, i);
        double t = gradient_tolerance(&tolerances[v->elem], e->name);
        worst_note(w, d, t, rounded, e->name);
        if (!*out_first && !(d <= fmax(t, ROUNDED_TIMES * rounded)))
            *out_first = e->name;
        n_compared++;
    }
    if (n_compared != safetensors_count(expected))
        return err_set(err, -EINVAL, "the fixture has %zu gradients, the model has only %zu of "
                       "them", safetensors_count(expected), n_compared);
    return 0;
}

static bool is_gentle(const struct fixture *f)
{
    return f->n_curves && strcmp(f->curves[0].name, "gentle") == 0;
}

static double logits_tolerance(const struct validation *v)
{
    const struct tolerances *t = &tolerances[v->elem];
    return is_gentle(v->fixture) ? t->logits_gentle : t->logits;
}

static void compare_steps(const struct validation *v, off_fn *off, const struct curve *c,
                          double tolerance, struct worst *w)
{
    double rounded = 0;

    for (uint32_t i = 0; i < v->n_steps; i++) {
        char where[32];
        snprintf(where, sizeof where, "step %u", i + 1);
        rounded = fmax(rounded, furthest_rounded(v, off, c, i));
        worst_note(w, off(v, c, i), tolerance, rounded, where);
    }
}

/* ---- the verdict ---------------------------------------------------------------------------- */

static const char *const row_names[VERDICT_ROWS] = {
    "logits", "loss", "gradients", "packed logits", "packed loss", "packed gradient norm",
    "loss curve", "curve gradient norms", "loss after the curve", "parting loss curve",
    "lora loss curve", "lora adapter",
};

static void compare_packed(const struct validation *v, struct worst *rows)
{
    const struct fixture *f = v->fixture;
    const struct st_view *logits = safetensors_find(f->expected, "packed_logits");

    note(v, &rows[ROW_PACKED_LOGITS], packed_logits_off, logits, logits_tolerance(v),
         "packed row");
    note(v, &rows[ROW_PACKED_LOSS], packed_loss_off, NULL, tolerances[v->elem].loss, "packed row");
    if (!isnan(f->packed_norm))
        note(v, &rows[ROW_PACKED_NORM], packed_norm_off, NULL, tolerances[v->elem].gradient,
             "packed row");
}

static void compare_curve(const struct validation *v, struct worst *rows)
{
    const struct curve *c = &v->fixture->curves[0];
    const struct tolerances *t = &tolerances[v->elem];
    double tolerance = is_gentle(v->fixture) ? t->curve_gentle : t->curve;

    compare_steps(v, curve_off, c, tolerance, &rows[ROW_CURVE]);
    if (c->norms)
        compare_steps(v, curve_norm_off, c, t->curve_norm, &rows[ROW_CURVE_NORMS]);
    if (!isnan(v->curves[0].after) && !isnan(c->after))
        note(v, &rows[ROW_AFTER], after_off, c, tolerance, "first batch of the curve");
}

static double furthest(double *const *twins, uint32_t n, const double *losses, uint32_t i)
{
    double off = 0;
    for (uint32_t k = 0; k < n; k++)
        off = fmax(off, relative(twins[k][i], losses[i]));
    return off;
}

/* Where sign-like updates and expert choices hang on the last bit, runs part sooner or later, by
 * per cents and by luck. So a step is held to ten times what the fixture's float32 run was off its
 * float64 run until that is above the tolerance of a curve that stays together, or until the same
 * is true of our run and its own twins. Neither asks how far we are from the fixture, so a wrong
 * optimizer excuses nothing; and the first steps are never excused. */
static void compare_parting_curve(const struct validation *v, struct verdict *out)
{
    const struct curve *c = &v->fixture->curves[1];
    const struct tolerances *t = &tolerances[v->elem];
    double rounded = 0;

    for (uint32_t i = 0; i < v->n_steps; i++) {
        double off = c->exact ? 10 * relative(c->losses[i], c->exact[i]) : 0;
        double twins = c->exact ? 10 * furthest(v->twins, TWINS, v->curves[1].losses, i) : 0;
        double strict = fmax(t->curve_gentle, off);
        char where[32];
        if (off > t->curve && !out->fixture_parts_at)
            out->fixture_parts_at = i + 1;
        if (twins > t->curve && i >= STEPS_TOGETHER && !out->twins_part_at)
            out->twins_part_at = i + 1;
        bool parted = out->fixture_parts_at || out->twins_part_at;
        snprintf(where, sizeof where, "step %u", i + 1);
        rounded = fmax(rounded, furthest_rounded(v, curve_off, c, i));
        worst_note(&out->rows[ROW_PARTING_CURVE], curve_off(v, c, i),
                   parted ? t->parted : strict, rounded, where);
    }
}

static int compare_adapters(const struct validation *v, double tolerance, struct worst *w,
                            struct err *err)
{
    const struct lora_validation *l = v->lora;
    const struct safetensors *expected = v->fixture->lora_end;
    size_t n_compared = 0;

    for (size_t i = 0; i < l->map.n_entries; i++) {
        const struct tensor_entry *e = &l->map.entries[i];
        const struct st_view *x = l->adapters[i] ? safetensors_find(expected, e->name) : NULL;
        if (!x)
            continue;
        if (x->n_elements != e->count)
            return err_set(err, -EINVAL, "%s: tensor '%s' has %llu elements, expected %llu",
                           x->file, e->name, (unsigned long long)x->n_elements,
                           (unsigned long long)e->count);
        worst_note(w, adapter_off(v, x, i), tolerance, furthest_rounded(v, adapter_off, x, i),
                   e->name);
        n_compared++;
    }
    if (n_compared != safetensors_count(expected))
        return err_set(err, -EINVAL, "the fixture's adapter has %zu tensors, the one that was "
                       "trained only %zu of them", safetensors_count(expected), n_compared);
    return 0;
}

/* Adapters' updates are sign-like, too, and their fixtures have no float64 curve: only our twins
 * say where luck begins. In the first steps that is one token's choice, no more. */
static int compare_lora(const struct validation *v, struct verdict *out, struct err *err)
{
    const struct tolerances *t = &tolerances[v->elem];
    const struct fixture *f = v->fixture;
    double rounded = 0;

    for (uint32_t i = 0; i < v->n_steps; i++) {
        double allowed = t->curve_gentle;
        char where[32];
        if (10 * furthest(v->lora->twins, LORA_TWINS, v->lora->losses, i) > t->curve &&
            !out->lora_twins_part_at)
            out->lora_twins_part_at = i + 1;
        if (out->lora_twins_part_at)
            allowed = i < STEPS_TOGETHER ? t->flipped : t->parted;
        snprintf(where, sizeof where, "step %u", i + 1);
        rounded = fmax(rounded, furthest_rounded(v, lora_off, NULL, i));
        worst_note(&out->rows[ROW_LORA_CURVE], lora_off(v, NULL, i), allowed, rounded, where);
    }
    if (!f->lora_end || v->n_steps < f->n_steps)
        return 0;
    return compare_adapters(v, out->lora_twins_part_at ? t->adapter_parted : t->adapter,
                            &out->rows[ROW_LORA_ADAPTER], err);
}

int verdict_of(const struct validation *v, const struct tensor_map *map, struct verdict *out,
               struct err *err)
{
    const struct fixture *f = v->fixture;
    const struct st_view *logits = safetensors_find(f->expected, "logits");
    struct verdict verdict = { .is_met = true };
    struct worst *rows = verdict.rows;

    note(v, &rows[ROW_LOGITS], logits_off, logits, logits_tolerance(v), "batch 0");
    note(v, &rows[ROW_LOSS], loss_off, NULL, tolerances[v->elem].loss, "batch 0");
    if (f->packed.n_rows)
        compare_packed(v, rows);
    if (f->n_curves)
        compare_curve(v, rows);
    if (f->n_curves > 1)
        compare_parting_curve(v, &verdict);
    if (f->gradients) {
        int rc = compare_gradients(v, map, &rows[ROW_GRADIENTS], &verdict.first, err);
        if (rc < 0)
            return rc;
    }
    if (v->lora) {
        int rc = compare_lora(v, &verdict, err);
        if (rc < 0)
            return rc;
    }
    for (int i = 0; i < VERDICT_ROWS; i++)
        if (rows[i].where[0] && !(rows[i].value <= rows[i].tolerance))
            verdict.is_met = false;
    *out = verdict;
    return 0;
}

void verdict_print(const struct verdict *v)
{
    printf("%-22s %-10s %-10s %s\n", "quantity", "worst", "allowed", "where");
    for (int i = 0; i < VERDICT_ROWS; i++) {
        const struct worst *w = &v->rows[i];
        if (!w->where[0])
            continue;
        printf("%-22s %-10.2e %-10.1e %s%s", row_names[i], w->value, w->tolerance, w->where,
               w->value <= w->tolerance ? "" : "  ABOVE TOLERANCE");
        if (w->rounded > 0)
            printf("  (rounded weights alone give %.1e)", w->rounded);
        printf("\n");
    }
    if (v->fixture_parts_at)
        printf("the fixture's own float32 and float64 curves part at step %u\n",
               v->fixture_parts_at);
    if (v->twins_part_at)
        printf("curves from weights moved by 1e-7 part at step %u\n", v->twins_part_at);
    if (v->lora_twins_part_at)
        printf("lora curves from adapters moved by 1e-6 part at step %u\n", v->lora_twins_part_at);
    if (v->first)
        printf("first module to diverge, from the loss backwards: %.*s\n",
               (int)(strrchr(v->first, '.') - v->first), v->first);
}
