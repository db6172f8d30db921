/* cuda_ops.c - every op of a device against its definition on the cpu, and how long it takes
 *
 * usage: cuda_ops [--device cuda:N|cpu] [--op NAME] [--elem f32|bf16] [--bench] [--deterministic]
 *                 [--small] [--shape "N, N, ..."]
 *        cuda_ops --list [--bench [--small]]
 *
 * One line per op and type of element: cases, the worst relative error, where it was, the
 * tolerance. --small leaves out a model's own shapes, for tools under which all is slow, and lets
 * --bench time the small ones; --shape leaves out all but one, as it is printed. --list names the
 * ops, or the shapes that --bench times. Exit 1 where an error is above its tolerance or bytes
 * beside a tensor changed, 2 where no case is meant. With --device cpu it compares the cpu with
 * itself, which proves the cases and must find no error. */
#include "tests/cuda_ops_trial.h"

#include <assert.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOLERANCE_F32  2e-5
#define TOLERANCE_BF16 1e-2
#define LONE_SHARE     16 /* an element off by its own size counts as 1 / this */

struct options {
    const char *device, *op, *shape;
    bool f32, bf16, bench, deterministic, small, list;
};

static struct op_family *families;

void op_family_add(struct op_family *f)
{
    f->next = families;
    families = f;
}

/* ---- what came out ---- */

/* Equal infinities agree. */
static double difference(double a, double b)
{
    return a == b ? 0 : isnan(a - b) ? INFINITY : fabs(a - b);
}

/* The larger of |a - b| / |b| and the worst single element's share, so that neither many small
 * errors nor one large one hides. The root mean square of b counts as scale at least. */
static double error_of(const double *a, const double *b, int64_t n, double scale)
{
    double sum = 0, norm = 0, lone = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = difference(a[i], b[i]);
        sum += d * d;
        norm += isfinite(b[i]) ? b[i] * b[i] : 0;
    }
    norm = fmax(norm, (double)n * scale * scale);
    double rms = sqrt(norm / (double)(n > 0 ? n : 1));
    for (int64_t i = 0; i < n; i++) {
        double d = difference(a[i], b[i]);
        if (d > 0)
            lone = fmax(lone, d / ((isfinite(b[i]) ? fabs(b[i]) : 0) + rms));
    }
    return fmax(norm > 0 ? sqrt(sum / norm) : sqrt(sum), lone / LONE_SHARE);
}

/* The error of integers: the share that differs, 0 where that is allowed. */
static double share_of(const double *a, const double *b, int64_t n, double allowed)
{
    int64_t n_off = 0;
    for (int64_t i = 0; i < n; i++)
        n_off += a[i] != b[i];
    double share = n > 0 ? (double)n_off / (double)n : 0;
    return share <= allowed ? 0 : 1 + share;
}

struct worst {
    double error, tolerance;
    const char *tensor;
    const struct op_case *at;
    int    displacement, n_cases;
    bool   has_failed;
};

static double tolerance_of(const struct trial *t, enum elem_type type)
{
    if (type == ELEM_F32)
        return t->tolerance_f32 > 0 ? t->tolerance_f32 : TOLERANCE_F32;
    return t->tolerance_bf16 > 0 ? t->tolerance_bf16 : TOLERANCE_BF16;
}

static void shape_text(const struct op_case *c, char *to, size_t n_bytes)
{
    int n_dims = TRIAL_DIMS_MAX;
    while (n_dims > 1 && c->d[n_dims - 1] == 0)
        n_dims--;
    to[0] = '\0';
    for (int i = 0; i < n_dims; i++)
        snprintf(to + strlen(to), n_bytes - strlen(to), i ? ", %lld" : "%lld",
                 (long long)c->d[i]);
}

static void report(const struct op_case *c, const struct trial_state *s, const char *tensor,
                   const char *what, double error)
{
    char shape[256];
    shape_text(c, shape, sizeof shape);
    printf("    %s (%s) %s%s: %s: %s %.3g\n", c->op, shape, s->elem == ELEM_F32 ? "f32" : "bf16",
           s->displacement ? " displaced" : "", tensor, what, error);
}

