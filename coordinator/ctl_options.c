/* ctl_options.c - the command line against the tables of commands and options */
#include "coordinator/ctl_list.h"

#include <assert.h>
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "common/field.h"
#include "common/field_text.h"

#define OPTIONS_MAX 96

/* ---- values --------------------------------------------------------------------------------- */

static int wrong_value(const struct ctl *c, const struct ctl_option *r, const char *text,
                       const char *expected)
{
    char quoted[FIELD_QUOTE_BYTES];
    field_quote(text, quoted);
    return ctl_fail(c, CTL_USAGE, "--%s: %s is not %s", r->name, quoted, expected);
}

/* Whether the command has that form, or those columns, is looked at when it is known. */
static int read_format(struct ctl *c, const char *text)
{
    static const char *const words[] = {"table", "wide", "json", "yaml", "name", NULL};
    c->columns = NULL;
    for (int i = 0; words[i]; i++)
        if (!strcmp(words[i], text)) {
            c->format = (enum ctl_format)i;
            return -1;
        }
    c->format = CTL_COLUMNS;
    c->columns = text;
    return -1;
}

static int push(const char ***list, size_t *n, const char *text)
{
    *list = xrealloc(*list, (*n + 1) * sizeof **list);
    (*list)[(*n)++] = text;
    return -1;
}

static int read_number(const struct ctl *c, const struct ctl_option *r, const char *text,
                       uint64_t *out)
{
    uint64_t x;
    bool negative;
    if (text_integer(text, &x, &negative) < 0 || negative || x > UINT32_MAX)
        return wrong_value(c, r, text, "a whole number from 0 to 4294967295");
    *out = x;
    return -1;
}

static int read_rank(struct ctl *c, const struct ctl_option *r, const char *text)
{
    c->all_ranks = !strcmp(text, "all");
    return c->all_ranks ? -1 : read_number(c, r, text, &c->rank);
}

static int read_revision(struct ctl *c, const struct ctl_option *r, const char *text)
{
    bool negative;
    if (text_integer(text, &c->revision, &negative) < 0 || negative)
        return wrong_value(c, r, text, "a revision, as 'ballast rebalance plan' prints it");
    return -1;
}

static int read_timeout(struct ctl *c, const struct ctl_option *r, const char *text)
{
    double seconds;
    if (!text_duration(text, &seconds) || seconds <= 0 || seconds > 86400 * 365)
        return wrong_value(c, r, text, "a duration above 0, as in 5s or 2m");
    c->timeout_ms = (uint64_t)(seconds * 1000) + (seconds * 1000 < 1);
    return -1;
}

static int read_since(const struct ctl *c, const struct ctl_option *r, const char *text)
{
    int64_t ns;
    return list_time(text, &ns) ? -1 : wrong_value(c, r, text, "a time: 2h (ago), 2026-11-29, "
                                                   "2026-11-29T13:49:53 (UTC)");
}

static int read_positive(const struct ctl *c, const struct ctl_option *r, const char *text,
                         uint64_t *out)
{
    uint64_t x;
    bool negative;
    if (text_integer(text, &x, &negative) < 0 || negative || x < 1 || x > UINT32_MAX)
        return wrong_value(c, r, text, "a whole number from 1 to 4294967295");
    *out = x;
    return -1;
}

/* N or N..M. */
static int read_steps(struct ctl *c, const struct ctl_option *r, const char *text)
{
    const char *dots = strstr(text, "..");
    char *first = dots ? arena_printf(&c->arena, "%.*s", (int)(dots - text), text)
                       : arena_strdup(&c->arena, text);
    bool is_negative, ends_negative;
    if (text_integer(first, &c->first_step, &is_negative) < 0 || is_negative || !c->first_step ||
        text_integer(dots ? dots + 2 : first, &c->last_step, &ends_negative) < 0 ||
        ends_negative || c->last_step < c->first_step || c->last_step > INT64_MAX)
        return wrong_value(c, r, text, "a step, from 1, or a range of them as in 100..120");
    return -1;
}

