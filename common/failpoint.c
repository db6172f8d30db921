/* failpoint.c - fails where a test asked for it */
#include "common/failpoint.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

int failpoint(const char *name)
{
    static atomic_int n_seen;
    const char *wish = getenv("BALLAST_FAILPOINT");
    size_t n = strlen(name);
    if (!wish || strncmp(wish, name, n) != 0 || wish[n] != ':')
        return 0;
    char *action;
    long at = strtol(wish + n + 1, &action, 10);
    if (atomic_fetch_add(&n_seen, 1) + 1 != at)
        return 0;
    if (strcmp(action, ":kill") == 0)
        raise(SIGKILL);
    return strcmp(action, ":enospc") == 0 ? -ENOSPC : 0;
}
