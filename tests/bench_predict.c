/* bench_predict.c - a step's time beside what the time model says of it, on a core of this machine
 *
 *   ballast-worker bench --cluster --threads 1 --out cluster.yaml
 *   bench_predict cluster.yaml ballast-worker MODEL_DIR...
 *
 * Both are of a thread's own clock, of 4 sequences of 256 tokens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/conf.h"
#include "common/mem.h"
#include "coordinator/strategy.h"

#define SEQUENCES 4
#define LENGTH    256
#define TRIES     3 /* the best one counts */

/* The worker's program says it in its last line; 0: it did not. */
static double measure(const char *worker, const char *model)
{
    char *command = xasprintf("%s validate %s --self --speed --json", worker, model);
    char line[4096];
    double best = 0, s;
    for (int i = 0; i < TRIES; i++) {
        FILE *f = popen(command, "r");
        while (f && fgets(line, sizeof line, f)) {
            const char *at = strstr(line, "\"step_seconds\":");
            if (at && sscanf(at, "\"step_seconds\": %lf", &s) == 1 && (best == 0 || s < best))
                best = s;
        }
        if (f)
            pclose(f);
    }
    free(command);
    return best;
}

int main(int argc, char **argv)
{
    struct cluster l;
    struct err err = {0};
    if (argc < 4) {
        fprintf(stderr, "usage: bench_predict CLUSTER.yaml WORKER_PROGRAM MODEL_DIR...\n");
        return 2;
    }
    if (conf_read(argv[1], &cluster_table, &l, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    printf("%12s %12s %8s  model\n", "measured ms", "predicted", "ratio");
    for (int i = 3; i < argc; i++) {
        struct plan_time t;
        double s = measure(argv[2], argv[i]);
        if (plan_time_alone(argv[i], &l, SEQUENCES, LENGTH, &t, &err) < 0)
            fprintf(stderr, "%s\n", err.text);
        else
            printf("%12.1f %12.1f %8.2f  %s\n", 1e3 * s, 1e3 * t.total, t.total / s, argv[i]);
    }
    fields_fini(&cluster_table, &l);
    return 0;
}
