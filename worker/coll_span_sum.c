/* coll_span_sum.c - sums over hosts: a partial sum goes from run to run, in the order of ranks
 *
 * The elements are cut into chunks. Of each run one member is responsible for a chunk: it waits for
 * the sum so far, adds the inputs of its run, which all lie in memory it reads, and hands on. The
 * last has the sum. A reduce_scatter's chunk then goes to its owner; an all_reduce's goes round the
 * hosts, where one member writes it to all and passes it on. A partial sum waits in one of a few
 * slots, so memory is bounded; what is received last goes straight to its place. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "worker/coll_span.h"
#include "worker/phases.h"

#define CHUNK_ELEMENTS ((size_t)64 << 10)
#define CHUNKS_MAX     ((size_t)1 << 23) /* times runs, so that slots of tags suffice */
#define SLOTS          8u /* partial sums of a rank */
#define AHEAD          4u /* of them expected before they are needed */
#define LINE_BYTES     64u

struct slot {
    uint8_t *sum;
    struct wire_ticket in, out;
};

struct sum {
    struct span_call c;
    const struct fold *fold;
    uint8_t *out; /* of a reduce_scatter; NULL: all have the sum in place */
    size_t n, n_parts, n_elements; /* of a block's part; parts; elements of a part */
    size_t chunk, n_each, n_chunks; /* elements of a chunk; chunks of a part; of all */
    struct slot slots[SLOTS];
    uint8_t *slot_memory;
    const uint8_t **inputs; /* (n_ranks) scratch */
};

/* ---- who does what --------------------------------------------------------------------------- */

struct task {
    uint32_t chunk, run;
};

static uint32_t owner_of(const struct sum *x, size_t chunk)
{
    return (uint32_t)(chunk % x->n_parts);
}

static size_t first_of(const struct sum *x, size_t chunk)
{
    return chunk / x->n_parts * x->chunk;
}

static size_t count_of(const struct sum *x, size_t chunk)
{
    size_t left = x->n_elements - first_of(x, chunk);
    return left < x->chunk ? left : x->chunk;
}

static uint32_t last_run(const struct sum *x)
{
    return x->c.s->n_runs - 1;
}

/* A member. The owner itself where it can, so that the sum need not travel again. */
static uint32_t responsible(const struct sum *x, size_t chunk, uint32_t run)
{
    const struct span_group *s = x->c.s;
    uint32_t first = s->run[run], n = s->run[run + 1] - first;
    if (x->out && run == last_run(x) && owner_of(x, chunk) >= first)
        return owner_of(x, chunk);
    return first + (uint32_t)(chunk % n);
}

static uint32_t writer_on(const struct sum *x, size_t chunk, uint32_t host)
{
    const struct span_group *s = x->c.s;
    uint32_t n = s->start[host + 1] - s->start[host];
    return s->member[s->start[host] + (uint32_t)(chunk % n)];
}

static uint32_t last_host(const struct sum *x)
{
    return x->c.s->host[x->c.s->n_ranks - 1];
}

static uint64_t partial_tag(const struct sum *x, size_t chunk, uint32_t run)
{
    return span_tag(&x->c, SPAN_SLOTS + (uint32_t)(chunk * x->c.s->n_runs + run));
}

static uint64_t result_tag(const struct sum *x, size_t chunk)
{
    return span_tag(&x->c, SPAN_SLOTS + (uint32_t)(x->n_chunks * x->c.s->n_runs + chunk));
}

static struct wire *wire_of(const struct sum *x)
{
    return x->c.h->span->wire;
}

static uint32_t rank_at(const struct sum *x, uint32_t member)
{
    return x->c.g->ranks[member];
}

/* ---- adding ---------------------------------------------------------------------------------- */

/* A chunk is one or more stretches of blocks: n of them from element at of all inputs. */
static size_t stretch(const struct sum *x, size_t chunk, size_t done, size_t *out_at)
{
    size_t e = first_of(x, chunk) + done, block = e / x->n, in_block = e % x->n;
    size_t left = count_of(x, chunk) - done, n = x->n - in_block;
    *out_at = (block * x->n_parts + owner_of(x, chunk)) * x->n + in_block;
    return n < left ? n : left;
}

static void add_run(struct sum *x, const struct task *t, uint8_t *sum)
{
    const struct span_group *s = x->c.s;
    uint32_t first = s->run[t->run], n_in = s->run[t->run + 1] - first;
    for (uint32_t i = 0; i < n_in; i++)
        x->inputs[i] = span_input_of(&x->c, first + i);
    for (size_t done = 0, n, at; done < count_of(x, t->chunk); done += n) {
        n = stretch(x, t->chunk, done, &at);
        x->fold->add(sum + done * x->fold->sum_width, t->run == 0, x->inputs, n_in,
                     at * x->fold->width, n);
    }
}

