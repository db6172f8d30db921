/* err.c - fills the one line of an error */
#include "common/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/tame.h"

int err_set(struct err *err, int code, const char *format, ...)
{
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
        tame_text(err->text);
        err->code = code;
    }
    return code;
}

int err_prefix(struct err *err, const char *format, ...)
{
    if (!err)
        return 0;
    char old[sizeof err->text];
    memcpy(old, err->text, sizeof old);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof err->text)
        snprintf(err->text + n, sizeof err->text - (size_t)n, ": %.*s",
                 (int)(sizeof err->text - (size_t)n), old);
    tame_text(err->text);
    return err->code;
}
