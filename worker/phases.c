/* phases.c - the names of phases, in reports and traces */
#include "worker/phases.h"

const char *const phase_names[PHASES] = {
    [PHASE_DATA] = "data",             [PHASE_EMBEDDING] = "embedding",
    [PHASE_KDA] = "kda",               [PHASE_MLA] = "mla",
    [PHASE_MLP] = "mlp",               [PHASE_MOE] = "moe",
    [PHASE_EXPERTS] = "experts",       [PHASE_HEAD] = "head",
    [PHASE_OTHER] = "other",           [PHASE_GATHER] = "gather",
    [PHASE_DISPATCH] = "dispatch",     [PHASE_REDUCE] = "reduce",
    [PHASE_AGREE] = "agree",           [PHASE_OPTIMIZER] = "optimizer",
    [PHASE_MIGRATION] = "migration",   [PHASE_VALIDATION] = "validation",
    [PHASE_CHECKPOINT] = "checkpoint", [PHASE_GATHER_HIDDEN] = "gather_hidden",
    [PHASE_DISPATCH_HIDDEN] = "dispatch_hidden", [PHASE_REDUCE_HIDDEN] = "reduce_hidden",
};
