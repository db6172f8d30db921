/* conf.c - walks libyaml's events along the table's paths
 *
 * A document is nested mappings whose leaves are scalars and lists of scalars. The walk keeps one
 * path; a key either continues a path of the table, names a field, or is unknown and is skipped
 * with all it holds. Nothing is built in memory but the target, so the size of what is refused
 * does not matter. */
#include "common/conf_walk.h"

#include <yaml.h>

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define PROBLEMS_ENOUGH 100 /* beyond this the file is something else altogether */
#define SECTIONS_MAX    64
#define DEPTH_MAX       64  /* far below it the parser's time begins to grow with the square */

struct walk {
    struct conf  *c;
    yaml_parser_t parser;
    yaml_event_t  event;
    const char   *name;   /* of the file, in messages */
    bool          stop;   /* the rest cannot be read */
    unsigned      depth;  /* of the event in mappings and lists */
    struct { char path[CONF_PATH_BYTES]; size_t line; } sections[SECTIONS_MAX];
    size_t        n_sections;
};

/* ---- messages ------------------------------------------------------------------------------- */

static char *place(const struct walk *w, size_t line)
{
    return xasprintf("%s:%zu", w->name, line);
}

static size_t event_line(const struct walk *w)
{
    return w->event.start_mark.line + 1;
}

static void complain(struct walk *w, size_t line, const char *key, const char *text)
{
    char *where = place(w, line);
    problems_add(&w->c->problems, where, key, "%s", text);
    free(where);
    if (w->c->problems.n_total >= PROBLEMS_ENOUGH)
        w->stop = w->c->broken = true;
}

/* Nothing after this can be read. */
static void give_up(struct walk *w, size_t line, const char *text)
{
    complain(w, line, NULL, text);
    w->c->broken = true;
    w->stop = true;
}

/* ---- one value ------------------------------------------------------------------------------ */

static bool is_text_type(enum field_type type)
{
    return type == FIELD_STRING || type == FIELD_PATH || type == FIELD_WORD ||
           type == FIELD_ENUM || type == FIELD_STRINGS || type == FIELD_PATHS;
}

/* Quotes make text, which is no number; an empty or null scalar is no value. */
static const char *scalar_problem(const struct walk *w, const struct field *f)
{
    const char *text = (const char *)w->event.data.scalar.value;
    bool quoted = w->event.data.scalar.style == YAML_SINGLE_QUOTED_SCALAR_STYLE ||
                  w->event.data.scalar.style == YAML_DOUBLE_QUOTED_SCALAR_STYLE;
    if (strlen(text) != w->event.data.scalar.length)
        return "holds a NUL byte";
    if (quoted)
        return is_text_type(f->type) ? NULL : "is text in quotes";
    if (!*text || !strcmp(text, "~") || !strcmp(text, "null"))
        return "has no value";
    return NULL;
}

static void set_scalar(struct walk *w, const struct field *written, bool append)
{
    const char *text = (const char *)w->event.data.scalar.value;
    const struct field *f = conf_resolve(w->c->table, written, &text);
    const char *problem = scalar_problem(w, written->same_as ? written : f);
    struct err err = {0};
    if (problem) {
        char expected[FIELD_EXPECTED_BYTES];
        field_expected(f, expected);
        err_set(&err, -EINVAL, "%s, expected %s", problem, expected);
    } else {
        conf_set_text(w->c, f, text, append, &err);
    }
    if (err.code)
        complain(w, event_line(w), written->path, err.text);
}

/* ---- the walk ------------------------------------------------------------------------------- */

static const char *event_problem(const yaml_event_t *e)
{
    const yaml_char_t *anchor = NULL, *tag = NULL;
    switch (e->type) {
    case YAML_ALIAS_EVENT:
        return "YAML aliases (*name) are not allowed; a text that begins with * needs quotes";
    case YAML_SCALAR_EVENT:
        anchor = e->data.scalar.anchor, tag = e->data.scalar.tag;
        break;
    case YAML_SEQUENCE_START_EVENT:
        anchor = e->data.sequence_start.anchor, tag = e->data.sequence_start.tag;
        break;
    case YAML_MAPPING_START_EVENT:
        anchor = e->data.mapping_start.anchor, tag = e->data.mapping_start.tag;
        break;
    default:
        break;
    }
    if (anchor)
        return "YAML anchors (&name) are not allowed; write the value out";
    return tag ? "YAML tags (!name) are not allowed" : NULL;
}

