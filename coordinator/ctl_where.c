/* ctl_where.c - which coordinator, and with which key: flags, environment, the user's file */
#include "coordinator/ctl.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/conf.h"

struct user_config {
    char *address, *key, *coordinator_key;
};
static const struct field user_fields[] = {
    {"address", FIELD_STRING, .offset = offsetof(struct user_config, address), .preset = "",
     .help = "where the coordinator listens"},
    {"key", FIELD_PATH, .offset = offsetof(struct user_config, key), .preset = "",
     .help = "file of your key, for a coordinator that wants keys"},
    {"coordinator_key", FIELD_PATH, .offset = offsetof(struct user_config, coordinator_key),
     .preset = "", .help = "the coordinator's .pub; two lines while its key changes"},
};
static const struct field_table user_table = {user_fields,
                                              sizeof user_fields / sizeof *user_fields};

/* 1: *out is to be ended with fields_fini; 0: there is no file; -1: it is wrong, as was said. */
static int read_user_file(const struct ctl *c, struct user_config *out)
{
    const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    char *file = xdg && *xdg ? xasprintf("%s/ballast/config.yaml", xdg)
                             : xasprintf("%s/.config/ballast/config.yaml", home ? home : "");
    struct err err;
    int rc = access(file, F_OK) == 0;
    if (rc && conf_read(file, &user_table, out, &err) < 0) {
        ctl_fail(c, CTL_USAGE, "%s", err.text);
        rc = -1;
    }
    free(file);
    return rc;
}

static char *default_address(void)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char *own = xasprintf("%s/ballast/coordinator.sock", runtime ? runtime : "");
    const char *shared = "/run/ballast/coordinator.sock";
    bool is_own = runtime && *runtime && (access(own, F_OK) == 0 || access(shared, F_OK) != 0);
    char *address = xasprintf("ipc://%s", is_own ? own : shared);
    free(own);
    return address;
}

/* A copy of the first that says something; NULL if none does. */
static char *first_of(const char *flag, const char *variable, const char *from_file,
                      const char **out_source)
{
    const char *environment = getenv(variable);
    *out_source = flag ? "the command line" : environment && *environment ? variable
                : "the configuration file";
    if (flag)
        return xstrdup(flag);
    if (environment && *environment)
        return xstrdup(environment);
    return from_file && *from_file ? xstrdup(from_file) : NULL;
}

bool ctl_find_place(const struct ctl *c, struct ctl_place *out)
{
    struct user_config u = {0};
    const char *ignored;
    struct err err;
    int has_file = read_user_file(c, &u);
    if (has_file < 0)
        return false;
    struct ctl_place p = {0};
    p.address = first_of(c->address, "BALLAST_ADDRESS", u.address, &p.source);
    p.key_file = first_of(c->key_file, "BALLAST_KEY", u.key, &ignored);
    p.server_file = first_of(c->coordinator_key, "BALLAST_COORDINATOR_KEY", u.coordinator_key,
                             &ignored);
    if (c->address)
        p.source = "--address";
    if (!p.address) {
        p.source = "the default";
        p.address = default_address();
    }
    if (has_file)
        fields_fini(&user_table, &u);
    /* Over ipc the kernel vouches for the user, so a key that cannot be read does not matter. */
    if (!strncmp(p.address, "tcp://", 6) &&
        link_trust_open(p.key_file, p.server_file, &p.trust, &err) < 0) {
        ctl_fail(c, CTL_USAGE, "%s", err.text);
        ctl_place_fini(&p);
        return false;
    }
    *out = p;
    return true;
}

void ctl_place_fini(struct ctl_place *p)
{
    link_trust_close(&p->trust);
    free(p->address);
    free(p->key_file);
    free(p->server_file);
    *p = (struct ctl_place){0};
}
