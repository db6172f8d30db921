/* json_of.c - what the coordinator says, as JSON
 *
 * Ids are strings, instants ISO 8601 UTC, durations seconds, sizes bytes, unknown numbers null. */
#include "coordinator/json_of.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "coordinator/event.h"
#include "proto/job_spec.h"

#define API_VERSION "ballast/v1"

/* ---- envelopes ------------------------------------------------------------------------------- */

static struct json *envelope(const char *kind, struct json *meta)
{
    struct json *o = json_new_object();
    json_put(o, "apiVersion", json_new_string(API_VERSION));
    json_put(o, "kind", json_new_string(kind));
    json_put(o, "meta", meta);
    return o;
}

static struct json *meta_of(uint64_t seq)
{
    struct json *meta = json_new_object();
    json_put(meta, "seq", json_new_u64(seq));
    return meta;
}

struct json *json_of_list(const char *kind, uint64_t seq, bool truncated, struct json *items)
{
    struct json *meta = meta_of(seq), *o = envelope(kind, meta);
    json_put(meta, "truncated", json_new_bool(truncated));
    json_put(o, "items", items);
    return o;
}

struct json *json_of_one(const char *kind, uint64_t seq, struct json *object)
{
    struct json *o = envelope(kind, meta_of(seq));
    json_put_all(o, object);
    return o;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static struct json *id_text(uint64_t id)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, id);
    return id ? json_new_string(text) : NULL;
}

static struct json *instant(int64_t ns)
{
    char text[CLOCK_STAMP_BYTES];
    if (!ns)
        return NULL;
    clock_stamp(ns, text);
    return json_new_string(text);
}

static struct json *known_text(const char *text)
{
    return text && *text ? json_new_string(text) : NULL;
}

struct json *json_of_job(const Ballast__Job *job)
{
    struct json *o = json_new_object(), *names = json_new_array();
    for (size_t i = 0; i < job->n_workers; i++)
        json_push(names, json_new_string(job->workers[i]));
    json_put(o, "id", id_text(job->id));
    json_put(o, "name", json_new_string(job->name));
    json_put(o, "user", json_new_string(job->user));
    json_put(o, "state", json_new_string(event_job_state(job->state)));
    json_put(o, "reason", json_new_string(job->reason));
    json_put(o, "priority", json_new_i64(job->priority));
    json_put(o, "workers", json_new_u64(job->gang_size));
    json_put(o, "worker_names", names);
    json_put(o, "attempt", json_new_u64(job->attempt));
    json_put(o, "restarts", json_new_u64(job->n_restarts));
    json_put(o, "held", json_new_bool(job->held));
    json_put(o, "step", json_new_u64(job->step));
    json_put(o, "steps", json_new_u64(job->steps));
    json_put(o, "checkpoint_step", json_new_u64(job->checkpoint_step));
    json_put(o, "loss", json_new_double(job->loss));
    json_put(o, "validation_loss", json_new_double(job->validation_loss));
    json_put(o, "tokens_per_second", json_new_double(job->tokens_per_second));
    json_put(o, "imbalance", json_new_double(job->imbalance));
    json_put(o, "memory_bytes", json_new_u64(job->memory_bytes));
    json_put(o, "memory_planned_bytes", json_new_u64(job->memory_planned_bytes));
    json_put(o, "submitted_at", instant(job->submitted_at_ns));
    json_put(o, "started_at", instant(job->started_at_ns));
    json_put(o, "ended_at", instant(job->ended_at_ns));
    json_put(o, "exit", known_text(job->exit));
    return o;
}

/* ---- the job file's keys, nested as in the file ---------------------------------------------- */

static struct json *list_value(const struct field *f, const void *spec)
{
    struct json *list = json_new_array();
    size_t n = *(const size_t *)((const char *)spec + f->count_offset);
    const void *items = *(void *const *)((const char *)spec + f->offset);
    for (size_t i = 0; i < n; i++)
        json_push(list, f->type == FIELD_DOUBLES ? json_new_double(((const double *)items)[i])
                      : f->type == FIELD_U64S    ? id_text(((const uint64_t *)items)[i])
                                                 : json_new_string(((char *const *)items)[i]));
    return list;
}

