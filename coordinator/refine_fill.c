/* refine_fill - shares in all scenarios of a refinement; what a change touches, as it was */
#include "coordinator/refine_parts.h"

#define SWEEPS 4 /* over all copies at the start */

void refine_keep_slot(struct refine *r, uint32_t slot)
{
    if (r->slot_is_kept[slot])
        return;
    r->slot_is_kept[slot] = true;
    r->slot_was[r->n_slots_kept] = r->part[slot];
    r->slot_kept[r->n_slots_kept++] = slot;
}

void refine_keep_device(struct refine *r, uint32_t g)
{
    if (r->device_is_kept[g])
        return;
    r->device_is_kept[g] = true;
    r->device_was[r->n_devices_kept] = r->device[g];
    r->device_kept[r->n_devices_kept++] = g;
}

void refine_forget(struct refine *r)
{
    for (uint32_t i = 0; i < r->n_slots_kept; i++)
        r->slot_is_kept[r->slot_kept[i]] = false;
    for (uint32_t i = 0; i < r->n_devices_kept; i++)
        r->device_is_kept[r->device_kept[i]] = false;
    r->n_slots_kept = r->n_devices_kept = 0;
}

void refine_take_back(struct refine *r)
{
    for (uint32_t i = 0; i < r->n_slots_kept; i++)
        r->part[r->slot_kept[i]] = r->slot_was[i];
    for (uint32_t i = 0; i < r->n_devices_kept; i++)
        r->device[r->device_kept[i]] = r->device_was[i];
    refine_forget(r);
}

void refine_add_part(struct refine *r, uint32_t slot, float sign)
{
    uint32_t g = search_slots_device(&r->at, slot);
    refine_keep_device(r, g);
    for (int i = 0; i < WIDE; i++)
        r->device[g].q[i] += sign * r->part[slot].q[i];
}

static void fill_two(struct refine *r, int32_t e, uint32_t a, uint32_t b)
{
    uint32_t ga = search_slots_device(&r->at, a), gb = search_slots_device(&r->at, b);
    float both = r->slowness[ga] + r->slowness[gb];
    float to_a = r->slowness[gb] / both, to_b = r->slowness[ga] / both;
    for (int i = 0; i < WIDE; i++) {
        quad w = r->load[e].q[i];
        quad base_a = r->device[ga].q[i] - r->part[a].q[i];
        quad base_b = r->device[gb].q[i] - r->part[b].q[i];
        quad x = quad_even(base_a, base_b, w, to_a, to_b);
        r->part[a].q[i] = x;
        r->part[b].q[i] = w - x;
        r->device[ga].q[i] = base_a + x;
        r->device[gb].q[i] = base_b + (w - x);
    }
}

static void fill_many(struct refine *r, int32_t e)
{
    for (int q = 0; q < WIDE; q++) {
        uint32_t n = 0, i = 0;
        for (int32_t c = r->at.head[e]; c >= 0; c = r->at.next[c], n++) {
            uint32_t g = search_slots_device(&r->at, (uint32_t)c);
            r->lane[n].base = r->device[g].q[q] - r->part[c].q[q];
            r->lane[n].speed = (quad){ 1, 1, 1, 1 } / r->slowness[g];
        }
        quad level = search_level(r->lane, n, r->load[e].q[q]);
        for (int32_t c = r->at.head[e]; c >= 0; c = r->at.next[c], i++) {
            r->part[c].q[q] = lane_part(&r->lane[i], level);
            r->device[search_slots_device(&r->at, (uint32_t)c)].q[q] =
                r->lane[i].base + r->part[c].q[q];
        }
    }
}

/* The best parts of an expert's copies, the rest of their devices' load being given. */
static void fill(struct refine *r, int32_t e)
{
    for (int32_t c = r->at.head[e]; c >= 0; c = r->at.next[c]) {
        refine_keep_slot(r, (uint32_t)c);
        refine_keep_device(r, search_slots_device(&r->at, (uint32_t)c));
    }
    if (r->at.n_copies[e] == 2)
        fill_two(r, e, (uint32_t)r->at.head[e], (uint32_t)r->at.next[r->at.head[e]]);
    else
        fill_many(r, e);
}

void refine_fill_all(struct refine *r)
{
    for (uint32_t c = 0; c < r->at.n_total; c++) {
        int32_t e = r->at.expert[c];
        if (e < 0)
            continue;
        for (int i = 0; i < WIDE; i++)
            r->part[c].q[i] = r->load[e].q[i] / (float)r->at.n_copies[e];
        refine_add_part(r, c, 1);
    }
    for (int sweep = 0; sweep < SWEEPS; sweep++)
        for (uint32_t e = 0; e < r->p->n_experts; e++)
            if (r->at.n_copies[e] > 1)
                fill(r, (int32_t)e);
    refine_forget(r);
}

void refine_fill_device(struct refine *r, uint32_t g, bool is_back)
{
    for (uint32_t i = 0; i < r->p->n_slots; i++) {
        int32_t e = r->at.expert[g * r->p->n_slots + (is_back ? r->p->n_slots - 1 - i : i)];
        if (e >= 0 && r->at.n_copies[e] > 1)
            fill(r, e);
    }
}
