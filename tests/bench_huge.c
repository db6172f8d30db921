/* bench_huge.c - ops over tensors of more than 2^31 numbers
 *
 * The rows of each input are the same 64 again and again, so what an op makes of the last 64 must
 * be what it makes of 64 alone, and sums over all rows as many times theirs. An offset that does
 * not fit 32 bits shows there. Exit 1 where something differs. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "kernels/device.h"

#define BASE   64    /* rows that differ */
#define HEADS  96
#define DIM    128
#define WIDE   (HEADS * DIM)
#define NARROW 128   /* the other side of products */
#define KERNEL 4
#define INPUTS 4
#define FLOATS 2

/* All (n, WIDE) but w, v (WIDE) each, wide_w (NARROW, WIDE) and narrow (n, NARROW). */
struct tensors {
    struct device *dev;
    int64_t n;
    int32_t n_docs, *cu_seqlens; /* documents of BASE rows */
    elem  *in[INPUTS], *out[3], *narrow, *narrow_out;
    float *f_in[FLOATS], *f_out;
    float *rows[FLOATS];    /* (n, HEADS) */
    float *per_row;         /* (n) */
    float *saved;           /* of KDA */
    elem  *w, *v, *wide_w, *beta;
    float *acc;             /* (NARROW, WIDE) */
    int64_t *index;
};

struct huge_case {
    const char *op;
    void (*run)(struct tensors *t);
    int n_in, n_f_in, n_out, n_f_out;
    bool has_narrow_out; /* (n, NARROW) in place of out[0] */
    int64_t n_acc;
};

/* ---- the ops ---- */

#define OP(name, ...)                                                                              \
    static void run_##name(struct tensors *t)                                                      \
    {                                                                                              \
        t->dev->ops->name(t->dev, __VA_ARGS__);                                                    \
    }
#define ALL (t->n * WIDE)

OP(add, t->out[0], t->in[0], ALL)
OP(to_f32, t->f_out, t->in[0], ALL)
OP(to_elem, t->out[0], t->f_in[0], ALL)
OP(sigmoid, t->out[0], t->in[0], ALL)
OP(sigmoid_gate, t->out[0], t->in[0], t->in[1], ALL)
OP(sigmoid_gate_backward, t->out[0], t->out[1], t->in[0], t->in[1], t->in[2], ALL)
OP(situ, t->out[0], t->in[0], t->in[1], ALL, 4, 25)
OP(situ_backward, t->out[0], t->out[1], t->in[0], t->in[1], t->in[2], ALL, 4, 25)
OP(swiglu, t->out[0], t->in[0], t->in[1], ALL)
OP(swiglu_backward, t->out[0], t->out[1], t->in[0], t->in[1], t->in[2], ALL)
OP(rms_norm, t->out[0], t->rows[0], t->in[0], t->w, t->n, WIDE, 1e-5f)
OP(rms_norm_backward, t->out[0], t->acc, t->in[0], t->in[1], t->w, t->per_row, t->n, WIDE, 0)
OP(gated_rms_norm, t->out[0], t->rows[0], t->in[0], t->in[1], t->w, t->n * HEADS, DIM, 1e-5f)
OP(gated_rms_norm_backward, t->out[0], t->out[1], t->acc, t->in[0], t->in[1], t->in[2], t->w,
   t->rows[1], t->n * HEADS, DIM)
OP(l2_norm, t->out[0], t->rows[0], t->in[0], t->n * HEADS, DIM, 1e-6f)
OP(l2_norm_backward, t->out[0], t->in[0], t->in[1], t->rows[1], t->n * HEADS, DIM)
OP(layer_norm, t->out[0], t->rows[0], t->in[0], t->w, t->v, t->n, WIDE, 1e-5f)
OP(short_conv, t->out[0], t->out[1], t->in[0], t->wide_w, t->cu_seqlens, t->n_docs, WIDE, KERNEL)
OP(short_conv_backward, t->out[0], t->acc, t->in[0], t->in[1], t->in[2], t->wide_w,
   t->cu_seqlens, t->n_docs, WIDE, KERNEL)
OP(kda_gate, t->f_out, t->in[0], t->w, t->v, t->n, HEADS, DIM, true, -5)
OP(kda_gate_backward, t->out[0], t->acc, t->acc + WIDE, t->f_in[0], t->in[0], t->w, t->v, t->n,
   HEADS, DIM, true, -5)
