/* usage.c - one line for a command line that is wrong */
#include "common/usage.h"

#include <stdarg.h>
#include <stdio.h>

int usage_error(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s: ", command);
    vfprintf(stderr, format, args);
    fprintf(stderr, "; see %s --help\n", command);
    va_end(args);
    return EXIT_USAGE;
}
