/* segments.c - cuts a batch where documents end, or in pieces */
#include "worker/segments.h"

#include <stdlib.h>

#include "common/mem.h"

static int64_t count_pieces(const int32_t *cu_seqlens, int32_t n_docs, int64_t rows_max)
{
    int64_t n = 0;
    for (int32_t doc = 0; doc < n_docs; doc++)
        n += (cu_seqlens[doc + 1] - cu_seqlens[doc] + rows_max - 1) / rows_max;
    return n;
}

/* Pieces of document doc; at is where their numbers go, and what comes after them is given. */
static int32_t *add_pieces(struct segments *s, const int32_t *cu_seqlens, int32_t doc,
                           int64_t rows_max, int32_t *at)
{
    int64_t begin = cu_seqlens[doc], end = cu_seqlens[doc + 1];
    for (int64_t row = begin; row < end; row += rows_max) {
        int64_t n = end - row < rows_max ? end - row : rows_max;
        s->all[s->n++] = (struct segment){
            .begin = row, .n = n, .before = row - begin, .goes_on = row + n < end,
            .link = s->n_links, .cu_seqlens = at, .cu_keys = at + 2, .n_docs = 1,
        };
        s->n_links += row + n < end;
        at[1] = (int32_t)n;
        at[3] = (int32_t)(row - begin + n);
        at += 4;
    }
    return at;
}

/* Documents from doc on, as many as fit; gives the one after them. */
static int32_t add_documents(struct segments *s, const int32_t *cu_seqlens, int32_t n_docs,
                             int32_t doc, int64_t rows_max, int32_t *at)
{
    int32_t begin = cu_seqlens[doc], last = doc;
    while (last < n_docs && cu_seqlens[last + 1] - begin <= rows_max)
        last++;
    s->all[s->n++] = (struct segment){
        .begin = begin, .n = cu_seqlens[last] - begin, .cu_seqlens = at, .n_docs = last - doc,
    };
    for (int32_t i = doc; i <= last; i++)
        at[i - doc] = cu_seqlens[i] - begin;
    return last;
}

void segments_init(struct segments *s, const int32_t *cu_seqlens, int32_t n_docs, int64_t rows_max)
{
    size_t n = (size_t)count_pieces(cu_seqlens, n_docs, rows_max);
    *s = (struct segments){0};
    s->all = xcalloc(n, sizeof *s->all);
    s->rows = xcalloc(4 * n, sizeof *s->rows);
    int32_t *at = s->rows;
    for (int32_t doc = 0; doc < n_docs;) {
        if (cu_seqlens[doc + 1] - cu_seqlens[doc] > rows_max) {
            at = add_pieces(s, cu_seqlens, doc++, rows_max, at);
        } else {
            int32_t next = add_documents(s, cu_seqlens, n_docs, doc, rows_max, at);
            at += next - doc + 1;
            doc = next;
        }
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
    out.before = s->before;
    out.goes_on = s->goes_on;
    out.cu_keys = s->before ? s->cu_keys : s->cu_seqlens;
    out.segments = NULL;
    if (p->rotary)
        out.rotary = p->rotary + s->before * p->spec->rotary.dim;
    return out;
}
