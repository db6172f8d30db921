/* decoder_cut.h - a decoder layer over a long batch, in segments
 *
 * All of a layer's work goes a segment at a time: norms, attention, feed-forward, and in the
 * backward each segment's forward once more. So what a layer holds at once is of one segment, and
 * between forward and backward only what its segments share: the state that KDA hands on, the
 * narrow keys of attention and what its indexer chose. All ranks have as many segments. */
#ifndef WORKER_DECODER_CUT_H
#define WORKER_DECODER_CUT_H

#include "worker/decoder.h"
#include "worker/segments.h"

struct decoder_cut {
    struct activations_mark mark; /* where it begins */
    struct kda_cut kda;
    struct mla_saved mla;
};

/* What the segments of p share; stays until the backward. */
void decoder_cut_carve(struct pass *p, uint32_t l, struct decoder_cut *out);

/* As decoder_forward and decoder_backward, of a pass that has segments. Collective. */
int decoder_cut_forward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                        struct residuals *r, elem *out, struct decoder_cut *cut, struct err *err);
int decoder_cut_backward(struct pass *p, struct moe *e, uint32_t l, const struct unit_view *u,
                         struct residuals *r, struct decoder_cut *cut, struct err *err);

/* While counting: what both take beside what is carved, released again. */
void decoder_cut_count(struct pass *p, const struct moe *e, uint32_t l, struct decoder_cut *cut);

#endif
