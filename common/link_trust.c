/* link_trust.c - reads both files, and says which is missing */
#include "common/link_trust.h"

#include <errno.h>
#include <string.h>

int link_trust_open(const char *key_file, const char *server_file, struct link_trust *out,
                    struct err *err)
{
    bool has_own = key_file && *key_file, has_server = server_file && *server_file;
    *out = (struct link_trust){0};
    if (!has_own && !has_server)
        return 0;
    if (!has_own || !has_server)
        return err_set(err, -EINVAL, "a key of one's own and the coordinator's public key belong "
                       "together: %s is missing", has_own ? "coordinator_key" : "key");
    int rc;
    if ((rc = key_read(key_file, &out->own, err)) < 0 ||
        (rc = keyring_read(server_file, &out->servers, err)) < 0)
        goto fail;
    for (size_t i = 0; i < out->servers.n; i++)
        if (out->servers.keys[i].role != KEY_COORDINATOR) {
            rc = err_set(err, -EINVAL, "%s: %s is no coordinator's key but a %s's", server_file,
                         out->servers.keys[i].name, key_role_name(out->servers.keys[i].role));
            goto fail;
        }
    if (!out->servers.n || out->servers.n > LINK_SERVERS_MAX) {
        rc = err_set(err, -EINVAL, "%s: holds %zu keys, expected 1 to %d", server_file,
                     out->servers.n, LINK_SERVERS_MAX);
        goto fail;
    }
    return 0;
fail:
    link_trust_close(out);
    return rc;
}

void link_trust_close(struct link_trust *t)
{
    keyring_fini(&t->servers);
    explicit_bzero(t, sizeof *t);
}

const struct link_keys *link_trust_keys(struct link_trust *t)
{
    t->keys = (struct link_keys){.own = &t->own, .servers = t->servers.keys,
                                 .n_servers = t->servers.n};
    return t->servers.n ? &t->keys : NULL;
}
