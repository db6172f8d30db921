/* job_file.h - a job file (YAML) as a Ballast__JobSpec, and back */
#ifndef PROTO_JOB_FILE_H
#define PROTO_JOB_FILE_H

#include "common/conf.h"
#include "proto/job_spec.h"

/* Where the keys were written: "job.yaml:3", "--set". All zero knows nothing. */
struct job_file_places {
    char **where; /* per row of job_spec_table; NULL: the default stands */
    char  *file;
};
/* The file's name for a key that was not written. Lives as long as p. */
const char *job_file_place(const struct job_file_places *p, const char *key);
void job_file_places_fini(struct job_file_places *p);

/* Reads and checks file ("-": stdin), then the n_sets assignments "key=value" over it. Paths in
 * *out are absolute. Gives *out, ended with job_file_free (ballast__job_spec__free_unpacked(x,
 * NULL) is the same), and *out_places (may be NULL) for what is found wrong later, ended with
 * job_file_places_fini. On failure returns -EINVAL and problems (the caller's, all zero before,
 * ended with problems_fini) holds one line each with file, line, key and what is allowed. */
int  job_file_read(const char *file, const char *const *sets, size_t n_sets,
                   Ballast__JobSpec **out, struct job_file_places *out_places,
                   struct problems *problems);
/* The same of text; folder: what relative paths are taken against. */
int  job_file_read_text(const char *name, const char *folder, const char *text, size_t n_bytes,
                        Ballast__JobSpec **out, struct problems *problems);
void job_file_free(Ballast__JobSpec *spec);

/* Every key with its value, as YAML that job_file_read reads back to the same spec. Gives. */
char *job_file_text(const Ballast__JobSpec *spec);

/* docs/job-file.md. Gives. */
char *job_file_explain(void);

#endif
