/* cuda_times.cu - how long each op takes in a step, where BALLAST_OP_TIMES=1 asks for it
 *
 * Every entry of the table gets a twin that records an event before and after it. Events are read
 * at the end of a step, so nothing waits earlier. Where the device has nothing to do, the time
 * that a launch takes to reach it is part of the op's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>

#include "kernels/cuda_state.h"
#include "kernels/ops_cuda.h"

#define WARM_STEPS 3 /* the first ones choose kernels and take scratch */
#define SPANS_MAX  (1 << 14)

#define TIMED(OP)                                                                                  \
    CUDA_OPS(OP) OP(alloc) OP(free) OP(copy) OP(to_device) OP(to_host) OP(zero) OP(synchronize)

namespace {

enum {
#define NUMBER(op) OP_##op,
    TIMED(NUMBER) N_TIMED
};

const char *const names[] = {
#define NAME(op) #op,
    TIMED(NAME)
};

struct sums {
    uint64_t n_calls;
    double   device_ms, host_ms;
};

struct span {
    int         op;
    cudaEvent_t begin, end; /* made at first use */
    double      host_ms;
};

double now_ms()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

} // namespace

struct cuda_times {
    const struct device_ops *plain;
    struct device_ops timed;
    struct span *spans; /* of this step, n_spans */
    int      n_spans, depth; /* depth: ops that ops call are theirs */
    uint64_t n_steps;
    struct sums step[N_TIMED], all[N_TIMED]; /* all: of steps after the first */
};

namespace {

void read_spans(struct cuda *cuda)
{
    struct cuda_times *t = cuda->times;
    cuda_must(cuda, cudaStreamSynchronize(cuda->stream), "timing ops");
    for (int i = 0; i < t->n_spans; i++) {
        const struct span *s = &t->spans[i];
        float ms = 0;
        cuda_must(cuda, cudaEventElapsedTime(&ms, s->begin, s->end), "timing ops");
        t->step[s->op].n_calls++;
        t->step[s->op].device_ms += ms;
        t->step[s->op].host_ms += s->host_ms;
    }
    t->n_spans = 0;
}

struct span *begin(struct cuda *cuda, int op)
{
    struct cuda_times *t = cuda->times;
    if (t->depth++ > 0)
        return NULL;
    if (t->n_spans == SPANS_MAX)
        read_spans(cuda);
    struct span *s = &t->spans[t->n_spans++];
    if (!s->begin) {
        cuda_must(cuda, cudaEventCreate(&s->begin), "timing ops");
        cuda_must(cuda, cudaEventCreate(&s->end), "timing ops");
    }
    s->op = op;
    s->host_ms = now_ms();
    cuda_must(cuda, cudaEventRecord(s->begin, cuda->stream), "timing ops");
    return s;
}

void end(struct cuda *cuda, struct span *s)
{
    cuda->times->depth--;
    if (!s)
        return;
    cuda_must(cuda, cudaEventRecord(s->end, cuda->stream), "timing ops");
    s->host_ms = now_ms() - s->host_ms;
}

struct taking_time {
    struct cuda *cuda;
    struct span *s;
    taking_time(struct device *dev, int op) : cuda(cuda_of(dev)), s(begin(cuda, op)) {}
    ~taking_time() { end(cuda, s); }
};

template <typename F> struct twin;

template <typename R, typename... Args> struct twin<R (*)(struct device *, Args...)> {
    template <R (*device_ops::*entry)(struct device *, Args...), int op>
    static R call(struct device *dev, Args... args)
    {
        taking_time from_here_on(dev, op);
        return (from_here_on.cuda->times->plain->*entry)(dev, args...);
    }
};

} // namespace

extern "C" const struct device_ops *cuda_times_open(struct cuda *cuda,
                                                    const struct device_ops *plain)
{
    struct cuda_times *t = (struct cuda_times *)calloc(1, sizeof *t);
    struct span *spans = (struct span *)calloc(SPANS_MAX, sizeof *spans);
    assert(t && spans);
    t->plain = plain;
    t->spans = spans;
    t->timed = *plain;
#define TWIN(op) t->timed.op = twin<decltype(t->timed.op)>::call<&device_ops::op, OP_##op>;
    TIMED(TWIN)
    cuda->times = t;
    return &t->timed;
}

extern "C" void cuda_times_step_over(struct cuda *cuda)
{
    struct cuda_times *t = cuda->times;
    read_spans(cuda);
    if (t->n_steps++ >= WARM_STEPS)
        for (int i = 0; i < N_TIMED; i++) {
            t->all[i].n_calls += t->step[i].n_calls;
            t->all[i].device_ms += t->step[i].device_ms;
            t->all[i].host_ms += t->step[i].host_ms;
        }
    memset(t->step, 0, sizeof t->step);
}

/* One line an op, the longest first; on stderr, as a trainer's stdout is its log. */
static void print(const struct cuda_times *t)
{
    int order[N_TIMED];
    double n = (double)(t->n_steps - WARM_STEPS), device_ms = 0, host_ms = 0, n_calls = 0;
    for (int i = 0; i < N_TIMED; i++)
        order[i] = i;
    std::sort(order, order + N_TIMED,
              [&](int a, int b) { return t->all[a].device_ms > t->all[b].device_ms; });
    fprintf(stderr, "%-28s %8s %10s %10s   in a step, over %.0f steps\n", "op", "calls",
            "device ms", "host ms", n);
    for (int i = 0; i < N_TIMED; i++) {
        const struct sums *s = &t->all[order[i]];
        if (s->n_calls == 0)
            continue;
        fprintf(stderr, "%-28s %8.1f %10.3f %10.3f\n", names[order[i]], (double)s->n_calls / n,
                s->device_ms / n, s->host_ms / n);
        device_ms += s->device_ms;
        host_ms += s->host_ms;
        n_calls += (double)s->n_calls;
    }
    fprintf(stderr, "%-28s %8.1f %10.3f %10.3f\n", "all", n_calls / n, device_ms / n, host_ms / n);
}

extern "C" void cuda_times_close(struct cuda *cuda)
{
    struct cuda_times *t = cuda->times;
    if (!t)
        return;
    if (t->n_steps > WARM_STEPS)
        print(t);
    for (int i = 0; i < SPANS_MAX && t->spans[i].begin; i++) {
        cudaEventDestroy(t->spans[i].begin);
        cudaEventDestroy(t->spans[i].end);
    }
    free(t->spans);
    free(t);
    cuda->times = NULL;
}
