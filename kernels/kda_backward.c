/* kda_backward.c - Kimi Delta Attention, backward
 *
 * Chunks from last to first, carrying dS, the gradient of the state after the chunk. X is the
 * right hand side beta residual, so V' = (I + A)^-1 X gives dX = (I + A)^-T dV' and
 * dA = -tril(dX V'^T, -1). Gradients of log decays are pair terms, plus at the later row and minus
 * at the earlier one, and dg is their reverse cumulative sum; the pair of a row with itself has no
 * decay and is kept out, for its two halves would cancel only up to rounding. */
#include "common/progress.h"
#include "kernels/ops_cpu.h"

#include <string.h>

#include "kernels/kda_chunk.h"
#include "kernels/product.h"

struct kda_backward {
    float *dq, *dk, *dv, *dg, *dbeta, *d_initial_state;
    const float *d_o, *d_final_state, *q, *k, *v, *g, *beta, *initial_state;
    float *saved; /* read only */
    const struct kda_shape *shape;
};

/* Scratch of one chunk; (C, d) unless said. */
struct gradients {
    float *d_state;          /* (d, d), carried */
    float *out;              /* (2C, d): -beta dX, then dO */
    float *d_kq;             /* (2C, d) of kq */
    float *dx;               /* of X; first dV' */
    float *d_tail;           /* of k to_end */
    float *dq, *dk_row, *dk_col; /* the pair terms inside the chunk */
    float *block;            /* (C, d) and (2 blocks, d): scratch of one block */
    float *d_kk, *d_qk;      /* (C, C); d_kk times beta */
    float *first;            /* (d, d): the state before the document */
    float  dbeta[KDA_CHUNK];
};

static size_t gradients_floats(int32_t d)
{
    return 2 * (size_t)d * d + (size_t)(11 * KDA_CHUNK) * d + 2 * KDA_CHUNK * KDA_CHUNK;
}

static void gradients_carve(struct gradients *a, float *scratch, int32_t d)
{
    size_t size = (size_t)KDA_CHUNK * d;
    a->d_state = scratch;
    a->out = a->d_state + (size_t)d * d;
    a->d_kq = a->out + 2 * size;
    a->dx = a->d_kq + 2 * size;
    a->d_tail = a->dx + size;
    a->dq = a->d_tail + size;
    a->dk_row = a->dq + size;
    a->dk_col = a->dk_row + size;
    a->block = a->dk_col + size;
    a->d_kk = a->block + 2 * size;
    a->d_qk = a->d_kk + KDA_CHUNK * KDA_CHUNK;
    a->first = a->d_qk + KDA_CHUNK * KDA_CHUNK;
}

/* x (rows, d) <- (I + solve)^-T x, blocks of rows from the last to the first. */
static void solve_backward(struct cpu_thread *t, const struct kda_chunk *c, float *x)
{
    int32_t d = c->d;
    for (int32_t b = (c->rows - 1) / KDA_BLOCK; b >= 0; b--) {
        int32_t first = b * KDA_BLOCK, end = (int32_t)min_i64(first + KDA_BLOCK, c->rows);
        if (end < c->rows)
            product(t, x + first * d, d, transposed(c->solve + end * KDA_CHUNK + first, KDA_CHUNK),
                    as_is(x + end * d, d), end - first, d, c->rows - end, -1, 1);
        for (int32_t r = end - 1; r > first; r--) {
            const float *restrict from = x + r * d;
            for (int32_t i = first; i < r; i++) {
                float *restrict to = x + i * d;
                float weight = c->solve[r * KDA_CHUNK + i];
#pragma omp simd
                for (int32_t j = 0; j < d; j++)
                    to[j] -= weight * from[j];
            }
        }
    }
}

