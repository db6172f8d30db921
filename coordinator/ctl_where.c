/* ctl_where.c - which coordinator, with which key: flags, contexts, environment, the user's file
 *
 * A context is a file of its own, ~/.config/ballast/contexts/NAME.yaml, with the keys of
 * config.yaml. One that the command line names beats the environment, as flags do; one that is
 * named by BALLAST_CONTEXT or by config.yaml beats config.yaml only. */
#include "coordinator/ctl.h"

#include <dirent.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/conf.h"
#include "proto/check.h"

struct user_config {
    char *settings[CTL_SETTINGS];
    char *context;
};
#define SETTING(I) offsetof(struct user_config, settings[I])
static const struct field user_fields[] = {
    {"address", FIELD_STRING, .offset = SETTING(CTL_SETTING_ADDRESS), .preset = "",
     .help = "where the coordinator listens"},
    {"key", FIELD_PATH, .offset = SETTING(CTL_SETTING_KEY), .preset = "",
     .help = "file of your key, for a coordinator that wants keys"},
    {"coordinator_key", FIELD_PATH, .offset = SETTING(CTL_SETTING_COORDINATOR_KEY),
     .preset = "", .help = "the coordinator's .pub; two lines while its key changes"},
    {"user", FIELD_STRING, .offset = SETTING(CTL_SETTING_USER), .preset = "",
     .help = "whose jobs lists show, unless -A or -u says otherwise; me: your own"},
    {"context", FIELD_STRING, .offset = offsetof(struct user_config, context), .preset = "",
     .help = "the context to use"},
};
static const struct field_table user_table = {user_fields,
                                              sizeof user_fields / sizeof *user_fields};
/* The same, but for the context. */
static const struct field_table context_table = {user_fields,
                                                 sizeof user_fields / sizeof *user_fields - 1};

static const char *const variables[CTL_SETTINGS] = {
    [CTL_SETTING_ADDRESS] = "BALLAST_ADDRESS", [CTL_SETTING_KEY] = "BALLAST_KEY",
    [CTL_SETTING_COORDINATOR_KEY] = "BALLAST_COORDINATOR_KEY",
    [CTL_SETTING_USER] = "BALLAST_USER",
};

/* ---- files ----------------------------------------------------------------------------------- */

static char *config_path(const char *rest)
{
    const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    return xdg && *xdg ? xasprintf("%s/ballast/%s", xdg, rest)
                       : xasprintf("%s/.config/ballast/%s", home ? home : "", rest);
}

struct settings {
    struct user_config user, of_context;
    bool  has_user, has_context, is_flag; /* is_flag: the command line names the context */
    char *context, *source;               /* its name; "context NAME" */
};

static void settings_fini(struct settings *s)
{
    if (s->has_user)
        fields_fini(&user_table, &s->user);
    if (s->has_context)
        fields_fini(&context_table, &s->of_context);
    free(s->context);
    free(s->source);
    *s = (struct settings){0};
}

static const char *context_name(const struct ctl *c, const struct settings *s)
{
    const char *variable = getenv("BALLAST_CONTEXT");
    return c->context ? c->context
         : variable && *variable ? variable
         : s->has_user && *s->user.context ? s->user.context : NULL;
}

static bool no_context(const struct ctl *c, const char *name)
{
    struct arena a = {0};
    char **names, quoted[FIELD_QUOTE_BYTES];
    size_t n = ctl_contexts(&a, &names);
    char *all = arena_strdup(&a, n ? "" : "none is there: contexts are files in "
                             "~/.config/ballast/contexts");
    for (size_t i = 0; i < n; i++)
        all = arena_printf(&a, "%s%s%s", all, i ? ", " : "expected one of ", names[i]);
    field_quote(name, quoted);
    ctl_fail(c, CTL_USAGE, "%s is not a context; %s", quoted, all);
    arena_fini(&a);
    return false;
}

