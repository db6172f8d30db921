/* ctl_options.c - the command line against the tables: commands, options, help */
#include "coordinator/ctl.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "common/field.h"
#include "common/field_text.h"
#include "common/version.h"

/* Letters are also names inside the command table; those in upper case, and x and d and w, have
 * no short form. */
struct option_row {
    char letter;
    const char *name, *arg, *help;
    bool has_short, is_common;
};

/* The first three are looked at by their place, before and instead of a command. */
static const struct option_row rows[] = {
    {'h', "help", NULL, "this text", true, true},
    {'V', "version", NULL, "versions", false, true},
    {'K', "check-config", NULL, "check ~/.config/ballast/config.yaml and the address", false,
     true},
    {'A', "address", "ADDRESS", "the coordinator: ipc://PATH or tcp://HOST:PORT", false, true},
    {'Y', "key", "FILE", "your key (BALLAST_KEY), for a coordinator that wants keys", false, true},
    {'Q', "coordinator-key", "FILE", "the coordinator's .pub (BALLAST_COORDINATOR_KEY)", false,
     true},
    {'o', "output", "FORMAT", "wide, json, yaml or name", true, true},
    {'J', "json", NULL, "the same as -o json", false, true},
    {'H', "no-header", NULL, "no line of column names", false, true},
    {'N', "no-color", NULL, "no colours (also: NO_COLOR in the environment)", false, true},
    {'q', "quiet", NULL, "no hints and progress on stderr", true, true},
    {'t', "timeout", "TIME", "give up after this long, as in 5s, 2m; a number is seconds", true,
     true},
    {'s', "set", "KEY=VALUE", "change a key of the job file; may be repeated", false, false},
    {'d', "dry-run", NULL, "check and plan, submit nothing", false, false},
    {'w', "wait", NULL, "return when the job has ended, with its exit code", false, false},
    {'f', "follow", NULL, "go on with what comes", true, false},
    {'x', "explain", NULL, "print every key of a job file (markdown)", false, false},
    {'a', "all", NULL, "also jobs that have ended", true, false},
    {'u', "user", "NAME", "only this user's", true, false},
    {'c', "count", "N", "at most this many", true, false},
    {'r', "reason", "TEXT", "why, for those who read it later", true, false},
    {'F', "for", "state=STATE", "what to wait for", false, false},
    {'R', "rank", "N", "of which rank (0)", false, false},
    {'j', "job", "ID", "only of this job", true, false},
    {'p', "phases", NULL, "where the time of a step goes", false, false},
    {'C', "csv", NULL, "comma-separated, for other programs", false, false},
    {'L', "loads", "FILE", "CSV with the columns layer, expert, load and maybe window; or a trace",
     false, false},
    {'g', "window-steps", "N", "steps of a trace that make one window (1)", false, false},
    {'G', "devices", "N", "devices that hold the experts", false, false},
    {'M', "nodes", "N", "nodes that the devices are dealt to, in order (1)", false, false},
    {'S', "slots-per-device", "N", "experts a device can hold (what is needed and one more)", false,
     false},
    {'B', "previous", "FILE", "CSV of the placement in force: layer, device, expert", false, false},
    {'O', "placement-out", "FILE", "write the placement as CSV, fit for --previous", false, false},
    {'I', "placement", "FILE", "CSV of a placement to have instead of the planner's", false, false},
    {'l', "layer", "L", "only of this layer", false, false},
    {'W', "window", "WINDOW", "last (report), 1m, 1h or all (1m; with --history 1h)", false, false},
    {'m', "heatmap", NULL, "layers and experts as shades; without a terminal only when asked for",
     false, false},
    {'y', "history", NULL, "how even experts and devices were, window by window", false, false},
    {'e', "epoch", "E", "the placement of that epoch instead of the present one", false, false},
    {'v', "revision", "R", "of the plan that was looked at; refused if things moved on", false,
     false},
    {'1', "once", NULL, "print one page and end", false, false},
    {'k', "cluster", "FILE", "the machines to plan for (16 nodes of 8 H200)", false, false},
    {'T', "train", "full|lora", "every weight, or adapters (full)", false, false},
    {'n', "sequence-length", "N", "tokens of a training sequence (4096)", false, false},
    {'D', "out", "DIR", "write the files there", false, false},
    {'Z', "validate", NULL, "check a shrunk model of the same structure with ballast-worker", false,
     false},
    {'X', "force", NULL, "write over files that are there", false, false},
    {'U', "role", "ROLE", "viewer, user, admin, worker or coordinator (user)", false, false},
    {'P', "plot", NULL, "draw it in the terminal", false, false},
};
#define N_ROWS (sizeof rows / sizeof *rows)