static struct json *field_value(const struct field *f, const void *spec)
{
    const void *at = (const char *)spec + f->offset;
    if (field_is_list(f))
        return list_value(f, spec);
    switch (f->type) {
    case FIELD_U32:     return json_new_u64(*(const uint32_t *)at);
    case FIELD_I32:     return json_new_i64(*(const int32_t *)at);
    case FIELD_DOUBLE:  return json_new_double(*(const double *)at);
    case FIELD_PB_BOOL: return json_new_bool(*(const int *)at != 0);
    case FIELD_U64:
    case FIELD_DURATION:
    case FIELD_SIZE:    return json_new_u64(*(const uint64_t *)at);
    default:            return json_new_string(*(char *const *)at);
    }
}

/* Objects of the sections that are open, outermost first. */
struct open_sections {
    struct json *objects[8];
    char path[8][64];
    size_t depth;
};

static struct json *section_of(struct open_sections *s, const char *path, const char **out_key)
{
    size_t depth = 1;
    const char *start = path, *dot;
    for (; (dot = strchr(start, '.')) != NULL; start = dot + 1, depth++) {
        size_t n = (size_t)(dot - path);
        if (depth < s->depth && !strncmp(s->path[depth], path, n) && !s->path[depth][n])
            continue;
        s->objects[depth] = json_new_object();
        snprintf(s->path[depth], sizeof s->path[depth], "%.*s", (int)n, path);
        char *key = xasprintf("%.*s", (int)(dot - start), start);
        json_put(s->objects[depth - 1], key, s->objects[depth]);
        free(key);
        s->depth = depth + 1;
    }
    s->depth = depth;
    *out_key = start;
    return s->objects[depth - 1];
}

struct json *json_of_spec(const Ballast__JobSpec *spec)
{
    struct open_sections s = {.objects = {json_new_object()}, .depth = 1};
    for (size_t i = 0; i < job_spec_table.n_fields; i++) {
        const struct field *f = &job_spec_table.fields[i];
        const char *key;
        if (f->same_as)
            continue;
        struct json *section = section_of(&s, f->path, &key);
        json_put(section, key, field_value(f, spec));
    }
    return s.objects[0];
}

struct json *json_of_job_show(const Ballast__JobShowReply *reply)
{
    struct json *o = json_of_job(reply->job), *events = json_new_array();
    for (size_t i = 0; i < reply->n_events; i++)
        json_push(events, json_of_event(reply->events[i]));
    if (reply->spec)
        json_put(o, "spec", json_of_spec(reply->spec));
    json_put(o, "events", events);
    return json_of_one("Job", reply->seq, o);
}

/* ---- the rest ------------------------------------------------------------------------------- */

static struct json *json_gpu(const Ballast__GpuHealth *g)
{
    struct json *o = json_new_object(), *reasons = json_new_array();
    const char *reason;
    for (unsigned i = 0; event_throttle_reason(i, &reason); i++)
        if (g->throttle_reasons >> i & 1)
            json_push(reasons, json_new_string(reason));
    json_put(o, "name", json_new_string(g->name));
    json_put(o, "utilization", json_new_double(g->utilization));
    json_put(o, "memory_used_bytes", json_new_u64(g->memory_used_bytes));
    json_put(o, "memory_bytes", json_new_u64(g->memory_bytes));
    json_put(o, "temperature_celsius", json_new_u64(g->temperature_celsius));
    json_put(o, "power_watts", json_new_double(g->power_watts));
    json_put(o, "power_limit_watts", json_new_double(g->power_limit_watts));
    json_put(o, "sm_clock_mhz", json_new_u64(g->sm_clock_mhz));
    json_put(o, "memory_clock_mhz", json_new_u64(g->memory_clock_mhz));
    json_put(o, "throttle_reasons", reasons);
    json_put(o, "ecc_corrected", json_new_u64(g->ecc_corrected));
    json_put(o, "ecc_uncorrected", json_new_u64(g->ecc_uncorrected));
    json_put(o, "rows_remapped_corrected", json_new_u64(g->rows_remapped_corrected));
    json_put(o, "rows_remapped_uncorrected", json_new_u64(g->rows_remapped_uncorrected));
    json_put(o, "row_remap_pending", json_new_bool(g->row_remap_pending));
    json_put(o, "row_remap_failed", json_new_bool(g->row_remap_failed));
    json_put(o, "last_xid", g->last_xid ? json_new_u64(g->last_xid) : NULL);
    json_put(o, "nvlink_errors", json_new_u64(g->nvlink_errors));
    json_put(o, "sick", known_text(g->sick));
    return o;
}

