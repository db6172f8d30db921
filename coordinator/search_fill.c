/* search_fill.c - shares of copies in all scenarios of a search at once */
#include "coordinator/search_parts.h"

static quad quad_min(quad a, quad b)
{
    quad_mask m = a < b;
    return (quad)((m & (quad_mask)a) | (~m & (quad_mask)b));
}

static void fill_two(struct search *s, int32_t e, uint32_t a, uint32_t b)
{
    struct row *la = &s->device[a / s->p->n_slots], *lb = &s->device[b / s->p->n_slots];
    float slow_a = s->slowness[a / s->p->n_slots], slow_b = s->slowness[b / s->p->n_slots];
    float to_a = slow_b / (slow_a + slow_b), to_b = slow_a / (slow_a + slow_b);
    const quad zero = { 0 };
    for (int i = 0; i < QUADS; i++) {
        quad w = s->load[e].q[i];
        quad base_a = la->q[i] - s->part[a].q[i], base_b = lb->q[i] - s->part[b].q[i];
        /* Equal times: (base_a + x) * slow_a = (base_b + w - x) * slow_b. */
        quad x = (base_b + w) * to_a - base_a * to_b;
        x = quad_min(quad_max(x, zero), w);
        s->part[a].q[i] = x;
        s->part[b].q[i] = w - x;
        la->q[i] = base_a + x;
        lb->q[i] = base_b + (w - x);
    }
}

/* Any number of copies: raise the level over all, drop those that stand above it already, until
 * nobody does. See split's fill. */
static void fill_many(struct search *s, int32_t e, int quarter)
{
    struct lane *lane = s->lane;
    quad w = s->load[e].q[quarter], level, changed;
    uint32_t n = 0;
    for (int32_t c = s->head[e]; c >= 0; c = s->next[c], n++) {
        uint32_t g = (uint32_t)c / s->p->n_slots;
        lane[n].base = s->device[g].q[quarter] - s->part[c].q[quarter];
        lane[n].speed = (quad){ 1, 1, 1, 1 } / s->slowness[g];
    }
    do {
        quad sum = w, speed = { 0 };
        changed = (quad){ 0 };
        for (uint32_t i = 0; i < n; i++) {
            sum += (quad)((quad_mask)lane[i].base & (lane[i].speed > 0));
            speed += lane[i].speed;
        }
        level = sum / speed;
        for (uint32_t i = 0; i < n; i++) {
            quad_mask stays = lane[i].base < level * lane[i].speed;
            quad kept = (quad)((quad_mask)lane[i].speed & stays);
            changed += lane[i].speed - kept;
            lane[i].speed = kept;
        }
        /* Where nothing is to be given all stand above; then the parts are zero below. */
    } while (quad_sum(changed) > 0);
    uint32_t i = 0;
    for (int32_t c = s->head[e]; c >= 0; c = s->next[c], i++) {
        quad x = level * lane[i].speed - lane[i].base;
        x = (quad)((quad_mask)x & (lane[i].speed > 0));
        s->part[c].q[quarter] = x;
        s->device[(uint32_t)c / s->p->n_slots].q[quarter] = lane[i].base + x;
    }
}

void search_fill(struct search *s, int32_t e)
{
    if (s->n_copies[e] == 2) {
        fill_two(s, e, (uint32_t)s->head[e], (uint32_t)s->next[s->head[e]]);
        return;
    }
    for (int i = 0; i < QUADS; i++)
        fill_many(s, e, i);
}

void search_refill(struct search *s, uint32_t n_sweeps)
{
    const struct row zero = { 0 };
    for (uint32_t g = 0; g < s->p->n_devices; g++)
        s->device[g] = zero;
    for (uint32_t c = 0; c < s->n_total; c++) {
        int32_t e = s->expert[c];
        s->part[c] = zero;
        if (e < 0)
            continue;
        for (int i = 0; i < QUADS; i++)
            s->part[c].q[i] = s->load[e].q[i] / (float)s->n_copies[e];
        search_add_part(s, c, 1);
    }
    for (uint32_t sweep = 0; sweep < n_sweeps; sweep++)
        for (uint32_t e = 0; e < s->p->n_experts; e++)
            if (s->n_copies[e] > 1)
                search_fill(s, (int32_t)e);
}
