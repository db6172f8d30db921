/* grouped_linear.cu - the experts' products in bf16 by warpgroups, fed by the copy engine
 *
 * A block has one producer, a thread that asks the copy engine for tiles of both operands into a
 * ring in shared memory, and two warpgroups that multiply them, 64 rows of the tile each. Blocks
 * stay and take one tile after another from all groups as from one list, so that the producer fills
 * the ring for the next tile while this one is written. Blocks may work in pairs on two tiles below
 * each other: each then asks for half of what they share of b, for both. Rows of a tile beyond the
 * group's belong to its neighbour: they are not written, and where rows are summed over they are
 * made zero. */
#include <cuda.h>

#include "kernels/cuda_elem.cuh"
#include "kernels/cuda_tiles.h"
#include "kernels/wgmma.cuh"

#define ROWS          CUDA_TILE_WIDE_ROWS
#define COLS          CUDA_TILE_WIDE_COLS
#define DEPTH         64 /* of a tile along k: one panel */
#define STAGES        4
#define THREADS       384 /* a warpgroup with the producer, and two that multiply */
#define N_WARPS       8   /* that multiply */
#define A_BYTES       (ROWS * DEPTH * 2)
#define B_BYTES       (COLS * DEPTH * 2)
#define STAGE_BYTES   (A_BYTES + B_BYTES)
#define SHARED_BYTES  (STAGES * STAGE_BYTES + 1024)
#define PANEL_BYTES   (DEPTH * PANEL_ROW_BYTES) /* of an operand that is read by columns */
#define STRIP         8 /* tiles of rows that are done together: they share b through the cache */

struct place {
    int32_t group;
    int64_t row, col; /* of the tile's first element */
};

struct shared_state {
    uint64_t full[STAGES], empty[STAGES]; /* mbarriers */
    int32_t  first_tile[CUDA_TILE_WIDE_GROUPS_MAX];
};

/* The tile's group is the last that begins at or before it: empty ones begin where the next does. A
 * tile has `rows` rows, those of a pair together. */
