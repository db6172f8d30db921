/* step_batch.c - a rank's part of a step, as data_step.h deals it out */
#include "worker/step_batch.h"

#include "kernels/spans.h"
#include "proto/job_data.h"
#include "worker/phases.h"

static struct data_step next_step(const struct run *run)
{
    return job_data_step(run->spec, run->state.step + 1, run->state.next_sample);
}

uint64_t step_n_batches(const struct run *run)
{
    struct data_step s = next_step(run);
    return data_step_passes(&s);
}

int step_batch(struct run *run, uint64_t k, struct err *err)
{
    struct data_step s = next_step(run);
    uint64_t first = data_step_sample(&s, run->coll->rank, k);
    int rc = 0;
    data_batch_clear(&run->batch);
    spans_begin(run->dev, PHASE_DATA, -1);
    for (uint32_t i = 0; i < s.micro_batch && rc == 0; i++)
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
