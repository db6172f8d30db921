/* device_cpu.c - the CPU as a device: its table of ops, its memory, its threads */
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cpu.h"

#include "common/clock.h"
#include "common/host_memory.h"
#include "common/mem.h"
#include "common/progress.h"
#include "kernels/ops_cpu.h"
#include "kernels/pool.h"
#include "kernels/product.h"

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#ifdef BALLAST_APART
#define IS_HOST false
#else
#define IS_HOST true
#endif
#define ZERO_BYTES ((size_t)64 << 20) /* at once: a piece of work */
#define GRAIN_ELEMENTS  8192 /* of one task: some microseconds of an elementwise op */

struct cpu {
    struct pool       *pool;
    struct cpu_thread *threads;
    void  *shared;
    size_t shared_bytes;
    uint64_t *marks; /* clock_now_ns */
    uint32_t n_marks;
    struct device_memory memory; /* but for the scratch of threads */
};

static struct cpu *cpu_of(struct device *dev)
{
    return dev->state;
}

/* From here on only ops and copies of this device may touch it, where somebody looks. */
static void keep_apart(void *p, size_t n_bytes)
{
#ifdef BALLAST_APART
    __asan_poison_memory_region(p, n_bytes);
#else
    (void)p;
    (void)n_bytes;
#endif
}

/* Large blocks start on a huge page: the table walks of 4 KiB pages cost a tenth of a step. */
static void *aligned(size_t n_bytes)
{
    size_t alignment = n_bytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : CACHE_LINE_BYTES;
    if (n_bytes > SIZE_MAX - alignment)
        return NULL;
    size_t rounded = (n_bytes + alignment - 1) / alignment * alignment;
    void *p = aligned_alloc(alignment, rounded ? rounded : alignment);
    if (p && alignment == HUGE_PAGE_BYTES)
        madvise(p, rounded, MADV_HUGEPAGE);
    return p;
}

static void count(struct device *dev, void *p)
{
    struct device_memory *m = &cpu_of(dev)->memory;
    m->in_use += malloc_usable_size(p);
    m->n_allocs++;
    if (m->in_use > m->peak)
        m->peak = m->in_use;
}

static void *cpu_alloc(struct device *dev, size_t n_bytes)
{
    void *p = aligned(n_bytes);
    if (p) {
        count(dev, p);
        memset(p, 0, n_bytes);
        keep_apart(p, n_bytes);
    }
    return p;
}

static void cpu_free(struct device *dev, void *p)
{
    cpu_of(dev)->memory.in_use -= malloc_usable_size(p);
    free(p);
}

/* Scratch is never given back, so that its size now is its peak. */
static void cpu_memory(struct device *dev, struct device_memory *out)
{
    const struct cpu *cpu = cpu_of(dev);
    *out = cpu->memory;
    out->scratch = cpu->shared_bytes;
    for (uint32_t i = 0; i < dev->n_threads; i++) {
        out->scratch += cpu->threads[i].scratch_bytes + product_pack_floats() * sizeof(float);
        out->n_allocs += cpu->threads[i].n_grown;
    }
    out->in_use += out->scratch;
    out->peak += out->scratch;
    struct host_memory host = host_memory();
    out->total = host.total;
    out->available = host.available;
}

static void cpu_copy(struct device *dev, void *to, const void *from, size_t n_bytes)
{
    (void)dev;
    memmove(to, from, n_bytes);
}

static void cpu_pin(struct device *dev, void *host, size_t n_bytes)
{
    (void)dev;
    (void)host;
    (void)n_bytes;
}

static void cpu_unpin(struct device *dev, void *host)
{
    (void)dev;
    (void)host;
}

static void cpu_zero(struct device *dev, void *p, size_t n_bytes)
{
    char *at = p;
    (void)dev;
    for (size_t n; n_bytes > 0; at += n, n_bytes -= n) {
        n = n_bytes < ZERO_BYTES ? n_bytes : ZERO_BYTES;
        memset(at, 0, n);
        progress_made();
    }
}

static void cpu_synchronize(struct device *dev)
{
    (void)dev;
}

/* Ops are over when they return. */
static void cpu_mark(struct device *dev, uint32_t i)
{
    struct cpu *cpu = cpu_of(dev);
    if (i >= cpu->n_marks) {
        cpu->n_marks = 2 * i + 64;
        cpu->marks = xrealloc(cpu->marks, cpu->n_marks * sizeof *cpu->marks);
    }
    cpu->marks[i] = clock_now_ns();
}

