/* json_unique.h - refuses a JSON document in which an object holds the same key twice
 *
 * Private to json.c, whose library keeps the last of two and says nothing. */
#ifndef COMMON_JSON_UNIQUE_H
#define COMMON_JSON_UNIQUE_H

#include "common/json.h"

/* root is what text, which is valid JSON, was read as. -EINVAL names the key. */
int json_check_unique(const struct json *root, const char *text, size_t n_bytes, struct err *err);

#endif
