/* job_spec.h - the one table of the job file's keys, and the checks of a whole job
 *
 * The client reads YAML through it (job_file), the coordinator checks what came by wire with the
 * same rows, and docs/job-file.md is printed from it. Pure. */
#ifndef PROTO_JOB_SPEC_H
#define PROTO_JOB_SPEC_H

#include "common/field.h"
#include "common/layout.h"
#include "proto/ballast.pb-c.h"

extern const struct field_table job_spec_table;

/* Everything at once: each field's range and words, what fields mean together, and what this
 * version cannot run yet. Adds to out, one problem per key; returns 0 or -EINVAL. For a spec from
 * the wire (fixed by unpack) and from a file alike; strings may be NULL or empty where optional. */
int job_spec_check(const Ballast__JobSpec *spec, struct problems *out);

/* The second half of it, for a spec whose fields were checked while they were read. n_experts: of
 * the model, 0 for a dense one. */
#define JOB_EXPERTS_UNKNOWN UINT32_MAX
int job_spec_check_together(const Ballast__JobSpec *spec, uint32_t n_experts,
                            struct problems *out);

/* What this version cannot run yet, as rows of markdown: key, what it runs. */
void job_spec_print_unsupported(FILE *out);

/* How the ranks are cut, as layout_init wants it. */
struct layout_degrees job_spec_degrees(const Ballast__JobSpec *spec);

#endif