static void yaml_problem(struct walk *w)
{
    const yaml_parser_t *p = &w->parser;
    size_t line = p->problem_mark.line + 1;
    const char *problem = p->problem ? p->problem : "it cannot be read";
    if (p->error == YAML_READER_ERROR) {
        line = 1;
        const unsigned char *end = p->input.string.start + p->problem_offset;
        assert(end <= p->input.string.end);
        for (const unsigned char *b = p->input.string.start; b < end; b++)
            line += *b == '\n';
    }
    bool needs_hint = strstr(problem, "cannot start any token") || strstr(problem, "alphabetic");
    char *text = xasprintf("not valid YAML: %s%s", problem, needs_hint
                           ? " (indent with spaces; a text that begins with * or @ needs quotes)"
                           : "");
    give_up(w, line, text);
    free(text);
}

static void follow_depth(struct walk *w)
{
    yaml_event_type_t type = w->event.type;
    if (type == YAML_MAPPING_START_EVENT || type == YAML_SEQUENCE_START_EVENT)
        w->depth++;
    else if (type == YAML_MAPPING_END_EVENT || type == YAML_SEQUENCE_END_EVENT)
        w->depth--;
}

/* The next event into w->event; false when the walk is over. */
static bool next(struct walk *w)
{
    yaml_event_delete(&w->event);
    if (w->stop)
        return false;
    if (!yaml_parser_parse(&w->parser, &w->event)) {
        yaml_problem(w);
        return false;
    }
    follow_depth(w);
    const char *problem = w->depth > DEPTH_MAX ? "lists and sections are nested too deep"
                                               : event_problem(&w->event);
    if (problem)
        give_up(w, event_line(w), problem);
    return !w->stop;
}

/* Skips the value that w->event begins. */
static void skip(struct walk *w)
{
    size_t depth = 0;
    do {
        yaml_event_type_t type = w->event.type;
        if (type == YAML_MAPPING_START_EVENT || type == YAML_SEQUENCE_START_EVENT)
            depth++;
        else if (type == YAML_MAPPING_END_EVENT || type == YAML_SEQUENCE_END_EVENT)
            depth--;
    } while (depth && next(w));
}

static void read_list(struct walk *w, const struct field *f)
{
    size_t line = event_line(w), n = 0;
    field_clear(f, w->c->target);
    while (next(w) && w->event.type != YAML_SEQUENCE_END_EVENT) {
        if (n > (f->n_max ? f->n_max : FIELD_LIST_MAX)) { /* said once */
            skip(w);
        } else if (w->event.type != YAML_SCALAR_EVENT) {
            complain(w, event_line(w), f->path, "holds a list or section, expected plain values");
            skip(w);
        } else {
            set_scalar(w, f, true);
        }
        n++;
    }
    if (!w->stop && n < f->n_min) {
        char *text = xasprintf("has %zu of at least %u elements", n, f->n_min);
        complain(w, line, f->path, text);
        free(text);
    }
}

/* w->event begins the value of field f. */
static void read_field(struct walk *w, const struct field *f, size_t key_line)
{
    const char *written = "";
    const struct field *real = conf_resolve(w->c->table, f, &written);
    char **where = conf_field_where(w->c, real);
    char expected[FIELD_EXPECTED_BYTES], text[FIELD_EXPECTED_BYTES + 32];
    field_expected(real, expected);
    if (*where) {
        snprintf(text, sizeof text, "written twice, first at %.200s", *where);
        complain(w, key_line, f->path, text);
        skip(w);
        return;
    }
    *where = place(w, key_line);
    bool is_list = w->event.type == YAML_SEQUENCE_START_EVENT;
    if (is_list && field_is_list(real)) {
        read_list(w, real);
    } else if (w->event.type == YAML_SCALAR_EVENT && !field_is_list(real)) {
        set_scalar(w, f, false);
    } else {
        snprintf(text, sizeof text, "is %s, expected %s",
                 is_list ? "a list" : w->event.type == YAML_SCALAR_EVENT ? "a single value"
                                                                        : "a section",
                 expected);
        complain(w, key_line, f->path, text);
        skip(w);
    }
}

