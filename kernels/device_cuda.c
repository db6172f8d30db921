/* device_cuda.c - a GPU as a device: its table of ops, its memory, its one stream
 *
 * Each entry is defined in the .cu file beside the .c file that says what it means. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda_state.h"

#include "common/mem.h"
#include "kernels/ops_cuda.h"

#define NAMELESS_BYTES 256 /* of an allocation that asked for none */

/* ---- errors: they end the process, as a device that failed once never recovers ---- */

static void die(const struct cuda *cuda, const char *what, cudaError_t rc)
{
    fprintf(stderr, "cuda:%d: %s: %s (%s)%s\n", cuda->index, what, cudaGetErrorString(rc),
            cudaGetErrorName(rc),
            rc == cudaErrorMemoryAllocation
                ? ""
                : "; an earlier op may be at fault, CUDA_LAUNCH_BLOCKING=1 names it");
    fflush(stderr);
    _exit(CUDA_EXIT_CODE);
}

void cuda_must(const struct cuda *cuda, cudaError_t rc, const char *what)
{
    if (rc != cudaSuccess)
        die(cuda, what, rc);
}

void cuda_check(struct device *dev, const char *op, const char *shape_format, ...)
{
    cudaError_t rc = cudaGetLastError();
    if (rc == cudaSuccess)
        return;
    char shape[256], what[384];
    va_list args;
    va_start(args, shape_format);
    vsnprintf(shape, sizeof shape, shape_format, args);
    va_end(args);
    snprintf(what, sizeof what, "op %s (%s)", op, shape);
    die(dev->state, what, rc);
}

/* ---- state ---- */

struct cuda *cuda_of(struct device *dev)
{
    static _Thread_local int current = -1;
    struct cuda *cuda = dev->state;
    if (current != cuda->index) {
        cuda_must(cuda, cudaSetDevice(cuda->index), "choosing the device");
        current = cuda->index;
    }
    return cuda;
}

cudaStream_t cuda_stream(struct device *dev)
{
    return cuda_of(dev)->stream;
}

int cuda_n_multiprocessors(struct device *dev)
{
    return cuda_of(dev)->n_multiprocessors;
}

/* ---- memory ---- */

static void *cuda_alloc(struct device *dev, size_t n_bytes)
{
    struct cuda *cuda = cuda_of(dev);
    void *p = NULL;
    cudaError_t rc = cuda_hold(cuda, &p, n_bytes ? n_bytes : NAMELESS_BYTES);
    if (rc == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* this one is the caller's to tell */
        return NULL;
    }
    cuda_must(cuda, rc, "alloc");
    cuda_must(cuda, cudaMemsetAsync(p, 0, n_bytes, cuda->stream), "alloc");
    return p;
}

static void cuda_free(struct device *dev, void *p)
{
    struct cuda *cuda = cuda_of(dev);
    cuda_must(cuda, cuda_release(cuda, p), "free");
}

static void cuda_copy(struct device *dev, void *to, const void *from, size_t n_bytes)
{
    struct cuda *cuda = cuda_of(dev);
    if (n_bytes > 0)
        cuda_must(cuda, cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDeviceToDevice, cuda->stream),
                  "copy");
}

/* The host's memory may change as soon as this returns. */
static void cuda_to_device(struct device *dev, void *to, const void *host, size_t n_bytes)
{
    struct cuda *cuda = cuda_of(dev);
    if (n_bytes == 0 || cuda_ring_copy(cuda, to, host, n_bytes))
        return;
    cuda_must(cuda, cudaMemcpyAsync(to, host, n_bytes, cudaMemcpyHostToDevice, cuda->stream),
              "to_device");
    cuda_must(cuda, cudaStreamSynchronize(cuda->stream), "to_device");
}

