/* ctl_logs.h - what ranks printed: what `logs` of one rank and of all of them share */
#ifndef COORDINATOR_CTL_LOGS_H
#define COORDINATOR_CTL_LOGS_H

#include "coordinator/ctl.h"

/* One call, of request->rank; *out_reply lives until the next. */
int logs_poll(struct ctl *c, const Ballast__LogsRequest *request,
              const Ballast__LogsReply **out_reply);
/* Where the last --tail lines of wanted->rank begin, looked for piece by piece from the end. */
int logs_find_tail(struct ctl *c, const Ballast__LogsRequest *wanted, uint32_t piece_bytes,
                   uint64_t *out_offset);
void logs_print_json(uint64_t rank, const char *text, size_t n);

/* ctl_logs_all.c: of every rank, as one stream. */
int logs_show_all(struct ctl *c, job_id id);

#endif
