/* eplb.h - the replicate-and-pack algorithm that others use, as a peer to measure against
 *
 * Written from its description: spare copies one by one to the expert with the most load per copy;
 * then, heaviest first, on the device with the least load that has room; even shares; no memory of
 * the placement before. Two copies of an expert may meet on one device, which counts as one. */
#ifndef TESTS_EPLB_H
#define TESTS_EPLB_H

#include "common/placement.h"

/* out: a placement of this shape. Where two copies met on a device, the second slot is empty and
 * the first has both shares. */
void eplb_place(const double *load, struct placement *out);

#endif
