/* ckpt_fp8.h - matrices of FP8 in a checkpoint, with a scale for each block, row, or all of it
 *
 * Private to ckpt_source and export; what a ckpt_source is, its header says. */
#ifndef WORKER_CKPT_FP8_H
#define WORKER_CKPT_FP8_H

#include "worker/ckpt_source.h"

/* inverse: NAME_scale_inv, scale: NAME_scale; NULL for what is not there. -EINVAL or -ENOTSUP with
 * the tensor that is wrong. */
int  ckpt_fp8_find(const struct st_view *values, const struct st_view *inverse,
                   const struct st_view *scale, const struct tensor_entry *e,
                   struct ckpt_source *out, struct err *err);

int  ckpt_fp8_read(const struct ckpt_source *s, uint64_t first, uint64_t n, float *out,
                   struct err *err);

/* Whether each block of the packed form lies in one of the source's, so that its codes stay. */
bool ckpt_fp8_has_our_blocks(const struct ckpt_source *s, const struct tensor_entry *e);
/* Those codes and their scales, packed. -EINVAL where one is no number. */
int  ckpt_fp8_take(const struct ckpt_source *s, const struct tensor_entry *e, uint8_t *out,
                   struct err *err);

/* x (rows, width) in the form of s: its codes, (rows, width), and its scales as floats, as many as
 * s has, which their dtype holds exactly. */
void ckpt_fp8_encode(const struct ckpt_source *s, const float *x, uint64_t rows,
                     uint8_t *out_codes, float *out_scales);

/* ---- what ckpt_source.c has for both -------------------------------------------------------- */

size_t ckpt_dims_text(const uint64_t *dims, uint32_t n, char out[128]);
int ckpt_check_shape(const struct st_view *v, const uint64_t *dims, uint32_t n_dims,
                     struct err *err);
int ckpt_check_dtype(const struct st_view *v, enum st_dtype dtype, struct err *err);
int ckpt_no_number(const struct st_view *v, const char *what, int64_t i, struct err *err);

#endif
