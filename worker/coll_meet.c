/* coll_meet.c - the ranks of one machine find each other and map the same memory
 *
 * The lowest rank of the machine listens on an abstract unix socket named by the id and its own
 * number; the kernel forgets it with the process. Whoever connects is another process of the same
 * user, or is turned away. */
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/coll_meet.h"

/* BMT1: the last letter changes with what is said here; a hello's first two words stay. */
#define MEET_MAGIC   0x31544d42u
#define MEET_LETTERS 0x00ffffffu
#define POLL_MS 20

struct hello {
    uint32_t magic, rank, world;
};
struct welcome {
    uint32_t magic, world;
    uint64_t arena_bytes;
};

static socklen_t address_of(const uint8_t *id, uint32_t first, struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    char *p = out->sun_path + 1; /* a leading NUL: no file */
    p += sprintf(p, "ballast-coll-");
    for (int i = 0; i < 16; i++)
        p += sprintf(p, "%02x", id[i]);
    if (first > 0) /* a machine may play several */
        p += sprintf(p, "-%u", first);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)(p - out->sun_path));
}

static bool is_own_user(int fd)
{
    struct ucred who;
    socklen_t n = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) == 0 && who.uid == geteuid();
}

static bool is_cancelled(const struct coll_host_config *c)
{
    return c->cancelled && atomic_load(c->cancelled);
}

/* Waits until fd can be read; a short slice, so that a cancel is seen. */
static int wait_readable(const struct coll_host_config *c, int fd, uint64_t deadline,
                         struct err *err)
{
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int n = poll(&p, 1, POLL_MS);
        if (n > 0)
            return 0;
        if (n < 0 && errno != EINTR)
            return err_set(err, -errno, "poll: %s", strerror(errno));
        if (is_cancelled(c))
            return err_set(err, -ECANCELED, "rank %u was stopped while the ranks gathered",
                           c->rank);
        if (clock_now_ns() >= deadline)
            return -ETIMEDOUT;
    }
}

/* ---- the lowest rank ------------------------------------------------------------------------ */

static int missing_ranks(const struct coll_host_config *c, const struct shm *s, struct err *err)
{
    char names[256] = "";
    size_t n = 0;
    for (uint32_t r = 0; r < c->world && n + 16 < sizeof names; r++)
        if (s->peers[r] < 0 && r != s->first && shm_is_here(s, r))
            n += (size_t)snprintf(names + n, sizeof names - n, " %u", r);
    return err_set(err, -ETIMEDOUT, "after %.1f s these of %u ranks have not come:%s",
                   (double)c->open_timeout_ns / NS_PER_S, s->n_here, names);
}

/* A rank of another version says so in the first word, whatever follows. */
static int refuse_version(const struct shm *s, const struct hello *h, int fd, struct err *err)
{
    close(fd);
    return err_set(err, -EPROTO, "rank %u is of another version of Ballast than rank %u and cannot "
                   "meet it (%c, expected %c): install the same on all workers of the job",
                   h->rank, s->first, (int)(h->magic >> 24), (int)(MEET_MAGIC >> 24));
}

static int take_hello(const struct coll_host_config *c, struct shm *s, int fd, struct err *err)
{
    struct hello h = {0};
    struct timeval patience = {.tv_sec = 1};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssize_t n = is_own_user(fd) ? recv(fd, &h, sizeof h, 0) : -1;
    if (n >= (ssize_t)(2 * sizeof(uint32_t)) && h.magic != MEET_MAGIC &&
        ((h.magic ^ MEET_MAGIC) & MEET_LETTERS) == 0)
        return refuse_version(s, &h, fd, err);
    bool is_ours = n == sizeof h && h.magic == MEET_MAGIC && h.rank != s->first;
    if (!is_ours) {
        close(fd); /* a stranger; the ranks are still to come */
        return 0;
    }
    bool is_awaited = h.world == c->world && h.rank < c->world && shm_is_here(s, h.rank);
    if (!is_awaited || s->peers[h.rank] >= 0) {
        close(fd);
        return err_set(err, -EPROTO, "rank %u of %u came to a run of %u ranks%s", h.rank, h.world,
                       c->world, is_awaited ? " for the second time" : "");
    }
    s->peers[h.rank] = fd;
    return 1;
}

static int gather_ranks(const struct coll_host_config *c, struct shm *s, int listener,
                        uint64_t deadline, struct err *err)
{
    for (uint32_t n_came = 1; n_came < s->n_here;) {
        int rc = wait_readable(c, listener, deadline, err);
        if (rc == -ETIMEDOUT)
            return missing_ranks(c, s, err);
        if (rc < 0)
            return rc;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            continue;
        if ((rc = take_hello(c, s, fd, err)) < 0)
            return rc;
        n_came += (uint32_t)rc;
    }
    return 0;
}

static int send_memory(int to, int memory, const struct welcome *w)
{
    struct iovec iov = {.iov_base = (void *)w, .iov_len = sizeof *w};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(h), &memory, sizeof memory);
    return sendmsg(to, &m, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* No rank can need more than the machine has; pages are taken when they are touched. */
static size_t machine_bytes(void)
{
    size_t bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    const size_t gib = (size_t)1 << 30;
    return (bytes + gib - 1) / gib * gib;
}

static int make_memory(struct shm *s, int *out_fd, struct err *err)
{
    shm_plan(s, machine_bytes());
    int fd = memfd_create("ballast-coll", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)s->map_bytes) < 0) {
        int rc = err_set(err, -errno, "shared memory of %zu GiB for the collectives: %s",
                         s->map_bytes >> 30, strerror(errno));
        if (fd >= 0)
            close(fd);
        return rc;
    }
    *out_fd = fd;
    return 0;
}

