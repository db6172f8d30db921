/* step_batch.c - sample i of a step goes to rank (i / micro_batch) % world
 *
 * So a step reads the same samples on any number of ranks. */
#include "worker/step_batch.h"

#include "kernels/spans.h"
#include "worker/phases.h"

uint64_t step_n_batches(const struct run *run)
{
    return run->spec->train_global_batch /
           ((uint64_t)run->spec->train_micro_batch * run->coll->world);
}

int step_batch(struct run *run, uint64_t k, struct err *err)
{
    uint64_t n = run->spec->train_micro_batch;
    uint64_t first = run->state.next_sample + (k * run->coll->world + run->coll->rank) * n;
    int rc = 0;
    data_batch_clear(&run->batch);
    spans_begin(run->dev, PHASE_DATA, -1);
    for (uint64_t i = 0; i < n && rc == 0; i++)
        rc = data_sample(run->train, first + i, &run->batch, err);
    spans_end(run->dev);
    return rc;
}

struct model_batch step_batch_of(const struct data_batch *b)
{
    return (struct model_batch){.tokens = b->tokens, .labels = b->labels,
                                .cu_seqlens = b->n_docs > 0 ? b->cu_seqlens : NULL,
                                .n_tokens = b->n_tokens, .n_docs = b->n_docs};
}
