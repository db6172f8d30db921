/* run_nodes.h - which ranks of a gang are on the same node */
#ifndef WORKER_RUN_NODES_H
#define WORKER_RUN_NODES_H

#include <stdbool.h>

#include "common/layout.h"
#include "proto/ballast.pb-c.h"

/* How many ranks are on the node of that one, itself among them; and the most on any node. */
uint32_t run_node_ranks(const Ballast__Start *s, uint32_t rank);
uint32_t run_node_ranks_max(const Ballast__Start *s);

/* How many ranks in a row are on one node, if that is the same all along the expert group; else
 * 0. */
uint32_t run_node_rows(const Ballast__Start *s, const struct rank_group *ep);

/* Of each rank of the expert group the first one on the same node, both by their places in the
 * group; returns how many nodes there are. */
uint32_t run_find_nodes(const Ballast__Start *s, const struct rank_group *ep,
                        uint32_t *out_nodes);

#endif
