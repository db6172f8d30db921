/* export.c - merges an adapter into the tensors that it lies beside, file by file
 *
 * The files are laid out as those of the base, so what has no adapter is the same byte for byte,
 * packed experts too. */
#include "worker/export.h"

#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/hf_config.h"
#include "common/json.h"
#include "common/mem.h"
#include "common/usage.h"
#include "kernels/packed.h"
#include "worker/base_hash.h"
#include "worker/ckpt_beside.h"
#include "worker/ckpt_fp8.h"
#include "worker/peft.h"

#define PROGRAM "ballast-worker export"

static const char usage[] =
    "usage: ballast-worker export MODEL_DIR --lora ADAPTER_DIR --out DIR\n"
    "\n"
    "Writes the model with the adapter merged into it: W + (alpha / r) B A in place of each\n"
    "matrix that has one, in the dtype that it is stored in, packed as it is packed. All else is\n"
    "copied.\n"
    "\n"
    "  --lora DIR    a PEFT folder: adapter_config.json and adapter_model.safetensors\n"
    "  --out DIR     a folder that does not exist yet\n"
    "\n"
    "example: ballast-worker export models/base --lora checkpoints/tuned/step-300 --out merged\n";

struct merge {
    const char *model_path, *tmp;
    struct model_spec *spec;
    struct tensor_map  map; /* with the adapters */
    struct peft        peft;
    struct safetensors *base, *adapter;
};

/* ---- what is merged ------------------------------------------------------------------------- */

/* The adapter beside the tensor of a name, which may be a part of a packed one; false: none. */
struct pair {
    const struct tensor_entry *base, *a, *b;
};

static const struct tensor_entry *find_base(const struct merge *m, const char *name)
{
    static const char *const endings[] = {"", "_packed", "_scale", "_scale_inv"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t n = strlen(name), tail = strlen(endings[i]);
        char part[LORA_NAME_BYTES];
        if (n <= tail || n - tail >= sizeof part || strcmp(name + n - tail, endings[i]) != 0)
            continue;
        snprintf(part, sizeof part, "%.*s", (int)(n - tail), name);
        const struct tensor_entry *e = tensor_map_find(&m->map, part);
        if (e)
            return e;
    }
    return NULL;
}

/* A and B follow their matrix in the map. */
static bool find_pair(const struct merge *m, const char *name, struct pair *out)
{
    const struct tensor_entry *e = find_base(m, name), *end = m->map.entries + m->map.n_entries;
    if (!e || e + 2 >= end || e[1].adapter != ADAPTER_A || e[1].role != e->role)
        return false;
    *out = (struct pair){e, e + 1, e + 2};
    return true;
}

static int read_adapter(const struct merge *m, const struct tensor_entry *e, float **out,
                        struct err *err)
{
    struct ckpt_source source;
    float *x = xcalloc(e->count, sizeof *x);
    int rc = ckpt_source_find(m->adapter, e, PEFT_TENSORS_FILE, &source, err);
    if (rc == 0)
        rc = ckpt_source_read(&source, 0, e->count, x, err);
    if (rc < 0)
        free(x);
    else
        *out = x;
    return rc;
}

/* w += (alpha / r) B A */
static void add_product(const struct merge *m, const struct pair *p, const float *a,
                        const float *b, float *w)
{
    uint64_t out = p->base->dims[0], in = p->base->dims[1], r = m->peft.r;
    double scale = m->peft.alpha / (double)r, *row = xcalloc(in, sizeof *row);
    for (uint64_t i = 0; i < out; i++) {
        memset(row, 0, in * sizeof *row);
        for (uint64_t k = 0; k < r; k++)
            for (uint64_t j = 0; j < in; j++)
                row[j] += (double)b[i * r + k] * a[k * in + j];
        for (uint64_t j = 0; j < in; j++)
            w[i * in + j] = (float)(w[i * in + j] + scale * row[j]);
    }
    free(row);
}