__device__ static place find_tile(const cuda_tile_group *groups, const int32_t *first_tile,
                                  int32_t n_groups, int32_t tile, int rows)
{
    int32_t low = 0, high = n_groups;
    while (high - low > 1) {
        int32_t middle = (low + high) / 2;
        if (first_tile[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    int32_t t = tile - first_tile[low];
    int32_t n_rows = (int32_t)((groups[low].m + rows - 1) / rows);
    int32_t n_cols = (int32_t)((groups[low].n + COLS - 1) / COLS);
    int32_t strip = t / (STRIP * n_cols), in_strip = t % (STRIP * n_cols);
    int32_t height = min(STRIP, n_rows - strip * STRIP);
    place p;
    p.group = low;
    p.row = (int64_t)(strip * STRIP + in_strip % height) * rows;
    p.col = (int64_t)(in_strip / height) * COLS;
    return p;
}

/* ---- barriers in shared memory that the copy engine reports to ---- */

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

/* At the same barrier of a block of the cluster. */
__device__ __forceinline__ void barrier_arrive_at(uint64_t *barrier, uint32_t block)
{
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}\n" ::"r"(
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

/* ---- the producer ---- */

/* Tiles of a and b at k, of b the block's share. An operand whose rows are summed over comes in
 * panels of 64 columns. */
template <int PAIR, bool A_T, bool B_T>
__device__ static void load_stage(char *stage, const CUtensorMap *a, const CUtensorMap *b,
                                  const cuda_tile_group &g, const place &p, bool b_is_shared,
                                  int32_t k, int rank, uint64_t *barrier)
{
    constexpr int SHARE = COLS / PAIR;
    int32_t row = (int32_t)p.row, col = (int32_t)p.col + rank * SHARE;
    barrier_expect(barrier, STAGE_BYTES);
    if (A_T)
        for (int i = 0; i < ROWS / 64; i++)
            copy_box<1>(stage + i * PANEL_BYTES, a, row + 64 * i, g.row + k, 0, barrier);
    else
        copy_box<1>(stage, a, k, g.row + row, 0, barrier);
    stage += A_BYTES + rank * (B_BYTES / PAIR);
    if (B_T)
        copy_box<PAIR>(stage, b, k, col, g.b_slot, barrier);
    else
        for (int i = 0; i < SHARE / 64; i++)
            copy_box<PAIR>(stage + i * PANEL_BYTES, b, col + 64 * i, b_is_shared ? g.row + k : k,
                           b_is_shared ? 0 : g.b_slot, barrier);
}

/* Rows first .. first + n - 1 of the tile of c into the second cache, where they are read and
 * written soon. */
__device__ static void fetch_rows(const cuda_tile_job &job, const cuda_tile_group &g,
                                  const place &p, int first, int n)
{
    int64_t size = job.c_type == ELEM_BF16 ? 2 : 4, end = min(g.m - p.row, (int64_t)first + n);
    uint32_t n_bytes = (uint32_t)(min(g.n - p.col, (int64_t)COLS) * size) & ~15u;
    for (int64_t r = first; r < end && n_bytes > 0; r++) {
        const char *at = (const char *)g.c + ((p.row + r) * job.c_stride + p.col) * size;
        if ((uintptr_t)at % 16 == 0)
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(at), "r"(n_bytes)
                         : "memory");
    }
}

/* Where in the ring one is; both sides count alike. */
struct turn {
    int stage;
    uint32_t parity;
};

__device__ __forceinline__ void turn_next(turn *t)
{
    if (++t->stage == STAGES) {
        t->stage = 0;
        t->parity ^= 1;
    }
}

/* ---- the multipliers ---- */

/* Makes rows n_valid .. DEPTH of all panels zero, by both warpgroups. */
__device__ static void clear_tail(char *stage, int n_valid)
{
    constexpr int N_PANELS = STAGE_BYTES / PANEL_BYTES;
    int thread = (int)threadIdx.x - 128, n_chunks = (DEPTH - n_valid) * 8;
    for (int i = thread; i < N_PANELS * n_chunks; i += 256)
        *(uint4 *)(stage + i / n_chunks * PANEL_BYTES + n_valid * PANEL_ROW_BYTES +
                   i % n_chunks * 16) = make_uint4(0, 0, 0, 0);
    panel_fence();
    asm volatile("bar.sync 1, 256;\n" ::: "memory");
}

/* The warpgroup's 64 x COLS over DEPTH. */
template <bool A_T, bool B_T>
__device__ __forceinline__ void multiply(float (&d)[COLS / 2], const char *stage, int warpgroup)
{
    const char *at = stage + warpgroup * (A_T ? PANEL_BYTES : 64 * PANEL_ROW_BYTES);
    uint64_t a = A_T ? panel_by_columns(at, PANEL_BYTES) : panel_by_rows(at);
    uint64_t b = B_T ? panel_by_rows(stage + A_BYTES)
                     : panel_by_columns(stage + A_BYTES, PANEL_BYTES);
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        wgmma<A_T, !B_T>(d, a, b);
        a += panel_step(A_T ? 16 * PANEL_ROW_BYTES : 32);
        b += panel_step(B_T ? 32 : 16 * PANEL_ROW_BYTES);
    }
}

/* Two neighbouring elements of c, of which the second may be beyond its end: it reads as 0. */
template <typename C>
__device__ __forceinline__ float2 read_pair(const C *c, bool both, bool in_pairs)
{
    if (!both || !in_pairs)
        return make_float2(load(c), both ? load(c + 1) : 0);
    if constexpr (sizeof(C) == 2)
        return unpack_bf16(*(const uint32_t *)c);
    else
        return *(const float2 *)c;
}

template <typename C>
__device__ __forceinline__ void write_pair(C *c, float x, float y, bool both, bool in_pairs)
{
    if (both && in_pairs) {
        if constexpr (sizeof(C) == 2)
            *(uint32_t *)c = pack_bf16(x, y);
        else
            *(float2 *)c = make_float2(x, y);
        return;
    }
    store(c, x);
    if (both)
        store(c + 1, y);
}

/* The warpgroup's rows of c: what a lane has of them, pair j of its row h being d[4 j + 2 h]. */
template <typename C>
struct own_rows {
    C      *at[2]; /* NULL beyond the group's rows */
    int     n_cols;
    bool    in_pairs, in_vectors; /* whether pairs, and eight in a row, can be written at once */
};

template <typename C>
__device__ __forceinline__ own_rows<C> find_rows(const cuda_tile_job &job, const cuda_tile_group &g,
                                                 int64_t row0, int64_t col0)
{
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x / 32 & 3;
    C *c = (C *)g.c;
    own_rows<C> own;
    own.n_cols = (int)min(g.n - col0, (int64_t)COLS);
    own.in_pairs = job.c_stride % 2 == 0 && ((uintptr_t)c & (2 * sizeof(C) - 1)) == 0;
    own.in_vectors = job.c_stride % 8 == 0 && own.n_cols % 8 == 0 && ((uintptr_t)c & 15) == 0;
    for (int h = 0; h < 2; h++) {
        int64_t row = row0 + 16 * warp + lane / 4 + 8 * h;
        own.at[h] = row < g.m ? c + row * job.c_stride + col0 : NULL;
    }
    return own;
}

/* d = alpha d + beta c. Many reads are on their way at once: one after another they would take
 * longer than the products of a small group. */
template <typename C>
__device__ __forceinline__ void add_tile(float (&d)[COLS / 2], const own_rows<C> &own, float alpha,
                                         float beta)
{
    constexpr int AT_ONCE = 16;
    int lane_col = (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j0 = 0; j0 < COLS / 8; j0 += AT_ONCE) {
            float2 before[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                int col = 8 * (j0 + j) + lane_col;
                before[j] = own.at[h] && col < own.n_cols
                                ? read_pair(own.at[h] + col, col + 1 < own.n_cols, own.in_pairs)
                                : make_float2(0, 0);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                float *pair = &d[4 * (j0 + j) + 2 * h];
                pair[0] = alpha * pair[0] + beta * before[j].x;
                pair[1] = alpha * pair[1] + beta * before[j].y;
            }
        }
}

/* Four lanes have two columns of each of four groups of eight; afterwards each has a whole group,
 * which is one write. By all lanes of a warp. */
__device__ __forceinline__ uint4 trade(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t other = __shfl_xor_sync(~0u, odd ? a : b, 1);
    (odd ? a : b) = other;
    other = __shfl_xor_sync(~0u, odd ? c : d, 1);
    (odd ? c : d) = other;
    uint32_t first = __shfl_xor_sync(~0u, high ? a : c, 2);
    uint32_t second = __shfl_xor_sync(~0u, high ? b : d, 2);
    return high ? make_uint4(first, second, c, d) : make_uint4(a, b, first, second);
}

__device__ __forceinline__ void write_vectors(const float (&d)[COLS / 2],
                                              const own_rows<bf16> &own)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < COLS / 8; j += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                pairs[i] = pack_bf16(d[4 * (j + i) + 2 * h], d[4 * (j + i) + 2 * h + 1]);
            uint4 eight = trade(pairs[0], pairs[1], pairs[2], pairs[3]);
            int col = 8 * (j + (int)threadIdx.x % 4);
            if (own.at[h] && col < own.n_cols)
                *(uint4 *)(own.at[h] + col) = eight;
        }
}