/* ---- help ----------------------------------------------------------------------------------- */

static void print_options(const char *letters, bool common)
{
    for (size_t i = 0; i < N_ROWS; i++) {
        const struct option_row *r = &rows[i];
        char left[64];
        if (common ? !r->is_common : r->is_common || !strchr(letters, r->letter))
            continue;
        snprintf(left, sizeof left, "%c%c%s --%s%s%s", r->has_short ? '-' : ' ',
                 r->has_short ? r->letter : ' ', r->has_short ? "," : " ", r->name,
                 r->arg ? " " : "", r->arg ? r->arg : "");
        printf("  %-28s %s\n", left, r->help);
    }
}

static void print_usage(void)
{
    printf("Usage: ballast COMMAND [ARGUMENT]... [OPTION]...\n\n"
           "Speaks to ballast-coordinator: submits jobs and shows what becomes of them.\n\n"
           "Commands:\n");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", ctl_commands[i].name, ctl_commands[i].args);
        printf("  %-24s %s\n", left, ctl_commands[i].summary);
    }
    printf("\nOptions of every command:\n");
    print_options("", true);
    printf("\nExamples:\n"
           "  ballast doctor                         what is up and what to type next\n"
           "  ballast submit job.yaml --follow       a job, with live progress\n"
           "  ballast jobs                           what runs, what waits and why\n"
           "  ballast COMMAND --help                 more about a command\n\n"
           "The address is --address, else BALLAST_ADDRESS, else `address` in\n"
           "~/.config/ballast/config.yaml, else the local socket; --key and --coordinator-key\n"
           "likewise.\n"
           "Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 denied, 5 conflict, 6 limits,\n"
           "7 unreachable, 8 outcome unknown, 9 other version, 10 (rebalance plan) something\n"
           "to do, 124 wait timed out, 128+n "
           "signal.\n");
}

static void print_command_help(const struct ctl_command *command)
{
    printf("Usage: ballast %s%s%s [OPTION]...\n\n%s\n\n%s\nOptions:\n", command->name,
           *command->args ? " " : "", command->args, command->summary, command->details);
    print_options(command->options, false);
    print_options("", true);
}

/* ---- values --------------------------------------------------------------------------------- */

static int wrong_value(const struct ctl *c, const struct option_row *r, const char *text,
                       const char *expected)
{
    char quoted[FIELD_QUOTE_BYTES];
    field_quote(text, quoted);
    return ctl_fail(c, CTL_USAGE, "--%s: %s is not %s", r->name, quoted, expected);
}

static int read_format(struct ctl *c, const struct option_row *r, const char *text)
{
    static const char *const words[] = {"table", "wide", "json", "yaml", "name", NULL};
    for (int i = 0; words[i]; i++)
        if (!strcmp(words[i], text)) {
            c->format = (enum ctl_format)i;
            return -1;
        }
    return wrong_value(c, r, text, "one of wide, json, yaml, name");
}

static int read_number(const struct ctl *c, const struct option_row *r, const char *text,
                       uint64_t *out)
{
    uint64_t x;
    bool negative;
    if (text_integer(text, &x, &negative) < 0 || negative || x > UINT32_MAX)
        return wrong_value(c, r, text, "a whole number from 0 to 4294967295");
    *out = x;
    return -1;
}

static int read_revision(struct ctl *c, const struct option_row *r, const char *text)
{
    bool negative;
    if (text_integer(text, &c->revision, &negative) < 0 || negative)
        return wrong_value(c, r, text, "a revision, as 'ballast rebalance plan' prints it");
    return -1;
}

static int read_timeout(struct ctl *c, const struct option_row *r, const char *text)
{
    double seconds;
    if (!text_duration(text, &seconds) || seconds <= 0 || seconds > 86400 * 365)
        return wrong_value(c, r, text, "a duration above 0, as in 5s or 2m");
    c->timeout_ms = (uint64_t)(seconds * 1000) + (seconds * 1000 < 1);
    return -1;
}

