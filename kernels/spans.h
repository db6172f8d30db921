/* spans.h - where a device's time goes: spans of kinds, one within another
 *
 * A span begins and ends with a mark in the device's order of ops, so that measuring waits for
 * nothing; marks are read when the host has waited anyway. Every moment belongs to the innermost
 * span that is open: what a layer spends in a collective is the collective's, and what the device
 * stands still for is told apart from what goes on beside its ops. */
#ifndef KERNELS_SPANS_H
#define KERNELS_SPANS_H

#include "kernels/device.h"

#define SPAN_KINDS_MAX 32

struct spans;

/* One span as a trace shows it; times of clock_wall_ns. */
struct span {
    uint32_t kind;
    int32_t  layer; /* -1: none */
    int64_t  begin_ns, duration_ns;
};
typedef void span_fn(void *user, const struct span *span);

/* Measures dev from now on: sets dev->spans, which whoever opened dev closes before it. */
void spans_open(struct device *dev);
void spans_close(struct device *dev);

/* All four do nothing where the device is not measured. */
void spans_begin(struct device *dev, uint32_t kind, int32_t layer);
void spans_end(struct device *dev);
/* What went on beside the device's ops from begin_ns to end_ns of clock_now_ns, and is over: of a
 * kind of its own, as no moment is taken from another span. */
void spans_beside(struct device *dev, uint32_t kind, int32_t layer, uint64_t begin_ns,
                  uint64_t end_ns);
/* Reads the marks so far, once the device has come by the last one. Between passes, so that
 * they stay few. */
void spans_settle(struct device *dev);

/* Forgets all spans, also open ones, and begins anew. each is called for every span that ends,
 * inner ones first, when it is read; NULL: by nobody. */
void spans_reset(struct device *dev, span_fn *each, void *user);

/* Seconds of a kind since spans_reset, without the spans within; settles. 0 where the device is
 * not measured. */
double spans_seconds(struct device *dev, uint32_t kind);

#endif
