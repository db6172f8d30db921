/* conf.h - YAML files read through a table of fields; libyaml's home
 *
 * Everything that is wrong is one line, "FILE:LINE: key 'train.steps': 0 is out of range, allowed
 * 1 to 1e9"; unknown keys name the nearest known one. Anchors, aliases, tags, several documents,
 * nesting beyond the table, duplicate keys and files above JOB_FILE_BYTES_MAX are refused. */
#ifndef COMMON_CONF_H
#define COMMON_CONF_H

#include "common/field.h"

/* A daemon's own file in one call: defaults, the file's values, missing keys. Relative paths are
 * taken against the file's folder. On failure *out holds nothing that needs freeing and err has
 * the first problem; on success the members are ended with fields_fini. */
int conf_read(const char *file, const struct field_table *table, void *out, struct err *err);

/* The same in steps, when all problems and the place of each key are wanted. */
struct conf {
    const struct field_table *table;
    void *target;
    char *file;   /* as given, for messages */
    char *folder; /* absolute: relative paths are taken against it */
    char **where; /* per field: "FILE:LINE" or "--set"; NULL: the default stands */
    struct problems problems;
    bool broken;  /* not readable as a whole, so missing keys are not worth a line */
};

/* Sets target to its defaults. target and table are kept until conf_fini, which leaves target to
 * the caller. */
void conf_init(struct conf *c, const struct field_table *table, void *target);
void conf_fini(struct conf *c);

void conf_read_file(struct conf *c, const char *file);
/* text need not end with NUL; name stands in messages, folder may be NULL (the current one). */
void conf_read_text(struct conf *c, const char *name, const char *folder, const char *text,
                    size_t n_bytes);
/* "key=value", from --set; relative paths as in the file. */
void conf_set(struct conf *c, const char *assignment);
/* Adds a problem for each required key that is still missing. Returns 0, or -EINVAL if there is
 * any problem. */
int conf_finish(struct conf *c);
/* Where the key was written, "FILE" if nowhere. Lives as long as c. */
const char *conf_where(const struct conf *c, const char *key);

#endif
