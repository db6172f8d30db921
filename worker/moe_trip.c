/* moe_trip.c - a layer's tokens go to the experts and come back, piece by piece
 *
 * While the experts compute a piece the next one travels to them, and what they made of the one
 * before travels back. Where all rows of a layer are more than stay, the expert side has those of
 * one piece at a time: for the backward each piece comes once more, and its products are made again
 * while the gradients of what it gave are on their way. */
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

void moe_trip_count(struct pass *p, const struct moe *e, bool is_again)
{
    struct moe_lora_scratch lora;

    take_rows(p, e->kept_rows); /* or of a piece, which are no more */
    struct activations_mark mark = activations_mark(p->act);
    if (!is_again)
        activations_take(p->act, e->piece_rows * p->spec->latent); /* what goes back */
    moe_lora_carve_forward(p, e->piece_rows, &lora);
    activations_release(p->act, mark);
}

void moe_trip_count_backward(struct pass *p, const struct moe *e)
{
    struct activations_mark mark = activations_mark(p->act);
    struct moe_lora_scratch lora;
    struct moe_scratch b;

    take_scratch(p, e->piece_rows, &b);
    moe_lora_carve_forward(p, e->piece_rows, &lora); /* of a piece that is made again */
    activations_release(p->act, mark);
}

/* ---- piece by piece ------------------------------------------------------------------------- */

/* x (n, latent) to the experts and slots (n, top_k, latent) back. */
struct trip {
    struct moe *e;
    uint32_t layer;
    const struct unit_view *u;
    struct dispatch_plan *plan;
    const struct moe_rows *rows; /* of all pieces, or of one after another */
    bool keeps;            /* of all */
    const elem *x;
    const elem *dy;        /* (n, latent): a backward, whose rows are made again from x unless they
                            * are there */
    elem *slots;           /* NULL: nothing comes back */
    elem *out_rows;        /* of a piece, that go back; a backward has b for it */
    struct moe_scratch *b;
};

static struct moe_rows rows_of_piece(const struct pass *p, const struct trip *t, uint32_t piece)
{
    struct dispatch_piece c = dispatch_piece_of(t->plan, piece);
    int64_t first = t->keeps ? c.first_row : 0, inter = first * p->spec->expert_inter;

    return (struct moe_rows){
        .piece = c, .n_rows = c.n_rows,
        .rows = elem_at(p->dev, t->rows->rows, first * p->spec->latent),
        .gate = elem_at(p->dev, t->rows->gate, inter),
        .up = elem_at(p->dev, t->rows->up, inter),
        .hidden = elem_at(p->dev, t->rows->hidden, inter),
    };
}

static int64_t most_rows(const struct dispatch_plan *plan)
{
    int64_t most = 0;

    for (uint32_t c = 0; c < dispatch_plan_pieces(plan); c++) {
        int64_t n = dispatch_piece_of(plan, c).n_rows;
        most = n > most ? n : most;
    }
    return most;
}

/* What sets out first of a piece. */
static const elem *first_of(const struct trip *t)
{
    return t->dy && t->keeps ? t->dy : t->x;
}

/* Rows that were not kept have come again, and after them comes what their backward begins with. */
static int make_again(struct pass *p, const struct trip *t, uint32_t c, const struct moe_rows *r,
                      struct err *err)
{
    int rc = dispatch_send_finish(t->plan, c, false, r->rows, err);

    if (rc == 0)
        rc = dispatch_send_start(t->plan, c, t->dy, err);
    if (rc == 0)
        rc = moe_experts_forward(p, t->e, t->layer, t->u, NULL, r, err);
    return rc < 0 ? rc : dispatch_send_pass_on(t->plan, c, err);
}

/* A piece arrives: the next one sets out, the experts compute, what they made sets out, and what
 * they made before has come back. */
static int pass_piece(struct pass *p, const struct trip *t, uint32_t c, struct err *err)
{
    struct moe_rows r = rows_of_piece(p, t, c);
    bool is_last = c + 1 == dispatch_plan_pieces(t->plan);
    elem *results = t->dy ? t->b->d_rows : t->out_rows;
    int rc = t->dy && !t->keeps ? make_again(p, t, c, &r, err) : 0;

    if (rc == 0)
        rc = dispatch_send_finish(t->plan, c, t->dy != NULL, t->dy ? results : r.rows, err);
    if (rc == 0 && !is_last)
        rc = dispatch_send_start(t->plan, c + 1, first_of(t), err);
    if (rc == 0)
        rc = t->dy ? moe_experts_backward(p, t->e, t->layer, t->u, t->b, &r, err)
                   : moe_experts_forward(p, t->e, t->layer, t->u, results, &r, err);
    if (rc == 0 && !is_last)
        rc = dispatch_send_pass_on(t->plan, c + 1, err);
    if (rc < 0 || !t->slots)
        return rc;
    if (c > 0)
        rc = dispatch_return_finish(t->plan, c - 1, t->slots, err);
    return rc < 0 ? rc : dispatch_return_start(t->plan, c, results, err);
}

