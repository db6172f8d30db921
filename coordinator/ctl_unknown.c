/* ctl_unknown.c - what may be meant by words that are no command
 *
 * A slip of the fingers is near a command's name. What hands know from Slurm, kubectl and docker is
 * not, so those words stand in a table. */
#include "coordinator/ctl.h"

#include <stdlib.h>
#include <string.h>

#include "common/field.h"
#include "common/field_text.h"

static const struct {
    const char *word, *ours;
} foreign[] = {
    {"squeue", "jobs"},          {"sacct", "jobs -a"},       {"sinfo", "nodes"},
    {"sbatch", "submit"},        {"srun", "submit"},         {"scancel", "cancel"},
    {"scontrol", "job"},         {"sattach", "logs -f"},     {"ps", "jobs"},
    {"ls", "jobs"},              {"list", "jobs"},           {"get", "job show"},
    {"describe", "job show"},    {"inspect", "job show"},    {"show", "job show"},
    {"status", "doctor"},        {"run", "submit"},          {"apply", "submit"},
    {"create", "submit"},        {"delete", "cancel"},       {"rm", "cancel"},
    {"kill", "cancel"},          {"stop", "cancel"},         {"tail", "logs -f"},
    {"attach", "logs -f"},       {"follow", "metrics -f"},   {"watch", "jobs -w"},
    {"hold", "job hold"},        {"release", "job release"}, {"requeue", "job requeue"},
    {"pause", "job pause"},      {"resume", "job resume"},   {"suspend", "job pause"},
    {"restart", "job requeue"},  {"set", "job set"},         {"update", "job set"},
    {"drain", "worker drain"},   {"cordon", "node drain"},   {"uncordon", "node resume"},
    {"priority", "job set ID scheduling.priority=N"},        {"stats", "top"},
    {"info", "doctor"},          {"explain", "submit --explain"},
};

static const char *of_foreign(const char *word)
{
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (!strcmp(foreign[i].word, word))
            return foreign[i].ours;
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

int ctl_unknown_command(const struct ctl *c, char *const *words, size_t n_words)
{
    const char *names[64] = {0};
    char quoted[FIELD_QUOTE_BYTES], whole[160];
    for (size_t i = 0; i < ctl_n_commands && i < 63; i++)
        names[i] = ctl_commands[i].name;
    if (n_words == 1 && is_noun(words[0]))
        return missing_verb(c, words[0]);
    snprintf(whole, sizeof whole, "%s%s%s", words[0], n_words > 1 ? " " : "",
             n_words > 1 ? words[1] : "");
    const char *near = of_foreign(words[0]);
    if (!near)
        near = field_nearest(whole, names);
    if (!near)
        near = field_nearest(words[0], names);
    field_quote(is_noun(words[0]) ? whole : words[0], quoted);
    if (near)
        return ctl_fail(c, CTL_USAGE, "%s is not a command; did you mean 'ballast %s'?", quoted,
                        near);
    return ctl_fail(c, CTL_USAGE, "%s is not a command; 'ballast --help' lists them", quoted);
}