OP(linear, t->narrow_out, t->in[0], t->wide_w, t->n, WIDE, NARROW, 0)
OP(linear_dx, t->out[0], t->narrow, t->wide_w, t->n, WIDE, NARROW, 0)
OP(linear_dw, t->acc, t->narrow, t->in[0], t->n, WIDE, NARROW)
OP(heads_linear, t->out[0], DIM, t->in[0], DIM, t->wide_w, DIM * DIM, t->n, HEADS, DIM, DIM, 0)
OP(heads_linear_dx, t->out[0], DIM, t->in[0], DIM, t->wide_w, DIM * DIM, t->n, HEADS, DIM, DIM, 0)
OP(gather_rows, t->out[0], t->in[0], t->index, NULL, t->n, WIDE)
OP(combine, t->narrow_out, t->in[0], t->rows[1], t->n, HEADS, DIM)

static void run_attn_res(struct tensors *t)
{
    const elem *rows[3] = {t->in[0], t->in[1], t->in[2]};
    t->dev->ops->attn_res(t->dev, t->out[0], t->rows[0], rows, 3, t->w, t->v, t->n, WIDE, 1e-5f);
}

static struct kda_shape kda_shape_of(const struct tensors *t)
{
    return (struct kda_shape){.n_tokens = t->n, .cu_seqlens = t->cu_seqlens, .n_docs = t->n_docs,
                              .n_heads = HEADS, .head_dim = DIM, .scale = 0.01f};
}

static void run_kda_forward(struct tensors *t)
{
    struct kda_shape s = kda_shape_of(t);
    t->dev->ops->kda_forward(t->dev, t->out[0], NULL, t->saved, t->in[0], t->in[1], t->in[2],
                             t->f_in[0], t->beta, NULL, &s);
}

static void run_kda_backward(struct tensors *t)
{
    struct kda_shape s = kda_shape_of(t);
    run_kda_forward(t); /* for saved; out[0] is scratch */
    t->dev->ops->kda_backward(t->dev, t->out[0], t->out[1], t->out[2], t->f_out,
                              (elem *)t->rows[0], NULL, t->in[3], NULL, t->in[0], t->in[1],
                              t->in[2], t->f_in[0], t->beta, NULL, t->saved, &s);
}

#define CASE(op, ...) {#op, run_##op, __VA_ARGS__}
static const struct huge_case cases[] = {
    CASE(add, 1, 0, 1, 0), CASE(to_f32, 1, 0, 0, 1), CASE(to_elem, 0, 1, 1, 0),
    CASE(sigmoid, 1, 0, 1, 0), CASE(sigmoid_gate, 2, 0, 1, 0),
    CASE(sigmoid_gate_backward, 3, 0, 2, 0), CASE(situ, 2, 0, 1, 0),
    CASE(situ_backward, 3, 0, 2, 0), CASE(swiglu, 2, 0, 1, 0), CASE(swiglu_backward, 3, 0, 2, 0),
    CASE(rms_norm, 1, 0, 1, 0), CASE(rms_norm_backward, 2, 0, 1, 0, .n_acc = WIDE),
    CASE(gated_rms_norm, 2, 0, 1, 0), CASE(gated_rms_norm_backward, 3, 0, 2, 0, .n_acc = DIM),
    CASE(l2_norm, 1, 0, 1, 0), CASE(l2_norm_backward, 2, 0, 1, 0), CASE(layer_norm, 1, 0, 1, 0),
    CASE(short_conv, 1, 0, 2, 0), CASE(short_conv_backward, 3, 0, 1, 0, .n_acc = WIDE * KERNEL),
    CASE(kda_gate, 1, 0, 0, 1), CASE(kda_gate_backward, 1, 1, 1, 0, .n_acc = WIDE + HEADS),
    CASE(linear, 1, 0, 0, 0, .has_narrow_out = true), CASE(linear_dx, 0, 0, 1, 0),
    CASE(linear_dw, 1, 0, 0, 0, .n_acc = NARROW * WIDE), CASE(heads_linear, 1, 0, 1, 0),
    CASE(heads_linear_dx, 1, 0, 1, 0), CASE(gather_rows, 1, 0, 1, 0),
    CASE(combine, 1, 0, 0, 0, .has_narrow_out = true), CASE(attn_res, 3, 0, 1, 0),
    CASE(kda_forward, 3, 1, 1, 0), CASE(kda_backward, 4, 1, 3, 1),
};

/* ---- tensors ---- */

static void *take(struct device *dev, size_t n_bytes)
{
    void *p = dev->ops->alloc(dev, n_bytes);
    if (!p) {
        fprintf(stderr, "bench_huge: the device has no %.1f GiB more\n", (double)n_bytes / 0x1p30);
        exit(2);
    }
    return p;
}