/* The first piece has set out. */
static int pass_all(struct pass *p, const struct trip *t, struct err *err)
{
    uint32_t n = dispatch_plan_pieces(t->plan);
    int rc = activations_check(p->act, err);

    for (uint32_t c = 0; c < n && rc == 0; c++)
        rc = pass_piece(p, t, c, err);
    return rc < 0 || !t->slots ? rc : dispatch_return_finish(t->plan, n - 1, t->slots, err);
}

/* With rows of one piece where none are kept, and what is used up on the way. */
static int travel(struct pass *p, struct trip *t, struct err *err)
{
    struct activations_mark mark = activations_mark(p->act);
    int64_t most = most_rows(t->plan);
    struct moe_rows once;
    struct moe_scratch b;

    if (!t->keeps) {
        once = take_rows(p, most);
        t->rows = &once;
    }
    if (t->dy) {
        take_scratch(p, most, &b);
        t->b = &b;
    } else if (t->slots) {
        t->out_rows = activations_take(p->act, most * p->spec->latent);
    }
    int rc = pass_all(p, t, err);
    activations_release(p->act, mark);
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
    return (struct trip){.e = e, .layer = layer, .u = u, .plan = s->plan, .rows = &s->arrived,
                         .keeps = s->keeps, .x = latent_of(p, s), .slots = s->slots};
}

/* A plan, and room for the rows that are kept. */
static int make_plan(struct pass *p, struct moe *e, uint32_t layer, struct moe_saved *s,
                     struct err *err)
{
    int rc = dispatch_plan_create(e->dispatch, layer, moe_choices_sent(e, s), s->weights, p->n,
                                  &s->plan, err);

    if (rc < 0)
        return rc;
    s->keeps = dispatch_plan_is_within(s->plan, e->kept_rows);
    if (s->keeps)
        s->arrived = take_rows(p, dispatch_plan_rows(s->plan));
    return activations_check(p->act, err);
}

int moe_set_out(struct pass *p, struct moe *e, uint32_t layer, struct moe_saved *s,
                struct err *err)
{
    int rc = make_plan(p, e, layer, s, err);

    if (rc == 0 && e->counting)
        e->layer_rows[layer] += dispatch_plan_rows(s->plan);
    return rc < 0 ? rc : dispatch_send_start(s->plan, 0, latent_of(p, s), err);
}

int moe_travel(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
               struct moe_saved *s, struct err *err)
{
    struct trip t = trip_of(p, e, layer, u, s);

    return travel(p, &t, err);
}

int moe_set_out_again(struct pass *p, struct moe *e, uint32_t layer, struct moe_saved *s,
                      struct err *err)
{
    int rc = make_plan(p, e, layer, s, err);

    return rc < 0 || !s->keeps ? rc : dispatch_send_start(s->plan, 0, latent_of(p, s), err);
}

int moe_travel_again(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                     struct moe_saved *s, struct err *err)
{
    struct trip t = trip_of(p, e, layer, u, s);

    t.slots = NULL;
    return s->keeps ? travel(p, &t, err) : 0;
}

int moe_set_out_backward(struct pass *p, struct moe *e, uint32_t layer, const elem *dy,
                         struct moe_saved *s, struct err *err)
{
    int rc = 0;

    if (!dispatch_plan_is_whole(s->plan)) { /* another layer's has been made since */
        moe_drop(s);
        rc = make_plan(p, e, layer, s, err);
    }
    return rc < 0 ? rc : dispatch_send_start(s->plan, 0, s->keeps ? dy : latent_of(p, s), err);
}

int moe_travel_backward(struct pass *p, struct moe *e, uint32_t layer, const struct unit_view *u,
                        const elem *dy, elem *d_slots, struct moe_saved *s, struct err *err)
{
    struct trip t = trip_of(p, e, layer, u, s);

    t.dy = dy;
    t.slots = d_slots;
    return travel(p, &t, err);
}
