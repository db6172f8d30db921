/* log.h - one line per event on stderr: time, level, program, key=value with ids first
 *
 * Error: the operation failed. Warn: noticed, and what we do instead. Info: a record was
 * committed. Debug: anything. */
#ifndef COMMON_LOG_H
#define COMMON_LOG_H

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

/* program stays the caller's and must live as long as logging is used. From then on no line waits
 * for a full pipe; what does not fit is left out, and a later line says how many were. */
void log_init(const char *program, enum log_level level);

/* Returns -1 for a text that is none of error, warn, info, debug. */
int log_level_parse(const char *text);

void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_WARN, __VA_ARGS__)
#define log_info(...)  log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)

#endif
