/* documents.h - tokens in documents of given lengths, as files that a job reads
 *
 * A Megatron dataset, of which stretches of sequence_length are cut whatever the documents'
 * lengths: all passes have the same number of tokens. */
#ifndef TESTS_DOCUMENTS_H
#define TESTS_DOCUMENTS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/mem.h"

/* PREFIX.idx and PREFIX.bin; tokens (of all documents, below 65536) one after another. */
static inline void documents_write(const char *prefix, const uint32_t *lengths, uint64_t n_docs,
                                   const uint16_t *tokens)
{
    static const uint8_t magic[9] = "MMIDIDX\0", version[8] = {1}, u16 = 8;
    uint64_t n_bounds = n_docs + 1, at = 0;
    char *paths[2] = {xasprintf("%s.idx", prefix), xasprintf("%s.bin", prefix)};
    FILE *index = fopen(paths[0], "wb"), *bin = fopen(paths[1], "wb");
    if (!index || !bin)
        exit(1);
    fwrite(magic, 1, sizeof magic, index);
    fwrite(version, 1, sizeof version, index);
    fwrite(&u16, 1, 1, index);
    fwrite(&n_docs, sizeof n_docs, 1, index);
    fwrite(&n_bounds, sizeof n_bounds, 1, index);
    fwrite(lengths, sizeof *lengths, n_docs, index);
    for (uint64_t i = 0; i < n_docs; at += lengths[i++] * sizeof *tokens)
        fwrite(&at, sizeof at, 1, index);
    for (uint64_t i = 0; i < n_bounds; i++)
        fwrite(&i, sizeof i, 1, index);
    fwrite(tokens, 1, at, bin);
    if (fclose(index) != 0 || fclose(bin) != 0)
        exit(1);
    free(paths[0]);
    free(paths[1]);
}

#endif
