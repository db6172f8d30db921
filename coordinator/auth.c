/* auth.c - the list of keys, and one table of roles over the methods */
#include "coordinator/auth.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "proto/check.h"

static int64_t now_s(void)
{
    return clock_wall_ns() / (int64_t)NS_PER_S;
}

int auth_open(const char *key_file, const char *list_file, struct auth *out, struct err *err)
{
    *out = (struct auth){0};
    if (!*key_file && !*list_file)
        return 0;
    if (!*key_file || !*list_file)
        return err_set(err, -EINVAL, "keys 'key' and 'authorized_keys' belong together: %s is "
                       "missing", *key_file ? "authorized_keys" : "key");
    struct auth a = {.has_keys = true};
    int rc;
    if ((rc = key_read(key_file, &a.own, err)) < 0 ||
        (rc = keyring_read(list_file, &a.admitted, err)) < 0)
        return rc;
    *out = a;
    return 0;
}

void auth_fini(struct auth *a)
{
    keyring_fini(&a->admitted);
    explicit_bzero(a, sizeof *a);
}

int auth_reload(struct auth *a, const char *list_file, struct err *err)
{
    struct keyring fresh;
    int rc = a->has_keys ? keyring_read(list_file, &fresh, err) : 0;
    if (!a->has_keys || rc < 0)
        return rc;
    keyring_fini(&a->admitted);
    a->admitted = fresh;
    return 0;
}

bool auth_admits(const struct auth *a, const char *public_text)
{
    const struct key *k = keyring_find(&a->admitted, public_text, now_s());
    return k && k->role != KEY_COORDINATOR;
}

bool auth_identify(const struct auth *a, const struct link *l, link_peer peer,
                   struct identity *out)
{
    const char *public_text = link_peer_key(l, peer);
    if (!*public_text) {
        *out = (struct identity){.user = link_peer_user(l, peer)};
        return true;
    }
    const struct key *k = keyring_find(&a->admitted, public_text, now_s());
    if (!k || k->role == KEY_COORDINATOR)
        return false;
    *out = (struct identity){.user = k->name, .has_key = true, .role = k->role};
    return true;
}

/* What a method does is told by who sends it and by whether it needs a key of idempotency. */
bool auth_may(const struct identity *who, Ballast__Method method)
{
    const struct check_method *m = check_method(method);
    if (!who->has_key)
        return true;
    if (!m)
        return false;
    if (who->role == KEY_WORKER)
        return m->from & CHECK_WORKER;
    if (!(m->from & CHECK_CLIENT))
        return false;
    bool is_of_cluster = method == BALLAST__METHOD__METHOD_WORKER_DRAIN ||
        method == BALLAST__METHOD__METHOD_WORKER_RESUME ||
        method == BALLAST__METHOD__METHOD_DB_BACKUP;
    switch (who->role) {
    case KEY_VIEWER: return !m->needs_key && !is_of_cluster;
    case KEY_USER:   return !is_of_cluster;
    case KEY_ADMIN:  return true;
    default:         return false;
    }
}

bool auth_is_limited(const struct identity *who)
{
    return who->has_key && who->role == KEY_USER;
}
