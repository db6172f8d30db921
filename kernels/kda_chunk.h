/* kda_chunk.h - what the forward and the backward of KDA share: one chunk of one head
 *
 * The recurrence is taken 64 tokens at a time. Inside a chunk every decay is a product of
 * exp(g_t) over a range of tokens, at most 1, formed over that range alone: differences of one
 * long cumulative sum would lose the small decays beside the large ones, and exp(b) exp(-b) would
 * leave the range of float. Ranges are put together from blocks of 16 tokens:
 *
 *   from_block[r]  block start .. r      to_block[i]  i + 1 .. block end      total[b]  the block
 *
 * so for i in an earlier block than r: decay(i -> r) = to_block[i] total[between] from_block[r]. */
#ifndef KERNELS_KDA_CHUNK_H
#define KERNELS_KDA_CHUNK_H

#include "kernels/cpu.h"

#define KDA_CHUNK  64
#define KDA_BLOCK  16
#define KDA_BLOCKS (KDA_CHUNK / KDA_BLOCK)

/* Kept by the forward for each head and chunk, rows of it that there are. How much that is follows
 * from the number of tokens alone, however many documents they are. */
struct kda_saved {
    float *state;    /* (d, d) before the chunk: key rows, value columns. NULL before a document's
                      * first, whose state is the given one or zero */
    float *kk;       /* (rows, C) k_r . k_i decay(i -> r) for i < r, else 0 */
    float *qk;       /* (rows, C) s q_r . k_i decay(i -> r) for i <= r, else 0 */
    float *residual; /* (rows, d) v - what the decayed state already answers */
    float *value;    /* (rows, d) the values that are written, V' */
};

/* One chunk's rows of one head, and scratch; all (C, d) unless said. */
struct kda_chunk {
    int32_t rows, d; /* rows <= KDA_CHUNK */
    float *q, *k;
    float *step;       /* exp(g_r) */
    float *from_block, *to_block;
    float *total;      /* (KDA_BLOCKS, d) */
    float *from_start; /* chunk start .. r */
    float *to_end;     /* r + 1 .. chunk end */
    float *reach;      /* to_block and the totals up to the block that asks */
    float *near;       /* k reach */
    float *kq;         /* (2C, d): k from_start, then s q from_start */
    float *solve;      /* (C, C) beta_r kk[r, i] */
    float  beta[KDA_CHUNK];
};

/* Floats that kda_chunk_carve uses. */
size_t kda_chunk_floats(int32_t d);

/* Lays the chunk's buffers out in scratch. */
void kda_chunk_carve(struct kda_chunk *c, float *scratch, int32_t d);

/* Where in saved what of head belongs to the chunk is whose first row is row. is_first: of its
 * document. */
struct kda_saved kda_saved_at(float *saved, const struct kda_shape *shape, int32_t head,
                              int64_t row, bool is_first);

/* Reads rows [row, row + c->rows) of head and forms the decays, kq included. */
void kda_chunk_load(struct kda_chunk *c, const struct kda_shape *shape, int32_t head, int64_t row,
                    const float *q, const float *k, const float *g, const float *beta);

/* Brings reach and near of the rows before block b up to b; call for b = 1, 2, ... in turn. */
void kda_chunk_reach(struct kda_chunk *c, int32_t b);

/* solve = beta kk */
void kda_chunk_solver(struct kda_chunk *c, const float *kk);

/* Rows of a (n, heads, d) tensor to and from a dense (rows, d) one. */
void kda_rows_in(float *dense, const float *x, const struct kda_shape *shape, int32_t head,
                 int64_t row, int32_t rows);
void kda_rows_out(float *x, const float *dense, const struct kda_shape *shape, int32_t head,
                  int64_t row, int32_t rows);

/* Of one document and head in given states; NULL where there is none. */
static inline const float *kda_initial_state(const float *states, const struct kda_shape *s,
                                             int32_t doc, int32_t head)
{
    int64_t at = (int64_t)(s->only_ends ? 0 : doc) * s->n_heads + head;
    return states && (!s->only_ends || doc == 0) ? states + at * s->head_dim * s->head_dim : NULL;
}

static inline float *kda_final_state(float *states, const struct kda_shape *s, int32_t doc,
                                     int32_t head)
{
    int64_t at = (int64_t)(s->only_ends ? 0 : doc) * s->n_heads + head;
    bool is_there = states && (!s->only_ends || doc == s->n_docs - 1);
    return is_there ? states + at * s->head_dim * s->head_dim : NULL;
}

static inline int32_t kda_n_chunks(int32_t n_tokens)
{
    return (n_tokens + KDA_CHUNK - 1) / KDA_CHUNK;
}

#endif
