/* job_live.c - the list, over the job file's table */
#include "proto/job_live.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char *const keys[] = {
    "checkpoint.every_steps", "checkpoint.keep", "train.validation_every_steps",
    "rebalance.window_steps", "rebalance.horizon_steps", "rebalance.min_gain",
    "rebalance.boundary_mib", "rebalance.layer_moves",
    "scheduling.time_limit", "scheduling.max_restarts", "scheduling.priority", NULL,
};

static const struct field *find(const char *key, size_t n_key)
{
    for (size_t i = 0; keys[i]; i++)
        if (strlen(keys[i]) == n_key && !strncmp(keys[i], key, n_key))
            return field_find(&job_spec_table, keys[i]);
    return NULL;
}

static int refuse_key(const char *key, struct err *err)
{
    char quoted[FIELD_QUOTE_BYTES], list[400] = "";
    for (size_t i = 0; keys[i]; i++) {
        if (i)
            strcat(list, ", ");
        strcat(list, keys[i]);
    }
    field_quote(key, quoted);
    if (!strcmp(key, "rebalance.auto"))
        return err_set(err, -EINVAL, "key %s is not set this way; 'ballast rebalance auto on|off "
                       "ID' does it", quoted);
    return err_set(err, -EINVAL, "key %s cannot be changed while a job lives; these can: %s",
                   quoted, list);
}

int job_live_set(Ballast__JobSpec *spec, const char *assignment, struct err *err)
{
    const char *equals = strchr(assignment, '=');
    char quoted[FIELD_QUOTE_BYTES];
    struct err why = {0};
    field_quote(assignment, quoted);
    if (!equals)
        return err_set(err, -EINVAL, "%s is not KEY=VALUE, as in checkpoint.every_steps=50",
                       quoted);
    const struct field *f = find(assignment, (size_t)(equals - assignment));
    if (!f) {
        char key[FIELD_QUOTE_BYTES];
        snprintf(key, sizeof key, "%.*s", (int)(equals - assignment), assignment);
        return refuse_key(key, err);
    }
    if (field_parse(f, spec, equals + 1, &why) < 0)
        return err_set(err, -EINVAL, "key '%s': %s", f->path, why.text);
    return 0;
}

static size_t value_bytes(const struct field *f)
{
    switch (f->type) {
    case FIELD_U32:
    case FIELD_I32:
        return sizeof(uint32_t);
    default:
        assert(f->type == FIELD_U64 || f->type == FIELD_DURATION || f->type == FIELD_DOUBLE);
        return sizeof(uint64_t);
    }
}

void job_live_copy(Ballast__JobSpec *to, const Ballast__JobSpec *from)
{
    for (size_t i = 0; keys[i]; i++) {
        const struct field *f = field_find(&job_spec_table, keys[i]);
        memcpy((char *)to + f->offset, (const char *)from + f->offset, value_bytes(f));
    }
}

char *job_live_differences(const Ballast__JobSpec *before, const Ballast__JobSpec *after)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    if (!out)
        abort();
    for (size_t i = 0, n = 0; keys[i]; i++) {
        const struct field *f = field_find(&job_spec_table, keys[i]);
        char *was = field_text(f, before), *is = field_text(f, after);
        if (strcmp(was, is))
            fprintf(out, "%s%s %s -> %s", n++ ? ", " : "", f->path, was, is);
        free(was);
        free(is);
    }
    fclose(out);
    return text;
}
