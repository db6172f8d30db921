/* outbox.c - reports that the coordinator has not stored yet, oldest first */
#include "worker/outbox.h"

#include <assert.h>
#include <stdlib.h>

#define BATCH_REPORTS_MAX 512
#define BATCH_BYTES_MAX   (256u << 10)

void outbox_init(struct outbox *o, uint32_t n_max, size_t bytes_max)
{
    *o = (struct outbox){.n_max = n_max, .bytes_max = bytes_max};
}

static struct outbox_item *at(const struct outbox *o, size_t i)
{
    return &o->items[(o->head + i) % o->n_alloc];
}

static void drop_first(struct outbox *o)
{
    struct outbox_item *first = at(o, 0);
    o->n_bytes -= first->n_bytes;
    free(first->bytes);
    o->head = (o->head + 1) % o->n_alloc;
    o->n--;
}

void outbox_fini(struct outbox *o)
{
    while (o->n)
        drop_first(o);
    free(o->items);
    *o = (struct outbox){0};
}

static void make_room(struct outbox *o)
{
    if (o->n < o->n_alloc)
        return;
    size_t n_alloc = o->n_alloc ? 2 * o->n_alloc : 64;
    struct outbox_item *items = xcalloc(n_alloc, sizeof *items);
    for (size_t i = 0; i < o->n; i++)
        items[i] = *at(o, i);
    free(o->items);
    o->items = items;
    o->n_alloc = n_alloc;
    o->head = 0;
}

void outbox_add(struct outbox *o, job_id job, uint32_t attempt, uint64_t step, uint64_t samples,
                const ProtobufCMessage *report)
{
    size_t n_bytes = protobuf_c_message_get_packed_size(report);
    while (o->n && (o->n >= o->n_max || o->n_bytes + n_bytes > o->bytes_max)) {
        drop_first(o);
        o->n_dropped++;
    }
    make_room(o);
    struct outbox_item *item = at(o, o->n++);
    *item = (struct outbox_item){.job = job, .attempt = attempt, .step = step,
                                 .samples = samples, .n_bytes = (uint32_t)n_bytes,
                                 .bytes = xcalloc(1, n_bytes)};
    protobuf_c_message_pack(report, item->bytes);
    o->n_bytes += n_bytes;
}

static bool is_stored(const struct outbox_item *item, job_id job, uint32_t attempt, uint64_t step,
                      uint64_t samples)
{
    bool is_up_to = samples && item->samples ? item->samples <= samples : item->step <= step;
    return item->job == job && item->attempt == attempt && is_up_to;
}

size_t outbox_ack(struct outbox *o, job_id job, uint32_t attempt, uint64_t step, uint64_t samples)
{
    size_t n = 0;
    while (o->n && is_stored(at(o, 0), job, attempt, step, samples)) {
        drop_first(o);
        n++;
    }
    return n;
}

Ballast__StepReports *outbox_batch(const struct outbox *o, struct arena *arena)
{
    if (!o->n)
        return NULL;
    const struct outbox_item *first = at(o, 0);
    Ballast__StepReports *batch = arena_alloc(arena, sizeof *batch);
    ballast__step_reports__init(batch);
    batch->job_id = first->job;
    batch->attempt = first->attempt;
    batch->steps = arena_alloc(arena, BATCH_REPORTS_MAX * sizeof *batch->steps);
    size_t n_bytes = 0;
    for (size_t i = 0; i < o->n && batch->n_steps < BATCH_REPORTS_MAX; i++) {
        const struct outbox_item *item = at(o, i);
        n_bytes += item->n_bytes;
        if (item->job != first->job || item->attempt != first->attempt ||
            (i && n_bytes > BATCH_BYTES_MAX))
            break;
        Ballast__StepReport *report = ballast__step_report__unpack(arena_pb(arena), item->n_bytes,
                                                                   item->bytes);
        assert(report);
        batch->steps[batch->n_steps++] = report;
    }
    return batch;
}

Ballast__LoadReport *outbox_load(const struct outbox *o, struct arena *arena)
{
    if (!o->n)
        return NULL;
    const struct outbox_item *first = at(o, 0);
    Ballast__LoadReport *report = ballast__load_report__unpack(arena_pb(arena), first->n_bytes,
                                                               first->bytes);
    assert(report);
    return report;
}

bool outbox_has(const struct outbox *o, job_id job, uint32_t attempt)
{
    for (size_t i = 0; i < o->n; i++)
        if (at(o, i)->job == job && at(o, i)->attempt == attempt)
            return true;
    return false;
}
