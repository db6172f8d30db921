/* trace.h - a file of spans that Perfetto and chrome://tracing open, one for each rank */
#ifndef WORKER_TRACE_H
#define WORKER_TRACE_H

#include "kernels/spans.h"

struct trace;

/* Steps first .. first + n - 1 will be written to FOLDER/rank-N.json, which is made with the first
 * of them. Gives the trace, NULL for n 0. */
struct trace *trace_create(const char *folder, uint32_t rank, const char *node, uint64_t first,
                           uint64_t n);
/* Whether that step is written; it is the one that spans belong to from now on. With NULL, too. */
bool trace_begins(struct trace *t, uint64_t step);
/* As spans_reset wants it. A file that cannot be written is said once, and given up. */
void trace_span(void *trace, const struct span *span);
void trace_destroy(struct trace *t);

#endif
