/* kda.c - Kimi Delta Attention, forward
 *
 * Per head, with S (d, d) zero or given at a document's start:
 *
 *   S <- diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = s S^T q_t
 *
 * taken a chunk at a time (C = 64). With A = beta kk (strictly lower) the values written solve
 * (I + A) V' = beta (V - (k from_start) S); then o = (s q from_start) S + qk V' and
 * S <- diag(from_start, last row) S + (k to_end)^T V'. */
#include "common/progress.h"
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/kda_chunk.h"
#include "kernels/product.h"

struct kda_forward {
    float *o, *final_state, *saved;
    const float *q, *k, *v, *g, *beta, *initial_state;
    const struct kda_shape *shape;
};

static float dot(const float *restrict a, const float *restrict b, int32_t d)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int32_t j = 0; j < d; j++)
        sum += a[j] * b[j];
    return sum;
}

/* kk and qk inside block b: the decayed key of i walks down the rows below it. */
static void diagonal_block(const struct kda_chunk *c, const struct kda_saved *s, int32_t b,
                           float scale, float *restrict walker)
{
    int32_t d = c->d, first = b * KDA_BLOCK;
    int32_t end = (int32_t)min_i64(first + KDA_BLOCK, c->rows);
    for (int32_t i = first; i < end; i++) {
        memcpy(walker, c->k + i * d, (size_t)d * sizeof *walker);
        s->qk[i * KDA_CHUNK + i] = scale * dot(c->q + i * d, walker, d);
        for (int32_t r = i + 1; r < end; r++) {
            const float *restrict step = c->step + r * d;
#pragma omp simd
            for (int32_t j = 0; j < d; j++)
                walker[j] *= step[j];
            s->kk[r * KDA_CHUNK + i] = dot(c->k + r * d, walker, d);
            s->qk[r * KDA_CHUNK + i] = scale * dot(c->q + r * d, walker, d);
        }
    }
}

/* kk and qk of the rows of block b against all earlier blocks. */
static void left_blocks(struct cpu_thread *t, struct kda_chunk *c, const struct kda_saved *s,
                        int32_t b, float scale, float *decayed)
{
    int32_t d = c->d, first = b * KDA_BLOCK;
    int32_t rows = (int32_t)min_i64(KDA_BLOCK, c->rows - first);
    kda_chunk_reach(c, b);
#pragma omp simd
    for (int32_t i = 0; i < rows * d; i++) {
        decayed[i] = c->k[first * d + i] * c->from_block[first * d + i];
        decayed[rows * d + i] = c->q[first * d + i] * c->from_block[first * d + i];
    }
    product(t, s->kk + first * KDA_CHUNK, KDA_CHUNK, as_is(decayed, d), transposed(c->near, d),
            rows, first, d, 1, 0);
    product(t, s->qk + first * KDA_CHUNK, KDA_CHUNK, as_is(decayed + rows * d, d),
            transposed(c->near, d), rows, first, d, scale, 0);
}

static void inside_chunk(struct cpu_thread *t, struct kda_chunk *c, const struct kda_saved *s,
                         float scale, float *scratch)
{
    memset(s->kk, 0, (size_t)c->rows * KDA_CHUNK * sizeof(float));
    memset(s->qk, 0, (size_t)c->rows * KDA_CHUNK * sizeof(float));
    for (int32_t b = 0; b * KDA_BLOCK < c->rows; b++) {
        if (b > 0)
            left_blocks(t, c, s, b, scale, scratch);
        diagonal_block(c, s, b, scale, scratch);
    }
}

/* x (rows, d) <- (I + solve)^-1 x, a block of rows at a time. */
static void solve_forward(struct cpu_thread *t, const struct kda_chunk *c, float *x)
{
    int32_t d = c->d;
    for (int32_t first = 0; first < c->rows; first += KDA_BLOCK) {
        int32_t end = (int32_t)min_i64(first + KDA_BLOCK, c->rows);
        const float *a = c->solve + first * KDA_CHUNK;
        if (first > 0)
            product(t, x + first * d, d, as_is(a, KDA_CHUNK), as_is(x, d), end - first, d, first,
                    -1, 1);
        for (int32_t r = first + 1; r < end; r++) {
            float *restrict to = x + r * d;
            for (int32_t i = first; i < r; i++) {
                const float *restrict from = x + i * d;
                float weight = c->solve[r * KDA_CHUNK + i];
#pragma omp simd
                for (int32_t j = 0; j < d; j++)
                    to[j] -= weight * from[j];
            }
        }
    }
}

