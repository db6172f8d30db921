/* ctl_torch.h - what torch.save wrote, as plain values
 *
 * Nothing in such a file is ever called: of its pickled program only values, containers and
 * tensors of numbers in the file itself are understood, all else is refused. */
#ifndef COORDINATOR_CTL_TORCH_H
#define COORDINATOR_CTL_TORCH_H

#include "common/err.h"
#include "common/types.h"

#define TORCH_DIMS_MAX 4

enum torch_kind {
    TORCH_NONE, TORCH_NUMBER, TORCH_TEXT, TORCH_LIST, TORCH_DICT, TORCH_TENSOR,
    TORCH_GLOBAL, /* the name of a class or function, while reading */
    TORCH_STORAGE /* numbers of a tensor, while reading */
};

struct torch_value {
    enum torch_kind kind;
    double      number;    /* also True and False */
    const char *text;      /* not terminated, in the file */
    size_t      n_text;
    uint32_t   *item;      /* values; of a dictionary key, value, key, value */
    uint32_t    n_items;
    size_t      n_alloc;
    uint32_t    n_dims;
    int64_t     shape[TORCH_DIMS_MAX], stride[TORCH_DIMS_MAX], offset;
    const uint8_t *bytes;  /* of a storage or tensor */
    uint64_t    n_elements;
    char        type;      /* 'i' int32, 'l' int64, 'f' float32, 'd' float64 */
};

struct torch_file {
    struct torch_value *value;
    uint32_t n_values, root;
    size_t   n_alloc;
};

/* bytes are kept until torch_close. -EINVAL: not such a file, or one with what is not a value. */
int  torch_open(const uint8_t *bytes, size_t n_bytes, struct torch_file *out, struct err *err);
void torch_close(struct torch_file *f);

/* The member of a dictionary, or NULL. */
const struct torch_value *torch_get(const struct torch_file *f, const struct torch_value *dict,
                                    const char *key);
static inline const struct torch_value *torch_item(const struct torch_file *f,
                                                   const struct torch_value *list, uint32_t i)
{
    return &f->value[list->item[i]];
}

/* An element of a tensor, by the indices of its n_dims dimensions. */
double torch_at(const struct torch_value *tensor, const int64_t *index);

#endif
