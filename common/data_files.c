/* data_files.c - the files that a job names: found, mapped, and their raw tokens read */
#include "common/data_parts.h"

#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file.h"
#include "common/mem.h"

/* ---- which ---------------------------------------------------------------------------------- */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* A Megatron prefix stands for its index. */
static int expand_pattern(const struct data *d, const char *pattern, const char *what,
                          char ***paths, size_t *n, struct err *err)
{
    glob_t found;
    char *full = xasprintf("%s%s", pattern, d->format == DATA_MEGATRON ? ".idx" : "");
    int rc = glob(full, 0, NULL, &found);
    if (rc == 0) {
        *paths = xrealloc(*paths, (*n + found.gl_pathc) * sizeof **paths);
        for (size_t k = 0; k < found.gl_pathc; k++)
            (*paths)[(*n)++] = xstrdup(found.gl_pathv[k]);
    } else if (rc == GLOB_NOMATCH) {
        rc = err_set(err, -ENOENT, "%s: no file matches '%s'", what, full);
    } else {
        rc = err_set(err, -EIO, "%s: '%s' cannot be searched", what, full);
    }
    globfree(&found);
    free(full);
    return rc;
}

/* ---- raw tokens ----------------------------------------------------------------------------- */

int data_file_map(struct data_file *f, const char *what, struct err *err)
{
    struct stat st;
    int rc = 0, fd = file_open(f->path, &st, err);
    if (fd < 0)
        return err_prefix(err, "%s", what);
    if (st.st_size == 0)
        rc = err_set(err, -EINVAL, "%s: %s: empty", what, f->path);
    if (rc == 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            rc = err_set(err, -errno, "%s: %s: %s", what, f->path, strerror(errno));
        } else {
            f->bytes = p;
            f->n_bytes = (size_t)st.st_size;
        }
    }
    close(fd);
    return rc;
}

/* Counts in double hold every token that a vocabulary can have, and fractions show. */
static double token_at(enum data_dtype t, const uint8_t *p)
{
    union { int8_t i8; int16_t i16; uint16_t u16; int32_t i32; uint32_t u32; int64_t i64; float f32;
            double f64; } x = {0};
    memcpy(&x, p, data_dtype_bytes(t)); /* little-endian files on little-endian machines */
    switch (t) {
    case DTYPE_U8:  return *p;
    case DTYPE_I8:  return x.i8;
    case DTYPE_I16: return x.i16;
    case DTYPE_U16: return x.u16;
    case DTYPE_I32: return x.i32;
    case DTYPE_U32: return x.u32;
    case DTYPE_I64: return (double)x.i64;
    case DTYPE_F32: return (double)x.f32;
    case DTYPE_F64: return x.f64;
    case DTYPES:    break;
    }
    return -1;
}

int data_tokens_read(const struct data *d, const struct data_doc *doc, uint64_t from, uint64_t n,
                     int32_t *out_tokens, int32_t *out_targets, struct err *err)
{
    const struct data_file *f = &d->files[doc->file];
    uint64_t at = doc->at + from * data_dtype_bytes(f->dtype);
    for (uint64_t i = 0; i < n; i++, at += data_dtype_bytes(f->dtype)) {
        double token = token_at(f->dtype, f->bytes + at);
        if (!(token >= 0 && token < d->vocab))
            return err_set(err, -EINVAL, "%s: token %.17g at offset %llu is outside the model's "
                           "vocabulary of %u", f->path, token, (unsigned long long)at, d->vocab);
        if (token != (double)(int32_t)token)
            return err_set(err, -EINVAL, "%s: token %.17g at offset %llu is no whole number",
                           f->path, token, (unsigned long long)at);
        out_targets[i] = out_tokens[i] = (int32_t)token;
    }
    return 0;
}

/* Whether every value that a file of this kind can hold is a token. */
static bool holds_tokens_alone(const struct data *d, const struct data_file *f)
{
    return (f->dtype == DTYPE_U8 && d->vocab >= 1u << 8) ||
           (f->dtype == DTYPE_U16 && d->vocab >= 1u << 16);
}

