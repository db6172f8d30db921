/* ckpt_files.c - one model's tensors from and to the slices of many ranks */
#include "worker/ckpt_files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/bf16.h"
#include "common/failpoint.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/safetensors.h"
#include "worker/ckpt_base.h"
#include "worker/ckpt_source.h"
#include "worker/peft.h"


/* ---- which tensors, in which file ----------------------------------------------------------- */

/* What is written of an entry, and where in which tensor of its file. */
struct piece {
    const struct tensor_entry *entry;
    size_t   tensor;
    uint64_t at;
    const uint8_t *bytes; /* written as they are; NULL: the entry's floats */
};

struct file {
    char  *name;
    size_t n, n_pieces;
    struct st_tensor *tensors; /* n; names of the file's own are in made */
    struct piece *pieces;      /* n_pieces */
    char **made;
    size_t n_made;
};

/* A tensor of many entries that has been planned. */
struct fused {
    const struct st_view *view;
    size_t file, tensor;
};

struct files {
    struct file *items;
    size_t n;
    uint64_t last_bytes, n_bytes; /* of tensors in the last file; in all */
    struct fused fused[2];        /* the newest two: a layer has two */
};

static const struct ckpt_form *form_of(const struct ckpt_tensors *t, const struct tensor_entry *e)
{
    static const struct ckpt_form plain = {.dtype = ST_F32, .is_exact = true};
    bool has_forms = t->forms && (t->what == CKPT_WEIGHTS || t->what == CKPT_MASTERS);
    return has_forms ? &t->forms->of[e - t->map->entries] : &plain;
}

static bool is_stored(const struct ckpt_tensors *t, const struct tensor_entry *e)
{
    bool is_adapter = e->adapter != ADAPTER_NONE;
    switch (t->what) {
    case CKPT_WEIGHTS:
        return !is_adapter && !form_of(t, e)->is_left_out;
    case CKPT_MASTERS:
        return !is_adapter && !form_of(t, e)->is_exact;
    case CKPT_ADAPTERS:
        return is_adapter;
    case CKPT_V:
        return tensor_has_v(t->map, e);
    case CKPT_M:
    case CKPT_WHATS:
        break;
    }
    return tensor_is_trained(e);
}

static void add_file(struct files *f)
{
    f->items = xrealloc(f->items, (f->n + 1) * sizeof *f->items);
    f->items[f->n++] = (struct file){0};
    f->last_bytes = 0;
}

static void add_piece(struct file *f, const struct piece *p)
{
    f->pieces = xrealloc(f->pieces, (f->n_pieces + 1) * sizeof *f->pieces);
    f->pieces[f->n_pieces++] = *p;
}

/* bytes NULL: the entry's floats, from number at of the tensor on. */
static void add_tensor(const struct ckpt_tensors *t, struct files *out,
                       const struct tensor_entry *e, const struct st_tensor *tensor,
                       const uint8_t *bytes, uint64_t at)
{
    uint64_t n_bytes = st_dtype_bits(tensor->dtype) / 8;
    for (uint32_t i = 0; i < tensor->n_dims; i++)
        n_bytes *= tensor->dims[i];
    if (out->n == 0 || (t->what != CKPT_ADAPTERS && out->last_bytes + n_bytes > t->file_bytes_max))
        add_file(out);
    struct file *f = &out->items[out->n - 1];
    f->tensors = xrealloc(f->tensors, (f->n + 1) * sizeof *f->tensors);
    f->tensors[f->n] = *tensor;
    add_piece(f, &(struct piece){e, f->n++, at, bytes});
    out->last_bytes += n_bytes;
    out->n_bytes += n_bytes;
}

static void add_floats(const struct ckpt_tensors *t, struct files *out,
                       const struct tensor_entry *e, const char *name)
{
    struct st_tensor tensor = {.name = name, .n_dims = e->n_dims,
                               .dtype = t->what == CKPT_MASTERS ? ST_F32 : form_of(t, e)->dtype};
    memcpy(tensor.dims, e->dims, sizeof tensor.dims);
    add_tensor(t, out, e, &tensor, NULL, 0);
}

/* A part of a tensor that other entries are in, too. */
static void add_fused(const struct ckpt_tensors *t, struct files *out,
                      const struct tensor_entry *e, const struct ckpt_form *form)
{
    for (size_t i = 0; i < 2; i++)
        if (out->fused[i].view == form->fused) {
            add_piece(&out->items[out->fused[i].file],
                      &(struct piece){e, out->fused[i].tensor, form->fused_at, NULL});
            return;
        }
    struct st_tensor tensor = form->fused->tensor;
    tensor.dtype = form->dtype;
    add_tensor(t, out, e, &tensor, NULL, form->fused_at);
    out->fused[0] = out->fused[1];
    out->fused[1] = (struct fused){form->fused, out->n - 1, out->items[out->n - 1].n - 1};
}

