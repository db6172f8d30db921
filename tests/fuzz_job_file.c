/* fuzz_job_file.c - any bytes as a job file: refused with lines, or read, and then stable
 *
 * What was accepted must pass the check that a message from the wire must pass, and its printed
 * form must read back to the same text. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "proto/job_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void check_accepted(const Ballast__JobSpec *spec)
{
    struct problems problems = {0};
    Ballast__JobSpec *back = NULL;
    must(job_spec_check(spec, &problems) == 0);
    char *text = job_file_text(spec);
    must(job_file_read_text("again", "/", text, strlen(text), &back, &problems) == 0);
    char *again = job_file_text(back);
    must(!strcmp(text, again));
    free(text);
    free(again);
    job_file_free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    Ballast__JobSpec *spec = NULL;
    struct problems problems = {0};
    int rc = job_file_read_text("fuzz", "/", (const char *)bytes, n_bytes, &spec, &problems);
    must((rc < 0) == (problems.n_total > 0));
    must((rc < 0) == (spec == NULL));
    for (size_t i = 0; i < problems.n; i++) /* one line each, safe on a terminal */
        for (const char *c = problems.items[i].text; *c; c++)
            must((unsigned char)*c >= ' ' && *c != 0x7f);
    if (spec)
        check_accepted(spec);
    problems_fini(&problems);
    job_file_free(spec);
    return 0;
}
