/* ctl_torch.c - what torch.save wrote, as plain values
 *
 * The archive's data.pkl is a program for a stack machine. Ours has the instructions that make
 * values; of calls it knows only the one that makes a tensor of a storage and the one that makes
 * an ordered dictionary, and both make data. */
#include "coordinator/ctl_torch.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "coordinator/ctl_zip.h"

#define VALUES_MAX (16u << 20)
#define NO_VALUE   UINT32_MAX

struct machine {
    const uint8_t *zip;
    size_t      n_zip;
    const uint8_t *code;
    size_t      n_code, at;
    struct torch_file *f;
    uint32_t   *stack, n_stack;
    uint32_t   *mark, n_marks; /* heights of the stack */
    size_t      stack_alloc, mark_alloc;
    uint32_t   *memo, n_memo;              /* values by number, NO_VALUE */
    struct err *err;
};

static int refuse(struct machine *m, const char *what)
{
    return err_set(m->err, -EINVAL, "byte %zu of data.pkl: %s", m->at, what);
}

static int push(struct machine *m, uint32_t value)
{
    m->stack = xgrow(m->stack, m->n_stack, &m->stack_alloc, sizeof *m->stack);
    m->stack[m->n_stack++] = value;
    return 0;
}

static int push_new(struct machine *m, struct torch_value v)
{
    struct torch_file *f = m->f;
    if (f->n_values == VALUES_MAX)
        return refuse(m, "too many values");
    f->value = xgrow(f->value, f->n_values, &f->n_alloc, sizeof *f->value);
    f->value[f->n_values] = v;
    return push(m, f->n_values++);
}

static int push_number(struct machine *m, double x)
{
    return push_new(m, (struct torch_value){ .kind = TORCH_NUMBER, .number = x });
}

/* The value on top, which is left there; NULL if there is none above the last mark. */
static struct torch_value *top(struct machine *m, enum torch_kind kind, uint32_t below)
{
    uint32_t floor = m->n_marks ? m->mark[m->n_marks - 1] : 0;
    if (m->n_stack < floor + below + 1)
        return NULL;
    struct torch_value *v = &m->f->value[m->stack[m->n_stack - 1 - below]];
    return v->kind == kind ? v : NULL;
}

static void append(struct torch_value *v, uint32_t item)
{
    v->item = xgrow(v->item, v->n_items, &v->n_alloc, sizeof *v->item);
    v->item[v->n_items++] = item;
}

static const uint8_t *take(struct machine *m, uint64_t n)
{
    if (n > m->n_code - m->at)
        return NULL;
    m->at += n;
    return m->code + m->at - n;
}

static uint64_t little(const uint8_t *p, uint32_t n)
{
    uint64_t x = 0;
    for (uint32_t i = n; i-- > 0;)
        x = x << 8 | p[i];
    return x;
}

/* ---- instructions ---------------------------------------------------------------------------- */

static int push_text(struct machine *m, uint32_t n_length)
{
    const uint8_t *p = take(m, n_length);
    uint64_t n = p ? little(p, n_length) : 0;
    if (!p || !(p = take(m, n)))
        return refuse(m, "it ends within a text");
    return push_new(m, (struct torch_value){ .kind = TORCH_TEXT, .text = (const char *)p,
                                             .n_text = n });
}

/* A whole number in n little-endian bytes with a sign. */
static int push_whole(struct machine *m, uint32_t n, bool has_sign)
{
    const uint8_t *p = n <= 8 ? take(m, n) : NULL;
    if (!p)
        return refuse(m, "a number that is cut off or too large");
    uint64_t x = little(p, n);
    if (has_sign && n && n < 8 && p[n - 1] & 0x80)
        x |= ~0ull << (8 * n);
    return push_number(m, has_sign ? (double)(int64_t)x : (double)x);
}

static int push_real(struct machine *m)
{
    const uint8_t *p = take(m, 8);
    uint64_t bits = 0;
    double x;
    if (!p)
        return refuse(m, "it ends within a number");
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | p[i];
    memcpy(&x, &bits, sizeof x);
    return push_number(m, x);
}

