/* log.c - writes each line with one write, so that lines of several threads never mix
 *
 * Warnings tell of what others did, as often as they do it: so many a second are enough, lest a
 * peer that goes wrong fills a disk with them. Lost ones are counted. */
#include "common/log.h"

#include "common/clock.h"
#include "common/tame.h"
#include "common/types.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LOG_WARNINGS_PER_S 100u

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

static void write_line(enum log_level level, const char *format, va_list args)
{
    char line[2048];
    char stamp[CLOCK_STAMP_BYTES];
    clock_stamp(clock_wall_ns(), stamp);
    int n = snprintf(line, sizeof line, "%s %s %s: ", stamp, level_names[level], log_program);
    int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, format, args);
    size_t length = (size_t)n + (m > 0 ? (size_t)m : 0);
    if (length > sizeof line - 2)
        length = sizeof line - 2;
    tame_bytes(line, length);
    line[length++] = '\n';
    if (write(STDERR_FILENO, line, length) < 0)
        return; /* nowhere left to say it */
}

static void say(enum log_level level, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    write_line(level, format, args);
    va_end(args);
}

/* Without a lock, which a fork could leave taken. */
static bool may_warn(void)
{
    static _Atomic uint64_t second;
    static _Atomic uint32_t n_warnings;
    uint64_t now = clock_now_ns() / NS_PER_S, last = atomic_load(&second);
    if (now != last && atomic_compare_exchange_strong(&second, &last, now)) {
        uint32_t n = atomic_exchange(&n_warnings, 0);
        if (n > LOG_WARNINGS_PER_S)
            say(LOG_WARN, "left_out=%u msg=\"more warnings than %u a second\"",
                n - LOG_WARNINGS_PER_S, LOG_WARNINGS_PER_S);
    }
    return atomic_fetch_add(&n_warnings, 1) < LOG_WARNINGS_PER_S;
}

void log_line(enum log_level level, const char *format, ...)
{
    if (level > log_level_max || (level == LOG_WARN && !may_warn()))
        return;
    va_list args;
    va_start(args, format);
    write_line(level, format, args);
    va_end(args);
}
