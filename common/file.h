/* file.h - files that somebody named: only regular ones are read, and none is waited for; bytes in
 * and out of them */
#ifndef COMMON_FILE_H
#define COMMON_FILE_H

#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>

#include "common/err.h"

/* Opens path to read it. What is no regular file is refused: a pipe or a terminal would be waited
 * for, a device may have no end. Returns the descriptor, the caller's to close, and fills *out_stat
 * unless that is NULL; else a negative errno with "PATH: why". */
int file_open(const char *path, struct stat *out_stat, struct err *err);

/* The same as a stream, ended with fclose; NULL with the reason in err. */
FILE *file_stream(const char *path, struct err *err);

/* Opens path to write it from its beginning; it is made if it is not there. Devices and pipes are
 * fine, but a pipe that nobody reads is refused. Gives a stream, ended with fclose; NULL with the
 * reason in err. */
FILE *file_create(const char *path, struct err *err);

/* Reads n bytes, fewer only where there are no more. Returns how many, or a negative errno. */
ssize_t file_read(int fd, void *out, size_t n);

/* Writes n bytes from that offset on. Returns 0, or a negative errno after a part of them. */
int file_write_at(int fd, const void *bytes, size_t n, uint64_t offset);

#endif
