/* grouped_linear.cu - the experts' products in bf16 by warpgroups, fed by the copy engine
 *
 * A block has one producer, a thread that asks the copy engine for tiles of both operands into a
 * ring in shared memory, and two warpgroups that multiply them, 64 rows of the tile each. Blocks
 * stay and take one tile after another from all groups as from one list, so that the producer fills
 * the ring for the next tile while this one is written. Blocks may work in pairs on two tiles below
 * each other: each then asks for half of what they share of b, for both. Rows of a tile beyond the
 * group's belong to its neighbour: they are not written, and where rows are summed over they are
 * made zero. Such sums over few rows are added to c by the copy engine, through shared memory,
 * while the next tile is worked on (job.adds_boxes). Two pairs of operands are one sum, the second
 * behind the first. */
#include "kernels/copy_engine.cuh"
#include "kernels/wide_tile.cuh"

#define ROWS          CUDA_TILE_WIDE_ROWS
#define DEPTH         64 /* of a tile along k: one panel */
#define STAGES        4
#define THREADS       384 /* a warpgroup with the producer, and two that multiply */
#define N_WARPS       8   /* that multiply */
#define A_BYTES       (ROWS * DEPTH * 2)
#define B_BYTES       (COLS * DEPTH * 2)
#define STAGE_BYTES   (A_BYTES + B_BYTES)
#define RING_BYTES    (STAGES * STAGE_BYTES)
#define BOX_BYTES     (64 * PANEL_ROW_BYTES) /* of c, on its way; a warpgroup has two */
#define BOX_COLS      (PANEL_ROW_BYTES / 4)
#define PANEL_BYTES   (DEPTH * PANEL_ROW_BYTES) /* of an operand that is read by columns */
#define STRIP         8 /* tiles of rows that are done together: they share b through the cache */

struct place {
    int32_t group;
    int64_t row, col; /* of the tile's first element */
};

/* Beside the ring in shared memory: boxes, where there are any, and then first_tile of the groups,
 * which are fewer in products that may have boxes. */
#define BOXES_BYTES (4 * BOX_BYTES)
#define SHARED_BYTES(columns)                                                                      \
    (RING_BYTES + 1024 +                                                                           \
     (columns ? BOXES_BYTES + CUDA_TILE_BOXED_GROUPS_MAX * 4 : CUDA_TILE_WIDE_GROUPS_MAX * 4))
static_assert(CUDA_TILE_WIDE_GROUPS_MAX * 4 <= BOXES_BYTES, "of products of columns without boxes");

