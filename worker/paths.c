/* paths.c - resolves a job's paths and compares them with the allowed roots
 *
 * The trainer opens its files right after this check. Who can swap a link in between can write
 * in a folder that the job could name itself, so the race gains nothing. */
#include "worker/paths.h"

#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

static bool path_goes_up(const char *path)
{
    for (const char *p = path; (p = strstr(p, "..")); p += 2)
        if ((p == path || p[-1] == '/') && (p[2] == '/' || p[2] == '\0'))
            return true;
    return false;
}

/* The path with its links resolved; of a path that does not exist, the part that does, with the
 * rest appended as it is. Gives *out, freed with free(). */
static int path_resolve(const char *path, char **out, struct err *err)
{
    if (path[0] != '/')
        return err_set(err, -EACCES, "path '%s' is not absolute", path);
    char *head = xstrdup(path), *real;
    while (!(real = realpath(head, NULL))) {
        if (errno != ENOENT || !strcmp(head, "/")) {
            int code = -errno;
            free(head);
            return err_set(err, code, "path '%s': %s", path, strerror(-code));
        }
        char *slash = strrchr(head, '/');
        slash[slash == head] = '\0'; /* keeps the root's own slash */
    }
    const char *rest = path + strlen(head); /* starts with a slash, unless head is the root */
    free(head);
    if (path_goes_up(rest)) {
        free(real);
        return err_set(err, -EACCES, "path '%s' goes up through folders that do not exist", path);
    }
    *out = xasprintf("%s%s", !strcmp(real, "/") && *rest ? "" : real, rest);
    free(real);
    return 0;
}

static bool path_is_under(const char *path, const char *root)
{
    char real[PATH_MAX];
    if (!realpath(root, real))
        return false;
    size_t n = strlen(real);
    return !strcmp(real, "/") || (!strncmp(path, real, n) && (path[n] == '/' || path[n] == '\0'));
}

static int path_check(const char *key, const char *path, char *const *roots, size_t n_roots,
                      struct err *err)
{
    char *real = NULL;
    int rc = path_resolve(path, &real, err);
    if (rc < 0) {
        err_prefix(err, "%s", key);
        return rc;
    }
    bool is_allowed = false;
    for (size_t i = 0; i < n_roots && !is_allowed; i++)
        is_allowed = path_is_under(real, roots[i]);
    if (!is_allowed) {
        char list[512] = "";
        for (size_t i = 0; i < n_roots && strlen(list) + strlen(roots[i]) + 3 < sizeof list; i++)
            strcat(strcat(list, i ? ", " : ""), roots[i]);
        rc = err_set(err, -EACCES, "%s: '%s' lies outside the worker's allowed_roots (%s)", key,
                     real, list);
    }
    free(real);
    return rc;
}

static int pattern_check(const char *key, const char *pattern, char *const *roots, size_t n_roots,
                         struct err *err)
{
    glob_t found;
    if (glob(pattern, GLOB_NOSORT | GLOB_NOCHECK, NULL, &found))
        return err_set(err, -ENOMEM, "%s: cannot expand '%s'", key, pattern);
    int rc = 0;
    for (size_t i = 0; i < found.gl_pathc && rc == 0; i++)
        rc = path_check(key, found.gl_pathv[i], roots, n_roots, err);
    globfree(&found);
    return rc;
}

/* A Megatron prefix stands for two files. */
static int patterns_check(const char *key, char *const *patterns, size_t n, const char *format,
                          char *const *roots, size_t n_roots, struct err *err)
{
    static const char *const endings[] = {".idx", ".bin"};
    bool is_prefix = strcmp(format, "megatron") == 0;
    int rc = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < (is_prefix ? 2 : 1) && rc == 0; k++) {
            char *full = xasprintf("%s%s", patterns[i], is_prefix ? endings[k] : "");
            rc = pattern_check(key, full, roots, n_roots, err);
            free(full);
        }
    return rc;
}

int paths_check(const Ballast__JobSpec *spec, char *const *roots, size_t n_roots, struct err *err)
{
    int rc = path_check("model.path", spec->model_path, roots, n_roots, err);
    if (rc == 0)
        rc = patterns_check("data.train", spec->data_train, spec->n_data_train, spec->data_format,
                            roots, n_roots, err);
    if (rc == 0)
        rc = patterns_check("data.validation", spec->data_validation, spec->n_data_validation,
                            spec->data_format, roots, n_roots, err);
    if (rc == 0 && spec->checkpoint_path[0])
        rc = path_check("checkpoint.path", spec->checkpoint_path, roots, n_roots, err);
    if (rc == 0 && spec->lora_adapter && spec->lora_adapter[0])
        rc = path_check("train.lora.adapter", spec->lora_adapter, roots, n_roots, err);
    return rc;
}
