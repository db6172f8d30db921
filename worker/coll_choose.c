/* coll_choose.c - what the ranks' devices are decides how tensors travel
 *
 * NCCL cannot have two ranks on one GPU, and a rank without one not at all. All ranks see what all
 * have and wish, so all decide alike. */
#include "worker/coll_choose.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/version.h"
#if BALLAST_HAS_CUDA
#include "worker/coll_gpu.h"
#endif

/* What a rank tells the others; int32, as words travel. */
struct told {
    int32_t is_gpu, wish;
    uint8_t uuid[16];
};
#define TOLD_WORDS (sizeof(struct told) / sizeof(int32_t))

int coll_wish_parse(const char *word, enum coll_wish *out_wish, struct err *err)
{
    if (!word || !word[0] || !strcmp(word, "auto"))
        *out_wish = COLL_WISH_AUTO;
    else if (!strcmp(word, "host"))
        *out_wish = COLL_WISH_HOST;
    else if (!strcmp(word, "nccl"))
        *out_wish = COLL_WISH_NCCL;
    else
        return err_set(err, -EINVAL, "collectives '%s': expected auto, host or nccl", word);
    return 0;
}

static bool is_wished(const struct told *all, uint32_t world, enum coll_wish wish)
{
    bool any = false;
    for (uint32_t i = 0; i < world; i++)
        any = any || all[i].wish == (int32_t)wish;
    return any;
}

/* False says what is in the way. */
static bool can_nccl(const struct told *all, uint32_t world, char *out_why)
{
    for (uint32_t i = 0; i < world; i++) {
        if (!all[i].is_gpu) {
            snprintf(out_why, COLL_SAID_BYTES, "rank %u computes on the cpu", i);
            return false;
        }
        for (uint32_t j = 0; j < i; j++)
            if (memcmp(all[i].uuid, all[j].uuid, sizeof all[i].uuid) == 0) {
                snprintf(out_why, COLL_SAID_BYTES, "ranks %u and %u share a GPU", j, i);
                return false;
            }
    }
    return true;
}

static int decide(const struct told *all, uint32_t world, bool *out_nccl, char *out_said,
                  struct err *err)
{
    char why[COLL_SAID_BYTES] = "";
    bool can = can_nccl(all, world, why), wished = is_wished(all, world, COLL_WISH_NCCL);
    if (is_wished(all, world, COLL_WISH_HOST)) {
        can = false;
        snprintf(why, sizeof why, "a worker's configuration says so");
    } else if (wished && !can) {
        return err_set(err, -EINVAL, "collectives: nccl needs a GPU for every rank, but %s; set "
                       "collectives to auto or host in the workers' configuration", why);
    } else if (!wished && world == 1) {
        can = false;
        snprintf(why, sizeof why, "there is one rank");
    }
    if (can)
        snprintf(out_said, COLL_SAID_BYTES, "NCCL over %u GPU%s", world, world > 1 ? "s" : "");
    else
        snprintf(out_said, COLL_SAID_BYTES, "host memory, %.70s", why);
    *out_nccl = can;
    return 0;
}

/* The groups that calls name, in the order of their ids. */
static int open_nccl(struct coll **io_coll, struct device *dev, const struct layout *l,
                     struct err *err)
{
#if BALLAST_HAS_CUDA
    const struct coll_group groups[] = {
        coll_group_of(&l->fsdp, COLL_FSDP), coll_group_of(&l->fsdp_replica, COLL_FSDP_REPLICA),
        coll_group_of(&l->ep, COLL_EP), coll_group_of(&l->expert_shard, COLL_EXPERT_SHARD),
        coll_group_of(&l->expert_replica, COLL_EXPERT_REPLICA),
    };
    return coll_gpu_open(*io_coll, dev, groups, sizeof groups / sizeof *groups, io_coll, err);
#else
    (void)io_coll, (void)dev, (void)l;
    return err_set(err, -ENOTSUP, "collectives: this build has no NCCL");
#endif
}

int coll_choose(struct coll **io_coll, struct device *dev, enum coll_wish wish,
                const struct layout *layout, char out_said[COLL_SAID_BYTES], struct err *err)
{
    struct coll *host = *io_coll;
    struct told mine = {.is_gpu = !dev->is_host, .wish = (int32_t)wish};
    struct told *all = xcalloc(host->world, sizeof *all);
    bool is_nccl = false;
    memcpy(mine.uuid, dev->uuid, sizeof mine.uuid);
    int rc = host->ops->all_gather_i32(host, &host->world_group, (const int32_t *)&mine, TOLD_WORDS,
                                       (int32_t *)all, err);
    if (rc == 0)
        rc = decide(all, host->world, &is_nccl, out_said, err);
    free(all);
    host->dev = dev;
    return rc == 0 && is_nccl ? open_nccl(io_coll, dev, layout, err) : rc;
}
