/* ckpt_carried.c - copies what a model's folder holds beyond what is computed */
#include "worker/ckpt_carried.h"

#include <stdlib.h>

#include "common/mem.h"
#include "worker/ckpt.h"
#include "worker/ckpt_source.h"

void ckpt_carried_close(struct ckpt_carried *c)
{
    safetensors_close(c->st);
    free(c->tensors);
    free(c->data);
    *c = (struct ckpt_carried){0};
}

int ckpt_carried_open(const char *model_path, const struct tensor_map *map, bool is_packed,
                      struct ckpt_carried *out, struct err *err)
{
    struct ckpt_carried c = {0};

    if (ckpt_has_weights(model_path)) {
        int rc = safetensors_open(model_path, &c.st, err);
        if (rc < 0)
            return rc;
        c.tensors = xcalloc(safetensors_count(c.st), sizeof *c.tensors);
        c.data = xcalloc(safetensors_count(c.st), sizeof *c.data);
        for (size_t i = 0; i < safetensors_count(c.st); i++) {
            const struct st_view *v = safetensors_at(c.st, i);
            if (!tensor_map_is_carried(map, v->tensor.name) &&
                !(is_packed && ckpt_source_is_input_scale(map, v->tensor.name)))
                continue;
            c.tensors[c.n] = v->tensor;
            c.data[c.n++] = v->data;
            c.n_bytes += v->n_bytes;
        }
    }
    *out = c;
    return 0;
}

int ckpt_carried_write(const struct ckpt_carried *c, const char *folder, struct err *err)
{
    char *path = xasprintf("%s/" CKPT_CARRIED_FILE, folder);
    struct st_writer *w = NULL;
    struct st_layout l = {0};
    int rc = st_layout_init(c->tensors, c->n, &l, err);

    if (rc == 0 && (rc = st_create(path, &l, err)) == 0)
        rc = st_writer_open(path, &l, &w, err);
    for (size_t i = 0; i < c->n && rc == 0; i++)
        rc = st_write_bytes(w, i, c->data[i], err);
    if (w) {
        int closed = st_writer_close(w, rc == 0 ? err : NULL);
        rc = rc == 0 ? closed : rc;
    }
    st_layout_fini(&l);
    free(path);
    return rc;
}
