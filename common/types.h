/* types.h - ids and every hard limit
 *
 * A limit is checked where bytes enter (proto/check.c, common/conf.c, common/safetensors.c);
 * inside, code may rely on it. */
#ifndef COMMON_TYPES_H
#define COMMON_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint64_t job_id;    /* from 1, never used again */
typedef uint64_t record_seq; /* from 1, gapless */

#define NS_PER_S  1000000000ull
#define NS_PER_MS 1000000ull

/* wire */
#define MESSAGE_BYTES_MAX      (1u << 20)  /* one control frame */
#define BULK_BYTES_MAX         (16u << 20) /* one bulk frame */
#define LOAD_BYTES_MAX         (4u << 20)  /* one load report: what a coordinator reads at most */
#define IDEMPOTENCY_KEY_BYTES  16
#define DEADLINE_MS_MAX        (10u * 60 * 1000)
#define WAIT_MS_MAX            60000u /* a long poll answers within this; ask again */

/* names and texts a person types */
#define NAME_BYTES_MAX   64
#define PATH_BYTES_MAX   4096
#define REASON_BYTES_MAX 512
#define TEXT_BYTES_MAX   1024 /* why something failed, one line */
#define LOG_CHUNK_BYTES_MAX (64u << 10)

/* lists */
#define LIST_TERMS_MAX 32u      /* conditions; values of one; columns to sort by */
#define STEPS_LAST_MAX 1000000u /* that are counted back from the newest */

/* people's SQL */
#define SQL_BYTES_MAX      (64u << 10)
#define SQL_ROWS_MAX       100000u
#define SQL_COLUMNS_MAX    256u
#define SQL_CELL_BYTES_MAX (64u << 10)

/* cluster */
#define WORKERS_MAX 16384u /* attached to one coordinator */
#define RANKS_MAX   8192u  /* of one job */
#define MACHINE_BYTES_MAX      128u /* of what says which machine a worker is on */
#define DATA_ADDRESS_BYTES_MAX 90u
#define DATA_KEY_BYTES         32u
#define JOBS_LIVE_MAX 100000u

/* job file */
#define JOB_FILE_BYTES_MAX (1u << 20)
#define DATA_GLOBS_MAX     256u
#define PRIORITY_MAX       1000

/* files of loads and placements */
#define CSV_LINE_BYTES_MAX 4096
#define CSV_LINES_MAX      (64u << 20)

/* model */
#define LAYERS_MAX     1024u
#define STAGES_MAX     64u  /* step boundaries that the moves of one plan are spread over */
#define EXPERTS_MAX    8192u
#define LOAD_WINDOWS_MAX 200u /* of one answer about the past */
#define LOAD_COUNTS_MAX (1u << 20) /* of one layer in a load report: nodes x experts */
#define TENSOR_DIMS_MAX 8
#define SAFETENSORS_HEADER_BYTES_MAX (100u << 20)

#endif
