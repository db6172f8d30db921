/* job_data.c - the keys under data, and the seed */
#include "proto/job_data.h"

int job_data_config(const Ballast__JobSpec *s, enum job_data which, uint32_t vocab,
                    struct data_config *out, struct err *err)
{
    bool trains = which == JOB_TRAIN;
    struct data_config c = {
        .patterns = trains ? s->data_train : s->data_validation,
        .n_patterns = trains ? s->n_data_train : s->n_data_validation,
        .what = trains ? "data.train" : "data.validation",
        .sequence_length = s->data_sequence_length, .vocab = vocab, .pack = s->data_pack,
        .seed = s->train_seed,
    };
    int rc = data_format_parse(s->data_format, &c.format, err);
    if (rc == 0)
        *out = c;
    return rc;
}

struct data_step job_data_step(const Ballast__JobSpec *s, uint64_t step, uint64_t first)
{
    return (struct data_step){.step = step, .first = first,
                              .global_batch = s->train_global_batch,
                              .micro_batch = s->train_micro_batch, .world = s->parallel_workers};
}
