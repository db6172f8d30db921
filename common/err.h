/* err.h - one line that a person will read about what went wrong
 *
 * The function that first knows fills it; those above pass it on; only shells log it. */
#ifndef COMMON_ERR_H
#define COMMON_ERR_H

struct err {
    int  code;       /* negative errno, 0 while unset */
    char text[1024]; /* one line: what, where, what was expected, what to do */
};

/* Fills err (NULL is fine) and returns code, so that a failure is one statement. */
int err_set(struct err *err, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the text that is already there; returns err's code. */
int err_prefix(struct err *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
