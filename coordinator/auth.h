/* auth.h - who a peer is, and what it may ask for
 *
 * Over ipc the kernel says which user it is, over a loopback tcp without keys nobody does; whoever
 * can connect there may do everything. With keys every tcp connection has one that is in the list,
 * and its role says what its holder may do. A key that leaves the list, or whose time is over, is
 * worth nothing from that moment on, also where it is connected. */
#ifndef COORDINATOR_AUTH_H
#define COORDINATOR_AUTH_H

#include "common/keyring.h"
#include "common/link.h"
#include "proto/ballast.pb-c.h"

struct auth {
    bool           has_keys;
    struct key     own;
    struct keyring admitted;
};

struct identity {
    const char   *user; /* lives until the next auth_reload, or as long as the peer */
    bool          has_key;
    enum key_role role; /* with a key */
};

/* Reads both files; paths "" mean no keys. Gives *out, ended with auth_fini. */
int  auth_open(const char *key_file, const char *list_file, struct auth *out, struct err *err);
void auth_fini(struct auth *a);

/* Reads the list anew; on failure the old one stays. */
int  auth_reload(struct auth *a, const char *list_file, struct err *err);

/* Whether that key may connect. */
bool auth_admits(const struct auth *a, const char *public_text);

/* False for a peer whose key is not valid any more. */
bool auth_identify(const struct auth *a, const struct link *l, link_peer peer,
                   struct identity *out);

/* Whether it may send that method at all. */
bool auth_may(const struct identity *who, Ballast__Method method);

/* Whether it may change no jobs but its own. */
bool auth_is_limited(const struct identity *who);

#endif
