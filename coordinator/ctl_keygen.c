/* ctl_keygen.c - makes a key, and says what is to be done with its two files */
#include "coordinator/ctl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/field.h"
#include "common/folder.h"

/* Paths in a file are taken against its folder, so whole ones are told. */
static void say_next(const struct ctl *c, const struct key *k, const char *folder)
{
    char *whole = realpath(folder, NULL);
    folder = whole ? whole : folder;
    if (k->role == KEY_COORDINATOR)
        ctl_hint(c, "in the coordinator's file:  key: %s/%s.key\n"
                 "                            authorized_keys: FILE with a line of each .pub\n"
                 "give %s.pub to workers and clients: coordinator_key", folder, k->name,
                 k->name);
    else
        ctl_hint(c, "the line above must be in the coordinator's authorized_keys (then SIGHUP)\n"
                 "the holder's file:  key: %s/%s.key\n"
                 "                    coordinator_key: the coordinator's .pub", folder, k->name);
    free(whole);
}

int ctl_keygen(struct ctl *c)
{
    const char *folder = c->out ? c->out : ".";
    enum key_role role = KEY_USER;
    char line[KEY_LINE_BYTES], quoted[FIELD_QUOTE_BYTES];
    struct key k;
    struct err err;
    if (c->role && !key_role_parse(c->role, &role)) {
        field_quote(c->role, quoted);
        return ctl_fail(c, CTL_USAGE, "--role: %s is not viewer, user, admin, worker or "
                        "coordinator", quoted);
    }
    int rc = c->out ? folder_make(folder, 0700, &err) : 0;
    if (rc == 0)
        rc = key_make(folder, c->args[0], role, &k, &err);
    if (rc < 0)
        return ctl_fail(c, rc == -EINVAL ? CTL_USAGE : rc == -EEXIST ? CTL_CONFLICT : CTL_FAILED,
                        "%s", err.text);
    if (ctl_is_json(c)) {
        struct json *o = json_new_object();
        json_put(o, "name", json_new_string(k.name));
        json_put(o, "role", json_new_string(key_role_name(k.role)));
        json_put(o, "public", json_new_string(k.public_text));
        ctl_json_one(c, "Key", 0, o);
    } else {
        key_line(&k, line);
        printf("%s\n", line);
    }
    say_next(c, &k, folder);
    explicit_bzero(&k, sizeof k);
    return CTL_OK;
}
