/* segments.c - cuts a batch into runs of rows, and its documents with them */
#include "worker/segments.h"

#include <stdlib.h>

#include "common/mem.h"

/* Documents first .. and on that have rows of the segment; gives how many. */
static int32_t count_documents(const struct segment *g, const int32_t *cu_seqlens, int32_t n_docs,
                               int32_t first)
{
    int32_t last = first;
    while (last < n_docs && cu_seqlens[last] < g->begin + g->n)
        last++;
    return g->n ? last - first : 0;
}

/* Fills in the three arrays at `at`. */
static void cut_documents(struct segment *g, const int32_t *cu_seqlens, int32_t first, int32_t *at)
{
    int32_t *keys = at + g->n_docs + 1, *positions = keys + g->n_docs + 1;
    int64_t end = g->begin + g->n;

    g->cu_seqlens = at;
    g->cu_keys = keys;
    g->cu_positions = positions;
    for (int32_t i = 1; i <= g->n_docs; i++) {
        int64_t row = cu_seqlens[first + i] < end ? cu_seqlens[first + i] : end;
        at[i] = positions[i] = (int32_t)(row - g->begin);
        keys[i] = at[i] + (int32_t)g->before;
    }
    positions[0] = -(int32_t)g->before;
}

void segments_init(struct segments *s, const int32_t *cu_seqlens, int32_t n_docs, int64_t n_rows,
                   int32_t n_least)
{
    int64_t n = n_docs ? cu_seqlens[n_docs] : 0, doc = 0;
    int32_t n_segments = (int32_t)((n + n_rows - 1) / n_rows);

    n_segments = n_segments < n_least ? n_least : n_segments;
    *s = (struct segments){.n = n_segments};
    s->all = xcalloc((size_t)n_segments, sizeof *s->all);
    s->rows = xcalloc(3 * ((size_t)n_docs + 2 * (size_t)n_segments), sizeof *s->rows);
    int32_t *at = s->rows;
    for (int32_t i = 0; i < n_segments; i++) {
        struct segment *g = &s->all[i];
        int64_t begin = i * n_rows < n ? i * n_rows : n;
        int64_t end = begin + n_rows < n ? begin + n_rows : n;
        while (doc < n_docs && cu_seqlens[doc + 1] <= begin)
            doc++;
        *g = (struct segment){.index = i, .begin = begin, .n = end - begin};
        g->n_docs = count_documents(g, cu_seqlens, n_docs, (int32_t)doc);
        if (g->n_docs) {
            g->before = begin - cu_seqlens[doc];
            g->goes_on = cu_seqlens[doc + g->n_docs] > end;
        }
        cut_documents(g, cu_seqlens, (int32_t)doc, at);
        at += 3 * (g->n_docs + 1);
    }
}

void segments_fini(struct segments *s)
{
    free(s->all);
    free(s->rows);
    *s = (struct segments){0};
}

struct pass segment_pass(const struct pass *p, const struct segment *s)
{
    struct pass out = *p;
    out.n = s->n;
    out.cu_seqlens = s->cu_seqlens;
    out.n_docs = s->n_docs;
    out.segment = s;
    out.segments = NULL;
    return out;
}
