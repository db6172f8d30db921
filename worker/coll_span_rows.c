/* coll_span_rows.c - rows between hosts, each from its sender's memory into its receiver's
 *
 * The members agree and hand the wire what it is to send and to receive; those of a host copy from
 * each other. The rest is the wire's. */
#include <errno.h>

#include "worker/coll_copy.h"
#include "worker/coll_span.h"
#include "worker/phases.h"

/* ---- rows ------------------------------------------------------------------------------------ */

int span_check_rows(struct span_call *c, const int64_t *recv_rows, struct err *err)
{
    for (uint32_t i = 0; i < c->g->n_ranks; i++) {
        int64_t n = span_rows_of(c, i, c->g->me);
        if (n == recv_rows[i])
            continue;
        shm_abort(&c->h->shm, "all_to_all %u: rank %u sends %lld rows to rank %u, which expects "
                  "%lld", c->number, c->g->ranks[i], (long long)n, c->h->coll.rank,
                  (long long)recv_rows[i]);
        shm_check(&c->h->shm, err);
        return -EPROTO;
    }
    return 0;
}

static void post_rows(struct span_open *o, const uint8_t *send, const int64_t *send_rows,
                      uint8_t *recv, const int64_t *recv_rows, size_t row_bytes)
{
    struct span_call *c = &o->call;
    struct wire *w = c->h->span->wire;
    for (uint32_t i = 0; i < c->g->n_ranks; i++) {
        size_t n_out = (size_t)send_rows[i] * row_bytes, n_in = (size_t)recv_rows[i] * row_bytes;
        bool is_far = c->s->host[i] != c->s->my_host;
        if (is_far && n_in > 0)
            wire_recv(w, c->g->ranks[i], span_tag(c, SPAN_SLOTS), recv, n_in, &o->comes);
        if (is_far && n_out > 0)
            wire_send(w, c->g->ranks[i], span_tag(c, SPAN_SLOTS), send, n_out, &o->goes);
        send += n_out;
        recv += n_in;
    }
    wire_go(w);
}

static void copy_rows(struct span_call *c, uint8_t *recv, const int64_t *recv_rows,
                      size_t row_bytes)
{
    size_t all = 0;
    for (uint32_t i = 0; i < c->g->n_ranks; i++)
        all += (size_t)recv_rows[i] * row_bytes;
    for (uint32_t i = 0; i < c->g->n_ranks; i++) {
        size_t n = (size_t)recv_rows[i] * row_bytes, before = 0;
        for (uint32_t j = 0; c->s->host[i] == c->s->my_host && j < c->g->me; j++)
            before += (size_t)span_rows_of(c, i, j);
        if (c->s->host[i] == c->s->my_host)
            copy_piece(recv, span_input_of(c, i) + before * row_bytes, n, all);
        recv += n;
    }
}

/* Boards and inputs of members here are theirs again when it returns. */
static int run_rows(struct span_open *o, struct err *err)
{
    struct span_call *c = &o->call;
    size_t n_rows = 0;
    for (uint32_t i = 0; i < o->g.n_ranks; i++)
        n_rows += (size_t)o->send_rows[i];
    int rc = span_enter(c, 0, o->in, n_rows * o->width, true, o->width, 1, o->send_rows, err);
    if (rc == 0)
        rc = span_check_rows(c, o->recv_rows, err);
    if (rc < 0)
        return span_end(c->h, rc);
    post_rows(o, c->shown, o->send_rows, o->out, o->recv_rows, o->width);
    copy_rows(c, o->out, o->recv_rows, o->width);
    rc = shm_wait_all(&c->h->shm, c->g, err);
    if (rc == 0)
        span_note_far_left(c);
    return span_end(c->h, rc);
}

int span_start_rows(struct host *h, const struct coll_group *g, const void *send,
                    const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                    size_t row_bytes, coll_ticket *out_ticket, struct err *err)
{
    const struct span_open what = {.run = run_rows, .op = SHM_ALL_TO_ALL_ROWS,
                                   .hidden = PHASE_DISPATCH_HIDDEN, .in = send, .out = recv,
                                   .n = row_bytes, .width = row_bytes, .send_rows = send_rows,
                                   .recv_rows = recv_rows};
    return span_start(h, g, &what, out_ticket, err);
}