static int read_option(struct ctl *c, const struct option_row *r, const char *arg)
{
    switch (r->letter) {
    case 'A': c->address = arg; return -1;
    case 'Y': c->key_file = arg; return -1;
    case 'Q': c->coordinator_key = arg; return -1;
    case 'X': c->force = true; return -1;
    case 'U': c->role = arg; return -1;
    case 'o': return read_format(c, r, arg);
    case 'J': c->format = CTL_JSON; return -1;
    case 'H': c->no_header = true; return -1;
    case 'N': c->no_color = true; return -1;
    case 'q': c->quiet = true; return -1;
    case 't': return read_timeout(c, r, arg);
    case 's':
        c->sets = xrealloc(c->sets, (c->n_sets + 1) * sizeof *c->sets);
        c->sets[c->n_sets++] = arg;
        return -1;
    case 'k': c->cluster = arg; return -1;
    case 'T': c->train = arg; return -1;
    case 'n': return read_number(c, r, arg, &c->sequence_length);
    case 'D': c->out = arg; return -1;
    case 'Z': c->validate = true; return -1;
    case 'd': c->dry_run = true; return -1;
    case 'w': c->wait = true; return -1;
    case 'f': c->follow = true; return -1;
    case 'x': c->explain = true; return -1;
    case 'a': c->all = true; return -1;
    case 'u': c->user = arg; return -1;
    case 'c': return read_number(c, r, arg, &c->count);
    case 'r': c->reason = arg; return -1;
    case 'F': c->wait_for = arg; return -1;
    case 'R': return read_number(c, r, arg, &c->rank);
    case 'j': return (c->job = ctl_job_id(c, arg)) ? -1 : CTL_USAGE;
    case 'p': c->phases = true; return -1;
    case 'C': c->csv = true; return -1;
    case 'P': c->plot = true; return -1;
    case 'l': c->has_layer = true; return read_number(c, r, arg, &c->layer);
    case 'W': c->window = arg; return -1;
    case 'm': c->heatmap = true; return -1;
    case 'y': c->history = true; return -1;
    case 'e': c->has_epoch = true; return read_number(c, r, arg, &c->epoch);
    case 'v': return read_revision(c, r, arg);
    case '1': c->once = true; return -1;
    case 'L': c->loads = arg; return -1;
    case 'g': return read_number(c, r, arg, &c->window_steps);
    case 'G': return read_number(c, r, arg, &c->devices);
    case 'M': return read_number(c, r, arg, &c->nodes);
    case 'S': return read_number(c, r, arg, &c->slots_per_device);
    case 'B': c->previous = arg; return -1;
    case 'O': c->placement_out = arg; return -1;
    case 'I': c->placement = arg; return -1;
    default:  return -1; /* help and version are looked at when the command is known */
    }
}

/* ---- the command ---------------------------------------------------------------------------- */

static const struct ctl_command *find_command(char **words, size_t n_words, size_t *out_used)
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

static const char *verb_of(const struct ctl_command *command, const char *noun)
{
    size_t n = strlen(noun);
    return strncmp(command->name, noun, n) == 0 && command->name[n] == ' ' ? command->name + n + 1
                                                                           : NULL;
}

/* The first word of commands of two. */
static bool is_noun(const char *word)
{
    for (size_t i = 0; i < ctl_n_commands; i++)
        if (verb_of(&ctl_commands[i], word))
            return true;
    return false;
}

static int missing_verb(const struct ctl *c, const char *noun)
{
    char *verbs = xstrdup("");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        const char *verb = verb_of(&ctl_commands[i], noun);
        char *more = verb ? xasprintf("%s%s%s", verbs, *verbs ? ", " : "", verb) : NULL;
        if (more) {
            free(verbs);
            verbs = more;
        }
    }
    int code = ctl_fail(c, CTL_USAGE, "'%s' alone is not a command; what follows it is one of %s",
                        noun, verbs);
    free(verbs);
    return code;
}

static int unknown_command(const struct ctl *c, char **words, size_t n_words)
{
    const char *names[64] = {0};
    char quoted[FIELD_QUOTE_BYTES], whole[160];
    for (size_t i = 0; i < ctl_n_commands && i < 63; i++)
        names[i] = ctl_commands[i].name;
    if (n_words == 1 && is_noun(words[0]))
        return missing_verb(c, words[0]);
    snprintf(whole, sizeof whole, "%s%s%s", words[0], n_words > 1 ? " " : "",
             n_words > 1 ? words[1] : "");
    const char *near = field_nearest(whole, names);
    if (!near)
        near = field_nearest(words[0], names);
    field_quote(is_noun(words[0]) ? whole : words[0], quoted);
    if (near)
        return ctl_fail(c, CTL_USAGE, "%s is not a command; did you mean 'ballast %s'?", quoted,
                        near);
    return ctl_fail(c, CTL_USAGE, "%s is not a command; 'ballast --help' lists them", quoted);
}

