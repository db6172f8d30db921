/* data_megatron.c - the documents of a Megatron indexed dataset: PREFIX.idx beside PREFIX.bin
 *
 * The index: 9 bytes of magic, version u64, dtype u8, number of sequences u64, number of entries of
 * the document table u64; then i32 lengths and i64 byte offsets of the sequences, and the i64
 * numbers of the sequences at which documents begin, from 0 to all. A dataset of several modes has
 * a byte for each sequence behind them. The sequences of a document lie one after another. */
#include "common/data_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/mem.h"

#define MAGIC_BYTES 9
#define HEADER_BYTES (MAGIC_BYTES + 8 + 1 + 8 + 8)

/* By the code in the index, which begins at 1; two are not used. */
static const enum data_dtype dtypes[] = {
    DTYPES, DTYPE_U8, DTYPE_I8, DTYPE_I16, DTYPE_I32, DTYPE_I64, DTYPE_F64, DTYPE_F32, DTYPE_U16,
};

struct megatron_index {
    struct data_file file;
    uint64_t n_sequences, n_bounds;
    const uint8_t *lengths, *offsets, *bounds;
    enum data_dtype dtype;
};

static uint64_t u64_at(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static uint32_t u32_at(const uint8_t *p)
{
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static int read_header(struct megatron_index *x, struct err *err)
{
    const uint8_t *p = x->file.bytes;
    const char *path = x->file.path;
    if (x->file.n_bytes < HEADER_BYTES || memcmp(p, "MMIDIDX\0\0", MAGIC_BYTES) != 0)
        return err_set(err, -EINVAL, "%s: no Megatron index: it does not begin with MMIDIDX", path);
    p += MAGIC_BYTES;
    if (u64_at(p) != 1)
        return err_set(err, -EINVAL, "%s: version %llu at offset 9, expected 1", path,
                       (unsigned long long)u64_at(p));
    uint8_t code = p[8];
    if (code == 0 || code >= sizeof dtypes / sizeof *dtypes)
        return err_set(err, -EINVAL, "%s: dtype code %u at offset 17, expected 1 to 8", path, code);
    x->dtype = dtypes[code];
    x->n_sequences = u64_at(p + 9);
    x->n_bounds = u64_at(p + 17);
    return 0;
}

/* The tables, and that the file holds them to the byte. */
static int read_tables(struct megatron_index *x, struct err *err)
{
    uint64_t left = x->file.n_bytes - HEADER_BYTES, n = x->n_sequences, m = x->n_bounds;
    bool fits = n <= left / 12 && m <= (left - 12 * n) / 8;
    uint64_t rest = fits ? left - 12 * n - 8 * m : 0;
    if (!fits || m == 0 || (rest != 0 && rest != n))
        return err_set(err, -EINVAL, "%s: %llu sequences and %llu document bounds need %u + 12 x "
                       "sequences + 8 x bounds bytes, but the file has %zu; is it cut short?",
                       x->file.path, (unsigned long long)n, (unsigned long long)m, HEADER_BYTES,
                       x->file.n_bytes);
    x->lengths = x->file.bytes + HEADER_BYTES;
    x->offsets = x->lengths + 4 * n;
    x->bounds = x->offsets + 8 * n;
    if (u64_at(x->bounds) != 0 || u64_at(x->bounds + 8 * (m - 1)) != n)
        return err_set(err, -EINVAL, "%s: documents begin at sequence %llu and end at %llu, "
                       "expected 0 and %llu", x->file.path,
                       (unsigned long long)u64_at(x->bounds),
                       (unsigned long long)u64_at(x->bounds + 8 * (m - 1)), (unsigned long long)n);
    return 0;
}

/* Sequence i, which must lie in the .bin and, inside a document, at the end of the one before. */
static int check_sequence(const struct megatron_index *x, const struct data_file *bin, uint64_t i,
                          uint64_t expected, bool is_first, struct err *err)
{
    uint32_t n = u32_at(x->lengths + 4 * i), bytes = data_dtype_bytes(x->dtype);
    uint64_t at = u64_at(x->offsets + 8 * i);
    if (n > INT32_MAX)
        return err_set(err, -EINVAL, "%s: sequence %llu has a negative length", x->file.path,
                       (unsigned long long)i);
    if (at > bin->n_bytes || (uint64_t)n * bytes > bin->n_bytes - at)
        return err_set(err, -EINVAL, "%s: sequence %llu is %u tokens of %u bytes at byte %llu, but "
                       "%s has %zu bytes", x->file.path, (unsigned long long)i, n, bytes,
                       (unsigned long long)at, bin->path, bin->n_bytes);
    if (!is_first && at != expected)
        return err_set(err, -EINVAL, "%s: sequence %llu begins at byte %llu, expected %llu, where "
                       "the one before it in the same document ends", x->file.path,
                       (unsigned long long)i, (unsigned long long)at,
                       (unsigned long long)expected);
    return 0;
}

static int add_document(struct data *d, const struct megatron_index *x, uint64_t k, struct err *err)
{
    const struct data_file *bin = &d->files[d->n_files - 1];
    uint64_t first = u64_at(x->bounds + 8 * k), last = u64_at(x->bounds + 8 * (k + 1));
    uint64_t n_tokens = 0, at = 0;
    if (first > last || last > x->n_sequences)
        return err_set(err, -EINVAL, "%s: document %llu is sequences %llu to %llu, expected an "
                       "ascending range below %llu", x->file.path, (unsigned long long)k,
                       (unsigned long long)first, (unsigned long long)last,
                       (unsigned long long)x->n_sequences);
    for (uint64_t i = first; i < last; i++) {
        uint64_t expected = at + n_tokens * data_dtype_bytes(x->dtype);
        int rc = check_sequence(x, bin, i, expected, i == first, err);
        if (rc < 0)
            return rc;
        if (i == first)
            at = u64_at(x->offsets + 8 * i);
        n_tokens += u32_at(x->lengths + 4 * i);
    }
    data_add_doc(d, k, at, n_tokens);
    return 0;
}

int data_megatron_open(struct data *d, const char *path, const char *what, struct err *err)
{
    struct data_file *bin = &d->files[d->n_files - 1];
    struct megatron_index x = {.file.path = xstrdup(path)};
    int rc = data_file_map(&x.file, what, err);
    bin->path = xasprintf("%.*s.bin", (int)(strlen(path) - strlen(".idx")), path);
    if (rc == 0 && (rc = read_header(&x, err)) == 0 && (rc = read_tables(&x, err)) == 0)
        rc = data_file_map(bin, what, err);
    bin->dtype = x.dtype;
    for (uint64_t k = 0; rc == 0 && k + 1 < x.n_bounds; k++)
        rc = add_document(d, &x, k, err);
    if (x.file.bytes)
        munmap((void *)x.file.bytes, x.file.n_bytes);
    free(x.file.path);
    return rc;
}
