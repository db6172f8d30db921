/* transfer.c - how far a plan's moves are: rounds that go ahead, then stage after stage */
#include "worker/transfer_parts.h"

void transfer_init(struct transfer *t, const struct transfer_ops *ops, struct slots *slots,
                   struct slots *to, uint32_t *const *stage, const size_t *part_bytes)
{
    *t = (struct transfer){.ops = ops, .slots = slots, .to = *to};
    *to = (struct slots){0};
    moves_init(&t->moves, slots, &t->to, stage, part_bytes);
}

void transfer_fini(struct transfer *t)
{
    slots_fini(&t->to);
    moves_fini(&t->moves);
}

void transfer_destroy(struct transfer *t)
{
    if (t)
        t->ops->destroy(t);
}

bool transfer_is_ahead(const struct transfer *t)
{
    return t->next_round >= t->moves.first_round[0];
}

bool transfer_has_begun(const struct transfer *t)
{
    return t->next_stage > 0;
}

/* How many rounds follows from sizes alone, so it is the same on all ranks of the group. */
int transfer_ahead(struct transfer *t, size_t n_bytes_max, double *out_seconds, struct err *err)
{
    *out_seconds = 0;
    if (transfer_is_ahead(t))
        return 0;
    uint32_t end = t->moves.first_round[0], left = end - t->next_round;
    size_t n = n_bytes_max ? n_bytes_max / t->moves.part_bytes[SLOT_FROZEN] : left;
    n = n < 1 ? 1 : n;
    end = n < left ? t->next_round + (uint32_t)n : end;
    int rc = t->ops->ahead(t, end, out_seconds, err);
    t->next_round = end;
    return rc;
}

static bool is_last_stage(const struct transfer *t)
{
    return t->next_stage + 1 == t->moves.n_stages;
}

void transfer_put_in_force(struct transfer *t)
{
    struct slots next = t->to, old = *t->slots;
    bool is_last = is_last_stage(t);
    if (!is_last)
        slots_at_stage(t->slots, &t->to, t->moves.stage, t->next_stage, &next);
    slots_set_speed(&next, t->slots->speed); /* what was measured since it was prepared */
    *t->slots = next;
    if (is_last)
        t->to = old;
    else
        slots_fini(&old);
}

int transfer_run(struct transfer *t, struct transfer_result *out, struct err *err)
{
    struct transfer_result r = t->ahead;
    uint32_t end = t->moves.first_round[t->next_stage + 1];
    r.is_last = is_last_stage(t);
    int rc = t->ops->run(t, end, &r, err);
    if (rc < 0)
        return rc;
    t->ahead = (struct transfer_result){0};
    t->next_round = end;
    t->next_stage++;
    *out = r;
    return 0;
}
