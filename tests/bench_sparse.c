/* bench_sparse.c - figures of sparse attention, packed weights and orthogonal steps on this CPU
 *
 * bench_sparse [THREADS]: one line a case, the best of some runs. Widths are those of the published
 * models, with fewer tokens, heads and experts. */
#include <stdio.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/mem.h"
#include "kernels/device.h"
#include "kernels/packed.h"

#define RUNS 5

static struct device *dev;

static float *floats(int64_t n)
{
    static uint64_t state = 1;
    float *x = xcalloc((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        x[i] = (float)(state >> 40) * 0x1p-23f - 1;
    }
    return x;
}

/* A case: what is run, and its floating-point operations. */
struct bench {
    const char *what;
    void (*run)(void *ctx);
    void  *ctx;
    double flops;
};

static void report(struct bench b)
{
    double best = 0;
    for (int i = 0; i < RUNS; i++) {
        uint64_t start = clock_now_ns();
        b.run(b.ctx);
        double seconds = (double)(clock_now_ns() - start) * 1e-9;
        best = i == 0 || seconds < best ? seconds : best;
    }
    printf("%-64s %9.3f ms %8.1f GFLOP/s\n", b.what, best * 1e3, b.flops / best * 1e-9);
}

/* ---- sparse attention ---- */

#define TOKENS 2048
#define TOP_K  512
#define HEADS  16
#define LATENT 512
#define ROPE   64
#define NOPE   128
#define INDEX  32
#define WIDTH  128

static const int32_t cu[] = {0, TOKENS};
static const struct index_shape index_shape = {TOKENS, cu, 1, INDEX, WIDTH, 0.0156f, TOP_K};
static const struct sparse_shape sparse = {TOKENS, HEADS, LATENT, ROPE, 0.0722f, TOP_K};
static const struct attention_shape dense = {TOKENS, cu, 1, HEADS, NOPE, ROPE, NOPE, 0.0722f};

struct dsa {
    float *qi, *ki, *wi, *dqi, *dki, *dwi, *q, *q_rope, *latent, *k_rope, *o, *lse;
    float *d_o, *dq, *dq_rope, *d_latent, *dk_rope, *full_q, *full_kv, *full_o, *full_lse, *kv_b;
    int32_t *selected;
};

static void run_select(void *ctx)
{
    struct dsa *x = ctx;
    dev->ops->index_select(dev, x->selected, x->qi, x->ki, x->wi, &index_shape);
}

static void run_forward(void *ctx)
{
    struct dsa *x = ctx;
    dev->ops->sparse_attention(dev, x->o, x->lse, x->q, x->q_rope, ROPE, x->latent, x->k_rope, ROPE,
                               x->selected, &sparse);
}

static void run_backward(void *ctx)
{
    struct dsa *x = ctx;
    dev->ops->sparse_attention_backward(dev, x->dq, x->dq_rope, ROPE, x->d_latent, x->dk_rope, ROPE,
                                        x->d_o, x->o, x->lse, x->q, x->q_rope, ROPE, x->latent,
                                        x->k_rope, ROPE, x->selected, &sparse);
}

static void run_loss(void *ctx)
{
    struct dsa *x = ctx;
    double loss = 0;
    dev->ops->index_loss(dev, &loss, x->dqi, x->dki, x->dwi, 1, x->qi, x->ki, x->wi, x->selected,
                         x->q, x->q_rope, ROPE, x->latent, x->k_rope, ROPE, x->lse, &index_shape,
                         &sparse);
}

static void run_dense(void *ctx)
{
    struct dsa *x = ctx;
    dev->ops->attention(dev, x->full_o, x->full_lse, x->full_q, x->full_kv, x->k_rope, ROPE,
                        &dense);
}

static void run_dense_loss(void *ctx)
{
    struct dsa *x = ctx;
    double loss = 0;
    dev->ops->index_loss_dense(dev, &loss, x->dqi, x->dki, x->dwi, 1, x->qi, x->ki, x->wi,
                               x->full_q, x->full_kv, x->k_rope, ROPE, x->full_lse, &index_shape,
                               &dense);
}

static void run_absorb(void *ctx)
{
    struct dsa *x = ctx;
    dev->ops->heads_linear_dx(dev, x->q, LATENT, x->full_q, NOPE + ROPE, x->kv_b,
                              2 * NOPE * LATENT, TOKENS, HEADS, LATENT, NOPE, 0);
}

static void bench_dsa(void)
{
    int64_t rows = (int64_t)TOKENS * HEADS, index_rows = (int64_t)TOKENS * INDEX;
    struct dsa x = {
        .qi = floats(index_rows * WIDTH), .ki = floats(TOKENS * WIDTH), .wi = floats(index_rows),
        .dqi = floats(index_rows * WIDTH), .dki = floats(TOKENS * WIDTH),
        .dwi = floats(index_rows), .q = floats(rows * LATENT), .q_rope = floats(rows * ROPE),
        .latent = floats(TOKENS * LATENT), .k_rope = floats(TOKENS * ROPE),
        .o = floats(rows * LATENT), .lse = floats(rows), .d_o = floats(rows * LATENT),
        .dq = floats(rows * LATENT), .dq_rope = floats(rows * ROPE),
        .d_latent = floats(TOKENS * LATENT), .dk_rope = floats(TOKENS * ROPE),
        .full_q = floats(rows * (NOPE + ROPE)), .full_kv = floats(rows * 2 * NOPE),
        .full_o = floats(rows * NOPE), .full_lse = floats(rows),
        .kv_b = floats((int64_t)HEADS * 2 * NOPE * LATENT),
        .selected = xcalloc((size_t)TOKENS * TOP_K, sizeof(int32_t)),
    };
    double pairs = 0.5 * TOKENS * TOKENS; /* a query and a key it sees */
    double kept = (double)TOKENS * TOP_K - 0.5 * TOP_K * TOP_K;
    report((struct bench){"index_select 2048 tokens, 32 x 128, top 512", run_select, &x,
                          2 * pairs * INDEX * WIDTH});
    report((struct bench){"sparse_attention 2048 tokens, 16 x (512 + 64), top 512", run_forward, &x,
                          2 * kept * HEADS * (2 * LATENT + ROPE)});
    report((struct bench){"sparse_attention_backward", run_backward, &x,
                          2 * kept * HEADS * (5 * LATENT + 3 * ROPE)});
    report((struct bench){"index_loss, sparse", run_loss, &x,
                          2 * kept * (HEADS * (LATENT + ROPE) + 3.0 * INDEX * WIDTH)});
    report((struct bench){"attention 2048 tokens, 16 x (128 + 64), for comparison", run_dense, &x,
                          2 * pairs * HEADS * (2 * NOPE + ROPE)});
    report((struct bench){"index_loss, dense", run_dense_loss, &x,
                          2 * pairs * (HEADS * (NOPE + ROPE) + 3.0 * INDEX * WIDTH)});
    report((struct bench){"heads_linear_dx 2048 x 16 heads, 128 -> 512", run_absorb, &x,
                          2.0 * TOKENS * HEADS * NOPE * LATENT});
    float *all[] = {x.qi, x.ki, x.wi, x.dqi, x.dki, x.dwi, x.q, x.q_rope, x.latent, x.k_rope, x.o,
                    x.lse, x.d_o, x.dq, x.dq_rope, x.d_latent, x.dk_rope, x.full_q, x.full_kv,
                    x.full_o, x.full_lse, x.kv_b};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    free(x.selected);
}

/* ---- packed weights ---- */

#define EXPERTS 8
#define ROWS    256
#define IN      3584
#define OUT     512

struct products {
    enum packing packing;
    float *x, *y, *w[EXPERTS];
    uint8_t *packed[EXPERTS];
    int64_t offsets[EXPERTS + 1];
};

static void run_packed(void *ctx)
{
    struct products *p = ctx;
    dev->ops->grouped_linear_packed(dev, p->y, p->x, (const uint8_t *const *)p->packed, p->packing,
                                    p->offsets, EXPERTS, IN, OUT);
}

static void run_packed_dx(void *ctx)
{
    struct products *p = ctx;
    dev->ops->grouped_linear_packed_dx(dev, p->x, p->y, (const uint8_t *const *)p->packed,
                                       p->packing, p->offsets, EXPERTS, IN, OUT, 0);
}

static void run_unpacked(void *ctx)
{
    struct products *p = ctx;
    dev->ops->grouped_linear(dev, p->y, p->x, (const float *const *)p->w, p->offsets, EXPERTS, IN,
                             OUT);
}

static void run_decode(void *ctx)
{
    struct products *p = ctx;
    for (int e = 0; e < EXPERTS; e++)
        packed_decode(p->w[e], &(struct packed){p->packing, p->packed[e], OUT, IN}, 0, OUT, 0, IN);
}

static void bench_packed(enum packing packing, const char *name)
{
    struct products p = {.packing = packing, .x = floats(ROWS * IN), .y = floats(ROWS * OUT)};
    char title[4][80];
    for (int e = 0; e < EXPERTS; e++) {
        p.w[e] = floats(IN * OUT);
        p.packed[e] = xcalloc(packing_bytes(packing, OUT, IN), 1);
        packed_encode(p.packed[e], packing, p.w[e], OUT, IN);
        p.offsets[e + 1] = (e + 1) * ROWS / EXPERTS;
    }
    double flops = 2.0 * ROWS * IN * OUT;
    snprintf(title[0], 80, "grouped_linear, %s, 256 x 3584 -> 512, 8 experts", name);
    snprintf(title[1], 80, "grouped_linear_dx, %s", name);
    snprintf(title[2], 80, "grouped_linear, plain, for comparison");
    snprintf(title[3], 80, "decoding 14.7 million of %s, one thread (numbers)", name);
    report((struct bench){title[0], run_packed, &p, flops});
    report((struct bench){title[1], run_packed_dx, &p, flops});
    report((struct bench){title[2], run_unpacked, &p, flops});
    report((struct bench){title[3], run_decode, &p, (double)EXPERTS * IN * OUT});
    for (int e = 0; e < EXPERTS; e++) {
        free(p.w[e]);
        free(p.packed[e]);
    }
    free(p.x);
    free(p.y);
}

/* ---- Muon ---- */

struct matrix {
    float *x;
    int32_t n_blocks;
    int64_t rows, cols;
};

static void run_newton_schulz(void *ctx)
{
    struct matrix *m = ctx;
    dev->ops->newton_schulz(dev, m->x, m->n_blocks, m->rows, m->cols, 5);
}

static void bench_muon(void)
{
    struct matrix whole = {floats(512 * 2048), 1, 512, 2048};
    struct matrix heads = {floats(16 * 128 * 1024), 16, 128, 1024};
    report((struct bench){"newton_schulz 512 x 2048", run_newton_schulz, &whole,
                          5 * 2.0 * 512 * 512 * (2 * 2048 + 512)});
    report((struct bench){"newton_schulz 16 x (128 x 1024)", run_newton_schulz, &heads,
                          16 * 5 * 2.0 * 128 * 128 * (2 * 1024 + 128)});
    free(whole.x);
    free(heads.x);
}

int main(int argc, char **argv)
{
    struct err err = {0};
    uint32_t n_threads = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 0;
    if (device_cpu_open(n_threads, false, &dev, &err) < 0) {
        fprintf(stderr, "bench_sparse: %s\n", err.text);
        return 1;
    }
    printf("%u threads\n", dev->n_threads);
    bench_dsa();
    bench_packed(PACKING_MXFP4, "MXFP4");
    bench_packed(PACKING_FP8, "FP8");
    bench_muon();
    dev->ops->close(dev);
    return 0;
}
