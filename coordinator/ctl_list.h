/* ctl_list.h - lists: one table of columns, by which a list is printed, sorted, filtered and
 * completed
 *
 * A column's name in options is its head in lower case, up to a bracket: NODES(A/I) is nodes. */
#ifndef COORDINATOR_CTL_LIST_H
#define COORDINATOR_CTL_LIST_H

#include "coordinator/ctl.h"

enum list_kind {
    LIST_TEXT,
    LIST_NUMBER,
    LIST_INSTANT, /* ns, UTC */
    LIST_SPAN,    /* seconds */
    LIST_BYTES,
};
enum list_shown {
    LIST_ALWAYS,
    LIST_WIDE,   /* with -o wide */
    LIST_IF_ANY, /* where a row has more than 0 there; with -o wide always */
    LIST_ASKED,  /* only by its name */
    LIST_PHASES, /* with --phases these alone, behind the first column */
};

/* What a row has in a column. */
struct list_value {
    const char *text;  /* as printed, "" for what is not known; lives until list_fini */
    double      number; /* by which it is compared, but for LIST_TEXT; NaN: not known */
    const char *color;
};

struct list_column {
    const char *head;
    enum list_kind  kind;
    enum list_shown shown;
    struct list_value (*value)(const void *row, struct arena *a);
    int  width;                      /* at least, where rows come one by one */
    bool is_known_there;             /* the coordinator, too, can filter and sort by it */
    const char *(*word)(size_t i);   /* the i-th of the words it may be, NULL after the last */
};

struct ctl_list {
    const char *kind, *rows;         /* "JobList", "jobs" */
    const struct list_column *columns;
    size_t      n_columns;
    const char *name;                /* columns: what -o name prints, */
    const char *since, *user;        /* what --since and --user look at, or NULL; */
    const char *order;               /* by which it is sorted unless told otherwise, or NULL */
    uint64_t    count;               /* rows that are shown unless told otherwise; 0: all */
    struct json *(*json)(const void *row);
};

extern const struct ctl_list ctl_job_list, ctl_queue_list, ctl_worker_list, ctl_node_list,
    ctl_event_list, ctl_step_list, ctl_layer_list, ctl_history_list, ctl_read_list;

/* ---- what was asked for: ctl_terms.c --------------------------------------------------------- */

struct list_term {
    const struct list_column *column;
    Ballast__ListOp op;
    const char *texts[LIST_TERMS_MAX];
    double      numbers[LIST_TERMS_MAX];
    size_t      n_values;
};

struct list_query {
    const struct ctl_list *list;
    struct list_term terms[LIST_TERMS_MAX];
    size_t   n_terms;
    struct {
        const struct list_column *column;
        bool descending;
    } order[LIST_TERMS_MAX];
    size_t   n_order;
    bool     is_ordered;   /* by the command line */
    const struct list_column *columns[64]; /* by the command line; none: those that are shown */
    size_t   n_columns;
    uint64_t count;        /* UINT64_MAX: all */
    struct arena arena;    /* what was asked for, and a command's own */
    struct arena values;   /* of the rows that are looked at */
};

/* Reads --filter, --since, --user, --sort, --count and -o. Prints what is wrong and returns
 * CTL_USAGE; else CTL_OK, and q is ended with list_fini. May ask the coordinator who we are. */
int  list_begin(struct ctl *c, const struct ctl_list *list, struct list_query *q);
void list_fini(struct list_query *q);

/* What the coordinator can do of it, for a request; true if that is all. */
bool list_tell_terms(struct list_query *q, size_t *out_n, Ballast__ListTerm ***out);
bool list_tell_order(struct list_query *q, size_t *out_n, Ballast__ListOrder ***out);

/* "submit" of SUBMIT. */
void list_column_name(const struct list_column *column, char out[32]);
const struct list_column *list_column_find(const struct ctl_list *list, const char *name);
/* "jobid, name, user" */
char *list_column_names(const struct ctl_list *list);

/* 2h (ago), 2026-11-29, 2026-11-29T13:49[:53] (UTC). */
bool list_time(const char *text, int64_t *out_ns);

/* ---- rows: ctl_list.c ------------------------------------------------------------------------ */

bool list_matches(struct list_query *q, const void *row);
/* Leaves the rows that match, in order, at most count of them: the first of an order that was
 * asked for, else the last. Returns how many; *out_cut says that some were left out for count. */
size_t list_choose(struct list_query *q, const void **rows, size_t n, bool *out_cut);
/* Prints rows in the form asked for, and to stderr that there are more. */
void list_show(const struct ctl *c, struct list_query *q, const void *const *rows, size_t n,
               uint64_t seq, bool truncated);
/* The table alone: of lines that come one by one, with the widths of the columns. */
void list_print(const struct ctl *c, struct list_query *q, const void *const *rows, size_t n,
                bool with_header);
/* One thing: as a row, or as one object. */
int  list_show_one(struct ctl *c, const struct ctl_list *list, const char *kind, const void *row,
                   uint64_t seq);

/* ---- values ---------------------------------------------------------------------------------- */

struct list_value list_text(const char *text);
struct list_value list_count(struct arena *a, uint64_t n);
struct list_value list_real(struct arena *a, const char *format, double x);
struct list_value list_instant(struct arena *a, int64_t ns); /* 0: not known */
struct list_value list_span(struct arena *a, int64_t from_ns, int64_t to_ns);
struct list_value list_bytes(struct arena *a, uint64_t n_bytes); /* 0: not known */

#endif
