/* pinned.c - pages that the device may know; where its memory is the host's, they are its own */
#include "worker/pinned.h"

#include <stdlib.h>
#include <string.h>

#define PAGE_BYTES ((size_t)4096)

void *pinned_alloc(struct device *dev, size_t n_bytes)
{
    if (dev->is_host)
        return dev->ops->alloc(dev, n_bytes);
    if (n_bytes > SIZE_MAX - PAGE_BYTES)
        return NULL;
    size_t whole = (n_bytes / PAGE_BYTES + 1) * PAGE_BYTES;
    void *p = aligned_alloc(PAGE_BYTES, whole);
    if (!p)
        return NULL;
    memset(p, 0, whole);
    dev->ops->pin(dev, p, whole);
    return p;
}

void pinned_free(struct device *dev, void *p)
{
    if (!p)
        return;
    if (dev->is_host) {
        dev->ops->free(dev, p);
        return;
    }
    dev->ops->unpin(dev, p);
    free(p);
}
