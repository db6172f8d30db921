/* base_hash.c - hashes tensors one by one and adds the hashes up, over all ranks */
#include "worker/base_hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/hf_config.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "worker/agree.h"

#define SUM_PARTS 4 /* of 16 bits: their sums over ranks are exact in double */

static uint64_t hash_tensor(const struct st_view *v)
{
    const struct st_tensor *t = &v->tensor;
    uint64_t h = hash_bytes(t->dtype, t->name, strlen(t->name));
    h = hash_bytes(h, t->dims, t->n_dims * sizeof *t->dims);
    return hash_bytes(h, v->data, v->n_bytes);
}

static int hash_config(const char *model_path, uint64_t *out, struct err *err)
{
    char *path = xasprintf("%s/config.json", model_path);
    struct json *o;
    int rc = json_read_file(path, HF_CONFIG_BYTES_MAX, &o, err);
    if (rc == 0) {
        char *text = json_text(o, false);
        *out = hash_bytes(0, text, strlen(text));
        free(text);
        json_destroy(o);
    }
    free(path);
    return rc;
}

static int hash_share(const char *model_path, uint32_t rank, uint32_t world, uint64_t *out,
                      struct err *err)
{
    struct safetensors *st;
    uint64_t sum = 0;
    int rc = safetensors_open(model_path, &st, err);
    if (rc < 0)
        return rc;
    for (size_t i = rank; i < safetensors_count(st); i += world)
        sum += hash_tensor(safetensors_at(st, i));
    safetensors_close(st);
    uint64_t config = 0;
    if (rank == 0 && (rc = hash_config(model_path, &config, err)) < 0)
        return rc;
    *out = sum + config;
    return 0;
}

int base_hash_alone(const char *model_path, uint64_t *out, struct err *err)
{
    return hash_share(model_path, 0, 1, out, err);
}

int base_hash(const char *model_path, struct coll *coll, uint64_t *out, struct err *err)
{
    double parts[SUM_PARTS];
    uint64_t mine = 0, sum = 0;
    int rc = agree(coll, hash_share(model_path, coll->rank, coll->world, &mine, err), err);
    if (rc < 0)
        return rc;
    for (int i = 0; i < SUM_PARTS; i++)
        parts[i] = (double)(mine >> (16 * i) & 0xffff);
    rc = coll->ops->all_reduce_f64(coll, &coll->world_group, COLL_SUM, parts, SUM_PARTS, err);
    for (int i = 0; i < SUM_PARTS; i++)
        sum += (uint64_t)parts[i] << (16 * i);
    if (rc == 0)
        *out = sum;
    return rc;
}
