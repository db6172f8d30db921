/* rebalance.c - where a job's experts are, the plan that is open, and what the last one brought */
#include "coordinator/rebalance.h"

#include <stdlib.h>
#include <string.h>

#include "coordinator/keys.h"
#include "proto/check.h"
#include "proto/placed.h"
#include "proto/message.h"

void rebalance_init(struct rebalance *r, const Ballast__JobSpec *spec)
{
    *r = (struct rebalance){.is_auto = spec->rebalance_auto};
}

static void drop_plan(struct rebalance *r)
{
    if (r->plan)
        ballast__record_plan__free_unpacked(r->plan, NULL);
    r->plan = NULL;
    r->has_ended = false;
}

void rebalance_fini(struct rebalance *r)
{
    drop_plan(r);
    if (r->placement)
        ballast__placement__free_unpacked(r->placement, NULL);
    load_destroy(r->load);
    propose_destroy(r->propose);
    *r = (struct rebalance){0};
}

/* ---- records ------------------------------------------------------------------------------- */

static bool is_placement(const Ballast__Placement *p, uint32_t n_devices)
{
    struct err err = {0};
    return p && p->n_layers && p->n_devices == n_devices && check_placement(p, &err) == 0;
}

const char *rebalance_apply_plan(struct rebalance *r, const Ballast__RecordPlan *p,
                                 uint32_t n_devices)
{
    if (rebalance_has_plan(r))
        return "PLAN while another one is open";
    if (!is_placement(p->placement, n_devices))
        return "PLAN with a placement that is none of this job";
    if (p->placement->epoch <= r->newest_epoch || p->base_epoch != rebalance_epoch(r))
        return "PLAN that does not follow the placement in force";
    drop_plan(r);
    r->plan = message_copy(p, NULL);
    r->newest_epoch = p->placement->epoch;
    if (p->idempotency_key.len == sizeof r->apply_key) {
        memcpy(r->apply_key, p->idempotency_key.data, sizeof r->apply_key);
        r->apply_epoch = r->newest_epoch;
    }
    if (r->migration.state == MIGRATION_ABORTING) /* replayed: it was known to be over */
        migration_move(&r->migration, MIGRATION_ENDED);
    migration_move(&r->migration, MIGRATION_PREPARING);
    r->migration.epoch = r->newest_epoch;
    r->migration.late_ns = UINT64_MAX;
    return NULL;
}

const char *rebalance_apply_plan_ended(struct rebalance *r, const Ballast__RecordPlanEnded *e)
{
    if (!rebalance_has_plan(r) || e->epoch != r->plan->placement->epoch)
        return "PLAN_ENDED of a plan that is not open";
    r->has_ended = true;
    migration_move(&r->migration, MIGRATION_ABORTING);
    return NULL;
}

const char *rebalance_apply_placement(struct rebalance *r, const Ballast__RecordPlacement *p,
                                      uint32_t n_devices)
{
    if (!r->plan || p->epoch != r->plan->placement->epoch)
        return "PLACEMENT without its plan";
    if (!is_placement(p->placement, n_devices) || p->placement->epoch != p->epoch)
        return "PLACEMENT that is none of this job";
    if (r->placement)
        ballast__placement__free_unpacked(r->placement, NULL);
    r->placement = message_copy(p->placement, NULL);
    r->unseen.epoch = p->epoch;
    r->unseen.step_s = r->plan->step_s;
    r->unseen.imbalance = p->imbalance_before;
    drop_plan(r);
    if (r->migration.state != MIGRATION_MIGRATING) /* replayed */
        migration_move(&r->migration, MIGRATION_MIGRATING);
    migration_move(&r->migration, MIGRATION_DONE);
    return NULL;
}

const char *rebalance_apply_realised(struct rebalance *r, const Ballast__RecordRealised *x)
{
    if (!x->epoch || x->epoch != r->unseen.epoch)
        return "REALISED of a placement that nobody waited for";
    bool is_loss = x->gain_s < 0 && !(x->imbalance_after < r->unseen.imbalance);
    r->n_losses = is_loss ? r->n_losses + 1 : 0;
    r->unseen.epoch = 0;
    return NULL;
}

void rebalance_settings(struct rebalance *r, const Ballast__JobSpec *before,
                        const Ballast__JobSpec *after)
{
    if (before->rebalance_window_steps == after->rebalance_window_steps &&
        before->rebalance_horizon_steps == after->rebalance_horizon_steps &&
        before->rebalance_min_gain == after->rebalance_min_gain)
        return;
    load_destroy(r->load);
    propose_destroy(r->propose);
    r->load = NULL;
    r->propose = NULL;
    r->is_new = r->is_thinking = false;
}

void rebalance_attempt_over(struct rebalance *r)
{
    drop_plan(r);
    migration_void(&r->migration);
    r->is_new = r->is_thinking = false;
}

void rebalance_dump(FILE *out, const struct rebalance *r)
{
    uint8_t digest[DIGEST_BYTES] = {0};
    if (r->placement) {
        size_t n_bytes = ballast__placement__get_packed_size(r->placement);
        uint8_t *bytes = xcalloc(1, n_bytes);
        ballast__placement__pack(r->placement, bytes);
        keys_digest(bytes, n_bytes, digest);
        free(bytes);
    }
    fprintf(out, " auto=%d placement=%u:%02x%02x%02x%02x newest=%u plan=%u:%d unseen=%u losses=%u "
            "apply=%u:%02x%02x", r->is_auto, rebalance_epoch(r), digest[0], digest[1], digest[2],
            digest[3], r->newest_epoch, r->plan ? r->plan->placement->epoch : 0, r->has_ended,
            r->unseen.epoch, r->n_losses, r->apply_epoch, r->apply_key[0], r->apply_key[1]);
}
