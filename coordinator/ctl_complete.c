/* ctl_complete.c - what may come next on a command line, for the shells
 *
 * Made from the tables that parse the line: what an argument is stands in its own text, as in ID,
 * WORKER..., full|lora or FILE. Ids and names come from the coordinator, if it answers at once. */
#include "coordinator/ctl_list.h"
#include "coordinator/event.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ASK_MS 500
#define JOBS_OFFERED 200

/* The shell is to complete files or folders by itself: a last line that is no word. */
static const char files[] = ":files", folders[] = ":folders";

struct completion {
    struct ctl *c;
    const struct ctl_command *command; /* NULL: not known yet */
    const char *prefix;                /* what the word begins with and stays, as in --sort a, */
    const char *typed;                 /* what is to be completed, after the prefix */
};

static void offer(const struct completion *k, const char *word, const char *text)
{
    if (strncmp(word, k->typed, strlen(k->typed)) != 0)
        return;
    printf("%s%s%s", k->prefix, word, *text ? "\t" : "");
    ctl_print_escaped(stdout, text, strlen(text), false);
    putchar('\n');
}

/* ---- what the coordinator knows -------------------------------------------------------------- */

static void offer_jobs(const struct completion *k)
{
    Ballast__JobListRequest request = BALLAST__JOB_LIST_REQUEST__INIT;
    Ballast__ListOrder newest = BALLAST__LIST_ORDER__INIT, *order[] = {&newest};
    const ProtobufCMessage *message;
    char id[24], text[128];
    newest.column = "jobid";
    newest.descending = true;
    request.order = order;
    request.n_order = 1;
    request.all_states = true;
    request.limit = JOBS_OFFERED;
    if (ctl_call(k->c, BALLAST__METHOD__METHOD_JOB_LIST, &request.base, &message) != CTL_OK)
        return;
    const Ballast__JobListReply *reply = (const Ballast__JobListReply *)message;
    for (size_t i = 0; i < reply->n_jobs; i++) {
        const Ballast__Job *j = reply->jobs[i];
        snprintf(id, sizeof id, "%" PRIu64, j->id);
        snprintf(text, sizeof text, "%s, %s", j->name, event_job_state(j->state));
        offer(k, id, text);
    }
}

static void offer_users(const struct completion *k)
{
    Ballast__JobListRequest request = BALLAST__JOB_LIST_REQUEST__INIT;
    const ProtobufCMessage *message;
    request.all_states = true;
    offer(k, "me", "");
    if (ctl_call(k->c, BALLAST__METHOD__METHOD_JOB_LIST, &request.base, &message) != CTL_OK)
        return;
    const Ballast__JobListReply *reply = (const Ballast__JobListReply *)message;
    for (size_t i = 0; i < reply->n_jobs; i++) {
        size_t before = 0;
        while (before < i && strcmp(reply->jobs[before]->user, reply->jobs[i]->user) != 0)
            before++;
        if (before == i)
            offer(k, reply->jobs[i]->user, "");
    }
}

static void offer_workers(const struct completion *k, bool nodes)
{
    const Ballast__WorkerListReply *fleet;
    if (ctl_fleet(k->c, &fleet) != CTL_OK)
        return;
    for (size_t i = 0; i < fleet->n_workers; i++) {
        const Ballast__Worker *w = fleet->workers[i];
        size_t before = nodes ? 0 : i;
        while (before < i && strcmp(fleet->workers[before]->node, w->node) != 0)
            before++;
        if (before == i)
            offer(k, nodes ? w->node : w->name, nodes ? "" : event_worker_state(w->state));
    }
}

static void offer_contexts(const struct completion *k)
{
    char **names;
    size_t n = ctl_contexts(&k->c->arena, &names);
    for (size_t i = 0; i < n; i++)
        offer(k, names[i], "");
}

/* ---- what the tables know -------------------------------------------------------------------- */

