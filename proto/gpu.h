/* gpu.h - copies of what is said about a GPU */
#ifndef PROTO_GPU_H
#define PROTO_GPU_H

#include "common/mem.h"
#include "proto/ballast.pb-c.h"

/* Of NULL: NULL. On the heap, ended with gpu_free, or in an arena. */
Ballast__GpuHealth *gpu_dup(const Ballast__GpuHealth *gpu);
Ballast__GpuHealth *gpu_dup_in(struct arena *arena, const Ballast__GpuHealth *gpu);
void gpu_free(Ballast__GpuHealth *gpu);

#endif
