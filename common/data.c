/* data.c - documents as windows, and the order in which a run sees them
 *
 * The order is a keyed permutation worked out per index, so there is no shuffled list to keep, to
 * agree on or to resume. */
#include "common/data.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/data_parts.h"
#include "common/mem.h"
#include "common/mix.h"
#include "common/progress.h"

int data_format_parse(const char *word, enum data_format *out, struct err *err)
{
    static const char *const words[] = {
        [DATA_BYTES] = "bytes", [DATA_U16] = "u16", [DATA_U32] = "u32",
        [DATA_MEGATRON] = "megatron", [DATA_JSONL] = "jsonl",
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i]) == 0) {
            *out = (enum data_format)i;
            return 0;
        }
    return err_set(err, -EINVAL, "data.format '%s': unknown, use one of bytes, u16, u32, megatron, "
                   "jsonl", word);
}

/* ---- opening -------------------------------------------------------------------------------- */

/* How many inputs the documents of a window's row have; the last token is only a label. */
static uint64_t n_inputs(const struct data_doc *doc)
{
    return doc->n_tokens - 1;
}

static bool packs_whole(const struct data *d)
{
    return d->pack && d->format == DATA_JSONL;
}

/* Whole documents, in order, as many as fit in a row; of a longer one, pieces. */
static void count_rows(struct data *d)
{
    uint64_t room = 0, cap = 0;
    for (size_t i = 0; i < d->n_docs; i++) {
        uint64_t n = n_inputs(&d->docs[i]);
        for (uint64_t from = 0, piece; from < n; from += piece) {
            piece = n - from < d->length ? n - from : d->length;
            if (piece > room) {
                if (d->n_windows + 2 > cap)
                    d->rows = xrealloc(d->rows, (cap = 2 * d->n_windows + 16) * sizeof *d->rows);
                d->rows[d->n_windows++] = (struct data_row){i, from};
                room = d->length;
            }
            room -= piece;
        }
    }
    if (d->n_windows > 0)
        d->rows[d->n_windows] = (struct data_row){d->n_docs, 0};
}

static int count_windows(struct data *d, const char *what, struct err *err)
{
    uint64_t n_tokens = 0;
    for (size_t i = 0; i < d->n_docs; i++) {
        struct data_doc *doc = &d->docs[i];
        doc->first = d->pack ? n_tokens : d->n_windows;
        n_tokens += doc->n_tokens;
        if (!d->pack)
            d->n_windows += (n_inputs(doc) + d->length - 1) / d->length;
    }
    if (packs_whole(d))
        count_rows(d);
    else if (d->pack && n_tokens > 0)
        d->n_windows = (n_tokens - 1) / d->length;
    if (d->n_windows > 0)
        return 0;
    return err_set(err, -EINVAL, "%s: %llu tokens are too few: one sequence needs %u", what,
                   (unsigned long long)d->n_tokens,
                   d->pack && !packs_whole(d) ? d->length + 1 : 2);
}

int data_open(const struct data_config *c, struct data **out, struct err *err)
{
    struct data *d = xcalloc(1, sizeof *d);
    int rc;
    *d = (struct data){.seed = c->seed, .length = c->sequence_length, .vocab = c->vocab,
                       .format = c->format, .pack = c->pack,
                       .lines_bytes_max = c->lines_bytes_max ? c->lines_bytes_max : UINT64_MAX};
    assert(c->sequence_length > 0);
    if ((rc = data_files_open(d, c, err)) == 0)
        rc = count_windows(d, c->what, err);
    if (rc < 0) {
        data_close(d);
        return rc;
    }
    *out = d;
    return 0;
}

void data_close(struct data *d)
{
    if (!d)
        return;
    for (size_t i = 0; i < d->n_files; i++) {
        if (d->files[i].bytes)
            munmap((void *)d->files[i].bytes, d->files[i].n_bytes);
        free(d->files[i].path);
    }
    free(d->files);
    free(d->docs);
    free(d->rows);
    free(d);
}

