/* log.c - writes each line with one write, so that lines of several threads never mix
 *
 * Warnings tell of what others did, as often as they do it: so many a second are enough, lest a
 * peer that goes wrong fills a disk with them. Lost ones are counted.
 *
 * Nobody waits for whoever reads stderr, who may have stopped. O_NONBLOCK belongs to an opening of
 * a pipe, which others share, so a pipe is opened once more; a socket can be asked line by line,
 * and of a terminal it is enough to look whether it takes a line. What it does not take is lost,
 * and counted before the next line that it takes. */
#include "common/log.h"

#include "common/clock.h"
#include "common/tame.h"
#include "common/types.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOG_WARNINGS_PER_S 100u

static const char *const level_names[] = {"error", "warn", "info", "debug"};
static const char *log_program = "ballast";
static enum log_level log_level_max = LOG_INFO;
static int pipe_fd = -1; /* our own opening of the pipe that stderr is */
static struct stat pipe_stat;
static _Atomic uint64_t n_lost;

static bool is_our_pipe(const struct stat *s)
{
    return pipe_fd >= 0 && s->st_dev == pipe_stat.st_dev && s->st_ino == pipe_stat.st_ino;
}

void log_init(const char *program, enum log_level level)
{
    struct stat s;
    log_program = program;
    log_level_max = level;
    if (fstat(STDERR_FILENO, &s) < 0 || !S_ISFIFO(s.st_mode) || is_our_pipe(&s))
        return;
    if (pipe_fd >= 0)
        close(pipe_fd);
    pipe_stat = s;
    pipe_fd = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_CLOEXEC);
}

int log_level_parse(const char *text)
{
    for (int i = LOG_ERROR; i <= LOG_DEBUG; i++)
        if (!strcmp(text, level_names[i]))
            return i;
    return -1;
}

/* False: it is full. Other failures leave nowhere to say it. */
static bool put(const char *line, size_t n)
{
    struct stat s;
    struct pollfd there = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (pipe_fd >= 0 && fstat(STDERR_FILENO, &s) == 0 && is_our_pipe(&s))
        return write(pipe_fd, line, n) >= 0 || errno != EAGAIN;
    if (poll(&there, 1, 0) == 0)
        return false;
    if (send(STDERR_FILENO, line, n, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
        return true;
    if (errno == ENOTSOCK && write(STDERR_FILENO, line, n) >= 0)
        return true;
    return errno != EAGAIN;
}

static bool write_line(enum log_level level, const char *format, va_list args)
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
    return put(line, length);
}

static bool say(enum log_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static bool say(enum log_level level, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    bool was_taken = write_line(level, format, args);
    va_end(args);
    return was_taken;
}

/* First how many were lost, so that the gap shows where it is. */
static void write_after_lost(enum log_level level, const char *format, va_list args)
{
    uint64_t n = atomic_exchange(&n_lost, 0);
    if (n && !say(LOG_WARN, "left_out=%" PRIu64 " msg=\"whoever reads this log did not take more\"",
                  n))
        n++;
    else
        n = !write_line(level, format, args);
    atomic_fetch_add(&n_lost, n);
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
    write_after_lost(level, format, args);
    va_end(args);
}