/* The merged matrix in float32, and where the base has it. Gives *out. */
static int merged(const struct merge *m, const struct pair *p, struct ckpt_source *out_source,
                  float **out, struct err *err)
{
    struct ckpt_source source;
    float *a = NULL, *b = NULL, *w = xcalloc(p->base->count, sizeof *w);
    int rc = ckpt_source_find(m->base, p->base, m->model_path, &source, err);
    if (rc == 0)
        rc = ckpt_source_read(&source, 0, p->base->count, w, err);
    if (rc == 0 && (rc = read_adapter(m, p->a, &a, err)) == 0)
        rc = read_adapter(m, p->b, &b, err);
    if (rc == 0)
        add_product(m, p, a, b, w);
    free(a);
    free(b);
    if (rc < 0) {
        free(w);
        return rc;
    }
    *out_source = source;
    *out = w;
    return 0;
}

/* One of the two tensors that an MXFP4 matrix is stored as. */
static int write_mxfp4(struct st_writer *w, size_t i, bool is_scales, const struct pair *p,
                       const float *x, struct err *err)
{
    uint64_t rows = p->base->dims[0], cols = p->base->dims[1];
    uint8_t *bytes = xcalloc(packing_bytes(PACKING_MXFP4, rows, cols), 1);
    packed_encode(bytes, PACKING_MXFP4, x, (int64_t)rows, (int64_t)cols);
    int rc = st_write_bytes(w, i, bytes + (is_scales ? packing_scales_at(PACKING_MXFP4, rows, cols)
                                                     : 0), err);
    free(bytes);
    return rc;
}

static int write_fp8(struct st_writer *w, size_t i, bool is_scales, const struct ckpt_source *s,
                     const float *x, struct err *err)
{
    uint64_t n_scales = s->scales->n_elements;
    uint8_t *codes = xcalloc(s->values->n_bytes, 1);
    float *scales = xcalloc(n_scales, sizeof *scales);
    ckpt_fp8_encode(s, x, s->values->n_bytes / s->width, codes, scales);
    int rc = is_scales ? st_write_f32(w, i, 0, n_scales, scales, err)
                       : st_write_bytes(w, i, codes, err);
    free(codes);
    free(scales);
    return rc;
}

/* The matrices in a fused tensor, one by one: one that has no adapter as it is, which to and from
 * floats it stays. */
static int write_fused(const struct merge *m, struct st_writer *w, size_t i,
                       const struct st_view *v, struct err *err)
{
    const struct tensor_entry *e;
    struct ckpt_source s;
    int rc = 0;
    for (size_t k = 0; rc == 0 && (e = ckpt_source_next_part(&m->map, v, &k, &s));) {
        struct pair p;
        float *x = NULL;
        if (find_pair(m, e->name, &p)) {
            rc = merged(m, &p, &s, &x, err);
        } else {
            x = xcalloc(e->stored_count, sizeof *x);
            rc = ckpt_source_read(&s, 0, e->stored_count, x, err);
        }
        if (rc == 0)
            rc = st_write_f32(w, i, s.at, e->stored_count, x, err);
        free(x);
    }
    return rc;
}

static int write_tensor(const struct merge *m, struct st_writer *w, size_t i,
                        const struct st_view *v, struct err *err)
{
    struct pair p;
    struct ckpt_source s;
    float *x = NULL;
    if (ckpt_source_next_part(&m->map, v, &(size_t){0}, &s))
        return write_fused(m, w, i, v, err);
    if (!find_pair(m, v->tensor.name, &p))
        return st_write_bytes(w, i, v->data, err);
    int rc = merged(m, &p, &s, &x, err);
    if (rc < 0)
        return rc;
    bool is_scales = v == s.scales;
    if (ckpt_source_packing(&s) == PACKING_MXFP4)
        rc = write_mxfp4(w, i, is_scales, &p, x, err);
    else if (ckpt_source_packing(&s) == PACKING_FP8)
        rc = write_fp8(w, i, is_scales, &s, x, err);
    else
        rc = st_write_f32(w, i, 0, p.base->count, x, err);
    free(x);
    return rc;
}

/* ---- files ---------------------------------------------------------------------------------- */

static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int by_place(const void *a, const void *b)
{
    const uint8_t *x = (*(const struct st_view *const *)a)->data;
    const uint8_t *y = (*(const struct st_view *const *)b)->data;
    return (x > y) - (x < y);
}

