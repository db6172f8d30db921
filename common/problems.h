/* problems.h - what is wrong with a file or a message, one line each
 *
 * For input that a person wrote: all of it is said at once, not one error per try. */
#ifndef COMMON_PROBLEMS_H
#define COMMON_PROBLEMS_H

#include <stdio.h>

#include "common/err.h"
#include "common/types.h"

struct problem {
    char *key;   /* the path, "" if it is about no key */
    char *where; /* "job.yaml:3", "--set", "" when it came by wire or by default */
    char *text;  /* the line without where */
};

#define PROBLEMS_MAX 10u /* the rest is counted only */

/* All zero is none. */
struct problems {
    struct problem items[PROBLEMS_MAX];
    size_t n, n_total;
};

/* The line reads "where: key 'key': text"; where and key may be NULL. Control characters become
 * '?'. Always returns -EINVAL. */
int  problems_add(struct problems *p, const char *where, const char *key, const char *text, ...)
    __attribute__((format(printf, 4, 5)));

/* A line each, and how many more. Gives the lines as one text without the last newline. */
char *problems_text(const struct problems *p);
void  problems_print(const struct problems *p, FILE *out);

/* The first one, and how many more there are, as err; returns -EINVAL, or 0 without problems. */
int  problems_err(const struct problems *p, struct err *err);
void problems_fini(struct problems *p);

#endif
