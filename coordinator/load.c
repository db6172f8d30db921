/* load.c - how many tokens each expert of one job saw, in windows of steps */
#include "coordinator/load.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

struct load {
    uint32_t           window_steps;
    struct load_window filling, whole; /* n_steps 0: nothing is there */
};

struct load *load_create(uint32_t window_steps)
{
    struct load *l = xcalloc(1, sizeof *l);
    l->window_steps = window_steps ? window_steps : 1;
    return l;
}

static void window_fini(struct load_window *w)
{
    free(w->layer);
    free(w->tokens);
    free(w->speed);
    *w = (struct load_window){0};
}

void load_destroy(struct load *l)
{
    if (!l)
        return;
    window_fini(&l->filling);
    window_fini(&l->whole);
    free(l);
}

const struct load_window *load_newest(const struct load *l)
{
    return l->whole.n_steps ? &l->whole : NULL;
}

static bool has_shape(const struct load_window *w, const Ballast__LoadReport *r)
{
    if (w->n_layers != r->n_layers || w->n_experts != r->n_experts || w->n_devices != r->n_speed)
        return false;
    for (uint32_t i = 0; i < w->n_layers; i++)
        if (w->layer[i] != r->layers[i]->layer)
            return false;
    return true;
}

static void begin(struct load_window *w, const Ballast__LoadReport *r)
{
    if (!has_shape(w, r)) {
        window_fini(w);
        w->n_layers = (uint32_t)r->n_layers;
        w->n_experts = r->n_experts;
        w->n_devices = (uint32_t)r->n_speed;
        w->layer = xcalloc(w->n_layers, sizeof *w->layer);
        w->tokens = xcalloc((size_t)w->n_layers * w->n_experts, sizeof *w->tokens);
        w->speed = xcalloc(w->n_devices, sizeof *w->speed);
        for (uint32_t i = 0; i < w->n_layers; i++)
            w->layer[i] = r->layers[i]->layer;
    }
    w->attempt = r->attempt;
    w->epoch = r->placement_epoch;
    w->first_step = r->first_step;
    w->last_step = r->first_step - 1;
    w->n_steps = 0;
    w->step_s = w->row_s = w->link_bytes_per_s = w->imbalance = 0;
    memset(w->tokens, 0, (size_t)w->n_layers * w->n_experts * sizeof *w->tokens);
    memset(w->speed, 0, w->n_devices * sizeof *w->speed);
}

/* A mean that grows by n more values of mean x. */
static double mean_with(double mean, uint64_t n_before, double x, uint64_t n)
{
    return mean + (x - mean) * (double)n / (double)(n_before + n);
}

static void fold(struct load_window *w, const Ballast__LoadReport *r)
{
    uint64_t n = r->last_step - r->first_step + 1, before = w->n_steps;
    for (uint32_t i = 0; i < w->n_layers; i++) {
        double *tokens = w->tokens + (size_t)i * w->n_experts;
        for (size_t k = 0; k < r->layers[i]->n_tokens; k++)
            tokens[k % w->n_experts] += r->layers[i]->tokens[k];
    }
    for (uint32_t g = 0; g < w->n_devices; g++)
        w->speed[g] = mean_with(w->speed[g], before, r->speed[g], n);
    w->step_s = mean_with(w->step_s, before, r->step_s, n);
    w->row_s = mean_with(w->row_s, before, r->row_s, n);
    w->imbalance = mean_with(w->imbalance, before, r->device_imbalance, n);
    if (r->link_bytes_per_s > 0)
        w->link_bytes_per_s = r->link_bytes_per_s;
    w->expert_bytes = r->expert_bytes;
    w->state_bytes = r->state_bytes;
    w->frozen_bytes = r->frozen_bytes < r->expert_bytes ? r->frozen_bytes : r->expert_bytes;
    w->last_step = r->last_step;
    w->n_steps += n;
}

static bool is_old(const struct load_window *w, const Ballast__LoadReport *r)
{
    if (r->attempt != w->attempt)
        return r->attempt < w->attempt;
    return r->placement_epoch < w->epoch || r->last_step <= w->last_step;
}

bool load_add(struct load *l, const Ballast__LoadReport *r)
{
    struct load_window *w = &l->filling;
    if (is_old(w, r) || (l->whole.n_steps && is_old(&l->whole, r)))
        return false;
    bool follows = w->n_steps && r->attempt == w->attempt && r->placement_epoch == w->epoch &&
        r->first_step == w->last_step + 1 && has_shape(w, r);
    if (!follows)
        begin(w, r);
    fold(w, r);
    if (w->n_steps < l->window_steps)
        return false;
    struct load_window whole = *w;
    l->filling = l->whole;
    l->filling.n_steps = 0;
    l->whole = whole;
    return true;
}
