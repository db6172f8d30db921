/* ckpt_forms.h - in which form each tensor of a model is written: its dtype, or its bytes as read
 *
 * Part of ckpt. A tensor of the model's folder keeps its dtype, unless the job names one. Packed
 * tensors (MXFP4, FP8) stay packed, byte for byte, where the job trains none of them; else all of
 * them are written plain. */
#ifndef WORKER_CKPT_FORMS_H
#define WORKER_CKPT_FORMS_H

#include "common/safetensors.h"
#include "common/tensor_map.h"

/* checkpoint.dtype. Other than source: of all tensors but those that are F32 wherever they are
 * published. */
enum ckpt_dtype { CKPT_DTYPE_SOURCE, CKPT_DTYPE_F32, CKPT_DTYPE_BF16, CKPT_DTYPE_F16 };

/* -EINVAL names the words that are known. */
int ckpt_dtype_parse(const char *word, enum ckpt_dtype *out, struct err *err);

struct ckpt_form {
    enum st_dtype dtype;
    bool is_left_out; /* the folder lacks it and nothing trains it */
    bool is_exact;    /* what is written is what was trained: no master copy is needed */
    const struct st_view *packed, *scales; /* written as they are; NULL: as dtype */
    const struct st_view *fused; /* where not NULL: a part of a tensor like this, */
    uint64_t fused_at;           /* from this number on */
};

struct ckpt_forms {
    struct safetensors *source; /* NULL: a folder without weights */
    struct ckpt_form *of;       /* by index of the map's entries */
    bool   is_packed;           /* what the configuration says about quantization stays true */
    size_t n_masters;           /* tensors that are not exact */
};

/* has_weights: whether the folder holds any. Gives *out, ended with ckpt_forms_close. Fails like
 * safetensors_open, and as ckpt_load_weights does for a tensor that is missing. */
int  ckpt_forms_open(const char *model_path, bool has_weights, const struct tensor_map *map,
                     enum ckpt_dtype choice, struct ckpt_forms *out, struct err *err);
void ckpt_forms_close(struct ckpt_forms *f);

#endif
