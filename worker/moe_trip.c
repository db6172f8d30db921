/* moe_trip.c - a layer's tokens go to the experts and come back, chunk by chunk, or part by part
 *
 * While the experts compute a chunk the next one travels to them, and what they made of the one
 * before travels back. Where too many rows would meet on one rank, no rows are kept: tokens come a
 * few at a time, slower, in the same memory, and once more for the backward. */
#include "worker/moe.h"

/* ---- memory --------------------------------------------------------------------------------- */

static struct moe_rows take_rows(struct pass *p, int64_t n_rows)
{
    int64_t inter = n_rows * p->spec->expert_inter;
    struct moe_rows r = {.n_rows = n_rows};

    r.rows = activations_take(p->act, n_rows * p->spec->latent);
    r.gate = activations_take(p->act, inter);
    r.up = activations_take(p->act, inter);
    r.hidden = activations_take(p->act, inter);
    return r;
}

static void take_scratch(struct pass *p, int64_t n_rows, struct moe_scratch *b)
{
    const struct model_spec *m = p->spec;

    b->d_rows = activations_take(p->act, n_rows * m->latent);
    b->d_gate = activations_take(p->act, n_rows * m->expert_inter);
    b->d_up = activations_take(p->act, n_rows * m->expert_inter);
    b->d_hidden = activations_take(p->act, n_rows * m->expert_inter);
    moe_lora_carve_backward(p, n_rows, &b->lora);
}

void moe_trip_count(struct pass *p, int64_t n_rows, bool is_again)
{
    struct moe_lora_scratch lora;

    take_rows(p, n_rows);
    struct activations_mark mark = activations_mark(p->act);
    if (!is_again)
        activations_take(p->act, n_rows * p->spec->latent); /* what goes back */
    moe_lora_carve_forward(p, n_rows, &lora);
    activations_release(p->act, mark);
}

void moe_trip_count_backward(struct pass *p, int64_t n_rows)
{
    struct activations_mark mark = activations_mark(p->act);
    struct moe_scratch b;

    take_scratch(p, n_rows, &b);
    activations_release(p->act, mark);
}

/* ---- chunk by chunk ------------------------------------------------------------------------- */

/* x (n, latent) to the experts and slots (n, top_k, latent) back. */
struct trip {
    struct moe *e;
    uint32_t layer;
    const struct unit_view *u;
    struct dispatch_plan *plan;
    const struct moe_rows *arrived; /* of all chunks */
    const elem *x;
    elem *slots;           /* NULL: nothing comes back */
    elem *out_rows;        /* of a chunk, that go back; a backward has b for it */
    struct moe_scratch *b; /* NULL: a forward */
};

static struct moe_rows rows_of_chunk(const struct pass *p, const struct trip *t, uint32_t chunk)
{
    struct dispatch_chunk c = dispatch_chunk_of(t->plan, chunk);
    int64_t inter = c.first_row * p->spec->expert_inter;

    return (struct moe_rows){
        .chunk = c, .n_rows = c.n_rows,
        .rows = elem_at(p->dev, t->arrived->rows, c.first_row * p->spec->latent),
        .gate = elem_at(p->dev, t->arrived->gate, inter),
        .up = elem_at(p->dev, t->arrived->up, inter),
        .hidden = elem_at(p->dev, t->arrived->hidden, inter),
    };
}

static int64_t most_rows(const struct dispatch_plan *plan)
{
    int64_t most = 0;

    for (uint32_t c = 0; c < dispatch_plan_chunks(plan); c++) {
        int64_t n = dispatch_chunk_of(plan, c).n_rows;
        most = n > most ? n : most;
    }
    return most;
}

/* A chunk arrives: the next one sets out, the experts compute, what they made sets out, and what
 * they made before has come back. */
static int pass_chunk(struct pass *p, const struct trip *t, uint32_t c, struct err *err)
{
    struct moe_rows r = rows_of_chunk(p, t, c);
    bool is_last = c + 1 == dispatch_plan_chunks(t->plan);
    elem *results = t->b ? t->b->d_rows : t->out_rows;
    int rc = dispatch_send_finish(t->plan, c, t->b != NULL, t->b ? results : r.rows, err);

    if (rc == 0 && !is_last)
        rc = dispatch_send_start(t->plan, c + 1, t->x, err);
    if (rc == 0)
        rc = t->b ? moe_experts_backward(p, t->e, t->layer, t->u, t->b, &r, err)
                  : moe_experts_forward(p, t->e, t->layer, t->u, results, &r, err);
    if (rc == 0 && !is_last)
        rc = dispatch_send_pass_on(t->plan, c + 1, err);
    if (rc < 0 || !t->slots)
        return rc;
    if (c > 0)
        rc = dispatch_return_finish(t->plan, c - 1, t->slots, err);
    return rc < 0 ? rc : dispatch_return_start(t->plan, c, results, err);
}

/* The first chunk has set out. */
static int travel(struct pass *p, const struct trip *t, struct err *err)
{
    uint32_t n = dispatch_plan_chunks(t->plan);
    int rc = activations_check(p->act, err);

    for (uint32_t c = 0; c < n && rc == 0; c++)
        rc = pass_chunk(p, t, c, err);
    return rc < 0 || !t->slots ? rc : dispatch_return_finish(t->plan, n - 1, t->slots, err);
}

static int travel_forward(struct pass *p, struct trip *t, struct err *err)
{
    struct activations_mark mark = activations_mark(p->act);

    t->out_rows = activations_take(p->act, most_rows(t->plan) * p->spec->latent);
    int rc = travel(p, t, err);
    activations_release(p->act, mark);
    return rc;
}

