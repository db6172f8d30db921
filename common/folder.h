/* folder.h - folders that are made when somebody names them for what is to be written */
#ifndef COMMON_FOLDER_H
#define COMMON_FOLDER_H

#include <sys/types.h>

#include "common/err.h"

/* Makes path with that mode, and what is missing above it. One that is there stays as it is.
 * Returns 0, or a negative errno with a line that names the part that could not be made. */
int folder_make(const char *path, mode_t mode, struct err *err);

#endif
