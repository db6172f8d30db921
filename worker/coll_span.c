/* coll_span.c - a call of members on several hosts: shown, told to other hosts, agreed on, left */
#include "worker/coll_span.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"

#define LOOK_NS (100 * NS_PER_MS)

enum slot { SLOT_HEADS, SLOT_REST };

/* ---- the wire's words ------------------------------------------------------------------------ */

static void on_left(void *user, uint32_t rank)
{
    struct host *h = user;
    atomic_store(&shm_rank_of(&h->shm, rank)->has_left, 1);
}

static void on_gone(void *user, uint32_t rank)
{
    struct host *h = user;
    shm_note_gone(&h->shm, rank);
}

static void on_aborted(void *user, const char *text)
{
    struct host *h = user;
    shm_abort(&h->shm, "%s", text);
}

static bool is_aborted(void *user, char *out_text, size_t n_bytes)
{
    const struct host *h = user;
    return shm_why(&h->shm, out_text, n_bytes);
}

void span_open(struct host *h, struct wire *wire, const uint32_t *hosts,
               const struct wire_peer *peers)
{
    const struct wire_events events = {h, on_left, on_gone, on_aborted, is_aborted};
    h->span = xcalloc(1, sizeof *h->span);
    h->span->wire = wire;
    h->span->hosts = xmemdup(hosts, h->coll.world * sizeof *hosts);
    wire_join(wire, h->coll.rank, h->coll.world, peers, &events);
}

static void group_fini(struct span_group *s)
{
    free(s->ranks);
    free(s->place);
    free(s->member);
    free(s->host);
    free(s->start);
    free(s->run);
    free(s->words);
    *s = (struct span_group){0};
}

void span_close(struct host *h)
{
    if (!h->span)
        return;
    span_courier_close(h);
    wire_close(h->span->wire);
    for (uint32_t i = 0; i < COLL_GROUPS_MAX; i++)
        group_fini(&h->span->groups[i]);
    free(h->span->hosts);
    free(h->span->open);
    free(h->span);
    h->span = NULL;
}

bool span_shares(const struct host *h, const void *p)
{
    const uint8_t *arena = shm_arena_of(&h->shm, h->coll.rank), *at = p;
    return at >= arena && at < arena + h->shm.arena_bytes;
}

bool span_crosses(const struct host *h, const struct coll_group *g)
{
    for (uint32_t i = 0; h->span && i < g->n_ranks; i++)
        if (!shm_is_here(&h->shm, g->ranks[i]))
            return true;
    return false;
}

int span_end(struct host *h, int rc)
{
    if (rc < 0) {
        span_settle(h); /* it ends, too: all were told why */
        wire_stop(h->span->wire);
    }
    return rc;
}