template <typename C>
__device__ static void write_tile(float (&d)[COLS / 2], const cuda_tile_job &job,
                                  const cuda_tile_group &g, int64_t row0, int64_t col0)
{
    const own_rows<C> own = find_rows<C>(job, g, row0, col0);
    int lane_col = (int)threadIdx.x % 4 * 2;
    if (job.beta != 0)
        add_tile(d, own, job.alpha, job.beta);
    else if (job.alpha != 1)
#pragma unroll
        for (int i = 0; i < COLS / 2; i++)
            d[i] *= job.alpha;
    if constexpr (sizeof(C) == 2) {
        if (own.in_vectors) {
            write_vectors(d, own);
            return;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!own.at[h])
            continue;
#pragma unroll
        for (int j = 0; j < COLS / 8; j++) {
            int col = 8 * j + lane_col;
            if (col < own.n_cols)
                write_pair(own.at[h] + col, d[4 * j + 2 * h], d[4 * j + 2 * h + 1],
                           col + 1 < own.n_cols, own.in_pairs);
        }
    }
}

/* ---- the kernel ---- */

/* A warp's word that it has read a stage, to all who write into it. */
template <int PAIR>
__device__ __forceinline__ void release(uint64_t *empty)
{
    uint32_t lane = threadIdx.x % 32;
    if (PAIR == 1 && lane == 0)
        barrier_arrive(empty);
    if (PAIR > 1 && lane < PAIR)
        barrier_arrive_at(empty, lane);
}

