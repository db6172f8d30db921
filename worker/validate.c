/* validate.c - the command `ballast-worker validate`: options, comparison, table, dumps */
#include "worker/validate.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/hf_config.h"
#include "common/json.h"
#include "common/mem.h"

/* Asked of float32 code; relative, Frobenius for tensors. */
#define TOLERANCE_LOGITS 3e-5
#define TOLERANCE_LOSS 3e-6
#define TOLERANCE_GRADIENT 3e-4
#define TOLERANCE_GRADIENT_GATE 1e-3 /* A_log and dt_bias */
#define TOLERANCE_CURVE 1e-4
#define TOLERANCE_CURVE_NORM 1e-3
#define GRADIENT_FLOOR 1e-6 /* a reference's norm counts as at least this */

static const char usage[] =
    "usage: ballast-worker validate MODEL_DIR --expect FIXTURE_DIR [--steps N] [--device cpu]\n"
    "           [--dtype f32] [--layout ranks=4,fsdp=2,ep=4,expert_shard=1] [--dump DIR]\n"
    "\n"
    "Runs the model on the fixture's tokens and compares logits, loss, gradients and the loss\n"
    "curve with what the fixture expects. Exit code 1: something is above its tolerance.\n"
    "\n"
    "  --steps N     optimizer steps of the curve to run; default: all\n"
    "  --layout L    run sharded over ranks of this process: ranks, fsdp, ep, expert_shard\n"
    "  --dump DIR    write logits.safetensors, gradients.safetensors and report.json there\n";

struct options {
    const char *model, *expect, *dump;
    struct layout_degrees degrees;
    int64_t n_steps; /* -1: all */
};

/* ---- options -------------------------------------------------------------------------------- */

static int parse_number(const char *text, long max, long *out)
{
    char *end;
    errno = 0;
    long x = strtol(text, &end, 10);
    if (errno || end == text || *end || x < 0 || x > max)
        return -EINVAL;
    *out = x;
    return 0;
}

