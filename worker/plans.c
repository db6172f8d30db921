/* plans.c - from PREPARE to a transfer that is ready, and why not */
#include "worker/plans.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "common/failpoint.h"
#include "common/mem.h"

struct plans {
    pthread_mutex_t lock; /* of what arrives */
    uint8_t *arrived;     /* a packed PREPARE, or NULL */
    size_t   n_arrived;
    uint32_t arrived_epoch, aborted_epoch; /* aborted: the newest wish */

    /* the training thread's */
    struct transfer *ready;
    uint32_t ready_epoch;
    uint64_t moved_bytes; /* of its boundaries so far */
    double   pause_s;
    struct plans_facts facts;
    struct err why; /* of the newest rejected one */
};

struct plans *plans_create(void)
{
    struct plans *p = xcalloc(1, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    return p;
}

static void drop(struct plans *p)
{
    transfer_destroy(p->ready);
    p->ready = NULL;
    p->ready_epoch = 0;
    p->moved_bytes = 0;
    p->pause_s = 0;
}

void plans_destroy(struct plans *p)
{
    if (!p)
        return;
    drop(p);
    free(p->arrived);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

/* ---- what arrives --------------------------------------------------------------------------- */

void plans_prepare(struct plans *p, const Ballast__Prepare *prepare)
{
    if (!prepare->placement)
        return;
    size_t n = ballast__prepare__get_packed_size(prepare);
    uint8_t *bytes = xcalloc(1, n);
    ballast__prepare__pack(prepare, bytes);
    failpoint("prepare-received");
    pthread_mutex_lock(&p->lock);
    bool is_newer = prepare->placement->epoch > p->arrived_epoch;
    if (is_newer) {
        uint8_t *old = p->arrived;
        p->arrived = bytes;
        p->n_arrived = n;
        p->arrived_epoch = prepare->placement->epoch;
        bytes = old;
    }
    pthread_mutex_unlock(&p->lock);
    free(bytes);
}

void plans_abort(struct plans *p, const Ballast__AbortPlan *abort_plan)
{
    pthread_mutex_lock(&p->lock);
    if (abort_plan->epoch > p->aborted_epoch)
        p->aborted_epoch = abort_plan->epoch;
    pthread_mutex_unlock(&p->lock);
}

static Ballast__Prepare *take_arrived(struct plans *p, uint32_t *out_aborted)
{
    pthread_mutex_lock(&p->lock);
    uint8_t *bytes = p->arrived;
    size_t n = p->n_arrived;
    p->arrived = NULL;
    *out_aborted = p->aborted_epoch;
    pthread_mutex_unlock(&p->lock);
    Ballast__Prepare *m = bytes ? ballast__prepare__unpack(NULL, n, bytes) : NULL;
    free(bytes);
    return m;
}

/* ---- at the boundary ------------------------------------------------------------------------ */

static void reject(struct plans *p, uint32_t epoch)
{
    p->facts.rejected_epoch = epoch;
    p->facts.text = p->why.text;
}

/* The message's, per layer; NULL for a layer that is whole at the first boundary. */
static int find_stages(const Ballast__Placement *m, const struct slots *now,
                       const struct slots *to, uint32_t **out_stage, struct err *err)
{
    for (size_t i = 0; i < m->n_layers; i++) {
        const Ballast__PlacementLayer *l = m->layers[i];
        const struct placement *from = &now->layers[l->layer].map;
        if (l->n_stage == 0)
            continue;
        if (l->n_stage != placement_n_total(from))
            return err_set(err, -EINVAL, "placement %u, layer %u: %zu stages for %u slots",
                           m->epoch, l->layer, l->n_stage, placement_n_total(from));
        int rc = placement_check_stages(from, &to->layers[l->layer].map, l->stage, err);
        if (rc < 0)
            return err_prefix(err, "placement %u, layer %u", m->epoch, l->layer);
        out_stage[l->layer] = l->stage;
    }
    return 0;
}

/* What a PREPARE makes of the placement in force. Gives *out_to, and *out_stage, an array whose
 * rows are m's. */
static int read_plan(const Ballast__Prepare *m, uint32_t aborted, const struct slots *now,
                     struct slots *out_to, uint32_t ***out_stage, struct err *err)
{
    struct slots to;
    uint32_t epoch = m->placement->epoch;
    if (epoch <= aborted)
        return err_set(err, -ECANCELED, "plan %u was aborted", epoch);
    if (m->base_epoch != now->epoch)
        return err_set(err, -ESTALE, "plan %u starts from placement %u, in force is %u", epoch,
                       m->base_epoch, now->epoch);
    if (epoch <= now->epoch)
        return err_set(err, -ESTALE, "plan %u is not newer than placement %u", epoch, now->epoch);
    int rc = slots_from(now, m->placement, &to, err);
    if (rc < 0)
        return rc;
    uint32_t **stage = xcalloc(now->n_layers, sizeof *stage);
    if ((rc = find_stages(m->placement, now, &to, stage, err)) < 0) {
        free(stage);
        slots_fini(&to);
        return rc;
    }
    *out_to = to;
    *out_stage = stage;
    return 0;
}

static int prepare(struct plans *p, const Ballast__Prepare *m, uint32_t aborted,
                   plans_make *make, void *place, struct slots *slots, struct err *err)
{
    struct slots to;
    uint32_t **stage = NULL;
    int rc = read_plan(m, aborted, slots, &to, &stage, err);
    if (rc < 0)
        return rc;
    drop(p); /* of an older plan, before this one takes its memory */
    rc = make(place, slots, &to, stage, &p->ready, err);
    free(stage);
    slots_fini(&to); /* nothing, where the transfer has it */
    return rc;
}

static void take_prepare(struct plans *p, const Ballast__Prepare *m, uint32_t aborted,
                         plans_make *make, void *place, struct slots *slots)
{
    uint32_t epoch = m->placement->epoch;
    if (epoch <= slots->epoch || epoch <= p->facts.prepared_epoch ||
        epoch <= p->facts.rejected_epoch)
        return;
    if (prepare(p, m, aborted, make, place, slots, &p->why) < 0) {
        reject(p, epoch);
        return;
    }
    p->ready_epoch = p->facts.prepared_epoch = epoch;
    failpoint("prepared");
}

void plans_take(struct plans *p, job_id job, uint32_t attempt, plans_make *make, void *place,
                struct slots *slots)
{
    uint32_t aborted;
    if (plans_has_begun(p))
        return; /* it is carried out, whatever arrives */
    Ballast__Prepare *m = take_arrived(p, &aborted);
    if (m && m->job_id == job && m->attempt == attempt)
        take_prepare(p, m, aborted, make, place, slots);
    if (m)
        ballast__prepare__free_unpacked(m, NULL);
    if (p->ready && p->ready_epoch <= aborted) {
        err_set(&p->why, -ECANCELED, "plan %u was aborted", p->ready_epoch);
        reject(p, p->ready_epoch);
        drop(p);
    }
}

uint32_t plans_ready(const struct plans *p)
{
    return p->ready_epoch;
}

uint32_t plans_ahead(const struct plans *p)
{
    return p->ready && transfer_is_ahead(p->ready) ? p->ready_epoch : 0;
}

bool plans_has_begun(const struct plans *p)
{
    return p->ready && transfer_has_begun(p->ready);
}

static void note_pause(struct plans *p, double seconds)
{
    p->pause_s = seconds > p->pause_s ? seconds : p->pause_s;
}

int plans_go_ahead(struct plans *p, size_t n_bytes_max, double *out_seconds, struct err *err)
{
    assert(p->ready);
    int rc = transfer_ahead(p->ready, n_bytes_max, out_seconds, err);
    note_pause(p, *out_seconds);
    return rc;
}

int plans_carry_out(struct plans *p, struct transfer_result *out, struct err *err)
{
    assert(p->ready);
    int rc = transfer_run(p->ready, out, err);
    if (rc == 0) {
        p->moved_bytes += out->sent_bytes;
        note_pause(p, out->seconds);
    }
    if (rc == 0 && out->is_last) {
        p->facts.moved_bytes = p->moved_bytes;
        p->facts.pause_s = p->pause_s;
    }
    if (rc < 0 || out->is_last)
        drop(p);
    return rc;
}

struct plans_facts plans_facts(const struct plans *p)
{
    struct plans_facts f = p->facts;
    if (!f.text)
        f.text = "";
    return f;
}