static int travel_backward(struct pass *p, struct trip *t, struct err *err)
{
    struct activations_mark mark = activations_mark(p->act);
    struct moe_scratch b;

    take_scratch(p, most_rows(t->plan), &b);
    t->b = &b;
    int rc = travel(p, t, err);
    activations_release(p->act, mark);
    return rc;
}

/* ---- part by part --------------------------------------------------------------------------- */

/* A plan of a part's tokens, in one chunk, whose rows are not kept. */
typedef int (*part_fn)(struct pass *p, struct trip *t, const elem *dy, struct err *err);

static int part_forward(struct pass *p, struct trip *t, const elem *dy, struct err *err)
{
    (void)dy;
    if (t->e->counting)
        t->e->layer_rows[t->layer] += t->arrived->n_rows;
    int rc = dispatch_send_start(t->plan, 0, t->x, err);
    return rc < 0 ? rc : travel_forward(p, t, err);
}

/* Rows come once more, and their products are made again. */
static int part_backward(struct pass *p, struct trip *t, const elem *dy, struct err *err)
{
    struct trip again = *t;
    int rc = dispatch_send_start(t->plan, 0, t->x, err);

    again.slots = NULL;
    if (rc == 0 && (rc = travel(p, &again, err)) == 0)
        rc = dispatch_send_start(t->plan, 0, dy, err);
    t->x = dy;
    return rc < 0 ? rc : travel_backward(p, t, err);
}

/* Of the n tokens from first on; all is of all tokens. */
static int one_part(struct pass *p, const struct trip *all, const struct moe_saved *s,
                    const elem *dy, int64_t first, int64_t n, part_fn fn, struct err *err)
{
    int64_t at = first * p->spec->latent, pair = first * p->spec->top_k;
    struct activations_mark mark = activations_mark(p->act);
    struct trip t = *all;
    int rc = dispatch_plan_part(t.e->dispatch, t.layer, moe_choices_sent(t.e, s) + pair,
                                s->weights + pair, n, &t.plan, err);

    if (rc < 0)
        return rc;
    struct moe_rows arrived = take_rows(p, dispatch_plan_rows(t.plan));
    t.arrived = &arrived;
    t.x = const_elem_at(p->dev, all->x, at);
    t.slots = elem_at(p->dev, all->slots, at * p->spec->top_k);
    if ((rc = activations_check(p->act, err)) == 0)
        rc = fn(p, &t, dy ? const_elem_at(p->dev, dy, at) : NULL, err);
    dispatch_plan_destroy(t.plan);
    activations_release(p->act, mark);
    return rc;
}

static int each_part(struct pass *p, const struct trip *all, const struct moe_saved *s,
                     const elem *dy, part_fn fn, struct err *err)
{
    int64_t n_each = dispatch_safe_tokens(all->e->dispatch);
    int64_t n_parts = dispatch_n_parts(all->e->dispatch);
    int rc = 0;

    for (int64_t i = 0; i < n_parts && rc == 0; i++) {
        int64_t first = i * n_each < p->n ? i * n_each : p->n, rest = p->n - first;
        /* A batch that is larger than planned for goes with the last part. */
        int64_t n = rest < n_each || i + 1 == n_parts ? rest : n_each;
        rc = one_part(p, all, s, dy, first, n, fn, err);
    }
    return rc;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static const elem *latent_of(const struct pass *p, const struct moe_saved *s)
{
    return p->spec->latent_moe ? s->latent : s->x;
}

static struct trip trip_of(const struct pass *p, struct moe *e, uint32_t layer,
                           const struct unit_view *u, struct moe_saved *s)
{
    return (struct trip){.e = e, .layer = layer, .u = u, .plan = s->plan, .arrived = &s->arrived,
                         .x = latent_of(p, s), .slots = s->slots};
}

int moe_set_out(struct pass *p, struct moe *e, uint32_t layer, struct moe_saved *s,
                struct err *err)
{
    int rc = dispatch_plan_create(e->dispatch, layer, moe_choices_sent(e, s), s->weights, p->n,
                                  &s->plan, err);

    if (rc < 0 || !s->plan)
        return rc;
    s->arrived = take_rows(p, dispatch_plan_rows(s->plan));
    if (e->counting)
        e->layer_rows[layer] += s->arrived.n_rows;
    rc = activations_check(p->act, err);
    return rc < 0 ? rc : dispatch_send_start(s->plan, 0, latent_of(p, s), err);
}

int moe_travel(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
               struct moe_saved *s, struct err *err)
{
    struct trip t = trip_of(p, e, layer, u, s);

    return t.plan ? travel_forward(p, &t, err) : each_part(p, &t, s, NULL, part_forward, err);
}

int moe_travel_again(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                     struct moe_saved *s, struct err *err)
{
    struct trip t = trip_of(p, e, layer, u, s);

    t.slots = NULL;
    return t.plan ? travel(p, &t, err) : 0;
}

int moe_set_out_backward(const struct moe_saved *s, const elem *dy, struct err *err)
{
    return s->plan ? dispatch_send_start(s->plan, 0, dy, err) : 0;
}

int moe_travel_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        const elem *dy, elem *d_slots, struct moe_saved *s, struct err *err)
{
    struct trip t = trip_of(p, e, layer, u, s);

    t.slots = d_slots;
    if (!t.plan)
        return each_part(p, &t, s, dy, part_backward, err);
    t.x = dy;
    return travel_backward(p, &t, err);
}
