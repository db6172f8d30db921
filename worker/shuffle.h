/* shuffle.h - random placements, for tests and for validation with moves */
#ifndef WORKER_SHUFFLE_H
#define WORKER_SHUFFLE_H

#include "worker/slots.h"

/* Every expert to a random slot, copies in about half of the slots that are left, homes at random
 * copies, all shares even; the next epoch. The same on all ranks for the same seed. */
void slots_shuffle(struct slots *s, uint64_t seed);

#endif
