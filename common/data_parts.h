/* data_parts.h - what the files of data share: mapped files, and the documents in them
 *
 * data.c cuts documents into windows, data_files.c finds and maps files and reads raw tokens,
 * data_megatron.c and data_jsonl.c find the documents of theirs. Nobody else includes this. */
#ifndef COMMON_DATA_PARTS_H
#define COMMON_DATA_PARTS_H

#include "common/data.h"

/* Of a token in a file, little-endian. */
enum data_dtype {
    DTYPE_U8, DTYPE_I8, DTYPE_I16, DTYPE_U16, DTYPE_I32, DTYPE_U32, DTYPE_I64, DTYPE_F32,
    DTYPE_F64, DTYPES
};

struct data_file {
    char *path;
    const uint8_t *bytes;
    size_t n_bytes;
    enum data_dtype dtype;
};

struct data_doc {
    uint64_t at;       /* its first byte in the file; of JSONL, its line's */
    uint64_t n_tokens; /* above 0 */
    uint64_t first;    /* its first token in the row of all, or its first window; see data.c */
    uint32_t file;
    uint32_t number; /* in its file, from 0; of JSONL, its line's */
};

struct data_row { /* where a row of whole documents begins */
    uint64_t doc, from;
};

struct data {
    struct data_file *files;
    size_t n_files;
    struct data_doc *docs;
    size_t   n_docs, docs_cap;
    struct data_row *rows; /* packed JSONL: n_windows + 1, the last one the end */
    uint64_t n_tokens, n_windows, n_labels, n_read, lines_bytes_max, seed;
    uint32_t length, vocab;
    enum data_format format;
    bool     pack;
};

static inline uint32_t data_dtype_bytes(enum data_dtype t)
{
    static const uint8_t bytes[DTYPES] = {1, 1, 2, 2, 4, 4, 8, 4, 8};
    return bytes[t];
}

/* data_files.c: the files that the patterns name, in sorted order, and their documents. On failure
 * what was found stays in d, for data_close. */
int data_files_open(struct data *d, const struct data_config *c, struct err *err);
/* f->path is mapped. what begins the errors. An empty file is -EINVAL. */
int data_file_map(struct data_file *f, const char *what, struct err *err);
/* Appends a document; nothing for n_tokens 0. number: see struct data_doc. */
void data_add_doc(struct data *d, uint64_t number, uint64_t at, uint64_t n_tokens);

/* Tokens from .. from + n of a document, each of which is its own target. -EINVAL with file and
 * offset for one that is outside the vocabulary. */
int data_tokens_read(const struct data *d, const struct data_doc *doc, uint64_t from, uint64_t n,
                     int32_t *out_tokens, int32_t *out_targets, struct err *err);

/* data_megatron.c: path is the .idx; the last file of d becomes its .bin, mapped, and its documents
 * are added. */
int data_megatron_open(struct data *d, const char *path, const char *what, struct err *err);

/* data_jsonl.c: every line of the last file of d, which is mapped, is checked and added, until
 * n_read reaches lines_bytes_max. */
int data_jsonl_open(struct data *d, struct err *err);
/* The same as data_tokens_read; targets that are ignored are -1. */
int data_jsonl_read(const struct data *d, const struct data_doc *doc, uint64_t from, uint64_t n,
                    int32_t *out_tokens, int32_t *out_targets, struct err *err);

#endif
