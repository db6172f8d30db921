/* phases.h - what a step's time goes to; kinds of spans.h */
#ifndef WORKER_PHASES_H
#define WORKER_PHASES_H

/* Of compute, by kind of layer; then what compute stands still for: gathers of weights, dispatch of
 * tokens, reductions of gradients, words that all agree on; then the rest. */
enum phase {
    PHASE_DATA, PHASE_EMBEDDING, PHASE_KDA, PHASE_MLA, PHASE_MLP, PHASE_MOE, PHASE_EXPERTS,
    PHASE_HEAD, PHASE_OTHER, PHASE_GATHER, PHASE_DISPATCH, PHASE_REDUCE, PHASE_AGREE,
    PHASE_OPTIMIZER, PHASE_MIGRATION, PHASE_VALIDATION, PHASE_CHECKPOINT, PHASES
};
extern const char *const phase_names[PHASES];

#endif