/* d_qk = dO V'^T and d_kk = -beta dX V'^T, below the diagonal (d_qk with it); dbeta. */
static void chunk_matrices(struct cpu_thread *t, const struct kda_chunk *c, struct gradients *a,
                           const struct kda_saved *s)
{
    int32_t d = c->d, rows = c->rows;
    product(t, a->d_kk, KDA_CHUNK, as_is(a->dx, d), transposed(s->value, d), rows, rows, d, -1, 0);
    product(t, a->d_qk, KDA_CHUNK, as_is(a->out + rows * d, d), transposed(s->value, d), rows, rows,
            d, 1, 0);
    for (int32_t r = 0; r < rows; r++) {
        float *d_kk = a->d_kk + r * KDA_CHUNK, sum = 0;
        const float *kk = s->kk + r * KDA_CHUNK, *dx = a->dx + r * d, *res = s->residual + r * d;
#pragma omp simd reduction(+ : sum)
        for (int32_t j = 0; j < d; j++)
            sum += dx[j] * res[j];
        for (int32_t i = 0; i < r; i++) {
            sum += d_kk[i] * kk[i];
            d_kk[i] *= c->beta[r];
        }
        a->dbeta[r] = sum;
    }
}

/* Pair terms of rows of one block; decay walks down from i. */
static void diagonal_block(const struct kda_chunk *c, struct gradients *a, int32_t b, float scale)
{
    int32_t d = c->d, first = b * KDA_BLOCK;
    int32_t end = (int32_t)min_i64(first + KDA_BLOCK, c->rows);
    float *restrict decay = a->block;
    for (int32_t i = first; i < end; i++) {
        const float *restrict k_i = c->k + i * d;
        float *restrict col = a->dk_col + i * d;
#pragma omp simd
        for (int32_t j = 0; j < d; j++)
            decay[j] = 1;
        for (int32_t r = i + 1; r < end; r++) {
            const float *restrict k_r = c->k + r * d, *restrict q_r = c->q + r * d;
            const float *restrict step = c->step + r * d;
            float *restrict dq = a->dq + r * d, *restrict row = a->dk_row + r * d;
            float of_kk = a->d_kk[r * KDA_CHUNK + i], of_qk = scale * a->d_qk[r * KDA_CHUNK + i];
#pragma omp simd
            for (int32_t j = 0; j < d; j++) {
                float p = decay[j] * step[j];
                float pk = p * k_i[j];
                decay[j] = p;
                dq[j] += of_qk * pk;
                row[j] += of_kk * pk;
                col[j] += p * (of_qk * q_r[j] + of_kk * k_r[j]);
            }
        }
    }
}

/* Pair terms of the rows of block b with those of all earlier blocks. */
static void left_blocks(struct cpu_thread *t, struct kda_chunk *c, struct gradients *a, int32_t b,
                        float scale)
{
    int32_t d = c->d, first = b * KDA_BLOCK;
    int32_t rows = (int32_t)min_i64(KDA_BLOCK, c->rows - first), size = rows * d;
    const float *d_kk = a->d_kk + first * KDA_CHUNK, *d_qk = a->d_qk + first * KDA_CHUNK;
    const float *from = c->from_block + first * d, *q = c->q + first * d, *k = c->k + first * d;
    float *rows_k = a->block, *rows_q = a->block + KDA_BLOCK * d, *cols = rows_q + KDA_BLOCK * d;
    kda_chunk_reach(c, b);

    product(t, rows_k, d, as_is(d_kk, KDA_CHUNK), as_is(c->near, d), rows, d, first, 1, 0);
    product(t, rows_q, d, as_is(d_qk, KDA_CHUNK), as_is(c->near, d), rows, d, first, scale, 0);
#pragma omp simd
    for (int32_t i = 0; i < size; i++) {
        a->dk_row[first * d + i] += from[i] * rows_k[i];
        a->dq[first * d + i] += from[i] * rows_q[i];
        rows_k[i] = k[i] * from[i];
        rows_q[i] = q[i] * from[i];
    }
    product(t, cols, d, transposed(d_kk, KDA_CHUNK), as_is(rows_k, d), first, d, rows, 1, 0);
    product(t, cols, d, transposed(d_qk, KDA_CHUNK), as_is(rows_q, d), first, d, rows, scale, 1);
#pragma omp simd
    for (int32_t i = 0; i < first * d; i++)
        a->dk_col[i] += c->reach[i] * cols[i];
}

