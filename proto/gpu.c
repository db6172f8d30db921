/* gpu.c - copies of what is said about a GPU */
#include "proto/gpu.h"

#include <stdlib.h>

static void copy(const Ballast__GpuHealth *from, char *name, char *sick, Ballast__GpuHealth *out)
{
    *out = *from;
    out->base.n_unknown_fields = 0;
    out->base.unknown_fields = NULL;
    out->name = name;
    out->sick = sick;
}

Ballast__GpuHealth *gpu_dup(const Ballast__GpuHealth *gpu)
{
    if (!gpu)
        return NULL;
    Ballast__GpuHealth *out = xcalloc(1, sizeof *out);
    copy(gpu, xstrdup(gpu->name), xstrdup(gpu->sick), out);
    return out;
}

Ballast__GpuHealth *gpu_dup_in(struct arena *arena, const Ballast__GpuHealth *gpu)
{
    if (!gpu)
        return NULL;
    Ballast__GpuHealth *out = arena_alloc(arena, sizeof *out);
    copy(gpu, arena_strdup(arena, gpu->name), arena_strdup(arena, gpu->sick), out);
    return out;
}

void gpu_free(Ballast__GpuHealth *gpu)
{
    if (!gpu)
        return;
    free(gpu->name);
    free(gpu->sick);
    free(gpu);
}