struct json *json_of_worker(const Ballast__Worker *worker)
{
    struct json *o = json_new_object();
    json_put(o, "name", json_new_string(worker->name));
    json_put(o, "node", json_new_string(worker->node));
    json_put(o, "state", json_new_string(event_worker_state(worker->state)));
    json_put(o, "device", json_new_string(worker->device));
    json_put(o, "memory_bytes", json_new_u64(worker->memory_bytes));
    json_put(o, "cores", json_new_u64(worker->cores));
    json_put(o, "worker_epoch", id_text(worker->worker_epoch));
    json_put(o, "heartbeat_age_seconds", json_new_double((double)worker->heartbeat_age_ms / 1e3));
    json_put(o, "job", id_text(worker->job_id));
    json_put(o, "attempt", worker->job_id ? json_new_u64(worker->attempt) : NULL);
    json_put(o, "rank", worker->job_id ? json_new_u64(worker->rank) : NULL);
    json_put(o, "reason", json_new_string(worker->reason));
    json_put(o, "version", json_new_string(worker->version));
    json_put(o, "pid", json_new_u64(worker->pid));
    json_put(o, "gpu", worker->gpu ? json_gpu(worker->gpu) : NULL);
    return o;
}

struct json *json_of_event(const Ballast__Event *event)
{
    struct json *o = json_new_object();
    json_put(o, "seq", json_new_u64(event->seq));
    json_put(o, "at", instant(event->at_ns));
    json_put(o, "job", id_text(event->job_id));
    json_put(o, "worker", known_text(event->worker));
    json_put(o, "kind", json_new_string(event->kind));
    json_put(o, "step", event->has_step ? json_new_u64(event->step) : NULL);
    json_put(o, "text", json_new_string(event->text));
    return o;
}

struct json *json_of_step(const Ballast__StepReport *step)
{
    struct json *o = json_new_object(), *phases = json_new_object();
    for (size_t i = 0; i < step->n_phases; i++)
        json_put(phases, step->phases[i]->name, json_new_double(step->phases[i]->seconds));
    json_put(o, "step", json_new_u64(step->step));
    json_put(o, "loss", json_new_double(step->loss));
    json_put(o, "validation_loss", json_new_double(step->validation_loss));
    json_put(o, "grad_norm", json_new_double(step->grad_norm));
    json_put(o, "lr", json_new_double(step->lr));
    json_put(o, "tokens_per_second", json_new_double(step->tokens_per_second));
    json_put(o, "mfu", json_new_double(step->mfu));
    json_put(o, "memory_bytes", json_new_u64(step->memory_bytes));
    json_put(o, "memory_planned_bytes", json_new_u64(step->memory_planned_bytes));
    json_put(o, "imbalance", json_new_double(step->imbalance));
    json_put(o, "aux_loss", json_new_double(step->aux_loss));
    json_put(o, "z_loss", json_new_double(step->z_loss));
    json_put(o, "index_loss", json_new_double(step->index_loss));
    json_put(o, "rerouted", json_new_u64(step->rerouted));
    json_put(o, "dropped", json_new_u64(step->dropped));
    json_put(o, "skipped", json_new_u64(step->skipped));
    json_put(o, "samples", json_new_u64(step->samples));
    json_put(o, "epoch", step->epoch_samples ? json_new_double((double)step->samples /
                                                               (double)step->epoch_samples)
                                             : NULL);
    json_put(o, "attempt", json_new_u64(step->attempt));
    json_put(o, "at", instant(step->at_ns));
    json_put(o, "phases", phases);
    return o;
}

/* ---- expert load and placements -------------------------------------------------------------- */