uint8_t *span_room(struct host *h, uint8_t **io_room, size_t *io_bytes, size_t n_bytes,
                   struct err *err)
{
    if (n_bytes <= *io_bytes)
        return *io_room;
    size_t wanted = n_bytes > 2 * *io_bytes ? n_bytes : 2 * *io_bytes;
    uint8_t *room = shm_alloc(&h->shm, wanted);
    if (!room) {
        err_set(err, -ENOMEM, "no memory left for a message of %zu bytes", n_bytes);
        return NULL;
    }
    *io_bytes = wanted;
    return *io_room = room;
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* On every rank: what it sends to each member. On leaders also heads, rows and small inputs of the
 * members on other hosts, by place. */
static size_t heads_at(const struct span_group *s)
{
    return (s->n_ranks * sizeof(int64_t) + 63) & ~(size_t)63;
}

static size_t rows_at(const struct span_group *s)
{
    return heads_at(s) + s->n_ranks * sizeof(struct shm_head);
}

static size_t inputs_at(const struct span_group *s)
{
    return (rows_at(s) + (size_t)s->n_ranks * s->n_here * sizeof(int64_t) + 63) & ~(size_t)63;
}

static size_t board_bytes(const struct span_group *s)
{
    return inputs_at(s) + s->n_ranks * SPAN_SMALL_BYTES;
}

static void find_hosts(const struct span_state *span, struct span_group *s)
{
    uint32_t *first = xcalloc(s->n_ranks, sizeof *first); /* member, of each host */
    for (uint32_t i = 0; i < s->n_ranks; i++) {
        uint32_t h = 0;
        while (h < s->n_hosts && span->hosts[s->ranks[first[h]]] != span->hosts[s->ranks[i]])
            h++;
        if (h == s->n_hosts)
            first[s->n_hosts++] = i;
        s->host[i] = h;
        if (i == 0 || s->host[i - 1] != h)
            s->run[s->n_runs++] = i;
    }
    s->run[s->n_runs] = s->n_ranks;
    free(first);
}

static void number_places(struct span_group *s)
{
    for (uint32_t h = 0, n = 0; h < s->n_hosts; h++) {
        s->start[h] = n;
        for (uint32_t i = 0; i < s->n_ranks; i++)
            if (s->host[i] == h) {
                s->place[i] = n;
                s->member[n++] = i;
            }
        s->start[h + 1] = n;
    }
}

static int group_of(struct host *h, const struct coll_group *g, struct span_group **out,
                    struct err *err)
{
    struct span_group *s = *out = &h->span->groups[g->id];
    size_t n_bytes = g->n_ranks * sizeof *g->ranks;
    if (s->n_ranks == g->n_ranks && memcmp(s->ranks, g->ranks, n_bytes) == 0)
        return 0;
    group_fini(s);
    s->n_ranks = g->n_ranks;
    s->ranks = xmemdup(g->ranks, n_bytes);
    s->place = xcalloc(s->n_ranks, sizeof *s->place);
    s->member = xcalloc(s->n_ranks, sizeof *s->member);
    s->host = xcalloc(s->n_ranks, sizeof *s->host);
    s->start = xcalloc(s->n_ranks + 1, sizeof *s->start);
    s->run = xcalloc(s->n_ranks + 1, sizeof *s->run);
    find_hosts(h->span, s);
    number_places(s);
    s->my_host = s->host[g->me];
    s->n_here = s->start[s->my_host + 1] - s->start[s->my_host];
    s->me_here = s->place[g->me] - s->start[s->my_host];
    s->n_far = s->n_ranks - s->n_here;
    s->board = shm_alloc(&h->shm, board_bytes(s));
    if (!s->board) {
        group_fini(s);
        return err_set(err, -ENOMEM, "no memory left for a group of %u ranks", g->n_ranks);
    }
    s->words = xcalloc(s->n_here, sizeof(struct shm_head) + SPAN_SMALL_BYTES +
                                      s->n_ranks * sizeof(int64_t));
    shm_rank_of(&h->shm, h->coll.rank)->board_at[g->id] =
        (uint64_t)(s->board - h->shm.base);
    return 0;
}

static uint8_t *board_of(const struct span_call *c, uint32_t member)
{
    const struct shm_rank *r = shm_rank_of(&c->h->shm, c->g->ranks[member]);
    return c->h->shm.base + r->board_at[c->g->id];
}

static uint8_t *leaders_board(const struct span_call *c)
{
    return board_of(c, c->s->member[c->s->start[c->s->my_host]]);
}

const struct shm_head *span_head_of(const struct span_call *c, uint32_t i)
{
    if (c->s->host[i] == c->s->my_host)
        return &shm_rank_of(&c->h->shm, c->g->ranks[i])->head;
    return (const struct shm_head *)(leaders_board(c) + heads_at(c->s)) + c->s->place[i];
}

uint8_t *span_input_of(const struct span_call *c, uint32_t i)
{
    return c->h->shm.base + span_head_of(c, i)->in_at;
}

int64_t span_rows_of(const struct span_call *c, uint32_t i, uint32_t to)
{
    const struct span_group *s = c->s;
    if (s->host[i] == s->my_host)
        return ((const int64_t *)board_of(c, i))[to];
    const int64_t *rows = (const int64_t *)(leaders_board(c) + rows_at(s));
    return rows[s->place[i] * s->n_here + s->place[to] - s->start[s->my_host]];
}

/* ---- waiting --------------------------------------------------------------------------------- */

uint64_t span_tag(const struct span_call *c, uint32_t slot)
{
    assert(slot < 1u << 24);
    return (uint64_t)c->g->id << 56 | (uint64_t)c->number << 24 | slot;
}

int span_wait(const struct span_call *c, struct wire_ticket *t, struct err *err)
{
    struct shm *s = &c->h->shm;
    struct shm_patience patience = {.looked_ns = clock_now_ns()};
    int rc = 0;
    wire_go(c->h->span->wire);
    while (!wire_wait(t, LOOK_NS)) {
        if ((rc = shm_check(s, err)) < 0)
            return rc;
        if (!s->is_watched)
            shm_look(s);
        if (shm_is_too_long(s, c->g, &patience))
            return shm_time_out(s, c->g, patience.waited_ns, err);
    }
    if (atomic_load(&t->n_wrong) == 0)
        return 0;
    shm_abort(s, "rank %u: %s %u: a message has another size than expected", s->rank,
              shm_op_name(c->op), c->number);
    shm_check(s, err);
    if (err)
        err->code = -EPROTO;
    return -EPROTO;
}

/* ---- what leaders tell each other ------------------------------------------------------------ */

static size_t input_stride(const struct shm_head *head)
{
    return (head->in_bytes + 63) & ~(size_t)63;
}

static uint32_t leader_on(const struct span_call *c, uint32_t host)
{
    return c->g->ranks[c->s->member[c->s->start[host]]];
}

static void exchange_heads(struct span_call *c)
{
    const struct span_group *s = c->s;
    struct wire *w = c->h->span->wire;
    struct shm_head *mine = (struct shm_head *)s->words;
    struct shm_head *theirs = (struct shm_head *)(s->board + heads_at(s));
    for (uint32_t k = 0; k < s->n_here; k++)
        mine[k] = *span_head_of(c, s->member[s->start[s->my_host] + k]);
    for (uint32_t d = 0; d < s->n_hosts; d++) {
        if (d == s->my_host)
            continue;
        wire_recv(w, leader_on(c, d), span_tag(c, SLOT_HEADS), theirs + s->start[d],
                  (s->start[d + 1] - s->start[d]) * sizeof *theirs, &c->heads);
        wire_send(w, leader_on(c, d), span_tag(c, SLOT_HEADS), mine, s->n_here * sizeof *mine,
                  &c->heads);
    }
}

/* What members here send to those of each other host. */
static void exchange_rows(struct span_call *c, uint8_t *words)
{
    const struct span_group *s = c->s;
    struct wire *w = c->h->span->wire;
    int64_t *mine = (int64_t *)words, *theirs = (int64_t *)(s->board + rows_at(s));
    for (uint32_t d = 0; d < s->n_hosts; d++) {
        uint32_t n_there = s->start[d + 1] - s->start[d];
        size_t n_bytes = (size_t)n_there * s->n_here * sizeof *mine;
        if (d == s->my_host)
            continue;
        for (uint32_t k = 0; k < s->n_here; k++)
            for (uint32_t i = 0; i < n_there; i++)
                mine[k * n_there + i] = span_rows_of(
                    c, s->member[s->start[s->my_host] + k], s->member[s->start[d] + i]);
        wire_recv(w, leader_on(c, d), span_tag(c, SLOT_REST), theirs + s->start[d] * s->n_here,
                  n_bytes, &c->ticket);
        wire_send(w, leader_on(c, d), span_tag(c, SLOT_REST), mine, n_bytes, &c->ticket);
        mine += n_there * s->n_here;
    }
}

static void exchange_inputs(struct span_call *c, uint8_t *words)
{
    const struct span_group *s = c->s;
    struct wire *w = c->h->span->wire;
    const struct shm_head *head = span_head_of(c, c->g->me);
    size_t stride = input_stride(head);
    for (uint32_t k = 0; k < s->n_here; k++)
        memcpy(words + k * stride,
               span_input_of(c, s->member[s->start[s->my_host] + k]), head->in_bytes);
    for (uint32_t d = 0; d < s->n_hosts; d++) {
        if (d == s->my_host)
            continue;
        wire_recv(w, leader_on(c, d), span_tag(c, SLOT_REST),
                  s->board + inputs_at(s) + s->start[d] * stride,
                  (s->start[d + 1] - s->start[d]) * stride, &c->ticket);
        wire_send(w, leader_on(c, d), span_tag(c, SLOT_REST), words, s->n_here * stride,
                  &c->ticket);
    }
}

/* Their heads say where inputs lie there; here they lie on the board. */
static void take_heads(struct span_call *c)
{
    const struct span_group *s = c->s;
    struct shm_head *theirs = (struct shm_head *)(s->board + heads_at(s));
    size_t stride = input_stride(span_head_of(c, c->g->me));
    for (uint32_t p = 0; p < s->n_ranks; p++) {
        uint32_t i = s->member[p];
        if (s->host[i] == s->my_host)
            continue;
        shm_note_far(&c->h->shm, c->g->ranks[i], &theirs[p]);
        theirs[p].in_at = (uint64_t)(s->board + inputs_at(s) + p * stride - c->h->shm.base);
    }
}

static bool is_same(const struct shm_head *a, const struct shm_head *b)
{
    return a->op == b->op && a->op_word == b->op_word && a->number == b->number && a->n == b->n &&
           a->n_blocks == b->n_blocks;
}


/* ---- enter and leave ------------------------------------------------------------------------- */

static int disagree(struct span_call *c, uint32_t i, struct err *err)
{
    struct shm *s = &c->h->shm;
    const struct shm_head *a = span_head_of(c, c->g->me), *b = span_head_of(c, i);
    shm_abort(s, "ranks disagree in group %u: rank %u calls %s %u of %zu x %zu, rank %u %s %u of "
              "%zu x %zu", c->g->id, s->rank, shm_op_name(a->op), a->number, (size_t)a->n_blocks,
              (size_t)a->n, c->g->ranks[i], shm_op_name(b->op), b->number, (size_t)b->n_blocks,
              (size_t)b->n);
    shm_check(s, err);
    if (err)
        err->code = -EPROTO;
    return -EPROTO;
}

static int agree_on(struct span_call *c, bool on_all, struct err *err)
{
    for (uint32_t i = 0; i < c->g->n_ranks; i++)
        if ((on_all || c->s->host[i] == c->s->my_host) &&
            !is_same(span_head_of(c, c->g->me), span_head_of(c, i)))
            return disagree(c, i, err);
    return 0;
}

/* What follows the heads is waited for only if those agree: else it may be of any size. */
static int tell_hosts(struct span_call *c, bool has_rows, struct err *err)
{
    uint8_t *rest = c->s->words + c->s->n_here * sizeof(struct shm_head);
    int rc;
    exchange_heads(c);
    if (has_rows)
        exchange_rows(c, rest);
    else if (c->has_inputs && span_head_of(c, c->g->me)->in_bytes > 0)
        exchange_inputs(c, rest);
    if ((rc = span_wait(c, &c->heads, err)) < 0)
        return rc;
    take_heads(c);
    return (rc = agree_on(c, true, err)) < 0 ? rc : span_wait(c, &c->ticket, err);
}

/* Where the members of this host read my input. */
static int show(struct span_call *c, const void *in, size_t in_bytes, struct shm_head *head,
                struct err *err)
{
    struct host *h = c->h;
    const uint8_t *p = in;
    if (!span_shares(h, in)) {
        uint8_t *copy = span_room(h, &h->span->copy, &h->span->copy_bytes, in_bytes + 64, err);
        if (!copy)
            return -ENOMEM;
        if (in_bytes > 0)
            memcpy(copy, in, in_bytes);
        p = copy;
    }
    c->shown = p;
    head->in_at = (uint64_t)(p - h->shm.base);
    return 0;
}

struct span_call span_note(struct host *h, const struct coll_group *g, enum shm_op op, size_t n)
{
    assert(g->id < COLL_GROUPS_MAX && g->ranks[g->me] == h->coll.rank);
    return (struct span_call){.h = h, .g = g, .op = op, .layer = h->coll.layer,
                              .note = call_note(h, g, op, n), .number = h->numbers[g->id]};
}

struct span_call span_begin(struct host *h, const struct coll_group *g, enum shm_op op, size_t n)
{
    span_settle(h);
    return span_note(h, g, op, n);
}

int span_enter(struct span_call *c, uint32_t op_word, const void *in, size_t in_bytes, bool shares,
               size_t n, size_t n_blocks, const int64_t *send_rows, struct err *err)
{
    struct host *h = c->h;
    const struct coll_group *g = c->g;
    int rc;
    if ((rc = shm_check(&h->shm, err)) < 0 || (rc = group_of(h, g, &c->s, err)) < 0)
        return rc;
    c->has_inputs = shares && in_bytes <= SPAN_SMALL_BYTES;
    struct shm_head *head = &shm_rank_of(&h->shm, h->coll.rank)->head;
    *head = (struct shm_head){.op = c->op, .op_word = op_word, .number = c->number,
                              .group = g->id, .layer = c->layer, .n = n,
                              .n_blocks = n_blocks, .in_bytes = in_bytes};
    if (shares && (rc = show(c, in, in_bytes, head, err)) < 0)
        return rc;
    if (h->span->stage)
        head->stage_at = (uint64_t)(h->span->stage - h->shm.base);
    if (send_rows)
        memcpy(c->s->board, send_rows, g->n_ranks * sizeof *send_rows);
    if ((rc = shm_wait_all(&h->shm, g, err)) < 0)
        return rc;
    /* A leader does not read what members here do not agree on. */
    if ((rc = agree_on(c, false, err)) < 0 ||
        (c->s->me_here == 0 && (rc = tell_hosts(c, send_rows != NULL, err)) < 0) ||
        (rc = shm_wait_all(&h->shm, g, err)) < 0)
        return rc;
    return agree_on(c, true, err);
}

void span_note_far_left(const struct span_call *c)
{
    for (uint32_t i = 0; c->s->me_here == 0 && i < c->g->n_ranks; i++)
        if (c->s->host[i] != c->s->my_host)
            shm_note_far_left(&c->h->shm, c->g->ranks[i]);
}

int span_leave(struct span_call *c, struct err *err)
{
    int rc = span_wait(c, &c->ticket, err);
    if (rc == 0)
        rc = shm_wait_all(&c->h->shm, c->g, err);
    if (rc < 0)
        return rc;
    call_note_left(c->h, c->note);
    span_note_far_left(c);
    return 0;
}
