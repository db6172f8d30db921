/* ckpt_files.h - the tensors of a model as safetensors files, written by many ranks in place
 *
 * Private to ckpt. A folder holds model.safetensors or, beyond a size, numbered files and their
 * index, as other tools read them. */
#ifndef WORKER_CKPT_FILES_H
#define WORKER_CKPT_FILES_H

#include "worker/ckpt.h"
#include "worker/ckpt_carried.h"
#include "worker/ckpt_forms.h"
#include "worker/ckpt_sums.h"
#include "worker/shard.h"

/* Weights are those of the model; adapters beside them are one file, as PEFT has it. Masters: the
 * F32 of those weights that their form rounds. */
enum ckpt_what { CKPT_WEIGHTS, CKPT_ADAPTERS, CKPT_M, CKPT_V, CKPT_MASTERS, CKPT_WHATS };

struct ckpt_tensors {
    const struct tensor_map *map;
    struct shard  *shard;
    enum ckpt_what what;           /* m and v: only of tensors that are trained */
    const struct ckpt_forms *forms; /* of weights and masters; NULL: all weights are F32 */
    uint64_t       n_masters;      /* to be read */
    uint64_t       file_bytes_max; /* a tensor larger than that has a file of its own */
    bool           is_one_of_many; /* the folder gets more files of tensors, so there is an index */
    bool           rounds;         /* matrices that are read, to BF16 */
    struct ckpt_sums *sums;        /* gets those of what is written; NULL: none wanted */
    const char    *place;          /* of that, in the checkpoint */
};

/* By one rank: makes folder with files of their final size; carried, for is_one_of_many, are whole
 * at once. */
int ckpt_files_create(const struct ckpt_tensors *t, const struct ckpt_carried *carried,
                      const char *folder, struct err *err);

/* By every rank after that: writes what it is the first owner of, durably. */
int ckpt_files_write(const struct ckpt_tensors *t, const char *folder, struct err *err);

/* By every rank: reads what it owns. Every tensor must be there in its shape; of masters, as many
 * as n_masters. */
int ckpt_files_read(const struct ckpt_tensors *t, const char *folder, struct err *err);

#endif
