/* cross_entropy.c - the head's product and the loss in one, a block of rows at a time
 *
 * The logits of all rows would be the largest tensor of a step; a block of them becomes its own
 * gradient in place and is used up at once. */
#include "kernels/ops_cpu.h"

#include "kernels/product.h"
#include "kernels/vmath.h"

#define LOGITS_MAX     (1 << 21) /* floats of one block */
#define BLOCK_ROWS_MIN 16

struct head {
    float *logits; /* (rows, vocab) of the block; then their gradient */
    double *losses; /* (rows) */
    const int32_t *labels;
    int64_t vocab;
    bool    want_gradient;
};

/* The sum goes in double over short runs: a vocabulary is long. */
static double sum_exp(const float *x, int64_t n, float max)
{
    double total = 0;
    for (int64_t first = 0; first < n; first += 512) {
        int64_t end = min_i64(n, first + 512);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = first; j < end; j++)
            sum += vm_exp(x[j] - max);
        total += sum;
    }
    return total;
}

static void loss_rows(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    const struct head *s = arg;
    for (int64_t i = begin; i < end; i++) {
        float *x = s->logits + i * s->vocab;
        int32_t label = s->labels[i];
        if (label < 0) {
            s->losses[i] = 0;
            for (int64_t j = 0; s->want_gradient && j < s->vocab; j++)
                x[j] = 0;
            continue;
        }
        assert(label < s->vocab);
        float max = vm_max(x, s->vocab);
        double sum = sum_exp(x, s->vocab, max);
        float inverse = (float)(1 / sum);
        s->losses[i] = log(sum) + max - x[label];
        if (!s->want_gradient)
            continue;
        for (int64_t j = 0; j < s->vocab; j++)
            x[j] = vm_exp(x[j] - max) * inverse;
        x[label] -= 1;
    }
}

/* Rows of the batch that are in work, and what they are multiplied with. */
struct block {
    float *logits;
    const float *x, *w;
    int64_t first, rows, d, vocab;
};

static void logits_of(struct device *dev, const struct block *b, const struct low_rank *beside)
{
    product_spread(dev, b->logits, b->vocab, as_is(b->x, b->d), transposed(b->w, b->d), b->rows,
                   b->vocab, b->d, 1, 0);
    if (beside)
        product_spread(dev, b->logits, b->vocab,
                       as_is((const float *)(const void *)beside->z + b->first * beside->r,
                             beside->r),
                       transposed((const float *)(const void *)beside->b, beside->r), b->rows,
                       b->vocab, beside->r, 1, 1);
}

static void gradients_beside(struct device *dev, const struct block *b,
                             const struct low_rank *beside)
{
    const float *z = (const float *)(const void *)beside->z + b->first * beside->r;
    float *dz = (float *)(void *)beside->dz + b->first * beside->r;

    product_spread(dev, dz, beside->r, as_is(b->logits, b->vocab),
                   as_is((const float *)(const void *)beside->b, beside->r), b->rows, beside->r,
                   b->vocab, 1, 0);
    product_spread(dev, beside->acc_db, beside->r, transposed(b->logits, b->vocab),
                   as_is(z, beside->r), b->vocab, beside->r, b->rows, 1, 1);
}

void cpu_linear_cross_entropy(struct device *dev, double *acc_loss, float *dx, float *acc_dw,
                              const float *x, const float *w, const struct low_rank *beside,
                              const int32_t *labels, int64_t n, int64_t d, int64_t vocab)
{
    assert(dx || !acc_dw);
    int64_t block = min_i64(n, max_i64(BLOCK_ROWS_MIN, LOGITS_MAX / vocab));
    struct head s = {.vocab = vocab, .want_gradient = dx != NULL};
    double loss = 0;
    s.losses = cpu_shared(dev, (size_t)block * (sizeof(double) + (size_t)vocab * sizeof(float)));
    s.logits = (float *)(s.losses + block);
    for (int64_t first = 0; first < n; first += block) {
        int64_t rows = min_i64(block, n - first);
        struct block b = {s.logits, x + first * d, w, first, rows, d, vocab};
        s.labels = labels + first;
        logits_of(dev, &b, beside);
        cpu_for(dev, rows, cpu_grain(4 * vocab), loss_rows, &s);
        for (int64_t i = 0; i < rows; i++)
            loss += s.losses[i];
        if (!s.want_gradient)
            continue;
        product_spread(dev, dx + first * d, d, as_is(s.logits, vocab), as_is(w, d), rows, d, vocab,
                       1, 0);
        if (beside)
            gradients_beside(dev, &b, beside);
        if (acc_dw)
            product_spread(dev, acc_dw, d, transposed(s.logits, vocab), as_is(b.x, d), vocab, d,
                           rows, 1, 1);
    }
    *acc_loss += loss;
}