/* An A that experts share is a tensor of each of them to other tools. */
static void add_same(const struct ckpt_tensors *t, struct files *out, const struct tensor_entry *e)
{
    struct file *f = &out->items[out->n - 1]; /* adapters are one file */
    f->made = xrealloc(f->made, (f->n_made + e->n_same) * sizeof *f->made);
    for (uint32_t k = 1; k < e->n_same; k++) {
        char name[LORA_NAME_BYTES];
        lora_name_of_expert(e, k, name);
        f->made[f->n_made] = xstrdup(name);
        add_floats(t, out, e, f->made[f->n_made++]);
    }
}

static char *file_name(const struct ckpt_tensors *t, size_t i, size_t n)
{
    if (t->what == CKPT_ADAPTERS)
        return xstrdup(PEFT_TENSORS_FILE);
    return n == 1 && !t->is_one_of_many ? xstrdup("model.safetensors")
                                        : xasprintf("model-%05zu-of-%05zu.safetensors", i + 1, n);
}

static void add_entry(const struct ckpt_tensors *t, struct files *out, const struct tensor_entry *e)
{
    const struct ckpt_form *form = form_of(t, e);
    if (t->what == CKPT_WEIGHTS && form->packed) {
        add_tensor(t, out, e, &form->packed->tensor, form->packed->data, 0);
        add_tensor(t, out, e, &form->scales->tensor, form->scales->data, 0);
        return;
    }
    if (t->what == CKPT_WEIGHTS && form->fused) {
        add_fused(t, out, e, form);
        return;
    }
    add_floats(t, out, e, e->name);
    if (t->what == CKPT_ADAPTERS && e->n_same)
        add_same(t, out, e);
}

static void plan_files(const struct ckpt_tensors *t, struct files *out)
{
    *out = (struct files){0};
    for (size_t i = 0; i < t->map->n_entries; i++)
        if (is_stored(t, &t->map->entries[i]))
            add_entry(t, out, &t->map->entries[i]);
    for (size_t i = 0; i < out->n; i++)
        out->items[i].name = file_name(t, i, out->n);
}

static void files_fini(struct files *f)
{
    for (size_t i = 0; i < f->n; i++) {
        for (size_t k = 0; k < f->items[i].n_made; k++)
            free(f->items[i].made[k]);
        free(f->items[i].made);
        free(f->items[i].name);
        free(f->items[i].tensors);
        free(f->items[i].pieces);
    }
    free(f->items);
}

/* Numbers at .. at + n of a part, from the device and to it. */
static void read_device(const struct ckpt_tensors *t, const struct shard_part *p, uint64_t at,
                        uint64_t n, float *out)
{
    struct device *dev = shard_device(t->shard);
    if (t->what != CKPT_M && t->what != CKPT_V)
        shard_part_read(t->shard, p, at, n, out);
    else
        dev->ops->to_host(dev, out, (t->what == CKPT_M ? p->m : p->v) + at, n * sizeof *out);
}

static void write_device(const struct ckpt_tensors *t, const struct shard_part *p, uint64_t at,
                         uint64_t n, const float *from)
{
    struct device *dev = shard_device(t->shard);
    if (t->what != CKPT_M && t->what != CKPT_V)
        shard_part_write(t->shard, p, at, n, from);
    else
        dev->ops->to_device(dev, (t->what == CKPT_M ? p->m : p->v) + at, from, n * sizeof *from);
}

/* ---- writing -------------------------------------------------------------------------------- */

static int write_text(const char *path, const char *text, struct err *err)
{
    size_t n = strlen(text);
    errno = 0; /* a short write sets none */
    int rc = 0, fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, text, n) != (ssize_t)n || fsync(fd) < 0)
        rc = err_set(err, errno ? -errno : -EIO, "%s: %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return rc;
}

static int write_index(const struct files *f, const struct ckpt_carried *carried,
                       const char *folder, struct err *err)
{
    struct json *root = json_new_object(), *about = json_new_object(), *where = json_new_object();
    for (size_t i = 0; i < carried->n; i++)
        json_put(where, carried->tensors[i].name, json_new_string(CKPT_CARRIED_FILE));
    for (size_t i = 0; i < f->n; i++)
        for (size_t k = 0; k < f->items[i].n; k++)
            json_put(where, f->items[i].tensors[k].name, json_new_string(f->items[i].name));
    json_put(about, "total_size", json_new_u64(f->n_bytes + carried->n_bytes));
    json_put(root, "metadata", about);
    json_put(root, "weight_map", where);
    char *text = json_text(root, true);
    char *path = xasprintf("%s/model.safetensors.index.json", folder);
    int rc = write_text(path, text, err);
    free(path);
    free(text);
    json_destroy(root);
    return rc;
}

