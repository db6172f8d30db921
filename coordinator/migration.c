/* migration.c - the life of one plan of a job: all ranks carry it out, or none does */
#include "coordinator/migration.h"

#include <assert.h>

#define BIT(state) (1u << MIGRATION_##state)

static const uint32_t allowed[] = {
    [MIGRATION_NONE]      = BIT(PREPARING),
    [MIGRATION_PREPARING] = BIT(MIGRATING) | BIT(ABORTING),
    [MIGRATION_MIGRATING] = BIT(DONE) | BIT(ABORTING),
    [MIGRATION_ABORTING]  = BIT(MIGRATING) | BIT(ENDED),
    [MIGRATION_DONE]      = BIT(PREPARING),
    [MIGRATION_ENDED]     = BIT(PREPARING),
};

const char *migration_state_name(enum migration_state state)
{
    static const char *const names[] = {"NONE", "PREPARING", "MIGRATING", "ABORTING", "DONE",
                                        "ENDED"};
    return names[state];
}

bool migration_may_move(const struct migration *m, enum migration_state next)
{
    return allowed[m->state] & (1u << next);
}

void migration_move(struct migration *m, enum migration_state next)
{
    assert(migration_may_move(m, next));
    m->state = next;
}

void migration_void(struct migration *m)
{
    *m = (struct migration){0};
}

void migration_hear(struct migration_rank *r, const Ballast__RankState *s)
{
    if (s->prepared_epoch > r->prepared_epoch)
        r->prepared_epoch = s->prepared_epoch;
    if (s->rejected_epoch > r->rejected_epoch)
        r->rejected_epoch = s->rejected_epoch;
    if (s->placement_epoch > r->placement_epoch) {
        r->placement_epoch = s->placement_epoch;
        r->moved_bytes = s->moved_bytes;
        r->pause_s = s->pause_s;
    }
}

static bool has_migrated(const struct migration *m, const struct migration_rank *r)
{
    return r->placement_epoch >= m->epoch;
}

static bool has_refused(const struct migration *m, const struct migration_rank *r)
{
    return r->rejected_epoch >= m->epoch && !has_migrated(m, r);
}

static bool is_prepared(const struct migration *m, const struct migration_rank *r)
{
    return r->prepared_epoch >= m->epoch && !has_refused(m, r);
}

struct tally {
    uint32_t n_migrated, n_refused, n_prepared;
    uint32_t refuses, is_waited_for; /* a rank each */
};

static struct tally count(const struct migration *m, const struct migration_rank *ranks,
                          uint32_t n_ranks)
{
    struct tally t = {0};
    for (uint32_t r = n_ranks; r-- > 0;) {
        t.n_migrated += has_migrated(m, &ranks[r]);
        t.n_prepared += is_prepared(m, &ranks[r]) || has_migrated(m, &ranks[r]);
        if (has_refused(m, &ranks[r])) {
            t.n_refused++;
            t.refuses = r;
        } else if (!is_prepared(m, &ranks[r])) {
            t.is_waited_for = r;
        }
    }
    return t;
}

enum migration_news migration_look(struct migration *m, const struct migration_rank *ranks,
                                   uint32_t n_ranks, uint64_t now_ns, uint32_t *out_rank)
{
    struct tally t = count(m, ranks, n_ranks);
    bool is_wanted = m->state == MIGRATION_PREPARING || m->state == MIGRATION_MIGRATING;
    if (is_wanted && t.n_refused && !t.n_migrated) {
        *out_rank = t.refuses;
        return MIGRATION_REFUSED;
    }
    if (m->state == MIGRATION_PREPARING && !t.n_migrated && t.n_prepared < n_ranks) {
        *out_rank = t.is_waited_for;
        return now_ns >= m->late_ns ? MIGRATION_LATE : MIGRATION_NO_NEWS;
    }
    if (m->state == MIGRATION_PREPARING || (m->state == MIGRATION_ABORTING && t.n_migrated))
        migration_move(m, MIGRATION_MIGRATING);
    else if (m->state == MIGRATION_ABORTING && t.n_refused)
        migration_move(m, MIGRATION_ENDED);
    return m->state == MIGRATION_MIGRATING && t.n_migrated == n_ranks ? MIGRATION_COMPLETE
                                                                      : MIGRATION_NO_NEWS;
}

bool migration_must_ask(const struct migration *m, const struct migration_rank *r)
{
    if (has_migrated(m, r) || has_refused(m, r))
        return false;
    if (m->state == MIGRATION_PREPARING)
        return !is_prepared(m, r);
    return m->state == MIGRATION_ABORTING || m->state == MIGRATION_ENDED;
}

bool migration_is_settled(const struct migration *m, const struct migration_rank *ranks,
                          uint32_t n_ranks)
{
    if (migration_is_open(m))
        return false;
    for (uint32_t r = 0; r < n_ranks; r++)
        if (migration_must_ask(m, &ranks[r]))
            return false;
    return true;
}
