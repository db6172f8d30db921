/* safetensors_parts.h - what the reader's two files share: open files and their views
 *
 * safetensors.c opens and closes files, safetensors_header.c reads one file's header into views.
 * Nobody else includes this. */
#ifndef COMMON_SAFETENSORS_PARTS_H
#define COMMON_SAFETENSORS_PARTS_H

#include "common/mem.h"
#include "common/safetensors.h"

struct st_file {
    char    *path;
    uint8_t *map;
    size_t   n_bytes;
};

struct safetensors {
    struct st_file *files;
    size_t n_files;
    struct st_view *views;
    size_t n_views, views_cap;
    struct arena names;
};

/* Not empty, no control characters: fit for an error line. */
bool st_is_printable(const char *name);

/* Checks the header of f, which is mapped, and appends a view per tensor to st. */
int st_read_header(struct safetensors *st, const struct st_file *f, struct err *err);

#endif
