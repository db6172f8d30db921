/* check_method.c - the table of methods: who sends what, and how large it may be */
#include "proto/check.h"

#define SMALL (8u << 10)
#define LIST  (64u << 10)
#define REPLY_MAX (BULK_BYTES_MAX - WIRE_HEAD_BYTES_MAX)

#define REQUEST(NAME, FROM, KEY, REQ, BYTES, REP)                                              \
    {BALLAST__METHOD__METHOD_##NAME, #NAME, BALLAST__KIND__KIND_REQUEST, FROM, KEY,            \
     &ballast__##REQ##__descriptor, &ballast__##REP##__descriptor, BYTES, REPLY_MAX}
#define NOTICE(NAME, FROM, MSG, BYTES)                                                         \
    {BALLAST__METHOD__METHOD_##NAME, #NAME, BALLAST__KIND__KIND_NOTICE, FROM, false,           \
     &ballast__##MSG##__descriptor, NULL, BYTES, 0}
#define CLIENT      CHECK_CLIENT
#define WORKER      CHECK_WORKER
#define COORDINATOR CHECK_COORDINATOR

static const struct check_method methods[] = {
    REQUEST(PING, CLIENT | WORKER, false, ping_request, SMALL, ping_reply),
    REQUEST(SUBMIT, CLIENT, true, submit_request, 512u << 10, submit_reply),
    REQUEST(JOB_LIST, CLIENT, false, job_list_request, LIST, job_list_reply),
    REQUEST(JOB_SHOW, CLIENT, false, job_request, SMALL, job_show_reply),
    REQUEST(JOB_CANCEL, CLIENT, true, job_request, SMALL, job_reply),
    REQUEST(JOB_HOLD, CLIENT, true, job_request, SMALL, job_reply),
    REQUEST(JOB_RELEASE, CLIENT, true, job_request, SMALL, job_reply),
    REQUEST(JOB_REQUEUE, CLIENT, true, job_request, SMALL, job_reply),
    REQUEST(JOB_PAUSE, CLIENT, true, job_request, SMALL, job_reply),
    REQUEST(JOB_RESUME, CLIENT, true, job_request, SMALL, job_reply),
    REQUEST(JOB_SET, CLIENT, true, job_set_request, SMALL, job_reply),
    REQUEST(JOB_WAIT, CLIENT, false, job_wait_request, SMALL, job_reply),
    REQUEST(WORKER_LIST, CLIENT, false, worker_list_request, SMALL, worker_list_reply),
    REQUEST(WORKER_DRAIN, CLIENT, true, worker_drain_request, SMALL, worker_reply),
    REQUEST(WORKER_RESUME, CLIENT, true, worker_drain_request, SMALL, worker_reply),
    REQUEST(EVENTS, CLIENT, false, events_request, LIST, events_reply),
    REQUEST(LOGS, CLIENT, false, logs_request, SMALL, logs_reply),
    REQUEST(METRICS, CLIENT, false, metrics_request, SMALL, metrics_reply),
    REQUEST(EXPERTS, CLIENT, false, experts_request, SMALL, experts_reply),
    REQUEST(PLACEMENT, CLIENT, false, placement_request, SMALL, placement_reply),
    REQUEST(REBALANCE_PLAN, CLIENT, false, rebalance_request, SMALL, rebalance_plan_reply),
    REQUEST(REBALANCE_APPLY, CLIENT, true, rebalance_request, REPLY_MAX, rebalance_plan_reply),
    REQUEST(REBALANCE_AUTO, CLIENT, true, rebalance_request, SMALL, job_reply),
    REQUEST(REBALANCE_HISTORY, CLIENT, false, rebalance_request, SMALL, rebalance_history_reply),
    REQUEST(DB_QUERY, CLIENT, false, db_query_request, SQL_BYTES_MAX + SMALL, db_query_reply),
    REQUEST(DB_BACKUP, CLIENT, false, db_backup_request, SMALL, db_backup_reply),
    REQUEST(HELLO, WORKER, false, hello, 256u << 10, welcome),
    NOTICE(HEARTBEAT, WORKER, heartbeat, 256u << 10),
    NOTICE(RANK_STATE, WORKER, rank_state, SMALL),
    NOTICE(STEPS, WORKER, step_reports, 512u << 10),
    NOTICE(LOG, WORKER, log_chunk, LOG_CHUNK_BYTES_MAX + SMALL),
    NOTICE(GOODBYE, WORKER, goodbye, SMALL),
    NOTICE(LOAD, WORKER, load_report, LOAD_BYTES_MAX),
    NOTICE(START, COORDINATOR, start, REPLY_MAX),
    NOTICE(STOP, COORDINATOR, stop, SMALL),
    NOTICE(ACK, COORDINATOR, ack, SMALL),
    NOTICE(PREPARE, COORDINATOR, prepare, REPLY_MAX),
    NOTICE(ABORT_PLAN, COORDINATOR, abort_plan, SMALL),
    NOTICE(SETTINGS, COORDINATOR, settings, REPLY_MAX),
    NOTICE(PEERS, COORDINATOR, peers, REPLY_MAX),
};

const struct check_method *check_method(Ballast__Method method)
{
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++)
        if (methods[i].method == method)
            return &methods[i];
    return NULL;
}
