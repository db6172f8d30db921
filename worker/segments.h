/* segments.h - a long batch in segments, which layers take one after the other
 *
 * So what a layer holds at once is of one segment, whatever the batch's length. A segment is a run
 * of whole documents, or a piece of one that is longer. Pieces begin at multiples of their greatest
 * length, so that blocks of tokens inside of ops lie as they would without. */
#ifndef WORKER_SEGMENTS_H
#define WORKER_SEGMENTS_H

#include "worker/layer.h"

struct segment {
    int64_t begin, n;          /* its rows */
    int64_t before;            /* rows of its document in earlier pieces */
    bool    goes_on;           /* and there are later ones */
    int32_t link;              /* among those that go on */
    const int32_t *cu_seqlens; /* of its rows, n_docs + 1 */
    const int32_t *cu_keys;    /* of a piece: 0, before + n */
    int32_t n_docs;
};

struct segments {
    struct segment *all;
    int32_t  n, n_links;
    int32_t *rows; /* what the segments' cu_seqlens point into */
};

/* Cuts so that none has more than rows_max rows. Ended with segments_fini. */
void segments_init(struct segments *s, const int32_t *cu_seqlens, int32_t n_docs,
                   int64_t rows_max);
void segments_fini(struct segments *s);

/* The pass of a segment alone. */
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

#endif
