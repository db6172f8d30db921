/* server_admit.c - who may ask how much: token buckets, shedding, descriptors
 *
 * A peer that comes when four fifths of the descriptors are taken is told to go; when nearly all
 * are, the link closes its connection (unbinding an address would cut those that are there).
 *
 * Under pressure watches are refused first, then lists, then submits; cancels and what workers
 * say come through. */
#include "coordinator/server_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"

#define RETRY_MS 200
#define PEER_QUERIES_MAX 16u
#define PARKED_MAX 20000u

struct peer_state *peer_state_of(struct server *s, link_peer peer)
{
    void **slot = link_peer_slot(s->link, peer);
    if (!slot)
        return NULL;
    if (!*slot) {
        struct peer_state *p = xcalloc(1, sizeof *p);
        p->tokens = s->config->requests_per_second;
        p->refilled_ns = clock_now_ns();
        p->is_excess = link_stats(s->link).n_connections > s->n_descriptors_max / 10 * 8;
        *slot = p;
    }
    return *slot;
}

bool admit_message(struct server *s, link_peer peer, uint64_t now_ns)
{
    struct peer_state *p = peer_state_of(s, peer);
    double rate = s->config->requests_per_second;
    if (!p)
        return false;
    p->tokens += (double)(now_ns - p->refilled_ns) * rate / NS_PER_S;
    p->refilled_ns = now_ns;
    if (p->tokens > rate)
        p->tokens = rate;
    if (p->tokens < -rate) { /* it did not listen to the refusals */
        s->n_limited++;
        return false;
    }
    p->tokens -= 1;
    return true;
}

static size_t sheds_at(Ballast__Method method)
{
    switch (method) {
    case BALLAST__METHOD__METHOD_EVENTS:
    case BALLAST__METHOD__METHOD_LOGS:
    case BALLAST__METHOD__METHOD_METRICS:
    case BALLAST__METHOD__METHOD_JOB_WAIT:
        return WATCH_AT;
    case BALLAST__METHOD__METHOD_JOB_LIST:
    case BALLAST__METHOD__METHOD_JOB_SHOW:
    case BALLAST__METHOD__METHOD_WORKER_LIST:
    case BALLAST__METHOD__METHOD_EXPERTS:
    case BALLAST__METHOD__METHOD_PLACEMENT:
    case BALLAST__METHOD__METHOD_REBALANCE_HISTORY:
    case BALLAST__METHOD__METHOD_DB_QUERY:
    case BALLAST__METHOD__METHOD_DB_BACKUP:
        return LIST_AT;
    case BALLAST__METHOD__METHOD_SUBMIT:
    case BALLAST__METHOD__METHOD_JOB_REQUEUE:
    case BALLAST__METHOD__METHOD_JOB_RESUME:
    case BALLAST__METHOD__METHOD_JOB_SET:
        return SUBMIT_AT;
    default:
        return SIZE_MAX;
    }
}

static int too_much(struct server *s, Ballast__Status *out, const char *reason, const char *text)
{
    s->n_limited++;
    check_status(out, &s->scratch, BALLAST__CODE__RESOURCE_EXHAUSTED, reason, "%s", text);
    out->retry_after_ms = RETRY_MS;
    return -EAGAIN;
}

/* A backup is a file that the coordinator writes wherever the caller says: only for those who
 * could write it themselves. */
static bool may_write_files(const struct identity *who)
{
    if (who->has_key)
        return who->role == KEY_ADMIN;
    char *own = link_own_user();
    bool may = !strcmp(who->user, own) || !strcmp(who->user, "root");
    free(own);
    return may;
}

/* The least role with which a key may call it. */
static const char *role_needed(Ballast__Method method)
{
    static const enum key_role roles[] = {KEY_VIEWER, KEY_USER, KEY_ADMIN, KEY_WORKER};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (auth_may(&(struct identity){.has_key = true, .role = roles[i]}, method))
            return key_role_name(roles[i]);
    return "another";
}

static int not_allowed(struct server *s, const struct identity *who, const Ballast__Envelope *e,
                       Ballast__Status *out)
{
    log_warn("user=%s role=%s method=%s msg=\"refused: the role does not allow it\"", who->user,
             key_role_name(who->role), check_method(e->method)->name);
    check_status(out, &s->scratch, BALLAST__CODE__PERMISSION_DENIED, "ROLE",
                 "the key of %s has the role %s, which does not allow this: %s needs %s", who->user,
                 key_role_name(who->role), check_method(e->method)->name,
                 role_needed(e->method));
    return -EACCES;
}

int admit_request(struct server *s, link_peer peer, const struct identity *who,
                  const Ballast__Envelope *e, Ballast__Status *out_status)
{
    const struct peer_state *p = peer_state_of(s, peer);
    size_t limit = sheds_at(e->method);
    if (p && p->is_excess)
        return too_much(s, out_status, "CONNECTIONS", "too many connections to this coordinator");
    if (!auth_may(who, e->method))
        return not_allowed(s, who, e, out_status);
    if (e->method == BALLAST__METHOD__METHOD_DB_BACKUP && !may_write_files(who)) {
        check_status(out_status, &s->scratch, BALLAST__CODE__PERMISSION_DENIED, "NOT_OWNER",
                     "only root and the coordinator's own user may make a backup, over its ipc "
                     "address, or who has an admin's key; this is '%s'", who->user);
        return -EACCES;
    }
    if (!p || limit == SIZE_MAX)
        return 0;
    if (p->tokens < 0)
        return too_much(s, out_status, "RATE", "too many requests, slow down");
    if (s->n_out > limit)
        return too_much(s, out_status, "BUSY", "the coordinator is busy");
    if (e->method == BALLAST__METHOD__METHOD_DB_QUERY && s->n_sql)
        return too_much(s, out_status, "QUERIES", "another query runs at present");
    if (limit == WATCH_AT && (p->n_queries >= PEER_QUERIES_MAX || s->n_parked >= PARKED_MAX))
        return too_much(s, out_status, "WATCHES", "too many long polls at once");
    if (limit == SUBMIT_AT && store_free_bytes(s->store) < s->config->disk_reserve_bytes)
        return too_much(s, out_status, "DISK_FULL", "the disk of state_dir is nearly full: free "
                        "space, or lower disk_reserve");
    return 0;
}
