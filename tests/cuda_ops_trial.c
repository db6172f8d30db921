/* cuda_ops_trial.c - a case's tensors on one device: random, poisoned, guarded; and its clock */
#include "tests/cuda_ops_trial.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/mix.h"
#if BALLAST_HAS_CUDA
#include "kernels/cuda.h"
#endif

#define WARM_UPS 3

/* Random numbers of a tensor before they come again: making a model's worth of them takes longer
 * than all that is done with them. A prime, so that rows differ. */
#define RANDOM_PERIOD 4194301

void trial_fail(const char *text)
{
    fprintf(stderr, "cuda_ops: %s\n", text);
    exit(2);
}

/* ---- random numbers ---- */

static uint64_t random_bits(struct trial *t)
{
    return mix_next(&t->state->random);
}

double trial_uniform(struct trial *t)
{
    return mix_unit(random_bits(t));
}

/* The sum of four uniforms has nearly a normal's shape. */
float trial_normal(struct trial *t)
{
    uint64_t bits = random_bits(t);
    double sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (double)(bits >> (16 * i) & 0xffff) / 65536;
    return (float)((sum - 2) * 1.7320508);
}

int64_t trial_below(struct trial *t, int64_t n)
{
    return (int64_t)(trial_uniform(t) * (double)n);
}

const int32_t *trial_documents(struct trial *t, int64_t n, int32_t n_docs)
{
    int32_t *cu = trial_host(t, (size_t)(n_docs + 1) * sizeof *cu);
    for (int32_t i = 1; i < n_docs; i++) {
        int64_t left = n - cu[i - 1] - (n_docs - i); /* one row at least for each to come */
        int64_t most = 2 * (n - cu[i - 1]) / (n_docs - i + 1);
        cu[i] = cu[i - 1] + 1 + (int32_t)trial_below(t, left < most ? left : most);
    }
    cu[n_docs] = (int32_t)n;
    return cu;
}

void *trial_host(struct trial *t, size_t n_bytes)
{
    assert(t->state->n_host < TENSORS_MAX);
    return t->state->host[t->state->n_host++] = xcalloc(1, n_bytes);
}

/* ---- numbers of the device ---- */

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x))
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static size_t size_of(const struct trial *t, enum number number)
{
    switch (number) {
    case NUMBER_NONE: return 1;
    case NUMBER_ELEM: return elem_size(t->dev);
    case NUMBER_F32:
    case NUMBER_I32: return 4;
    case NUMBER_F64:
    case NUMBER_I64: return 8;
    }
    return 0;
}

static void poison_bytes(struct trial *t, char *at, size_t n_bytes)
{
    void *poison = xcalloc(1, n_bytes);
    memset(poison, POISON, n_bytes);
    t->dev->ops->to_device(t->dev, at, poison, n_bytes);
    free(poison);
}

static struct tensor *add(struct trial *t, const char *name, enum number number, int64_t n)
{
    struct trial_state *s = t->state;
    assert(s->n_tensors < TENSORS_MAX);
    struct tensor *x = &s->tensors[s->n_tensors++];
    size_t size = size_of(t, number);
    bool moves = number == NUMBER_ELEM || number == NUMBER_F32;
    size_t shift = moves ? (size_t)s->displacement * size : 0;
    *x = (struct tensor){.name = name, .number = number, .n = n, .n_bytes = (size_t)n * size};
    size_t whole = x->n_bytes + shift + GUARD_BYTES;
    if (!(x->block = t->dev->ops->alloc(t->dev, whole)))
        trial_fail("the device has no memory for this case");
    x->at = x->block + shift;
    if (!s->timing) /* which looks at no number */
        poison_bytes(t, x->block, whole);
    return x;
}

static void set_bytes(struct trial *t, const struct tensor *x, const void *host)
{
    t->dev->ops->to_device(t->dev, x->at, host, x->n_bytes);
}

