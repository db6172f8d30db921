/* same_build.c - all ranks' builds, and the first one that most do not have */
#include "worker/same_build.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/mix.h"
#include "common/version.h"
#include "proto/wire.h"
#include "worker/shard_state.h"

#define WORDS (sizeof(struct build_id) / sizeof(int32_t))
_Static_assert(sizeof(struct build_id) % sizeof(int32_t) == 0, "travels as whole words");

struct build_id build_id_own(void)
{
    /* A commit does not tell what was changed since: these are what moves, plans and messages are
     * cut by. */
    static const uint64_t numbers[] = {
        WIRE_MAJOR, RANKS_MAX, LAYERS_MAX, EXPERTS_MAX, STAGES_MAX, SLOT_PARTS, DATA_KEY_BYTES,
    };
    struct build_id id = {{0}, 0};
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        sum = mix_at(sum ^ numbers[i], i);
    id.sum = (uint32_t)sum;
    snprintf(id.text, sizeof id.text, "%.20s (commit %.24s)", BALLAST_VERSION,
             BALLAST_COMMIT[0] ? BALLAST_COMMIT : "unknown");
    return id;
}

static bool is_same(const struct build_id *a, const struct build_id *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* What more than half of them have, or else what one of them has (Boyer and Moore 1981). */
static uint32_t most_have(const struct build_id *id, uint32_t n)
{
    uint32_t candidate = 0, lead = 0;
    for (uint32_t r = 0; r < n; r++) {
        if (lead == 0)
            candidate = r;
        lead = is_same(&id[r], &id[candidate]) ? lead + 1 : lead - 1;
    }
    return candidate;
}

static int compare(struct build_id *id, uint32_t world, Ballast__GangMember *const *gang,
                   struct err *err)
{
    uint32_t most = 0, r = 0, some = most_have(id, world);
    for (uint32_t k = 0; k < world; k++)
        id[k].text[BUILD_TEXT_BYTES - 1] = '\0';
    while (!is_same(&id[most], &id[some]))
        most++;
    while (r < world && is_same(&id[r], &id[most]))
        r++;
    if (r == world)
        return 0;
    bool is_sum = strcmp(id[r].text, id[most].text) == 0;
    return err_set(err, -EPROTO, "rank %u on worker %s is Ballast %s%s, expected %s as rank %u on "
                   "worker %s: all workers of a job must be of one build; install the same on "
                   "them, or keep jobs off this one with 'ballast worker drain %s'", r,
                   gang[r]->worker, id[r].text, is_sum ? " with other limits" : "", id[most].text,
                   most, gang[most]->worker, gang[r]->worker);
}

int same_build(struct coll *c, const struct build_id *mine, Ballast__GangMember *const *gang,
               struct err *err)
{
    struct build_id *all = xcalloc(c->world, sizeof *all);
    int32_t words[WORDS];
    memcpy(words, mine, sizeof words);
    c->layer = -1;
    int rc = c->ops->all_gather_i32(c, &c->world_group, words, WORDS, (int32_t *)(void *)all, err);
    if (rc == 0)
        rc = compare(all, c->world, gang, err);
    free(all);
    return rc;
}