static int parse_layout(char *text, struct layout_degrees *d, struct err *err)
{
    char *save = NULL;

    for (char *part = strtok_r(text, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
        char *value = strchr(part, '=');
        long x;
        if (value)
            *value++ = '\0';
        if (!value || parse_number(value, RANKS_MAX, &x) < 0 || x == 0)
            return err_set(err, -EINVAL, "--layout: '%s' needs a number from 1 to %u", part,
                           RANKS_MAX);
        if (strcmp(part, "ranks") == 0)
            d->world = (uint32_t)x;
        else if (strcmp(part, "fsdp") == 0)
            d->fsdp = (uint32_t)x;
        else if (strcmp(part, "ep") == 0)
            d->ep = (uint32_t)x;
        else if (strcmp(part, "expert_shard") == 0)
            d->expert_shard = (uint32_t)x;
        else
            return err_set(err, -EINVAL,
                           "--layout: '%s' is unknown; known: ranks, fsdp, ep, expert_shard", part);
    }
    return 0;
}

static int expect_word(const char *option, const char *given, const char *only, struct err *err)
{
    if (strcmp(given, only) == 0)
        return 0;
    return err_set(err, -EINVAL, "%s '%s' is not supported; supported: %s", option, given, only);
}

enum { OPTION_EXPECT = 256, OPTION_STEPS, OPTION_DEVICE, OPTION_DTYPE, OPTION_LAYOUT, OPTION_DUMP };

static int parse_option(int which, char *value, struct options *o, struct err *err)
{
    long n;

    switch (which) {
    case OPTION_EXPECT: o->expect = value; return 0;
    case OPTION_DUMP: o->dump = value; return 0;
    case OPTION_DEVICE: return expect_word("--device", value, "cpu", err);
    case OPTION_DTYPE: return expect_word("--dtype", value, "f32", err);
    case OPTION_LAYOUT: return parse_layout(value, &o->degrees, err);
    case OPTION_STEPS:
        if (parse_number(value, INT32_MAX, &n) < 0)
            return err_set(err, -EINVAL, "--steps '%s' is not a number of steps", value);
        o->n_steps = n;
        return 0;
    default:
        return err_set(err, -EINVAL, "an unknown option, or one without its value");
    }
}

/* 1: help was asked for. */
static int parse_options(int argc, char **argv, struct options *o, struct err *err)
{
    static const struct option known[] = {
        { "expect", required_argument, NULL, OPTION_EXPECT },
        { "steps", required_argument, NULL, OPTION_STEPS },
        { "device", required_argument, NULL, OPTION_DEVICE },
        { "dtype", required_argument, NULL, OPTION_DTYPE },
        { "layout", required_argument, NULL, OPTION_LAYOUT },
        { "dump", required_argument, NULL, OPTION_DUMP },
        { "help", no_argument, NULL, 'h' },
        { 0 },
    };
    int which;

    *o = (struct options){ .degrees = { 1, 1, 1, 0 }, .n_steps = -1 };
    optind = 0; /* GNU: start over; the program has read its own options before */
    opterr = 0;
    while ((which = getopt_long(argc, argv, "h", known, NULL)) != -1) {
        if (which == 'h')
            return 1;
        int rc = parse_option(which, optarg, o, err);
        if (rc < 0)
            return rc;
    }
    if (argc - optind != 1)
        return err_set(err, -EINVAL, "expected one MODEL_DIR, got %d", argc - optind);
    if (!o->expect)
        return err_set(err, -EINVAL, "--expect FIXTURE_DIR is missing");
    o->model = argv[optind];
    return 0;
}

/* ---- distances ------------------------------------------------------------------------------ */

struct worst {
    double value, tolerance;
    char   where[160];
};

/* NaN counts as infinitely far. Only what exceeds its tolerance by more replaces the worst. */
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

/* ---- the table ------------------------------------------------------------------------------ */

enum row {
    ROW_LOGITS, ROW_LOSS, ROW_GRADIENTS, ROW_PACKED_LOGITS, ROW_PACKED_LOSS, ROW_PACKED_NORM,
    ROW_CURVE, ROW_CURVE_NORMS, ROW_AFTER,
    ROWS
};

static const char *const row_names[ROWS] = {
    "logits", "loss", "gradients", "packed logits", "packed loss", "packed gradient norm",
    "loss curve", "curve gradient norms", "loss after the curve",
};

static int compare(const struct validation *v, const struct tensor_map *map,
                   struct worst rows[ROWS], const char **out_first, struct err *err)
{
    const struct fixture *f = v->fixture;
    const struct st_view *logits = safetensors_find(f->expected, "logits");

    worst_note(&rows[ROW_LOGITS], distance(v->logits, logits, 0), TOLERANCE_LOGITS, "batch 0");
    worst_note(&rows[ROW_LOSS], relative(v->loss, f->loss), TOLERANCE_LOSS, "batch 0");
    if (f->packed.n_rows) {
        logits = safetensors_find(f->expected, "packed_logits");
        worst_note(&rows[ROW_PACKED_LOGITS], distance(v->packed_logits, logits, 0),
                   TOLERANCE_LOGITS, "packed row");
        worst_note(&rows[ROW_PACKED_LOSS], relative(v->packed_loss, f->packed_loss),
                   TOLERANCE_LOSS, "packed row");
        if (!isnan(f->packed_norm))
            worst_note(&rows[ROW_PACKED_NORM], relative(v->packed_norm, f->packed_norm),
                       TOLERANCE_GRADIENT, "packed row");
    }
    compare_steps(v->losses, f->losses, v->n_steps, TOLERANCE_CURVE, &rows[ROW_CURVE]);
    if (f->norms)
        compare_steps(v->norms, f->norms, v->n_steps, TOLERANCE_CURVE_NORM,
                      &rows[ROW_CURVE_NORMS]);
    if (!isnan(v->after_loss) && !isnan(f->after_loss))
        worst_note(&rows[ROW_AFTER], relative(v->after_loss, f->after_loss), TOLERANCE_CURVE,
                   "first batch of the curve");
    return f->gradients ? compare_gradients(v, map, &rows[ROW_GRADIENTS], out_first, err) : 0;
}

/* True if all is within tolerance. */
static bool print_table(const struct worst rows[ROWS], const char *first)
{
    bool ok = true;

    printf("%-22s %-10s %-10s %s\n", "quantity", "worst", "allowed", "where");
    for (int i = 0; i < ROWS; i++) {
        if (!rows[i].where[0])
            continue; /* the fixture does not say */
        bool within = rows[i].value <= rows[i].tolerance;
        printf("%-22s %-10.2e %-10.0e %s%s\n", row_names[i], rows[i].value, rows[i].tolerance,
               rows[i].where, within ? "" : "  ABOVE TOLERANCE");
        ok = ok && within;
    }
    if (first)
        printf("first module to diverge, from the loss backwards: %.*s\n",
               (int)(strrchr(first, '.') - first), first);
    return ok;
}

/* ---- dumps ---------------------------------------------------------------------------------- */

static int dump_tensors(const char *folder, const char *file, const struct st_tensor *tensors,
                        const float *const *values, size_t n, struct err *err)
{
    char *path = xasprintf("%s/%s", folder, file);
    struct st_writer *w = NULL;
    struct st_layout layout;
    int rc = st_layout_init(tensors, n, &layout, err);

    if (rc == 0) {
        if ((rc = st_create(path, &layout, err)) == 0)
            rc = st_writer_open(path, &layout, &w, err);
        for (size_t i = 0; rc == 0 && i < n; i++) {
            uint64_t count = 1;
            for (uint32_t d = 0; d < tensors[i].n_dims; d++)
                count *= tensors[i].dims[d];
            rc = st_write_f32(w, i, 0, count, values[i], err);
        }
        if (w) {
            int closed = st_writer_close(w, rc == 0 ? err : NULL);
            rc = rc < 0 ? rc : closed;
        }
        st_layout_fini(&layout);
    }
    free(path);
    return rc;
}

static struct st_tensor logits_tensor(const char *name, const struct token_rows *r, uint32_t vocab)
{
    return (struct st_tensor){ name, ST_F32, 3, { r->n_rows, r->length, vocab } };
}

static int dump_logits(const char *folder, const struct validation *v, uint32_t vocab,
                       struct err *err)
{
    struct st_tensor tensors[2] = {
        logits_tensor("logits", &v->fixture->batch, vocab),
        logits_tensor("packed_logits", &v->fixture->packed, vocab),
    };
    const float *values[2] = { v->logits, v->packed_logits };

    return dump_tensors(folder, "logits.safetensors", tensors, values,
                        v->fixture->packed.n_rows ? 2 : 1, err);
}

static int dump_gradients(const char *folder, const struct validation *v,
                          const struct tensor_map *map, struct err *err)
{
    struct st_tensor *tensors = xcalloc(map->n_entries, sizeof *tensors);
    const float **values = xcalloc(map->n_entries, sizeof *values);
    size_t n = 0;

    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        if (!v->gradients[i])
            continue;
        tensors[n] = (struct st_tensor){ .name = e->name, .dtype = ST_F32, .n_dims = e->n_dims };
        memcpy(tensors[n].dims, e->dims, sizeof e->dims);
        values[n++] = v->gradients[i];
    }
    int rc = dump_tensors(folder, "gradients.safetensors", tensors, values, n, err);
    free(tensors);
    free(values);
    return rc;
}

