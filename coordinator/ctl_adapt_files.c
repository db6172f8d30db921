/* ctl_adapt_files.c - the folder that adapt writes: job, cluster, launch files, reports */
#include "coordinator/ctl_adapt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/file.h"
#include "common/folder.h"
#include "proto/job_spec.h"

/* ---- job and cluster ------------------------------------------------------------------------ */

static void write_job(const struct adapt *a, FILE *f)
{
    Ballast__JobSpec *spec = adapt_job(a, adapt_job_plan(a));
    fprintf(f, "# Written by ballast adapt; see REPORT.md. Put tokens (u32) into "
            "data/train.bin, or change data.\n");
    if (!a->runs)
        fprintf(f, "# The engine does not train this model yet; see operators-missing.md.\n");
    else if (!a->today_fits)
        fprintf(f, "# It does not fit this cluster; see REPORT.md.\n");
    fields_print_yaml(&job_spec_table, spec, f);
    adapt_job_free(spec);
}

static void write_cluster(const struct adapt *a, FILE *f)
{
    fprintf(f, "# The machines that the plan is for: ballast adapt MODEL --cluster cluster.yaml\n");
    fields_print_yaml(&cluster_table, &a->cluster, f);
}

/* ---- the folder ----------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*write)(const struct adapt *, FILE *);
    mode_t mode;
} files[] = {
    {"job.yaml", write_job, 0644}, {"cluster.yaml", write_cluster, 0644},
    {"launch-local.sh", adapt_launch_local, 0755}, {"launch-ssh.sh", adapt_launch_ssh, 0755},
    {"launch-slurm.sbatch", adapt_launch_slurm, 0755},
    {"launch-k8s.yaml", adapt_launch_k8s, 0644}, {"operators-missing.md", adapt_missing, 0644},
    {"REPORT.md", adapt_report, 0644},
};
#define N_FILES (sizeof files / sizeof *files)

struct content {
    char  *path, *text;
    size_t n_bytes;
};

static struct content make_content(const struct adapt *a, const char *folder, size_t file)
{
    struct content c = {.path = xasprintf("%s/%s", folder, files[file].name)};
    FILE *f = open_memstream(&c.text, &c.n_bytes);
    files[file].write(a, f);
    fclose(f);
    return c;
}

static void content_fini(struct content *c)
{
    free(c->path);
    free(c->text);
}

/* Somebody may have worked on what is there. What would be the same again is not in the way. */
static int check_nothing_is_lost(const struct content *c, struct err *err)
{
    struct err why = {0};
    FILE *f = file_stream(c->path, &why);
    if (!f && (why.code == -ENOENT || why.code == -ENOTDIR))
        return 0;
    char *there = xcalloc(1, c->n_bytes + 1);
    size_t n = f ? fread(there, 1, c->n_bytes + 1, f) : 0;
    bool is_same = f && !ferror(f) && n == c->n_bytes && !memcmp(there, c->text, n);
    free(there);
    if (f)
        fclose(f);
    return is_same ? 0 : err_set(err, -EEXIST, "%s is there already, with other content; --force "
                                 "writes over it", c->path);
}

int adapt_files_check(const struct adapt *a, const char *folder, struct err *err)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < N_FILES; i++) {
        struct content c = make_content(a, folder, i);
        rc = check_nothing_is_lost(&c, err);
        content_fini(&c);
    }
    return rc;
}

static int write_file(const struct content *c, mode_t mode, struct err *err)
{
    FILE *f = file_create(c->path, err);
    int rc = 0;
    if (!f)
        return err->code;
    if (fwrite(c->text, 1, c->n_bytes, f) != c->n_bytes || fchmod(fileno(f), mode) < 0)
        rc = err_set(err, -errno, "%s: %s", c->path, strerror(errno));
    if (fclose(f) != 0 && rc == 0)
        rc = err_set(err, -errno, "%s: %s", c->path, strerror(errno));
    return rc;
}

int adapt_files(const struct adapt *a, const char *folder, struct err *err)
{
    int rc = folder_make(folder, 0777, err);
    for (size_t i = 0; rc == 0 && i < N_FILES; i++) {
        struct content c = make_content(a, folder, i);
        rc = write_file(&c, files[i].mode, err);
        content_fini(&c);
    }
    return rc;
}
