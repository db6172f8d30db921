/* packed_experts.h - the experts' linear over packed weights, decoded in the product or before it
 *
 * The ops grouped_linear_packed decode weights while they multiply, which on a GPU takes several
 * times as long as multiplying. Where experts have many rows it is faster to unpack the weights of
 * as many as there is room for, to multiply as usual, and to go on to the next ones. */
#ifndef KERNELS_PACKED_EXPERTS_H
#define KERNELS_PACKED_EXPERTS_H

#include "kernels/device.h"

enum packed_way { PACKED_BY_COST, PACKED_DECODED, PACKED_UNPACKED };

struct packed_experts {
    const uint8_t *const *w; /* (n_groups), each (out, in), as grouped_linear_packed takes them */
    enum packing packing;
    const int64_t *offsets; /* (n_groups + 1) */
    int32_t n_groups;
    int64_t in, out;
    enum packed_way way;
    elem   *room; /* scratch of room_numbers, at a multiple of 16 bytes; NULL: none are unpacked */
    int64_t room_numbers;
};

/* Whether weights are unpacked: where packing_pays_to_unpack, unless told otherwise. */
bool packed_experts_unpacks(const struct device *dev, const struct packed_experts *e);

/* y (n, out) = x (n, in) w^T, and dx = dy w + beta dx, of each group's rows. */
void packed_experts_forward(struct device *dev, elem *y, const elem *x,
                            const struct packed_experts *e);
void packed_experts_dx(struct device *dev, elem *dx, const elem *dy,
                       const struct packed_experts *e, float beta);

#endif