static void inside_chunk(struct cpu_thread *t, struct kda_chunk *c, struct gradients *a,
                         float scale)
{
    size_t bytes = (size_t)c->rows * c->d * sizeof(float);
    memset(a->dq, 0, bytes);
    memset(a->dk_row, 0, bytes);
    memset(a->dk_col, 0, bytes);
    for (int32_t b = 0; b * KDA_BLOCK < c->rows; b++) {
        if (b > 0)
            left_blocks(t, c, a, b, scale);
        diagonal_block(c, a, b, scale);
    }
}

/* db of the chunk's last row from what decays to the chunk's end: tail terms and the state. */
static void end_of_chunk(const struct kda_chunk *c, const struct gradients *a,
                         const struct kda_saved *s, float *restrict db)
{
    int32_t d = c->d;
    const float *decay = c->from_start + (c->rows - 1) * d;
    for (int32_t i = 0; i < d; i++) {
        const float *restrict state = s->state + i * d, *restrict ds = a->d_state + i * d;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int32_t j = 0; j < d; j++)
            sum += state[j] * ds[j];
        db[i] = decay[i] * sum;
    }
    for (int32_t r = 0; r < c->rows; r++)
#pragma omp simd
        for (int32_t j = 0; j < d; j++)
            db[j] += c->k[r * d + j] * c->to_end[r * d + j] * a->d_tail[r * d + j];
}

/* Puts the parts together; rows from last to first so that dg is a running sum. */
static void assemble(const struct kda_chunk *c, struct gradients *a, const struct kda_saved *s,
                     float scale)
{
    int32_t d = c->d;
    float *restrict dg = a->block; /* (rows, d), then the running sum */
    float *restrict running = dg + KDA_CHUNK * d;
    end_of_chunk(c, a, s, running);
    for (int32_t r = c->rows - 1; r >= 0; r--) {
        const float *restrict q = c->q + r * d, *restrict k = c->k + r * d;
        const float *restrict start = c->from_start + r * d, *restrict end = c->to_end + r * d;
        const float *restrict d_kg = a->d_kq + r * d, *restrict d_tail = a->d_tail + r * d;
        const float *restrict d_qg = a->d_kq + (c->rows + r) * d;
        float *restrict dq = a->dq + r * d, *restrict row = a->dk_row + r * d;
        const float *restrict col = a->dk_col + r * d;
        float self = scale * a->d_qk[r * KDA_CHUNK + r];
#pragma omp simd
        for (int32_t j = 0; j < d; j++) {
            float q_part = scale * start[j] * d_qg[j], k_part = start[j] * d_kg[j];
            float tail_part = end[j] * d_tail[j];
            running[j] += q[j] * (dq[j] + q_part) + k[j] * (row[j] - col[j] + k_part - tail_part);
            dg[r * d + j] = running[j];
            dq[j] += q_part + self * k[j];
            row[j] += col[j] + k_part + tail_part + self * q[j];
        }
    }
}

static void chunk_backward(struct cpu_thread *t, const struct kda_backward *f, struct kda_chunk *c,
                           struct gradients *a, const struct kda_saved *s, int32_t head,
                           int64_t row)
{
    int32_t d = c->d, rows = c->rows;
    float scale = f->shape->scale, *d_out = a->out + rows * d;
    progress_made();
    kda_chunk_load(c, f->shape, head, row, f->q, f->k, f->g, f->beta);
    kda_chunk_solver(c, s->kk);
    kda_rows_in(d_out, f->d_o, f->shape, head, row, rows);

#pragma omp simd
    for (int32_t i = 0; i < rows * d; i++)
        c->near[i] = c->k[i] * c->to_end[i];
    product(t, a->dx, d, as_is(c->near, d), as_is(a->d_state, d), rows, d, d, 1, 0);
    product(t, a->dx, d, transposed(s->qk, KDA_CHUNK), as_is(d_out, d), rows, d, rows, 1, 1);
    solve_backward(t, c, a->dx);
    chunk_matrices(t, c, a, s);
    for (int32_t r = 0; r < rows; r++)
#pragma omp simd
        for (int32_t j = 0; j < d; j++)
            a->out[r * d + j] = -c->beta[r] * a->dx[r * d + j];

    product(t, a->d_kq, d, as_is(a->out, d), transposed(s->state, d), 2 * rows, d, d, 1, 0);
    product(t, a->d_tail, d, as_is(s->value, d), transposed(a->d_state, d), rows, d, d, 1, 0);
    inside_chunk(t, c, a, scale);
    assemble(c, a, s, scale);
    kda_rows_out(f->dq, a->dq, f->shape, head, row, rows);
    kda_rows_out(f->dk, a->dk_row, f->shape, head, row, rows);
    kda_rows_out(f->dg, a->block, f->shape, head, row, rows);
#pragma omp simd
    for (int32_t i = 0; i < rows * d; i++)
        a->dx[i] = -a->out[i];
    kda_rows_out(f->dv, a->dx, f->shape, head, row, rows);
    for (int32_t r = 0; r < rows; r++)
        f->dbeta[(row + r) * f->shape->n_heads + head] = a->dbeta[r];

    const float *decay = c->from_start + (rows - 1) * d;
    for (int32_t i = 0; i < d; i++)
#pragma omp simd
        for (int32_t j = 0; j < d; j++)
            a->d_state[i * d + j] *= decay[i];
    product(t, a->d_state, d, transposed(c->kq, d), as_is(a->out, d), d, d, 2 * rows, 1, 1);
}

