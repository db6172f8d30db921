/* failpoint.c - fails where a test asked for it */
#include "common/failpoint.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void sleep_ms(const char *number)
{
    long ms = strtol(number, NULL, 10);
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static int act(const char *action)
{
    if (strcmp(action, "kill") == 0)
        raise(SIGKILL);
    if (strncmp(action, "sleep_", 6) == 0)
        sleep_ms(action + 6);
    if (strncmp(action, "while_", 6) == 0)
        while (access(action + 6, F_OK) == 0)
            nanosleep(&(struct timespec){.tv_nsec = 5 * 1000000}, NULL);
    if (strcmp(action, "enospc") == 0)
        return -ENOSPC;
    return strcmp(action, "error") == 0 ? -EIO : 0;
}

int failpoint(const char *name)
{
    static atomic_int n_seen;
    const char *wish = getenv("BALLAST_FAILPOINT");
    size_t n = strlen(name);
    if (!wish || strncmp(wish, name, n) != 0 || wish[n] != ':')
        return 0;
    char *action = (char *)wish + n + 1;
    long at = strtol(action, &action, 10); /* 0: no number is there */
    if (at > 0 && *action == ':')
        action++;
    if (strncmp(action, "slow_", 5) == 0) {
        sleep_ms(action + 5);
        return 0;
    }
    if (atomic_fetch_add(&n_seen, 1) + 1 != (at > 0 ? at : 1))
        return 0;
    dprintf(2, "failpoint %s\n", name); /* so that a test can wait for it */
    return act(action);
}