/* False after printing what is wrong with a file. */
static bool settings_read(const struct ctl *c, struct settings *s)
{
    struct err err;
    *s = (struct settings){0};
    char *file = config_path("config.yaml");
    bool is_good = true;
    if (access(file, F_OK) == 0) {
        is_good = s->has_user = conf_read(file, &user_table, &s->user, &err) == 0;
        if (!is_good)
            ctl_fail(c, CTL_USAGE, "%s", err.text);
    }
    free(file);
    const char *name = is_good ? context_name(c, s) : NULL;
    if (!name)
        return is_good;
    char *rest = xasprintf("contexts/%s.yaml", name);
    file = config_path(rest);
    if (!check_is_name(name) || access(file, F_OK) != 0)
        is_good = no_context(c, name);
    else if (conf_read(file, &context_table, &s->of_context, &err) < 0)
        is_good = ctl_fail(c, CTL_USAGE, "%s", err.text) == CTL_OK;
    else
        s->has_context = true;
    s->is_flag = c->context != NULL;
    s->context = xstrdup(name);
    s->source = xasprintf("context %s", name);
    free(rest);
    free(file);
    if (!is_good)
        settings_fini(s);
    return is_good;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

size_t ctl_contexts(struct arena *a, char ***out)
{
    char *path = config_path("contexts");
    char **names = NULL;
    size_t n = 0;
    DIR *folder = opendir(path);
    for (struct dirent *e; folder && (e = readdir(folder)) != NULL;) {
        size_t length = strlen(e->d_name);
        if (length <= 5 || strcmp(e->d_name + length - 5, ".yaml") != 0)
            continue;
        char *name = arena_strdup(a, e->d_name);
        name[length - 5] = '\0';
        if (!check_is_name(name))
            continue;
        names = xrealloc(names, (n + 1) * sizeof *names);
        names[n++] = name;
    }
    if (folder)
        closedir(folder);
    free(path);
    if (n)
        qsort(names, n, sizeof *names, by_text);
    *out = arena_memdup(a, names, n * sizeof *names);
    free(names);
    return n;
}

/* ---- what counts ----------------------------------------------------------------------------- */

static const char *flag_of(const struct ctl *c, enum ctl_setting i)
{
    return i == CTL_SETTING_ADDRESS ? c->address : i == CTL_SETTING_KEY ? c->key_file
         : i == CTL_SETTING_COORDINATOR_KEY ? c->coordinator_key : NULL;
}

/* The first that says something; NULL if none does. Lives as s and c. */
static const char *first_of(const struct ctl *c, const struct settings *s, enum ctl_setting i,
                            const char **out_source)
{
    static const char *const flags[CTL_SETTINGS] = {"--address", "--key", "--coordinator-key",
                                                    "--user"};
    const char *environment = getenv(variables[i]);
    const char *of_context = s->has_context ? s->of_context.settings[i] : "";
    const struct {
        const char *value, *source;
    } places[] = {
        {flag_of(c, i), flags[i]},
        {s->is_flag ? of_context : "", s->source},
        {environment, variables[i]},
        {of_context, s->source},
        {s->has_user ? s->user.settings[i] : "", "the configuration file"},
    };
    for (size_t k = 0; k < sizeof places / sizeof *places; k++)
        if (places[k].value && *places[k].value) {
            *out_source = places[k].source;
            return places[k].value;
        }
    return NULL;
}

static char *copy_of(const char *text)
{
    return text ? xstrdup(text) : NULL;
}

bool ctl_setting(const struct ctl *c, enum ctl_setting setting, char **out)
{
    struct settings s;
    const char *ignored;
    if (!settings_read(c, &s))
        return false;
    *out = copy_of(first_of(c, &s, setting, &ignored));
    settings_fini(&s);
    return true;
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

bool ctl_find_place(const struct ctl *c, struct ctl_place *out)
{
    struct settings s;
    const char *source = "the default", *ignored;
    struct err err;
    if (!settings_read(c, &s))
        return false;
    struct ctl_place p = {0};
    p.address = copy_of(first_of(c, &s, CTL_SETTING_ADDRESS, &source));
    p.key_file = copy_of(first_of(c, &s, CTL_SETTING_KEY, &ignored));
    p.server_file = copy_of(first_of(c, &s, CTL_SETTING_COORDINATOR_KEY, &ignored));
    p.source = xstrdup(source);
    if (!p.address)
        p.address = default_address();
    settings_fini(&s);
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
    free(p->source);
    *p = (struct ctl_place){0};
}

/* ---- config ---------------------------------------------------------------------------------- */

static void show_setting(const struct ctl *c, struct json *o, const char *name, const char *value,
                         const char *source)
{
    if (!ctl_is_json(c)) {
        ctl_print_line(name, "%s%s%s%s", value ? value : "-", value ? "  (from " : "",
                       value ? source : "", value ? ")" : "");
        return;
    }
    struct json *both = json_new_object();
    json_put(both, "value", value ? json_new_string(value) : NULL);
    json_put(both, "source", value ? json_new_string(source) : NULL);
    json_put(o, name, both);
}

int ctl_config_show(struct ctl *c)
{
    struct settings s;
    if (!settings_read(c, &s))
        return CTL_USAGE;
    struct json *o = json_new_object();
    show_setting(c, o, "context", s.context,
                 s.is_flag ? "--context" : getenv("BALLAST_CONTEXT") ? "BALLAST_CONTEXT"
                                                                      : "the configuration file");
    for (int i = 0; i < CTL_SETTINGS; i++) {
        const char *source = "the default";
        const char *value = first_of(c, &s, (enum ctl_setting)i, &source);
        char *preset = !value && i == CTL_SETTING_ADDRESS ? default_address() : NULL;
        show_setting(c, o, user_fields[i].path, value ? value : preset, source);
        free(preset);
    }
    if (ctl_is_json(c))
        ctl_json_one(c, "Config", 0, o);
    else
        json_destroy(o);
    settings_fini(&s);
    return CTL_OK;
}

int ctl_config_contexts(struct ctl *c)
{
    char **names;
    struct settings s;
    if (!settings_read(c, &s))
        return CTL_USAGE;
    size_t n = ctl_contexts(&c->arena, &names);
    struct json *items = json_new_array();
    for (size_t i = 0; i < n; i++) {
        bool is_used = s.context && !strcmp(s.context, names[i]);
        if (ctl_is_json(c)) {
            struct json *o = json_new_object();
            json_put(o, "name", json_new_string(names[i]));
            json_put(o, "used", json_new_bool(is_used));
            json_push(items, o);
        } else {
            printf("%s%s\n", names[i], is_used && c->format == CTL_TABLE ? " *" : "");
        }
    }
    if (ctl_is_json(c))
        ctl_json_list(c, "ContextList", 0, false, items);
    else
        json_destroy(items);
    if (!n)
        ctl_hint(c, "no context: a file ~/.config/ballast/contexts/NAME.yaml is one");
    settings_fini(&s);
    return CTL_OK;
}