uint64_t data_windows(const struct data *d)
{
    return d->n_windows;
}

struct data_counts data_count(const struct data *d)
{
    struct data_counts n = {.n_files = d->n_files, .n_documents = d->n_docs,
                            .n_tokens = d->n_tokens, .n_windows = d->n_windows,
                            .n_labels = d->n_labels};
    for (size_t i = 0; i < d->n_files; i++)
        n.n_bytes += d->files[i].n_bytes;
    n.n_read = d->format == DATA_JSONL ? d->n_read : n.n_bytes;
    return n;
}

const char *data_file(const struct data *d, uint64_t i)
{
    return d->files[i].path;
}

/* ---- batches -------------------------------------------------------------------------------- */

void data_batch_clear(struct data_batch *b)
{
    b->n_tokens = b->n_labels = 0;
    b->n_docs = 0;
}

void data_batch_fini(struct data_batch *b)
{
    free(b->tokens);
    free(b->labels);
    free(b->cu_seqlens);
    *b = (struct data_batch){0};
}

static void reserve(struct data_batch *b, size_t n_tokens, size_t n_docs)
{
    if (n_tokens > b->n_tokens_alloc) {
        b->n_tokens_alloc = n_tokens + n_tokens / 2;
        b->tokens = xrealloc(b->tokens, b->n_tokens_alloc * sizeof *b->tokens);
        b->labels = xrealloc(b->labels, b->n_tokens_alloc * sizeof *b->labels);
    }
    if (n_docs + 1 > b->n_docs_alloc) {
        b->n_docs_alloc = n_docs + n_docs / 2 + 2;
        b->cu_seqlens = xrealloc(b->cu_seqlens, b->n_docs_alloc * sizeof *b->cu_seqlens);
        b->cu_seqlens[0] = 0;
    }
}

void data_batch_reserve(struct data_batch *b, int64_t n_tokens)
{
    reserve(b, (size_t)n_tokens + 1, (size_t)n_tokens); /* and the label that follows the last */
}

/* n inputs of a document from token on: one document of the batch. Its last label is the next
 * token's, if there is one. */
static int add_document(const struct data *d, const struct data_doc *doc, uint64_t from, uint64_t n,
                        void *batch, struct err *err)
{
    struct data_batch *b = batch;
    uint64_t n_seen = from + n < doc->n_tokens ? n + 1 : n;
    reserve(b, (size_t)b->n_tokens + n_seen, (size_t)b->n_docs + 1);
    int32_t *tokens = b->tokens + b->n_tokens, *labels = b->labels + b->n_tokens;
    int rc = d->format == DATA_JSONL
                 ? data_jsonl_read(d, doc, from, n_seen, tokens, labels, err)
                 : data_tokens_read(d, doc, from, n_seen, tokens, labels, err);
    if (rc < 0)
        return rc;
    memmove(labels, labels + 1, (n_seen - 1) * sizeof *labels); /* each token's is the next one */
    if (n_seen == n)
        labels[n - 1] = -1;
    for (uint64_t i = 0; i < n; i++)
        b->n_labels += labels[i] >= 0;
    b->n_tokens += (int64_t)n;
    b->cu_seqlens[++b->n_docs] = (int32_t)b->n_tokens;
    return 0;
}

/* ---- windows -------------------------------------------------------------------------------- */

/* What becomes of n inputs of a document from a token on, which are one document of a window. */
typedef int take(const struct data *d, const struct data_doc *doc, uint64_t from, uint64_t n,
                 void *to, struct err *err);

/* The last document that does not begin beyond at. */
static size_t find_doc(const struct data *d, uint64_t at)
{
    size_t low = 0, high = d->n_docs;
    while (high - low > 1) {
        size_t mid = (low + high) / 2;
        if (d->docs[mid].first <= at)
            low = mid;
        else
            high = mid;
    }
    return low;
}

