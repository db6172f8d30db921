/* coll_span_open.c - what is started of calls that cross, and finished later; the courier
 *
 * A call is finished when it has run and, of rows, what comes is here; it is reclaimed when what
 * goes has gone. So finishes and reclaims may come in any order. */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/coll_span.h"
#include "worker/short_turns.h"

struct span_courier {
    pthread_t thread;
    pthread_mutex_t lock; /* of all below, and of what has become of a call */
    pthread_cond_t changed;
    struct span_open *first, **last; /* first: under way */
    bool is_ending;
};

/* ---- what is open ---------------------------------------------------------------------------- */

static struct span_open *place_of(struct host *h, uint32_t group, uint32_t at)
{
    struct span_state *s = h->span;
    if (!s->open)
        s->open = xcalloc((size_t)COLL_GROUPS_MAX * COLL_OPEN_MAX, sizeof *s->open);
    return &s->open[group * COLL_OPEN_MAX + (at - 1) % COLL_OPEN_MAX];
}

static struct span_open *open_of(struct host *h, coll_ticket ticket)
{
    struct span_open *o = place_of(h, ticket & 0x7f, (uint32_t)(ticket >> 8));
    return o->at == ticket >> 8 ? o : NULL;
}

/* The next one's place, once what left from there has gone. */
static int take_place(struct host *h, const struct coll_group *g, const struct span_open *what,
                      struct span_open **out, struct err *err)
{
    uint32_t at = ++h->span->n_started[g->id];
    struct span_open *o = *out = place_of(h, g->id, at);
    assert(o->at == 0 || o->is_over);
    int rc = o->at == 0 ? 0 : span_wait(&o->call, &o->goes, err);
    if (rc < 0)
        return span_end(h, rc);
    *o = *what;
    o->g = *g;
    o->at = at;
    o->started_ns = clock_now_ns();
    o->call = span_note(h, &o->g, o->op, o->n);
    return 0;
}

/* ---- the courier ----------------------------------------------------------------------------- */

static int run(struct span_open *o)
{
    int rc = o->run(o, &o->err);
    o->ran_ns = clock_now_ns();
    return rc;
}

/* Members must not wait for what has failed here. */
static void carry(struct host *h, struct span_courier *k, struct span_open *o)
{
    pthread_mutex_unlock(&k->lock);
    int rc = run(o);
    if (rc < 0)
        shm_abort(&h->shm, "%s", o->err.text);
    pthread_mutex_lock(&k->lock);
    o->rc = rc;
    o->has_run = true;
    k->first = o->next;
    if (!k->first)
        k->last = &k->first;
    pthread_cond_broadcast(&k->changed);
}

static void *courier_main(void *arg)
{
    struct host *h = arg;
    struct span_courier *k = h->span->courier;
    shm_wait_quietly();
    short_turns_ask();
    pthread_mutex_lock(&k->lock);
    while (k->first || !k->is_ending)
        if (k->first)
            carry(h, k, k->first);
        else
            pthread_cond_wait(&k->changed, &k->lock);
    pthread_mutex_unlock(&k->lock);
    return NULL;
}

static void hand_over(struct host *h, struct span_open *o)
{
    struct span_courier *k = h->span->courier;
    if (!k) {
        k = h->span->courier = xcalloc(1, sizeof *k);
        k->last = &k->first;
        pthread_mutex_init(&k->lock, NULL);
        pthread_cond_init(&k->changed, NULL);
        int rc = pthread_create(&k->thread, NULL, courier_main, h);
        assert(rc == 0);
    }
    pthread_mutex_lock(&k->lock);
    *k->last = o;
    k->last = &o->next;
    pthread_cond_broadcast(&k->changed);
    pthread_mutex_unlock(&k->lock);
}

void span_settle(struct host *h)
{
    struct span_courier *k = h->span->courier;
    if (!k || pthread_equal(pthread_self(), k->thread))
        return;
    pthread_mutex_lock(&k->lock);
    while (k->first) {
        call_note_back(h, k->first->call.note); /* that is where the rank waits */
        pthread_cond_wait(&k->changed, &k->lock);
    }
    pthread_mutex_unlock(&k->lock);
}

void span_courier_close(struct host *h)
{
    struct span_courier *k = h->span->courier;
    if (!k)
        return;
    pthread_mutex_lock(&k->lock);
    if (k->first)
        shm_abort(&h->shm, "rank %u has left in the midst of a call", h->coll.rank);
    k->is_ending = true;
    pthread_cond_broadcast(&k->changed);
    pthread_mutex_unlock(&k->lock);
    pthread_join(k->thread, NULL);
    pthread_mutex_destroy(&k->lock);
    pthread_cond_destroy(&k->changed);
    free(k);
    h->span->courier = NULL;
}

/* ---- start, finish, reclaim ------------------------------------------------------------------ */

/* Nothing is gained by a courier where the rank waits for it at once. */
static bool has_time(const struct host *h)
{
    return !h->coll.is_at_once && !h->coll.is_blocking;
}

int span_start(struct host *h, const struct coll_group *g, const struct span_open *what,
               coll_ticket *out_ticket, struct err *err)
{
    struct span_open *o;
    int rc = take_place(h, g, what, &o, err);
    if (rc < 0)
        return rc;
    coll_ticket ticket = (coll_ticket)o->at << 8 | 0x80 | g->id;
    if (has_time(h) && span_shares(h, o->in)) {
        *out_ticket = ticket;
        call_note_ahead(h, o->call.note);
        hand_over(h, o);
        return 0;
    }
    span_settle(h);
    o->has_run = true;
    if ((o->rc = run(o)) == 0 && span_shares(h, o->in)) {
        *out_ticket = ticket;
        return 0;
    }
    /* The next call needs the copy's place. */
    rc = span_finish(h, ticket, err);
    return rc == 0 ? span_reclaim(h, ticket, err) : rc;
}

/* Until it has run. */
static int wait_for(struct host *h, struct span_open *o, struct err *err)
{
    struct span_courier *k = h->span->courier;
    if (k)
        pthread_mutex_lock(&k->lock);
    while (!o->has_run)
        pthread_cond_wait(&k->changed, &k->lock);
    if (k)
        pthread_mutex_unlock(&k->lock);
    if (o->rc < 0 && err)
        *err = o->err;
    return o->rc;
}

int span_finish(struct host *h, coll_ticket ticket, struct err *err)
{
    struct span_open *o = open_of(h, ticket);
    assert(o && !o->is_over);
    uint64_t began_ns = clock_now_ns();
    call_note_back(h, o->call.note);
    int rc = wait_for(h, o, err);
    if (rc == 0)
        rc = span_wait(&o->call, &o->comes, err);
    if (rc < 0)
        return span_end(h, rc);
    uint64_t came_ns = atomic_load(&o->comes.done_ns);
    o->is_over = true;
    call_note_left(h, o->call.note);
    call_note_hidden(h, o->hidden, o->call.layer, o->started_ns,
                     came_ns > o->ran_ns ? came_ns : o->ran_ns, began_ns);
    return 0;
}

int span_reclaim(struct host *h, coll_ticket ticket, struct err *err)
{
    struct span_open *o = open_of(h, ticket);
    if (!o || wire_wait(&o->goes, 0))
        return 0;
    assert(o->is_over);
    call_note_back(h, o->call.note);
    int rc = span_wait(&o->call, &o->goes, err);
    if (rc == 0)
        call_note_left(h, o->call.note);
    return span_end(h, rc);
}
