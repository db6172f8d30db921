/* plan.h - what must travel to get from one placement to another, in which order, at what price */
#ifndef COORDINATOR_PLAN_H
#define COORDINATOR_PLAN_H

#include "common/placement.h"

struct plan_costs {
    uint64_t weight_bytes;        /* of one expert on its devices */
    uint64_t state_bytes;         /* fp32 master and moments; go where the home goes */
    double   link_bytes_s;        /* between two devices of a node, each way */
    double   node_link_bytes_s;   /* between devices of two nodes */
};

struct plan_move {
    uint32_t expert;
    uint32_t from, to;      /* slots */
    bool     with_state;    /* the home goes along */
    uint32_t round;         /* in a round a device sends one and receives one */
    uint64_t n_bytes;
};

struct plan {
    struct plan_move *move;
    uint32_t n_moves, n_rounds;
    uint64_t n_bytes;
    double   seconds; /* the rounds one after the other, each as long as its longest move */
};

/* Gives what differs, ended with plan_fini; no moves where nothing does. Both placements are valid
 * and of one shape. As few rounds as any order has. */
void plan_init(struct plan *p, const struct placement *from, const struct placement *to,
               uint32_t n_nodes, const struct plan_costs *costs);
void plan_fini(struct plan *p);

/* The same without the moves themselves, sooner: their number, rounds, bytes, and the least seconds
 * that rounds of them can take. */
void plan_price(struct plan *p, const struct placement *from, const struct placement *to,
                uint32_t n_nodes, const struct plan_costs *costs);

/* Renames devices of p within nodes, so that most experts stay where `before` has them; then
 * slots and homes. Worth the same where devices are equally fast. Shares
 * become even. */
void plan_align(struct placement *p, const struct placement *before, uint32_t n_nodes);

#endif
