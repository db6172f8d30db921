/* rate.h - how fast a device multiplies */
#ifndef WORKER_RATE_H
#define WORKER_RATE_H

#include "kernels/device.h"

/* Floating-point operations a second in a product of elements, the best of a few: what a model's
 * share is taken of. 0 where the device has no memory for one. Some milliseconds. */
double rate_measure(struct device *dev);

#endif