/* The n numbers of x from first on; rounds host in place where elements are bf16. */
static void set_part(struct trial *t, const struct tensor *x, int64_t first, float *host, int64_t n)
{
    size_t size = size_of(t, x->number), n_bytes = (size_t)n * size;
    char *at = x->at + (size_t)first * size;
    if (x->number != NUMBER_ELEM || t->state->elem == ELEM_F32) {
        t->dev->ops->to_device(t->dev, at, host, n_bytes);
        return;
    }
    uint16_t *halves = xcalloc((size_t)n, sizeof *halves);
    for (int64_t i = 0; i < n; i++) {
        halves[i] = to_bf16(host[i]);
        host[i] = from_bf16(halves[i]);
    }
    t->dev->ops->to_device(t->dev, at, t->dev->elem == ELEM_BF16 ? (void *)halves : (void *)host,
                           n_bytes);
    free(halves);
}

static struct tensor *add_random(struct trial *t, const char *name, enum number number, int64_t n,
                                 float width)
{
    struct tensor *x = add(t, name, number, n);
    int64_t n_random = n < RANDOM_PERIOD ? n : RANDOM_PERIOD;
    float *host = xcalloc((size_t)n_random, sizeof *host);
    for (int64_t i = 0; i < n_random; i++)
        host[i] = width * trial_normal(t);
    for (int64_t i = 0; i < n; i += RANDOM_PERIOD)
        set_part(t, x, i, host, n - i < n_random ? n - i : n_random);
    free(host);
    return x;
}

elem *in_elems(struct trial *t, int64_t n, float width)
{
    return (elem *)add_random(t, "", NUMBER_ELEM, n, width)->at;
}

float *in_floats(struct trial *t, int64_t n, float width)
{
    return (float *)(void *)add_random(t, "", NUMBER_F32, n, width)->at;
}

elem *in_elems_of(struct trial *t, const float *host, int64_t n)
{
    struct tensor *x = add(t, "", NUMBER_ELEM, n);
    float *copy = xmemdup(host, (size_t)n * sizeof *copy);
    set_part(t, x, 0, copy, n);
    free(copy);
    return (elem *)x->at;
}

float *in_floats_of(struct trial *t, const float *host, int64_t n)
{
    struct tensor *x = add(t, "", NUMBER_F32, n);
    set_bytes(t, x, host);
    return (float *)(void *)x->at;
}

void *in_bytes(struct trial *t, const void *host, size_t n_bytes)
{
    struct tensor *x = add(t, "", NUMBER_NONE, (int64_t)n_bytes);
    set_bytes(t, x, host);
    return x->at;
}

void *scratch_bytes(struct trial *t, size_t n_bytes)
{
    return add(t, "", NUMBER_NONE, (int64_t)n_bytes)->at;
}

static void *compared(struct tensor *x, double allowed)
{
    x->is_compared = true;
    x->allowed = allowed;
    return x->at;
}

void out_scale(struct trial *t, const void *out, double scale)
{
    for (int i = 0; i < t->state->n_tensors; i++)
        if (t->state->tensors[i].at == out)
            t->state->tensors[i].scale = scale;
}

elem *out_elems(struct trial *t, const char *name, int64_t n)
{
    return compared(add(t, name, NUMBER_ELEM, n), 0);
}

float *out_floats(struct trial *t, const char *name, int64_t n)
{
    return compared(add(t, name, NUMBER_F32, n), 0);
}

int32_t *out_i32(struct trial *t, const char *name, int64_t n, double allowed)
{
    return compared(add(t, name, NUMBER_I32, n), allowed);
}

int64_t *out_i64(struct trial *t, const char *name, int64_t n, double allowed)
{
    return compared(add(t, name, NUMBER_I64, n), allowed);
}

elem *inout_elems(struct trial *t, const char *name, int64_t n, float width)
{
    return compared(add_random(t, name, NUMBER_ELEM, n, width), 0);
}

float *inout_floats(struct trial *t, const char *name, int64_t n, float width)
{
    return compared(add_random(t, name, NUMBER_F32, n, width), 0);
}

double *inout_double(struct trial *t, const char *name, double before)
{
    struct tensor *x = add(t, name, NUMBER_F64, 1);
    set_bytes(t, x, &before);
    return compared(x, 0);
}

