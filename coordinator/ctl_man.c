/* ctl_man.c - the pages of the manual, from the tables and the help of the daemons
 *
 * The build runs `ballast __man FOLDER PROGRAM...`, so nothing is written twice by hand. */
#include "coordinator/ctl_list.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/version.h"
#include "coordinator/ctl_help.h"

#define HELP_BYTES_MAX (256u << 10)

/* Letters that mean something to roff lose it. */
static void put(FILE *out, const char *text)
{
    bool starts = true;
    for (; *text; text++) {
        if (starts && (*text == '.' || *text == '\''))
            fputs("\\&", out);
        starts = *text == '\n';
        if (*text == '\\')
            fputs("\\e", out);
        else if (*text == '-')
            fputs("\\-", out);
        else
            fputc(*text, out);
    }
}

static void section(FILE *out, const char *title)
{
    fprintf(out, ".SH %s\n", title);
}

static void title(FILE *out, const char *page, const char *number, const char *summary)
{
    fprintf(out, ".\\\" made by ballast __man\n.TH \"");
    put(out, page);
    fprintf(out, "\" %s \"\" \"Ballast %s\" \"Ballast\"\n", number, BALLAST_VERSION);
    section(out, "NAME");
    put(out, page);
    fputs(" \\- ", out);
    put(out, summary);
    fputc('\n', out);
}

/* Lines that begin with two spaces stand as they are, the others flow. */
static void paragraphs(FILE *out, const char *text)
{
    bool is_plain = false;
    char *copy = xstrdup(text), *rest = copy, *line;
    while ((line = strsep(&rest, "\n")) != NULL) {
        if (!rest && !*line)
            break;
        bool wants_plain = !strncmp(line, "  ", 2);
        if (*line && wants_plain != is_plain)
            fputs(wants_plain ? ".nf\n" : ".fi\n", out);
        is_plain = *line ? wants_plain : is_plain;
        if (*line)
            put(out, line);
        else
            fputs(".PP", out);
        fputc('\n', out);
    }
    if (is_plain)
        fputs(".fi\n", out);
    free(copy);
}

static void put_option(FILE *out, const char *left, const char *help)
{
    fputs(".TP\n", out);
    put(out, left + strspn(left, " "));
    fputc('\n', out);
    put(out, help);
    fputc('\n', out);
}

static void ends(FILE *out)
{
    section(out, "EXIT STATUS");
    paragraphs(out, ctl_help_codes);
    section(out, "FILES");
    paragraphs(out, ctl_help_address);
}

/* "ballast-job-show" of "job show". */
static void page_name(const struct ctl_command *command, char out[64])
{
    snprintf(out, 64, "ballast-%s", command->name);
    for (char *at = out; *at; at++)
        *at = *at == ' ' ? '-' : *at;
}

static void command_page(FILE *out, const struct ctl_command *command)
{
    char page[64], *forms = NULL;
    size_t n = 0;
    page_name(command, page);
    title(out, page, "1", command->summary);
    section(out, "SYNOPSIS");
    fputs("ballast ", out);
    put(out, command->name);
    fprintf(out, "%s", *command->args ? " " : "");
    put(out, command->args);
    fputs(" [OPTION]...\n", out);
    section(out, "DESCRIPTION");
    paragraphs(out, command->details);
    section(out, "OPTIONS");
    ctl_print_options(out, command, false, put_option);
    ctl_print_options(out, NULL, strchr(command->options, '@') != NULL, put_option);
    FILE *text = open_memstream(&forms, &n);
    if (!text)
        abort();
    ctl_forms_help(text, command);
    fclose(text);
    if (*forms)
        section(out, "OUTPUT");
    paragraphs(out, forms);
    free(forms);
    ends(out);
    section(out, "SEE ALSO");
    fputs("ballast(1)\n", out);
}

