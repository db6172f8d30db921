/* cuda_state.h - what a cuda device holds: for its own files alone, kernels use cuda.h */
#ifndef KERNELS_CUDA_STATE_H
#define KERNELS_CUDA_STATE_H

#include "kernels/cuda.h"

#define CUDA_SCRATCH_BLOCKS_MAX 64
#define CUDA_RING_SEGMENTS      8

struct cuda_products;

/* Blocks of device memory, each handed out from its start. */
struct cuda_scratch {
    struct {
        char  *base;
        size_t n_bytes, used;
    } blocks[CUDA_SCRATCH_BLOCKS_MAX];
    int n_blocks;
};

/* Pinned memory and its twin on the device, used in turns. A segment is written again only after
 * the copies out of it are over, which its event tells. */
struct cuda_ring {
    char  *host, *device;
    size_t segment_bytes, used; /* of the current segment */
    int    segment;
    cudaEvent_t is_read[CUDA_RING_SEGMENTS];
};

struct cuda {
    int index;
    int n_multiprocessors;
    cudaStream_t stream;
    struct cuda_scratch scratch;
    struct cuda_ring ring;
    cudaEvent_t *marks; /* that can be timed */
    uint32_t n_marks;
    struct cuda_products *products; /* cuda_products.c */
};

/* Makes the device the calling thread's and gives its state. */
struct cuda *cuda_of(struct device *dev);

/* Ends the process with one line unless rc is success; what says what was tried. */
void cuda_must(const struct cuda *cuda, cudaError_t rc, const char *what);

/* ---- cuda_memory.c ---- */

cudaError_t cuda_memory_open(struct cuda *cuda);
void cuda_memory_close(struct cuda *cuda);

/* Copies a small host array to device memory through the ring; false where it is too large. */
bool cuda_ring_copy(struct cuda *cuda, void *to, const void *host, size_t n_bytes);

/* ---- cuda_products.c ---- */

int cuda_products_open(struct cuda *cuda, struct err *err);
void cuda_products_close(struct cuda *cuda);

#endif