/* The tensors of one file in its own order. Gives *out. */
static size_t list_file(const struct merge *m, const char *file, const struct st_view ***out)
{
    const struct st_view **list = xcalloc(safetensors_count(m->base), sizeof *list);
    size_t n = 0;
    for (size_t i = 0; i < safetensors_count(m->base); i++)
        if (strcmp(safetensors_at(m->base, i)->file, file) == 0)
            list[n++] = safetensors_at(m->base, i);
    qsort(list, n, sizeof *list, by_place);
    *out = list;
    return n;
}

static int write_file(const struct merge *m, const char *file, struct err *err)
{
    const struct st_view **views;
    size_t n = list_file(m, file, &views);
    struct st_tensor *tensors = xcalloc(n, sizeof *tensors);
    char *path = xasprintf("%s/%s", m->tmp, name_of(file));
    struct st_layout l = {0};
    struct st_writer *w = NULL;
    for (size_t i = 0; i < n; i++)
        tensors[i] = views[i]->tensor;
    int rc = st_layout_init(tensors, n, &l, err);
    if (rc == 0 && (rc = st_create(path, &l, err)) == 0)
        rc = st_writer_open(path, &l, &w, err);
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = write_tensor(m, w, i, views[i], err);
    if (w) {
        int closed = st_writer_close(w, rc == 0 ? err : NULL);
        rc = rc == 0 ? closed : rc;
    }
    st_layout_fini(&l);
    free(tensors);
    free(views);
    free(path);
    return rc;
}

static bool is_first_of_file(const struct merge *m, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (strcmp(safetensors_at(m->base, k)->file, safetensors_at(m->base, i)->file) == 0)
            return false;
    return true;
}

/* Configuration, tokenizer, index, whatever it is; not folders, and no other tensors. */
static int copy_others(const struct merge *m, struct err *err)
{
    DIR *folder = opendir(m->model_path);
    int rc = folder ? 0 : err_set(err, -errno, "%s: %s", m->model_path, strerror(errno));
    for (struct dirent *e; rc == 0 && (e = readdir(folder));) {
        char *from = xasprintf("%s/%s", m->model_path, e->d_name);
        char *to = xasprintf("%s/%s", m->tmp, e->d_name);
        const char *end = strrchr(e->d_name, '.');
        struct stat st;
        if (stat(from, &st) == 0 && S_ISREG(st.st_mode) &&
            !(end && strcmp(end, ".safetensors") == 0))
            rc = ckpt_copy_file(from, to, err);
        free(from);
        free(to);
    }
    if (folder)
        closedir(folder);
    return rc;
}

static int write_all(const struct merge *m, struct err *err)
{
    int rc = mkdir(m->tmp, 0777) < 0 ? err_set(err, -errno, "%s: %s", m->tmp, strerror(errno))
                                     : copy_others(m, err);
    for (size_t i = 0; i < safetensors_count(m->base) && rc == 0; i++)
        if (is_first_of_file(m, i))
            rc = write_file(m, safetensors_at(m->base, i)->file, err);
    return rc;
}

/* Of flat files alone, as write_all makes them. */
static void remove_folder(const char *path)
{
    DIR *folder = opendir(path);
    for (struct dirent *e; folder && (e = readdir(folder));) {
        char *file = xasprintf("%s/%s", path, e->d_name);
        unlink(file);
        free(file);
    }
    if (folder)
        closedir(folder);
    rmdir(path);
}

/* ---- the whole ------------------------------------------------------------------------------ */

