/* positions.h - the device's table of rotary angles, as long as the longest document so far */
#ifndef WORKER_POSITIONS_H
#define WORKER_POSITIONS_H

#include "common/err.h"
#include "common/model_spec.h"
#include "kernels/device.h"

struct positions {
    float  *table; /* (n, rotary dim) as device.h's rotary reads it; NULL: nothing turns */
    int64_t n;
};

/* Makes the table hold positions 0 .. n - 1 of a model that has rotary attention. */
int  positions_grow(struct positions *p, const struct model_spec *m, struct device *dev, int64_t n,
                    struct err *err);
void positions_fini(struct positions *p, struct device *dev);

#endif
