/* gpu_bytes.h - what kernels take of a GPU's memory besides tensors: for them, and for the plan
 *
 * Plain numbers, because CUDA sources include this, too. */
#ifndef COMMON_GPU_BYTES_H
#define COMMON_GPU_BYTES_H

#define GPU_BLOCK_BYTES     (64ull << 20)  /* the least block of ops' scratch */
#define GPU_TABLE_BYTES     (1ull << 20)   /* of an op beside its largest parts, and roundings */
#define GPU_LOGITS_BYTES    (512ull << 20) /* of the head's loss, at once, or more by rows */
#define GPU_LOGITS_ROWS_MIN 128ull
#define GPU_UNPACK_BYTES    (256ull << 20) /* of packed experts' weights, at once, or one */
#define GPU_KDA_HEADS       32             /* of the recurrence, at once */
#define GPU_KDA_CHUNKS_MIN  8              /* of 64 tokens, at once, where there are fewer tokens */
#define GPU_SPARSE_BYTES    (1ull << 30)   /* of sparse attention's queries, at once, about */
#define GPU_SPARSE_QUERIES  512            /* and of these at most */
#define GPU_SPARSE_STEP     128            /* rows of their weights are multiples of it */

#endif
