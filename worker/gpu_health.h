/* gpu_health.h - how a worker's GPU does, as the driver's library (NVML) says
 *
 * The library is looked for when the first look is taken and may be absent; then nothing is known.
 * Nothing here needs CUDA, or memory on the GPU. */
#ifndef WORKER_GPU_HEALTH_H
#define WORKER_GPU_HEALTH_H

#include "proto/ballast.pb-c.h"

struct gpu_health;

/* Of device cuda:N, as CUDA_VISIBLE_DEVICES counts; NULL for the cpu. */
struct gpu_health *gpu_health_create(const char *device);
void gpu_health_destroy(struct gpu_health *g);

/* Takes a look, which may take seconds where a GPU is in trouble. NULL: nothing is known about it.
 * Lives until the next look. One thread at a time. */
const Ballast__GpuHealth *gpu_health_look(struct gpu_health *g);

#endif