static int read_user(struct ctl *c, const struct ctl_option *r, const char *text)
{
    c->user = text;
    return *text ? -1 : wrong_value(c, r, text, "a user's name");
}

int ctl_option_read(struct ctl *c, const struct ctl_option *r, const char *arg)
{
    switch (r->letter) {
    case 'A': c->address = arg; return -1;
    case 'Y': c->key_file = arg; return -1;
    case 'Q': c->coordinator_key = arg; return -1;
    case 'X': c->force = true; return -1;
    case 'U': c->role = arg; return -1;
    case 'o': return read_format(c, arg);
    case 'J': return read_format(c, "json");
    case 'H': c->no_header = true; return -1;
    case 'N': c->no_color = true; return -1;
    case 'q': c->quiet = true; return -1;
    case 't': return read_timeout(c, r, arg);
    case 's': return push(&c->sets, &c->n_sets, arg);
    case '2': c->context = arg; return -1;
    case '3': c->verbose = true; return -1;
    case '4': return push(&c->filters, &c->n_filters, arg);
    case '5': c->sort = arg; return -1;
    case '6': c->since = arg; return read_since(c, r, arg);
    case '7': c->all_users = true; return -1;
    case '8': c->user = "me"; return -1;
    case '9': c->summary = true; return -1;
    case '0': c->hold = true; return -1;
    case 'E': c->watch = true; return -1;
    case 'k': c->cluster = arg; return -1;
    case 'T': c->train = arg; return -1;
    case 'n': return read_positive(c, r, arg, &c->sequence_length);
    case 'D': c->out = arg; return -1;
    case 'Z': c->validate = true; return -1;
    case 'd': c->dry_run = true; return -1;
    case 'w': c->wait = true; return -1;
    case 'f': c->follow = true; return -1;
    case 'x': c->explain = true; return -1;
    case 'a': c->all = true; return -1;
    case 'u': return read_user(c, r, arg);
    case 'c': return read_positive(c, r, arg, &c->count);
    case 'r': c->reason = arg; return -1;
    case 'F': c->wait_for = arg; return -1;
    case 'i': c->any = true; return -1;
    case 'z': c->has_tail = true; return read_number(c, r, arg, &c->tail);
    case 'R': return read_rank(c, r, arg);
    case 'j': return (c->job = ctl_job_id(c, arg)) ? -1 : CTL_USAGE;
    case 'p': c->phases = true; return -1;
    case 'C': c->csv = true; return -1;
    case 'P': c->plot = true; return -1;
    case 'b': return read_steps(c, r, arg);
    case 'l': c->has_layer = true; return read_number(c, r, arg, &c->layer);
    case 'W': c->window = arg; return -1;
    case 'm': c->heatmap = true; return -1;
    case 'y': c->history = true; return -1;
    case 'e': c->has_epoch = true; return read_number(c, r, arg, &c->epoch);
    case 'v': return read_revision(c, r, arg);
    case '1': c->once = true; return -1;
    case 'L': c->loads = arg; return -1;
    case 'g': return read_positive(c, r, arg, &c->window_steps);
    case 'G': return read_positive(c, r, arg, &c->devices);
    case 'M': return read_positive(c, r, arg, &c->nodes);
    case 'S': return read_positive(c, r, arg, &c->slots_per_device);
    case 'B': c->previous = arg; return -1;
    case 'O': c->placement_out = arg; return -1;
    case 'I': c->placement = arg; return -1;
    default:  return -1; /* help and version are looked at when the command is known */
    }
}

/* ---- the command ---------------------------------------------------------------------------- */

const struct ctl_command *ctl_command_find(char *const *words, size_t n_words,
                                           size_t *out_used)
{
    for (size_t i = 0; i < ctl_n_commands; i++) {
        const char *name = ctl_commands[i].name, *space = strchr(name, ' ');
        size_t n_first = space ? (size_t)(space - name) : strlen(name);
        if (!n_words || strlen(words[0]) != n_first || strncmp(words[0], name, n_first) != 0)
            continue;
        if (space && (n_words < 2 || strcmp(words[1], space + 1) != 0))
            continue;
        *out_used = space ? 2 : 1;
        return &ctl_commands[i];
    }
    return NULL;
}

