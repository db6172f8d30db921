/* dashboard.h - the pages that the coordinator serves, as bytes; embed.cmake makes them */
#ifndef COORDINATOR_DASHBOARD_DASHBOARD_H
#define COORDINATOR_DASHBOARD_DASHBOARD_H

#include <stddef.h>

struct dashboard_file {
    const char *name, *type; /* "index.html", "text/html; charset=utf-8" */
    const unsigned char *bytes;
    size_t n_bytes;
};

extern const struct dashboard_file dashboard_files[];
extern const size_t dashboard_n_files;

#endif