static double cpu_elapsed(struct device *dev, uint32_t from, uint32_t to)
{
    const struct cpu *cpu = cpu_of(dev);
    assert(from < cpu->n_marks && to < cpu->n_marks);
    return (double)(cpu->marks[to] - cpu->marks[from]) / NS_PER_S;
}

static void *grow(void **block, size_t *block_bytes, size_t n_bytes)
{
    if (n_bytes > *block_bytes) {
        free(*block);
        *block = aligned(n_bytes);
        if (!*block)
            *block = xcalloc(1, n_bytes); /* ends the process with its one line */
        *block_bytes = n_bytes;
    }
    return *block;
}

void *cpu_scratch(struct cpu_thread *thread, size_t n_bytes)
{
    thread->n_grown += n_bytes > thread->scratch_bytes;
    return grow(&thread->scratch, &thread->scratch_bytes, n_bytes);
}

void *cpu_shared(struct device *dev, size_t n_bytes)
{
    struct cpu *cpu = cpu_of(dev);
    cpu->memory.n_allocs += n_bytes > cpu->shared_bytes;
    return grow(&cpu->shared, &cpu->shared_bytes, n_bytes);
}

static void cpu_reserve(struct device *dev, size_t n_bytes)
{
    cpu_shared(dev, n_bytes);
}

struct split {
    struct cpu *cpu;
    cpu_task task;
    void    *arg;
    int64_t  n, grain;
};

static void run_piece(void *arg, uint32_t piece, uint32_t thread)
{
    struct split *s = arg;
    int64_t begin = piece * s->grain;
    s->task(s->arg, begin, min_i64(s->n, begin + s->grain), &s->cpu->threads[thread]);
}

void cpu_for(struct device *dev, int64_t n, int64_t grain, cpu_task task, void *arg)
{
    assert(grain > 0);
    int64_t n_tasks = cpu_n_tasks(n, grain);
    assert(n_tasks <= UINT32_MAX);
    struct split s = {cpu_of(dev), task, arg, n, grain};
    pool_run(s.cpu->pool, (uint32_t)n_tasks, run_piece, &s);
}

int64_t cpu_grain(int64_t d)
{
    return max_i64(1, GRAIN_ELEMENTS / max_i64(1, d));
}

struct parts {
    float *to;
    const float *from;
    int64_t n_parts, d;
};

static void add_parts(void *arg, int64_t begin, int64_t end, struct cpu_thread *thread)
{
    (void)thread;
    struct parts *a = arg;
    for (int64_t part = 0; part < a->n_parts; part++)
        for (int64_t j = begin; j < end; j++)
            a->to[j] += a->from[part * a->d + j];
}

void cpu_add_parts(struct device *dev, float *to, const float *from, int64_t n_parts, int64_t d)
{
    struct parts a = {to, from, n_parts, d};
    cpu_for(dev, d, cpu_grain(n_parts), add_parts, &a);
}

static void cpu_close(struct device *dev)
{
    if (!dev)
        return;
    struct cpu *cpu = cpu_of(dev);
    pool_destroy(cpu->pool);
    for (uint32_t i = 0; i < dev->n_threads; i++) {
        free(cpu->threads[i].pack);
        free(cpu->threads[i].scratch);
    }
    free(cpu->threads);
    free(cpu->shared);
    free(cpu->marks);
    free(cpu);
    free(dev);
}

static void cpu_step_over(struct device *dev)
{
    (void)dev;
}

