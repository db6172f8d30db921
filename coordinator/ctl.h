/* ctl.h - the client: one table of commands, and what they share
 *
 * A command is a row (name, arguments, help, function). Data goes to stdout, everything else to
 * stderr; each function returns the exit code. */
#ifndef COORDINATOR_CTL_H
#define COORDINATOR_CTL_H

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>

#include "common/json.h"
#include "common/link_trust.h"
#include "common/mem.h"
#include "common/problems.h"
#include "common/types.h"
#include "proto/job_states.h"
#include "proto/call.h"

enum ctl_exit {
    CTL_OK = 0,
    CTL_FAILED = 1,          /* the operation failed, or the job where a command mirrors one */
    CTL_USAGE = 2,           /* the command line or the job file is wrong */
    CTL_NOT_FOUND = 3,
    CTL_DENIED = 4,
    CTL_CONFLICT = 5,        /* a precondition does not hold */
    CTL_LIMIT = 6,
    CTL_UNREACHABLE = 7,
    CTL_UNKNOWN_OUTCOME = 8, /* sent, no answer came */
    CTL_PROTOCOL = 9,
    CTL_CHANGES = 10,        /* of a plan: there is something to do */
    CTL_WAIT_TIMEOUT = 124,
    CTL_SIGNAL = 128,        /* + n */
};

enum ctl_format { CTL_TABLE, CTL_WIDE, CTL_JSON, CTL_YAML, CTL_NAME, CTL_COLUMNS };

/* Which of them a command can print besides its text, as bits 1 << CTL_JSON. */
enum {
    CTL_NO_FORMS = 0,
    CTL_LINES    = 1 << CTL_JSON,
    CTL_VALUES   = 1 << CTL_JSON | 1 << CTL_YAML,
    CTL_NAMED    = CTL_VALUES | 1 << CTL_NAME,
    CTL_LISTS    = CTL_NAMED | 1 << CTL_WIDE | 1 << CTL_COLUMNS,
};

/* A coordinator, and what is needed to speak to it. */
struct ctl_place {
    char *address, *key_file, *server_file; /* NULL: no keys */
    char *source;                           /* of the address */
    struct link_trust trust;
};

struct ctl {
    /* the command line */
    char  **args;     /* what follows the command; n_args of them */
    size_t  n_args;
    enum ctl_format format;
    bool    validate; /* of adapt */
    bool    no_header, no_color, quiet, verbose, all, follow, wait, dry_run, explain, phases, csv;
    bool    plot, all_users, summary, watch, any, hold, all_ranks;
    const char *address, *context, *user, *reason, *wait_for, *sort, *since, *columns;
    const char **sets, **filters;
    size_t   n_sets, n_filters;
    uint64_t job, count, rank, tail; /* count 0: the command's own */
    bool        has_layer, has_epoch, heatmap, history, once, has_tail;
    uint64_t    layer, epoch, revision; /* revision 0: whatever is best now */
    uint64_t    first_step, last_step;  /* of --step; 0: not given */
    const char *window;
    uint64_t timeout_ms;       /* 0: the command's own */
    const char *loads, *previous, *placement, *placement_out;
    uint64_t devices, nodes, slots_per_device, window_steps; /* 0: not given */
    const char *key_file, *coordinator_key;
    const char *role;                  /* of keygen */
    bool        force;                 /* of adapt */
    const char *cluster, *train, *out; /* of adapt; out also of keygen */
    uint64_t sequence_length;          /* 0: its own */

    struct caller *caller; /* opened by the first call */
    struct ctl_place place;      /* of caller */
    const char    *connected_to; /* its address */
    bool           is_mutating; /* the present call, for what is said while it is retried */
    bool           was_answered; /* there is a coordinator: an outage is worth waiting for */
    uint64_t       deadline_ns;  /* of polls; 0: none */
    bool           is_silent;    /* the caller says by itself what failed */
    char          *failure;      /* what the last answer refused; in the arena. NULL: no answer */
    struct arena   arena;
};