/* The tile of this block in its pair's. */
template <int PAIR>
__device__ __forceinline__ place find_place(const cuda_tile_group *groups,
                                            const shared_state *state, int32_t n_groups,
                                            int32_t tile)
{
    place p = find_tile(groups, state->first_tile, n_groups, tile, PAIR * ROWS);
    p.row += (int64_t)(blockIdx.x % PAIR) * ROWS;
    return p;
}

template <int PAIR, bool A_T, bool B_T>
__device__ static void produce(char *ring, shared_state *state, const CUtensorMap *a,
                               const CUtensorMap *b, const cuda_tile_job &job,
                               const cuda_tile_group *groups, int32_t n_groups, int32_t n_tiles)
{
    turn t = {0, 0};
    for (int32_t tile = blockIdx.x / PAIR; tile < n_tiles; tile += gridDim.x / PAIR) {
        place p = find_place<PAIR>(groups, state, n_groups, tile);
        cuda_tile_group g = groups[p.group];
        int32_t n_steps = ((int32_t)g.k + DEPTH - 1) / DEPTH, rows = (ROWS + n_steps - 1) / n_steps;
        for (int32_t k = 0; k < (int32_t)g.k; k += DEPTH) {
            barrier_wait(&state->empty[t.stage], t.parity ^ 1); /* at once, the first time */
            load_stage<PAIR, A_T, B_T>(ring + t.stage * STAGE_BYTES, a, b, g, p,
                                       job.shared_b != NULL, k, blockIdx.x % PAIR,
                                       &state->full[t.stage]);
            if (job.beta != 0 && k / DEPTH * rows < ROWS)
                fetch_rows(job, g, p, k / DEPTH * rows, min(rows, ROWS - k / DEPTH * rows));
            turn_next(&t);
        }
    }
}

template <int PAIR, bool A_T, bool B_T, typename C>
__device__ static void consume(char *ring, shared_state *state, const cuda_tile_job &job,
                               const cuda_tile_group *groups, int32_t n_groups, int32_t n_tiles)
{
    int warpgroup = (int)threadIdx.x / 128 - 1;
    turn t = {0, 0};
    for (int32_t tile = blockIdx.x / PAIR; tile < n_tiles; tile += gridDim.x / PAIR) {
        place p = find_place<PAIR>(groups, state, n_groups, tile);
        int32_t n_k = (int32_t)groups[p.group].k;
        float d[COLS / 2];
        int before = -1; /* the stage that products may still be reading */
#pragma unroll
        for (int i = 0; i < COLS / 2; i++)
            d[i] = 0;
        for (int32_t k = 0; k < n_k; k += DEPTH) {
            char *stage = ring + t.stage * STAGE_BYTES;
            barrier_wait(&state->full[t.stage], t.parity);
            if (A_T && n_k - k < DEPTH)
                clear_tail(stage, n_k - k);
            wgmma_keep(d);
            wgmma_begin();
            multiply<A_T, B_T>(d, stage, warpgroup);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_keep(d);
            if (before >= 0)
                release<PAIR>(&state->empty[before]);
            before = t.stage;
            turn_next(&t);
        }
        wgmma_wait<0>();
        wgmma_keep(d);
        release<PAIR>(&state->empty[before]);
        write_tile<C>(d, job, groups[p.group], p.row + 64 * warpgroup, p.col);
    }
}

template <int PAIR, bool A_T, bool B_T, typename C>
__global__ static void __launch_bounds__(THREADS, 1)
    tiles_wide(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               const __grid_constant__ cuda_tile_job job, const cuda_tile_group *groups,
               int32_t n_groups, int32_t n_tiles)
{
    extern __shared__ char unaligned[];
    __shared__ shared_state state;
    char *ring = panel_align(unaligned);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&state.full[i], 1);
            barrier_init(&state.empty[i], N_WARPS * PAIR);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
        panel_fence();
    }
    for (int32_t i = (int32_t)threadIdx.x; i < n_groups; i += THREADS)
        state.first_tile[i] = (int32_t)groups[i].first_tile;
    __syncthreads();
    if (PAIR > 1)
        cluster_sync();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
        if (threadIdx.x == 0)
            produce<PAIR, A_T, B_T>(ring, &state, &a, &b, job, groups, n_groups, n_tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
        consume<PAIR, A_T, B_T, C>(ring, &state, job, groups, n_groups, n_tiles);
    }
    if (PAIR > 1)
        cluster_sync(); /* the other one writes into this one's memory */
}

