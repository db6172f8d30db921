/* validate_compare.c - how far a run is from its fixture, as a table
 *
 * Tensors are compared by the Frobenius norm of the difference over that of the expected. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "worker/validate.h"

/* Asked of float32 code; all relative. */
#define TOLERANCE_LOGITS 3e-5
#define TOLERANCE_LOSS 3e-6
#define TOLERANCE_GRADIENT 3e-4
#define TOLERANCE_GRADIENT_GATE 1e-3 /* A_log and dt_bias */
#define TOLERANCE_CURVE 1e-4
#define TOLERANCE_CURVE_NORM 1e-3
#define GRADIENT_FLOOR 1e-6 /* a reference's norm counts as at least this */

/* ---- distances ------------------------------------------------------------------------------ */

/* NaN counts as infinitely far. */
static void worst_note(struct worst *w, double value, double tolerance, const char *where)
{
    if (isnan(value))
        value = INFINITY;
    if (!w->where[0] || value / tolerance > w->value / w->tolerance) {
        w->value = value;
        w->tolerance = tolerance;
        snprintf(w->where, sizeof w->where, "%s", where);
    }
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

static double gradient_tolerance(const char *name)
{
    size_t n = strlen(name);
    bool is_gate = (n > 6 && strcmp(name + n - 6, ".A_log") == 0) ||
                   (n > 8 && strcmp(name + n - 8, ".dt_bias") == 0);
    return is_gate ? TOLERANCE_GRADIENT_GATE : TOLERANCE_GRADIENT;
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
        double d = distance(v->gradients[i], x, GRADIENT_FLOOR), t = gradient_tolerance(e->name);
        worst_note(w, d, t, e->name);
        if (!*out_first && !(d <= t))
            *out_first = e->name;
        n_compared++;
    }
    if (n_compared != safetensors_count(expected))
        return err_set(err, -EINVAL, "the fixture has %zu gradients, the model has only %zu of "
                       "them", safetensors_count(expected), n_compared);
    return 0;
}

static void compare_steps(const double *mine, const double *expected, uint32_t n, double tolerance,
                          struct worst *w)
{
    for (uint32_t i = 0; i < n; i++) {
        char where[32];
        snprintf(where, sizeof where, "step %u", i + 1);
        worst_note(w, relative(mine[i], expected[i]), tolerance, where);
    }
}

/* ---- the verdict ---------------------------------------------------------------------------- */

static const char *const row_names[VERDICT_ROWS] = {
    "logits", "loss", "gradients", "packed logits", "packed loss", "packed gradient norm",
    "loss curve", "curve gradient norms", "loss after the curve",
};

static void compare_packed(const struct validation *v, struct worst *rows)
{
    const struct fixture *f = v->fixture;
    const struct st_view *logits = safetensors_find(f->expected, "packed_logits");

    worst_note(&rows[ROW_PACKED_LOGITS], distance(v->packed_logits, logits, 0), TOLERANCE_LOGITS,
               "packed row");
    worst_note(&rows[ROW_PACKED_LOSS], relative(v->packed_loss, f->packed_loss), TOLERANCE_LOSS,
               "packed row");
    if (!isnan(f->packed_norm))
        worst_note(&rows[ROW_PACKED_NORM], relative(v->packed_norm, f->packed_norm),
                   TOLERANCE_GRADIENT, "packed row");
}

static void compare_curve(const struct validation *v, struct worst *rows)
{
    const struct fixture *f = v->fixture;

    compare_steps(v->losses, f->losses, v->n_steps, TOLERANCE_CURVE, &rows[ROW_CURVE]);
    if (f->norms)
        compare_steps(v->norms, f->norms, v->n_steps, TOLERANCE_CURVE_NORM,
                      &rows[ROW_CURVE_NORMS]);
    if (!isnan(v->after_loss) && !isnan(f->after_loss))
        worst_note(&rows[ROW_AFTER], relative(v->after_loss, f->after_loss), TOLERANCE_CURVE,
                   "first batch of the curve");
}

int verdict_of(const struct validation *v, const struct tensor_map *map, struct verdict *out,
               struct err *err)
{
    const struct fixture *f = v->fixture;
    const struct st_view *logits = safetensors_find(f->expected, "logits");
    struct verdict verdict = { .is_met = true };
    struct worst *rows = verdict.rows;

    worst_note(&rows[ROW_LOGITS], distance(v->logits, logits, 0), TOLERANCE_LOGITS, "batch 0");
    worst_note(&rows[ROW_LOSS], relative(v->loss, f->loss), TOLERANCE_LOSS, "batch 0");
    if (f->packed.n_rows)
        compare_packed(v, rows);
    compare_curve(v, rows);
    if (f->gradients) {
        int rc = compare_gradients(v, map, &rows[ROW_GRADIENTS], &verdict.first, err);
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
        if (w->where[0])
            printf("%-22s %-10.2e %-10.0e %s%s\n", row_names[i], w->value, w->tolerance, w->where,
                   w->value <= w->tolerance ? "" : "  ABOVE TOLERANCE");
    }
    if (v->first)
        printf("first module to diverge, from the loss backwards: %.*s\n",
               (int)(strrchr(v->first, '.') - v->first), v->first);
}
