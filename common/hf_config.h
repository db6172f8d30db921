/* hf_config.h - a HuggingFace config.json as a model_spec
 *
 * The file is foreign: every key that changes what is computed is checked for type, range and
 * consistency with the others, and a structure that is not built here is refused by name. */
#ifndef COMMON_HF_CONFIG_H
#define COMMON_HF_CONFIG_H

#include "common/err.h"
#include "common/model_spec.h"

#define HF_CONFIG_BYTES_MAX (4u << 20)

/* path: a model folder or its config.json. Errors begin with the file's name: -ENOENT without the
 * file, -EFBIG and -EINVAL for what is no such JSON, -EINVAL with the key for a bad value,
 * -ENOTSUP for a model_type or a structure that is not supported. *out is untouched on failure. */
int hf_config_read(const char *path, struct model_spec *out, struct err *err);

/* The same of text in memory; name begins the errors. */
int hf_config_parse(const char *name, const char *text, size_t n_bytes, struct model_spec *out,
                    struct err *err);

#endif
