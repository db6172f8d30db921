/* outline_infer.h - an outline of a family whose keys do not tell enough, from its tensors */
#ifndef COMMON_OUTLINE_INFER_H
#define COMMON_OUTLINE_INFER_H

#include "common/outline.h"
#include "common/tensor_list.h"

/* Layers and widths are those of the tensors; what they do not show (heads, operators) stays
 * unknown, and notes say so. why: what the keys lacked. -ENOTSUP for a family that is known, whose
 * keys must be right, and where no tensor's shape is known; -EINVAL for a broken file or tensors
 * that make no model. Gives *out, freed with free(); its tensors' names live as long as list. */
int outline_infer(const char *config, const struct tensor_list *list, const char *why,
                  struct outline **out, struct err *err);

#endif
