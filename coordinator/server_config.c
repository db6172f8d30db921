/* server_config.c - the keys of the coordinator's configuration file */
#include "coordinator/server.h"

#include <stddef.h>

#define AT(member) offsetof(struct server_config, member)
#define DURATION(KEY, MEMBER, PRESET, MIN_S, MAX_S, HELP)                                      \
    {.path = KEY, .type = FIELD_DURATION, .offset = AT(MEMBER), .preset = PRESET,              \
     .min = (MIN_S) * 1e9, .max = (MAX_S) * 1e9, .duration_ns = 1, .help = HELP}

static const char *const log_levels[] = {"error", "warn", "info", "debug", NULL};

static const struct field fields[] = {
    {.path = "listen", .type = FIELD_STRINGS, .offset = AT(listen), .count_offset = AT(n_listen),
     .n_min = 1, .n_max = 8,
     .help = "addresses: ipc://PATH, and tcp://IP:PORT; without keys on loopback only"},
    {.path = "key", .type = FIELD_PATH, .offset = AT(key_file), .preset = "",
     .help = "file of the coordinator's own key (`ballast keygen NAME --role coordinator`); with "
     "it, listen may have any tcp address, and every tcp connection needs a key"},
    {.path = "authorized_keys", .type = FIELD_PATH, .offset = AT(authorized_keys), .preset = "",
     .help = "who may connect over tcp: a line of each .pub; SIGHUP reads it again"},
    {.path = "state_dir", .type = FIELD_PATH, .offset = AT(state_dir),
     .help = "folder of the databases and rank logs; on a local disk, one coordinator's alone; made, "
     "with those above it, if missing"},
    {.path = "http.listen", .type = FIELD_STRING, .offset = AT(http_listen), .preset = "",
     .help = "IP:PORT of the dashboard and of /metrics for Prometheus; \"\": neither. Without "
     "http.token on loopback only"},
    {.path = "http.token", .type = FIELD_PATH, .offset = AT(http_token), .preset = "",
     .help = "file with a line that readers must give: as a bearer token, or as the password of a "
     "browser's login. HTTP is not encrypted: beyond a trusted network put a TLS proxy before it"},
    {.path = "log_level", .type = FIELD_ENUM, .offset = AT(log_level), .preset = "info",
     .words = log_levels, .help = "how much to log; SIGHUP reads it again"},
    DURATION("heartbeat_interval", heartbeat_interval_ns, "1s", 0.05, 600,
             "shortest time between two heartbeats of a worker"),
    {.path = "heartbeats_per_second", .type = FIELD_U32, .offset = AT(heartbeats_per_second),
     .preset = "1000", .min = 1, .max = 100000,
     .help = "of all workers together; with more workers each is asked less often"},
    DURATION("lost_after", lost_after_ns, "10s", 0.2, 3600,
             "a worker silent for so long (and at least four heartbeats) is lost"),
    DURATION("restart_grace", restart_grace_ns, "30s", 0, 3600,
             "how long workers may take to come back after the coordinator started"),
    DURATION("fence_after", fence_after_ns, "300s", 1, 86400,
             "a worker that hears nothing for so long ends its trainers"),
    DURATION("backoff_base", backoff_base_ns, "1s", 0, 3600,
             "wait before a failed job's next attempt, doubled each time"),
    DURATION("backoff_max", backoff_max_ns, "60s", 0, 86400, "the longest such wait"),
    DURATION("start_timeout", start_timeout_ns, "900s", 1, 86400,
             "a job that is STARTING for longer has failed that attempt"),
    DURATION("stop_grace", stop_grace_ns, "5s", 0, 600, "from STOP until SIGKILL"),
    DURATION("checkpoint_grace", checkpoint_grace_ns, "60s", 0, 86400,
             "from a stop with a checkpoint until SIGKILL"),
    DURATION("pause_grace", pause_grace_ns, "15m", 0, 86400,
             "from a pause until SIGKILL: a step and a checkpoint must fit"),
    DURATION("idempotency_keep", idempotency_keep_ns, "24h", 3600, 31 * 86400,
             "how long a repeated submit finds the job it has made"),
    {.path = "requests_per_second", .type = FIELD_U32, .offset = AT(requests_per_second),
     .preset = "5000", .min = 1, .max = 1000000,
     .help = "of one connection, in bursts of as many; more is told to wait"},
    {.path = "disk_reserve", .type = FIELD_SIZE, .offset = AT(disk_reserve_bytes),
     .preset = "64MiB", .min = 0, .max = 1e15,
     .help = "with less free space under state_dir no job is accepted"},
};

const struct field_table server_config_table = {fields, sizeof fields / sizeof fields[0]};