bool ctl_command_takes(const struct ctl_command *command, const struct ctl_option *option)
{
    switch (option->group) {
    case OPTION_COMMON: return true;
    case OPTION_REMOTE: return strchr(command->options, '@') != NULL;
    case OPTION_OUTPUT: return command->forms != CTL_NO_FORMS;
    case OPTION_OWN:
    case OPTION_MANY:   break;
    }
    return strchr(command->options, option->letter) != NULL;
}

static int check_form(const struct ctl *c, const struct ctl_command *command)
{
    bool is_known = c->format == CTL_TABLE || command->forms & 1u << c->format;
    char quoted[FIELD_QUOTE_BYTES];
    if (is_known)
        return -1;
    static const char *const words[] = {"table", "wide", "json", "yaml", "name"};
    char *forms = ctl_forms_text(command);
    field_quote(c->format == CTL_COLUMNS ? c->columns : words[c->format], quoted);
    int code = ctl_fail(c, CTL_USAGE, "--output: %s is not %s", quoted, forms);
    free(forms);
    return code;
}

static int check_arguments(const struct ctl *c, const struct ctl_command *command,
                           const bool *used)
{
    for (size_t i = 0; i < ctl_n_options; i++)
        if (used[i] && !ctl_command_takes(command, &ctl_options[i]))
            return ctl_fail(c, CTL_USAGE, "--%s does not belong to '%s'; see 'ballast %s --help'",
                            ctl_options[i].name, command->name, command->name);
    if (c->n_args < command->n_min || c->n_args > command->n_max)
        return ctl_fail(c, CTL_USAGE, "%s arguments; usage: ballast %s%s%s",
                        c->n_args < command->n_min ? "missing" : "too many", command->name,
                        *command->args ? " " : "", command->args);
    return check_form(c, command);
}

/* ---- getopt, whose tables are made from ours ------------------------------------------------- */

#define LONG_FORM 256 /* + the row: what getopt returns for it */

struct getopt_tables {
    char short_options[2 * OPTIONS_MAX + 3];
    struct option long_options[OPTIONS_MAX + 1];
};

const struct ctl_option *ctl_option_of_short(const struct ctl_command *command, int short_form)
{
    const struct ctl_option *found = NULL;
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];
        if (o->short_form == short_form &&
            (!found || (command && !ctl_command_takes(command, found) &&
                        ctl_command_takes(command, o))))
            found = o;
    }
    return found;
}

static void make_getopt(const struct ctl_command *command, const char *prefix,
                        struct getopt_tables *t)
{
    size_t n = (size_t)sprintf(t->short_options, "%s", prefix);
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];
        t->long_options[i] = (struct option){o->name, o->arg ? required_argument : no_argument,
                                             NULL, LONG_FORM + (int)i};
        if (!o->short_form || ctl_option_of_short(command, o->short_form) != o)
            continue;
        t->short_options[n++] = o->short_form;
        if (o->arg)
            t->short_options[n++] = ':';
    }
    t->short_options[n] = '\0';
    t->long_options[ctl_n_options] = (struct option){0};
}

static const struct ctl_option *next_option(int argc, char **argv, struct getopt_tables *t,
                                            const struct ctl_command *command, int *out_kind)
{
    *out_kind = getopt_long(argc, argv, t->short_options, t->long_options, NULL);
    if (*out_kind >= LONG_FORM)
        return &ctl_options[*out_kind - LONG_FORM];
    return *out_kind == '?' || *out_kind == ':' || *out_kind < 0
               ? NULL : ctl_option_of_short(command, *out_kind);
}

/* Which command it is, before it is known which options that has. */
static const struct ctl_command *look_for_command(int argc, char **argv)
{
    char **copy = xmemdup(argv, ((size_t)argc + 1) * sizeof *copy); /* it is put in another order */
    struct getopt_tables t;
    int kind = 0;
    size_t ignored;
    make_getopt(NULL, ":", &t);
    opterr = 0;
    optind = 0;
    while (kind >= 0)
        next_option(argc, copy, &t, NULL, &kind);
    const struct ctl_command *found = ctl_command_find(copy + optind, (size_t)(argc - optind),
                                                       &ignored);
    free(copy);
    return found;
}