static struct json *list_of(const double *x, uint32_t n)
{
    struct json *list = json_new_array();
    for (uint32_t i = 0; i < n; i++)
        json_push(list, json_new_double(x[i]));
    return list;
}

static int dump_report(const char *folder, const struct validation *v,
                       const struct model_spec *spec, struct err *err)
{
    char *path = xasprintf("%s/report.json", folder);
    struct json *o = json_new_object();
    int rc = 0;

    json_put(o, "loss", json_new_double(v->loss));
    json_put(o, "grad_norm", json_new_double(v->norm));
    json_put(o, "curve", json_new_string(v->fixture->curve_name));
    json_put(o, "loss_curve", list_of(v->losses, v->n_steps));
    json_put(o, "grad_norms", list_of(v->norms, v->n_steps));
    json_put(o, "parameters", json_new_u64(model_spec_count(spec).total));
    if (v->fixture->packed.n_rows) {
        json_put(o, "packed_loss", json_new_double(v->packed_loss));
        json_put(o, "packed_grad_norm", json_new_double(v->packed_norm));
    }
    char *text = json_text(o, true);
    FILE *f = fopen(path, "w");
    if (!f || fprintf(f, "%s\n", text) < 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    if (f && fclose(f) != 0 && rc == 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    free(text);
    json_destroy(o);
    free(path);
    return rc;
}

static int dump(const char *folder, const struct validation *v, const struct model_spec *spec,
                const struct tensor_map *map, struct err *err)
{
    int rc;

    if (mkdir(folder, 0777) < 0 && errno != EEXIST)
        return err_set(err, -errno, "%s: %s", folder, strerror(errno));
    if ((rc = dump_logits(folder, v, spec->vocab, err)) < 0 ||
        (rc = dump_gradients(folder, v, map, err)) < 0)
        return rc;
    return dump_report(folder, v, spec, err);
}

/* ---- the command ---------------------------------------------------------------------------- */

/* 0: within tolerance, 1: not. */
static int validate(const struct options *o, const struct model_spec *spec,
                    const struct tensor_map *map, const struct fixture *f, struct err *err)
{
    struct stack_config config = {
        .spec = spec, .map = map, .degrees = o->degrees,
        .tokens_max = validation_tokens_max(f),
    };
    uint32_t n_steps = o->n_steps < 0 || o->n_steps > f->n_steps ? f->n_steps
                                                                 : (uint32_t)o->n_steps;
    struct worst rows[ROWS] = {0};
    const char *first = NULL;
    struct validation v;

    int rc = validation_run(&config, o->model, f, n_steps, &v, err);
    if (rc < 0)
        return rc;
    rc = compare(&v, map, rows, &first, err);
    if (rc == 0 && o->dump)
        rc = dump(o->dump, &v, spec, map, err);
    validation_fini(&v, map);
    if (rc < 0)
        return rc;
    return print_table(rows, first) ? 0 : 1;
}

static int run(const struct options *o, struct err *err)
{
    struct tensor_map map = {0};
    struct fixture fixture = {0};
    struct model_spec *spec = xcalloc(1, sizeof *spec);
    int rc;

    if ((rc = hf_config_read(o->model, spec, err)) == 0 &&
        (rc = tensor_map_init(spec, &map, err)) == 0 &&
        (rc = fixture_open(o->expect, spec, &fixture, err)) == 0)
        rc = validate(o, spec, &map, &fixture, err);
    fixture_close(&fixture);
    tensor_map_fini(&map);
    free(spec);
    return rc;
}

int validate_main(int argc, char **argv)
{
    struct options o;
    struct err err = {0};
    int rc = parse_options(argc, argv, &o, &err);

    if (rc == 1) {
        fputs(usage, stdout);
        return 0;
    }
    if (rc < 0) {
        fprintf(stderr, "ballast-worker validate: %s\n%s", err.text, usage);
        return 2;
    }
    rc = run(&o, &err);
    if (rc < 0) {
        fprintf(stderr, "ballast-worker validate: %s\n", err.text);
        return 1;
    }
    return rc;
}
