/* search_fill.c - shares of copies in all scenarios of a search at once */
#include "coordinator/search_parts.h"

static void fill_two(struct search *s, int32_t e, uint32_t a, uint32_t b)
{
    struct row *la = &s->device[a / s->p->n_slots], *lb = &s->device[b / s->p->n_slots];
    float slow_a = s->slowness[a / s->p->n_slots], slow_b = s->slowness[b / s->p->n_slots];
    float to_a = slow_b / (slow_a + slow_b), to_b = slow_a / (slow_a + slow_b);
    for (int i = 0; i < QUADS; i++) {
        quad w = s->load[e].q[i];
        quad base_a = la->q[i] - s->part[a].q[i], base_b = lb->q[i] - s->part[b].q[i];
        quad x = quad_even(base_a, base_b, w, to_a, to_b);
        s->part[a].q[i] = x;
        s->part[b].q[i] = w - x;
        la->q[i] = base_a + x;
        lb->q[i] = base_b + (w - x);
    }
}

/* Raises the level over all copies, drops those that stand above it already, until nobody does.
 * See split's fill. */
quad search_level(struct lane *lane, uint32_t n, quad load)
{
    quad level, changed;
    do {
        quad sum = load, speed = { 0 };
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
        /* Where nothing is to be given all stand above; then the parts are zero. */
    } while (quad_sum(changed) > 0);
    return level;
}

static void fill_many(struct search *s, int32_t e, int quarter)
{
    struct lane *lane = s->lane;
    uint32_t n = 0, i = 0;
    for (int32_t c = s->at.head[e]; c >= 0; c = s->at.next[c], n++) {
        uint32_t g = search_slots_device(&s->at, (uint32_t)c);
        lane[n].base = s->device[g].q[quarter] - s->part[c].q[quarter];
        lane[n].speed = (quad){ 1, 1, 1, 1 } / s->slowness[g];
    }
    quad level = search_level(lane, n, s->load[e].q[quarter]);
    for (int32_t c = s->at.head[e]; c >= 0; c = s->at.next[c], i++) {
        quad x = lane_part(&lane[i], level);
        s->part[c].q[quarter] = x;
        s->device[search_slots_device(&s->at, (uint32_t)c)].q[quarter] = lane[i].base + x;
    }
}

void search_fill(struct search *s, int32_t e)
{
    if (s->at.n_copies[e] == 2) {
        fill_two(s, e, (uint32_t)s->at.head[e], (uint32_t)s->at.next[s->at.head[e]]);
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
    for (uint32_t c = 0; c < s->at.n_total; c++) {
        int32_t e = s->at.expert[c];
        s->part[c] = zero;
        if (e < 0)
            continue;
        for (int i = 0; i < QUADS; i++)
            s->part[c].q[i] = s->load[e].q[i] / (float)s->at.n_copies[e];
        search_add_part(s, c, 1);
    }
    for (uint32_t sweep = 0; sweep < n_sweeps; sweep++)
        for (uint32_t e = 0; e < s->p->n_experts; e++)
            if (s->at.n_copies[e] > 1)
                search_fill(s, (int32_t)e);
}

float search_node_value(const struct search_problem *p, const struct search_slots *at, int32_t e,
                        float mean_load, int32_t without, int32_t with_slot)
{
    if (p->n_nodes < 2 || p->node_price <= 0)
        return 0;
    uint32_t per_node = p->n_devices / p->n_nodes * p->n_slots, n = 0;
    for (uint32_t node = 0; node < p->n_nodes; node++) {
        bool has = with_slot >= 0 && (uint32_t)with_slot / per_node == node;
        for (int32_t c = at->head[e]; c >= 0 && !has; c = at->next[c])
            has = c != without && (uint32_t)c / per_node == node;
        n += has;
    }
    return p->node_price * mean_load * (float)n / (float)p->n_nodes;
}