/* ---- results --------------------------------------------------------------------------------- */

/* Of an all_reduce, into the array of every member here but one that has it. */
static void spread(const struct sum *x, size_t chunk, const uint8_t *from, uint32_t but)
{
    const struct span_group *s = x->c.s;
    size_t width = x->fold->width;
    for (uint32_t i = 0; i < s->n_ranks; i++)
        if (s->host[i] == s->my_host && i != but)
            memcpy(span_input_of(&x->c, i) + first_of(x, chunk) * width, from,
                   count_of(x, chunk) * width);
}

static void pass_on(struct sum *x, size_t chunk, const uint8_t *result)
{
    const struct span_group *s = x->c.s;
    uint32_t next = (s->my_host + 1) % s->n_hosts;
    if (next != last_host(x))
        wire_send(wire_of(x), rank_at(x, writer_on(x, chunk, next)), result_tag(x, chunk), result,
                  count_of(x, chunk) * x->fold->width, &x->c.ticket);
}

/* What is stored is no wider than the sum that it is made of. */
static void round_in_place(const struct fold *f, uint8_t *sum, size_t n)
{
    uint8_t some[4096];
    size_t most = sizeof some / f->sum_width;
    for (size_t done = 0; done < n && f->width != f->sum_width; done += most) {
        size_t count = n - done < most ? n - done : most;
        f->store(some, sum + done * f->sum_width, count);
        memcpy(sum + done * f->width, some, count * f->width);
    }
}

static void deliver(struct sum *x, size_t chunk, struct slot *slot)
{
    size_t n = count_of(x, chunk), at = first_of(x, chunk) * x->fold->width;
    if (!x->out) {
        uint8_t *mine = span_input_of(&x->c, x->c.g->me) + at;
        x->fold->store(mine, slot->sum, n);
        spread(x, chunk, mine, x->c.g->me);
        pass_on(x, chunk, mine);
    } else if (owner_of(x, chunk) == x->c.g->me) {
        x->fold->store(x->out + at, slot->sum, n);
    } else {
        round_in_place(x->fold, slot->sum, n);
        wire_send(wire_of(x), rank_at(x, owner_of(x, chunk)), result_tag(x, chunk), slot->sum,
                  n * x->fold->width, &slot->out);
    }
}

/* What is still to come to this rank when runs are done; each has its own ticket. */
struct results {
    uint32_t *chunks;
    struct wire_ticket *tickets;
    size_t n, n_taken;
};

static bool comes_to_me(const struct sum *x, size_t chunk)
{
    const struct span_group *s = x->c.s;
    if (x->out)
        return owner_of(x, chunk) == x->c.g->me &&
               responsible(x, chunk, last_run(x)) != x->c.g->me;
    return s->my_host != last_host(x) && writer_on(x, chunk, s->my_host) == x->c.g->me;
}

static uint32_t comes_from(const struct sum *x, size_t chunk)
{
    const struct span_group *s = x->c.s;
    uint32_t before = (s->my_host + s->n_hosts - 1) % s->n_hosts;
    if (x->out || before == last_host(x))
        return responsible(x, chunk, last_run(x));
    return writer_on(x, chunk, before);
}

static void expect_results(struct sum *x, struct results *r)
{
    for (size_t k = 0; k < x->n_chunks; k++)
        r->n += comes_to_me(x, k);
    r->chunks = xcalloc(r->n + 1, sizeof *r->chunks);
    r->tickets = xcalloc(r->n + 1, sizeof *r->tickets);
    r->n = 0;
    uint8_t *to = x->out ? x->out : span_input_of(&x->c, x->c.g->me);
    for (size_t k = 0; k < x->n_chunks; k++) {
        if (!comes_to_me(x, k))
            continue;
        r->chunks[r->n] = (uint32_t)k;
        wire_recv(wire_of(x), rank_at(x, comes_from(x, k)), result_tag(x, k),
                  to + first_of(x, k) * x->fold->width, count_of(x, k) * x->fold->width,
                  &r->tickets[r->n++]);
    }
}

/* Those that are here; or all, and waits for them. */
static int take_results(struct sum *x, struct results *r, bool all, struct err *err)
{
    int rc;
    while (r->n_taken < r->n) {
        struct wire_ticket *t = &r->tickets[r->n_taken];
        if (!all && !wire_wait(t, 0))
            return 0;
        if ((rc = span_wait(&x->c, t, err)) < 0)
            return rc;
        size_t chunk = r->chunks[r->n_taken++];
        if (x->out)
            continue;
        const uint8_t *mine = span_input_of(&x->c, x->c.g->me) +
                              first_of(x, chunk) * x->fold->width;
        pass_on(x, chunk, mine);
        wire_go(wire_of(x));
        spread(x, chunk, mine, x->c.g->me);
    }
    return 0;
}

