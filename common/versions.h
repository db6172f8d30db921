/* versions.h - what this build is made of, as all programs tell it */
#ifndef COMMON_VERSIONS_H
#define COMMON_VERSIONS_H

#include <stddef.h>

struct version_row {
    const char *name, *text; /* a library that was left out has the text "none" */
};

/* Ballast's version and commit come first. */
extern const struct version_row version_rows[];
extern const size_t n_version_rows;

/* "PROGRAM 0.1.0 (commit ...)", then a line per library, on stdout. */
void version_print(const char *program);

#endif
