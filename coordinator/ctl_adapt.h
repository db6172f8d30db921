/* ctl_adapt.h - what `ballast adapt` found out about a model, and the ways it is told
 *
 * ctl_adapt reads and searches, ctl_adapt_engine asks what the engine of today takes, _json and
 * _print tell, _report and _files write the folder. */
#ifndef COORDINATOR_CTL_ADAPT_H
#define COORDINATOR_CTL_ADAPT_H

#include "common/json.h"
#include "common/model_spec.h"
#include "common/outline_check.h"
#include "coordinator/ctl.h"
#include "coordinator/operators.h"
#include "coordinator/strategy.h"

struct adapt_fewest {
    enum base_precision base;
    uint32_t world; /* 0: no number of GPUs up to the largest that was tried */
    struct strategy_plan plan;
};

struct adapt {
    const struct ctl *c;
    char   *model_dir, *name; /* absolute; fit for a job's name */
    struct outline *outline;
    struct json *keys_not_read; /* texts: keys that no reader asks for; NULL: it does not run */
    struct outline_counts counts;  /* of the outline; total and active of the tensors where known */
    struct tensor_list tensors;
    struct outline_check check;
    bool     knows_mtp, knows_vision;
    uint64_t mtp, vision;

    struct cluster  cluster;
    struct costs    costs;
    struct job_shape job;
    struct job_shape job_today; /* the same, with a sequence for each rank where it takes that */
    struct strategy *all;   /* with every degree */
    struct strategy *today; /* with what the engine runs */
    struct neighbour neighbours[NEIGHBOURS_MAX];
    uint32_t n_neighbours;
    struct adapt_fewest fewest[BASE_PRECISIONS];
    uint32_t n_fewest;

    struct strategy_limits engine;
    bool     runs;          /* the model itself is one that the engine trains */
    char     why_not[1024]; /* else */
    struct model_spec *spec; /* if it runs */
    const struct adapt_validation *validation; /* NULL: was not asked for */
    bool     today_fits;    /* by the engine's own account of memory */
    uint64_t today_bytes;   /* a rank of the job file's plan by that account; 0: not known */
    uint32_t fewest_today;  /* devices that would hold one, where none fits; 0: no number does */
    uint32_t today_plan;    /* index in today->plans */
};

/* What the engine takes of a plan: each key is put into a job and checked as a job file is. */
struct strategy_limits adapt_engine(void);
/* Whether it runs the plan, and if not the keys that it lacks, as in "train.precision bf16". */
bool adapt_engine_runs(const struct adapt *a, const struct plan_choice *p, char out_lacks[256]);

/* Fills today_fits and today_plan. */
void adapt_choose_today(struct adapt *a);
/* Fills fewest_today: the first number that holds a plan within these limits. */
void adapt_find_fewest_today(struct adapt *a, const struct strategy_limits *today);
/* The plan of the job file: the fastest that runs today, else the one of least memory. */
const struct strategy_plan *adapt_job_plan(const struct adapt *a);
/* A job of a plan. Gives, ended with adapt_job_free. */
Ballast__JobSpec *adapt_job(const struct adapt *a, const struct strategy_plan *p);
void adapt_job_free(Ballast__JobSpec *spec);

struct json *adapt_json(const struct adapt *a);
void adapt_print(const struct adapt *a);
/* Of plans that differ only in how the weights are cut the fastest stands for all in tables: is
 * plan i another cut of one before? */
bool adapt_is_variant(const struct adapt *a, uint32_t i);
/* What a rank of the cluster computes on: "GPUs" or "CPU ranks". */
const char *adapt_devices(const struct adapt *a);
/* Do the folder's tensors differ from what config.json implies, so that a job would refuse them? */
bool adapt_tensors_refused(const struct adapt *a);
/* The keys of a config.json that are not in asked, a set of keys (json_note_keys), and are none of
 * those that every configuration has for other programs. An array of texts, for json_destroy. */
struct json *adapt_keys_not_read(const char *path, const struct json *asked);
/* Why nothing fits: "the least is 150.0 GB a GPU, 9.0 GB more than it has". */
void adapt_shortfall(const struct adapt *a, char out[160]);
/* Whether a plan fits the cluster; of a model that the engine trains, one that it runs. Else a
 * line: what does not, how much is missing, where it would. */
#define ADAPT_TEXT_MAX 640u
bool adapt_fits(const struct adapt *a, char out_why_not[ADAPT_TEXT_MAX]);

/* Markdown. */
void adapt_report(const struct adapt *a, FILE *out);
void adapt_missing(const struct adapt *a, FILE *out);

/* ---- checks of a shrunk model, ballast adapt --validate */

enum shrink_size { SHRINK_SMALL, SHRINK_WIDE }; /* for checks; for the clock */

/* Writes the config.json of a small model of the same structure into folder. */
int adapt_shrink(const struct adapt *a, enum shrink_size size, const char *folder,
                 struct err *err);

struct adapt_validation {
    struct json *checks;      /* [{check, passed, measured, limit, where}] */
    struct json *not_checked; /* texts */
    bool passed;              /* all that was checked; there was something to check */
};

/* Runs ballast-worker, which lies beside this program, on shrunk models. What could not be run is a
 * text of not_checked; an error is one of this machine. Gives, ended with adapt_validation_fini. */
int  adapt_validate(const struct adapt *a, struct adapt_validation *out, struct err *err);
void adapt_validation_fini(struct adapt_validation *v);

/* Check i; the texts live as long as v. NAN: not measured. */
struct adapt_check {
    const char *name, *where;
    bool   passed;
    double measured, limit;
};
struct adapt_check adapt_validation_check(const struct adapt_validation *v, size_t i);

void adapt_validation_print(const struct adapt *a, const struct adapt_validation *v);

void adapt_launch_local(const struct adapt *a, FILE *out);
void adapt_launch_ssh(const struct adapt *a, FILE *out);
void adapt_launch_slurm(const struct adapt *a, FILE *out);
void adapt_launch_k8s(const struct adapt *a, FILE *out);

/* -EEXIST where adapt_files would write over other content. */
int adapt_files_check(const struct adapt *a, const char *folder, struct err *err);
/* Writes all files into folder, which is made if it is not there. */
int adapt_files(const struct adapt *a, const char *folder, struct err *err);

#endif