struct json *json_of_layer_load(const Ballast__LayerExperts *l)
{
    struct json *o = json_new_object(), *tokens = json_new_array(), *both = json_new_object();
    for (size_t e = 0; e < l->n_tokens; e++)
        json_push(tokens, json_new_u64(l->tokens[e]));
    json_put(both, "experts", json_new_double(l->imbalance_experts));
    json_put(both, "devices", json_new_double(l->imbalance_devices));
    json_put(o, "layer", json_new_u64(l->layer));
    json_put(o, "window_steps", json_new_u64(l->window_steps));
    json_put(o, "tokens", tokens);
    json_put(o, "rerouted", json_new_u64(l->rerouted));
    json_put(o, "dropped", json_new_u64(l->dropped));
    json_put(o, "imbalance", both);
    return o;
}

static struct json *window_json(const Ballast__LoadWindow *w)
{
    struct json *o = json_new_object(), *layers = json_new_array(), *loads = json_new_array();
    for (size_t i = 0; i < w->n_layers; i++) {
        struct json *layer = json_new_object();
        json_put(layer, "layer", json_new_u64(w->layers[i]));
        json_put(layer, "experts", json_new_double(w->experts[i]));
        json_put(layer, "devices", json_new_double(w->devices[i]));
        json_push(layers, layer);
    }
    for (size_t d = 0; d < w->n_device_load; d++)
        json_push(loads, json_new_double(w->device_load[d]));
    json_put(o, "at", instant(w->at_ns));
    json_put(o, "first_step", json_new_u64(w->first_step));
    json_put(o, "last_step", json_new_u64(w->last_step));
    json_put(o, "window_steps", json_new_u64(w->n_steps));
    json_put(o, "attempt", json_new_u64(w->attempt));
    json_put(o, "placement_epoch", json_new_u64(w->placement_epoch));
    json_put(o, "imbalance", layers);
    json_put(o, "device_load", loads);
    json_put(o, "imbalance_measured", json_new_double(w->measured));
    json_put(o, "aux_loss", json_new_double(w->aux_loss));
    return o;
}

struct json *json_of_load_history(const Ballast__ExpertsReply *r)
{
    struct json *o = json_new_object(), *router = json_new_object(), *windows = json_new_array();
    for (size_t i = 0; i < r->n_windows; i++)
        json_push(windows, window_json(r->windows[i]));
    json_put(router, "bias_update", json_new_string(r->bias_update));
    json_put(router, "bias_update_rate", json_new_double(r->bias_update_rate));
    json_put(router, "aux_loss", json_new_double(r->aux_loss_weight));
    json_put(router, "aux_scope", json_new_string(r->aux_scope));
    json_put(o, "router", router);
    json_put(o, "windows", windows);
    json_put(o, "truncated", json_new_bool(r->truncated));
    return o;
}

struct json *json_of_rebalance(const Ballast__RebalanceEntry *e)
{
    struct json *o = json_new_object(), *imbalance = json_new_object();
    json_put(imbalance, "before", json_new_double(e->imbalance_before));
    json_put(imbalance, "predicted", json_new_double(e->imbalance_predicted));
    json_put(imbalance, "after", json_new_double(e->imbalance_after));
    json_put(o, "epoch", json_new_u64(e->epoch));
    json_put(o, "state", json_new_string(e->state));
    json_put(o, "at", instant(e->at_ns));
    json_put(o, "step", json_new_u64(e->at_step));
    json_put(o, "automatic", json_new_bool(e->automatic));
    json_put(o, "cause", json_new_string(e->cause));
    json_put(o, "moves", json_new_u64(e->n_moves));
    json_put(o, "bytes", json_new_u64(e->bytes));
    json_put(o, "stages", json_new_u64(e->n_stages));
    json_put(o, "pause_seconds", json_new_double(e->pause_s));
    json_put(o, "imbalance", imbalance);
    json_put(o, "predicted_gain_seconds", json_new_double(e->predicted_gain_s));
    json_put(o, "realised_gain_seconds", json_new_double(e->realised_gain_s));
    json_put(o, "reason", json_new_string(e->reason));
    return o;
}
