/* run_log.c - a run in the output of its ranks: where it starts, what it takes, each step */
#include "worker/run_log.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "common/clock.h"

#define LOG_INTERVAL_NS (200 * NS_PER_MS)

void run_log_start(const struct run *r)
{
    struct model_counts n = model_spec_count(&r->model_spec);
    printf("rank %u of %u: %.2f M parameters, %.1f MiB of state here, %u threads, %s %" PRIu64 "\n",
           r->coll->rank, r->coll->world, (double)n.total / 1e6,
           (double)shard_state_bytes(r->shard) / (1 << 20), r->dev->n_threads,
           r->state.step > 0 ? "resumes from step" : "starts at step", r->state.step);
    struct data_counts data = data_count(r->train);
    if (r->coll->rank == 0)
        printf("data: %" PRIu64 " tokens in %" PRIu64 " documents, %" PRIu64
               " sequences an epoch\n", data.n_tokens, data.n_documents, data.n_windows);
}

static double mib(uint64_t n_bytes)
{
    return (double)n_bytes / (1 << 20);
}

void run_log_plan(const struct run *r)
{
    const struct memory_plan *p = &r->plan;
    const struct { const char *name; uint64_t bytes; } rows[] = {
        {"weights", p->weights}, {"gradients", p->gradients}, {"optimizer", p->optimizer},
        {"activations", p->activations}, {"gathered", p->gathered}, {"dispatch", p->dispatch},
        {"staging", p->staging}, {"counters", p->counters}, {"scratch", p->scratch},
        {"process", p->process}, {"total", p->total},
    };
    printf("memory planned for each rank, in MiB\n");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        printf("  %-12s %12.2f\n", rows[i].name, mib(rows[i].bytes));
}

/* Part by part where a part can be measured. */
void run_log_usage(const struct run *r)
{
    const struct memory_plan *p = &r->plan;
    if (!r->model || r->usage.peak == 0)
        return;
    const struct { const char *name; uint64_t planned, taken; } rows[] = {
        {"state", p->weights + p->gradients + p->optimizer, shard_state_bytes(r->shard)},
        {"activations", p->activations, model_activation_bytes(r->model)},
        {"gathered", p->gathered, shard_buffer_bytes(r->shard)},
        {"dispatch", p->dispatch, r->dispatch ? dispatch_bytes(r->dispatch) : 0},
        {"scratch", p->scratch, r->usage.scratch},
        {"total", p->total, r->usage.peak},
    };
    printf("memory of rank %u, in MiB: planned, taken at most, planned / taken\n", r->coll->rank);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        printf("  %-12s %12.2f %12.2f %8.3f\n", rows[i].name, mib(rows[i].planned),
               mib(rows[i].taken), rows[i].taken ? (double)rows[i].planned / (double)rows[i].taken
                                                 : 1);
}

void run_log_traffic(const struct run *r)
{
    struct dispatch_traffic n = r->dispatch ? dispatch_traffic(r->dispatch)
                                            : (struct dispatch_traffic){0};
    if (n.sent + n.returned > 0)
        printf("rank %u sent %" PRIu64 " rows of tokens and gradients to experts, %" PRIu64
               " of them to other nodes, and returned %" PRIu64 ", %" PRIu64 " of them to other "
               "nodes\n", r->coll->rank, n.sent, n.sent_between, n.returned, n.returned_between);
}

void run_log_step(const struct run *run, const struct step_result *r, double validation_loss,
                  uint64_t *logged_ns)
{
    uint64_t now = clock_now_ns();
    bool is_end = run->state.step == 1 || run->state.step == run->spec->train_steps;
    if (run->coll->rank != 0 ||
        (!is_end && isnan(validation_loss) && now - *logged_ns < LOG_INTERVAL_NS))
        return;
    *logged_ns = now;
    printf("step=%" PRIu64 "/%" PRIu64 " loss=%.4f grad_norm=%.3f lr=%.3g tokens_per_s=%.0f",
           run->state.step, run->spec->train_steps, r->loss, r->grad_norm, r->lr,
           r->tokens_per_second);
    if (!isnan(r->aux_loss))
        printf(" aux_loss=%.4f", r->aux_loss);
    if (!isnan(r->z_loss))
        printf(" z_loss=%.4f", r->z_loss);
    if (!isnan(r->index_loss))
        printf(" index_loss=%.4f", r->index_loss);
    if (r->n_rerouted + r->n_dropped > 0)
        printf(" rerouted=%" PRIu64 " dropped=%" PRIu64, r->n_rerouted, r->n_dropped);
    if (run->coll->world > 1 && r->busy_s > 0)
        printf(" busiest=%" PRIu32 ":%.3f least_busy=%.3f", r->busiest, r->busy_s,
               r->least_busy_s);
    if (!isnan(validation_loss))
        printf(" validation_loss=%.4f", validation_loss);
    printf("\n");
}