static void cuda_to_host(struct device *dev, void *host, const void *from, size_t n_bytes)
{
    struct cuda *cuda = cuda_of(dev);
    if (n_bytes == 0)
        return;
    cuda_must(cuda, cudaMemcpyAsync(host, from, n_bytes, cudaMemcpyDeviceToHost, cuda->stream),
              "to_host");
    cuda_must(cuda, cudaStreamSynchronize(cuda->stream), "to_host");
}

/* Memory that cannot be pinned is copied all the same, only slower. */
static void cuda_pin(struct device *dev, void *host, size_t n_bytes)
{
    cuda_of(dev);
    if (cudaHostRegister(host, n_bytes, cudaHostRegisterPortable) != cudaSuccess)
        cudaGetLastError();
}

static void cuda_unpin(struct device *dev, void *host)
{
    cuda_of(dev);
    if (cudaHostUnregister(host) != cudaSuccess)
        cudaGetLastError();
}

static void cuda_zero(struct device *dev, void *p, size_t n_bytes)
{
    struct cuda *cuda = cuda_of(dev);
    if (n_bytes > 0)
        cuda_must(cuda, cudaMemsetAsync(p, 0, n_bytes, cuda->stream), "zero");
}

static void cuda_synchronize(struct device *dev)
{
    struct cuda *cuda = cuda_of(dev);
    cuda_must(cuda, cudaStreamSynchronize(cuda->stream), "synchronize");
}

/* ---- time ---- */

static void cuda_mark(struct device *dev, uint32_t i)
{
    struct cuda *cuda = cuda_of(dev);
    if (i >= cuda->n_marks) {
        uint32_t n = 2 * i + 64;
        cuda->marks = xrealloc(cuda->marks, n * sizeof *cuda->marks);
        for (; cuda->n_marks < n; cuda->n_marks++)
            cuda_must(cuda, cudaEventCreate(&cuda->marks[cuda->n_marks]), "a mark");
    }
    cuda_must(cuda, cudaEventRecord(cuda->marks[i], cuda->stream), "a mark");
}

static double cuda_elapsed(struct device *dev, uint32_t from, uint32_t to)
{
    struct cuda *cuda = cuda_of(dev);
    float ms = 0;
    assert(from < cuda->n_marks && to < cuda->n_marks);
    cuda_must(cuda, cudaEventSynchronize(cuda->marks[to]), "waiting for a mark");
    cuda_must(cuda, cudaEventElapsedTime(&ms, cuda->marks[from], cuda->marks[to]), "a time");
    return (double)ms / 1e3;
}

static void cuda_memory(struct device *dev, struct device_memory *out)
{
    struct cuda *cuda = cuda_of(dev);
    size_t available = 0, total = 0;
    cuda_must(cuda, cudaMemGetInfo(&available, &total), "memory");
    *out = (struct device_memory){
        .in_use = cuda->held.bytes, .peak = cuda->held.peak_bytes, .total = total,
        .available = available, .overhead = cuda->held.overhead_bytes,
        .n_allocs = cuda->held.n_taken,
    };
    for (int i = 0; i < cuda->scratch.n_blocks; i++)
        out->scratch += cuda->scratch.blocks[i].n_bytes;
}

static void cuda_reserve(struct device *dev, size_t n_bytes)
{
    cuda_scratch_begin(dev);
    cuda_scratch_take(dev, n_bytes);
}

static void cuda_step_over(struct device *dev)
{
    struct cuda *cuda = cuda_of(dev);
    if (cuda->times)
        cuda_times_step_over(cuda);
}

/* ---- open and close ---- */

static void cuda_close(struct device *dev)
{
    if (!dev)
        return;
    struct cuda *cuda = cuda_of(dev);
    if (cuda->stream)
        cudaStreamSynchronize(cuda->stream);
    cuda_times_close(cuda);
    cuda_products_close(cuda);
    cuda_memory_close(cuda);
    for (uint32_t i = 0; i < cuda->n_marks; i++)
        cudaEventDestroy(cuda->marks[i]);
    free(cuda->marks);
    if (cuda->stream)
        cudaStreamDestroy(cuda->stream);
    free(cuda);
    free(dev);
}

