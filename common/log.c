/* log.c - writes each line with one write, so that lines of several threads never mix */
#include "common/log.h"

#include "common/clock.h"
#include "common/tame.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warn", "info", "debug"};
static const char *log_program = "ballast";
static enum log_level log_level_max = LOG_INFO;

void log_init(const char *program, enum log_level level)
{
    log_program = program;
    log_level_max = level;
}

int log_level_parse(const char *text)
{
    for (int i = LOG_ERROR; i <= LOG_DEBUG; i++)
        if (!strcmp(text, level_names[i]))
            return i;
    return -1;
}

void log_line(enum log_level level, const char *format, ...)
{
    if (level > log_level_max)
        return;
    char line[2048];
    char stamp[CLOCK_STAMP_BYTES];
    clock_stamp(clock_wall_ns(), stamp);
    int n = snprintf(line, sizeof line, "%s %s %s: ", stamp, level_names[level], log_program);
    va_list args;
    va_start(args, format);
    int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, format, args);
    va_end(args);
    size_t length = (size_t)n + (m > 0 ? (size_t)m : 0);
    if (length > sizeof line - 2)
        length = sizeof line - 2;
    tame_bytes(line, length);
    line[length++] = '\n';
    if (write(STDERR_FILENO, line, length) < 0)
        return; /* nowhere left to say it */
}