int32_t *inout_i32(struct trial *t, const char *name, const int32_t *before, int64_t n,
                   double allowed)
{
    struct tensor *x = add(t, name, NUMBER_I32, n);
    set_bytes(t, x, before);
    return compared(x, allowed);
}

int64_t *inout_i64(struct trial *t, const char *name, const int64_t *before, int64_t n,
                   double allowed)
{
    struct tensor *x = add(t, name, NUMBER_I64, n);
    set_bytes(t, x, before);
    return compared(x, allowed);
}

/* ---- one run of a case ---- */

static void start_clock(struct trial *t)
{
    struct timing *g = t->state->timing;
    t->dev->ops->zero(t->dev, g->flush, FLUSH_BYTES);
    t->dev->ops->synchronize(t->dev);
#if BALLAST_HAS_CUDA
    if (g->is_cuda)
        cudaEventRecord(g->before, cuda_stream(t->dev));
#endif
    g->before_ns = clock_now_ns();
}

static double stop_clock(struct trial *t)
{
    struct timing *g = t->state->timing;
#if BALLAST_HAS_CUDA
    float ms = 0;
    if (g->is_cuda) {
        cudaEventRecord(g->after, cuda_stream(t->dev));
        cudaEventSynchronize(g->after);
        cudaEventElapsedTime(&ms, g->before, g->after);
        return ms;
    }
#endif
    t->dev->ops->synchronize(t->dev);
    return (double)(clock_now_ns() - g->before_ns) / (double)NS_PER_MS;
}

void trial_begin(struct trial *t)
{
    t->state->n_runs = 0;
}

bool trial_again(struct trial *t)
{
    struct trial_state *s = t->state;
    int n = s->n_runs++;
    if (!s->timing)
        return n == 0;
    if (n > 0) {
        double ms = stop_clock(t);
        if (n > WARM_UPS)
            s->timing->ms[n - 1 - WARM_UPS] = ms;
    }
    if (n == WARM_UPS + REPEATS)
        return false;
    start_clock(t);
    return true;
}

void trial_clear(struct trial *t)
{
    struct trial_state *s = t->state;
    for (int i = 0; i < s->n_tensors; i++)
        t->dev->ops->free(t->dev, s->tensors[i].block);
    for (int i = 0; i < s->n_host; i++)
        free(s->host[i]);
    s->n_tensors = s->n_host = 0;
}

void trial_run_case(const struct op_case *c, struct trial *t, uint64_t seed)
{
    t->d = c->d;
    t->state->random = seed;
    c->run(t);
    t->dev->ops->synchronize(t->dev);
}

/* ---- what came out ---- */

double *trial_values(struct trial *t, const struct tensor *x)
{
    double *out = xcalloc((size_t)x->n, sizeof *out);
    void *host = xcalloc(1, x->n_bytes);
    bool is_half = x->number == NUMBER_ELEM && t->dev->elem == ELEM_BF16;
    t->dev->ops->to_host(t->dev, host, x->at, x->n_bytes);
    for (int64_t i = 0; i < x->n; i++)
        switch (x->number) {
        case NUMBER_ELEM:
        case NUMBER_F32: out[i] = is_half ? from_bf16(((uint16_t *)host)[i]) : ((float *)host)[i];
            break;
        case NUMBER_F64: out[i] = ((double *)host)[i]; break;
        case NUMBER_I32: out[i] = ((int32_t *)host)[i]; break;
        case NUMBER_I64: out[i] = (double)((int64_t *)host)[i]; break;
        case NUMBER_NONE: break;
        }
    free(host);
    return out;
}

bool trial_guards_are_whole(struct trial *t, const struct tensor *x)
{
    unsigned char guard[GUARD_BYTES];
    size_t before = (size_t)(x->at - x->block);
    t->dev->ops->to_host(t->dev, guard, x->at + x->n_bytes, GUARD_BYTES);
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if (guard[i] != POISON)
            return false;
    t->dev->ops->to_host(t->dev, guard, x->block, before);
    for (size_t i = 0; i < before; i++)
        if (guard[i] != POISON)
            return false;
    return true;
}
