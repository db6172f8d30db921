/* same_build.h - the ranks of an attempt must be of one build
 *
 * Those of another one would cut moves into other stages, add up in another order or lay messages
 * out otherwise, and find out late or never. So it is the first thing that they tell each other. */
#ifndef WORKER_SAME_BUILD_H
#define WORKER_SAME_BUILD_H

#include "proto/ballast.pb-c.h"
#include "worker/coll.h"

#define BUILD_TEXT_BYTES 60

struct build_id {
    char     text[BUILD_TEXT_BYTES]; /* version and commit, for people */
    uint32_t sum; /* of the numbers that ranks must agree on, whatever the text says */
};

/* Of this program. */
struct build_id build_id_own(void);

/* -EPROTO on all ranks where one has another build than most: the first such rank, its worker of
 * the gang (in rank order), both builds, and what to do. Collective over the world. */
int same_build(struct coll *c, const struct build_id *mine, Ballast__GangMember *const *gang,
               struct err *err);

#endif
