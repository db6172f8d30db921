/* coll.c - what is started is ended at once */
#include "worker/coll.h"

/* Finish and reclaim. */
static int end(struct coll *c, coll_ticket ticket, struct err *err)
{
    int rc = c->ops->finish(c, ticket, err);
    return rc < 0 ? rc : c->ops->reclaim(c, ticket, err);
}

int coll_leave_open(struct coll *c, coll_ticket *io_ticket, struct err *err)
{
    if (!c->is_blocking)
        return 0;
    int rc = end(c, *io_ticket, err);
    *io_ticket = 0;
    return rc;
}

int coll_all_gather(struct coll *c, const struct coll_group *g, enum elem_type type,
                    const void *in, size_t n, size_t n_blocks, void *out, struct err *err)
{
    coll_ticket t;
    c->is_at_once = true;
    int rc = c->ops->start_all_gather(c, g, type, in, n, n_blocks, out, &t, err);
    rc = rc < 0 ? rc : end(c, t, err);
    c->is_at_once = false;
    return rc;
}

int coll_reduce_scatter(struct coll *c, const struct coll_group *g, enum elem_type type,
                        const void *in, size_t n, size_t n_blocks, void *out, struct err *err)
{
    coll_ticket t;
    c->is_at_once = true;
    int rc = c->ops->start_reduce_scatter(c, g, type, in, n, n_blocks, out, &t, err);
    rc = rc < 0 ? rc : end(c, t, err);
    c->is_at_once = false;
    return rc;
}

int coll_all_to_all_rows(struct coll *c, const struct coll_group *g, const void *send,
                         const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                         size_t row_bytes, struct err *err)
{
    coll_ticket t;
    c->is_at_once = true;
    int rc = c->ops->start_all_to_all_rows(c, g, send, send_rows, recv, recv_rows, row_bytes, &t,
                                           err);
    rc = rc < 0 ? rc : end(c, t, err);
    c->is_at_once = false;
    return rc;
}
