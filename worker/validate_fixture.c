/* validate_fixture.c - reads a fixture folder and checks that it fits the model */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/json.h"
#include "common/mem.h"
#include "worker/validate.h"

#define EXPECTED_JSON_BYTES_MAX (16u << 20)
#define CURVE_STEPS_MAX 100000u

/* ---- tokens --------------------------------------------------------------------------------- */

static int read_whole(const struct st_view *v, int32_t **out, struct err *err)
{
    int32_t *x = xcalloc(v->n_elements, sizeof *x);
    int rc = st_read_i32(v, 0, v->n_elements, x, err);
    if (rc < 0) {
        free(x);
        return rc;
    }
    *out = x;
    return 0;
}

/* Batch i of a tensor (n, rows, length), or the only one of (rows, length). */
static int read_rows(const struct st_view *v, uint32_t i, struct token_rows *out, struct err *err)
{
    const struct st_tensor *t = &v->tensor;
    uint32_t d = t->n_dims;

    if (d < 2 || d > 3 || t->dims[d - 1] > INT32_MAX / 2 || t->dims[d - 2] > 4096 ||
        v->n_elements == 0 || v->n_elements > INT32_MAX)
        return err_set(err, -EINVAL, "%s: tensor '%s' is no (batches, rows, length) of tokens",
                       v->file, t->name);
    struct token_rows r = { .n_rows = (uint32_t)t->dims[d - 2], .length = (uint32_t)t->dims[d - 1],
                            .n_docs = 1 };
    size_t n = (size_t)r.n_rows * r.length;
    r.tokens = xcalloc(n, sizeof *r.tokens);
    r.cu_seqlens = xcalloc(2, sizeof *r.cu_seqlens);
    r.cu_seqlens[1] = (int32_t)r.length;
    *out = r;
    return st_read_i32(v, i * n, n, r.tokens, err);
}

static int read_packed(const struct safetensors *st, struct token_rows *out, struct err *err)
{
    const struct st_view *ids = safetensors_find(st, "packed_input_ids");
    const struct st_view *cu = safetensors_find(st, "packed_cu_seqlens");
    int rc;

    if (!ids || !cu)
        return 0;
    if ((rc = read_rows(ids, 0, out, err)) < 0)
        return rc;
    if (cu->n_elements < 2)
        return err_set(err, -EINVAL, "%s: packed_cu_seqlens has fewer than 2 numbers", cu->file);
    free(out->cu_seqlens);
    out->cu_seqlens = NULL;
    if ((rc = read_whole(cu, &out->cu_seqlens, err)) < 0)
        return rc;
    out->n_docs = (int32_t)cu->n_elements - 1;
    bool ok = out->cu_seqlens[0] == 0 && out->cu_seqlens[out->n_docs] == (int32_t)out->length;
    for (int32_t d = 0; d < out->n_docs; d++)
        ok = ok && out->cu_seqlens[d] < out->cu_seqlens[d + 1];
    if (!ok)
        return err_set(err, -EINVAL, "%s: packed_cu_seqlens does not ascend from 0 to %u",
                       cu->file, out->length);
    return 0;
}

