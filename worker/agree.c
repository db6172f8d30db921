/* agree.c - a failure on one rank becomes the same failure on all
 *
 * So that all do the same next. Texts travel as numbers through the one reduction there is. */
#include "worker/agree.h"

#include <stdlib.h>

#include "common/mem.h"

static int tell(struct coll *c, bool is_mine, int rc, struct err *err)
{
    enum { TEXT = sizeof err->text };
    double *x = xcalloc(TEXT + 1, sizeof *x);
    for (size_t i = 0; is_mine && err && i + 1 < TEXT && err->text[i]; i++)
        x[i] = (uint8_t)err->text[i];
    x[TEXT] = is_mine ? -rc : 0;
    int failed = c->ops->all_reduce_f64(c, &c->world_group, COLL_MAX, x, TEXT + 1, err);
    if (failed == 0 && err)
        for (size_t i = 0; i < TEXT; i++)
            err->text[i] = (char)(uint8_t)x[i];
    rc = failed == 0 ? -(int)x[TEXT] : failed;
    if (err)
        err->code = rc;
    free(x);
    return rc;
}

int agree(struct coll *c, int rc, struct err *err)
{
    double first = rc < 0 ? c->world - c->rank : 0; /* the lowest rank has the largest */
    c->layer = -1;
    int failed = c->ops->all_reduce_f64(c, &c->world_group, COLL_MAX, &first, 1, err);
    if (failed < 0)
        return failed;
    return first > 0 ? tell(c, c->world - c->rank == (uint32_t)first, rc, err) : 0;
}
