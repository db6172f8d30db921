/* cuda_state.h - what a cuda device holds: for its own files alone, kernels use cuda.h */
#ifndef KERNELS_CUDA_STATE_H
#define KERNELS_CUDA_STATE_H

#include "kernels/cuda.h"

#define CUDA_SCRATCH_BLOCKS_MAX 64
#define CUDA_RING_SEGMENTS      8

struct cuda_products;
struct cuda_times;

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

/* What is allocated on the device, by size: CUDA tells no size when memory is freed. */
struct cuda_held {
    struct cuda_block {
        void  *base;
        size_t n_bytes;
    } *blocks; /* n_blocks, in no order */
    size_t n_blocks, n_alloc;
    uint64_t bytes, peak_bytes;
    uint64_t n_taken;          /* ever */
    uint64_t overhead_bytes;   /* of the device, before anything was taken */
};

struct cuda {
    int index;
    int n_multiprocessors;
    cudaStream_t stream;
    struct cuda_held held;
    struct cuda_scratch scratch;
    struct cuda_ring ring;
    cudaEvent_t *marks; /* that can be timed */
    uint32_t n_marks;
    struct cuda_products *products; /* cuda_products.c */
    struct cuda_times *times;       /* cuda_times.cu; NULL: ops are not timed */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the device the calling thread's and gives its state. */
struct cuda *cuda_of(struct device *dev);

/* Ends the process with one line unless rc is success; what says what was tried. */
void cuda_must(const struct cuda *cuda, cudaError_t rc, const char *what);

/* ---- cuda_memory.c ---- */

/* cudaMalloc and cudaFree, counted. */
cudaError_t cuda_hold(struct cuda *cuda, void **out, size_t n_bytes);
cudaError_t cuda_release(struct cuda *cuda, void *p);

cudaError_t cuda_memory_open(struct cuda *cuda);
void cuda_memory_close(struct cuda *cuda);

/* Copies a small host array to device memory through the ring; false where it is too large. */
bool cuda_ring_copy(struct cuda *cuda, void *to, const void *host, size_t n_bytes);

/* ---- cuda_products.c ---- */

int cuda_products_open(struct cuda *cuda, struct err *err);
void cuda_products_close(struct cuda *cuda);

/* ---- cuda_times.cu ---- */

/* From now on: a table whose entries take the time of plain's. Lives until the close, which prints
 * what an op takes in a step. */
const struct device_ops *cuda_times_open(struct cuda *cuda, const struct device_ops *plain);
void cuda_times_step_over(struct cuda *cuda);
void cuda_times_close(struct cuda *cuda);

#ifdef __cplusplus
}
#endif

#endif
