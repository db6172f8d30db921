/* run_nodes.c - which ranks of a gang are on the same node */
#include "worker/run_nodes.h"

#include <string.h>

static bool is_same(const Ballast__Start *s, uint32_t a, uint32_t b)
{
    return strcmp(s->gang[a]->node, s->gang[b]->node) == 0;
}

uint32_t run_node_ranks(const Ballast__Start *s, uint32_t rank)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_gang; i++)
        n += is_same(s, i, rank);
    return n;
}

uint32_t run_node_ranks_max(const Ballast__Start *s)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < s->n_gang; i++) {
        uint32_t here = run_node_ranks(s, i);
        most = here > most ? here : most;
    }
    return most;
}

uint32_t run_node_rows(const Ballast__Start *s, const struct rank_group *ep)
{
    uint32_t n = 1;
    while (n < ep->n_ranks && is_same(s, ep->ranks[n], ep->ranks[0]))
        n++;
    for (uint32_t i = 0; i < ep->n_ranks; i++)
        if (!is_same(s, ep->ranks[i], ep->ranks[i - i % n]))
            return 0;
    return n;
}

uint32_t run_find_nodes(const Ballast__Start *s, const struct rank_group *ep,
                        uint32_t *out_nodes)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < ep->n_ranks; i++) {
        out_nodes[i] = 0;
        while (!is_same(s, ep->ranks[out_nodes[i]], ep->ranks[i]))
            out_nodes[i]++;
        n += out_nodes[i] == i;
    }
    return n;
}