/* The same numbers for the same seed. */
static float *random_floats(int64_t n, float middle, float width, uint64_t seed)
{
    float *x = xcalloc((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = middle + width * ((float)(seed >> 40) * 0x1p-23f - 1);
    }
    return x;
}

/* n_base numbers, again and again until there are n. */
static void *repeated(struct device *dev, int64_t n_base, int64_t n, bool is_elem, float middle,
                      float width, uint64_t seed)
{
    size_t each = is_elem ? elem_size(dev) : sizeof(float), base = (size_t)n_base * each;
    float *host = random_floats(n_base, middle, width, seed);
    char *to = take(dev, (size_t)n * each);
    float *floats = take(dev, (size_t)n_base * sizeof *floats);
    dev->ops->to_device(dev, floats, host, (size_t)n_base * sizeof *host);
    if (is_elem)
        dev->ops->to_elem(dev, (elem *)to, floats, n_base);
    else
        dev->ops->copy(dev, to, floats, base);
    for (size_t have = base, all = (size_t)n * each; have < all;) {
        size_t more = have < all - have ? have : all - have;
        dev->ops->copy(dev, to + have, to, more);
        have += more;
    }
    dev->ops->synchronize(dev);
    dev->ops->free(dev, floats);
    free(host);
    return to;
}

static elem *small_weights(struct device *dev, int64_t n, float middle, float width, uint64_t seed)
{
    return repeated(dev, n, n, true, middle, width, seed);
}

static void open_tensors(struct tensors *t, const struct huge_case *c, struct device *dev,
                         int64_t n)
{
    *t = (struct tensors){.dev = dev, .n = n, .n_docs = (int32_t)(n / BASE)};
    t->cu_seqlens = xcalloc((size_t)t->n_docs + 1, sizeof *t->cu_seqlens);
    for (int32_t i = 1; i <= t->n_docs; i++)
        t->cu_seqlens[i] = i * BASE;
    bool is_kda = !strncmp(c->op, "kda_f", 5) || !strncmp(c->op, "kda_b", 5);
    for (int i = 0; i < c->n_in; i++) /* keys of length 1 */
        t->in[i] = repeated(dev, BASE * WIDE, n * WIDE, true, 0, is_kda && i < 2 ? 0.15f : 1,
                            (uint64_t)i + 1);
    for (int i = 0; i < c->n_f_in; i++)
        t->f_in[i] = repeated(dev, BASE * WIDE, n * WIDE, false, -0.5f, 0.4f, (uint64_t)i + 11);
    for (int i = 0; i < c->n_out; i++)
        t->out[i] = repeated(dev, BASE, n * WIDE, true, 0, 0, 1);
    if (c->n_f_out)
        t->f_out = take(dev, (size_t)(n * WIDE) * sizeof(float));
    t->narrow = repeated(dev, BASE * NARROW, n * NARROW, true, 0, 1, 21);
    t->narrow_out = take(dev, (size_t)(n * NARROW) * elem_size(dev));
    for (int i = 0; i < FLOATS; i++)
        t->rows[i] = repeated(dev, BASE * HEADS, n * HEADS, false, 1, 0.3f, (uint64_t)i + 31);
    t->per_row = repeated(dev, BASE, n, false, 1, 0.3f, 61);
    t->beta = repeated(dev, BASE * HEADS, n * HEADS, true, 0.5f, 0.4f, 41);
    t->w = small_weights(dev, WIDE, 1, 0.1f, 51);
    t->v = small_weights(dev, WIDE, 0, 0.1f, 52);
    t->wide_w = small_weights(dev, HEADS * DIM * DIM, 0, 0.1f, 53);
    t->acc = take(dev, (size_t)NARROW * WIDE * sizeof *t->acc);
    dev->ops->zero(dev, t->acc, (size_t)NARROW * WIDE * sizeof *t->acc);
    int64_t *index = xcalloc((size_t)n, sizeof *index);
    for (int64_t i = 0; i < n; i++)
        index[i] = i / BASE * BASE + (i * 7 + 3) % BASE;
    t->index = take(dev, (size_t)n * sizeof *index);
    dev->ops->to_device(dev, t->index, index, (size_t)n * sizeof *index);
    free(index);
    struct kda_shape s = kda_shape_of(t);
    if (is_kda)
        t->saved = take(dev, dev->ops->kda_saved_floats(dev, &s) * sizeof(float));
    dev->ops->synchronize(dev);
}

static void close_tensors(struct tensors *t)
{
    void *all[] = {t->in[0], t->in[1], t->in[2], t->in[3], t->out[0], t->out[1], t->out[2],
                   t->narrow, t->narrow_out, t->f_in[0], t->f_in[1], t->f_out, t->rows[0],
                   t->rows[1], t->per_row, t->saved, t->w, t->v, t->wide_w, t->beta, t->acc,
                   t->index};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i])
            t->dev->ops->free(t->dev, all[i]);
    free(t->cu_seqlens);
}

/* ---- what came out ---- */

