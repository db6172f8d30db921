/* ctl_stream.c - logs of a rank: read what is there, then (-f) what comes
 *
 * Long polls from a cursor, the bytes of a log, so an outage or a restart of the coordinator costs
 * a pause and nothing else. */
#include "coordinator/ctl_logs.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/types.h"

#define HOLD_MS       10000u
#define PIECE_BYTES   (256u << 10)

/* ---- logs ----------------------------------------------------------------------------------- */

/* As JSON a line is an object; what is left of a line waits for its end. */
struct log_lines {
    const struct ctl *c;
    char   *rest;
    size_t  n_rest;
};

void logs_print_json(uint64_t rank, const char *text, size_t n)
{
    struct json *o = json_new_object();
    char *line = xcalloc(1, n + 1);
    for (size_t i = 0; i < n; i++)
        line[i] = text[i] ? text[i] : '?';
    json_put(o, "rank", json_new_u64(rank));
    json_put(o, "line", json_new_string(line));
    ctl_json_line(o);
    free(line);
}

static void print_log(struct log_lines *l, const uint8_t *bytes, size_t n)
{
    if (l->c->format != CTL_JSON) {
        ctl_print_escaped(stdout, bytes, n, true);
        fflush(stdout);
        return;
    }
    l->rest = xrealloc(l->rest, l->n_rest + n);
    if (n)
        memcpy(l->rest + l->n_rest, bytes, n);
    l->n_rest += n;
    char *newline;
    size_t at = 0;
    while ((newline = memchr(l->rest + at, '\n', l->n_rest - at)) != NULL) {
        size_t end = (size_t)(newline - l->rest);
        logs_print_json(l->c->rank, l->rest + at, end - at);
        at = end + 1;
    }
    memmove(l->rest, l->rest + at, l->n_rest - at);
    l->n_rest -= at;
}

int logs_poll(struct ctl *c, const Ballast__LogsRequest *request,
              const Ballast__LogsReply **out_reply)
{
    const ProtobufCMessage *message;
    arena_reset(&c->arena);
    int rc = ctl_poll(c, BALLAST__METHOD__METHOD_LOGS, &request->base, request->wait_ms, &message);
    if (rc != CTL_OK)
        return rc;
    *out_reply = (const Ballast__LogsReply *)message;
    if ((*out_reply)->n_ranks && request->rank >= (*out_reply)->n_ranks)
        return ctl_fail(c, CTL_NOT_FOUND, "job %" PRIu64 " has ranks 0 to %" PRIu32,
                        request->job_id, (*out_reply)->n_ranks - 1);
    return CTL_OK;
}

int logs_find_tail(struct ctl *c, const Ballast__LogsRequest *wanted, uint32_t piece_bytes,
                   uint64_t *out_offset)
{
    Ballast__LogsRequest request = *wanted;
    uint64_t n_lines = 0, start = 1;
    request.wait_ms = 0;
    request.last_bytes = piece_bytes;
    for (bool is_last = true; start > 0; is_last = false) {
        const Ballast__LogsReply *reply;
        int rc = logs_poll(c, &request, &reply);
        if (rc != CTL_OK)
            return rc;
        size_t n = reply->bytes.len;
        start = reply->next_offset - n;
        for (size_t i = n; i-- > 0;)
            if (reply->bytes.data[i] == '\n' && !(is_last && i + 1 == n && c->tail) &&
                n_lines++ == c->tail - (c->tail > 0)) {
                *out_offset = start + i + 1;
                return CTL_OK;
            }
        request.last_bytes = 0;
        request.offset = start > piece_bytes ? start - piece_bytes : 0;
        request.limit_bytes = (uint32_t)(start - request.offset);
    }
    *out_offset = 0;
    return CTL_OK;
}

static int poll_logs(struct ctl *c, job_id id, struct log_lines *lines)
{
    Ballast__LogsRequest request = BALLAST__LOGS_REQUEST__INIT;
    const Ballast__LogsReply *reply;
    request.job_id = id;
    request.rank = (uint32_t)c->rank;
    request.limit_bytes = PIECE_BYTES;
    request.wait_ms = c->follow ? HOLD_MS : 0;
    int rc = c->has_tail ? logs_find_tail(c, &request, PIECE_BYTES, &request.offset) : CTL_OK;
    while (rc == CTL_OK) {
        if ((rc = logs_poll(c, &request, &reply)) != CTL_OK)
            break;
        print_log(lines, reply->bytes.data, reply->bytes.len);
        request.offset = reply->next_offset;
        if (!reply->bytes.len && (reply->ended || !c->follow))
            break;
    }
    return rc;
}

int ctl_logs(struct ctl *c)
{
    struct log_lines lines = {.c = c};
    job_id id = ctl_job_id(c, c->args[0]);
    if (!id)
        return CTL_USAGE;
    ctl_catch_interrupt();
    int rc = c->all_ranks ? logs_show_all(c, id) : poll_logs(c, id, &lines);
    if (lines.n_rest)
        logs_print_json(c->rank, lines.rest, lines.n_rest);
    free(lines.rest);
    return ctl_detached(c, rc, "job %" PRIu64 " goes on", id);
}
