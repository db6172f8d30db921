/* check_bounds.c - the bounds of single fields that differ from the general ones */
#include "proto/check_parts.h"

#include <string.h>

#include "common/placement.h"

#define LIST_MAX        16384u
#define RANK_STATES_MAX 1024u
#define STEPS_MAX       4096u
#define PHASES_MAX      64u
#define ASSIGNMENTS_MAX 32u
#define ASSIGNMENT_BYTES_MAX 256u

#define ROW(MSG, FIELD, FORM, MIN, MAX)                                                        \
    {&ballast__##MSG##__descriptor, FIELD, FORM, MIN, MAX, TEXT_FREE, 0}
#define EACH(MSG, FIELD, MIN, MAX, ELEMENT_FORM, ELEMENT_MAX)                                  \
    {&ballast__##MSG##__descriptor, FIELD, TEXT_FREE, MIN, MAX, ELEMENT_FORM, ELEMENT_MAX}
static const struct check_bound bounds[] = {
    ROW(submit_request, "spec", 0, 1, 1),
    ROW(job_request, "job_id", 0, 1, UINT64_MAX),
    ROW(job_request, "reason", TEXT_FREE, 0, REASON_BYTES_MAX),
    ROW(job_set_request, "job_id", 0, 1, UINT64_MAX),
    EACH(job_set_request, "assignments", 1, ASSIGNMENTS_MAX, TEXT_FREE, ASSIGNMENT_BYTES_MAX),
    ROW(job_list_request, "user", TEXT_FREE, 0, NAME_BYTES_MAX),
    ROW(job_list_request, "terms", 0, 0, LIST_TERMS_MAX),
    ROW(job_list_request, "order", 0, 0, LIST_TERMS_MAX),
    ROW(events_request, "terms", 0, 0, LIST_TERMS_MAX),
    ROW(events_request, "before_seq", 0, 0, INT64_MAX),
    ROW(list_term, "column", TEXT_FREE, 1, NAME_BYTES_MAX),
    ROW(list_term, "op", 0, BALLAST__LIST_OP__LIST_IS, UINT32_MAX),
    EACH(list_term, "values", 1, LIST_TERMS_MAX, TEXT_FREE, REASON_BYTES_MAX),
    ROW(list_order, "column", TEXT_FREE, 1, NAME_BYTES_MAX),
    ROW(job_wait_request, "job_id", 0, 1, UINT64_MAX),
    ROW(job_wait_request, "states", 0, 0, 16),
    ROW(job_wait_request, "wait_ms", 0, 0, WAIT_MS_MAX),
    ROW(worker_drain_request, "name", TEXT_NAME, 1, NAME_BYTES_MAX),
    ROW(worker_drain_request, "reason", TEXT_FREE, 0, REASON_BYTES_MAX),
    ROW(events_request, "wait_ms", 0, 0, WAIT_MS_MAX),
    ROW(logs_request, "job_id", 0, 1, UINT64_MAX),
    ROW(logs_request, "rank", 0, 0, RANKS_MAX - 1),
    ROW(logs_request, "wait_ms", 0, 0, WAIT_MS_MAX),
    ROW(metrics_request, "job_id", 0, 1, UINT64_MAX),
    ROW(metrics_request, "wait_ms", 0, 0, WAIT_MS_MAX),
    ROW(metrics_request, "last", 0, 0, STEPS_LAST_MAX),
    ROW(hello, "name", TEXT_NAME, 1, NAME_BYTES_MAX),
    ROW(hello, "node", TEXT_NAME_OR_EMPTY, 0, NAME_BYTES_MAX),
    ROW(hello, "machine", TEXT_FREE, 0, MACHINE_BYTES_MAX),
    ROW(hello, "device", TEXT_FREE, 0, REASON_BYTES_MAX),
    ROW(hello, "version", TEXT_FREE, 0, NAME_BYTES_MAX),
    ROW(hello, "ranks", 0, 0, RANK_STATES_MAX),
    ROW(heartbeat, "ranks", 0, 0, RANK_STATES_MAX),
    ROW(gpu_health, "name", TEXT_FREE, 0, NAME_BYTES_MAX),
    ROW(gpu_health, "sick", TEXT_FREE, 0, REASON_BYTES_MAX),
    ROW(rank_state, "job_id", 0, 1, UINT64_MAX),
    ROW(rank_state, "attempt", 0, 1, UINT32_MAX),
    ROW(rank_state, "rank", 0, 0, RANKS_MAX - 1),
    ROW(rank_state, "phase", 0, BALLAST__RANK_PHASE__RANK_SPAWNED, UINT32_MAX),
    ROW(rank_state, "text", TEXT_FREE, 0, TEXT_BYTES_MAX),
    ROW(rank_state, "data_address", TEXT_FREE, 0, DATA_ADDRESS_BYTES_MAX),
    ROW(rank_state, "data_key", 0, 0, DATA_KEY_BYTES),
    ROW(rank_state, "plan_text", TEXT_FREE, 0, TEXT_BYTES_MAX),
    ROW(step_reports, "job_id", 0, 1, UINT64_MAX),
    ROW(step_reports, "attempt", 0, 1, UINT32_MAX),
    ROW(step_reports, "steps", 0, 0, STEPS_MAX),
    ROW(step_report, "step", 0, 1, INT64_MAX),
    ROW(step_report, "phases", 0, 0, PHASES_MAX),
    ROW(step_report, "samples", 0, 0, INT64_MAX),
    ROW(step_report, "epoch_samples", 0, 0, INT64_MAX),
    ROW(phase_time, "name", TEXT_FREE, 0, NAME_BYTES_MAX),
    ROW(log_chunk, "job_id", 0, 1, UINT64_MAX),
    ROW(log_chunk, "attempt", 0, 1, UINT32_MAX),
    ROW(log_chunk, "rank", 0, 0, RANKS_MAX - 1),
    ROW(log_chunk, "offset", 0, 0, INT64_MAX / 2),
    ROW(log_chunk, "bytes", 0, 0, LOG_CHUNK_BYTES_MAX),
    ROW(goodbye, "reason", TEXT_FREE, 0, REASON_BYTES_MAX),
    ROW(start, "job_id", 0, 1, UINT64_MAX),
    ROW(start, "attempt", 0, 1, UINT32_MAX),
    ROW(start, "coll_id", 0, 16, 16),
    ROW(start, "gang", 0, 1, RANKS_MAX),
    ROW(start, "spec", 0, 1, 1),
    ROW(gang_member, "worker", TEXT_NAME, 1, NAME_BYTES_MAX),
    ROW(gang_member, "node", TEXT_NAME_OR_EMPTY, 0, NAME_BYTES_MAX),
    ROW(gang_member, "machine", TEXT_FREE, 0, MACHINE_BYTES_MAX),
    ROW(peers, "job_id", 0, 1, UINT64_MAX),
    ROW(peers, "attempt", 0, 1, UINT32_MAX),
    ROW(peers, "peers", 0, 1, RANKS_MAX),
    ROW(peer, "address", TEXT_FREE, 1, DATA_ADDRESS_BYTES_MAX),
    ROW(peer, "key", 0, DATA_KEY_BYTES, DATA_KEY_BYTES),
    ROW(stop, "job_id", 0, 1, UINT64_MAX),
    ROW(stop, "mode", 0, BALLAST__STOP_MODE__STOP_CHECKPOINT, UINT32_MAX),
    ROW(stop, "reason", TEXT_FREE, 0, TEXT_BYTES_MAX),
    ROW(load_report, "job_id", 0, 1, UINT64_MAX),
    ROW(load_report, "attempt", 0, 1, UINT32_MAX),
    ROW(load_report, "first_step", 0, 1, INT64_MAX),
    ROW(load_report, "last_step", 0, 1, INT64_MAX),
    ROW(load_report, "n_nodes", 0, 1, RANKS_MAX),
    ROW(load_report, "n_experts", 0, 1, EXPERTS_MAX),
    ROW(load_report, "layers", 0, 1, LAYERS_MAX),
    ROW(load_report, "speed", 0, 0, RANKS_MAX),
    ROW(layer_load, "layer", 0, 0, LAYERS_MAX - 1),
    ROW(layer_load, "tokens", 0, 1, LOAD_COUNTS_MAX),
    ROW(placement, "n_devices", 0, 0, RANKS_MAX),
    ROW(placement, "n_slots", 0, 0, EXPERTS_MAX),
    ROW(placement, "layers", 0, 0, LAYERS_MAX),
    ROW(placement_layer, "layer", 0, 0, LAYERS_MAX - 1),
    ROW(placement_layer, "experts", 0, 1, PLACEMENT_SLOTS_MAX),
    ROW(placement_layer, "home", 0, 1, EXPERTS_MAX),
    ROW(placement_layer, "share", 0, 1, PLACEMENT_SLOTS_MAX),
    ROW(placement_layer, "stage", 0, 0, PLACEMENT_SLOTS_MAX),
    ROW(prepare, "job_id", 0, 1, UINT64_MAX),
    ROW(prepare, "attempt", 0, 1, UINT32_MAX),
    ROW(prepare, "placement", 0, 1, 1),
    ROW(abort_plan, "job_id", 0, 1, UINT64_MAX),
    ROW(abort_plan, "attempt", 0, 1, UINT32_MAX),
    ROW(abort_plan, "epoch", 0, 1, UINT32_MAX),
    ROW(settings, "job_id", 0, 1, UINT64_MAX),
    ROW(settings, "attempt", 0, 1, UINT32_MAX),
    ROW(settings, "revision", 0, 1, UINT32_MAX),
    ROW(settings, "spec", 0, 1, 1),
    ROW(experts_request, "job_id", 0, 1, UINT64_MAX),
    ROW(experts_request, "window", TEXT_FREE, 0, NAME_BYTES_MAX),
    ROW(experts_request, "history", 0, 0, LOAD_WINDOWS_MAX),
    ROW(experts_reply, "layers", 0, 0, LAYERS_MAX),
    ROW(experts_reply, "windows", 0, 0, LOAD_WINDOWS_MAX),
    ROW(experts_reply, "bias_update", TEXT_FREE, 0, NAME_BYTES_MAX),
    ROW(experts_reply, "aux_scope", TEXT_FREE, 0, NAME_BYTES_MAX),
    ROW(load_window, "layers", 0, 0, LAYERS_MAX),
    ROW(load_window, "experts", 0, 0, LAYERS_MAX),
    ROW(load_window, "devices", 0, 0, LAYERS_MAX),
    ROW(load_window, "device_load", 0, 0, RANKS_MAX),
    ROW(layer_experts, "tokens", 0, 0, EXPERTS_MAX),
    ROW(placement_request, "job_id", 0, 1, UINT64_MAX),
    ROW(rebalance_request, "job_id", 0, 1, UINT64_MAX),
    ROW(rebalance_plan_reply, "moves", 0, 0, PLACEMENT_SLOTS_MAX),
    ROW(rebalance_plan_reply, "reason", TEXT_FREE, 0, TEXT_BYTES_MAX),
    ROW(rebalance_entry, "cause", TEXT_FREE, 0, TEXT_BYTES_MAX),
    ROW(rebalance_entry, "reason", TEXT_FREE, 0, TEXT_BYTES_MAX),
    ROW(db_query_request, "sql", TEXT_LINES, 1, SQL_BYTES_MAX),
    ROW(db_query_request, "limit_rows", 0, 0, SQL_ROWS_MAX),
    EACH(db_query_reply, "columns", 0, SQL_COLUMNS_MAX, TEXT_FREE, NAME_BYTES_MAX * 4),
    ROW(db_query_reply, "rows", 0, 0, SQL_ROWS_MAX),
    EACH(db_row, "cells", 0, SQL_COLUMNS_MAX, TEXT_LINES, SQL_CELL_BYTES_MAX),
    ROW(db_row, "is_null", 0, 0, SQL_COLUMNS_MAX),
    ROW(db_backup_request, "path", TEXT_FREE, 1, PATH_BYTES_MAX),
};

struct check_bound check_bound_of(const ProtobufCMessageDescriptor *message,
                                  const ProtobufCFieldDescriptor *f)
{
    for (size_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++)
        if (bounds[i].message == message && !strcmp(bounds[i].field, f->name))
            return bounds[i];
    bool is_list = f->label == PROTOBUF_C_LABEL_REPEATED;
    uint64_t max = is_list ? LIST_MAX : f->type == PROTOBUF_C_TYPE_STRING ? PATH_BYTES_MAX
                                                                          : UINT64_MAX;
    return (struct check_bound){message, f->name, TEXT_FREE, 0, max, TEXT_FREE, 0};
}
