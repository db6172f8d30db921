/* link_trust.h - what a worker or a client has to show, and whom it believes: two files of keys */
#ifndef COMMON_LINK_TRUST_H
#define COMMON_LINK_TRUST_H

#include "common/link.h"

struct link_trust {
    struct key       own;
    struct keyring   servers;
    struct link_keys keys; /* made of both when asked for */
};

/* Paths NULL or "": no keys. Gives *out, ended with link_trust_close, which may be called on what
 * failed too. */
int  link_trust_open(const char *key_file, const char *server_file, struct link_trust *out,
                     struct err *err);
void link_trust_close(struct link_trust *t);

/* For link_connect; NULL without keys. Lives as long as t, at its present place. */
const struct link_keys *link_trust_keys(struct link_trust *t);

#endif
