/* validate_dump.c - writes what a run computed, for other tools to compare */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/file.h"
#include "common/json.h"
#include "common/mem.h"
#include "worker/validate.h"

static int dump_tensors(const char *folder, const char *file, const struct st_tensor *tensors,
                        const float *const *values, size_t n, struct err *err)
{
    char *path = xasprintf("%s/%s", folder, file);
    struct st_writer *w = NULL;
    struct st_layout layout;
    int rc = st_layout_init(tensors, n, &layout, err);

    if (rc == 0) {
        if ((rc = st_create(path, &layout, err)) == 0)
            rc = st_writer_open(path, &layout, &w, err);
        for (size_t i = 0; rc == 0 && i < n; i++) {
            uint64_t count = 1;
            for (uint32_t d = 0; d < tensors[i].n_dims; d++)
                count *= tensors[i].dims[d];
            rc = st_write_f32(w, i, 0, count, values[i], err);
        }
        if (w) {
            int closed = st_writer_close(w, rc == 0 ? err : NULL);
            rc = rc < 0 ? rc : closed;
        }
        st_layout_fini(&layout);
    }
    free(path);
    return rc;
}

static struct st_tensor logits_tensor(const char *name, const struct token_rows *r, uint32_t vocab)
{
    return (struct st_tensor){ name, ST_F32, 3, { r->n_rows, r->length, vocab } };
}

static int dump_logits(const char *folder, const struct validation *v, uint32_t vocab,
                       struct err *err)
{
    struct st_tensor tensors[2] = {
        logits_tensor("logits", &v->fixture->batch, vocab),
        logits_tensor("packed_logits", &v->fixture->packed, vocab),
    };
    const float *values[2] = { v->logits, v->packed_logits };

    return dump_tensors(folder, "logits.safetensors", tensors, values,
                        v->fixture->packed.n_rows ? 2 : 1, err);
}

static int dump_gradients(const char *folder, const struct validation *v,
                          const struct tensor_map *map, struct err *err)
{
    struct st_tensor *tensors = xcalloc(map->n_entries, sizeof *tensors);
    const float **values = xcalloc(map->n_entries, sizeof *values);
    size_t n = 0;

    for (size_t i = 0; i < map->n_entries; i++) {
        const struct tensor_entry *e = &map->entries[i];
        if (!v->gradients[i])
            continue;
        tensors[n] = (struct st_tensor){ .name = e->name, .dtype = ST_F32, .n_dims = e->n_dims };
        memcpy(tensors[n].dims, e->dims, sizeof e->dims);
        values[n++] = v->gradients[i];
    }
    int rc = dump_tensors(folder, "gradients.safetensors", tensors, values, n, err);
    free(tensors);
    free(values);
    return rc;
}

static struct json *list_of(const double *x, uint32_t n)
{
    struct json *list = json_new_array();
    for (uint32_t i = 0; i < n; i++)
        json_push(list, json_new_double(x[i]));
    return list;
}

static struct json *step_or_null(uint32_t step)
{
    return step ? json_new_u64(step) : NULL;
}

static int dump_report(const char *folder, const struct validation *v,
                       const struct model_spec *spec, const struct verdict *verdict,
                       struct err *err)
{
    char *path = xasprintf("%s/report.json", folder);
    struct json *o = json_new_object();
    int rc = 0;

    json_put(o, "loss", json_new_double(v->loss));
    json_put(o, "grad_norm", json_new_double(v->norm));
    if (v->fixture->n_curves) {
        json_put(o, "curve", json_new_string(v->fixture->curves[0].name));
        json_put(o, "loss_curve", list_of(v->curves[0].losses, v->n_steps));
        json_put(o, "grad_norms", list_of(v->curves[0].norms, v->n_steps));
    }
    if (v->fixture->n_curves > 1) {
        json_put(o, "parting_loss_curve", list_of(v->curves[1].losses, v->n_steps));
        json_put(o, "fixture_parts_at", step_or_null(verdict->fixture_parts_at));
        json_put(o, "twins_part_at", step_or_null(verdict->twins_part_at));
    }
    if (v->lora) {
        json_put(o, "lora_loss_curve", list_of(v->lora->losses, v->n_steps));
        json_put(o, "lora_twins_part_at", step_or_null(verdict->lora_twins_part_at));
    }
    json_put(o, "parameters", json_new_u64(model_spec_count(spec).total));
    if (v->fixture->packed.n_rows) {
        json_put(o, "packed_loss", json_new_double(v->packed_loss));
        json_put(o, "packed_grad_norm", json_new_double(v->packed_norm));
    }
    char *text = json_text(o, true);
    FILE *f = file_create(path, err);
    if (!f)
        rc = err->code;
    else if (fprintf(f, "%s\n", text) < 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    if (f && fclose(f) != 0 && rc == 0)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    free(text);
    json_destroy(o);
    free(path);
    return rc;
}

/* As PEFT has it, beside the reference's name for it. */
static int dump_adapter(const char *folder, const struct lora_validation *l,
                        const char *model_path, struct err *err)
{
    char *path = xasprintf("%s/lora-end", folder);
    struct st_tensor *tensors = xcalloc(l->map.n_entries, sizeof *tensors);
    const float **values = xcalloc(l->map.n_entries, sizeof *values);
    struct lora_config c = peft_lora(&l->peft);
    size_t n = 0;
    int rc = 0;

    for (size_t i = 0; i < l->map.n_entries; i++) {
        const struct tensor_entry *e = &l->map.entries[i];
        if (!l->adapters[i])
            continue;
        tensors[n] = (struct st_tensor){ e->name, ST_F32, 2, { e->dims[0], e->dims[1] } };
        values[n++] = l->adapters[i];
    }
    if (mkdir(path, 0777) < 0 && errno != EEXIST)
        rc = err_set(err, -errno, "%s: %s", path, strerror(errno));
    if (rc == 0)
        rc = dump_tensors(path, PEFT_TENSORS_FILE, tensors, values, n, err);
    if (rc == 0)
        rc = peft_write_config(path, &c, &l->map, model_path, err);
    free(tensors);
    free(values);
    free(path);
    return rc;
}

int validation_dump(const char *folder, const struct validation *v, const struct model_spec *spec,
                    const struct tensor_map *map, const struct verdict *verdict, struct err *err)
{
    int rc;

    if (mkdir(folder, 0777) < 0 && errno != EEXIST)
        return err_set(err, -errno, "%s: %s", folder, strerror(errno));
    if ((rc = dump_logits(folder, v, spec->vocab, err)) < 0 ||
        (rc = dump_gradients(folder, v, map, err)) < 0 ||
        (v->lora && (rc = dump_adapter(folder, v->lora, v->model_path, err)) < 0))
        return rc;
    return dump_report(folder, v, spec, verdict, err);
}