/* ---- on the host ---- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver is not linked, so that programs start where there is none. */
static encode_fn find_encode()
{
    static encode_fn encode = NULL;
    cudaDriverEntryPointQueryResult found;
    void *p = NULL;
    if (!encode && cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000,
                                                    cudaEnableDefault, &found) == cudaSuccess)
        encode = (encode_fn)p;
    assert(encode);
    return encode;
}

/* Matrices (n_rows, n_cols) of bf16, slot_stride apart, read in boxes of box_rows x 64; what lies
 * beyond their ends reads as zero. */
static CUtensorMap map_of(const void *at, int64_t n_rows, int64_t n_cols, int64_t stride,
                          int64_t n_slots, int64_t slot_stride, int box_rows)
{
    CUtensorMap map;
    const cuuint64_t dims[3] = {(cuuint64_t)n_cols, (cuuint64_t)n_rows, (cuuint64_t)n_slots};
    const cuuint64_t strides[2] = {
        (cuuint64_t)stride * 2, (cuuint64_t)(slot_stride ? slot_stride : n_rows * stride) * 2,
    };
    const cuuint32_t box[3] = {DEPTH, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    CUresult rc = find_encode()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)at, dims,
                                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    assert(rc == CUDA_SUCCESS);
    return map;
}

template <int PAIR, bool A_T, bool B_T, typename C>
static void launch(struct device *dev, const cuda_tile_job *job, const CUtensorMap &a,
                   const CUtensorMap &b, const cuda_tile_group *groups, int32_t n_groups,
                   int32_t n_tiles)
{
    auto kernel = tiles_wide<PAIR, A_T, B_T, C>;
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = PAIR, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim.x = PAIR * grid_blocks(n_tiles, 1, cuda_n_multiprocessors(dev) / PAIR);
    config.blockDim.x = THREADS;
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = cuda_stream(dev);
    config.attrs = &cluster;
    config.numAttrs = 1;
    allow_shared(kernel, SHARED_BYTES);
    cudaLaunchKernelEx(&config, kernel, a, b, *job, groups, n_groups, n_tiles);
}

template <bool A_T, bool B_T, typename C>
static void launch_wide(struct device *dev, const cuda_tile_job *job,
                        const cuda_tile_group *groups, int32_t n_groups, int64_t n_tiles)
{
    int64_t n = job->n_shared_rows;
    /* b is (n, k) or (k, n) with n c's width and k a's. */
    int64_t b_rows = B_T ? job->c_stride : job->a_stride;
    int share = COLS / (job->in_pairs ? 2 : 1);
    CUtensorMap a = map_of(job->shared_a, n, job->a_stride, job->a_stride, 1, 0,
                           A_T ? DEPTH : ROWS);
    CUtensorMap b =
        A_T ? map_of(job->shared_b, n, job->b_stride, job->b_stride, 1, 0, DEPTH)
            : map_of(job->first_slot, b_rows, job->b_stride, job->b_stride, job->n_slots,
                     job->slot_stride, B_T ? share : DEPTH);
    if (job->in_pairs)
        launch<2, A_T, B_T, C>(dev, job, a, b, groups, n_groups, (int32_t)n_tiles);
    else
        launch<1, A_T, B_T, C>(dev, job, a, b, groups, n_groups, (int32_t)n_tiles);
}

extern "C" void cuda_tiles_wide_launch(struct device *dev, const cuda_tile_job *job,
                                       const cuda_tile_group *groups, int32_t n_groups,
                                       int64_t n_tiles)
{
    assert(n_tiles <= INT32_MAX);
    if (job->a_transposed) {
        assert(job->shared_b && !job->b_transposed && job->c_type == ELEM_F32);
        launch_wide<true, false, float>(dev, job, groups, n_groups, n_tiles);
        return;
    }
    assert(!job->shared_b && job->c_type == ELEM_BF16);
    if (job->b_transposed)
        launch_wide<false, true, bf16>(dev, job, groups, n_groups, n_tiles);
    else
        launch_wide<false, false, bf16>(dev, job, groups, n_groups, n_tiles);
}
