/* ckpt_state.c - what a run must know to go on, as JSON beside its tensors */
#include "worker/ckpt_state.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/json.h"
#include "common/mem.h"
#include "worker/ckpt_beside.h"

#define STATE_FORMAT    2u
#define STATE_BYTES_MAX (1u << 16)
#define HASH_TEXT_BYTES 17

int ckpt_state_write(const struct ckpt_config *c, const char *folder, const struct ckpt_state *s,
                     struct err *err)
{
    struct json *o = json_new_object();
    json_put(o, "format", json_new_u64(STATE_FORMAT));
    json_put(o, "step", json_new_u64(s->step));
    json_put(o, "seed", json_new_u64(s->seed));
    json_put(o, "next_sample", json_new_u64(s->next_sample));
    json_put(o, "validation_loss", json_new_double(s->validation_loss));
    json_put(o, "world", json_new_u64(c->coll->world));
    json_put(o, "masters", json_new_u64(c->forms && !c->lora ? c->forms->n_masters : 0));
    if (c->lora) {
        char hash[HASH_TEXT_BYTES];
        snprintf(hash, sizeof hash, "%016" PRIx64, c->base_hash);
        json_put(o, "base_hash", json_new_string(hash));
    }
    char *path = xasprintf("%s/ballast/state.json", folder);
    int rc = ckpt_write_json(o, path, err);
    json_destroy(o);
    free(path);
    return rc;
}

/* Adapters are of use beside their base alone. */
static int check_base(const struct ckpt_config *c, const struct json *o, struct err *err)
{
    const char *hash = json_as_string(json_get(o, "base_hash"));
    char mine[HASH_TEXT_BYTES];
    if (!c->lora)
        return hash ? err_set(err, -EINVAL, "it holds adapters (train.mode: lora), this job trains "
                              "the whole model") : 0;
    snprintf(mine, sizeof mine, "%016" PRIx64, c->base_hash);
    if (!hash)
        return err_set(err, -EINVAL, "it holds a whole model, this job trains adapters "
                       "(train.mode: lora)");
    if (strcmp(hash, mine) == 0)
        return 0;
    return err_set(err, -EINVAL, "its adapters belong to a base with the hash %.32s, but that of "
                   "model.path %s is %s", hash, c->model_path, mine);
}

int ckpt_state_read(const struct ckpt_config *c, const char *folder, struct ckpt_state *out,
                    struct err *err)
{
    struct ckpt_state s = {.validation_loss = NAN};
    struct json *o = NULL;
    uint64_t format;
    char *path = xasprintf("%s/ballast/state.json", folder);
    int rc = json_read_file(path, STATE_BYTES_MAX, &o, err);
    if (rc == 0 &&
        ((rc = json_get_u64(o, "format", STATE_FORMAT, STATE_FORMAT, &format, err)) < 0 ||
         (rc = json_get_u64(o, "step", 1, UINT64_MAX, &s.step, err)) < 0 ||
         (rc = json_get_u64(o, "seed", 0, UINT64_MAX, &s.seed, err)) < 0 ||
         (rc = json_get_u64(o, "next_sample", 0, UINT64_MAX, &s.next_sample, err)) < 0 ||
         (rc = json_get_u64(o, "masters", 0, UINT64_MAX, &s.n_masters, err)) < 0 ||
         (rc = check_base(c, o, err)) < 0))
        err_prefix(err, "%s", path);
    if (rc == 0) {
        json_get_double(o, "validation_loss", &s.validation_loss, NULL); /* null where none */
        *out = s;
    }
    json_destroy(o);
    free(path);
    return rc;
}