static int check_arguments(const struct ctl *c, const struct ctl_command *command,
                           const bool *used)
{
    for (size_t i = 0; i < N_ROWS; i++)
        if (used[i] && !rows[i].is_common && !strchr(command->options, rows[i].letter))
            return ctl_fail(c, CTL_USAGE, "--%s does not belong to '%s'; see 'ballast %s --help'",
                            rows[i].name, command->name, command->name);
    if (c->n_args < command->n_min || c->n_args > command->n_max)
        return ctl_fail(c, CTL_USAGE, "%s arguments; usage: ballast %s%s%s",
                        c->n_args < command->n_min ? "missing" : "too many", command->name,
                        *command->args ? " " : "", command->args);
    return -1;
}

/* getopt's own tables, made from ours. */
static void make_getopt(char short_options[2 * N_ROWS + 2], struct option long_options[N_ROWS + 1])
{
    size_t n = 0;
    short_options[n++] = ':';
    for (size_t i = 0; i < N_ROWS; i++) {
        long_options[i] = (struct option){rows[i].name, rows[i].arg ? required_argument
                                                                    : no_argument, NULL,
                                          rows[i].letter};
        if (rows[i].has_short) {
            short_options[n++] = rows[i].letter;
            if (rows[i].arg)
                short_options[n++] = ':';
        }
    }
    short_options[n] = '\0';
    long_options[N_ROWS] = (struct option){0};
}

static int bad_option(const struct ctl *c, int kind, char **argv)
{
    const char *names[N_ROWS + 1] = {0};
    char quoted[FIELD_QUOTE_BYTES];
    for (size_t i = 0; i < N_ROWS; i++)
        names[i] = rows[i].name;
    const char *text = argv[optind - 1];
    field_quote(text, quoted);
    if (kind == ':')
        return ctl_fail(c, CTL_USAGE, "%s needs a value", quoted);
    const char *near = strncmp(text, "--", 2) ? NULL : field_nearest(text + 2, names);
    if (near)
        return ctl_fail(c, CTL_USAGE, "unknown option %s; did you mean '--%s'?", quoted, near);
    return ctl_fail(c, CTL_USAGE, "unknown option %s; see 'ballast --help'", quoted);
}

int ctl_parse(int argc, char **argv, struct ctl *c, const struct ctl_command **out_command)
{
    char short_options[2 * N_ROWS + 2];
    struct option long_options[N_ROWS + 1];
    bool used[N_ROWS] = {0};
    int letter, code = -1;
    make_getopt(short_options, long_options);
    for (int i = 1; i < argc; i++) /* so that mistakes are told in the form asked for */
        if (!strcmp(argv[i], "--json"))
            c->format = CTL_JSON;
    opterr = 0;
    while (code < 0 &&
           (letter = getopt_long(argc, argv, short_options, long_options, NULL)) != -1) {
        size_t i = 0;
        while (i < N_ROWS && rows[i].letter != letter)
            i++;
        if (i == N_ROWS)
            return bad_option(c, letter, argv);
        used[i] = true;
        code = read_option(c, &rows[i], optarg);
    }
    if (code >= 0)
        return code;
    char **words = argv + optind;
    size_t n_words = (size_t)(argc - optind), n_name = 0;
    const struct ctl_command *command = find_command(words, n_words, &n_name);
    if (used[1])
        return ctl_version(c);
    if (used[2])
        return ctl_check_config(c);
    if (command && used[0]) {
        print_command_help(command);
        return CTL_OK;
    }
    if (!command && n_words && !(used[0] && n_words == 1))
        return unknown_command(c, words, n_words);
    if (!command) {
        print_usage();
        return used[0] ? CTL_OK : CTL_USAGE;
    }
    c->n_args = n_words - n_name;
    c->args = xmemdup(words + n_name, (c->n_args + 1) * sizeof *c->args);
    code = check_arguments(c, command, used);
    *out_command = command;
    return code;
}