static void overview(FILE *out)
{
    title(out, "ballast", "1", "submits jobs to a Ballast coordinator and shows what becomes of "
          "them");
    section(out, "SYNOPSIS");
    fputs("ballast COMMAND [ARGUMENT]... [OPTION]...\n", out);
    section(out, "DESCRIPTION");
    paragraphs(out, ctl_help_intro);
    section(out, "COMMANDS");
    for (size_t i = 0; i < ctl_n_commands; i++) {
        char page[64];
        page_name(&ctl_commands[i], page);
        fputs(".TP\n", out);
        put(out, page);
        fputs("(1)\n", out);
        put(out, ctl_commands[i].summary);
        fputc('\n', out);
    }
    section(out, "OPTIONS");
    ctl_print_options(out, NULL, true, put_option);
    section(out, "EXAMPLES");
    paragraphs(out, ctl_help_examples);
    ends(out);
    section(out, "SEE ALSO");
    fputs("ballast\\-coordinator(8), ballast\\-worker(8)\n", out);
}

/* ---- daemons, by their own help -------------------------------------------------------------- */

/* Gives the text, freed with free(); NULL if the program says nothing. */
static char *help_of(const char *program, const char *option)
{
    char *line = xasprintf("'%s' %s", program, option), *text = xcalloc(1, HELP_BYTES_MAX + 1);
    FILE *in = popen(line, "r");
    size_t n = in ? fread(text, 1, HELP_BYTES_MAX, in) : 0;
    int status = in ? pclose(in) : -1;
    free(line);
    if (n && status == 0)
        return text;
    free(text);
    return NULL;
}

/* "what it does" of a help that begins with "name - what it does\n"; in the arena. */
static const char *first_line(struct arena *a, const char *help)
{
    const char *dash = strstr(help, " - ");
    size_t n = strcspn(help, "\n");
    return dash && dash < help + n ? arena_printf(a, "%.*s", (int)(help + n - dash - 3), dash + 3)
                                   : "a daemon of Ballast";
}

/* Its help as it stands. */
static bool program_page(FILE *out, const char *page, const char *program)
{
    char *help = help_of(program, "--help"), *config = help_of(program, "--help-config");
    struct arena a = {0};
    if (help) {
        title(out, page, "8", first_line(&a, help));
        section(out, "SYNOPSIS");
        fprintf(out, ".nf\n");
        put(out, help);
        fprintf(out, ".fi\n");
        section(out, "CONFIGURATION");
        fprintf(out, ".nf\n");
        put(out, config ? config : "");
        fprintf(out, ".fi\n");
        section(out, "SEE ALSO");
        fputs("ballast(1)\n", out);
    }
    bool has_help = help != NULL;
    arena_fini(&a);
    free(help);
    free(config);
    return has_help;
}

/* ---- all ------------------------------------------------------------------------------------- */

static FILE *open_page(const char *folder, const char *page, int number)
{
    char *path = xasprintf("%s/%s.%d", folder, page, number);
    FILE *out = fopen(path, "w");
    if (!out)
        fprintf(stderr, "ballast: %s: %s\n", path, strerror(errno));
    free(path);
    return out;
}

static bool close_page(FILE *out)
{
    bool is_good = !ferror(out);
    return fclose(out) == 0 && is_good;
}

int ctl_man(const char *folder, char **programs, size_t n_programs)
{
    bool is_good = true;
    FILE *out = open_page(folder, "ballast", 1);
    if (!out)
        return CTL_FAILED;
    overview(out);
    is_good = close_page(out);
    for (size_t i = 0; i < ctl_n_commands && is_good; i++) {
        char page[64];
        page_name(&ctl_commands[i], page);
        if (!(out = open_page(folder, page, 1)))
            return CTL_FAILED;
        command_page(out, &ctl_commands[i]);
        is_good = close_page(out);
    }
    for (size_t i = 0; i < n_programs && is_good; i++) {
        const char *slash = strrchr(programs[i], '/'), *page = slash ? slash + 1 : programs[i];
        if (!(out = open_page(folder, page, 8)))
            return CTL_FAILED;
        is_good = program_page(out, page, programs[i]);
        is_good = close_page(out) && is_good;
    }
    return is_good ? CTL_OK : CTL_FAILED;
}