int ckpt_files_create(const struct ckpt_tensors *t, const struct ckpt_carried *carried,
                      const char *folder, struct err *err)
{
    static const struct ckpt_carried nothing;
    struct files f;
    int rc = 0;
    if (mkdir(folder, 0777) < 0 && errno != EEXIST)
        return err_set(err, -errno, "%s: %s", folder, strerror(errno));
    plan_files(t, &f);
    for (size_t i = 0; i < f.n && rc == 0; i++) {
        struct st_layout l;
        char *path = xasprintf("%s/%s", folder, f.items[i].name);
        if ((rc = st_layout_init(f.items[i].tensors, f.items[i].n, &l, err)) == 0) {
            rc = st_create(path, &l, err);
            st_layout_fini(&l);
        }
        free(path);
    }
    if (rc == 0 && t->is_one_of_many)
        rc = ckpt_carried_write(carried, folder, err);
    if (rc == 0 && (f.n > 1 || t->is_one_of_many))
        rc = write_index(&f, t->is_one_of_many ? carried : &nothing, folder, err);
    files_fini(&f);
    return rc;
}

static int write_part(const struct ckpt_tensors *t, struct st_writer *w, const struct piece *piece,
                      const struct shard_part *p, float *chunk, struct err *err)
{
    int rc = failpoint("checkpoint-write");
    if (rc < 0)
        return err_set(err, rc, "writing a checkpoint: %s", strerror(-rc));
    for (uint64_t done = 0; done < p->count && rc == 0; done += SHARD_FILE_FLOATS) {
        uint64_t n = p->count - done < SHARD_FILE_FLOATS ? p->count - done : SHARD_FILE_FLOATS;
        read_device(t, p, done, n, chunk);
        rc = st_write_f32(w, piece->tensor, piece->at + p->first + done, n, chunk, err);
    }
    return rc;
}

/* Opens the file only if this rank has something in it. */
static int write_file(const struct ckpt_tensors *t, const struct file *f, const char *folder,
                      float *chunk, struct err *err)
{
    struct st_layout l;
    struct st_writer *w = NULL;
    int rc = st_layout_init(f->tensors, f->n, &l, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < f->n_pieces && rc == 0; i++) {
        const struct piece *piece = &f->pieces[i];
        struct shard_part p;
        if (!shard_part(t->shard, piece->entry, &p) || !p.is_first || (piece->bytes && p.first > 0))
            continue;
        if (!w) {
            char *path = xasprintf("%s/%s", folder, f->name);
            rc = st_writer_open(path, &l, &w, err);
            free(path);
        }
        if (rc == 0)
            rc = piece->bytes ? st_write_bytes(w, piece->tensor, piece->bytes, err)
                              : write_part(t, w, piece, &p, chunk, err);
    }
    for (size_t i = 0; i < f->n && t->sums; i++)
        ckpt_sums_add(t->sums, t->place, f->tensors[i].name,
                      w ? st_writer_sum(w, i) : (struct st_sum){0});
    if (w) {
        int closed = st_writer_close(w, rc == 0 ? err : NULL);
        rc = rc == 0 ? closed : rc;
    }
    st_layout_fini(&l);
    return rc;
}

int ckpt_files_write(const struct ckpt_tensors *t, const char *folder, struct err *err)
{
    struct files f;
    float *chunk = shard_file_chunk(t->shard);
    int rc = 0;
    plan_files(t, &f);
    for (size_t i = 0; i < f.n && rc == 0; i++)
        rc = write_file(t, &f.items[i], folder, chunk, err);
    files_fini(&f);
    return rc;
}

/* ---- reading -------------------------------------------------------------------------------- */

static int read_part(const struct ckpt_tensors *t, const struct ckpt_source *source, bool rounds,
                     const struct shard_part *p, float *chunk, struct err *err)
{
    int rc = 0;
    for (uint64_t done = 0; done < p->count && rc == 0; done += SHARD_FILE_FLOATS) {
        uint64_t n = p->count - done < SHARD_FILE_FLOATS ? p->count - done : SHARD_FILE_FLOATS;
        if ((rc = ckpt_source_read(source, p->first + done, n, chunk, err)) < 0)
            break;
        for (uint64_t i = 0; rounds && i < n; i++)
            chunk[i] = bf16_value(bf16_of(chunk[i]));
        write_device(t, p, done, n, chunk);
    }
    return rc;
}

