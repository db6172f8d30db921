/* ctl_zip.h - finds a file in an archive whose files are stored as they are */
#ifndef COORDINATOR_CTL_ZIP_H
#define COORDINATOR_CTL_ZIP_H

#include "common/err.h"
#include "common/types.h"

/* The file whose path ends with "/name". -ENOENT if there is none; -EINVAL if the archive is
 * damaged, or the file compressed. */
int zip_find(const uint8_t *bytes, size_t n_bytes, const char *name, const uint8_t **out,
             size_t *out_n, struct err *err);

#endif