struct ctl_list;

struct ctl_command {
    const char *name;    /* one or two words */
    const char *args;    /* as in "JOB.yaml"; what it means is completed: ctl_complete.c */
    size_t      n_min, n_max;
    const char *options; /* letters of those it takes besides the common ones; '@': and those of
                          * commands that speak to a coordinator */
    unsigned    forms;   /* of its output */
    const char *summary, *details; /* details: paragraphs and examples for --help */
    int (*run)(struct ctl *c);
    const struct ctl_list *list; /* whose columns --sort, --filter and -o take; or NULL */
};

extern const struct ctl_command ctl_commands[];
extern const size_t ctl_n_commands;

/* ---- ctl_options.c */

/* Letters are also names inside the table of commands. */
struct ctl_option {
    char letter, short_form;       /* 0: it has no short form */
    const char *name, *arg, *help; /* arg NULL: it takes none; what it means is completed */
    /* MANY: a command's own that may be given several times; of others a value counts once. */
    enum { OPTION_OWN, OPTION_MANY, OPTION_COMMON, OPTION_REMOTE, OPTION_OUTPUT } group;
};
extern const struct ctl_option ctl_options[];
extern const size_t ctl_n_options;

/* Sets what it says in c; -1 to go on, else the exit code after printing what is wrong. */
int  ctl_option_read(struct ctl *c, const struct ctl_option *option, const char *value);
/* Of several with one short form the first in the table that the command takes; the first where
 * there is no command (NULL) yet. */
const struct ctl_option *ctl_option_of_short(const struct ctl_command *command, int short_form);
bool ctl_command_takes(const struct ctl_command *command, const struct ctl_option *option);
/* The command that the first one or two words name; NULL: none. */
const struct ctl_command *ctl_command_find(char *const *words, size_t n_words, size_t *out_used);

/* Says that the words name none, and which may be meant; returns CTL_USAGE. */
int ctl_unknown_command(const struct ctl *c, char *const *words, size_t n_words);

/* Fills c and *out_command from the command line. Returns -1 to go on, else the exit code: help,
 * version and mistakes have been printed. c->args is owned by c afterwards. */
int ctl_parse(int argc, char **argv, struct ctl *c, const struct ctl_command **out_command);

/* ---- ctl_help.c */

void ctl_print_usage(FILE *out);
/* Help about what the words name: a command, a group, or without any all of it. */
int  ctl_show_help(const struct ctl *c, char *const *words, size_t n_words);
/* "one of wide, json, yaml": what -o takes. Gives a text, freed with free(). */
char *ctl_forms_text(const struct ctl_command *command);

/* ---- ctl_call.c: the coordinator */

/* For each: flag > environment > ~/.config/ballast/config.yaml > the default. False after printing
 * what is wrong with a file; gives *out, ended with ctl_place_fini. */
bool ctl_find_place(const struct ctl *c, struct ctl_place *out);
void ctl_place_fini(struct ctl_place *p);

/* Any of them, by the same rule. Gives *out, freed with free(); NULL: it is not set. False after
 * printing what is wrong with a file. */
enum ctl_setting { CTL_SETTING_ADDRESS, CTL_SETTING_KEY, CTL_SETTING_COORDINATOR_KEY,
                   CTL_SETTING_USER, CTL_SETTINGS };
bool ctl_setting(const struct ctl *c, enum ctl_setting setting, char **out);
/* Names of the files in the folder of contexts, sorted; gives *out, an array in the arena. */
size_t ctl_contexts(struct arena *a, char ***out);

