/* recompute.h - what a layer keeps of its forward for its backward, and what is made again there
 *
 * off: everything is kept. full: of each layer only its input is kept, and its forward runs again.
 * selective goes by module, by one rule: what a product over the hidden width, a recurrence or
 * attention made is kept, as that is dear to make; what is narrow or goes element by element is
 * made again from it; and of a feed-forward nothing of its inner width is kept.
 *
 *   module     kept                                      made again
 *   residual   the sums before and after the attention   mixes, norms
 *   KDA        q, k, v before their convolutions; the    convolutions, norms, decay, the
 *              output, its gate, beta, chunks' states    low-rank products, the gated output
 *   MLA        both latents before their norms, the      norms, the expansions from latents,
 *              core's output (or what was chosen), gate  the gated output
 *   MLP        -                                         all: gate, up, hidden
 *   MoE        scores and choices, the latent, what      the sum over a token's experts, the
 *              came back for each choice                 shared experts, and the experts' side:
 *                                                        rows come again, gate and up products
 *
 * The experts' side, where tokens are of other ranks, too, is made again piece by piece, so that a
 * rank holds the rows of one piece, however tokens are routed (memory_piece_rows). With full, what
 * came back was made again before, so that gate and up are computed three times in all; but twice
 * where all tokens go in one piece, whose rows stay.
 *
 * What is made again is the same bits, and goes into no statistics. The layers' carve functions
 * (worker/) and memory_activations.c follow this page. */
#ifndef COMMON_RECOMPUTE_H
#define COMMON_RECOMPUTE_H

#include "common/model_spec.h"

enum recompute { RECOMPUTE_OFF, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL, RECOMPUTE_WAYS };

/* "off", "selective", "full": the words of parallel.activation_checkpointing. */
extern const char *const recompute_words[RECOMPUTE_WAYS];

/* An unknown word is off. */
enum recompute recompute_of(const char *word);

/* Multiplications and additions of products that a backward makes again for one token: what comes
 * on top of model_spec_flops. by_piece: tokens go to experts in several pieces. */
double recompute_flops(const struct model_spec *m, enum recompute how, bool by_piece);

#endif
