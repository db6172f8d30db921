/* split.c - the shares of an expert's copies that make the heaviest device lightest
 *
 * A good start by filling each copied expert's copies to one level (a few sweeps), then exact: for
 * a target T, excess of devices above T travels along copies to devices below it. Where none can
 * leave, the devices reached from the overloaded ones form a set whose load is locked in; its
 * mean is a lower bound on the answer and becomes the next T. Ends at the optimum, because that
 * bound is then reached. Only experts with several copies matter, and they are few. */
#include "common/split.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define SWEEPS 6
#define TINY   1e-11 /* of the mean device load: below is rounding */

struct copied {
    uint32_t expert, first, n; /* its copies are copy[first .. first + n) */
};

struct split {
    uint32_t n_experts, n_devices, n_slots, n_copied;
    double  *speed;         /* (n_devices) */
    double   speed_sum;
    uint32_t *single;       /* (n_experts) the device of an expert with one copy, else n_devices */
    uint32_t *single_slot;  /* (n_experts) */
    struct copied *copied;  /* (n_copied) */
    uint32_t *copy_slot, *copy_device, *copy_owner; /* (n_copies); owner: index into copied */
    uint32_t *at, *at_first; /* copies on a device: at[at_first[g] .. at_first[g + 1]) */
    double   *part;         /* (n_copies) tokens the copy serves */
    double   *device_load;  /* (n_devices) */
    uint32_t *queue, *via_copy, *from_copy; /* (n_devices) breadth-first search */
    uint32_t *sink;         /* (n_devices) reached with room */
    uint8_t  *seen;         /* (n_devices) */
    uint8_t  *is_open;      /* (n_copied) its copies were reached */
};

static void index_copies(struct split *s, const struct placement *p)
{
    uint32_t *n = xcalloc(p->n_experts, sizeof *n), *where = xcalloc(p->n_experts, sizeof *where);
    uint32_t n_copies = 0;
    for (uint32_t i = 0; i < placement_n_total(p); i++)
        if (p->expert[i] != PLACEMENT_EMPTY)
            n[p->expert[i]]++;
    for (uint32_t e = 0; e < p->n_experts; e++) {
        assert(n[e] > 0);
        s->single[e] = s->n_devices;
        if (n[e] == 1)
            continue;
        s->copied[s->n_copied++] = (struct copied){ .expert = e, .first = n_copies, .n = n[e] };
        where[e] = n_copies;
        n_copies += n[e];
    }
    s->copy_slot = xcalloc(n_copies, sizeof *s->copy_slot);
    s->copy_device = xcalloc(n_copies, sizeof *s->copy_device);
    s->copy_owner = xcalloc(n_copies, sizeof *s->copy_owner);
    s->part = xcalloc(n_copies, sizeof *s->part);
    s->at = xcalloc(n_copies, sizeof *s->at);
    for (uint32_t i = 0; i < s->n_copied; i++)
        for (uint32_t c = 0; c < s->copied[i].n; c++)
            s->copy_owner[s->copied[i].first + c] = i;
    uint32_t n_at = 0;
    for (uint32_t i = 0; i < placement_n_total(p); i++) {
        uint32_t g = i / p->n_slots;
        if (i % p->n_slots == 0)
            s->at_first[g] = n_at;
        int32_t e = p->expert[i];
        if (e == PLACEMENT_EMPTY)
            continue;
        if (n[e] == 1) {
            s->single[e] = g;
            s->single_slot[e] = i;
            continue;
        }
        uint32_t c = where[e]++;
        s->copy_slot[c] = i;
        s->copy_device[c] = g;
        s->at[n_at++] = c;
    }
    s->at_first[p->n_devices] = n_at;
    free(where);
    free(n);
}

struct split *split_create(const struct placement *p, const double *speed)
{
    struct split *s = xcalloc(1, sizeof *s);
    s->n_experts = p->n_experts;
    s->n_devices = p->n_devices;
    s->n_slots = p->n_slots;
    s->speed = xcalloc(p->n_devices, sizeof *s->speed);
    split_set_speed(s, speed);
    s->single = xcalloc(p->n_experts, sizeof *s->single);
    s->single_slot = xcalloc(p->n_experts, sizeof *s->single_slot);
    s->copied = xcalloc(p->n_experts, sizeof *s->copied);
    s->at_first = xcalloc(p->n_devices + 1, sizeof *s->at_first);
    s->device_load = xcalloc(p->n_devices, sizeof *s->device_load);
    s->queue = xcalloc(p->n_devices, sizeof *s->queue);
    s->via_copy = xcalloc(p->n_devices, sizeof *s->via_copy);
    s->from_copy = xcalloc(p->n_devices, sizeof *s->from_copy);
    s->sink = xcalloc(p->n_devices, sizeof *s->sink);
    s->seen = xcalloc(p->n_devices, sizeof *s->seen);
    s->is_open = xcalloc(p->n_experts, sizeof *s->is_open);
    index_copies(s, p);
    return s;
}

