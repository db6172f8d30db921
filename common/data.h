/* data.h - files of tokens as training windows; a sample is a function of (seed, index), no rank
 *
 * A raw file is a document; an indexed or JSONL file holds many. Packed: windows of
 * sequence_length are cut from all documents one after another, in sorted order of the files; a
 * border inside a window is a document border (cu_seqlens), and no label looks across it. JSONL,
 * whose documents are whole tasks, is packed whole: a window is as many documents in a row as fit,
 * and only one that is longer than a window is cut. Not packed: windows are cut inside each
 * document; its last one may be shorter. The order is a permutation of all windows, another one
 * each epoch. */
#ifndef COMMON_DATA_H
#define COMMON_DATA_H

#include "common/err.h"
#include "common/types.h"

enum data_format { DATA_BYTES, DATA_U16, DATA_U32, DATA_MEGATRON, DATA_JSONL };

/* -EINVAL names the words that are known. */
int data_format_parse(const char *word, enum data_format *out, struct err *err);

struct data_config {
    char *const *patterns; /* paths or globs; of Megatron, without .idx and .bin */
    size_t n_patterns;
    const char *what;      /* "data.train": begins the errors */
    enum data_format format;
    uint32_t sequence_length, vocab;
    bool     pack;
    uint64_t seed;
    uint64_t lines_bytes_max; /* JSONL is counted no further than the line with this byte; 0: all */
};

struct data;

/* Maps the files and finds their documents. -ENOENT where a pattern matches nothing, -EINVAL for a
 * file that is empty or not of its format, with line or offset, or too little for one window.
 * Gives *out. */
int  data_open(const struct data_config *config, struct data **out, struct err *err);
void data_close(struct data *d);

uint64_t data_windows(const struct data *d); /* of an epoch */

struct data_counts {
    uint64_t n_files, n_bytes; /* of Megatron the .bin */
    uint64_t n_read;           /* bytes that the rest is of: n_bytes, but for lines_bytes_max */
    uint64_t n_documents, n_tokens, n_windows;
    uint64_t n_labels;         /* of JSONL: tokens that are learnt */
};
struct data_counts data_count(const struct data *d);

/* File i of n_files; the path lives as long as d. */
const char *data_file(const struct data *d, uint64_t i);

/* Looks whether tokens are in the vocabulary, at the beginning of each file, at so many bytes in
 * all; those of JSONL have been. *out_bytes: at how many it looked, n_bytes where that was not
 * needed. */
int data_check(const struct data *d, uint64_t bytes_max, uint64_t *out_bytes, struct err *err);

/* A micro-batch; all zero is an empty one. The pointers are the batch's own. */
struct data_batch {
    int32_t *tokens, *labels; /* n_tokens; a label below 0: none */
    int32_t *cu_seqlens;      /* n_docs + 1 */
    int64_t  n_tokens, n_labels;
    int32_t  n_docs;
    size_t   n_tokens_alloc, n_docs_alloc;
};

/* Room for so many tokens, in however many documents. */
void data_batch_reserve(struct data_batch *b, int64_t n_tokens);
void data_batch_clear(struct data_batch *b); /* keeps the memory */
void data_batch_fini(struct data_batch *b);

/* Appends the sample of that global index, which is the window data_order gives. A token outside
 * the vocabulary is -EINVAL with file and offset. */
int data_sample(const struct data *d, uint64_t index, struct data_batch *b, struct err *err);

/* The window of that global index: permutation(seed, epoch)[index % windows]. */
uint64_t data_order(const struct data *d, uint64_t index);

/* Appends window number index in the files' order (validation). */
int data_window(const struct data *d, uint64_t index, struct data_batch *b, struct err *err);

/* Where a document of a batch comes from. */
struct data_piece {
    const char *path;         /* lives as long as the data */
    uint64_t number;          /* of the document in its file, empty ones and lines too; from 0 */
    uint64_t at;              /* byte of the first of its tokens; of JSONL, of the line */
    uint64_t first, n_tokens; /* inputs: that many of the document's tokens from first on */
};

/* The documents that data_window would append, in order. Gives *out, freed with free(); returns how
 * many. */
size_t data_pieces(const struct data *d, uint64_t window, struct data_piece **out);

#endif
