/* pack.c - copies by a greedy heap, then longest processing time first
 *
 * Giving the next copy to the expert with the largest load per copy is optimal for the largest
 * load per copy. Placing is greedy; the search mends what greed leaves. */
#include "coordinator/pack.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

/* A binary heap of indices, the smallest key on top. */
struct heap {
    uint32_t n, *at;
    double  *key; /* by index */
};

static bool is_before(const struct heap *h, uint32_t a, uint32_t b)
{
    return h->key[a] < h->key[b] || (h->key[a] == h->key[b] && a < b);
}

static void heap_sink(struct heap *h, uint32_t i)
{
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= h->n)
            return;
        if (c + 1 < h->n && is_before(h, h->at[c + 1], h->at[c]))
            c++;
        if (!is_before(h, h->at[c], h->at[i]))
            return;
        uint32_t t = h->at[c];
        h->at[c] = h->at[i];
        h->at[i] = t;
        i = c;
    }
}

static void heap_make(struct heap *h)
{
    for (uint32_t i = h->n / 2; i-- > 0;)
        heap_sink(h, i);
}

static uint32_t heap_pop(struct heap *h)
{
    uint32_t top = h->at[0];
    h->at[0] = h->at[--h->n];
    heap_sink(h, 0);
    return top;
}

static void heap_push(struct heap *h, uint32_t index)
{
    uint32_t i = h->n++;
    h->at[i] = index;
    while (i && is_before(h, h->at[i], h->at[(i - 1) / 2])) {
        uint32_t t = h->at[i];
        h->at[i] = h->at[(i - 1) / 2];
        h->at[(i - 1) / 2] = t;
        i = (i - 1) / 2;
    }
}

static void heap_init(struct heap *h, uint32_t n)
{
    h->n = n;
    h->at = xcalloc(n, sizeof *h->at);
    h->key = xcalloc(n, sizeof *h->key);
    for (uint32_t i = 0; i < n; i++)
        h->at[i] = i;
}

static void heap_fini(struct heap *h)
{
    free(h->at);
    free(h->key);
}

void pack_copies(uint32_t n_experts, uint32_t n_devices, uint32_t n_total, const double *load,
                 uint32_t *out_copies)
{
    struct heap h;
    heap_init(&h, n_experts);
    for (uint32_t e = 0; e < n_experts; e++) {
        out_copies[e] = 1;
        h.key[e] = -load[e];
    }
    heap_make(&h);
    for (uint32_t left = n_total - n_experts; left && h.n;) {
        uint32_t e = h.at[0];
        if (out_copies[e] == n_devices) {
            heap_pop(&h);
            continue;
        }
        out_copies[e]++;
        left--;
        h.key[e] = -load[e] / out_copies[e];
        heap_sink(&h, 0);
    }
    heap_fini(&h);
}

struct item {
    uint32_t key;    /* rises as the load per copy falls */
    uint32_t expert;
};

/* Heaviest first, of equals the first expert: by the key's digits, the last ones first. */
static void sort_items(struct item *item, uint32_t n)
{
    enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };
    struct item *other = xcalloc(n, sizeof *other), *from = item, *to = other;
    for (uint32_t shift = 0; shift < 32; shift += DIGIT_BITS) {
        uint32_t first[DIGITS + 1] = { 0 };
        for (uint32_t i = 0; i < n; i++)
            first[(from[i].key >> shift) % DIGITS + 1]++;
        for (uint32_t d = 0; d < DIGITS; d++)
            first[d + 1] += first[d];
        for (uint32_t i = 0; i < n; i++)
            to[first[(from[i].key >> shift) % DIGITS]++] = from[i];
        struct item *t = from;
        from = to;
        to = t;
    }
    free(other); /* after an even number of passes all is where it was */
}

/* The bits of floats that are not negative rise as they do. */
static uint32_t falling_key(double load)
{
    float x = (float)load;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return ~bits;
}

/* One copy's place: the lightest device that may take it; of the first few, one whose node has no
 * copy yet. Devices looked at and refused go back into the heap. */
static int32_t choose(struct heap *h, struct placement *out, uint32_t expert, uint32_t n_nodes,
                      const uint8_t *node_has, uint32_t *scratch)
{
    uint32_t n_back = 0, per_node = out->n_devices / n_nodes;
    int32_t  best = -1;
    while (h->n) {
        uint32_t g = heap_pop(h);
        scratch[n_back++] = g;
        if (placement_find(out, g, expert) >= 0)
            continue;
        if (best < 0)
            best = (int32_t)g;
        if (!node_has[g / per_node]) {
            best = (int32_t)g;
            break;
        }
        if (n_nodes == 1 || n_back > per_node + 4)
            break;
    }
    for (uint32_t i = 0; i < n_back; i++)
        if ((int32_t)scratch[i] != best)
            heap_push(h, scratch[i]);
    return best;
}

void pack_place(const double *load, const uint32_t *copies, const double *speed, uint32_t n_nodes,
                struct placement *out)
{
    struct item *item = xcalloc(out->n_experts, sizeof *item);
    uint32_t *used = xcalloc(out->n_devices, sizeof *used);
    uint32_t *scratch = xcalloc(out->n_devices, sizeof *scratch);
    uint8_t *node_has = xcalloc(n_nodes, sizeof *node_has);
    struct heap h;
    for (uint32_t e = 0; e < out->n_experts; e++)
        item[e] = (struct item){ falling_key(load[e] / copies[e]), e };
    sort_items(item, out->n_experts);
    for (uint32_t s = 0; s < placement_n_total(out); s++)
        out->expert[s] = PLACEMENT_EMPTY;
    heap_init(&h, out->n_devices);
    for (uint32_t i = 0; i < out->n_experts; i++) {
        double share = load[item[i].expert] / copies[item[i].expert];
        for (uint32_t n = 0; n < n_nodes; n++)
            node_has[n] = 0;
        /* A first copy always finds room, because all copies together fit; a further one may
         * find none on a device that does not hold the expert, and is left out. */
        for (uint32_t c = 0; c < copies[item[i].expert]; c++) {
            int32_t g = choose(&h, out, item[i].expert, n_nodes, node_has, scratch);
            if (g < 0)
                break;
            out->expert[(uint32_t)g * out->n_slots + used[g]++] = (int32_t)item[i].expert;
            node_has[(uint32_t)g / (out->n_devices / n_nodes)] = 1;
            h.key[g] += share / (speed ? speed[g] : 1);
            if (used[g] < out->n_slots)
                heap_push(&h, (uint32_t)g);
        }
    }
    heap_fini(&h);
    free(node_has);
    free(scratch);
    free(used);
    free(item);
    placement_share_evenly(out);
    placement_keep_homes(out, NULL);
}