static const struct device_ops cpu_ops = {
    .name                      = "cpu",
    .close                     = cpu_close,
    .alloc                     = cpu_alloc,
    .free                      = cpu_free,
    .copy                      = cpu_copy,
    .to_device                 = cpu_copy,
    .to_host                   = cpu_copy,
    .pin                       = cpu_pin,
    .unpin                     = cpu_unpin,
    .zero                      = cpu_zero,
    .synchronize               = cpu_synchronize,
    .mark                      = cpu_mark,
    .elapsed                   = cpu_elapsed,
    .step_over                 = cpu_step_over,
    .memory                    = cpu_memory,
    .reserve                   = cpu_reserve,
    .axpy                      = cpu_axpy,
    .scale                     = cpu_scale,
    .add                       = cpu_add,
    .to_f32                    = cpu_cast,
    .to_elem                   = cpu_cast,
    .sum_squares               = cpu_sum_squares,
    .all_finite                = cpu_all_finite,
    .checksum                  = cpu_checksum,
    .linear                    = cpu_linear,
    .linear_f32                = cpu_linear,
    .linear_dx                 = cpu_linear_dx,
    .linear_dw                 = cpu_linear_dw,
    .grouped_linear            = cpu_grouped_linear,
    .grouped_linear_dx         = cpu_grouped_linear_dx,
    .grouped_linear_dx_pair    = cpu_grouped_linear_dx_pair,
    .grouped_linear_dw         = cpu_grouped_linear_dw,
    .grouped_linear_packed     = cpu_grouped_linear_packed,
    .grouped_linear_packed_dx  = cpu_grouped_linear_packed_dx,
    .unpack                    = cpu_unpack,
    .heads_linear              = cpu_heads_linear,
    .heads_linear_dx           = cpu_heads_linear_dx,
    .heads_linear_dw           = cpu_heads_linear_dw,
    .rms_norm                  = cpu_rms_norm,
    .rms_norm_backward         = cpu_rms_norm_backward,
    .gated_rms_norm            = cpu_gated_rms_norm,
    .gated_rms_norm_backward   = cpu_gated_rms_norm_backward,
    .l2_norm                   = cpu_l2_norm,
    .l2_norm_backward          = cpu_l2_norm_backward,
    .layer_norm                = cpu_layer_norm,
    .layer_norm_backward       = cpu_layer_norm_backward,
    .sigmoid_gate              = cpu_sigmoid_gate,
    .sigmoid_gate_backward     = cpu_sigmoid_gate_backward,
    .sigmoid                   = cpu_sigmoid,
    .sigmoid_backward          = cpu_sigmoid_backward,
    .situ                      = cpu_situ,
    .situ_backward             = cpu_situ_backward,
    .swiglu                    = cpu_swiglu,
    .swiglu_backward           = cpu_swiglu_backward,
    .short_conv                = cpu_short_conv,
    .short_conv_backward       = cpu_short_conv_backward,
    .kda_gate                  = cpu_kda_gate,
    .kda_gate_backward         = cpu_kda_gate_backward,
    .kda_saved_floats          = cpu_kda_saved_floats,
    .kda_forward               = cpu_kda_forward,
    .kda_backward              = cpu_kda_backward,
    .attention                 = cpu_attention,
    .attention_backward        = cpu_attention_backward,
    .rotary                    = cpu_rotary,
    .rotary_backward           = cpu_rotary_backward,
    .index_scores              = cpu_index_scores,
    .index_select              = cpu_index_select,
    .sparse_attention          = cpu_sparse_attention,
    .sparse_attention_backward = cpu_sparse_attention_backward,
    .index_loss                = cpu_index_loss,
    .index_loss_dense          = cpu_index_loss_dense,
    .attn_res                  = cpu_attn_res,
    .attn_res_backward         = cpu_attn_res_backward,
    .router                    = cpu_router,
    .router_backward           = cpu_router_backward,
    .router_capacity           = cpu_router_capacity,
    .router_segment_counts     = cpu_router_segment_counts,
    .router_aux_loss           = cpu_router_aux_loss,
    .router_z_loss             = cpu_router_z_loss,
    .router_histogram          = cpu_router_histogram,
    .combine                   = cpu_combine,
    .combine_backward          = cpu_combine_backward,
    .gather_rows               = cpu_gather_rows,
    .scatter_add_rows          = cpu_scatter_add_rows,
    .route_counts              = cpu_route_counts,
    .route_pairs               = cpu_route_pairs,
    .route_rows                = cpu_route_rows,
    .route_write               = cpu_route_write,
    .route_read                = cpu_route_read,
    .route_blocks              = cpu_route_blocks,
    .embedding                 = cpu_embedding,
    .embedding_backward        = cpu_embedding_backward,
    .linear_cross_entropy      = cpu_linear_cross_entropy,
    .adamw                     = cpu_adamw,
    .muon                      = cpu_muon,
    .newton_schulz             = cpu_newton_schulz,
};

int device_cpu_open(uint32_t n_threads, bool deterministic, struct device **out, struct err *err)
{
    struct device *dev = xcalloc(1, sizeof *dev);
    struct cpu *cpu = xcalloc(1, sizeof *cpu);
    cpu->pool = pool_create(n_threads);
    *dev = (struct device){.ops = &cpu_ops, .elem = ELEM_F32, .is_host = IS_HOST,
                           .n_threads = pool_n_threads(cpu->pool), .deterministic = deterministic,
                           .state = cpu};
    cpu->threads = xcalloc(dev->n_threads, sizeof cpu->threads[0]);
    for (uint32_t i = 0; i < dev->n_threads; i++) {
        struct cpu_thread *t = &cpu->threads[i];
        t->pack = aligned(product_pack_floats() * sizeof(float));
        if (!t->pack) {
            err_set(err, -ENOMEM, "cpu device: no memory for thread %u of %u", i, dev->n_threads);
            cpu_close(dev);
            return -ENOMEM;
        }
    }
    *out = dev;
    return 0;
}
