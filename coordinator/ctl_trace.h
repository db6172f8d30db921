/* ctl_trace.h - expert loads in the files that other systems write
 *
 * A record is what one step (or forward pass) sent to the experts of one layer, maybe as one of
 * several ranks saw it; records of the same step and layer add up. */
#ifndef COORDINATOR_CTL_TRACE_H
#define COORDINATOR_CTL_TRACE_H

#include "common/json.h"
#include "common/loads.h"

#define TRACE_LAYER_MTP 65536u /* and above: layers that predict further tokens, after all others */
#define TRACE_RANK_NONE UINT32_MAX

struct trace_record {
    uint64_t step;
    uint32_t layer, rank; /* rank: of the one that holds these experts, TRACE_RANK_NONE: all do */
    uint32_t n_experts;
    double  *load;        /* (n_experts) */
};

struct trace {
    const char *path;     /* of the file being read */
    uint64_t    n_line;   /* 0: it has no lines */
    uint32_t    rank;     /* told by the file's name */
    struct trace_record *record;
    size_t      n_records, n_alloc;
};

/* -EINVAL, about the file and line being read. */
int trace_fail(const struct trace *t, struct err *err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* A new record's loads, all zero; lives until the next trace_add. */
double *trace_add(struct trace *t, uint64_t step, uint32_t layer, uint32_t rank,
                  uint32_t n_experts);

/* One load: a finite number that is not negative. */
int trace_load(const struct trace *t, const struct json *v, double *out, struct err *err);

/* Each adds what one JSON object holds; -EINVAL where it is not as its format says. */
int trace_megatron_routes(struct trace *t, const struct json *o, struct err *err);
int trace_megatron_counts(struct trace *t, const struct json *o, struct err *err);
int trace_vllm(struct trace *t, const struct json *o, struct err *err);
int trace_sglang_json(struct trace *t, const struct json *o, struct err *err);

/* What SGLang's recorder dumps with torch.save. */
int trace_sglang(struct trace *t, const uint8_t *bytes, size_t n_bytes, struct err *err);

/* path: a file, or a folder whose *.jsonl or *.pt are the ranks of one run. window_steps steps
 * become a window (0: one). Gives, ended with loads_fini. */
int trace_read(const char *path, uint32_t window_steps, struct loads *out, struct err *err);

/* Whether path is a folder or a file that trace_read knows by its first bytes; else it is CSV. */
bool trace_is_one(const char *path);

#endif