static void compare(const struct op_case *c, struct trial *reference, struct trial *t,
                    struct worst *worst)
{
    assert(reference->state->n_tensors == t->state->n_tensors);
    double tolerance = tolerance_of(t, t->state->elem);
    worst->tolerance = fmax(worst->tolerance, tolerance);
    for (int i = 0; i < t->state->n_tensors; i++) {
        const struct tensor *x = &t->state->tensors[i], *y = &reference->state->tensors[i];
        assert(x->n == y->n || x->number == NUMBER_NONE);
        if (!trial_guards_are_whole(t, x)) {
            report(c, t->state, x->name, "bytes beside it changed", 0);
            worst->has_failed = true;
        }
        if (!x->is_compared)
            continue;
        double *a = trial_values(t, x), *b = trial_values(reference, y);
        bool is_integer = x->number == NUMBER_I32 || x->number == NUMBER_I64;
        double error = is_integer ? share_of(a, b, x->n, x->allowed)
                                  : error_of(a, b, x->n, x->scale);
        free(a);
        free(b);
        if (!(error <= tolerance)) {
            report(c, t->state, x->name, "error", error);
            worst->has_failed = true;
        }
        if (!worst->at || !(error <= worst->error)) {
            worst->error = error;
            worst->tensor = x->name;
            worst->at = c;
            worst->displacement = t->state->displacement;
        }
    }
}

/* ---- all cases of an op ---- */

static uint64_t seed_of(const struct op_case *c)
{
    uint64_t h = 14695981039346656037ull;
    for (const char *p = c->op; *p; p++)
        h = (h ^ (unsigned char)*p) * 1099511628211ull;
    for (int i = 0; i < TRIAL_DIMS_MAX; i++)
        h = (h ^ (uint64_t)c->d[i]) * 1099511628211ull;
    return h;
}

static void check_case(const struct op_case *c, struct device *dev, struct device *cpu,
                       enum elem_type type, int displacement, struct worst *worst)
{
    struct trial_state a = {.elem = type}, b = {.elem = type, .displacement = displacement};
    struct trial reference = {.dev = cpu, .state = &a}, t = {.dev = dev, .state = &b};
    trial_run_case(c, &reference, seed_of(c));
    trial_run_case(c, &t, seed_of(c));
    compare(c, &reference, &t, worst);
    trial_clear(&reference);
    trial_clear(&t);
    worst->n_cases++;
}

static bool has_shape(const struct options *o, const struct op_case *c)
{
    char shape[256];
    shape_text(c, shape, sizeof shape);
    return !o->shape || !strcmp(o->shape, shape);
}

