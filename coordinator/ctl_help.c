/* ctl_help.c - --help of the program and of its commands, from the tables */
#include "coordinator/ctl_list.h"

#include <stdlib.h>
#include <string.h>

#include "coordinator/ctl_help.h"

const char ctl_help_intro[] =
    "Speaks to ballast-coordinator: submits jobs and shows what becomes of them.";

const char ctl_help_address[] =
    "The address is --address, else that of --context, else BALLAST_ADDRESS, else that of\n"
    "BALLAST_CONTEXT or of `context` in ~/.config/ballast/config.yaml, else `address` there, else\n"
    "the local socket; --key, --coordinator-key and the user of lists (BALLAST_USER) likewise.\n"
    "A context is a file ~/.config/ballast/contexts/NAME.yaml with those keys.\n";

const char ctl_help_codes[] =
    "0 ok, 1 failed, 2 usage, 3 not found, 4 denied, 5 conflict, 6 limits,\n"
    "7 unreachable, 8 outcome unknown, 9 other version, 10 (rebalance plan) something\n"
    "to do, 124 wait timed out, 128+n signal.\n";

const char ctl_help_examples[] =
    "  ballast doctor                         what is up and what to type next\n"
    "  ballast submit job.yaml --follow       a job, with live progress\n"
    "  ballast jobs                           what runs, what waits and why\n"
    "  ballast jobs -a --since 2d --sort -time -o jobid,name,time\n"
    "  ballast help COMMAND                   more about a command, or a group as job\n"
    "  source <(ballast completion bash)      Tab completes commands, options, ids and names\n";

static void option_text(const struct ctl_command *command, const struct ctl_option *o, char out[64])
{
    bool has_short = o->short_form && ctl_option_of_short(command, o->short_form) == o;
    snprintf(out, 64, "%c%c%s --%s%s%s", has_short ? '-' : ' ',
             has_short ? o->short_form : ' ', has_short ? "," : " ", o->name,
             o->arg ? " " : "", o->arg ? o->arg : "");
}

static bool is_shown(const struct ctl_command *command, const struct ctl_option *o,
                     bool with_remote)
{
    bool is_own = o->group == OPTION_OWN || o->group == OPTION_MANY || o->group == OPTION_OUTPUT;
    return command ? is_own && ctl_command_takes(command, o)
                   : o->group == OPTION_COMMON || (with_remote && o->group == OPTION_REMOTE);
}

void ctl_print_options(FILE *out, const struct ctl_command *command, bool with_remote,
                       void (*print)(FILE *out, const char *left, const char *help))
{
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];
        char left[64], help[128];
        if (!is_shown(command, o, with_remote))
            continue;
        option_text(command, o, left);
        snprintf(help, sizeof help, "%s%s", o->help,
                 o->group == OPTION_MANY ? "; may be repeated" : "");
        print(out, left, help);
    }
}

static void print_option(FILE *out, const char *left, const char *help)
{
    fprintf(out, "  %-28s %s\n", left, help);
}

static void print_command(FILE *out, const struct ctl_command *command)
{
    char left[64];
    snprintf(left, sizeof left, "%s %s", command->name, command->args);
    fprintf(out, "  %-28s %s\n", left, command->summary);
}

/* The commands that begin with word, as those of jobs with job; false: there are none. */
static bool print_group(FILE *out, const char *word)
{
    size_t n = strlen(word);
    bool is_one = false;
    for (size_t i = 0; i < ctl_n_commands; i++) {
        const struct ctl_command *command = &ctl_commands[i];
        if (strncmp(command->name, word, n) != 0 || command->name[n] != ' ')
            continue;
        if (!is_one)
            fprintf(out, "Usage: ballast %s COMMAND [ARGUMENT]... [OPTION]...\n\nCommands:\n",
                    word);
        is_one = true;
        print_command(out, command);
    }
    if (is_one)
        fprintf(out, "\n'ballast help %s COMMAND' tells more about one.\n", word);
    return is_one;
}

void ctl_print_usage(FILE *out)
{
    fprintf(out, "Usage: ballast COMMAND [ARGUMENT]... [OPTION]...\n\n%s\n\nCommands:\n",
            ctl_help_intro);
    for (size_t i = 0; i < ctl_n_commands; i++)
        print_command(out, &ctl_commands[i]);
    fprintf(out, "\nOptions of every command, or of every one that speaks to a coordinator:\n");
    ctl_print_options(out, NULL, true, print_option);
    fprintf(out, "\nExamples:\n%s\n%sExit codes: %s", ctl_help_examples, ctl_help_address,
            ctl_help_codes);
}

char *ctl_forms_text(const struct ctl_command *command)
{
    static const char *const words[] = {[CTL_WIDE] = "wide", [CTL_JSON] = "json",
                                        [CTL_YAML] = "yaml", [CTL_NAME] = "name",
                                        [CTL_COLUMNS] = "COLUMN[,COLUMN]..."};
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    if (!out)
        abort();
    for (int i = CTL_WIDE; i <= CTL_COLUMNS; i++)
        if (command->forms >> i & 1)
            fprintf(out, "%s%s", n || ftell(out) ? ", " : "one of ", words[i]);
    fclose(out);
    return text;
}

void ctl_forms_help(FILE *out, const struct ctl_command *command)
{
    if (!command->forms)
        return;
    char *forms = ctl_forms_text(command);
    fprintf(out, "-o takes %s.\n", forms);
    free(forms);
    if (!command->list)
        return;
    char *names = list_column_names(command->list);
    fprintf(out, "Columns, for --sort and --filter too: %s.\n", names);
    free(names);
}

static void print_help(FILE *out, const struct ctl_command *command)
{
    fprintf(out, "Usage: ballast %s%s%s [OPTION]...\n\n%s\n\n%s\nOptions:\n", command->name,
            *command->args ? " " : "", command->args, command->summary, command->details);
    ctl_print_options(out, command, false, print_option);
    ctl_print_options(out, NULL, strchr(command->options, '@') != NULL, print_option);
    if (command->forms)
        fputc('\n', out);
    ctl_forms_help(out, command);
}

int ctl_show_help(const struct ctl *c, char *const *words, size_t n_words)
{
    size_t n_used = 0;
    const struct ctl_command *command = ctl_command_find(words, n_words, &n_used);
    if (!n_words)
        ctl_print_usage(stdout);
    else if (command && n_used == n_words)
        print_help(stdout, command);
    else if (n_words > 1 || !print_group(stdout, words[0]))
        return ctl_unknown_command(c, words, n_words);
    return CTL_OK;
}

int ctl_help(struct ctl *c)
{
    return ctl_show_help(c, c->args, c->n_args);
}
