/* ctl_data.h - what the files of a job hold, as the reader of its trainers counts them
 *
 * Workers may see other files than this machine does: what cannot be seen here is told, and is no
 * reason to refuse a job. */
#ifndef COORDINATOR_CTL_DATA_H
#define COORDINATOR_CTL_DATA_H

#include "common/json.h"
#include "coordinator/ctl.h"
#include "proto/job_data.h"

/* One of the two lists of files. */
struct data_told {
    bool is_given, is_counted;
    struct data_counts n; /* of all files; where n_read is below n_bytes estimated from that part */
    uint64_t n_checked;   /* bytes whose tokens were held against the vocabulary */
    struct err problem;   /* why it is not counted, or a token that is none; code 0: nothing */
};

struct ctl_data {
    const Ballast__JobSpec *spec; /* borrowed */
    struct data_told train, validation;
};

/* Counts both: a bounded part of files that must be read for it. vocab 0: not known. */
void ctl_data_count(const Ballast__JobSpec *spec, uint32_t vocab, struct ctl_data *out);

void ctl_data_print(const struct ctl_data *d);
struct json *ctl_data_json(const struct ctl_data *d);
/* What is wrong with them, a line each on stderr. */
void ctl_data_warn(const struct ctl *c, const struct ctl_data *d);

/* `data ID --step N[..M]`. */
int ctl_data_steps(struct ctl *c, job_id id, const Ballast__JobSpec *spec);

#endif