/* Whom the coordinator takes us for. */
int ctl_who(struct ctl *c, struct arena *a, const char **out_user);
/* The workers; lives as the answers of ctl_call. */
int ctl_fleet(struct ctl *c, const Ballast__WorkerListReply **out_reply);
/* Says after Ctrl-C that only the looking on has ended; returns code. */
int ctl_detached(const struct ctl *c, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* One call; on failure prints it and returns its exit code. *out_reply lives until arena_reset. */
int ctl_call(struct ctl *c, Ballast__Method method, const ProtobufCMessage *request,
             const ProtobufCMessage **out_reply);

/* The same for streams: once a coordinator has answered it waits out every outage, until
 * deadline_ns (then CTL_WAIT_TIMEOUT). wait_ms: how long the coordinator may hold it. */
int ctl_poll(struct ctl *c, Ballast__Method method, const ProtobufCMessage *request,
             uint32_t wait_ms, const ProtobufCMessage **out_reply);

void ctl_disconnect(struct ctl *c);

/* "ballast: text" on stderr, or as JSON where JSON was asked for; returns code. */
int ctl_fail(const struct ctl *c, enum ctl_exit code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* What is wrong with a job file, a line each; returns CTL_USAGE. */
int ctl_fail_problems(const struct ctl *c, const struct problems *p);
/* A hint on stderr; silent with -q. */
void ctl_hint(const struct ctl *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The id in text, or 0 after saying so. */
uint64_t ctl_job_id(const struct ctl *c, const char *text);
/* What the coordinator tells of the job that the first word names; lives as an answer of ctl_call
 * does. Otherwise an exit code, after saying so. */
int ctl_ask_job(struct ctl *c, const Ballast__JobShowReply **out);

/* Set by SIGINT (counted) once ctl_catch_interrupt was called; a call then ends with 130. */
extern volatile sig_atomic_t ctl_interrupts;
void ctl_catch_interrupt(void);

/* ---- ctl_print.c: text */

bool ctl_wants_color(const struct ctl *c);

/* Foreign bytes without what could steer a terminal; newlines stay if told so. */
void ctl_print_escaped(FILE *out, const void *bytes, size_t n_bytes, bool keep_newlines);

/* Bytes of the part of text that fits into so many cells of a terminal; a letter may take two of
 * them, or none if it goes onto the one before. *out_cells (may be NULL): that it takes. */
size_t ctl_bytes_within(const char *text, size_t n_cells, size_t *out_cells);
/* Text cut or filled up with spaces to so many cells; gives, freed with free(). */
char *ctl_fitted(const char *text, size_t n_cells);

/* A line of it as a string; gives, freed with free(). */
char *ctl_clean_text(const char *format, va_list args) __attribute__((format(printf, 1, 0)));

struct ctl_column {
    const char *head;
    bool is_right;
    int  width; /* at least */
};
struct ctl_table {
    const struct ctl_column *columns;
    size_t n_columns, n_cells;
    struct ctl_cell *cells;
    bool   no_header; /* whatever the command line says */
};
void ctl_table_cell(struct ctl_table *t, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void ctl_table_color(struct ctl_table *t, const char *color); /* of the last cell; "31" is red */
void ctl_table_print(const struct ctl *c, const struct ctl_table *t);
void ctl_table_fini(struct ctl_table *t);

/* "-" for what is not known. Cells of numbers and times. */
void ctl_table_number(struct ctl_table *t, const char *format, double x);
/* x by a format for one double; unless it is finite, none. */
void ctl_number_text(const char *format, double x, const char *none, char out_text[64]);

/* 1234567 as "1.2 MB"-like text in binary units. */
void ctl_bytes_text(uint64_t n_bytes, char out_text[32]);

/* "R" for RUNNING. */
const char *ctl_state_short(const Ballast__Job *job);
const char *ctl_state_color(Ballast__JobState state);
/* The i-th of them, NULL after the last. */
const char *ctl_worker_state_word(size_t i);
/* A line of what is shown of one thing; nothing where the text is empty. */
void ctl_print_line(const char *key, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- ctl_json.c: printing JSON; json_of.h makes it of what the coordinator says */

bool ctl_is_json(const struct ctl *c); /* --json or -o yaml */
/* Takes items, prints {"apiVersion", "kind", "meta", "items"}. */
void ctl_json_list(const struct ctl *c, const char *kind, uint64_t seq, bool truncated,
                   struct json *items);
/* Takes object, prints it with apiVersion, kind and meta. */
void ctl_json_one(const struct ctl *c, const char *kind, uint64_t seq, struct json *object);
/* Takes object, prints it on one line (streams). */
void ctl_json_line(struct json *object);
/* Takes value, prints it bare, as --json or -o yaml want it. */
void ctl_json_value(const struct ctl *c, struct json *value);

/* ---- commands that others use */

/* The exit code that mirrors how a job ended. */
int ctl_exit_of_job(const Ballast__Job *job);
/* Shows progress until the job ends; Ctrl-C detaches. Returns the exit code. */
int ctl_follow(struct ctl *c, job_id id);
/* Waits until all of the jobs, or the first with --any, have ended or have (or have passed) state;
 * UNKNOWN: have ended. */
int ctl_wait_for(struct ctl *c, const job_id *ids, size_t n_ids, Ballast__JobState state);
/* What --dry-run prints; needs no coordinator. */
int ctl_plan(const struct ctl *c, const Ballast__JobSpec *spec);

/* One cell of a heat map, from a quarter of the mean to four times it; and what shades mean. */
void ctl_shade(const struct ctl *c, double over_mean);
void ctl_shade_legend(const struct ctl *c);
size_t ctl_terminal_width(void);
/* `experts --history`: sends the request with as many windows as were asked for. */
int ctl_load_history(struct ctl *c, Ballast__ExpertsRequest *request);

int ctl_submit(struct ctl *c);
int ctl_jobs(struct ctl *c);
int ctl_queue(struct ctl *c);
int ctl_job_show(struct ctl *c);
int ctl_job_cancel(struct ctl *c);
int ctl_job_hold(struct ctl *c);
int ctl_job_release(struct ctl *c);
int ctl_job_pause(struct ctl *c);
int ctl_job_resume(struct ctl *c);
int ctl_job_requeue(struct ctl *c);
int ctl_job_set(struct ctl *c);
int ctl_wait(struct ctl *c);
int ctl_logs(struct ctl *c);
int ctl_events(struct ctl *c);
int ctl_metrics(struct ctl *c);
int ctl_workers(struct ctl *c);
int ctl_nodes(struct ctl *c);
int ctl_node_drain(struct ctl *c);
int ctl_node_resume(struct ctl *c);
int ctl_worker_show(struct ctl *c);
int ctl_worker_drain(struct ctl *c);
int ctl_worker_resume(struct ctl *c);
int ctl_adapt(struct ctl *c);
int ctl_balance(struct ctl *c);
int ctl_data(struct ctl *c);
int ctl_experts(struct ctl *c);
int ctl_placement(struct ctl *c);
int ctl_rebalance_plan(struct ctl *c);
int ctl_rebalance_apply(struct ctl *c);
int ctl_rebalance_history(struct ctl *c);
int ctl_rebalance_auto(struct ctl *c);
int ctl_db_query(struct ctl *c);
int ctl_db_backup(struct ctl *c);
int ctl_top(struct ctl *c);
int ctl_ping(struct ctl *c);
int ctl_doctor(struct ctl *c);
int ctl_keygen(struct ctl *c);
int ctl_version(struct ctl *c);
int ctl_help(struct ctl *c);
int ctl_config_show(struct ctl *c);
int ctl_config_contexts(struct ctl *c);
int ctl_completion(struct ctl *c);
/* What the shells ask for, and the pages of the manual: no commands for people. */
int ctl_complete(struct ctl *c, char **words, size_t n_words);
int ctl_man(const char *folder, char **programs, size_t n_programs);
int ctl_check_config(struct ctl *c);

#endif
