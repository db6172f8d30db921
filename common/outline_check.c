/* outline_check.c - finds each tensor's place in the outline, and compares sizes layer by layer
 *
 * A tensor of the outline may lie in several parts, or fused, so what is compared is the number of
 * parameters that all names of it hold in a layer. */
#include "common/outline_check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/tensor_kind.h"

static void add_line(struct outline_check *c, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void add_line(struct outline_check *c, const char *format, ...)
{
    va_list args;
    if (c->n_lines == CHECK_LINES_MAX) {
        c->n_more++;
        return;
    }
    va_start(args, format);
    vsnprintf(c->lines[c->n_lines++], sizeof c->lines[0], format, args);
    va_end(args);
}

/* ---- places --------------------------------------------------------------------------------- */

struct place {
    const struct outline_tensor *tensor; /* NULL: none */
    size_t length;
};

static void look_in(const struct outline_block *b, const char *name, struct place *best)
{
    for (uint32_t i = 0; i < b->n_tensors; i++) {
        size_t n = outline_tensor_match(&b->tensors[i], name);
        if (n > best->length)
            *best = (struct place){&b->tensors[i], n};
    }
}

static const struct outline_block *block_at(const struct outline *o, uint16_t i)
{
    return i == OUTLINE_NONE ? NULL : &o->blocks[i];
}

struct work {
    const struct outline *o;
    const struct tensor_list *list;
    struct outline_check *c;
    char (*names)[TENSOR_NAME_BYTES]; /* of groups, plain */
    enum tensor_kind *kinds;
    bool *told;          /* groups that were called unknown */
    bool has_halves;     /* bytes hold two numbers */
    uint64_t found[2][OUTLINE_TENSORS_MAX]; /* parameters, of the blocks of one layer */
};

/* Two 4-bit numbers in a byte, which no name tells but the width does. */
static bool is_half(const struct tensor_group *g, const struct outline_tensor *t)
{
    return t && g->n_dims >= 2 && t->in == 2 * g->dims[g->n_dims - 1] &&
           (!strcmp(g->dtype, "I8") || !strcmp(g->dtype, "U8"));
}

static void place_group(struct work *w, size_t i, uint32_t layer,
                        const struct outline_block *const blocks[2])
{
    const struct tensor_group *g = &w->list->groups[i];
    uint64_t n = g->per_layer[layer];
    struct place best = {0};
    for (int k = 0; k < 2; k++)
        if (blocks[k])
            look_in(blocks[k], w->names[i], &best);
    for (int k = 0; !best.tensor && k < 2; k++)
        if (blocks[k])
            look_in(blocks[k], g->name, &best);
    uint64_t count = n * g->n_elements * (is_half(g, best.tensor)
                                              ? 2 : tensor_unpacked(g, w->o->quant.bits));
    w->has_halves |= is_half(g, best.tensor);
    w->c->text += count;
    if (best.tensor && best.tensor->part == PART_EXPERTS)
        w->c->text_experts += count;
    for (int k = 0; best.tensor && k < 2; k++)
        if (blocks[k] && best.tensor >= blocks[k]->tensors &&
            best.tensor < blocks[k]->tensors + OUTLINE_TENSORS_MAX)
            w->found[k][best.tensor - blocks[k]->tensors] += count;
    if (best.tensor) {
        w->c->n_used += n;
        return;
    }
    w->c->n_unknown += n;
    if (!w->told[i])
        add_line(w->c, "tensor '%.120s': of no known part", g->name);
    w->told[i] = true;
}

static void compare(struct work *w, const char *where, const struct outline_block *b, int k)
{
    for (uint32_t i = 0; b && i < b->n_tensors; i++) {
        const struct outline_tensor *t = &b->tensors[i];
        uint64_t expected = t->n_copies * (t->out * (t->in ? t->in : 1) + t->n_padding);
        if (w->c->has_shapes && w->found[k][i] != expected)
            add_line(w->c, "%s: %.*s has %" PRIu64 " parameters, the configuration says %" PRIu64,
                     where, (int)strcspn(t->names, "|"), t->names, w->found[k][i], expected);
    }
}

static void check_layer(struct work *w, uint32_t l)
{
    const struct outline_block *blocks[2] = {block_at(w->o, w->o->layers[l].mixer),
                                             block_at(w->o, w->o->layers[l].ffn)};
    char where[32];
    memset(w->found, 0, sizeof w->found);
    for (size_t i = 0; i < w->list->n_groups; i++)
        if (w->kinds[i] == TENSOR_TEXT && w->list->groups[i].has_layers &&
            w->list->groups[i].per_layer[l])
            place_group(w, i, l, blocks);
    snprintf(where, sizeof where, "layer %u", l);
    compare(w, where, blocks[0], 0);
    compare(w, where, blocks[1], 1);
}

static void check_top(struct work *w)
{
    const struct outline_block *blocks[2] = {&w->o->top, NULL};
    memset(w->found, 0, sizeof w->found);
    for (size_t i = 0; i < w->list->n_groups; i++)
        if (w->kinds[i] == TENSOR_TEXT && !w->list->groups[i].has_layers)
            place_group(w, i, 0, blocks);
    compare(w, "beside the layers", blocks[0], 0);
}

/* What no layer of the text model has: scales, tables, vision, next-token layers. */
static void count_rest(struct work *w)
{
    struct outline_check *c = w->c;
    for (size_t i = 0; i < w->list->n_groups; i++) {
        const struct tensor_group *g = &w->list->groups[i];
        bool half = w->has_halves && !strcmp(g->dtype, "I8");
        uint64_t of_one = g->n_elements * (half ? 2 : tensor_unpacked(g, w->o->quant.bits));
        if (w->kinds[i] == TENSOR_SCALE)
            c->n_scales += g->n_tensors;
        else if (w->kinds[i] != TENSOR_TEXT)
            c->n_carried += g->n_tensors;
        if (w->kinds[i] == TENSOR_VISION)
            c->vision += g->n_tensors * of_one;
        else if (w->kinds[i] == TENSOR_MTP)
            c->mtp += g->n_tensors * of_one;
        else if (w->kinds[i] == TENSOR_TEXT && g->has_layers)
            for (uint32_t l = w->o->n_layers; l < TENSOR_LAYERS_MAX; l++) {
                c->mtp += g->per_layer[l] * of_one;
                c->n_carried += g->per_layer[l];
            }
    }
}

void outline_check(const struct outline *o, const struct tensor_list *list,
                   struct outline_check *out)
{
    *out = (struct outline_check){.has_shapes = list->source != TENSORS_INDEX};
    struct work *w = xcalloc(1, sizeof *w);
    *w = (struct work){.o = o, .list = list, .c = out,
                       .names = xcalloc(list->n_groups, sizeof *w->names),
                       .kinds = xcalloc(list->n_groups, sizeof *w->kinds),
                       .told = xcalloc(list->n_groups, sizeof *w->told)};
    for (size_t i = 0; i < list->n_groups; i++) {
        w->kinds[i] = tensor_kind_of(&list->groups[i]);
        tensor_plain_name(list->groups[i].name, w->names[i]);
    }
    check_top(w);
    for (uint32_t l = 0; l < o->n_layers; l++)
        check_layer(w, l);
    count_rest(w);
    free(w->names);
    free(w->kinds);
    free(w->told);
    free(w);
}
