/* cuda_products.c - products through cuBLASLt, and the linear ops that are one
 *
 * cuBLASLt is asked once per shape which of its kernels to take; the answer is kept, as asking
 * costs more than a small product. It works in a workspace of ours on the device's stream. It has
 * no kernel for some odd strides, and its bits depend on the number of rows, so that
 * cuda_product_tiled does those products and all of a deterministic device. */
#include "kernels/cuda_products.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cublasLt.h>

#include "common/hash.h"
#include "common/mem.h"
#include "kernels/cuda_state.h"

#define WORKSPACE_BYTES ((size_t)64 << 20)
#define N_BUCKETS       4096 /* of the answers kept; a power of two */
#define N_KEPT_MAX      (N_BUCKETS / 2)
#define ALIGNMENT_MAX   256

/* All that the choice of a kernel depends on. Compared as bytes, so there is no padding in it. */
struct key {
    int64_t m, n, k;
    int64_t c_stride, a_stride, b_stride;
    int64_t c_batch, a_batch, b_batch;
    int32_t n_batches;
    int32_t types; /* a_transposed, b_transposed, type, c_type: a bit each */
    int32_t c_alignment, a_alignment, b_alignment;
    int32_t is_used;
};

struct answer {
    struct key key;
    cublasLtMatmulDesc_t   desc;
    cublasLtMatrixLayout_t c, a, b;
    cublasLtMatmulAlgo_t   algo;
    bool has_algo; /* else cuBLASLt has none */
};

struct cuda_products {
    cublasLtHandle_t handle;
    void *workspace;
    struct answer *answers; /* N_BUCKETS, open addressing */
    int n_kept;
};

static void must(const struct cuda *cuda, const char *op, cublasStatus_t status)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return;
    fprintf(stderr, "cuda:%d: op %s: cuBLASLt: %s\n", cuda->index, op,
            cublasLtGetStatusString(status));
    fflush(stderr);
    _exit(CUDA_EXIT_CODE);
}

/* ---- open and close ---- */

int cuda_products_open(struct cuda *cuda, struct err *err)
{
    struct cuda_products *s = xcalloc(1, sizeof *s);
    cuda->products = s;
    s->answers = xcalloc(N_BUCKETS, sizeof s->answers[0]);
    cublasStatus_t status = cublasLtCreate(&s->handle);
    if (status != CUBLAS_STATUS_SUCCESS)
        return err_set(err, -EIO, "device cuda:%d: cuBLASLt: %s", cuda->index,
                       cublasLtGetStatusString(status));
    if (cuda_hold(cuda, &s->workspace, WORKSPACE_BYTES) != cudaSuccess)
        return err_set(err, -ENOMEM, "device cuda:%d: no memory for the %zu bytes of cuBLASLt's "
                       "workspace", cuda->index, WORKSPACE_BYTES);
    return 0;
}

static void answer_fini(struct answer *w)
{
    if (w->desc)
        cublasLtMatmulDescDestroy(w->desc);
    cublasLtMatrixLayout_t layouts[] = {w->c, w->a, w->b};
    for (int i = 0; i < 3; i++)
        if (layouts[i])
            cublasLtMatrixLayoutDestroy(layouts[i]);
    memset(w, 0, sizeof *w);
}

static void forget_all(struct cuda_products *s)
{
    for (int i = 0; i < N_BUCKETS; i++)
        answer_fini(&s->answers[i]);
    s->n_kept = 0;
}

void cuda_products_close(struct cuda *cuda)
{
    struct cuda_products *s = cuda->products;
    if (!s)
        return;
    forget_all(s);
    if (s->handle)
        cublasLtDestroy(s->handle);
    cuda_release(cuda, s->workspace);
    free(s->answers);
    free(s);
    cuda->products = NULL;
}

/* ---- one answer ---- */

static int32_t alignment_of(const void *p)
{
    uintptr_t lowest_bit = (uintptr_t)p & -(uintptr_t)p;
    return lowest_bit == 0 || lowest_bit > ALIGNMENT_MAX ? ALIGNMENT_MAX : (int32_t)lowest_bit;
}

static struct key key_of(const struct cuda_product *p)
{
    return (struct key){
        p->m, p->n, p->k, p->c_stride, p->a_stride, p->b_stride, p->c_batch, p->a_batch,
        p->b_batch, p->n_batches > 1 ? p->n_batches : 1,
        p->a_transposed | p->b_transposed << 1 | (p->type == ELEM_BF16) << 2 |
            (p->c_type == ELEM_BF16) << 3,
        alignment_of(p->c), alignment_of(p->a), alignment_of(p->b), 1,
    };
}