void split_set_speed(struct split *s, const double *speed)
{
    s->speed_sum = 0;
    for (uint32_t g = 0; g < s->n_devices; g++) {
        s->speed[g] = speed ? speed[g] : 1;
        s->speed_sum += s->speed[g];
    }
}

void split_destroy(struct split *s)
{
    if (!s)
        return;
    void *parts[] = { s->speed, s->single, s->single_slot, s->copied, s->copy_slot,
                      s->copy_device, s->copy_owner, s->at, s->at_first, s->part, s->device_load,
                      s->queue, s->via_copy, s->from_copy, s->sink, s->seen, s->is_open };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    free(s);
}

/* Fills the copies of one expert to one level, the rest of their devices' load being given. */
static void fill(struct split *s, const struct copied *k, double load)
{
    const uint32_t *device = s->copy_device + k->first;
    double *part = s->part + k->first;
    for (uint32_t c = 0; c < k->n; c++)
        s->device_load[device[c]] -= part[c];
    /* Raise the level: start with all copies, drop those that stand above it already. */
    double level = 0;
    uint32_t n_used = k->n, n_before;
    for (uint32_t c = 0; c < k->n; c++)
        part[c] = 1;
    do {
        double sum = load, speed = 0;
        n_before = n_used;
        for (uint32_t c = 0; c < k->n; c++)
            if (part[c] > 0) {
                sum += s->device_load[device[c]];
                speed += s->speed[device[c]];
            }
        level = sum / speed;
        n_used = 0;
        for (uint32_t c = 0; c < k->n; c++) {
            if (part[c] > 0 && s->device_load[device[c]] >= level * s->speed[device[c]])
                part[c] = 0;
            n_used += part[c] > 0;
        }
    } while (n_used && n_used < n_before);
    double left = load;
    uint32_t last = 0;
    for (uint32_t c = 0; c < k->n; c++) {
        if (part[c] > 0) {
            part[c] = level * s->speed[device[c]] - s->device_load[device[c]];
            last = c;
        }
        left -= part[c];
    }
    part[last] = fmax(part[last] + left, 0); /* what rounding left; all of it where load is 0 */
    for (uint32_t c = 0; c < k->n; c++)
        s->device_load[device[c]] += part[c];
}

/* Reaches devices from all above the target and lists those below it, which are not passed through,
 * in s->sink; the others are then in s->seen. Returns how many are listed. A step goes from device
 * a over a copy with rows to another copy. */
static uint32_t reach(struct split *s, double target, double tiny)
{
    uint32_t n = 0, n_sinks = 0;
    memset(s->seen, 0, s->n_devices);
    memset(s->is_open, 0, s->n_copied);
    for (uint32_t g = 0; g < s->n_devices; g++)
        if (s->device_load[g] > target * s->speed[g] + tiny) {
            s->seen[g] = 1;
            s->via_copy[g] = UINT32_MAX;
            s->queue[n++] = g;
        }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t a = s->queue[i];
        for (uint32_t j = s->at_first[a]; j < s->at_first[a + 1]; j++) {
            uint32_t c = s->at[j], owner = s->copy_owner[c];
            if (s->part[c] <= tiny * 1e-3 || s->is_open[owner])
                continue;
            s->is_open[owner] = 1; /* all its copies are reached by this one */
            const struct copied *k = &s->copied[owner];
            for (uint32_t d = k->first; d < k->first + k->n; d++) {
                uint32_t b = s->copy_device[d];
                if (s->seen[b])
                    continue;
                s->seen[b] = 1;
                s->via_copy[b] = d;
                s->from_copy[b] = c;
                if (s->device_load[b] < target * s->speed[b] - tiny * 1e-3)
                    s->sink[n_sinks++] = b;
                else
                    s->queue[n++] = b;
            }
        }
    }
    return n_sinks;
}

/* Moves as much as the path to device b carries, which is nothing where the pushes before it have
 * used it up. */
static void push(struct split *s, uint32_t b, double target)
{
    double amount = target * s->speed[b] - s->device_load[b];
    uint32_t g = b;
    for (; s->via_copy[g] != UINT32_MAX; g = s->copy_device[s->from_copy[g]])
        amount = fmin(amount, s->part[s->from_copy[g]]);
    amount = fmin(amount, s->device_load[g] - target * s->speed[g]);
    if (amount <= 0)
        return;
    s->device_load[g] -= amount;
    s->device_load[b] += amount;
    for (g = b; s->via_copy[g] != UINT32_MAX; g = s->copy_device[s->from_copy[g]]) {
        s->part[s->via_copy[g]] += amount;
        s->part[s->from_copy[g]] -= amount;
    }
}

static double heaviest(const struct split *s)
{
    double max = 0;
    for (uint32_t g = 0; g < s->n_devices; g++)
        max = fmax(max, s->device_load[g] / s->speed[g]);
    return max;
}

