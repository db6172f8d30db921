/* search_slots.c - which expert is in which slot, while a search changes it */
#include "coordinator/search_slots.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

void search_slots_init(struct search_slots *s, const struct placement *p)
{
    *s = (struct search_slots){ .n_total = placement_n_total(p), .per_device = p->n_slots,
                         .n_words = (p->n_experts + 63) / 64 };
    s->expert = xcalloc(s->n_total, sizeof *s->expert);
    s->next = xcalloc(s->n_total, sizeof *s->next);
    s->head = xcalloc(p->n_experts, sizeof *s->head);
    s->n_copies = xcalloc(p->n_experts, sizeof *s->n_copies);
    s->held = xcalloc((size_t)p->n_devices * s->n_words, sizeof *s->held);
    s->is_fixed = xcalloc(s->n_total, sizeof *s->is_fixed);
}

void search_slots_fini(struct search_slots *s)
{
    free(s->expert);
    free(s->next);
    free(s->head);
    free(s->n_copies);
    free(s->held);
    free(s->is_fixed);
}

void search_slots_start(struct search_slots *s, const struct placement *p,
                        const struct placement *in_force, bool keep_homes)
{
    memset(s->n_copies, 0, p->n_experts * sizeof *s->n_copies);
    memset(s->held, 0, (size_t)p->n_devices * s->n_words * sizeof *s->held);
    memset(s->is_fixed, 0, s->n_total * sizeof *s->is_fixed);
    memset(s->head, 0xff, p->n_experts * sizeof *s->head); /* -1 */
    for (uint32_t c = 0; c < s->n_total; c++) {
        int32_t e = in_force->expert[c];
        if (e != PLACEMENT_EMPTY)
            s->held[(size_t)search_slots_device(s, c) * s->n_words + (uint32_t)e / 64] |=
                1ull << ((uint32_t)e % 64);
        s->expert[c] = PLACEMENT_EMPTY;
        if (p->expert[c] != PLACEMENT_EMPTY)
            search_slots_link(s, c, p->expert[c]);
    }
    for (uint32_t e = 0; e < p->n_experts && keep_homes; e++)
        s->is_fixed[p->home[e]] = true;
}
