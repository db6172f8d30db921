/* boundary.c - one small reduction with MAX, of x and -x where both ends must agree */
#include "worker/boundary.h"

#include <math.h>

enum { WISH, EPOCH, MINUS_EPOCH, AHEAD, MINUS_AHEAD, SETTINGS, MINUS_SETTINGS, MEMORY,
       MINUS_BAD_OUTPUT, BAD_TENSOR, BUSY, MINUS_BUSY, WORDS };

/* Microseconds and whose they are in one number that is exact: 2^53 / 8192 of them are 12 days. */
static double with_rank(double seconds, uint32_t rank)
{
    return floor(seconds * 1e6) * RANKS_MAX + rank;
}

int boundary_agree(struct run *run, const struct boundary_word *mine, struct boundary_word *out,
                   struct err *err)
{
    double x[WORDS] = {
        [WISH] = mine->wish, [EPOCH] = mine->epoch, [MINUS_EPOCH] = -(double)mine->epoch,
        [AHEAD] = mine->ahead, [MINUS_AHEAD] = -(double)mine->ahead,
        [SETTINGS] = mine->settings, [MINUS_SETTINGS] = -(double)mine->settings,
        [MEMORY] = (double)mine->memory_bytes, [BAD_TENSOR] = (double)mine->bad.tensor,
        [MINUS_BAD_OUTPUT] = mine->bad.output < 0 ? -HUGE_VAL : -(double)mine->bad.output,
        [BUSY] = with_rank(mine->busy_s, run->coll->rank), [MINUS_BUSY] = -mine->busy_s,
    };
    run->coll->layer = -1;
    int rc = run->coll->ops->all_reduce_f64(run->coll, &run->coll->world_group, COLL_MAX, x, WORDS,
                                            err);
    if (rc < 0)
        return rc;
    *out = (struct boundary_word){
        .wish = (enum run_wish)x[WISH],
        .epoch = x[EPOCH] == -x[MINUS_EPOCH] ? (uint32_t)x[EPOCH] : 0,
        .ahead = x[AHEAD] == -x[MINUS_AHEAD] ? (uint32_t)x[AHEAD] : 0,
        .settings = x[SETTINGS] == -x[MINUS_SETTINGS] ? (uint32_t)x[SETTINGS] : 0,
        .memory_bytes = (uint64_t)x[MEMORY],
        .busy_s = floor(x[BUSY] / RANKS_MAX) / 1e6, .least_busy_s = -x[MINUS_BUSY],
        .busiest = (uint32_t)fmod(x[BUSY], RANKS_MAX),
        .bad = {isfinite(x[MINUS_BAD_OUTPUT]) ? (int64_t)-x[MINUS_BAD_OUTPUT] : -1,
                (int64_t)x[BAD_TENSOR]},
    };
    return 0;
}