static void perfect(struct split *s, double mean)
{
    double target = mean, tiny = TINY * mean;
    /* Each push empties a device's excess, fills one up, uses up a copy or raises the target; the
     * bound only guards against rounding that goes round in circles. */
    for (uint32_t round = 0; round < 64 + 16 * s->n_devices; round++) {
        if (heaviest(s) <= target + tiny)
            return;
        uint32_t n_sinks = reach(s, target, tiny);
        for (uint32_t i = 0; i < n_sinks; i++)
            push(s, s->sink[i], target);
        if (n_sinks)
            continue;
        double locked = 0, speed = 0;
        for (uint32_t g = 0; g < s->n_devices; g++)
            if (s->seen[g]) {
                locked += s->device_load[g];
                speed += s->speed[g];
            }
        if (locked / speed <= target)
            return;
        target = locked / speed;
    }
}

double split_solve(struct split *s, const double *load, double *out_share)
{
    double sum = 0;
    memset(s->device_load, 0, s->n_devices * sizeof *s->device_load);
    for (uint32_t e = 0; e < s->n_experts; e++) {
        sum += load[e];
        if (s->single[e] < s->n_devices)
            s->device_load[s->single[e]] += load[e];
    }
    for (uint32_t i = 0; i < s->n_copied; i++) {
        const struct copied *k = &s->copied[i];
        for (uint32_t c = k->first; c < k->first + k->n; c++) {
            s->part[c] = load[k->expert] / k->n;
            s->device_load[s->copy_device[c]] += s->part[c];
        }
    }
    for (uint32_t sweep = 0; sweep < SWEEPS; sweep++)
        for (uint32_t i = 0; i < s->n_copied; i++)
            fill(s, &s->copied[i], load[s->copied[i].expert]);
    if (sum > 0)
        perfect(s, sum / s->speed_sum);
    if (out_share) {
        memset(out_share, 0, (size_t)s->n_devices * s->n_slots * sizeof *out_share);
        for (uint32_t e = 0; e < s->n_experts; e++)
            if (s->single[e] < s->n_devices)
                out_share[s->single_slot[e]] = 1;
        for (uint32_t i = 0; i < s->n_copied; i++) {
            const struct copied *k = &s->copied[i];
            double total = 0;
            for (uint32_t c = k->first; c < k->first + k->n; c++)
                total += s->part[c] = fmax(s->part[c], 0);
            for (uint32_t c = k->first; c < k->first + k->n; c++)
                out_share[s->copy_slot[c]] = total > 0 ? s->part[c] / total : 1.0 / k->n;
        }
    }
    return heaviest(s);
}

const double *split_device_load(const struct split *s)
{
    return s->device_load;
}

void split_locked(struct split *s, uint8_t *out)
{
    double max = heaviest(s);
    reach(s, max * (1 - 1e-6), max * 1e-9);
    memcpy(out, s->seen, s->n_devices);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Whole rows per copy: floors, then the rest to the largest remainders, the first of equals. */
static void round_parts(uint32_t n_copies, const double *share, uint64_t total, uint64_t *out)
{
    uint64_t given = 0;
    for (uint32_t c = 0; c < n_copies; c++) {
        out[c] = (uint64_t)(share[c] * (double)total);
        if (out[c] > total - given)
            out[c] = total - given;
        given += out[c];
    }
    while (given < total) {
        uint32_t best = 0;
        double most = -INFINITY;
        for (uint32_t c = 0; c < n_copies; c++)
            if (share[c] * (double)total - (double)out[c] > most) {
                most = share[c] * (double)total - (double)out[c];
                best = c;
            }
        out[best]++;
        given++;
    }
}

void split_rows(uint32_t n_devices, uint32_t devices_per_node, const uint32_t *n_rows,
                uint32_t n_copies, const uint32_t *device, const double *share, uint32_t *out)
{
    uint64_t total = 0, *room = xcalloc(n_copies, sizeof *room);
    uint32_t *left = xmemdup(n_rows, n_devices * sizeof *left);
    for (uint32_t g = 0; g < n_devices; g++)
        total += n_rows[g];
    round_parts(n_copies, share, total, room);
    memset(out, 0, (size_t)n_devices * n_copies * sizeof *out);
    for (int distance = 0; distance < 3; distance++)
        for (uint32_t g = 0; g < n_devices; g++)
            for (uint32_t c = 0; c < n_copies && left[g]; c++) {
                bool near = distance == 2 || (distance == 1 && devices_per_node &&
                            g / devices_per_node == device[c] / devices_per_node) ||
                            g == device[c];
                if (!near || !room[c])
                    continue;
                uint32_t n = left[g] < room[c] ? left[g] : (uint32_t)room[c];
                out[(size_t)g * n_copies + c] += n;
                left[g] -= n;
                room[c] -= n;
            }
    free(left);
    free(room);
}