static int bad_option(const struct ctl *c, int kind, char **argv)
{
    const char *names[OPTIONS_MAX + 1] = {0};
    char quoted[FIELD_QUOTE_BYTES];
    for (size_t i = 0; i < ctl_n_options; i++)
        names[i] = ctl_options[i].name;
    const char *text = argv[optind - 1];
    field_quote(text, quoted);
    if (kind == ':')
        return ctl_fail(c, CTL_USAGE, "%s needs a value", quoted);
    const char *near = strncmp(text, "--", 2) ? NULL : field_nearest(text + 2, names);
    if (near)
        return ctl_fail(c, CTL_USAGE, "unknown option %s; did you mean '--%s'?", quoted, near);
    return ctl_fail(c, CTL_USAGE, "unknown option %s; see 'ballast --help'", quoted);
}

/* The option whose value this one gives, too, or itself. */
static char means(const struct ctl_option *o)
{
    return o->letter == 'J' ? 'o' : o->letter == '8' ? 'u' : o->letter;
}

/* Of two values only one could be heeded. Where the coordinator is asked may be said by an alias
 * and again on the line: there the last one counts. */
static int check_once(const struct ctl *c, const struct ctl_option *o, const bool *used)
{
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *other = &ctl_options[i];
        if (!used[i] || means(other) != means(o) || o->group == OPTION_MANY ||
            o->group == OPTION_REMOTE)
            continue;
        if (other != o)
            return ctl_fail(c, CTL_USAGE, "--%s and --%s are given; expected one of them",
                            other->name, o->name);
        if (o->arg)
            return ctl_fail(c, CTL_USAGE, "--%s is given twice; expected one value", o->name);
    }
    return -1;
}

/* Reads the options, leaves the other words from optind on. */
static int read_options(int argc, char **argv, struct ctl *c, bool used[OPTIONS_MAX])
{
    const struct ctl_command *command = look_for_command(argc, argv);
    struct getopt_tables t;
    int code = -1, kind;
    make_getopt(command, ":", &t);
    optind = 0;
    while (code < 0) {
        const struct ctl_option *o = next_option(argc, argv, &t, command, &kind);
        if (kind < 0)
            break;
        if (!o)
            return bad_option(c, kind, argv);
        if ((code = check_once(c, o, used)) < 0)
            code = ctl_option_read(c, o, optarg);
        used[o - ctl_options] = true;
    }
    return code;
}

int ctl_parse(int argc, char **argv, struct ctl *c, const struct ctl_command **out_command)
{
    bool used[OPTIONS_MAX] = {0};
    assert(ctl_n_options <= OPTIONS_MAX);
    for (int i = 1; i < argc; i++) /* so that mistakes are told in the form asked for */
        if (!strcmp(argv[i], "--json"))
            c->format = CTL_JSON;
    int code = read_options(argc, argv, c, used);
    if (code >= 0)
        return code;
    char **words = argv + optind;
    size_t n_words = (size_t)(argc - optind), n_name = 0;
    const struct ctl_command *command = ctl_command_find(words, n_words, &n_name);
    if (used[1])
        return ctl_version(c);
    if (used[2])
        return ctl_check_config(c);
    if (used[0])
        return ctl_show_help(c, words, command ? n_name : n_words);
    if (!command && n_words)
        return ctl_unknown_command(c, words, n_words);
    if (!command && argc > 1)
        return ctl_fail(c, CTL_USAGE, "no command; 'ballast --help' lists them");
    if (!command) {
        ctl_print_usage(stderr);
        return CTL_USAGE;
    }
    c->n_args = n_words - n_name;
    c->args = xmemdup(words + n_name, (c->n_args + 1) * sizeof *c->args);
    code = check_arguments(c, command, used);
    *out_command = command;
    return code;
}
