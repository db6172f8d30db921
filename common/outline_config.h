/* outline_config.h - any MoE model's config.json as an outline
 *
 * Reads the keys of all published families, old and new spellings, nested text configurations,
 * layer lists and patterns. A family that is not known by name is read by its keys alone, and the
 * outline's notes say what that rests on. */
#ifndef COMMON_OUTLINE_CONFIG_H
#define COMMON_OUTLINE_CONFIG_H

#include "common/outline.h"

/* name begins the errors: -EINVAL with the key for a bad or missing value, -EFBIG for more than
 * HF_CONFIG_BYTES_MAX. Gives *out, freed with free(). */
int outline_parse(const char *name, const char *text, size_t n_bytes, struct outline **out,
                  struct err *err);

/* The same of a file. */
int outline_read(const char *path, struct outline **out, struct err *err);

/* Is a model_type one whose every tensor is known? */
bool outline_is_known(const char *type);

#endif
