/* packed_experts.c - unpack, then multiply: the way of many rows
 *
 * Of ops alone, so that it is the same on every device. */
#include "kernels/packed_experts.h"

#include <assert.h>
#include <stdlib.h>

#include "common/mem.h"

static int32_t count_used(const struct packed_experts *e)
{
    int32_t n = 0;
    for (int32_t g = 0; g < e->n_groups; g++)
        n += e->offsets[g + 1] > e->offsets[g];
    return n;
}

/* Sums may differ by the way, so where bits must not depend on rows it is always one: the one that
 * is fast where there are many. */
bool packed_experts_unpacks(const struct device *dev, const struct packed_experts *e)
{
    if (!e->room || e->room_numbers < e->in * e->out || e->way == PACKED_DECODED)
        return false;
    if (e->way == PACKED_UNPACKED || dev->deterministic)
        return true;
    return packing_pays_to_unpack(e->packing, (double)(e->offsets[e->n_groups] - e->offsets[0]),
                                  count_used(e), (double)(e->in * e->out));
}

/* A product, forward or of the gradient. */
struct call {
    elem *to;
    const elem *from;
    bool  is_dx;
    float beta; /* of dx */
};

/* How many are unpacked at once, so that runs of them are alike. */
static int32_t size_of_runs(const struct packed_experts *e)
{
    int64_t fit = e->room_numbers / (e->in * e->out), n_used = count_used(e);
    int64_t n_runs = (n_used + fit - 1) / fit;
    return n_runs ? (int32_t)((n_used + n_runs - 1) / n_runs) : 1;
}

/* Unpacks the weights of n experts that have rows, from first on; returns where the next one of
 * these is, or the end. What has no rows is not read, but wants an address like the others'. */
static int32_t unpack_run(struct device *dev, const struct packed_experts *e, int32_t first,
                          int32_t n, const elem **w)
{
    int32_t g = first, n_unpacked = 0;
    for (; g < e->n_groups; g++) {
        w[g] = e->room;
        if (e->offsets[g + 1] == e->offsets[g])
            continue;
        if (n_unpacked == n)
            break;
        elem *at = elem_at(dev, e->room, n_unpacked++ * e->in * e->out);
        w[g] = at;
        dev->ops->unpack(dev, at, e->w[g], e->packing, e->out, e->in, 0, e->out);
    }
    return g;
}

static void multiply_unpacked(struct device *dev, const struct call *c,
                              const struct packed_experts *e)
{
    const elem **w = xcalloc((size_t)e->n_groups, sizeof *w);
    int32_t n = size_of_runs(e);
    for (int32_t first = 0, end; first < e->n_groups; first = end) {
        end = unpack_run(dev, e, first, n, w);
        if (c->is_dx)
            dev->ops->grouped_linear_dx(dev, c->to, c->from, w + first, e->offsets + first,
                                        end - first, e->in, e->out, c->beta);
        else
            dev->ops->grouped_linear(dev, c->to, c->from, w + first, e->offsets + first,
                                     end - first, e->in, e->out);
    }
    free(w);
}

void packed_experts_forward(struct device *dev, elem *y, const elem *x,
                            const struct packed_experts *e)
{
    if (packed_experts_unpacks(dev, e))
        multiply_unpacked(dev, &(struct call){.to = y, .from = x}, e);
    else
        dev->ops->grouped_linear_packed(dev, y, x, e->w, e->packing, e->offsets, e->n_groups,
                                        e->in, e->out);
}

void packed_experts_dx(struct device *dev, elem *dx, const elem *dy,
                       const struct packed_experts *e, float beta)
{
    if (packed_experts_unpacks(dev, e))
        multiply_unpacked(dev, &(struct call){.to = dx, .from = dy, .is_dx = true, .beta = beta},
                          e);
    else
        dev->ops->grouped_linear_packed_dx(dev, dx, dy, e->w, e->packing, e->offsets, e->n_groups,
                                           e->in, e->out, beta);
}
