/* rounds.h - which moves can go at the same time: in a round a device sends one and receives one */
#ifndef WORKER_ROUNDS_H
#define WORKER_ROUNDS_H

#include "common/types.h"

#define ROUND_NONE UINT32_MAX

/* from, to: (n_moves) devices below n_devices. out_round: (n_moves), ROUND_NONE for a move that
 * stays on its device. Returns the number of rounds, which is the most moves that one device sends
 * or receives: no order has fewer. */
uint32_t rounds_plan(uint32_t n_devices, uint32_t n_moves, const uint32_t *from,
                     const uint32_t *to, uint32_t *out_round);

#endif
