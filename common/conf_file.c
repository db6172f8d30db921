/* conf_file.c - files, assignments and what is missing: everything of conf but YAML itself */
#include "common/conf_walk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/file.h"
#include "common/mem.h"

static bool is_path(const struct field *f)
{
    return f->type == FIELD_PATH || f->type == FIELD_PATHS;
}

/* Gives the path as seen from the root. */
static char *absolute(const struct conf *c, const char *path)
{
    while (!strncmp(path, "./", 2))
        path += 2;
    return *path == '/' || !*path ? xstrdup(path) : xasprintf("%s/%s", c->folder, path);
}

const struct field *conf_resolve(const struct field_table *t, const struct field *f,
                                 const char **value)
{
    if (!f->same_as)
        return f;
    for (const struct field_spelling *s = f->spellings; s->written; s++)
        if (!strcmp(s->written, *value))
            *value = s->means;
    return field_find(t, f->same_as);
}

int conf_set_text(struct conf *c, const struct field *f, const char *text, bool append,
                  struct err *err)
{
    char *path = is_path(f) && (append || !field_is_list(f)) ? absolute(c, text) : NULL;
    const char *value = path ? path : text;
    int rc = append ? field_append(f, c->target, value, err)
                    : field_parse(f, c->target, value, err);
    free(path);
    return rc;
}

char **conf_field_where(const struct conf *c, const struct field *f)
{
    return &c->where[f - c->table->fields];
}

/* After a list was set from one text: its relative paths. */
static void absolute_list(struct conf *c, const struct field *f)
{
    char **paths = *(char ***)((char *)c->target + f->offset);
    size_t n = *(size_t *)((char *)c->target + f->count_offset);
    for (size_t i = 0; i < n; i++) {
        char *path = absolute(c, paths[i]);
        free(paths[i]);
        paths[i] = path;
    }
}

void conf_init(struct conf *c, const struct field_table *table, void *target)
{
    char *cwd = getcwd(NULL, 0);
    *c = (struct conf){
        .table = table,
        .target = target,
        .file = xstrdup(""),
        .folder = xstrdup(cwd ? cwd : "/"),
        .where = xcalloc(table->n_fields, sizeof *c->where),
    };
    free(cwd);
    fields_init(table, target);
}

void conf_fini(struct conf *c)
{
    for (size_t i = 0; c->where && i < c->table->n_fields; i++)
        free(c->where[i]);
    free(c->where);
    free(c->file);
    free(c->folder);
    problems_fini(&c->problems);
    *c = (struct conf){0};
}

void conf_read_text(struct conf *c, const char *name, const char *folder, const char *text,
                    size_t n_bytes)
{
    free(c->file);
    c->file = xstrdup(name);
    if (folder) {
        free(c->folder);
        c->folder = xstrdup(folder);
    }
    const char *nul = memchr(text, '\0', n_bytes);
    if (n_bytes > JOB_FILE_BYTES_MAX || nul) {
        if (nul)
            problems_add(&c->problems, name, NULL, "not a text file: byte %zu is NUL",
                         (size_t)(nul - text));
        else
            problems_add(&c->problems, name, NULL, "larger than %u KiB, the most allowed",
                         JOB_FILE_BYTES_MAX >> 10);
        c->broken = true;
        return;
    }
    conf_walk(c, text, n_bytes);
}

/* Gives the absolute folder that file lies in. */
static char *folder_of(const char *file)
{
    char *copy = xstrdup(file), *slash = strrchr(copy, '/');
    if (slash)
        slash[slash == copy] = '\0';
    char *folder = realpath(slash ? copy : ".", NULL);
    free(copy);
    return folder ? folder : xstrdup("/");
}

void conf_read_file(struct conf *c, const char *file)
{
    bool is_stdin = !strcmp(file, "-");
    int fd = is_stdin ? STDIN_FILENO : file_open(file, NULL, NULL);
    size_t size = JOB_FILE_BYTES_MAX + 1; /* one byte more than is allowed */
    char *text = fd < 0 ? NULL : xcalloc(1, size);
    ssize_t n = fd < 0 ? fd : file_read(fd, text, size);
    if (n < 0) {
        problems_add(&c->problems, *file ? file : "''", NULL, "%s",
                     fd == -EINVAL ? "not a regular file; - reads what is piped in"
                                   : strerror((int)-n));
        c->broken = true;
    } else {
        char *folder = is_stdin ? NULL : folder_of(file);
        conf_read_text(c, is_stdin ? "<stdin>" : file, folder, text, (size_t)n);
        free(folder);
    }
    free(text);
    if (fd >= 0 && !is_stdin)
        close(fd);
}

/* The longest part of key that is a section's, with its dot, for a message. */
static void unknown_assignment(struct conf *c, const char *key)
{
    char prefix[CONF_PATH_BYTES] = "", text[FIELD_EXPECTED_BYTES];
    for (const char *dot = strchr(key, '.'); dot; dot = strchr(dot + 1, '.')) {
        char path[CONF_PATH_BYTES];
        snprintf(path, sizeof path, "%.*s", (int)(dot - key), key);
        if (!field_is_section(c->table, path))
            break;
        snprintf(prefix, sizeof prefix, "%.*s.", (int)(dot - key), key);
    }
    if (field_is_section(c->table, key))
        field_not_section(c->table, key, text);
    else
        field_unknown(c->table, prefix, key + strlen(prefix), text);
    problems_add(&c->problems, "--set", key, "%s", text);
}

void conf_set(struct conf *c, const char *assignment)
{
    const char *equals = strchr(assignment, '=');
    if (!equals) {
        char quoted[FIELD_QUOTE_BYTES];
        field_quote(assignment, quoted);
        problems_add(&c->problems, "--set", NULL, "%s is not key=value, as in train.steps=300",
                     quoted);
        return;
    }
    char *key = xasprintf("%.*s", (int)(equals - assignment), assignment);
    const char *value = equals + 1;
    const struct field *written = field_find(c->table, key);
    struct err err;
    if (!written) {
        unknown_assignment(c, key);
    } else {
        const struct field *f = conf_resolve(c->table, written, &value);
        if (conf_set_text(c, f, value, false, &err) < 0)
            problems_add(&c->problems, "--set", key, "%s", err.text);
        else if (f->type == FIELD_PATHS)
            absolute_list(c, f);
        free(*conf_field_where(c, f));
        *conf_field_where(c, f) = xstrdup("--set");
    }
    free(key);
}

int conf_finish(struct conf *c)
{
    for (size_t i = 0; !c->broken && i < c->table->n_fields; i++) {
        const struct field *f = &c->table->fields[i];
        if (!f->preset && !f->same_as && !c->where[i])
            problems_add(&c->problems, c->file, f->path, "missing; %s", f->help);
    }
    return c->problems.n_total ? -EINVAL : 0;
}

const char *conf_where(const struct conf *c, const char *key)
{
    for (size_t i = 0; i < c->table->n_fields; i++)
        if (!strcmp(c->table->fields[i].path, key) && c->where[i])
            return c->where[i];
    return c->file;
}

int conf_read(const char *file, const struct field_table *table, void *out, struct err *err)
{
    struct conf c;
    conf_init(&c, table, out);
    conf_read_file(&c, file);
    int rc = conf_finish(&c);
    if (rc < 0) {
        problems_err(&c.problems, err);
        fields_fini(table, out);
    }
    conf_fini(&c);
    return rc;
}