static bool section_is_new(struct walk *w, const char *path, size_t line)
{
    for (size_t i = 0; i < w->n_sections; i++)
        if (!strcmp(w->sections[i].path, path)) {
            char *text = xasprintf("written twice, first at %s:%zu", w->name,
                                   w->sections[i].line);
            complain(w, line, path, text);
            free(text);
            return false;
        }
    if (w->n_sections < SECTIONS_MAX) {
        snprintf(w->sections[w->n_sections].path, CONF_PATH_BYTES, "%s", path);
        w->sections[w->n_sections++].line = line;
    }
    return true;
}

static void read_section(struct walk *w, const char *prefix);

/* w->event begins the value of the section path. */
static void read_subsection(struct walk *w, const char *path, size_t line)
{
    char prefix[CONF_PATH_BYTES + 1];
    snprintf(prefix, sizeof prefix, "%s.", path);
    if (w->event.type == YAML_MAPPING_START_EVENT) {
        if (section_is_new(w, path, line))
            read_section(w, prefix);
        else
            skip(w);
        return;
    }
    char text[FIELD_EXPECTED_BYTES];
    field_not_section(w->c->table, path, text);
    complain(w, line, path, text);
    skip(w);
}

/* Keys and values until the mapping's end. Recursion is as deep as the table's paths. */
static void read_section(struct walk *w, const char *prefix)
{
    char path[CONF_PATH_BYTES], text[FIELD_EXPECTED_BYTES];
    while (next(w) && w->event.type != YAML_MAPPING_END_EVENT) {
        size_t line = event_line(w);
        if (w->event.type != YAML_SCALAR_EVENT) {
            give_up(w, line, "a key is not plain text");
            return;
        }
        const char *key = (const char *)w->event.data.scalar.value;
        int n = snprintf(path, sizeof path, "%s%s", prefix, key);
        bool fits = n > 0 && (size_t)n < sizeof path && !strchr(key, '.');
        const struct field *f = fits ? field_find(w->c->table, path) : NULL;
        if (!f && !(fits && field_is_section(w->c->table, path))) {
            field_unknown(w->c->table, prefix, key, text);
            complain(w, line, path, text);
            if (next(w))
                skip(w);
            continue;
        }
        if (!next(w))
            return;
        if (f)
            read_field(w, f, line);
        else
            read_subsection(w, path, line);
    }
}

static void read_document(struct walk *w)
{
    if (!next(w) || !next(w)) /* the stream's start, then the document's or the stream's end */
        return;
    if (w->event.type == YAML_STREAM_END_EVENT) {
        problems_add(&w->c->problems, w->name, NULL, "the file is empty");
        w->c->broken = true;
        return;
    }
    if (!next(w))
        return;
    if (w->event.type != YAML_MAPPING_START_EVENT) {
        give_up(w, event_line(w), "expected keys and values, as in 'name: value'");
        return;
    }
    read_section(w, "");
    if (next(w) && next(w) && w->event.type != YAML_STREAM_END_EVENT)
        give_up(w, event_line(w), "a second document begins here; one file holds one");
}

void conf_walk(struct conf *c, const char *text, size_t n_bytes)
{
    static const char bom[] = "\xef\xbb\xbf"; /* what some editors put before UTF-8 */
    if (n_bytes >= 3 && !memcmp(text, bom, 3)) {
        text += 3;
        n_bytes -= 3;
    }
    struct walk *w = xcalloc(1, sizeof *w);
    w->c = c;
    w->name = c->file;
    if (!yaml_parser_initialize(&w->parser))
        abort();
    yaml_parser_set_input_string(&w->parser, (const unsigned char *)text, n_bytes);
    yaml_parser_set_encoding(&w->parser, YAML_UTF8_ENCODING);
    read_document(w);
    yaml_event_delete(&w->event);
    yaml_parser_delete(&w->parser);
    free(w);
}