/* "full|lora": each of them. */
static void offer_words(const struct completion *k, const char *words)
{
    char *copy = arena_strdup(&k->c->arena, words), *word;
    while ((word = strsep(&copy, "|")) != NULL)
        offer(k, word, "");
}

static void offer_columns(const struct completion *k, const char *after)
{
    char name[32];
    for (size_t i = 0; k->command && k->command->list && i < k->command->list->n_columns; i++) {
        list_column_name(&k->command->list->columns[i], name);
        offer(k, arena_printf(&k->c->arena, "%s%s", name, after), "");
    }
}

/* The part of a list after the last of the marks is completed, the rest stays. */
static struct completion after(const struct completion *k, const char *marks)
{
    size_t n = strlen(k->typed);
    while (n && !strchr(marks, k->typed[n - 1]))
        n--;
    struct completion rest = *k;
    rest.prefix = arena_printf(&k->c->arena, "%s%.*s", k->prefix, (int)n, k->typed);
    rest.typed = k->typed + n;
    return rest;
}

/* The column that the last operator in text compares; NULL: there is none. */
static const struct list_column *compared(const struct completion *k, const char *text)
{
    const char *sign = NULL, *start;
    for (const char *at = text; (at = strpbrk(at, "=!<>~")) != NULL; at++)
        sign = sign && at == sign + 1 ? sign : at; /* the first letter of <= */
    if (!sign || !k->command->list)
        return NULL;
    for (start = sign; start > text && start[-1] != ',';)
        start--;
    char *name = arena_printf(&k->c->arena, "%.*s", (int)(sign - start), start);
    return list_column_find(k->command->list, name);
}

/* A column, or after its operator one of its words; after a comma either. */
static void offer_condition(const struct completion *k)
{
    const struct list_column *column = k->command ? compared(k, k->typed) : NULL;
    struct completion condition = after(k, ","), value = after(k, ",=!<>~");
    for (size_t i = 0; column && column->word && column->word(i); i++)
        offer(&value, column->word(i), "");
    if (!strpbrk(condition.typed, "=!<>~"))
        offer_columns(&condition, "=");
}

static void offer_forms(const struct completion *k)
{
    static const char *const words[] = {"table", "wide", "json", "yaml", "name"};
    for (int i = CTL_WIDE; k->command && i <= CTL_NAME; i++)
        if (k->command->forms >> i & 1)
            offer(k, words[i], "");
    struct completion rest = after(k, ",");
    offer_columns(&rest, "");
}

static void offer_states(const struct completion *k)
{
    for (int i = BALLAST__JOB_STATE__JOB_QUEUED; i <= (int)JOB_STATE_MAX; i++)
        offer(k, arena_printf(&k->c->arena, "state=%s", event_job_state((Ballast__JobState)i)), "");
}

/* By what an argument is called. */
static void offer_values(const struct completion *k, const char *what)
{
    what += *what == '[';
    size_t n = strcspn(what, ".]");
    struct completion column = after(k, ","), key = after(&column, "-");
    if (!strncmp(what, "ID", n))
        offer_jobs(k);
    else if (!strncmp(what, "WORKER", n))
        offer_workers(k, false);
    else if (!strncmp(what, "NODE", n))
        offer_workers(k, true);
    else if (!strcmp(what, "USER"))
        offer_users(k);
    else if (!strcmp(what, "CONTEXT"))
        offer_contexts(k);
    else if (!strcmp(what, "COLUMNS"))
        offer_columns(&key, "");
    else if (!strcmp(what, "CONDITION"))
        offer_condition(k);
    else if (!strcmp(what, "RANK"))
        offer(k, "all", "");
    else if (!strcmp(what, "FORMAT"))
        offer_forms(k);
    else if (!strcmp(what, "state=STATE"))
        offer_states(k);
    else if (strchr(what, '|'))
        offer_words(k, what);
    else if (!strcmp(what, "FILE") || !strcmp(what, "JOB.yaml"))
        puts(files);
    else if (!strcmp(what, "DIR") || !strcmp(what, "MODEL_DIR"))
        puts(folders);
}