/* That an A which experts share is the same under the name of each. */
static int check_same(const struct safetensors *st, const struct tensor_entry *e, struct err *err)
{
    const struct st_view *one = safetensors_find(st, e->name);
    struct tensor_entry other = *e;
    char name[LORA_NAME_BYTES];
    other.name = name;
    for (uint32_t k = 1; k < e->n_same; k++) {
        struct ckpt_source source;
        lora_name_of_expert(e, k, name);
        int rc = ckpt_source_find(st, &other, one->file, &source, err);
        if (rc < 0)
            return rc;
        if (source.values->n_bytes != one->n_bytes ||
            memcmp(source.values->data, one->data, one->n_bytes) != 0)
            return err_set(err, -EINVAL, "%s: tensor '%s' is not that of expert 0, but with "
                           "train.lora.shared_a the experts of a layer have one A", one->file,
                           name);
    }
    return 0;
}

/* The first tensor of an adapter that is beside no matrix that has one in the map: -EINVAL. */
static int check_adapters(const struct safetensors *st, const struct tensor_map *map,
                          struct err *err)
{
    for (size_t i = 0; i < safetensors_count(st); i++) {
        const struct st_view *v = safetensors_at(st, i);
        char first[LORA_NAME_BYTES];
        const struct tensor_entry *e = tensor_map_find(map, v->tensor.name);
        if (!e && lora_is_copy(v->tensor.name, first))
            continue; /* peft_check_copies is for it */
        int64_t expert = e ? 0 : lora_expert_of_name(v->tensor.name, first);
        if (!e && expert >= 0 && (e = tensor_map_find(map, first)) && expert >= e->n_same)
            e = NULL;
        if (!e || e->adapter == ADAPTER_NONE)
            return err_set(err, -EINVAL, "%s: tensor '%.200s' is an adapter that this job does not "
                           "train; see train.lora.targets", v->file, v->tensor.name);
    }
    return 0;
}

static int read_tensor(const struct ckpt_tensors *t, const struct safetensors *st,
                       const struct tensor_entry *e, const char *folder, float *chunk,
                       struct err *err)
{
    struct ckpt_source source;
    struct shard_part p;
    int rc = ckpt_source_find(st, e, folder, &source, err);
    if (rc < 0 && t->what == CKPT_V)
        err_prefix(err, "written by a run with train.optimizer.name: muon, which has no second "
                   "moments of matrices; resume with that, or begin anew from its weights as "
                   "model.path");
    if (rc == 0 && t->what == CKPT_ADAPTERS)
        rc = check_same(st, e, err);
    if (rc < 0 || !shard_part(t->shard, e, &p))
        return rc;
    if (t->what == CKPT_WEIGHTS && e->packing != PACKING_NONE)
        return ckpt_base_read(t->shard, e, &p, &source, err);
    bool rounds = e->is_matrix && t->rounds && ckpt_source_packing(&source) != PACKING_FP8;
    return read_part(t, &source, rounds, &p, chunk, err);
}

/* Masters are those that the run which wrote them had. */
static bool is_wanted(const struct ckpt_tensors *t, const struct safetensors *st,
                      const struct tensor_entry *e)
{
    bool is_there = safetensors_find(st, e->name) != NULL;
    bool is_expected = t->what == CKPT_WEIGHTS ? e->adapter == ADAPTER_NONE : is_stored(t, e);
    return t->what == CKPT_MASTERS ? is_there : is_expected && (is_there || !e->is_optional);
}

int ckpt_files_read(const struct ckpt_tensors *t, const char *folder, struct err *err)
{
    bool is_adapter = t->what == CKPT_ADAPTERS;
    char *path = xasprintf("%s%s", folder, is_adapter ? "/" PEFT_TENSORS_FILE : "");
    struct safetensors *st;
    int rc = safetensors_open(path, &st, err);
    free(path);
    if (rc < 0)
        return rc;
    float *chunk = shard_file_chunk(t->shard);
    rc = is_adapter ? check_adapters(st, t->map, err) : ckpt_source_check_names(st, t->map, err);
    if (rc == 0 && t->what == CKPT_MASTERS && safetensors_count(st) != t->n_masters)
        rc = err_set(err, -EINVAL, "%s: holds %zu tensors, expected %" PRIu64, folder,
                     safetensors_count(st), t->n_masters);
    for (size_t i = 0; i < t->map->n_entries && rc == 0; i++) {
        const struct tensor_entry *e = &t->map->entries[i];
        if (is_wanted(t, st, e))
            rc = read_tensor(t, st, e, folder, chunk, err);
    }
    safetensors_close(st);
    return rc;
}