static int listen_at(const struct coll_host_config *c, uint32_t first, int *out_fd,
                     struct err *err)
{
    struct sockaddr_un address;
    socklen_t n = address_of(c->id, first, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, n) < 0 || listen(fd, 128) < 0) {
        int rc = err_set(err, -errno, "rendezvous @%s: %s%s", address.sun_path + 1,
                         strerror(errno), errno == EADDRINUSE ? ": another run has this id" : "");
        if (fd >= 0)
            close(fd);
        return rc;
    }
    *out_fd = fd;
    return 0;
}

int coll_meet_first(const struct coll_host_config *c, struct shm *s, struct err *err)
{
    uint64_t deadline = clock_now_ns() + c->open_timeout_ns;
    int listener = -1, memory = -1, rc = 0;
    s->n_peers = c->world;
    s->peers = xcalloc(c->world, sizeof *s->peers);
    for (uint32_t r = 0; r < c->world; r++)
        s->peers[r] = -1;
    if ((rc = make_memory(s, &memory, err)) < 0 || (rc = shm_map(s, memory, err)) < 0)
        goto end;
    if (s->n_here > 1 && ((rc = listen_at(c, s->first, &listener, err)) < 0 ||
                          (rc = gather_ranks(c, s, listener, deadline, err)) < 0))
        goto end;
    struct welcome w = {.magic = MEET_MAGIC, .world = c->world, .arena_bytes = s->arena_bytes};
    for (uint32_t r = 0; r < c->world && rc == 0; r++)
        if (s->peers[r] >= 0 && (rc = send_memory(s->peers[r], memory, &w)) < 0)
            err_set(err, rc, "rank %u ended while the ranks gathered", r);
end:
    if (listener >= 0)
        close(listener);
    if (memory >= 0)
        close(memory);
    return rc;
}

/* ---- the others ----------------------------------------------------------------------------- */

static int connect_first(const struct coll_host_config *c, uint32_t first, uint64_t deadline,
                         int *out_fd, struct err *err)
{
    struct sockaddr_un address;
    socklen_t n = address_of(c->id, first, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return err_set(err, -errno, "socket: %s", strerror(errno));
    while (connect(fd, (struct sockaddr *)&address, n) < 0) {
        int why = errno;
        bool may_come = why == ECONNREFUSED || why == EINTR || why == EAGAIN;
        int rc = 0;
        if (!may_come)
            rc = err_set(err, -why, "rendezvous @%s: %s", address.sun_path + 1, strerror(why));
        else if (is_cancelled(c))
            rc = err_set(err, -ECANCELED, "rank %u was stopped while the ranks gathered", c->rank);
        else if (clock_now_ns() >= deadline)
            rc = err_set(err, -ETIMEDOUT, "rank %u has not come after %.1f s", first,
                         (double)c->open_timeout_ns / NS_PER_S);
        if (rc < 0) {
            close(fd);
            return rc;
        }
        nanosleep(&(struct timespec){.tv_nsec = 2 * NS_PER_MS}, NULL);
    }
    *out_fd = fd;
    return 0;
}

static int receive_memory(int from, struct welcome *out, int *out_fd)
{
    struct iovec iov = {.iov_base = out, .iov_len = sizeof *out};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    if (recvmsg(from, &m, MSG_CMSG_CLOEXEC) != sizeof *out)
        return -ECONNRESET;
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    if (!h || h->cmsg_type != SCM_RIGHTS || out->magic != MEET_MAGIC)
        return -EPROTO;
    memcpy(out_fd, CMSG_DATA(h), sizeof *out_fd);
    return 0;
}

int coll_meet_other(const struct coll_host_config *c, struct shm *s, struct err *err)
{
    uint64_t deadline = clock_now_ns() + c->open_timeout_ns;
    struct hello h = {.magic = MEET_MAGIC, .rank = c->rank, .world = c->world};
    struct welcome w;
    int memory = -1;
    s->n_peers = 1;
    s->peers = xcalloc(1, sizeof *s->peers);
    s->peers[0] = -1;
    int rc = connect_first(c, s->first, deadline, &s->peers[0], err);
    if (rc < 0)
        return rc;
    if (!is_own_user(s->peers[0]))
        return err_set(err, -EACCES, "the rendezvous is held by another user");
    if (send(s->peers[0], &h, sizeof h, MSG_NOSIGNAL) != sizeof h)
        return err_set(err, -ECONNRESET, "rank %u ended while the ranks gathered", s->first);
    rc = wait_readable(c, s->peers[0], deadline, err);
    if (rc == -ETIMEDOUT)
        return err_set(err, rc, "after %.1f s not all of %u ranks have come",
                       (double)c->open_timeout_ns / NS_PER_S, s->n_here);
    if (rc < 0)
        return rc;
    if ((rc = receive_memory(s->peers[0], &w, &memory)) < 0)
        return err_set(err, rc, "rank %u ended while the ranks gathered", s->first);
    shm_plan(s, w.arena_bytes);
    rc = shm_map(s, memory, err);
    close(memory);
    return rc;
}
