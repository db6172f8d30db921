/* ctl_json.c - values printed as JSON or, the same, as YAML */
#include "coordinator/ctl.h"

#include <stdlib.h>

#include "coordinator/json_of.h"

/* ---- printing ------------------------------------------------------------------------------- */

bool ctl_is_json(const struct ctl *c)
{
    return c->format == CTL_JSON || c->format == CTL_YAML;
}

static bool is_nested(const struct json *v)
{
    return (json_kind_of(v) == JSON_ARRAY || json_kind_of(v) == JSON_OBJECT) && json_count(v);
}

/* Scalars are written as JSON writes them, which YAML reads too. */
static void print_yaml(const struct json *v, int indent, bool after_dash)
{
    struct json_iter i = json_iter(v);
    bool first = after_dash;
    if (!is_nested(v)) {
        char *text = json_text(v, false);
        printf("%s\n", text);
        free(text);
        return;
    }
    for (size_t k = 0; json_kind_of(v) == JSON_ARRAY && k < json_count(v); k++) {
        printf("%*s- ", first ? 0 : indent, "");
        print_yaml(json_at(v, k), indent + 2, true);
        first = false;
    }
    while (json_next(&i)) {
        printf("%*s%s:%s", first ? 0 : indent, "", i.key, is_nested(i.value) ? "\n" : " ");
        print_yaml(i.value, indent + 2, false);
        first = false;
    }
}

static void print_document(const struct ctl *c, const struct json *v)
{
    if (c->format == CTL_YAML) {
        print_yaml(v, 0, false);
        return;
    }
    char *text = json_text(v, true);
    printf("%s\n", text);
    free(text);
}

/* Takes document. */
static void print_whole(const struct ctl *c, struct json *document)
{
    print_document(c, document);
    json_destroy(document);
}

void ctl_json_list(const struct ctl *c, const char *kind, uint64_t seq, bool truncated,
                   struct json *items)
{
    print_whole(c, json_of_list(kind, seq, truncated, items));
}

void ctl_json_one(const struct ctl *c, const char *kind, uint64_t seq, struct json *object)
{
    print_whole(c, json_of_one(kind, seq, object));
}

void ctl_json_line(struct json *object)
{
    char *text = json_text(object, false);
    printf("%s\n", text);
    free(text);
    fflush(stdout);
    json_destroy(object);
}

void ctl_json_value(const struct ctl *c, struct json *value)
{
    print_whole(c, value);
}