/* The last BASE rows of a tensor of n rows, as floats. */
static float *last_rows(struct device *dev, const void *x, bool is_elem, int64_t n, int64_t width)
{
    int64_t count = BASE * width, at = (n - BASE) * width;
    float *host = xcalloc((size_t)count, sizeof *host), *floats;
    if (!is_elem) {
        dev->ops->to_host(dev, host, (const float *)x + at, (size_t)count * sizeof *host);
        return host;
    }
    floats = take(dev, (size_t)count * sizeof *floats);
    dev->ops->to_f32(dev, floats, const_elem_at(dev, x, at), count);
    dev->ops->to_host(dev, host, floats, (size_t)count * sizeof *host);
    dev->ops->free(dev, floats);
    return host;
}

/* |a - times b| / |times b|, NaN where one of them is. */
static double distance(const float *a, const float *b, double times, int64_t n)
{
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double y = times * b[i];
        difference += (a[i] - y) * (a[i] - y);
        norm += y * y;
    }
    return norm > 0 ? sqrt(difference / norm) : difference > 0 ? INFINITY : NAN;
}

static double compare(const struct tensors *a, const struct tensors *b, const void *x,
                      const void *y, bool is_elem, int64_t width)
{
    if (!x)
        return 0;
    float *p = last_rows(a->dev, x, is_elem, a->n, width);
    float *q = last_rows(b->dev, y, is_elem, b->n, width);
    double d = distance(p, q, 1, BASE * width);
    free(p);
    free(q);
    return d;
}

static double worse(double a, double b)
{
    return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
}

static double worst_output(const struct huge_case *c, const struct tensors *a,
                           const struct tensors *b)
{
    double worst = 0;
    for (int i = 0; i < c->n_out; i++)
        worst = worse(worst, compare(a, b, a->out[i], b->out[i], true, WIDE));
    if (c->n_f_out)
        worst = worse(worst, compare(a, b, a->f_out, b->f_out, false, WIDE));
    if (c->has_narrow_out)
        worst = worse(worst, compare(a, b, a->narrow_out, b->narrow_out, true, NARROW));
    if (c->n_acc) {
        float *p = xcalloc((size_t)c->n_acc, sizeof *p), *q = xcalloc((size_t)c->n_acc, sizeof *q);
        a->dev->ops->to_host(a->dev, p, a->acc, (size_t)c->n_acc * sizeof *p);
        b->dev->ops->to_host(b->dev, q, b->acc, (size_t)c->n_acc * sizeof *q);
        worst = worse(worst, distance(p, q, (double)a->n / BASE, c->n_acc));
        free(p);
        free(q);
    }
    return worst;
}

static bool run_case(const struct huge_case *c, struct device *dev, int64_t n)
{
    struct tensors few, many;
    open_tensors(&few, c, dev, BASE);
    open_tensors(&many, c, dev, n);
    c->run(&few);
    dev->ops->synchronize(dev);
    uint64_t start = clock_now_ns();
    c->run(&many);
    dev->ops->synchronize(dev);
    double ms = (double)(clock_now_ns() - start) / NS_PER_MS, worst = worst_output(c, &many, &few);
    bool is_well = worst < 5e-3; /* products of few rows may go another way */
    printf("%-26s %lld x %d  %9.2f ms  distance %.2g  %s\n", c->op, (long long)n, WIDE, ms, worst,
           is_well ? "ok" : "FAIL");
    fflush(stdout);
    close_tensors(&few);
    close_tensors(&many);
    return is_well;
}

int main(int argc, char **argv)
{
    static const struct option known[] = {{"device", required_argument, NULL, 'd'},
                                          {"dtype", required_argument, NULL, 'e'},
                                          {"op", required_argument, NULL, 'o'},
                                          {"rows", required_argument, NULL, 'n'}, {0}};
    const char *device = "cuda:0", *dtype = "bf16", *op = NULL;
    int64_t n = (((int64_t)1 << 31) / WIDE / BASE + 2) * BASE; /* the last rows are beyond */
    struct device *dev = NULL;
    struct err err = {0};
    bool is_well = true;
    for (int which; (which = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        switch (which) {
        case 'd': device = optarg; break;
        case 'e': dtype = optarg; break;
        case 'o': op = optarg; break;
        case 'n': n = atoll(optarg) / BASE * BASE; break;
        default:
            fputs("usage: bench_huge [--device cpu|cuda:N] [--dtype f32|bf16] [--op NAME] "
                  "[--rows N]\n", stderr);
            return 2;
        }
    }
    if (n < BASE || device_open(device, strcmp(dtype, "bf16") ? ELEM_F32 : ELEM_BF16, 0, false,
                                &dev, &err) < 0) {
        fprintf(stderr, "bench_huge: %s\n", n < BASE ? "--rows: at least 64" : err.text);
        return 2;
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!op || !strcmp(op, cases[i].op))
            is_well = run_case(&cases[i], dev, n) && is_well;
    dev->ops->close(dev);
    return !is_well;
}