/* Of a document, at most *left bytes, of which what was looked at is taken away. */
static int check_document(const struct data *d, const struct data_doc *doc, uint64_t *left,
                          struct err *err)
{
    int32_t tokens[1024], targets[1024];
    uint32_t bytes = data_dtype_bytes(d->files[doc->file].dtype);
    for (uint64_t from = 0, n; from < doc->n_tokens && *left >= bytes; from += n) {
        n = *left / bytes < 1024 ? *left / bytes : 1024;
        n = doc->n_tokens - from < n ? doc->n_tokens - from : n;
        int rc = data_tokens_read(d, doc, from, n, tokens, targets, err);
        if (rc < 0)
            return rc;
        *left -= n * bytes;
    }
    return 0;
}

int data_check(const struct data *d, uint64_t bytes_max, uint64_t *out_bytes, struct err *err)
{
    struct data_counts all = data_count(d);
    double share = all.n_bytes > bytes_max ? (double)bytes_max / (double)all.n_bytes : 1;
    uint64_t left = 0, n_looked = d->format == DATA_JSONL ? all.n_bytes : 0;
    for (size_t i = 0, file = SIZE_MAX; i < d->n_docs && d->format != DATA_JSONL; i++) {
        const struct data_file *f = &d->files[d->docs[i].file];
        if (d->docs[i].file != file) {
            file = d->docs[i].file;
            left = (uint64_t)(share * (double)f->n_bytes) + sizeof(uint64_t);
        }
        uint64_t before = left;
        int rc = holds_tokens_alone(d, f) ? 0 : check_document(d, &d->docs[i], &left, err);
        if (rc < 0)
            return rc;
        n_looked += holds_tokens_alone(d, f) ? d->docs[i].n_tokens * data_dtype_bytes(f->dtype)
                                             : before - left;
    }
    *out_bytes = n_looked;
    return 0;
}

/* A raw file is one document. */
static int open_raw(struct data *d, struct data_file *f, const char *what, struct err *err)
{
    f->dtype = d->format == DATA_BYTES ? DTYPE_U8 : d->format == DATA_U16 ? DTYPE_U16 : DTYPE_U32;
    uint32_t bytes = data_dtype_bytes(f->dtype);
    if (f->n_bytes % bytes != 0)
        return err_set(err, -EINVAL, "%s: %s: %zu bytes are no whole number of %u-byte tokens",
                       what, f->path, f->n_bytes, bytes);
    data_add_doc(d, 0, 0, f->n_bytes / bytes);
    return 0;
}

/* ---- all ------------------------------------------------------------------------------------ */

void data_add_doc(struct data *d, uint64_t number, uint64_t at, uint64_t n_tokens)
{
    if (n_tokens == 0)
        return;
    if (d->n_docs == d->docs_cap) {
        d->docs_cap = d->docs_cap ? d->docs_cap + d->docs_cap / 2 : 16;
        d->docs = xrealloc(d->docs, d->docs_cap * sizeof *d->docs);
    }
    d->docs[d->n_docs++] = (struct data_doc){.at = at, .n_tokens = n_tokens,
                                             .file = (uint32_t)d->n_files - 1,
                                             .number = (uint32_t)number};
    d->n_tokens += n_tokens;
}

static int open_file(struct data *d, const char *path, const char *what, struct err *err)
{
    struct data_file *f = &d->files[d->n_files++];
    if (d->format == DATA_MEGATRON)
        return data_megatron_open(d, path, what, err);
    f->path = xstrdup(path);
    int rc = data_file_map(f, what, err);
    if (rc < 0)
        return rc;
    return d->format == DATA_JSONL ? data_jsonl_open(d, err) : open_raw(d, f, what, err);
}

int data_files_open(struct data *d, const struct data_config *c, struct err *err)
{
    char **paths = NULL;
    size_t n = 0;
    int rc = 0;
    for (size_t i = 0; i < c->n_patterns && rc == 0; i++)
        rc = expand_pattern(d, c->patterns[i], c->what, &paths, &n, err);
    if (rc == 0 && n == 0)
        rc = err_set(err, -ENOENT, "%s: names no file", c->what);
    /* Sorted and without repetition, so that the order of patterns does not matter. */
    if (n > 0)
        qsort(paths, n, sizeof *paths, by_text);
    d->files = xcalloc(n, sizeof *d->files);
    for (size_t i = 0; i < n && rc == 0; i++)
        if (i == 0 || strcmp(paths[i], paths[i - 1]) != 0)
            rc = open_file(d, paths[i], c->what, err);
    for (size_t i = 0; i < n; i++)
        free(paths[i]);
    free(paths);
    return rc;
}