static void offer_options(const struct completion *k)
{
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];
        if (k->command ? ctl_command_takes(k->command, o) : o->group == OPTION_COMMON ||
                                                            o->group == OPTION_REMOTE)
            offer(k, arena_printf(&k->c->arena, "--%s", o->name), o->help);
    }
}

/* The first word of commands once, or the second words of those that begin with the first. */
static void offer_commands(const struct completion *k, const char *first)
{
    const char *last = "";
    for (size_t i = 0; i < ctl_n_commands; i++) {
        const struct ctl_command *m = &ctl_commands[i];
        size_t n = strcspn(m->name, " ");
        char *word = arena_printf(&k->c->arena, "%.*s", (int)n, m->name);
        if (!first && strcmp(word, last) != 0)
            offer(k, word, m->name[n] ? "" : m->summary);
        else if (first && !strcmp(first, word) && m->name[n])
            offer(k, m->name + n + 1, m->summary);
        last = word;
    }
}

/* ---- the line -------------------------------------------------------------------------------- */

static const struct ctl_option *option_named(const struct ctl_command *command, const char *word)
{
    size_t n = strcspn(word, "=");
    for (size_t i = 0; i < ctl_n_options; i++) {
        const struct ctl_option *o = &ctl_options[i];
        bool is_long = !strncmp(word, "--", 2) && strlen(o->name) == n - 2 &&
                       !strncmp(word + 2, o->name, n - 2);
        bool is_short = word[0] == '-' && word[1] && !word[2] && word[1] == o->short_form &&
                        ctl_option_of_short(command, o->short_form) == o;
        if (is_long || is_short)
            return o;
    }
    return NULL;
}

/* Of the words before the last: those that are no options and no values of options. Which
 * coordinator they name is taken to heart. Returns the option whose value the last word is. */
static const struct ctl_option *read_words(struct completion *k, char **words, size_t n,
                                           char **plain, size_t *n_plain)
{
    const struct ctl_option *pending = NULL;
    size_t used = 0;
    for (size_t i = 0; i < n; i++) {
        char *value = strchr(words[i], '=');
        if (pending) {
            if (pending->group == OPTION_REMOTE)
                ctl_option_read(k->c, pending, words[i]);
            pending = NULL;
        } else if (words[i][0] != '-' || !words[i][1]) {
            plain[(*n_plain)++] = words[i];
            k->command = ctl_command_find(plain, *n_plain, &used);
        } else {
            const struct ctl_option *o = option_named(k->command, words[i]);
            pending = o && o->arg && !value ? o : NULL;
            if (o && value && o->group == OPTION_REMOTE)
                ctl_option_read(k->c, o, value + 1);
        }
    }
    *n_plain -= k->command ? used : 0;
    return pending;
}

/* The argument of that number, of those that a command's usage names. */
static const char *argument_at(struct arena *a, const char *args, size_t at)
{
    char *copy = arena_strdup(a, args), *word = NULL, *next;
    for (size_t i = 0; (next = strsep(&copy, " ")) != NULL; i++) {
        word = next;
        if (i == at)
            return word;
    }
    return word && strstr(word, "...") ? word : NULL;
}

static void complete(struct completion *k, char **words, size_t n)
{
    char **plain = xcalloc(n + 1, sizeof *plain);
    size_t n_plain = 0;
    const struct ctl_option *pending = read_words(k, words, n - 1, plain, &n_plain);
    const char *word = words[n - 1], *value = strchr(word, '=');
    const struct ctl_option *own = *word == '-' && value ? option_named(k->command, word) : NULL;
    if (pending) {
        offer_values(k, pending->arg);
    } else if (own && own->arg) {
        k->prefix = arena_printf(&k->c->arena, "%.*s", (int)(value + 1 - word), word);
        k->typed = value + 1;
        offer_values(k, own->arg);
    } else if (*word == '-') {
        offer_options(k);
    } else if (!k->command) {
        offer_commands(k, n_plain ? plain[0] : NULL);
    } else if (k->command->run == ctl_help) {
        offer_commands(k, n_plain ? plain[1] : NULL);
    } else {
        const char *what = argument_at(&k->c->arena, k->command->args, n_plain);
        if (what)
            offer_values(k, what);
    }
    free(plain);
}