/* "module\nname\n" */
static int push_global(struct machine *m)
{
    const char *first = (const char *)m->code + m->at;
    const char *end = memchr(first, '\n', m->n_code - m->at);
    const char *last = end ? memchr(end + 1, '\n', m->n_code - m->at - (size_t)(end + 1 - first))
                           : NULL;
    if (!last)
        return refuse(m, "it ends within a name");
    m->at += (size_t)(last + 1 - first);
    return push_new(m, (struct torch_value){ .kind = TORCH_GLOBAL, .text = first,
                                             .n_text = (size_t)(last - first) });
}

static bool is_text(const struct torch_value *v, enum torch_kind kind, const char *text)
{
    return v && v->kind == kind && v->n_text == strlen(text) && !memcmp(v->text, text, v->n_text);
}

static int set_mark(struct machine *m)
{
    m->mark = xgrow(m->mark, m->n_marks, &m->mark_alloc, sizeof *m->mark);
    m->mark[m->n_marks++] = m->n_stack;
    return 0;
}

/* What is above the last mark, or the n topmost values, as a new list. */
static int make_list(struct machine *m, uint32_t n, bool to_mark)
{
    if (to_mark && !m->n_marks)
        return refuse(m, "no mark");
    uint32_t floor = m->n_marks ? m->mark[m->n_marks - 1] : 0;
    if (to_mark) {
        m->n_marks--;
        n = m->n_stack - floor;
    } else if (m->n_stack < floor + n) {
        return refuse(m, "too few values");
    }
    struct torch_value v = { .kind = TORCH_LIST };
    for (uint32_t i = m->n_stack - n; i < m->n_stack; i++)
        append(&v, m->stack[i]);
    m->n_stack -= n;
    int rc = push_new(m, v);
    if (rc < 0)
        free(v.item);
    return rc;
}

/* Moves what is above the last mark, or the n topmost values, into the container below. */
static int add_items(struct machine *m, enum torch_kind kind, uint32_t n, bool to_mark)
{
    uint32_t floor = m->n_marks ? m->mark[m->n_marks - 1] : 0;
    if (to_mark && !m->n_marks)
        return refuse(m, "no mark");
    if (to_mark) {
        m->n_marks--;
        n = m->n_stack - floor;
    }
    struct torch_value *v = top(m, kind, n);
    if (!v || (kind == TORCH_DICT && n % 2))
        return refuse(m, "nothing to add to");
    for (uint32_t i = m->n_stack - n; i < m->n_stack; i++)
        append(v, m->stack[i]);
    m->n_stack -= n;
    return 0;
}

static int memo_put(struct machine *m, uint64_t index)
{
    if (!m->n_stack || index >= VALUES_MAX)
        return refuse(m, "nothing to remember");
    if (index >= m->n_memo) {
        uint32_t n = (uint32_t)index + 1 + m->n_memo;
        m->memo = xrealloc(m->memo, n * sizeof *m->memo);
        for (uint32_t i = m->n_memo; i < n; i++)
            m->memo[i] = NO_VALUE;
        m->n_memo = n;
    }
    m->memo[index] = m->stack[m->n_stack - 1];
    return 0;
}