/* One chunk: state (d, d) is taken forward, o's rows are written. */
static void chunk_forward(struct cpu_thread *t, const struct kda_forward *f, struct kda_chunk *c,
                          const struct kda_saved *s, float *state, float *scratch, int32_t head,
                          int64_t row)
{
    int32_t d = c->d, rows = c->rows, size = rows * d;
    progress_made(); /* a head of a long document is a long task */
    float *answers = scratch, *o = scratch + size; /* (2 rows, d) */
    kda_chunk_load(c, f->shape, head, row, f->q, f->k, f->g, f->beta);
    inside_chunk(t, c, s, f->shape->scale, scratch);
    kda_chunk_solver(c, s->kk);
    if (s->state)
        memcpy(s->state, state, (size_t)d * d * sizeof *state);

    product(t, answers, d, as_is(c->kq, d), as_is(state, d), 2 * rows, d, d, 1, 0);
    kda_rows_in(s->residual, f->v, f->shape, head, row, rows);
    for (int32_t r = 0; r < rows; r++)
#pragma omp simd
        for (int32_t j = 0; j < d; j++) {
            s->residual[r * d + j] -= answers[r * d + j];
            s->value[r * d + j] = c->beta[r] * s->residual[r * d + j];
        }
    solve_forward(t, c, s->value);
    product(t, o, d, as_is(s->qk, KDA_CHUNK), as_is(s->value, d), rows, d, rows, 1, 1);
    kda_rows_out(f->o, o, f->shape, head, row, rows);

    const float *decay = c->from_start + (rows - 1) * d;
    for (int32_t i = 0; i < d; i++)
#pragma omp simd
        for (int32_t j = 0; j < d; j++)
            state[i * d + j] *= decay[i];
#pragma omp simd
    for (int32_t i = 0; i < size; i++)
        c->near[i] = c->k[i] * c->to_end[i];
    product(t, state, d, transposed(c->near, d), as_is(s->value, d), d, d, rows, 1, 1);
}

static void document_forward(struct cpu_thread *t, const struct kda_forward *f, int32_t doc,
                             int32_t head)
{
    const struct kda_shape *shape = f->shape;
    int32_t d = shape->head_dim, begin = shape->cu_seqlens[doc], end = shape->cu_seqlens[doc + 1];
    size_t state_floats = (size_t)d * d;
    const float *initial = kda_initial_state(f->initial_state, shape, doc, head);
    float *final = kda_final_state(f->final_state, shape, doc, head);
    float *scratch = cpu_scratch(t, (kda_chunk_floats(d) + state_floats +
                                     2 * (size_t)KDA_CHUNK * d) * sizeof *scratch);
    float *state = scratch, *work = state + state_floats;
    struct kda_chunk c;
    kda_chunk_carve(&c, work + 2 * (size_t)KDA_CHUNK * d, d);
    if (initial)
        memcpy(state, initial, state_floats * sizeof *state);
    else
        memset(state, 0, state_floats * sizeof *state);
    for (int32_t row = begin; row < end; row += KDA_CHUNK) {
        struct kda_saved s = kda_saved_at(f->saved, shape, head, row, row == begin);
        c.rows = (int32_t)min_i64(KDA_CHUNK, end - row);
        chunk_forward(t, f, &c, &s, state, work, head, row);
    }
    if (final)
        memcpy(final, state, state_floats * sizeof *state);
}

static void forward_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct kda_forward *f = arg;
    for (int64_t i = begin; i < end; i++)
        document_forward(thread, f, (int32_t)(i / f->shape->n_heads),
                         (int32_t)(i % f->shape->n_heads));
}

void cpu_kda_forward(struct device *dev, float *o, float *final_state, float *saved, const float *q,
                     const float *k, const float *v, const float *g, const float *beta,
                     const float *initial_state, const struct kda_shape *shape)
{
    assert(shape->cu_seqlens[shape->n_docs] == shape->n_tokens);
    struct kda_forward f = {o, final_state, saved, q, k, v, g, beta, initial_state, shape};
    cpu_for(dev, (int64_t)shape->n_docs * shape->n_heads, 1, forward_range, &f);
}