int ctl_complete(struct ctl *c, char **words, size_t n_words)
{
    if (!n_words)
        return CTL_USAGE;
    struct completion k = {.c = c, .prefix = "", .typed = words[n_words - 1]};
    c->is_silent = c->quiet = true; /* a line that is not whole is no mistake */
    c->timeout_ms = ASK_MS;
    complete(&k, words, n_words);
    return CTL_OK;
}

/* ---- for the shells -------------------------------------------------------------------------- */

/* bash cuts words at = and :, so the line is cut again, and what it has of a word is not said
 * twice. */
static const char bash_script[] =
    "_ballast() {\n"
    "    local line=${COMP_LINE:0:COMP_POINT} cut= word= text= IFS=$' \\t\\n'\n"
    "    local -a words\n"
    "    read -ra words <<< \"$line\"\n"
    "    [[ $line == *[[:space:]] ]] && words+=('')\n"
    "    local last=${words[${#words[@]} - 1]}\n"
    "    [[ $last == *[=:]* ]] && cut=${last%\"${last##*[=:]}\"}\n"
    "    COMPREPLY=()\n"
    "    while IFS=$'\\t' read -r word text; do\n"
    "        case $word in\n"
    "        :files) compopt -o default; COMPREPLY=() ;;\n"
    "        :folders) compopt -o dirnames; COMPREPLY=() ;;\n"
    "        *) COMPREPLY+=(\"${word#\"$cut\"}\")\n"
    "           [[ $word == *[=,] ]] && compopt -o nospace ;;\n"
    "        esac\n"
    "    done < <(\"${words[0]}\" __complete \"${words[@]:1}\" 2>/dev/null)\n"
    "}\n"
    "complete -F _ballast ballast\n";

static const char zsh_script[] =
    "#compdef ballast\n"
    "_ballast() {\n"
    "    local word text\n"
    "    local -a plain open\n"
    "    while IFS=$'\\t' read -r word text; do\n"
    "        case $word in\n"
    "        :files) _files; return ;;\n"
    "        :folders) _files -/; return ;;\n"
    "        *[=,]) open+=(\"$word\") ;;\n"
    "        *) plain+=(\"${word//:/\\\\:}${text:+:$text}\") ;;\n"
    "        esac\n"
    "    done < <(\"${words[1]}\" __complete \"${(@)words[2,CURRENT]}\" 2>/dev/null)\n"
    "    (( $#open )) && compadd -S '' -a open\n"
    "    (( $#plain )) && _describe ballast plain\n"
    "}\n"
    "[[ $funcstack[1] == _ballast ]] && _ballast \"$@\" || compdef _ballast ballast\n";

static const char fish_script[] =
    "function __ballast_complete\n"
    "    set -l words (commandline -opc) (commandline -ct)\n"
    "    for line in ($words[1] __complete $words[2..-1] 2>/dev/null)\n"
    "        switch $line\n"
    "            case :files\n"
    "                __fish_complete_path (commandline -ct)\n"
    "            case :folders\n"
    "                __fish_complete_directories (commandline -ct)\n"
    "            case '*'\n"
    "                echo $line\n"
    "        end\n"
    "    end\n"
    "end\n"
    "complete -c ballast -f -a '(__ballast_complete)'\n";

int ctl_completion(struct ctl *c)
{
    static const struct {
        const char *shell, *script;
    } rows[] = {{"bash", bash_script}, {"zsh", zsh_script}, {"fish", fish_script}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!strcmp(rows[i].shell, c->args[0])) {
            fputs(rows[i].script, stdout);
            return CTL_OK;
        }
    return ctl_fail(c, CTL_USAGE, "'%s' is not a shell that is known here; expected one of bash, "
                    "zsh, fish", c->args[0]);
}
