/* store_backup.h - a consistent copy of a database that is in use
 *
 * The writer copies a few pages at a time between batches; what it commits meanwhile is in the
 * copy. A thread of its own then checks the copy, brings it to the disk and gives it its name. */
#ifndef COORDINATOR_STORE_BACKUP_H
#define COORDINATOR_STORE_BACKUP_H

#include <sqlite3.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"

struct backup;

/* path: absolute, must not exist, and must not lie in state_dir, where a file of a wrong name
 * would damage the store. finished is called on the other thread when it is done. Gives
 * *out_backup, ended with backup_end. */
int backup_begin(sqlite3 *source, const char *state_dir, const char *path,
                 void (*finished)(void *context), void *context, struct backup **out_backup,
                 struct err *err);

bool backup_is_copying(const struct backup *b);
/* Copies on. After a failure it is no longer copying, and backup_end tells. */
void backup_step(struct backup *b);

/* Waits for the other thread; while copying it gives up. Gives *out_bytes of the copy, or why
 * there is none: then nothing is left of it. Destroys b. */
int backup_end(struct backup *b, uint64_t *out_bytes, struct err *err);

#endif
