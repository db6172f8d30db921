/* usage.h - what programs answer to a command line that is wrong */
#ifndef COMMON_USAGE_H
#define COMMON_USAGE_H

enum { EXIT_USAGE = 2 };

/* One line on stderr, "COMMAND: what is wrong; see COMMAND --help". Returns EXIT_USAGE. */
int usage_error(const char *command, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
