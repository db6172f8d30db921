/* server.h - the coordinator's shell: one loop around the core, the link and the store
 *
 * It commits what a turn of the core recorded, then sends what the turn said. */
#ifndef COORDINATOR_SERVER_H
#define COORDINATOR_SERVER_H

#include "common/err.h"
#include "common/field.h"

struct server_config {
    char   **listen; /* addresses */
    size_t   n_listen;
    char    *key_file, *authorized_keys; /* "": no keys */
    char    *state_dir;
    char    *http_listen, *http_token; /* "": none */
    int      log_level;
    uint64_t heartbeat_interval_ns, lost_after_ns, restart_grace_ns, fence_after_ns;
    uint32_t heartbeats_per_second;
    uint64_t backoff_base_ns, backoff_max_ns, start_timeout_ns, stop_grace_ns;
    uint64_t checkpoint_grace_ns, pause_grace_ns;
    uint64_t idempotency_keep_ns;
    uint32_t requests_per_second; /* of one client, with bursts of as many */
    uint64_t disk_reserve_bytes;  /* with less free space no job is taken */
};

/* The configuration file's keys, for conf_read. */
extern const struct field_table server_config_table;

/* Serves until SIGTERM or SIGINT; a second one ends the process at once. SIGHUP reads the
 * authorized keys again and calls reload (may be NULL), SIGUSR1 writes the core's state to
 * the log. Returns 0 after a clean stop, or why it could not start or go on. */
int server_run(const struct server_config *config, void (*reload)(void *context), void *context,
               struct err *err);

#endif