/* Before anything is written: both folders are whole, and the adapter is one of this model. */
static int open_all(struct merge *m, const char *adapter_path, struct err *err)
{
    char *tensors = xasprintf("%s/" PEFT_TENSORS_FILE, adapter_path);
    int rc;
    if ((rc = hf_config_read(m->model_path, m->spec, err)) == 0 &&
        (rc = tensor_map_init(m->spec, &m->map, err)) == 0 &&
        (rc = peft_open(adapter_path, &m->peft, err)) == 0 &&
        (rc = peft_check_copies(adapter_path, m->model_path, err)) == 0 &&
        (rc = safetensors_open(m->model_path, &m->base, err)) == 0 &&
        (rc = ckpt_source_check_names(m->base, &m->map, err)) == 0 &&
        (rc = safetensors_open(tensors, &m->adapter, err)) == 0) {
        struct lora_config c = peft_lora(&m->peft);
        c.indexers = true;
        if ((rc = lora_map_add(&m->map, &c, err)) < 0)
            err_prefix(err, "%s", adapter_path);
    }
    for (size_t i = 0; i < m->map.n_entries && rc == 0; i++) {
        const struct tensor_entry *e = &m->map.entries[i];
        struct ckpt_source ignored;
        if (e->adapter != ADAPTER_NONE)
            rc = ckpt_source_find(m->adapter, e, tensors, &ignored, err);
    }
    free(tensors);
    return rc;
}

static void close_all(struct merge *m)
{
    safetensors_close(m->base);
    safetensors_close(m->adapter);
    peft_fini(&m->peft);
    tensor_map_fini(&m->map);
    free(m->spec);
}

int export_merged(const char *model_path, const char *adapter_path, const char *out,
                  struct err *err)
{
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/')
        n--;
    char *tmp = xasprintf("%.*s.tmp", (int)n, out);
    struct merge m = {.model_path = model_path, .tmp = tmp, .spec = xcalloc(1, sizeof *m.spec)};
    int rc = access(out, F_OK) == 0 ? err_set(err, -EEXIST, "%s exists; nothing is overwritten",
                                              out) : open_all(&m, adapter_path, err);
    if (rc == 0) {
        remove_folder(tmp); /* of an export that was cut */
        rc = write_all(&m, err);
        if (rc == 0 && rename(tmp, out) < 0)
            rc = err_set(err, -errno, "%s: %s", out, strerror(errno));
        if (rc < 0)
            remove_folder(tmp);
    }
    close_all(&m);
    free(tmp);
    return rc;
}

/* ---- the command ---------------------------------------------------------------------------- */

#define RUN_STATE_BYTES_MAX (1u << 16)

/* Other tools' adapters hold no hash. A base may be another on purpose, so this is a warning. */
static void warn_of_another_base(const char *model_path, const char *adapter)
{
    char *path = xasprintf("%s/ballast/state.json", adapter);
    struct json *state = NULL;
    uint64_t hash;
    if (access(path, F_OK) == 0 && json_read_file(path, RUN_STATE_BYTES_MAX, &state, NULL) == 0 &&
        base_hash_alone(model_path, &hash, NULL) == 0) {
        const char *trained = json_as_string(json_get(state, "base_hash"));
        char *mine = xasprintf("%016" PRIx64, hash);
        if (trained && strcmp(trained, mine) != 0)
            fprintf(stderr, PROGRAM ": warning: %s was trained beside another base "
                    "(hash %.32s) than %s (%s)\n", adapter, trained, model_path, mine);
        free(mine);
    }
    json_destroy(state);
    free(path);
}

int export_main(int argc, char **argv)
{
    static const struct option known[] = {
        {"lora", required_argument, NULL, 'l'}, {"out", required_argument, NULL, 'o'},
        {"help", no_argument, NULL, 'h'},       {0},
    };
    const char *adapter = NULL, *out = NULL;
    struct err err = {0};
    int which;
    optind = 0; /* GNU: start over */
    opterr = 0;
    while ((which = getopt_long(argc, argv, "h", known, NULL)) != -1) {
        if (which == 'h') {
            fputs(usage, stdout);
            return 0;
        }
        if (which == 'l')
            adapter = optarg;
        else if (which == 'o')
            out = optarg;
        else
            return usage_error(PROGRAM, "'%s' is unknown, or lacks its value", argv[optind - 1]);
    }
    if (argc - optind != 1)
        return usage_error(PROGRAM, "expected one MODEL_DIR");
    if (!adapter || !out)
        return usage_error(PROGRAM, "--lora ADAPTER_DIR and --out DIR are needed");
    if (export_merged(argv[optind], adapter, out, &err) < 0) {
        fprintf(stderr, PROGRAM ": %s\n", err.text);
        return 1;
    }
    warn_of_another_base(argv[optind], adapter);
    printf("%s\n", out);
    return 0;
}
