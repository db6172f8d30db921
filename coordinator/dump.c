/* dump.c - the durable state in words, for tests that compare cores and for people */
#include "coordinator/core.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void dump_job(FILE *out, const struct job *j)
{
    fprintf(out, "job %" PRIu64 " %s user=%s reason=\"%s\" exit=%s then=%s stop=%d", j->id,
            event_job_state(j->state), j->user, j->reason, j->exit, event_job_state(j->then),
            j->stop_mode);
    fprintf(out, " held=%d \"%s\" by=%s", j->held, j->hold_reason, j->held_by);
    fprintf(out, " attempt=%u restarts=%u in_row=%u checkpoint=%" PRIu64 " step=%" PRIu64
            " ran_ms=%" PRIu64 " backoff_ms=%" PRIu64 " seen=%x assigned=%" PRIu64,
            j->attempt, j->n_restarts, j->n_failures_in_row, j->checkpoint_step, j->step,
            j->ran_ms, j->backoff_ms, j->states_seen, j->assigned_seq);
    fprintf(out, " at=%" PRId64 ",%" PRId64 ",%" PRId64, j->submitted_at_ns, j->started_at_ns,
            j->ended_at_ns);
    for (size_t i = 0; i < j->n_after; i++)
        fprintf(out, " after=%" PRIu64, j->after[i]);
    for (uint32_t r = 0; r < j->n_gang; r++)
        fprintf(out, " %s:%" PRIu64, j->gang[r], j->gang_epochs[r]);
    fprintf(out, " settings=%u start=%u", j->settings_revision,
            j->start_spec ? j->start_revision : j->settings_revision);
    rebalance_dump(out, &j->rebalance);
    uint8_t digest[DIGEST_BYTES];
    size_t n_bytes = ballast__job_spec__get_packed_size(j->spec);
    uint8_t *bytes = xcalloc(1, n_bytes);
    ballast__job_spec__pack(j->spec, bytes);
    keys_digest(bytes, n_bytes, digest);
    free(bytes);
    fprintf(out, " spec=%02x%02x%02x%02x keys=%02x%02x,%02x%02x coll=%02x%02x\n", digest[0],
            digest[1], digest[2], digest[3], j->queue_key[0], j->queue_key[1], j->pause_key[0],
            j->pause_key[1], j->coll_id[0], j->coll_id[1]);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(struct worker *const *)a)->name, (*(struct worker *const *)b)->name);
}

static void dump_workers(FILE *out, const struct fleet *f)
{
    struct worker **sorted = xmemdup(f->workers, f->n * sizeof *sorted);
    qsort(sorted, f->n, sizeof *sorted, by_name);
    for (size_t i = 0; i < f->n; i++) {
        const struct worker *w = sorted[i];
        if (w->record_state)
            fprintf(out, "worker %s node=%s state=%d epoch=%" PRIu64 " drained=%d \"%s\"\n",
                    w->name, w->node, w->record_state, w->record_epoch, w->is_drained,
                    w->record_reason);
    }
    free(sorted);
}

char *coord_dump(const struct coord *c)
{
    char *text = NULL;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);
    assert(out);
    uint64_t keys_sum = 0;
    for (size_t i = 0; i < c->keys.n_slots; i++) {
        const struct key_entry *e = &c->keys.slots[i];
        uint64_t parts[3] = {e->user_hash, e->job, 0};
        memcpy(&parts[2], e->key, sizeof parts[2]);
        uint8_t digest[DIGEST_BYTES];
        keys_digest(parts, sizeof parts, digest);
        memcpy(parts, digest, sizeof parts[0]);
        keys_sum += e->job ? parts[0] : 0; /* in any order */
    }
    fprintf(out, "epoch %" PRIu64 " seq %" PRIu64 " job %" PRIu64 " keys %zu %016" PRIx64 "\n",
            c->epoch, c->last_seq, c->last_job_id, c->keys.n, keys_sum);
    for (size_t i = 0; i < c->jobs.n; i++)
        if (!job_has_ended(c->jobs.jobs[i]))
            dump_job(out, c->jobs.jobs[i]);
    dump_workers(out, &c->fleet);
    fclose(out);
    return text;
}