/* The training batches: curve_input_ids, or what follows batch 0 of input_ids. */
static int read_steps(const struct safetensors *st, struct fixture *f, struct err *err)
{
    const struct st_view *own = safetensors_find(st, "curve_input_ids");
    const struct st_view *v = own ? own : safetensors_find(st, "input_ids");
    uint32_t first = own ? 0 : 1;

    if (v->tensor.n_dims != 3 || v->tensor.dims[0] < first + f->n_steps)
        return err_set(err, -EINVAL, "%s: expected %u training batches for the loss curve",
                       v->file, f->n_steps);
    f->steps = xcalloc(f->n_steps, sizeof *f->steps);
    for (uint32_t i = 0; i < f->n_steps; i++) {
        int rc = read_rows(v, first + i, &f->steps[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int check_logits(const struct safetensors *st, const char *name,
                        const struct token_rows *rows, uint32_t vocab, struct err *err)
{
    const struct st_view *v = safetensors_find(st, name);

    if (!v || v->n_elements != (uint64_t)rows->n_rows * rows->length * vocab)
        return err_set(err, -EINVAL, "expected.safetensors: tensor '%s' is missing or not of "
                       "%u rows, %u tokens and the model's vocabulary of %u", name, rows->n_rows,
                       rows->length, vocab);
    return 0;
}

static int read_tensors(const char *folder, const struct model_spec *spec, struct fixture *f,
                        struct err *err)
{
    char *path = xasprintf("%s/expected.safetensors", folder);
    char *gradients = xasprintf("%s/gradients/model.safetensors", folder);
    int rc = safetensors_open(path, &f->expected, err);

    if (rc == 0 && access(gradients, F_OK) == 0)
        rc = safetensors_open(gradients, &f->gradients, err);
    const struct st_view *ids = rc == 0 ? safetensors_find(f->expected, "input_ids") : NULL;
    if (rc == 0 && !ids)
        rc = err_set(err, -EINVAL, "%s: tensor 'input_ids' is missing", path);
    if (rc == 0 && (rc = read_rows(ids, 0, &f->batch, err)) == 0)
        rc = check_logits(f->expected, "logits", &f->batch, spec->vocab, err);
    if (rc == 0 && (rc = read_packed(f->expected, &f->packed, err)) == 0 && f->packed.n_rows)
        rc = check_logits(f->expected, "packed_logits", &f->packed, spec->vocab, err);
    if (rc == 0 && f->n_steps)
        rc = read_steps(f->expected, f, err);
    free(path);
    free(gradients);
    return rc;
}

/* ---- numbers -------------------------------------------------------------------------------- */

static double number(const struct json *o, const char *key)
{
    double x = NAN;
    json_as_double(json_get(o, key), &x);
    return x;
}

static double *numbers(const struct json *list)
{
    double *x = xcalloc(json_count(list), sizeof *x);
    for (size_t i = 0; i < json_count(list); i++)
        if (!json_as_double(json_at(list, i), &x[i]))
            x[i] = NAN;
    return x;
}

static int read_optim(const struct json *settings, struct curve *c, struct err *err)
{
    const struct json *betas = json_get(settings, "betas");
    double clip = number(settings, "clip_grad_norm");

    c->optim = (struct optim_config){
        .beta1 = NAN, .beta2 = NAN, .eps = number(settings, "eps"),
        .weight_decay = number(settings, "weight_decay"), .decay = DECAY_ALL,
        .clip_grad_norm = isnan(clip) ? 0 : clip,
    };
    json_as_double(json_at(betas, 0), &c->optim.beta1);
    json_as_double(json_at(betas, 1), &c->optim.beta2);
    c->lr = number(settings, "lr");
    if (!isfinite(c->lr + c->optim.beta1 + c->optim.beta2 + c->optim.eps + c->optim.weight_decay))
        return err_set(err, -EINVAL, "'%s' needs the numbers lr, betas, eps and weight_decay",
                       c->name);
    return 0;
}

/* NULL where there is no list; all lists must be as long as the first. */
static int read_list(const struct json *from, const char *key, struct fixture *f, double **out,
                     struct err *err)
{
    const struct json *list = json_get(from, key);
    size_t n = json_count(list);

    if (!list)
        return 0;
    if (n > CURVE_STEPS_MAX || (f->n_steps && n != f->n_steps))
        return err_set(err, -EINVAL, "'%s' has %zu numbers, expected one for each of %u steps",
                       key, n, f->n_steps);
    f->n_steps = (uint32_t)n;
    *out = numbers(list);
    return 0;
}

static int read_curve(const struct json *from, const char *name, struct fixture *f,
                      struct err *err)
{
    struct curve *c = &f->curves[f->n_curves];
    int rc;

    *c = (struct curve){ .name = name, .after = number(from, "loss_on_first_curve_batch_after") };
    if (json_count(json_get(from, "loss_curve")) == 0)
        return 0;
    f->n_curves++;
    if ((rc = read_list(from, "loss_curve", f, &c->losses, err)) < 0 ||
        (rc = read_list(from, "grad_norms", f, &c->norms, err)) < 0)
        return rc;
    return read_optim(json_get(from, "adamw"), c, err);
}

/* Float32 runs of the second curve part after some steps, and its float64 losses say when. */
static int read_curves(const struct json *root, struct fixture *f, struct err *err)
{
    const struct json *gentle = json_get(root, "gentle");
    int rc = read_curve(gentle, "gentle", f, err);

    if (rc < 0 || (rc = read_curve(root, "adamw", f, err)) < 0 || f->n_curves < 2)
        return rc;
    return read_list(root, "loss_curve_float64", f, &f->curves[1].exact, err);
}

/* Adapters' settings stand beside their curve. */
static int read_lora(const struct json *lora, struct fixture *f, struct err *err)
{
    int rc = 0;

    f->lora.name = "lora";
    f->lora.after = NAN;
    if (json_count(json_get(lora, "loss_curve")) > 0 &&
        (rc = read_list(lora, "loss_curve", f, &f->lora.losses, err)) == 0)
        rc = read_optim(lora, &f->lora, err);
    return rc;
}

static int read_numbers(const char *folder, struct fixture *f, struct err *err)
{
    char *path = xasprintf("%s/expected.json", folder);
    struct json *root;
    int rc = json_read_file(path, EXPECTED_JSON_BYTES_MAX, &root, err);

    if (rc == 0) {
        const struct json *packed = json_get(root, "packed");
        f->loss = number(root, "loss");
        f->packed_loss = number(packed, "loss");
        f->packed_norm = number(packed, "gradient_norm");
        if ((rc = read_curves(root, f, err)) == 0)
            rc = read_lora(json_get(root, "lora"), f, err);
        json_destroy(root);
        if (rc < 0)
            err_prefix(err, "%s", path);
    }
    free(path);
    return rc;
}

static int open_adapters(const char *folder, struct fixture *f, struct err *err)
{
    char *start = xasprintf("%s/lora-start", folder);
    char *end = xasprintf("%s/lora-end/" PEFT_TENSORS_FILE, folder);
    int rc = access(end, F_OK) == 0 ? safetensors_open(end, &f->lora_end, err) : 0;

    if (rc == 0 && access(start, F_OK) == 0)
        f->lora_start = start;
    else
        free(start);
    free(end);
    return rc;
}

int fixture_open(const char *folder, const struct model_spec *spec, struct fixture *out,
                 struct err *err)
{
    struct fixture f = {0};
    int rc = read_numbers(folder, &f, err);

    if (rc == 0)
        rc = read_tensors(folder, spec, &f, err);
    if (rc == 0 && f.lora.losses)
        rc = open_adapters(folder, &f, err);
    if (rc < 0) {
        fixture_close(&f);
        return rc;
    }
    *out = f;
    return 0;
}

static void rows_fini(struct token_rows *r)
{
    free(r->tokens);
    free(r->cu_seqlens);
}

void fixture_close(struct fixture *f)
{
    safetensors_close(f->expected);
    safetensors_close(f->gradients);
    rows_fini(&f->batch);
    rows_fini(&f->packed);
    for (uint32_t i = 0; f->steps && i < f->n_steps; i++)
        rows_fini(&f->steps[i]);
    free(f->steps);
    for (uint32_t i = 0; i < f->n_curves; i++) {
        free(f->curves[i].losses);
        free(f->curves[i].norms);
        free(f->curves[i].exact);
    }
    free(f->lora.losses);
    free(f->lora_start);
    safetensors_close(f->lora_end);
    *f = (struct fixture){0};
}
