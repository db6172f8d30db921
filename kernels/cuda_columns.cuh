/* cuda_columns.cuh - threads that own columns and walk down a run of rows
 *
 * For ops without sums along a row: parameters of a column stay in registers, so do its gradient
 * sums and the rows of a window. */
#ifndef KERNELS_CUDA_COLUMNS_CUH
#define KERNELS_CUDA_COLUMNS_CUH

#include "kernels/cuda_rows.cuh"

#define COLUMN_THREADS        128
#define COLUMN_BLOCKS_PER_SM  8
#define RUN_ROWS_MIN          32 /* rows that share the reads of a column's parameters */

/* Rows are cut into n_runs of run_rows, the last one shorter. */
struct column_plan {
    int64_t n_column_blocks, n_runs, run_rows;
    unsigned n_blocks;
};

static inline struct column_plan column_plan_of(struct device *dev, int64_t n, int64_t n_threads)
{
    struct column_plan plan;
    plan.n_column_blocks = ceil_div(n_threads, COLUMN_THREADS);
    int64_t wanted = ceil_div((int64_t)COLUMN_BLOCKS_PER_SM * cuda_n_multiprocessors(dev),
                              plan.n_column_blocks);
    plan.run_rows = ceil_div(n, wanted);
    if (plan.run_rows < RUN_ROWS_MIN)
        plan.run_rows = RUN_ROWS_MIN;
    plan.n_runs = ceil_div(n, plan.run_rows);
    plan.n_blocks = (unsigned)(plan.n_column_blocks * plan.n_runs);
    return plan;
}

/* The document that row is in, of those that cu_seqlens (n_docs + 1, ascending) cuts. */
__device__ __forceinline__ int32_t document_of(const int32_t *cu_seqlens, int32_t n_docs,
                                               int64_t row)
{
    int32_t low = 0, high = n_docs;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (cu_seqlens[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

#endif
