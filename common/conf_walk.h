/* conf_walk.h - what conf's two halves share: the walk over YAML, and setting one value */
#ifndef COMMON_CONF_WALK_H
#define COMMON_CONF_WALK_H

#include "common/conf.h"

#define CONF_PATH_BYTES 160

/* Walks text into c->target; c->file stands in messages. */
void conf_walk(struct conf *c, const char *text, size_t n_bytes);

/* The field that f stands for: itself, or for an older spelling the field it names, whose value
 * then replaces *value. */
const struct field *conf_resolve(const struct field_table *t, const struct field *f,
                                 const char **value);

/* Sets f from text, or appends text to it; paths become absolute. */
int conf_set_text(struct conf *c, const struct field *f, const char *text, bool append,
                  struct err *err);

/* Where f was written; the slot belongs to c. */
char **conf_field_where(const struct conf *c, const struct field *f);

#endif
