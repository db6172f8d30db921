/* a_job.h - a small valid job for tests */
#ifndef TESTS_A_JOB_H
#define TESTS_A_JOB_H

#include "common/mem.h"
#include "proto/job_spec.h"

static inline void a_job_init(Ballast__JobSpec *spec, uint32_t n_workers)
{
    ballast__job_spec__init(spec);
    fields_init(&job_spec_table, spec);
    spec->name = xstrdup("a-job");
    spec->model_path = xstrdup("/models/tiny");
    spec->data_train = xcalloc(1, sizeof *spec->data_train);
    spec->data_train[0] = xstrdup("/text/a.txt");
    spec->n_data_train = 1;
    spec->checkpoint_path = xstrdup("/checkpoints/a");
    spec->train_steps = 100;
    spec->parallel_workers = n_workers;
    spec->schedule_warmup_steps = 1;
    spec->train_micro_batch = 1;
    spec->train_global_batch = 8 * n_workers;
    spec->parallel_fsdp_shard_degree = 1;
    spec->parallel_expert_parallel_degree = 1;
    spec->parallel_sequence_parallel_degree = 1;
    spec->parallel_tensor_parallel_degree = 1;
}

static inline void a_job_fini(Ballast__JobSpec *spec)
{
    fields_fini(&job_spec_table, spec);
}

#endif
