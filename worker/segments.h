/* segments.h - a long batch in segments, which a layer takes one after the other
 *
 * So what a layer holds at once is of one segment, whatever the batch's length. Segments are runs
 * of rows of one length and cut documents where they fall; as many on every rank, so that those
 * that exchange tokens do it together: the last ones may be empty. */
#ifndef WORKER_SEGMENTS_H
#define WORKER_SEGMENTS_H

#include "worker/layer.h"

struct segment {
    int32_t index;
    int64_t begin, n;            /* its rows */
    int64_t before;              /* rows of its first document in earlier segments */
    bool    goes_on;             /* its last document has rows in later ones */
    int32_t n_docs;
    const int32_t *cu_seqlens;   /* n_docs + 1: of its rows */
    const int32_t *cu_keys;      /* with the rows before, as its own attention sees them */
    const int32_t *cu_positions; /* of its rows, but the first document began before them */
};

struct segments {
    struct segment *all;
    int32_t  n;
    int32_t *rows; /* what the segments' arrays point into */
};

/* Cuts into segments of n_rows, and no fewer than n_least. Ended with segments_fini. */
void segments_init(struct segments *s, const int32_t *cu_seqlens, int32_t n_docs, int64_t n_rows,
                   int32_t n_least);
void segments_fini(struct segments *s);

/* The pass of a segment alone; what its layers share is the caller's to set. */
struct pass segment_pass(const struct pass *p, const struct segment *s);

/* Row begin of x (n, width); NULL of NULL. */
static inline elem *segment_rows(const struct pass *p, elem *x, int64_t begin, int64_t width)
{
    return x ? elem_at(p->dev, x, begin * width) : NULL;
}

static inline const elem *segment_inputs(const struct pass *p, const elem *x, int64_t begin,
                                         int64_t width)
{
    return x ? const_elem_at(p->dev, x, begin * width) : NULL;
}

static inline float *segment_floats(float *x, int64_t begin, int64_t width)
{
    return x ? x + begin * width : NULL;
}

/* ---- of a pass, which may be a segment's ---- */

static inline int64_t rows_before(const struct pass *p)
{
    return p->segment ? p->segment->before : 0;
}

static inline bool rows_go_on(const struct pass *p)
{
    return p->segment && p->segment->goes_on;
}

static inline const int32_t *key_seqlens(const struct pass *p)
{
    return p->segment ? p->segment->cu_keys : p->cu_seqlens;
}

static inline const int32_t *position_seqlens(const struct pass *p)
{
    return p->segment ? p->segment->cu_positions : p->cu_seqlens;
}

#endif
