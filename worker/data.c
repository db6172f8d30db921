/* data.c - token files as windows, and the order in which a run sees them
 *
 * The order is a keyed permutation worked out per index, so there is no shuffled list to keep, to
 * agree on or to resume. */
#include "worker/data.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"

struct data_file {
    char    *path;
    const uint8_t *bytes;
    size_t   n_bytes;
    uint64_t first_token;  /* in the row of all files */
    uint64_t n_tokens;
    uint64_t first_window; /* where windows stay inside files */
};

struct data {
    struct data_file *files;
    size_t   n_files;
    uint64_t n_tokens, n_windows, seed;
    uint32_t length, vocab;
    enum data_format format;
    bool     pack;
};

int data_format_parse(const char *word, enum data_format *out, struct err *err)
{
    static const char *const words[] = {
        [DATA_BYTES] = "bytes", [DATA_U16] = "u16", [DATA_U32] = "u32",
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i]) == 0) {
            *out = (enum data_format)i;
            return 0;
        }
    return err_set(err, -ENOTSUP, "data.format '%s': this version reads bytes, u16 and u32", word);
}

static size_t token_bytes(const struct data *d)
{
    return d->format == DATA_BYTES ? 1 : d->format == DATA_U16 ? 2 : 4;
}

/* ---- opening -------------------------------------------------------------------------------- */

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct data_file *)a)->path, ((const struct data_file *)b)->path);
}

static int expand(struct data *d, const struct data_config *c, struct err *err)
{
    for (size_t i = 0; i < c->n_patterns; i++) {
        glob_t found;
        int rc = glob(c->patterns[i], 0, NULL, &found);
        if (rc != 0) {
            globfree(&found);
            return rc == GLOB_NOMATCH
                       ? err_set(err, -ENOENT, "%s: no file matches '%s'", c->what, c->patterns[i])
                       : err_set(err, -EIO, "%s: '%s' cannot be searched", c->what,
                                 c->patterns[i]);
        }
        d->files = xrealloc(d->files, (d->n_files + found.gl_pathc) * sizeof *d->files);
        for (size_t k = 0; k < found.gl_pathc; k++)
            d->files[d->n_files++] = (struct data_file){.path = xstrdup(found.gl_pathv[k])};
        globfree(&found);
    }
    /* Sorted and without repetition, so that the order of patterns does not matter. */
    qsort(d->files, d->n_files, sizeof *d->files, by_path);
    size_t n = 0;
    for (size_t i = 0; i < d->n_files; i++) {
        if (n > 0 && strcmp(d->files[n - 1].path, d->files[i].path) == 0)
            free(d->files[i].path);
        else
            d->files[n++] = d->files[i];
    }
    d->n_files = n;
    return n > 0 ? 0 : err_set(err, -ENOENT, "%s: names no file", c->what);
}

static int map_file(const struct data *d, struct data_file *f, const char *what, struct err *err)
{
    struct stat st;
    int rc = 0, fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO would hang */
    if (fd < 0 || fstat(fd, &st) < 0)
        rc = err_set(err, -errno, "%s: %s: %s", what, f->path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = err_set(err, -EINVAL, "%s: %s: not a regular file", what, f->path);
    else if (st.st_size == 0)
        rc = err_set(err, -EINVAL, "%s: %s: empty", what, f->path);
    else if ((size_t)st.st_size % token_bytes(d) != 0)
        rc = err_set(err, -EINVAL, "%s: %s: %lld bytes are no whole number of %zu-byte tokens",
                     what, f->path, (long long)st.st_size, token_bytes(d));
    if (rc == 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            rc = err_set(err, -errno, "%s: %s: %s", what, f->path, strerror(errno));
        } else {
            f->bytes = p;
            f->n_bytes = (size_t)st.st_size;
            f->n_tokens = f->n_bytes / token_bytes(d);
        }
    }
    if (fd >= 0)
        close(fd);
    return rc;
}

static int count_windows(struct data *d, const char *what, struct err *err)
{
    for (size_t i = 0; i < d->n_files; i++) {
        struct data_file *f = &d->files[i];
        f->first_token = d->n_tokens;
        f->first_window = d->n_windows;
        d->n_tokens += f->n_tokens;
        if (!d->pack)
            d->n_windows += (f->n_tokens - 1 + d->length - 1) / d->length;
    }
    if (d->pack)
        d->n_windows = (d->n_tokens - 1) / d->length;
    if (d->n_windows > 0)
        return 0;
    return err_set(err, -EINVAL, "%s: %llu tokens are too few: one sequence needs %u", what,
                   (unsigned long long)d->n_tokens, d->pack ? d->length + 1 : 2);
}