static int memo_get(struct machine *m, uint64_t index)
{
    if (index >= m->n_memo || m->memo[index] == NO_VALUE)
        return refuse(m, "nothing was remembered there");
    return push(m, m->memo[index]);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static char storage_type(const struct torch_value *v)
{
    static const struct { const char *name; char type; } types[] = {
        { "torch\nIntStorage", 'i' }, { "torch\nLongStorage", 'l' },
        { "torch\nFloatStorage", 'f' }, { "torch\nDoubleStorage", 'd' },
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (is_text(v, TORCH_GLOBAL, types[i].name))
            return types[i].type;
    return 0;
}

static uint32_t type_bytes(char type)
{
    return type == 'i' || type == 'f' ? 4 : 8;
}

/* ("storage", type, key, device, elements) becomes the file data/KEY of the archive. */
static int load_storage(struct machine *m)
{
    const struct torch_value *id = top(m, TORCH_LIST, 0);
    if (!id || id->n_items != 5)
        return refuse(m, "expected a storage");
    const struct torch_value *key = torch_item(m->f, id, 2), *n = torch_item(m->f, id, 4);
    char type = storage_type(torch_item(m->f, id, 1)), name[64];
    struct torch_value v = { .kind = TORCH_STORAGE, .type = type };
    size_t n_bytes;
    if (!is_text(torch_item(m->f, id, 0), TORCH_TEXT, "storage") || !type ||
        key->kind != TORCH_TEXT || key->n_text > 32 || n->kind != TORCH_NUMBER ||
        !(n->number >= 0 && n->number < 1e12))
        return refuse(m, "expected a storage of 32 or 64 bit numbers");
    snprintf(name, sizeof name, "data/%.*s", (int)key->n_text, key->text);
    int rc = zip_find(m->zip, m->n_zip, name, &v.bytes, &n_bytes, m->err);
    if (rc < 0)
        return -EINVAL;
    v.n_elements = (uint64_t)n->number;
    if (n_bytes / type_bytes(type) < v.n_elements)
        return refuse(m, "a storage is shorter than it says");
    m->n_stack--;
    return push_new(m, v);
}

static bool read_dims(const struct torch_file *f, const struct torch_value *list, int64_t *out)
{
    if (list->kind != TORCH_LIST || list->n_items > TORCH_DIMS_MAX)
        return false;
    for (uint32_t i = 0; i < list->n_items; i++) {
        const struct torch_value *x = torch_item(f, list, i);
        if (x->kind != TORCH_NUMBER || !(x->number >= 0 && x->number < 1e12))
            return false;
        out[i] = (int64_t)x->number;
    }
    return true;
}

/* (storage, offset, shape, strides, ...): every element must lie in the storage. */
static int make_tensor(struct machine *m, const struct torch_value *args)
{
    const struct torch_file *f = m->f;
    if (args->n_items < 4 || torch_item(f, args, 0)->kind != TORCH_STORAGE ||
        torch_item(f, args, 1)->kind != TORCH_NUMBER ||
        torch_item(f, args, 2)->n_items != torch_item(f, args, 3)->n_items)
        return refuse(m, "expected a tensor");
    struct torch_value v = *torch_item(f, args, 0);
    double last = torch_item(f, args, 1)->number;
    v.kind = TORCH_TENSOR;
    v.n_dims = torch_item(f, args, 2)->n_items;
    if (!(last >= 0 && last < 1e12) || !read_dims(f, torch_item(f, args, 2), v.shape) ||
        !read_dims(f, torch_item(f, args, 3), v.stride))
        return refuse(m, "a tensor's shape");
    v.offset = (int64_t)last;
    bool is_empty = false;
    for (uint32_t d = 0; d < v.n_dims; d++) {
        is_empty |= v.shape[d] == 0;
        last += (double)(v.shape[d] - 1) * (double)v.stride[d];
    }
    if (!is_empty && !(last < (double)v.n_elements))
        return refuse(m, "a tensor reaches beyond its storage");
    m->n_stack -= 2;
    return push_new(m, v);
}

static int call(struct machine *m)
{
    const struct torch_value *args = top(m, TORCH_LIST, 0), *what = top(m, TORCH_GLOBAL, 1);
    if (args && is_text(what, TORCH_GLOBAL, "torch._utils\n_rebuild_tensor_v2"))
        return make_tensor(m, args);
    if (args && !args->n_items && is_text(what, TORCH_GLOBAL, "collections\nOrderedDict")) {
        m->n_stack -= 2;
        return push_new(m, (struct torch_value){ .kind = TORCH_DICT });
    }
    return refuse(m, "it would call something; only values and tensors are read");
}

/* ---- the program ----------------------------------------------------------------------------- */

/* With n bytes of a number behind it. */
static int step_memo(struct machine *m, uint32_t n, bool is_put)
{
    const uint8_t *p = take(m, n);
    if (!p)
        return refuse(m, "it ends within an instruction");
    return is_put ? memo_put(m, little(p, n)) : memo_get(m, little(p, n));
}

static int push_long(struct machine *m)
{
    const uint8_t *p = take(m, 1);
    return p ? push_whole(m, *p, true) : refuse(m, "it ends within a number");
}

static int step(struct machine *m, uint8_t op)
{
    switch (op) {
    case 0x80: return take(m, 1) ? 0 : refuse(m, "it ends too early");
    case '}': return push_new(m, (struct torch_value){ .kind = TORCH_DICT });
    case ']': case ')': return push_new(m, (struct torch_value){ .kind = TORCH_LIST });
    case '(': return set_mark(m);
    case 't': return make_list(m, 0, true);
    case 0x85: case 0x86: case 0x87: return make_list(m, op - 0x84u, false);
    case 'X': return push_text(m, 4);
    case 0x8c: return push_text(m, 1);
    case 'J': return push_whole(m, 4, true);
    case 'M': return push_whole(m, 2, false);
    case 'K': return push_whole(m, 1, false);
    case 0x8a: return push_long(m);
    case 'G': return push_real(m);
    case 'N': return push_new(m, (struct torch_value){ .kind = TORCH_NONE });
    case 0x88: case 0x89: return push_number(m, op == 0x88);
    case 'c': return push_global(m);
    case 'q': return step_memo(m, 1, true);
    case 'r': return step_memo(m, 4, true);
    case 'h': return step_memo(m, 1, false);
    case 'j': return step_memo(m, 4, false);
    case 'a': return add_items(m, TORCH_LIST, 1, false);
    case 'e': return add_items(m, TORCH_LIST, 0, true);
    case 's': return add_items(m, TORCH_DICT, 2, false);
    case 'u': return add_items(m, TORCH_DICT, 0, true);
    case 'Q': return load_storage(m);
    case 'R': return call(m);
    default: return refuse(m, "an instruction that makes no value");
    }
}

static int run(struct machine *m)
{
    for (;;) {
        const uint8_t *op = take(m, 1);
        if (!op)
            return refuse(m, "it has no end");
        if (*op == '.')
            break;
        int rc = step(m, *op);
        if (rc < 0)
            return rc;
    }
    if (m->n_stack != 1 || m->n_marks)
        return refuse(m, "it does not end with one value");
    m->f->root = m->stack[0];
    return 0;
}

int torch_open(const uint8_t *bytes, size_t n_bytes, struct torch_file *out, struct err *err)
{
    struct torch_file f = { 0 };
    struct machine m = { .zip = bytes, .n_zip = n_bytes, .f = &f, .err = err };
    int rc = zip_find(bytes, n_bytes, "data.pkl", &m.code, &m.n_code, err);
    if (rc == 0)
        rc = run(&m);
    free(m.stack);
    free(m.mark);
    free(m.memo);
    if (rc < 0) {
        torch_close(&f);
        return -EINVAL;
    }
    *out = f;
    return 0;
}

void torch_close(struct torch_file *f)
{
    for (uint32_t i = 0; i < f->n_values; i++)
        free(f->value[i].item);
    free(f->value);
    *f = (struct torch_file){ 0 };
}

const struct torch_value *torch_get(const struct torch_file *f, const struct torch_value *dict,
                                    const char *key)
{
    if (dict->kind != TORCH_DICT)
        return NULL;
    for (uint32_t i = 0; i + 1 < dict->n_items; i += 2)
        if (is_text(torch_item(f, dict, i), TORCH_TEXT, key))
            return torch_item(f, dict, i + 1);
    return NULL;
}

double torch_at(const struct torch_value *t, const int64_t *index)
{
    int64_t at = t->offset;
    for (uint32_t d = 0; d < t->n_dims; d++)
        at += index[d] * t->stride[d];
    const uint8_t *p = t->bytes + (uint64_t)at * type_bytes(t->type);
    uint64_t bits = little(p, type_bytes(t->type));
    uint32_t half = (uint32_t)bits;
    double d;
    float f;
    switch (t->type) {
    case 'i': return (int32_t)half;
    case 'l': return (double)(int64_t)bits;
    case 'f': memcpy(&f, &half, sizeof f); return (double)f;
    default: memcpy(&d, &bits, sizeof d); return d;
    }
}
