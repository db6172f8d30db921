/* outline.c - counts an outline's parameters, and knows its tensors by name */
#include "common/outline.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static uint64_t tensor_count(const struct outline_tensor *t)
{
    return t->n_copies * (t->out * (t->in ? t->in : 1) + t->n_padding);
}

void outline_block_count(const struct outline_block *b, uint64_t *out_all, uint64_t *out_active)
{
    *out_all = *out_active = 0;
    for (uint32_t i = 0; i < b->n_tensors; i++) {
        const struct outline_tensor *t = &b->tensors[i];
        uint64_t n = tensor_count(t);
        *out_all += n;
        *out_active += t->part == PART_EXPERTS ? n / b->n_experts * b->top_k : n;
    }
}

static void add_block(struct outline_counts *c, const struct outline_block *b)
{
    for (uint32_t i = 0; i < b->n_tensors; i++) {
        const struct outline_tensor *t = &b->tensors[i];
        uint64_t n = tensor_count(t);
        c->total += n;
        c->live += n - t->n_copies * t->n_padding;
        c->active += t->part == PART_EXPERTS ? n / b->n_experts * b->top_k : n;
        c->parts[t->part] += n;
    }
}

struct outline_counts outline_count(const struct outline *o)
{
    struct outline_counts c = {0};
    add_block(&c, &o->top);
    for (uint32_t l = 0; l < o->n_layers; l++) {
        if (o->layers[l].mixer != OUTLINE_NONE)
            add_block(&c, &o->blocks[o->layers[l].mixer]);
        if (o->layers[l].ffn != OUTLINE_NONE)
            add_block(&c, &o->blocks[o->layers[l].ffn]);
    }
    return c;
}

const char *outline_part_name(enum outline_part part)
{
    static const char *const names[] = {
        [PART_EMBEDDING] = "embedding", [PART_ATTENTION] = "attention", [PART_DENSE] = "dense_mlp",
        [PART_EXPERTS] = "routed_experts", [PART_SHARED] = "shared_experts",
        [PART_ROUTER] = "router", [PART_LATENT] = "latent_projections", [PART_NORMS] = "norms",
        [PART_RESIDUAL] = "residual_mixers",
    };
    return names[part];
}

uint32_t outline_block_layers(const struct outline *o, uint32_t block)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < o->n_layers; l++)
        n += o->layers[l].mixer == block || o->layers[l].ffn == block;
    return n;
}

/* A whole word of the path: what stands before it ends with a dot. */
static bool ends_with(const char *name, size_t n_name, const char *end, size_t n_end)
{
    return n_name >= n_end && memcmp(name + n_name - n_end, end, n_end) == 0 &&
           (n_name == n_end || name[n_name - n_end - 1] == '.');
}

size_t outline_tensor_match(const struct outline_tensor *t, const char *name)
{
    size_t n_name = strlen(name), longest = 0;
    for (const char *at = t->names; *at;) {
        size_t n = strcspn(at, "|");
        if (n > longest && ends_with(name, n_name, at, n))
            longest = n;
        at += n + (at[n] == '|');
    }
    return longest;
}

void outline_note(struct outline *o, const char *format, ...)
{
    char line[sizeof o->notes[0]];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    for (uint32_t i = 0; i < o->n_notes; i++)
        if (!strcmp(o->notes[i], line))
            return;
    if (o->n_notes < OUTLINE_NOTES_MAX)
        memcpy(o->notes[o->n_notes++], line, sizeof line);
}
