/* layout.h - the groups of ranks of one job, a pure function of its degrees
 *
 * rank r: dense parameters are cut over fsdp consecutive ranks and replicated over the world /
 * fsdp ranks with the same place in their group; experts lie over ep consecutive ranks; the
 * world / ep ranks at the same place in their expert groups would hold the same experts and cut
 * each again over expert_shard of them (consecutive among those), replicated over the rest. */
#ifndef COMMON_LAYOUT_H
#define COMMON_LAYOUT_H

#include "common/err.h"
#include "common/types.h"

struct layout_degrees {
    uint32_t world, fsdp, ep;
    uint32_t expert_shard; /* 0: auto, world / ep */
};

struct rank_group {
    uint32_t *ranks; /* ascending */
    uint32_t  n_ranks, me;
};

struct layout {
    struct layout_degrees degrees; /* auto resolved */
    uint32_t rank;
    struct rank_group fsdp;           /* the dense slices of one replica */
    struct rank_group fsdp_replica;   /* ranks that own the same dense slice */
    struct rank_group ep;             /* who serves which experts */
    struct rank_group expert_shard;   /* who shares one expert's slices */
    struct rank_group expert_replica; /* ranks that own the same slice of the same experts */
};

/* "1, 2, 4": the degrees that divide both a and b (0: a alone). Of more than a few only the nearest
 * to `wanted` on both sides: "..., 32, 64, ...". */
#define LAYOUT_DEGREES_TEXT_MAX 128
void layout_degrees_text(uint32_t a, uint32_t b, uint32_t wanted,
                         char out[LAYOUT_DEGREES_TEXT_MAX]);

/* Every degree must divide what it cuts; the error names the valid values. n_experts: ep must
 * divide it. Gives *out, ended with layout_fini. */
int  layout_init(struct layout_degrees degrees, uint32_t n_experts, uint32_t rank,
                 struct layout *out, struct err *err);
void layout_fini(struct layout *l);

#endif
