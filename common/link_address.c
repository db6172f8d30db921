/* link_address.c - which addresses are allowed, and which user an address belongs to */
#include "common/link_address.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/link.h"
#include "common/mem.h"

static bool is_loopback(const char *host, size_t n)
{
    char text[64];
    struct in_addr v4;
    if (n == 0 || n >= sizeof text)
        return false;
    memcpy(text, host, n);
    text[n] = 0;
    if (!strcmp(text, "localhost") || !strcmp(text, "[::1]"))
        return true;
    return inet_pton(AF_INET, text, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127;
}

static bool is_host(const char *host, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)host[i]) && !strchr(".-:[]_", host[i]))
            return false;
    return n > 0 && n < 256;
}

int link_address_check(const char *address, bool has_keys, struct err *err)
{
    if (!strncmp(address, "ipc://", 6)) {
        size_t n = strlen(address + 6), n_max = sizeof ((struct sockaddr_un *)0)->sun_path - 1;
        if (n == 0 || n > n_max)
            return err_set(err, -EINVAL, "address '%.200s': the path of an ipc address has 1 to "
                           "%zu bytes, this one %zu", address, n_max, n);
        return 0;
    }
    if (strncmp(address, "tcp://", 6))
        return err_set(err, -EINVAL, "address '%.200s': expected ipc://PATH or "
                       "tcp://HOST:PORT", address);
    const char *host = address + 6, *colon = strrchr(host, ':');
    char *end = NULL;
    unsigned long port = colon && colon[1] >= '0' && colon[1] <= '9'
                             ? strtoul(colon + 1, &end, 10) : 0;
    if (!port || port > 65535 || *end)
        return err_set(err, -EINVAL, "address '%.200s': expected a port of 1 to 65535, as in "
                       "tcp://127.0.0.1:7070", address);
    if (!is_host(host, (size_t)(colon - host)))
        return err_set(err, -EINVAL, "address '%.200s': expected the name or number of a host, as "
                       "in tcp://10.0.0.1:7070", address);
    if (!has_keys && !is_loopback(host, (size_t)(colon - host)))
        return err_set(err, -EINVAL, "address '%.200s': without keys only ipc:// and loopback "
                       "tcp:// are allowed; 'ballast keygen' makes keys", address);
    return 0;
}

static char *user_name(uid_t uid)
{
    struct passwd entry, *found = NULL;
    char names[4096];
    if (getpwuid_r(uid, &entry, names, sizeof names, &found) == 0 && found)
        return xstrdup(found->pw_name);
    return xasprintf("uid-%lu", (unsigned long)uid);
}

char *link_own_user(void)
{
    return user_name(geteuid());
}

char *link_address_user(const char *peer_address)
{
    /* Over TCP the parts of an address may look like numbers; ipc's has no dot or bracket. */
    if (strpbrk(peer_address, ".["))
        return xstrdup("anonymous");
    const char *at = peer_address + strlen(peer_address);
    unsigned long numbers[3];
    for (int i = 2; i >= 0; i--) {
        const char *end = at;
        while (at > peer_address && at[-1] >= '0' && at[-1] <= '9')
            at--;
        if (at == end || end - at > 10 || at == peer_address || at[-1] != ':')
            return xstrdup("anonymous");
        numbers[i] = strtoul(at, NULL, 10);
        at--;
    }
    return user_name((uid_t)numbers[0]);
}