struct shared_state {
    uint64_t full[STAGES], empty[STAGES]; /* mbarriers */
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

/* ---- the producer ---- */

/* Tiles of a and b at k, of b the block's share. An operand whose rows are summed over comes in
 * panels of 64 columns. */
template <int PAIR, bool A_T, bool B_T>
__device__ static void load_stage(char *stage, const CUtensorMap *a, const CUtensorMap *b,
                                  const cuda_tile_group &g, int32_t b_slot, const place &p,
                                  bool b_is_shared, int32_t k, int rank, uint64_t *barrier)
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
        copy_box<PAIR>(stage, b, k, col, b_slot, barrier);
    else
        for (int i = 0; i < SHARE / 64; i++)
            copy_box<PAIR>(stage + i * PANEL_BYTES, b, col + 64 * i, b_is_shared ? g.row + k : k,
                           b_is_shared ? 0 : b_slot, barrier);
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

__device__ __forceinline__ void warpgroup_sync(int warpgroup)
{
    asm volatile("bar.sync %0, 128;\n" ::"r"(2 + warpgroup) : "memory");
}

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

/* ---- sums that are added ---- */

/* The warpgroup's 64 rows of a tile, whose first element is (row, col) of c's slot, a box at a time
 * through its two buffers, which leave while the next one is filled and the next tile is worked on.
 * n_sent boxes went before. What lies beyond the ends of c is not added. */
__device__ __forceinline__ void add_boxes(const float (&d)[COLS / 2], char *buffers,
                                          const CUtensorMap *c, int32_t row, int32_t col,
                                          int32_t slot, int32_t n_cols, int warpgroup,
                                          int *n_sent)
{
    int lane = (int)threadIdx.x & 31, own_row = 16 * ((int)threadIdx.x / 32 & 3) + lane / 4;
    bool leads = threadIdx.x % 128 == 0;
#pragma unroll
    for (int q = 0; q < COLS / BOX_COLS; q++) {
        if (q * BOX_COLS >= n_cols)
            break;
        char *to = buffers + (*n_sent)++ % 2 * BOX_BYTES;
        if (leads)
            boxes_wait_read<1>(); /* the one before the last has left this buffer */
        warpgroup_sync(warpgroup);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < BOX_COLS / 8; j++) {
                int at = 4 * (q * (BOX_COLS / 8) + j) + 2 * h;
                *(float2 *)(to + panel_offset<64>(own_row + 8 * h, 2 * j + lane % 4 / 2) +
                            lane % 2 * 8) = make_float2(d[at], d[at + 1]);
            }
        panel_fence();
        warpgroup_sync(warpgroup);
        if (leads)
            add_box(c, to, col + q * BOX_COLS, row, slot);
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
                                            const int32_t *first_tile, int32_t n_groups,
                                            int32_t tile)
{
    place p = find_tile(groups, first_tile, n_groups, tile, PAIR * ROWS);
    p.row += (int64_t)(blockIdx.x % PAIR) * ROWS;
    return p;
}

/* What is read through the copy engine; a2 and b2 where the job has a second pair. */
struct operand_maps {
    CUtensorMap a, b, a2, b2;
};

/* Steps of DEPTH of a tile of the group, over both pairs. */
__device__ __forceinline__ int32_t count_steps(const cuda_tile_job &job, const cuda_tile_group &g)
{
    return ((int32_t)g.k + DEPTH - 1) / DEPTH * (job.shared_a2 ? 2 : 1);
}

template <int PAIR, bool A_T, bool B_T>
__device__ static void produce(char *ring, shared_state *state, const operand_maps &maps,
                               const cuda_tile_job &job, const cuda_tile_group *groups,
                               const int32_t *first_tile, int32_t n_groups, int32_t n_tiles)
{
    turn t = {0, 0};
    for (int32_t tile = blockIdx.x / PAIR; tile < n_tiles; tile += gridDim.x / PAIR) {
        place p = find_place<PAIR>(groups, first_tile, n_groups, tile);
        cuda_tile_group g = groups[p.group];
        int32_t n_steps = count_steps(job, g), rows = (ROWS + n_steps - 1) / n_steps;
        for (int32_t step = 0, k = 0; step < n_steps; step++, k += DEPTH) {
            bool is_second = job.shared_a2 && step >= n_steps / 2;
            if (is_second && step == n_steps / 2)
                k = 0;
            barrier_wait(&state->empty[t.stage], t.parity ^ 1); /* at once, the first time */
            load_stage<PAIR, A_T, B_T>(ring + t.stage * STAGE_BYTES, is_second ? &maps.a2 : &maps.a,
                                       is_second ? &maps.b2 : &maps.b, g,
                                       is_second ? g.b2_slot : g.b_slot, p, job.shared_b != NULL,
                                       k, blockIdx.x % PAIR, &state->full[t.stage]);
            if (job.beta != 0 && step * rows < ROWS)
                fetch_rows(job, g, p, step * rows, min(rows, ROWS - step * rows));
            turn_next(&t);
        }
    }
}

/* The warpgroup's rows of the tile leave. */
template <bool A_T, typename C>
__device__ __forceinline__ void finish_tile(float (&d)[COLS / 2], char *buffers,
                                            const CUtensorMap *c, const cuda_tile_job &job,
                                            const cuda_tile_group &g, const place &p, int warpgroup,
                                            int *n_sent)
{
    int64_t row = p.row + 64 * warpgroup;
    if (A_T && job.adds_boxes)
        add_boxes(d, buffers, c, (int32_t)row, (int32_t)p.col, g.c_slot,
                  (int32_t)min(g.n - p.col, (int64_t)COLS), warpgroup, n_sent);
    else
        write_tile<C>(d, job, g, row, p.col);
}

template <int PAIR, bool A_T, bool B_T, typename C>
__device__ static void consume(char *ring, shared_state *state, const CUtensorMap *c,
                               const cuda_tile_job &job, const cuda_tile_group *groups,
                               const int32_t *first_tile, int32_t n_groups, int32_t n_tiles)
{
    int warpgroup = (int)threadIdx.x / 128 - 1, n_sent = 0;
    char *buffers = ring + RING_BYTES + warpgroup * 2 * BOX_BYTES;
    turn t = {0, 0};
    for (int32_t tile = blockIdx.x / PAIR; tile < n_tiles; tile += gridDim.x / PAIR) {
        place p = find_place<PAIR>(groups, first_tile, n_groups, tile);
        int32_t n_k = (int32_t)groups[p.group].k, n_steps = count_steps(job, groups[p.group]);
        float d[COLS / 2];
        int before = -1; /* the stage that products may still be reading */
#pragma unroll
        for (int i = 0; i < COLS / 2; i++)
            d[i] = 0;
        for (int32_t step = 0; step < n_steps; step++) {
            char *stage = ring + t.stage * STAGE_BYTES;
            barrier_wait(&state->full[t.stage], t.parity);
            if (A_T && n_k - step * DEPTH < DEPTH)
                clear_tail(stage, n_k - step * DEPTH);
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
        finish_tile<A_T, C>(d, buffers, c, job, groups[p.group], p, warpgroup, &n_sent);
    }
    if (n_sent > 0 && threadIdx.x % 128 == 0)
        boxes_wait();
}

template <int PAIR, bool A_T, bool B_T, typename C>
__global__ static void __launch_bounds__(THREADS, 1)
    tiles_wide(const __grid_constant__ operand_maps maps, const __grid_constant__ CUtensorMap c,
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
    int32_t *first_tile = (int32_t *)(ring + RING_BYTES + (job.adds_boxes ? BOXES_BYTES : 0));
    for (int32_t i = (int32_t)threadIdx.x; i < n_groups; i += THREADS)
        first_tile[i] = (int32_t)groups[i].first_tile;
    __syncthreads();
    if (PAIR > 1)
        cluster_sync();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
        if (threadIdx.x == 0)
            produce<PAIR, A_T, B_T>(ring, &state, maps, job, groups, first_tile, n_groups, n_tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
        consume<PAIR, A_T, B_T, C>(ring, &state, &c, job, groups, first_tile, n_groups, n_tiles);
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

/* Matrices (n_rows, n_cols) in slots, in boxes of box_rows x 128 bytes; what lies beyond their ends
 * reads as zero and is not written. */
static CUtensorMap map_of(enum elem_type type, const cuda_tile_slots &slots, int64_t n_rows,
                          int64_t n_cols, int64_t stride, int box_rows)
{
    CUtensorMap map;
    cuuint64_t size = type == ELEM_BF16 ? 2 : 4;
    int64_t slot_stride = slots.stride ? slots.stride : n_rows * stride;
    const cuuint64_t dims[3] = {(cuuint64_t)n_cols, (cuuint64_t)n_rows, (cuuint64_t)slots.n};
    const cuuint64_t strides[2] = {(cuuint64_t)stride * size, (cuuint64_t)slot_stride * size};
    const cuuint32_t box[3] = {(cuuint32_t)(PANEL_ROW_BYTES / size), (cuuint32_t)box_rows, 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    CUtensorMapDataType data = type == ELEM_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    CUresult rc = find_encode()(&map, data, 3, (void *)slots.first, dims, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    assert(rc == CUDA_SUCCESS);
    return map;
}

template <int PAIR, bool A_T, bool B_T, typename C>
static void launch(struct device *dev, const cuda_tile_job *job, const operand_maps &maps,
                   const CUtensorMap &c, const cuda_tile_group *groups, int32_t n_groups,
                   int32_t n_tiles)
{
    auto kernel = tiles_wide<PAIR, A_T, B_T, C>;
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = PAIR, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim.x = PAIR * grid_blocks(n_tiles, 1, cuda_n_multiprocessors(dev) / PAIR);
    config.blockDim.x = THREADS;
    config.dynamicSmemBytes = SHARED_BYTES(A_T);
    config.stream = cuda_stream(dev);
    config.attrs = &cluster;
    config.numAttrs = 1;
    allow_shared(kernel, SHARED_BYTES(A_T));
    cudaLaunchKernelEx(&config, kernel, maps, c, *job, groups, n_groups, n_tiles);
}

template <bool A_T, bool B_T, typename C>
static void launch_wide(struct device *dev, const cuda_tile_job *job,
                        const cuda_tile_group *groups, int32_t n_groups, int64_t n_tiles)
{
    int64_t n = job->n_shared_rows;
    /* b is (n, k) or (k, n) with n c's width and k a's. */
    int64_t b_rows = B_T ? job->c_stride : job->a_stride;
    int share = COLS / (job->in_pairs ? 2 : 1);
    auto map_a = [&](const void *at) {
        return map_of(ELEM_BF16, {at, 0, 1}, n, job->a_stride, job->a_stride, A_T ? DEPTH : ROWS);
    };
    auto map_b = [&](const cuda_tile_slots &slots) {
        return map_of(ELEM_BF16, slots, A_T ? n : b_rows, job->b_stride, job->b_stride,
                      B_T ? share : DEPTH);
    };
    operand_maps maps = {};
    maps.a = map_a(job->shared_a);
    maps.b = map_b(A_T ? cuda_tile_slots{job->shared_b, 0, 1} : job->b_slots);
    if (job->shared_a2) {
        maps.a2 = map_a(job->shared_a2);
        maps.b2 = map_b(job->b2_slots);
    }
    CUtensorMap c = {};
    if (job->adds_boxes)
        c = map_of(ELEM_F32, job->c_slots, job->a_stride, job->c_stride, job->c_stride, 64);
    if (job->in_pairs)
        launch<2, A_T, B_T, C>(dev, job, maps, c, groups, n_groups, (int32_t)n_tiles);
    else
        launch<1, A_T, B_T, C>(dev, job, maps, c, groups, n_groups, (int32_t)n_tiles);
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
