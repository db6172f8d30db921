/* pinned.h - host memory that a device's copies pass through */
#ifndef WORKER_PINNED_H
#define WORKER_PINNED_H

#include "kernels/device.h"

/* Zeroed, its pages taken at once. NULL when there is no more. Ended with pinned_free, NULL is
 * fine. */
void *pinned_alloc(struct device *dev, size_t n_bytes);
void  pinned_free(struct device *dev, void *p);

#endif
