/* cuda.h - what the launchers of GPU ops share: the stream, scratch, uploads, checks
 *
 * An op is `extern "C" void cuda_<op>(struct device *dev, ...)` in a .cu file: it asserts its
 * shape, takes scratch, launches on cuda_stream(dev) and ends with cuda_check. Nothing here waits
 * for the device once the first step is over. */
#ifndef KERNELS_CUDA_H
#define KERNELS_CUDA_H

#include <assert.h>

#include <cuda_runtime_api.h>

#include "kernels/device.h"

/* How a process ends that can no longer use its device; the daemon reports the line before it. */
#define CUDA_EXIT_CODE 70

#ifdef __cplusplus
extern "C" {
#endif

/* All ops run on this stream, one after the other. */
cudaStream_t cuda_stream(struct device *dev);

/* Multiprocessors of the device. */
int cuda_n_multiprocessors(struct device *dev);

/* Called once at the start of an op that takes scratch: what earlier ops took may be used again.
 * An op that calls another one must expect its own scratch to be gone, unless that one says that
 * it takes none: the products of cuda_products.h take none. */
void cuda_scratch_begin(struct device *dev);

/* Device memory of the op, 256-byte aligned, contents undefined; lives until the next
 * cuda_scratch_begin. Never NULL: a device without memory ends the process with its one line. */
void *cuda_scratch_take(struct device *dev, size_t n_bytes);

/* A device copy of a small host array (offsets, pointers), 256-byte aligned, for the launches of
 * this op. The host's may change at once. NULL for 0 bytes. */
void *cuda_upload(struct device *dev, const void *host, size_t n_bytes);

/* After an op's launches. An error ends the process with one line that has the op, the shape (a
 * printf format and its arguments) and CUDA's own words. */
void cuda_check(struct device *dev, const char *op, const char *shape_format, ...)
    __attribute__((format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif

#endif
