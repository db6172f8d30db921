/* spans.c - marks in a device's order of ops, and what lies between them */
#include "kernels/spans.h"

#include <stdlib.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/progress.h"

#define DEPTH_MAX 16
#define ANCHOR    0u /* the mark that the others are timed from */

struct mark {
    bool     is_begin;
    uint32_t kind;
    int32_t  layer;
};

struct open_span {
    uint32_t kind;
    int32_t  layer;
    double   begin_s; /* since the anchor */
};

struct spans {
    struct mark *marks; /* number i is the device's mark i + 1 */
    uint32_t n_marks;
    size_t   n_alloc;
    double   seconds[SPAN_KINDS_MAX];
    struct open_span stack[DEPTH_MAX]; /* as of the last mark that was read */
    uint32_t depth, n_open; /* of the stack; of marks that are not read yet, too */
    double   read_s;    /* when that was, since the anchor */
    int64_t  anchor_ns; /* on the wall's clock; 0: not known yet */
    int64_t  told_ns;   /* end of the last span that was told, also before spans_reset */
    span_fn *each;
    void    *user;
};

void spans_open(struct device *dev)
{
    dev->spans = xcalloc(1, sizeof *dev->spans);
    spans_reset(dev, NULL, NULL);
}

void spans_close(struct device *dev)
{
    if (!dev || !dev->spans)
        return;
    free(dev->spans->marks);
    free(dev->spans);
    dev->spans = NULL;
}

static void mark(struct device *dev, struct mark m)
{
    struct spans *s = dev->spans;
    s->marks = xgrow(s->marks, s->n_marks, &s->n_alloc, sizeof *s->marks);
    s->marks[s->n_marks++] = m;
    dev->ops->mark(dev, s->n_marks);
}

void spans_begin(struct device *dev, uint32_t kind, int32_t layer)
{
    progress_made();
    if (!dev->spans)
        return;
    assert(kind < SPAN_KINDS_MAX);
    assert(dev->spans->n_open < DEPTH_MAX);
    dev->spans->n_open++;
    mark(dev, (struct mark){true, kind, layer});
}

void spans_end(struct device *dev)
{
    progress_made();
    if (!dev->spans)
        return;
    assert(dev->spans->n_open > 0);
    dev->spans->n_open--;
    mark(dev, (struct mark){0});
}

/* Both ends are cut to whole nanoseconds, so that a span still ends within the one around it. */
static void tell(struct spans *s, const struct open_span *o, double end_s)
{
    int64_t begin_ns = (int64_t)(o->begin_s * NS_PER_S), end_ns = (int64_t)(end_s * NS_PER_S);
    struct span span = {o->kind, o->layer, s->anchor_ns + begin_ns, end_ns - begin_ns};
    s->told_ns = s->anchor_ns + end_ns;
    if (s->each)
        s->each(s->user, &span);
}

void spans_beside(struct device *dev, uint32_t kind, int32_t layer, uint64_t begin_ns,
                  uint64_t end_ns)
{
    struct spans *s = dev->spans;
    if (!s || end_ns <= begin_ns)
        return;
    assert(kind < SPAN_KINDS_MAX);
    struct span span = {kind, layer, clock_wall_ns() - (int64_t)(clock_now_ns() - begin_ns),
                        (int64_t)(end_ns - begin_ns)};
    s->seconds[kind] += (double)(end_ns - begin_ns) / NS_PER_S;
    if (s->each)
        s->each(s->user, &span);
}

static void read_mark(struct spans *s, const struct mark *m, double at_s)
{
    if (s->depth > 0)
        s->seconds[s->stack[s->depth - 1].kind] += at_s - s->read_s;
    s->read_s = at_s;
    if (m->is_begin)
        s->stack[s->depth++] = (struct open_span){m->kind, m->layer, at_s};
    else
        tell(s, &s->stack[--s->depth], at_s);
}

/* What was told before was over then, however late the clock was looked at. */
static void anchor(struct spans *s, int64_t at_ns)
{
    s->anchor_ns = at_ns > s->told_ns ? at_ns : s->told_ns;
}

void spans_settle(struct device *dev)
{
    struct spans *s = dev->spans;
    if (!s || s->n_marks == 0)
        return;
    double last_s = dev->ops->elapsed(dev, ANCHOR, s->n_marks); /* waits for it */
    if (!s->anchor_ns)
        anchor(s, clock_wall_ns() - (int64_t)(last_s * NS_PER_S));
    for (uint32_t i = 0; i < s->n_marks; i++)
        read_mark(s, &s->marks[i],
                  i + 1 == s->n_marks ? last_s : dev->ops->elapsed(dev, ANCHOR, i + 1));
    s->n_marks = 0;
}

void spans_reset(struct device *dev, span_fn *each, void *user)
{
    struct spans *s = dev->spans;
    if (!s)
        return;
    *s = (struct spans){.marks = s->marks, .n_alloc = s->n_alloc, .told_ns = s->told_ns,
                        .each = each, .user = user};
    dev->ops->mark(dev, ANCHOR);
    if (dev->is_host)
        anchor(s, clock_wall_ns());
}

double spans_seconds(struct device *dev, uint32_t kind)
{
    spans_settle(dev);
    return dev->spans ? dev->spans->seconds[kind] : 0;
}
