/* phases.h - what a step's time goes to; kinds of spans.h */
#ifndef WORKER_PHASES_H
#define WORKER_PHASES_H

#include <stdbool.h>

/* Of compute, by kind of layer; then what compute stands still for: gathers of weights, dispatch of
 * tokens, reductions of gradients, words that all agree on; then the rest. These make up a step.
 * Then what would have been waited for, too, had it not been started early: it went on, or other
 * ranks were waited for, while this one computed. */
enum phase {
    PHASE_DATA, PHASE_EMBEDDING, PHASE_KDA, PHASE_MLA, PHASE_MLP, PHASE_MOE, PHASE_EXPERTS,
    PHASE_HEAD, PHASE_OTHER, PHASE_GATHER, PHASE_DISPATCH, PHASE_REDUCE, PHASE_AGREE,
    PHASE_OPTIMIZER, PHASE_MIGRATION, PHASE_VALIDATION, PHASE_CHECKPOINT,
    PHASE_GATHER_HIDDEN, PHASE_DISPATCH_HIDDEN, PHASE_REDUCE_HIDDEN, PHASES
};
extern const char *const phase_names[PHASES];

static inline bool phase_is_hidden(enum phase p)
{
    return p >= PHASE_GATHER_HIDDEN;
}

#endif