int data_open(const struct data_config *c, struct data **out, struct err *err)
{
    struct data *d = xcalloc(1, sizeof *d);
    int rc;
    *d = (struct data){.seed = c->seed, .length = c->sequence_length, .vocab = c->vocab,
                       .format = c->format, .pack = c->pack};
    assert(c->sequence_length > 0);
    rc = expand(d, c, err);
    for (size_t i = 0; i < d->n_files && rc == 0; i++)
        rc = map_file(d, &d->files[i], c->what, err);
    if (rc == 0)
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
    free(d);
}

uint64_t data_tokens(const struct data *d)
{
    return d->n_tokens;
}

uint64_t data_windows(const struct data *d)
{
    return d->n_windows;
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

static uint32_t token_at(const struct data *d, const struct data_file *f, uint64_t i)
{
    uint16_t half;
    uint32_t word;
    switch (d->format) { /* little-endian files on little-endian machines */
    case DATA_BYTES:
        return f->bytes[i];
    case DATA_U16:
        memcpy(&half, f->bytes + 2 * i, sizeof half);
        return half;
    case DATA_U32:
        break;
    }
    memcpy(&word, f->bytes + 4 * i, sizeof word);
    return word;
}

/* n inputs of f from token on: one document. Its last label is the next token, if f has one. */
static int add_document(const struct data *d, const struct data_file *f, uint64_t from, uint64_t n,
                        struct data_batch *b, struct err *err)
{
    reserve(b, (size_t)b->n_tokens + n, (size_t)b->n_docs + 1);
    int32_t *tokens = b->tokens + b->n_tokens, *labels = b->labels + b->n_tokens;
    uint64_t n_seen = from + n < f->n_tokens ? n + 1 : n;
    for (uint64_t i = 0; i < n_seen; i++) {
        uint32_t token = token_at(d, f, from + i);
        if (token >= d->vocab)
            return err_set(err, -EINVAL, "%s: token %u at offset %llu is outside the model's "
                           "vocabulary of %u", f->path, token,
                           (unsigned long long)((from + i) * token_bytes(d)), d->vocab);
        if (i < n)
            tokens[i] = (int32_t)token;
        if (i > 0)
            labels[i - 1] = (int32_t)token;
    }
    if (n_seen == n)
        labels[n - 1] = -1;
    b->n_tokens += (int64_t)n;
    b->n_labels += (int64_t)n_seen - 1;
    b->cu_seqlens[++b->n_docs] = (int32_t)b->n_tokens;
    return 0;
}

/* The last file whose first token (or window) is not beyond at. */
static size_t find_file(const struct data *d, uint64_t at, bool by_window)
{
    size_t low = 0, high = d->n_files;
    while (high - low > 1) {
        size_t mid = (low + high) / 2;
        uint64_t first = by_window ? d->files[mid].first_window : d->files[mid].first_token;
        if (first <= at)
            low = mid;
        else
            high = mid;
    }
    return low;
}

int data_window(const struct data *d, uint64_t index, struct data_batch *b, struct err *err)
{
    assert(index < d->n_windows);
    size_t i = find_file(d, d->pack ? index * d->length : index, !d->pack);
    const struct data_file *f = &d->files[i];
    if (!d->pack) {
        uint64_t from = (index - f->first_window) * d->length, left = f->n_tokens - 1 - from;
        return add_document(d, f, from, left < d->length ? left : d->length, b, err);
    }
    uint64_t from = index * d->length - f->first_token;
    for (uint64_t n = d->length; n > 0; from = 0, f++) {
        uint64_t here = f->n_tokens - from < n ? f->n_tokens - from : n;
        int rc = add_document(d, f, from, here, b, err);
        if (rc < 0)
            return rc;
        n -= here;
    }
    return 0;
}

/* ---- the order ------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

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
            uint64_t next = left ^ (mix(right + mix(key + round * 0x9e3779b97f4a7c15u)) & mask);
            left = right;
            right = next;
        }
        i = left << half_bits | right;
    } while (i >= n);
    return i;
}

int data_sample(const struct data *d, uint64_t index, struct data_batch *b, struct err *err)
{
    uint64_t epoch = index / d->n_windows;
    uint64_t window = permute(index % d->n_windows, d->n_windows, mix(d->seed) + mix(~epoch));
    return data_window(d, window, b, err);
}