/* ---- runs ------------------------------------------------------------------------------------ */

static struct task *list_tasks(const struct sum *x, size_t *out_n)
{
    const struct span_group *s = x->c.s;
    struct task *tasks = NULL;
    size_t n = 0, room = 0;
    for (size_t k = 0; k < x->n_chunks; k++)
        for (uint32_t run = 0; run < s->n_runs; run++) {
            if (responsible(x, k, run) != x->c.g->me)
                continue;
            tasks = xgrow(tasks, n, &room, sizeof *tasks);
            tasks[n++] = (struct task){(uint32_t)k, run};
        }
    *out_n = n;
    return tasks;
}

/* Slot and place for a task's sum so far, once what left from there has gone. */
static int prepare(struct sum *x, const struct task *t, struct slot *slot, struct err *err)
{
    int rc = span_wait(&x->c, &slot->out, err);
    if (rc == 0 && t->run > 0)
        wire_recv(wire_of(x), rank_at(x, responsible(x, t->chunk, t->run - 1)),
                  partial_tag(x, t->chunk, t->run - 1), slot->sum,
                  count_of(x, t->chunk) * x->fold->sum_width, &slot->in);
    return rc;
}

/* An input that is its own sum leaves from where it lies. */
static bool is_plain(const struct sum *x, const struct task *t, const uint8_t **out_from)
{
    size_t at, n = stretch(x, t->chunk, 0, &at);
    *out_from = span_input_of(&x->c, x->c.g->me) + at * x->fold->width;
    return t->run == 0 && x->c.s->run[1] == 1 && x->fold->width == x->fold->sum_width &&
           n == count_of(x, t->chunk);
}

static int do_task(struct sum *x, const struct task *t, struct slot *slot, struct err *err)
{
    const uint8_t *from;
    bool is_own = is_plain(x, t, &from);
    int rc = span_wait(&x->c, &slot->in, err);
    if (rc < 0)
        return rc;
    if (!is_own) {
        add_run(x, t, slot->sum);
        from = slot->sum;
    }
    if (t->run == last_run(x))
        deliver(x, t->chunk, slot);
    else
        wire_send(wire_of(x), rank_at(x, responsible(x, t->chunk, t->run + 1)),
                  partial_tag(x, t->chunk, t->run), from,
                  count_of(x, t->chunk) * x->fold->sum_width, is_own ? &x->c.ticket : &slot->out);
    wire_go(wire_of(x));
    return 0;
}

static int do_tasks(struct sum *x, struct results *r, struct err *err)
{
    size_t n, n_ready = 0;
    struct task *tasks = list_tasks(x, &n);
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        for (; n_ready < n && n_ready < i + AHEAD && rc == 0; n_ready++)
            rc = prepare(x, &tasks[n_ready], &x->slots[n_ready % SLOTS], err);
        if (rc == 0)
            rc = do_task(x, &tasks[i], &x->slots[i % SLOTS], err);
        if (rc == 0)
            rc = take_results(x, r, false, err);
    }
    free(tasks);
    return rc;
}

static int run_all(struct sum *x, struct err *err)
{
    struct results r = {0};
    size_t slot_bytes = (x->chunk * x->fold->sum_width + LINE_BYTES - 1) & ~(size_t)63;
    x->slot_memory = aligned_alloc(LINE_BYTES, SLOTS * slot_bytes);
    x->inputs = xcalloc(x->c.g->n_ranks, sizeof *x->inputs);
    for (uint32_t i = 0; i < SLOTS; i++)
        x->slots[i].sum = x->slot_memory + i * slot_bytes;
    expect_results(x, &r);
    int rc = x->slot_memory ? do_tasks(x, &r, err) : err_set(err, -ENOMEM, "no memory for sums");
    if (rc == 0)
        rc = take_results(x, &r, true, err);
    for (uint32_t i = 0; i < SLOTS && rc == 0; i++)
        rc = span_wait(&x->c, &x->slots[i].out, err);
    if (rc == 0)
        rc = span_wait(&x->c, &x->c.ticket, err);
    span_end(x->c.h, rc); /* before what it uses goes */
    free(r.chunks);
    free(r.tickets);
    free(x->slot_memory);
    free(x->inputs);
    return rc;
}

