/* link_accept.c - accept4 as ZeroMQ calls it, with a bound
 *
 * ZeroMQ takes every connection, has no option against it, and ends the process when no descriptor
 * is left for the next one. It finds accept4 through the dynamic linker, so the definition here
 * stands before the C library's. A connection beyond the bound is taken and closed, which empties
 * the listener's queue, and is told to ZeroMQ as one that was aborted: that it passes over. */
#include "common/link_accept.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_int limit = INT_MAX;

void link_accept_limit(int n_descriptors)
{
    atomic_store(&limit, n_descriptors);
}

int accept4(int fd, struct sockaddr *address, socklen_t *n_address, int flags)
{
    int taken = (int)syscall(SYS_accept4, fd, address, n_address, flags);
    if (taken >= 0 && taken < atomic_load(&limit))
        return taken;
    if (taken >= 0) {
        close(taken);
        errno = ECONNABORTED;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        /* The whole machine's, or all of ours to the last: the connection stays in the queue, so
         * do not spin on it. */
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        errno = ECONNABORTED;
    }
    return -1;
}