/* Returns whether all was well. */
static bool check_op(const struct options *o, const char *op, struct device *dev,
                     struct device *cpu)
{
    enum elem_type type = dev->elem;
    struct worst worst = {0};
    bool is_gpu = strcmp(dev->ops->name, "cpu") != 0;
    char shape[256] = "";
    for (const struct op_family *f = families; f; f = f->next)
        for (size_t i = 0; i < f->n_cases; i++) {
            const struct op_case *c = &f->cases[i];
            if (strcmp(c->op, op) || c->size == CASE_BENCH || !has_shape(o, c) ||
                (c->size == CASE_LARGE && (o->small || !is_gpu)))
                continue;
            check_case(c, dev, cpu, type, 0, &worst);
            if (c->size == CASE_SMALL)
                check_case(c, dev, cpu, type, 1, &worst);
        }
    if (worst.at)
        shape_text(worst.at, shape, sizeof shape);
    if (!is_gpu && worst.error > 0)
        worst.has_failed = true;
    printf("%-26s %-4s %3d cases  worst %.2e of %.0e  %-4s %s (%s)%s\n", op,
           type == ELEM_F32 ? "f32" : "bf16", worst.n_cases, worst.error, worst.tolerance,
           worst.has_failed ? "FAIL" : "ok", worst.at ? worst.tensor : "", shape,
           worst.displacement ? " displaced" : "");
    fflush(stdout);
    return !worst.has_failed;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench_case(const struct op_case *c, struct device *dev)
{
    struct timing timing = {.is_cuda = strcmp(dev->ops->name, "cpu") != 0};
    struct trial_state s = {.elem = dev->elem, .timing = &timing};
    struct trial t = {.dev = dev, .state = &s};
    char shape[256];
    if (!(timing.flush = dev->ops->alloc(dev, FLUSH_BYTES)))
        trial_fail("the device has no memory for this case");
#if BALLAST_HAS_CUDA
    if (timing.is_cuda) {
        cudaEventCreate(&timing.before);
        cudaEventCreate(&timing.after);
    }
#endif
    trial_run_case(c, &t, seed_of(c));
    trial_clear(&t);
    dev->ops->free(dev, timing.flush);
    qsort(timing.ms, REPEATS, sizeof timing.ms[0], by_value);
    double ms = timing.ms[REPEATS / 2];
    shape_text(c, shape, sizeof shape);
    printf("%-26s %-4s %-40s %10.4f ms %8.1f TFLOP/s %7.3f TB/s  best %.4f\n", c->op,
           dev->elem == ELEM_F32 ? "f32" : "bf16", shape, ms, t.flops / ms / 1e9,
           t.bytes / ms / 1e9, timing.ms[0]);
    fflush(stdout);
}

static bool is_first_of_op(const struct op_family *family, size_t i)
{
    for (const struct op_family *f = families; f; f = f->next)
        for (size_t j = 0; j < f->n_cases; j++) {
            if (f == family && j == i)
                return true;
            if (!strcmp(f->cases[j].op, family->cases[i].op))
                return false;
        }
    return false;
}

static bool is_timed(const struct options *o, const struct op_case *c)
{
    return (c->size == CASE_SMALL) == o->small;
}

static void list(const struct options *o)
{
    char shape[256];
    for (const struct op_family *f = families; f; f = f->next)
        for (size_t i = 0; i < f->n_cases; i++) {
            shape_text(&f->cases[i], shape, sizeof shape);
            if (o->bench && is_timed(o, &f->cases[i]))
                printf("%-26s %s\n", f->cases[i].op, shape);
            else if (!o->bench && is_first_of_op(f, i))
                printf("%s\n", f->cases[i].op);
        }
}

/* Whether a case is what --op and --shape ask for. */
static bool names_a_case(const struct options *o)
{
    for (const struct op_family *f = families; f; f = f->next)
        for (size_t i = 0; i < f->n_cases; i++)
            if ((!o->op || !strcmp(o->op, f->cases[i].op)) && has_shape(o, &f->cases[i]))
                return true;
    return false;
}

static bool run_all(const struct options *o, struct device *dev, struct device *cpu)
{
    bool is_well = true;
    for (const struct op_family *f = families; f; f = f->next)
        for (size_t i = 0; i < f->n_cases; i++) {
            const struct op_case *c = &f->cases[i];
            if (o->op && strcmp(o->op, c->op))
                continue;
            if (o->bench && is_timed(o, c) && has_shape(o, c))
                bench_case(c, dev);
            else if (!o->bench && is_first_of_op(f, i))
                is_well = check_op(o, c->op, dev, cpu) && is_well;
        }
    return is_well;
}

static bool run_elem(const struct options *o, enum elem_type type)
{
    struct device *dev = NULL, *cpu = NULL;
    struct err err = {0};
    if (device_open(o->device, type, 2, o->deterministic, &dev, &err) < 0 ||
        device_cpu_open(0, true, &cpu, &err) < 0)
        trial_fail(err.text);
    bool is_well = run_all(o, dev, cpu);
    dev->ops->close(dev);
    cpu->ops->close(cpu);
    return is_well;
}

static struct options read_options(int argc, char **argv)
{
    static const struct option long_options[] = {
        {"device", required_argument, NULL, 'd'}, {"op", required_argument, NULL, 'o'},
        {"elem", required_argument, NULL, 'e'},   {"bench", no_argument, NULL, 'b'},
        {"deterministic", no_argument, NULL, 'x'}, {"small", no_argument, NULL, 's'},
        {"shape", required_argument, NULL, 'h'}, {"list", no_argument, NULL, 'l'}, {0},
    };
    struct options o = {.device = "cuda:0", .f32 = true, .bf16 = true};
    int option;
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1)
        switch (option) {
        case 'd': o.device = optarg; break;
        case 'o': o.op = optarg; break;
        case 'e':
            o.f32 = !strcmp(optarg, "f32");
            o.bf16 = !strcmp(optarg, "bf16");
            break;
        case 'b': o.bench = true; break;
        case 'x': o.deterministic = true; break;
        case 's': o.small = true; break;
        case 'h': o.shape = optarg; break;
        case 'l': o.list = true; break;
        default: exit(2);
        }
    if (!strcmp(o.device, "cpu"))
        o.bf16 = false;
    if (optind < argc || (!o.f32 && !o.bf16))
        trial_fail("usage: cuda_ops [--device cuda:N|cpu] [--op NAME] [--elem f32|bf16] [--bench] "
             "[--deterministic] [--small] [--shape SHAPE]; or --list");
    return o;
}

int main(int argc, char **argv)
{
    struct options o = read_options(argc, argv);
    bool is_well = true;
    if (o.list) {
        list(&o);
        return 0;
    }
    if (!names_a_case(&o))
        trial_fail("no case has that --op and --shape; --list names the ops");
    if (o.f32)
        is_well = run_elem(&o, ELEM_F32) && is_well;
    if (o.bf16)
        is_well = run_elem(&o, ELEM_BF16) && is_well;
    if (!o.bench)
        printf("%s\n", is_well ? "all ops agree" : "some ops differ");
    return is_well ? 0 : 1;
}
