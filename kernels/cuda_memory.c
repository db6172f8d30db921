/* cuda_memory.c - device memory, scratch of ops, and small host arrays on their way there
 *
 * The last two grow during the first step and then stay: cudaMalloc and cudaFree wait for the
 * device. */
#include "kernels/cuda_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/gpu_bytes.h"
#include "common/mem.h"

#define ALIGNMENT          ((size_t)256)
#define BLOCK_BYTES_MIN    ((size_t)GPU_BLOCK_BYTES)
#define SEGMENT_BYTES_MIN  ((size_t)1 << 20)
#define THROUGH_RING_BYTES ((size_t)256 << 10) /* of one copy, at most */

static size_t rounded(size_t n_bytes)
{
    return (n_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* ---- what is held ---- */

cudaError_t cuda_hold(struct cuda *cuda, void **out, size_t n_bytes)
{
    struct cuda_held *h = &cuda->held;
    cudaError_t rc = cudaMalloc(out, n_bytes);
    if (rc != cudaSuccess)
        return rc;
    if (h->n_blocks == h->n_alloc) {
        h->n_alloc = h->n_alloc ? 2 * h->n_alloc : 64;
        h->blocks = xrealloc(h->blocks, h->n_alloc * sizeof h->blocks[0]);
    }
    h->blocks[h->n_blocks++] = (struct cuda_block){*out, n_bytes};
    h->bytes += n_bytes;
    h->n_taken++;
    if (h->bytes > h->peak_bytes)
        h->peak_bytes = h->bytes;
    return cudaSuccess;
}

cudaError_t cuda_release(struct cuda *cuda, void *p)
{
    struct cuda_held *h = &cuda->held;
    size_t i = 0;
    while (i < h->n_blocks && h->blocks[i].base != p)
        i++;
    if (i < h->n_blocks) {
        h->bytes -= h->blocks[i].n_bytes;
        h->blocks[i] = h->blocks[--h->n_blocks];
    }
    return cudaFree(p);
}

/* ---- scratch ---- */

void cuda_scratch_begin(struct device *dev)
{
    struct cuda_scratch *s = &cuda_of(dev)->scratch;
    for (int i = 0; i < s->n_blocks; i++)
        s->blocks[i].used = 0;
}

/* Blocks that this op has not taken from are too small for it; a device's memory must not hold a
 * block for each size that ever was too small. */
static void free_unused(struct cuda *cuda)
{
    struct cuda_scratch *s = &cuda->scratch;
    int n_kept = 0;
    for (int i = 0; i < s->n_blocks; i++)
        if (s->blocks[i].used > 0)
            s->blocks[n_kept++] = s->blocks[i];
        else
            cuda_must(cuda, cuda_release(cuda, s->blocks[i].base), "freeing scratch");
    s->n_blocks = n_kept;
}

static void add_block(struct cuda *cuda, size_t n_bytes)
{
    struct cuda_scratch *s = &cuda->scratch;
    char what[96];
    free_unused(cuda);
    assert(s->n_blocks < CUDA_SCRATCH_BLOCKS_MAX);
    size_t size = n_bytes > BLOCK_BYTES_MIN ? n_bytes : BLOCK_BYTES_MIN;
    snprintf(what, sizeof what, "allocating %zu bytes of scratch", size);
    char *base = NULL;
    cuda_must(cuda, cuda_hold(cuda, (void **)&base, size), what);
    s->blocks[s->n_blocks].base = base;
    s->blocks[s->n_blocks].n_bytes = size;
    s->blocks[s->n_blocks++].used = 0;
}

static void *take(struct cuda_scratch *s, size_t n_bytes)
{
    for (int i = 0; i < s->n_blocks; i++)
        if (s->blocks[i].n_bytes - s->blocks[i].used >= n_bytes) {
            char *p = s->blocks[i].base + s->blocks[i].used;
            s->blocks[i].used += n_bytes;
            return p;
        }
    return NULL;
}

void *cuda_scratch_take(struct device *dev, size_t n_bytes)
{
    struct cuda *cuda = cuda_of(dev);
    size_t size = rounded(n_bytes ? n_bytes : 1);
    void *p = take(&cuda->scratch, size);
    if (!p) {
        add_block(cuda, size);
        p = take(&cuda->scratch, size);
    }
    return p;
}

/* ---- the ring ---- */

static cudaError_t ring_alloc(struct cuda_ring *r, size_t segment_bytes)
{
    size_t n_bytes = segment_bytes * CUDA_RING_SEGMENTS;
    cudaError_t rc = cudaMallocHost((void **)&r->host, n_bytes);
    if (rc == cudaSuccess)
        rc = cudaMalloc((void **)&r->device, n_bytes);
    r->segment_bytes = segment_bytes;
    r->used = 0;
    return rc;
}

static void ring_free(struct cuda_ring *r)
{
    cudaFreeHost(r->host);
    cudaFree(r->device);
    r->host = r->device = NULL;
}

/* Room for n_bytes: the offset of it in both memories. */
static size_t ring_take(struct cuda *cuda, size_t n_bytes)
{
    struct cuda_ring *r = &cuda->ring;
    size_t size = rounded(n_bytes);
    if (size > r->segment_bytes) {
        cuda_must(cuda, cudaStreamSynchronize(cuda->stream), "growing the ring of uploads");
        ring_free(r);
        cuda_must(cuda, ring_alloc(r, 2 * size), "growing the ring of uploads");
    }
    if (r->used + size > r->segment_bytes) {
        cuda_must(cuda, cudaEventRecord(r->is_read[r->segment], cuda->stream), "an upload");
        r->segment = (r->segment + 1) % CUDA_RING_SEGMENTS;
        r->used = 0;
        cuda_must(cuda, cudaEventSynchronize(r->is_read[r->segment]), "waiting for an upload");
    }
    size_t at = (size_t)r->segment * r->segment_bytes + r->used;
    r->used += size;
    return at;
}

void *cuda_upload(struct device *dev, const void *host, size_t n_bytes)
{
    struct cuda *cuda = cuda_of(dev);
    if (n_bytes == 0)
        return NULL;
    size_t at = ring_take(cuda, n_bytes);
    memcpy(cuda->ring.host + at, host, n_bytes);
    cuda_must(cuda, cudaMemcpyAsync(cuda->ring.device + at, cuda->ring.host + at, n_bytes,
                                    cudaMemcpyHostToDevice, cuda->stream), "an upload");
    return cuda->ring.device + at;
}

bool cuda_ring_copy(struct cuda *cuda, void *to, const void *host, size_t n_bytes)
{
    if (n_bytes > THROUGH_RING_BYTES)
        return false;
    size_t at = ring_take(cuda, n_bytes);
    memcpy(cuda->ring.host + at, host, n_bytes);
    cuda_must(cuda, cudaMemcpyAsync(to, cuda->ring.host + at, n_bytes, cudaMemcpyHostToDevice,
                                    cuda->stream), "a copy to the device");
    return true;
}

/* ---- both ---- */

cudaError_t cuda_memory_open(struct cuda *cuda)
{
    cudaError_t rc = ring_alloc(&cuda->ring, SEGMENT_BYTES_MIN);
    for (int i = 0; rc == cudaSuccess && i < CUDA_RING_SEGMENTS; i++)
        rc = cudaEventCreateWithFlags(&cuda->ring.is_read[i], cudaEventDisableTiming);
    return rc;
}

void cuda_memory_close(struct cuda *cuda)
{
    for (int i = 0; i < CUDA_RING_SEGMENTS; i++)
        if (cuda->ring.is_read[i])
            cudaEventDestroy(cuda->ring.is_read[i]);
    ring_free(&cuda->ring);
    for (int i = 0; i < cuda->scratch.n_blocks; i++)
        cuda_release(cuda, cuda->scratch.blocks[i].base);
    cuda->scratch.n_blocks = 0;
    free(cuda->held.blocks);
    cuda->held = (struct cuda_held){0};
}