static void cut(struct sum *x, size_t n, size_t n_blocks, size_t n_parts)
{
    x->n = n;
    x->n_parts = n_parts;
    x->n_elements = n * n_blocks;
    x->chunk = CHUNK_ELEMENTS;
    while (x->n_elements / x->chunk * n_parts * (x->c.s->n_runs + 1) > CHUNKS_MAX)
        x->chunk *= 2;
    if (x->chunk > x->n_elements)
        x->chunk = x->n_elements ? x->n_elements : 1;
    x->n_each = (x->n_elements + x->chunk - 1) / x->chunk;
    x->n_chunks = x->n_each * n_parts;
}

/* ---- the operations -------------------------------------------------------------------------- */

/* Every member adds all inputs. */
static void reduce_small(struct sum *x, uint8_t *sum, size_t at, size_t n)
{
    for (uint32_t i = 0; i < x->c.g->n_ranks; i++)
        x->inputs[i] = span_input_of(&x->c, i);
    x->fold->add(sum, true, x->inputs, x->c.g->n_ranks, at * x->fold->width, n);
}

int span_reduce(struct host *h, const struct coll_group *g, enum shm_op op, uint32_t op_word,
                const struct fold *fold, void *array, size_t n, struct err *err)
{
    _Alignas(64) uint8_t sums[2 * SPAN_SMALL_BYTES];
    struct sum x = {.c = span_begin(h, g, op, n), .fold = fold};
    size_t n_bytes = n * fold->width;
    int rc = span_enter(&x.c, op_word, array, n_bytes, true, n, 1, NULL, err);
    if (rc < 0)
        return span_end(h, rc);
    if (x.c.has_inputs) {
        x.inputs = xcalloc(g->n_ranks, sizeof *x.inputs);
        reduce_small(&x, sums, 0, n);
        free(x.inputs);
    } else {
        cut(&x, n, 1, 1);
        rc = run_all(&x, err);
    }
    bool is_small = x.c.has_inputs;
    rc = span_end(h, rc == 0 ? span_leave(&x.c, err) : rc);
    if (rc == 0 && is_small)
        fold->store(array, sums, n); /* nobody reads it any more */
    else if (rc == 0 && x.c.shown != array)
        memcpy(array, x.c.shown, n_bytes);
    return rc;
}

static int scatter(const struct span_call *begun, uint32_t op_word, const struct fold *fold,
                   const void *in, size_t n, size_t n_blocks, void *out, struct err *err)
{
    _Alignas(64) uint8_t sums[2 * SPAN_SMALL_BYTES];
    struct sum x = {.c = *begun, .fold = fold, .out = out};
    struct host *h = begun->h;
    const struct coll_group *g = begun->g;
    size_t in_bytes = n * n_blocks * g->n_ranks * fold->width;
    int rc = span_enter(&x.c, op_word, in, in_bytes, true, n, n_blocks, NULL, err);
    if (rc < 0)
        return span_end(h, rc);
    bool is_small = x.c.has_inputs;
    if (is_small) {
        x.inputs = xcalloc(g->n_ranks, sizeof *x.inputs);
        for (size_t b = 0; b < n_blocks; b++)
            reduce_small(&x, sums + b * n * fold->sum_width, (b * g->n_ranks + g->me) * n, n);
        free(x.inputs);
    } else {
        cut(&x, n, n_blocks, g->n_ranks);
        rc = run_all(&x, err);
    }
    rc = span_end(h, rc == 0 ? span_leave(&x.c, err) : rc);
    if (rc == 0 && is_small)
        fold->store(out, sums, n * n_blocks);
    return rc;
}

int span_scatter(struct host *h, const struct coll_group *g, uint32_t op_word,
                 const struct fold *fold, const void *in, size_t n, size_t n_blocks, void *out,
                 struct err *err)
{
    const struct span_call c = span_begin(h, g, SHM_REDUCE_SCATTER, n);
    return scatter(&c, op_word, fold, in, n, n_blocks, out, err);
}

static int run_scatter(struct span_open *o, struct err *err)
{
    return scatter(&o->call, o->op_word, o->fold, o->in, o->n, o->n_blocks, o->out, err);
}

int span_start_scatter(struct host *h, const struct coll_group *g, uint32_t op_word,
                       const struct fold *fold, const void *in, size_t n, size_t n_blocks,
                       void *out, coll_ticket *out_ticket, struct err *err)
{
    const struct span_open what = {.run = run_scatter, .op = SHM_REDUCE_SCATTER,
                                   .hidden = PHASE_REDUCE_HIDDEN, .op_word = op_word,
                                   .fold = fold, .in = in, .out = out, .n = n,
                                   .n_blocks = n_blocks};
    return span_start(h, g, &what, out_ticket, err);
}