static int take_row(const struct data *d, const struct data_row *row, take *f, void *to,
                    struct err *err)
{
    struct data_row at = row[0], end = row[1];
    int rc = 0;
    while (rc == 0 && (at.doc < end.doc || at.from < end.from)) {
        const struct data_doc *doc = &d->docs[at.doc];
        uint64_t left = n_inputs(doc) - at.from, n = left < d->length ? left : d->length;
        if (n > 0)
            rc = f(d, doc, at.from, n, to, err);
        at = n < left ? (struct data_row){at.doc, at.from + n} : (struct data_row){at.doc + 1, 0};
    }
    return rc;
}

/* A stretch of the row of all documents. */
static int take_stretch(const struct data *d, uint64_t first, take *f, void *to, struct err *err)
{
    const struct data_doc *doc = &d->docs[find_doc(d, first)];
    uint64_t from = first - doc->first;
    int rc = 0;
    for (uint64_t n = d->length; n > 0 && rc == 0; from = 0, doc++) {
        uint64_t here = doc->n_tokens - from < n ? doc->n_tokens - from : n;
        rc = f(d, doc, from, here, to, err);
        n -= here;
    }
    return rc;
}

static int take_window(const struct data *d, uint64_t index, take *f, void *to, struct err *err)
{
    assert(index < d->n_windows);
    if (packs_whole(d))
        return take_row(d, &d->rows[index], f, to, err);
    if (d->pack)
        return take_stretch(d, index * d->length, f, to, err);
    const struct data_doc *doc = &d->docs[find_doc(d, index)];
    uint64_t from = (index - doc->first) * d->length, left = n_inputs(doc) - from;
    return f(d, doc, from, left < d->length ? left : d->length, to, err);
}

int data_window(const struct data *d, uint64_t index, struct data_batch *b, struct err *err)
{
    progress_made(); /* a line of a file may be long, and is parsed for each of its windows */
    return take_window(d, index, add_document, b, err);
}

struct pieces {
    struct data_piece *all;
    size_t n;
};

static int add_piece(const struct data *d, const struct data_doc *doc, uint64_t from, uint64_t n,
                     void *to, struct err *err)
{
    struct pieces *p = to;
    const struct data_file *f = &d->files[doc->file];
    uint64_t bytes = d->format == DATA_JSONL ? 0 : from * data_dtype_bytes(f->dtype);
    (void)err;
    p->all = xrealloc(p->all, (p->n + 1) * sizeof *p->all);
    p->all[p->n++] = (struct data_piece){.path = f->path, .number = doc->number,
                                         .at = doc->at + bytes, .first = from, .n_tokens = n};
    return 0;
}

size_t data_pieces(const struct data *d, uint64_t window, struct data_piece **out)
{
    struct pieces p = {0};
    take_window(d, window, add_piece, &p, NULL);
    *out = p.all;
    return p.n;
}

/* ---- the order ------------------------------------------------------------------------------ */

/* A Feistel network permutes the numbers below a power of four; those at n or above are sent
 * through again until they fall below n, which keeps it a permutation. */
static uint64_t permute(uint64_t i, uint64_t n, uint64_t key)
{
    uint32_t half_bits = 1;
    while (half_bits < 32 && (1ull << 2 * half_bits) < n)
        half_bits++;
    uint64_t mask = (1ull << half_bits) - 1;
    do {
        uint64_t left = i >> half_bits, right = i & mask;
        for (uint64_t round = 0; round < 6; round++) {
            uint64_t mixed = mix_word(right + mix_word(key + round * 0x9e3779b97f4a7c15u));
            uint64_t next = left ^ (mixed & mask);
            left = right;
            right = next;
        }
        i = left << half_bits | right;
    } while (i >= n);
    return i;
}

uint64_t data_order(const struct data *d, uint64_t index)
{
    uint64_t epoch = index / d->n_windows;
    return permute(index % d->n_windows, d->n_windows, mix_word(d->seed) + mix_word(~epoch));
}

int data_sample(const struct data *d, uint64_t index, struct data_batch *b, struct err *err)
{
    return data_window(d, data_order(d, index), b, err);
}