/* given NULL: zero. */
static void copy_state(float *to, const float *given, int32_t d)
{
    size_t n_bytes = (size_t)d * d * sizeof *to;
    if (given)
        memcpy(to, given, n_bytes);
    else
        memset(to, 0, n_bytes);
}

static void document_backward(struct cpu_thread *t, const struct kda_backward *f, int32_t doc,
                              int32_t head)
{
    const struct kda_shape *shape = f->shape;
    int32_t d = shape->head_dim, begin = shape->cu_seqlens[doc], end = shape->cu_seqlens[doc + 1];
    float *d_initial = (float *)kda_initial_state(f->d_initial_state, shape, doc, head);
    const float *final = kda_final_state((float *)f->d_final_state, shape, doc, head);
    float *scratch = cpu_scratch(t, (kda_chunk_floats(d) + gradients_floats(d)) * sizeof *scratch);
    struct kda_chunk c;
    struct gradients a;
    kda_chunk_carve(&c, scratch, d);
    gradients_carve(&a, scratch + kda_chunk_floats(d), d);
    copy_state(a.first, kda_initial_state(f->initial_state, shape, doc, head), d);
    copy_state(a.d_state, final, d);
    for (int32_t chunk = kda_n_chunks(end - begin) - 1; chunk >= 0; chunk--) {
        int32_t row = begin + chunk * KDA_CHUNK;
        struct kda_saved s = kda_saved_at(f->saved, shape, head, row, chunk == 0);
        if (!s.state)
            s.state = a.first;
        c.rows = (int32_t)min_i64(KDA_CHUNK, end - row);
        chunk_backward(t, f, &c, &a, &s, head, row);
    }
    if (d_initial)
        memcpy(d_initial, a.d_state, (size_t)d * d * sizeof *d_initial);
}

static void backward_range(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    const struct kda_backward *f = arg;
    for (int64_t i = begin; i < end; i++)
        document_backward(thread, f, (int32_t)(i / f->shape->n_heads),
                          (int32_t)(i % f->shape->n_heads));
}

void cpu_kda_backward(struct device *dev, float *dq, float *dk, float *dv, float *dg, float *dbeta,
                      float *d_initial_state, const float *d_o, const float *d_final_state,
                      const float *q, const float *k, const float *v, const float *g,
                      const float *beta, const float *initial_state, const float *saved,
                      const struct kda_shape *shape)
{
    struct kda_backward f = {
        .dq = dq, .dk = dk, .dv = dv, .dg = dg, .dbeta = dbeta,
        .d_initial_state = d_initial_state, .d_o = d_o, .d_final_state = d_final_state, .q = q,
        .k = k, .v = v, .g = g, .beta = beta, .initial_state = initial_state,
        .saved = (float *)saved, .shape = shape,
    };
    cpu_for(dev, (int64_t)shape->n_docs * shape->n_heads, 1, backward_range, &f);
}