#define ENTRY(op) .op = cuda_##op,

static const struct device_ops cuda_ops = {
    .name        = "cuda",
    .close       = cuda_close,
    .alloc       = cuda_alloc,
    .free        = cuda_free,
    .copy        = cuda_copy,
    .to_device   = cuda_to_device,
    .to_host     = cuda_to_host,
    .pin         = cuda_pin,
    .unpin       = cuda_unpin,
    .zero        = cuda_zero,
    .synchronize = cuda_synchronize,
    .mark        = cuda_mark,
    .elapsed     = cuda_elapsed,
    .memory      = cuda_memory,
    .reserve     = cuda_reserve,
    .step_over   = cuda_step_over,
    CUDA_OPS(ENTRY)
};

/* An op that is new in the table must be listed above. */
#define ONE(op) +1
_Static_assert(sizeof(struct device_ops) == (16 CUDA_OPS(ONE)) * sizeof(void (*)(void)),
               "CUDA_OPS lacks an op");

/* What a GPU must have; -ENODEV says what it has instead. */
static int check_device(struct device *dev, struct cuda *cuda, struct err *err)
{
    struct cudaDeviceProp about;
    int n_devices = 0;
    cudaError_t rc = cudaGetDeviceCount(&n_devices);
    if (rc != cudaSuccess)
        return err_set(err, -ENODEV, "device cuda:%d: %s", cuda->index, cudaGetErrorString(rc));
    if (cuda->index >= n_devices)
        return err_set(err, -ENODEV, "device cuda:%d: this machine has %d, from cuda:0",
                       cuda->index, n_devices);
    if ((rc = cudaGetDeviceProperties(&about, cuda->index)) != cudaSuccess)
        return err_set(err, -EIO, "device cuda:%d: %s", cuda->index, cudaGetErrorString(rc));
    if (about.major != 9 || about.minor != 0)
        return err_set(err, -ENODEV, "device cuda:%d: compute capability %d.%d, this build is for "
                       "9.0 (H100, H200)", cuda->index, about.major, about.minor);
    cuda->n_multiprocessors = about.multiProcessorCount;
    memcpy(dev->uuid, &about.uuid, sizeof dev->uuid);
    return 0;
}

int device_cuda_open(uint32_t index, enum elem_type type, bool deterministic, struct device **out,
                     struct err *err)
{
    struct device *dev = xcalloc(1, sizeof *dev);
    struct cuda *cuda = xcalloc(1, sizeof *cuda);
    cudaError_t cuda_rc;
    int rc;

    cuda->index = (int)index;
    *dev = (struct device){.ops = &cuda_ops, .elem = type, .n_threads = 1,
                           .deterministic = deterministic, .state = cuda};
    rc = check_device(dev, cuda, err);
    if (rc < 0) {
        free(cuda);
        free(dev);
        return rc;
    }
    if ((cuda_rc = cudaSetDevice(cuda->index)) != cudaSuccess ||
        (cuda_rc = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking)) !=
            cudaSuccess ||
        (cuda_rc = cuda_memory_open(cuda)) != cudaSuccess) {
        rc = err_set(err, cuda_rc == cudaErrorMemoryAllocation ? -ENOMEM : -EIO,
                     "device cuda:%u: %s", index, cudaGetErrorString(cuda_rc));
        goto fail;
    }
    if ((rc = cuda_products_open(cuda, err)) < 0)
        goto fail;
    struct device_memory m;
    cuda_memory(dev, &m);
    cuda->held.overhead_bytes = m.total - m.available - m.in_use;
    const char *times = getenv("BALLAST_OP_TIMES");
    if (times && !strcmp(times, "1"))
        dev->ops = cuda_times_open(cuda, &cuda_ops);
    *out = dev;
    return 0;
fail:
    cuda_close(dev);
    return rc;
}