static cudaDataType_t data_type(enum elem_type type)
{
    return type == ELEM_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* cuBLASLt's matrices are column-major: rows of ours are columns of its. */
static cublasLtMatrixLayout_t layout_of(const struct cuda *cuda, const char *op,
                                        enum elem_type type, int64_t rows, int64_t cols,
                                        int64_t stride, int32_t n_batches, int64_t batch)
{
    cublasLtMatrixLayout_t layout;
    must(cuda, op, cublasLtMatrixLayoutCreate(&layout, data_type(type), (uint64_t)cols,
                                              (uint64_t)rows, stride));
    must(cuda, op, cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                    &n_batches, sizeof n_batches));
    must(cuda, op,
         cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                          &batch, sizeof batch));
    return layout;
}

static void choose(const struct cuda *cuda, const char *op, struct answer *w)
{
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        int32_t n_bytes;
    } alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, w->key.b_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, w->key.a_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, w->key.c_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, w->key.c_alignment},
    };
    uint64_t workspace_bytes = WORKSPACE_BYTES;
    int n_results = 0;
    must(cuda, op, cublasLtMatmulPreferenceCreate(&preference));
    must(cuda, op, cublasLtMatmulPreferenceSetAttribute(
                       preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                       sizeof workspace_bytes));
    for (size_t i = 0; i < sizeof alignments / sizeof alignments[0]; i++) {
        uint32_t n_bytes = (uint32_t)alignments[i].n_bytes;
        must(cuda, op, cublasLtMatmulPreferenceSetAttribute(preference, alignments[i].name,
                                                            &n_bytes, sizeof n_bytes));
    }
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        cuda->products->handle, w->desc, w->b, w->a, w->c, w->c, preference, 1, &result,
        &n_results);
    w->has_algo = status == CUBLAS_STATUS_SUCCESS && n_results > 0 &&
                  result.state == CUBLAS_STATUS_SUCCESS;
    if (w->has_algo)
        w->algo = result.algo;
    cublasLtMatmulPreferenceDestroy(preference);
}

/* c^T = b^T a^T, which is what its column-major eye sees: its A is our b. */
static void answer_init(const struct cuda *cuda, const char *op, const struct cuda_product *p,
                        struct answer *w)
{
    cublasComputeType_t compute = p->type == ELEM_BF16 ? CUBLAS_COMPUTE_32F
                                                       : CUBLAS_COMPUTE_32F_PEDANTIC;
    cublasOperation_t for_b = p->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t for_a = p->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t n = w->key.n_batches;
    must(cuda, op, cublasLtMatmulDescCreate(&w->desc, compute, CUDA_R_32F));
    must(cuda, op, cublasLtMatmulDescSetAttribute(w->desc, CUBLASLT_MATMUL_DESC_TRANSA, &for_b,
                                                  sizeof for_b));
    must(cuda, op, cublasLtMatmulDescSetAttribute(w->desc, CUBLASLT_MATMUL_DESC_TRANSB, &for_a,
                                                  sizeof for_a));
    w->c = layout_of(cuda, op, p->c_type, p->m, p->n, p->c_stride, n, p->c_batch);
    w->a = layout_of(cuda, op, p->type, p->a_transposed ? p->k : p->m,
                     p->a_transposed ? p->m : p->k, p->a_stride, n, p->a_batch);
    w->b = layout_of(cuda, op, p->type, p->b_transposed ? p->n : p->k,
                     p->b_transposed ? p->k : p->n, p->b_stride, n, p->b_batch);
    choose(cuda, op, w);
}

static uint64_t hash_of(const struct key *key)
{
    uint64_t h = hash_fnv(HASH_FNV, key, sizeof *key);
    return h ^ h >> 32;
}

static struct answer *find(struct cuda *cuda, const char *op, const struct cuda_product *p)
{
    struct cuda_products *s = cuda->products;
    struct key key = key_of(p);
    for (uint64_t i = hash_of(&key);; i++) {
        struct answer *w = &s->answers[i % N_BUCKETS];
        if (memcmp(&w->key, &key, sizeof key) == 0)
            return w;
        if (w->key.is_used)
            continue;
        if (s->n_kept == N_KEPT_MAX) {
            forget_all(s);
            return find(cuda, op, p);
        }
        s->n_kept++;
        w->key = key;
        answer_init(cuda, op, p, w);
        return w;
    }
}

void cuda_product(struct device *dev, const char *op, const struct cuda_product *p)
{
    _Static_assert(sizeof(struct key) == 9 * 8 + 6 * 4, "struct key has padding");
    struct cuda *cuda = cuda_of(dev);
    assert(p->k > 0 && p->c_type <= p->type);
    if (p->m == 0 || p->n == 0)
        return;
    const struct answer *w = dev->deterministic ? NULL : find(cuda, op, p);
    if (!w || !w->has_algo) {
        cuda_product_tiled(dev, op, p);
        return;
    }
    must(cuda, op, cublasLtMatmul(cuda->products->handle, w->desc, &p->alpha, p->b, w->b, p->a,
                                  w->a, &p->beta, p->c, w->c, p->c, w->c, &w->algo,
                                  cuda->products->workspace, WORKSPACE_BYTES, cuda->stream));
    cuda_check(dev, op, "m=%lld n=%lld k=%lld", (long long)p->m, (long long)p->n,
               (long long)p->k);
}
