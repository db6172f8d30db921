/* copy_engine.cuh - boxes of a tensor into shared memory and out of it, and what tells of them
 *
 * One thread asks for a box; its bytes count at a barrier, also at that of another block of the
 * cluster. All addresses are of shared memory. */
#ifndef KERNELS_COPY_ENGINE_CUH
#define KERNELS_COPY_ENGINE_CUH

#include <cuda.h>

#include "kernels/wgmma.cuh"

__device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t n_arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)),
                 "r"(n_arrivals)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}\n" ::"r"(
                     shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t n_bytes)
{
    asm volatile("{\n.reg .b64 state;\n"
                 "mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}\n" ::"r"(
                     shared_address(barrier)),
                 "r"(n_bytes)
                 : "memory");
}

/* Until the phase of that parity is over. */
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n}\n" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/* At the same barrier of a block of the cluster: what this thread has read is read. No fence goes
 * with it, which would wait for all of a warp's memory in every step: what it wrote to global
 * memory is not told of. */
__device__ __forceinline__ void barrier_arrive_at(uint64_t *barrier, uint32_t block)
{
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(
                     shared_address(barrier)),
                 "r"(block)
                 : "memory");
}

__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

/* The box at (x, y, z) of the map into shared memory; its bytes count at the barrier. With PAIR 2
 * into that of both blocks, each at its own barrier. */
template <int PAIR>
__device__ __forceinline__ void copy_box(void *to, const CUtensorMap *map, int32_t x, int32_t y,
                                         int32_t z, uint64_t *barrier)
{
    if (PAIR == 1)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];\n" ::"r"(shared_address(to)),
                     "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(
                         shared_address(to)),
                     "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)),
                     "h"((uint16_t)((1 << PAIR) - 1))
                     : "memory");
}

/* Adds a box of 64 rows of 32 floats, which lies in shared memory and was fenced there, to what is
 * at (x, y, z) of the map. By one thread. */
__device__ __forceinline__ void add_box(const CUtensorMap *map, const char *from, int32_t x,
                                        int32_t y, int32_t z)
{
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%2, %3, %4}], [%1];\n"
                 "cp.async.bulk.commit_group;\n" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* Until all of this thread's boxes but the last N_PENDING have been read from shared memory. */
template <int N_PENDING>
__device__ __forceinline__ void boxes_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(N_PENDING) : "memory");
}

/* Until all of them are written. */
__device__ __forceinline__ void boxes_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

#endif
